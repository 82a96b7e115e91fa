# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How facts become known: nodes, versions, daemons, tokens; and that a failing API server never stops the reading."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.admission import samples
from verl_gpumonitor_operator.admission import kubeapi, preflight
from verl_gpumonitor_operator.admission.facts import Cluster, GpuLayout, Namespace, RuntimeClass, Version
from verl_gpumonitor_operator.admission.kubeapi import Address, ApiError, KubeApi
from verl_gpumonitor_operator.admission.objects import NodeObject
from verl_gpumonitor_operator.admission.preflight import Preflight, PreflightError
from verl_gpumonitor_operator.settings import Settings, Visibility

from . import fake_api
from .fake_api import NODE, FakeApi

WORKER = samples.ray_worker()


def node(name: str, *, kubelet: str = "v1.36.0", allocatable: Mapping[str, str] | None = None, **spec: Any) -> Any:
    made = copy.deepcopy(NODE)
    made["metadata"]["name"] = name
    made["spec"] = spec
    made["status"]["nodeInfo"]["kubeletVersion"] = kubelet
    made["status"]["allocatable"].update(allocatable or {})
    return made


@asynccontextmanager
async def facts_of(
    fake: FakeApi, settings: Settings = samples.SETTINGS, monotonic: Callable[[], float] = time.monotonic
) -> AsyncIterator[Preflight]:
    """Facts that are kept fresh while the block runs; it begins when they were read once."""

    def take(_: Mapping[str, bytes]) -> bool:
        return True

    async with KubeApi(Address(url=fake.url)) as api:
        known = Preflight(api, settings, on_certificates=take, monotonic=monotonic)
        task = asyncio.create_task(known.run())
        try:
            async with asyncio.timeout(10):
                while not known.is_ready:  # noqa: ASYNC110 - it offers a state, and no event
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            yield known
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def gathered(fake: FakeApi, pod: samples.Pod, settings: Settings = samples.SETTINGS) -> tuple[Namespace, Cluster]:
    async with facts_of(fake, settings) as known:
        return await known.gather(pod, "team-a")


@pytest.mark.parametrize(
    ("nodes", "oldest", "name"),
    [
        pytest.param([node("a"), node("b", kubelet="v1.28.9"), node("c")], Version(1, 28), "b", id="the oldest counts"),
        pytest.param([node("a"), node("b", kubelet="unknown")], None, "b", id="one that nobody understands is oldest"),
        pytest.param([], None, "", id="no node"),
        pytest.param([node("a", kubelet="v1.28.0", unschedulable=True)], Version(1, 28), "a", id="cordoned ones too"),
    ],
)
async def test_the_oldest_kubelet(nodes: list[Any], oldest: Version | None, name: str) -> None:
    async with fake_api.running() as fake:
        fake.objects["/api/v1/nodes"] = nodes
        _, cluster = await gathered(fake, WORKER)
        assert (cluster.oldest_kubelet, cluster.oldest_node) == (oldest, name)


async def test_virtual_and_windows_nodes_do_not_count() -> None:
    virtual, windows = node("v", kubelet="v1.20.0"), node("w", kubelet="v1.20.0")
    virtual["metadata"]["labels"]["type"] = "virtual-kubelet"
    windows["status"]["nodeInfo"]["operatingSystem"] = "windows"
    async with fake_api.running() as fake:
        fake.objects["/api/v1/nodes"] = [virtual, windows, node("a")]
        _, cluster = await gathered(fake, WORKER)
        assert cluster.oldest_kubelet == Version(1, 36)
        assert [each.name for each in cluster.nodes] == ["a"]


async def test_a_thousand_nodes_alike_become_one_with_the_least_of_them() -> None:
    nodes = [node(f"n{i}", allocatable={"memory": f"{1_000_000_000 + i % 7}Ki"}) for i in range(100)]
    async with fake_api.running() as fake:
        fake.objects["/api/v1/nodes"] = [*nodes, node("small", allocatable={"cpu": "4"})]
        _, cluster = await gathered(fake, WORKER)
        assert sorted(each.capacity["cpu"] for each in cluster.nodes) == [4 * 10**9, 95_900 * 10**6]
        assert min(each.capacity["memory"] for each in cluster.nodes) <= 1_000_000_000 * 1024 * 10**9


async def test_daemons_take_their_part_of_a_node() -> None:
    template = {"spec": {"containers": [{"resources": {"requests": {"cpu": "900m"}}}]}}
    async with fake_api.running() as fake:
        fake.objects["/apis/apps/v1/daemonsets"] = [
            {"spec": {"template": template}, "status": {"desiredNumberScheduled": 1}}
        ]
        _, cluster = await gathered(fake, samples.best_effort(WORKER))
        assert cluster.nodes[0].capacity["cpu"] == 95 * 10**9


async def test_pods_of_a_small_cluster_are_read_for_a_guaranteed_pod() -> None:
    gpu = {"spec": {"containers": [{"resources": {"requests": {"cpu": "10", "nvidia.com/gpu": "1"}}}]}}
    other = {"spec": {"containers": [{"resources": {"requests": {"cpu": "900m"}}}]}}
    async with fake_api.running() as fake:
        fake.objects["/api/v1/pods"] = [gpu, other, gpu]
        _, cluster = await gathered(fake, WORKER)
        assert cluster.nodes[0].capacity["cpu"] == 95 * 10**9, "what has no GPU stays"
        assert cluster.nodes[0].free is not None
        assert cluster.nodes[0].free["cpu"] == 75 * 10**9
        _, cluster = await gathered(fake, samples.best_effort(WORKER))
        assert cluster.nodes[0].free is None


async def test_a_pod_that_is_guaranteed_but_for_the_sidecar_counts_as_such() -> None:
    injected = samples.with_container(WORKER, {"name": "gpumonitor", "restartPolicy": "Always"}, init=True)
    injected = samples.with_annotations(injected, {"gpumonitor.dev/injected": "0.1.0"})
    async with fake_api.running() as fake:
        _, cluster = await gathered(fake, injected)
        assert cluster.nodes[0].free is not None


async def test_without_the_right_to_read_pods_and_daemons_capacity_decides() -> None:
    async with fake_api.running() as fake:
        fake.refused |= {"/api/v1/pods": 403, "/apis/apps/v1/daemonsets": 403}
        _, cluster = await gathered(fake, WORKER)
        assert cluster.nodes[0].free is None
        assert cluster.nodes[0].capacity["cpu"] == 95_900 * 10**6


@pytest.mark.parametrize("address", ["", "None", None])
async def test_a_service_without_address_means_no_controller(address: str | None) -> None:
    async with fake_api.running() as fake:
        path = "/api/v1/namespaces/gpumonitor-system/services/gpumonitor-controller"
        fake.objects[path] = {"spec": {"clusterIP": address}}
        _, cluster = await gathered(fake, WORKER)
        assert cluster.controller_address is None


@pytest.mark.parametrize("exists", [True, False])
async def test_the_runtime_class_is_looked_up_when_it_matters(exists: bool) -> None:
    settings = samples.injection(visibility=Visibility.RUNTIME_CLASS)
    async with fake_api.running() as fake:
        if exists:
            fake.objects["/apis/node.k8s.io/v1/runtimeclasses/nvidia"] = {"metadata": {"name": "nvidia"}}
        _, cluster = await gathered(fake, WORKER, settings)
        assert (cluster.runtime_class is not None) is exists


async def test_what_a_runtime_class_does_to_a_pod_is_read_with_each_pod() -> None:
    settings = samples.injection(visibility=Visibility.RUNTIME_CLASS)
    path = "/apis/node.k8s.io/v1/runtimeclasses/nvidia"
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists"}
    async with fake_api.running() as fake, facts_of(fake, settings) as known:
        fake.objects[path] = {"scheduling": {"nodeSelector": {"gpu": "yes"}, "tolerations": [toleration]}}
        _, cluster = await known.gather(WORKER, "team-a")
        assert cluster.runtime_class == RuntimeClass(node_selector={"gpu": "yes"}, tolerations=(toleration,))
        fake.objects[path] = {"scheduling": None, "overhead": {"podFixed": {"cpu": "250m"}}}
        _, cluster = await known.gather(WORKER, "team-a")
        assert cluster.runtime_class == RuntimeClass(overhead=samples.amounts(cpu="250m"))
        del fake.objects[path]
        _, cluster = await known.gather(WORKER, "team-a")
        assert cluster.runtime_class is None


async def test_a_runtime_class_that_cannot_be_read_is_not_set() -> None:
    settings = samples.injection(visibility=Visibility.RUNTIME_CLASS)
    async with fake_api.running() as fake, facts_of(fake, settings) as known:
        fake.refused["/apis/node.k8s.io/v1/runtimeclasses/nvidia"] = 500
        with pytest.raises(PreflightError, match="runtimeclasses/nvidia: 500"):
            await known.gather(WORKER, "team-a")


async def test_how_nodes_offer_their_gpus_is_known() -> None:
    async with fake_api.running() as fake:
        shared = node("b", allocatable={"nvidia.com/gpu": "16"})
        shared["metadata"]["labels"]["nvidia.com/gpu.replicas"] = "4"
        fake.objects["/api/v1/nodes"] = [node("a"), shared, node("c", allocatable={"nvidia.com/gpu": "0"})]
        _, cluster = await gathered(fake, WORKER)
        assert cluster.gpu_layouts == {GpuLayout(advertised=8), GpuLayout(advertised=16, physical=4)}


async def test_limits_of_the_namespace_are_read() -> None:
    async with fake_api.running() as fake:
        fake.objects["/api/v1/namespaces/team-a/limitranges"] = [
            {"spec": {"limits": [{"type": "Container", "min": {"cpu": "50m"}, "maxLimitRequestRatio": {"cpu": "2"}}]}}
        ]
        fake.objects["/api/v1/namespaces/team-a/resourcequotas"] = [
            {
                "metadata": {"name": "q"},
                "spec": {"hard": {"cpu": "4"}, "scopes": ["NotBestEffort"], "scopeSelector": None},
                "status": {"used": {"cpu": "1"}},
            }
        ]
        namespace, _ = await gathered(fake, WORKER)
        assert namespace.limits[0].min == samples.amounts(cpu="50m")
        assert namespace.quotas[0].used == samples.amounts(cpu="1")
        assert namespace.quotas[0].scopes[0].name == "NotBestEffort"


async def test_a_failing_api_server_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "NODES_SECONDS", 0.05)
    async with fake_api.running() as fake, facts_of(fake) as known:
        fake.refused["/api/v1/nodes"] = 500
        fake.objects["/version"] = {"gitVersion": "nonsense"}
        await asyncio.sleep(0.3)
        _, cluster = await known.gather(WORKER, "team-a")
        assert cluster.oldest_kubelet == Version(1, 36)
        fake.refused.clear()
        fake.objects |= {"/version": {"gitVersion": "v1.37.0"}, "/api/v1/nodes": [node("a", kubelet="v1.37.1")]}
        await asyncio.sleep(0.3)
        _, cluster = await known.gather(WORKER, "team-a")
        assert cluster.oldest_kubelet == Version(1, 37)


async def test_before_the_first_reading_nothing_is_known() -> None:
    async with fake_api.running() as fake, KubeApi(Address(url=fake.url)) as api:
        known = Preflight(api, samples.SETTINGS, on_certificates=lambda _: True)
        with pytest.raises(PreflightError):
            await known.gather(WORKER, "team-a")


async def test_a_broken_breaker_state_is_no_open_breaker() -> None:
    async with fake_api.running() as fake:
        fake.objects[fake.breaker_path] = {"data": {"state": "{open"}}
        async with facts_of(fake) as known:
            assert known.paused is None


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pause(known: Preflight) -> str:
    """Why injection rests now; empty where it does not."""
    return known.paused or ""


@pytest.mark.parametrize(
    ("lease_seconds", "grace"), [pytest.param(15.0, 60.0, id="as shipped"), pytest.param(30.0, 120.0, id="long leases")]
)
async def test_the_last_renewal_counts_for_a_grace(
    monkeypatch: pytest.MonkeyPatch, lease_seconds: float, grace: float
) -> None:
    monkeypatch.setattr(preflight, "GUARD_SECONDS", 0.02)
    controller = msgspec.structs.replace(samples.SETTINGS.controller, lease_seconds=lease_seconds)
    settings = msgspec.structs.replace(samples.SETTINGS, controller=controller)
    clock = Clock()
    async with fake_api.running() as fake, facts_of(fake, settings, clock) as known:
        fake.controller_is_away = True
        await asyncio.sleep(0.2)
        clock.now += grace
        await asyncio.sleep(0.2)
        assert pause(known) == ""
        clock.now += 0.1
        assert "not renewed" in pause(known)
        fake.controller_is_away = False
        await asyncio.sleep(0.2)
        assert pause(known) == ""


@pytest.mark.parametrize("status", [403, 500])
async def test_a_lease_that_cannot_be_read_is_as_it_was_for_a_grace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    monkeypatch.setattr(preflight, "GUARD_SECONDS", 0.02)
    monkeypatch.setattr(preflight, "UNTIL_THERE_SECONDS", 0.02)
    clock = Clock()
    async with fake_api.running() as fake, facts_of(fake, monotonic=clock) as known:
        fake.refused[fake.lease_path] = status
        await asyncio.sleep(0.2)
        clock.now += 59.0
        assert pause(known) == ""
        clock.now += 2.0
        await asyncio.sleep(0.2)
        assert "could not be read for 60 s" in pause(known)
        fake.refused.clear()
        await asyncio.sleep(0.2)
        assert pause(known) == ""
    assert [record.getMessage() for record in caplog.records].count("injection rests") == 1


async def test_a_lease_that_was_never_read_means_no_injection() -> None:
    async with fake_api.running() as fake:
        fake.refused[fake.lease_path] = 403
        async with facts_of(fake) as known:
            assert "could not be read yet" in pause(known)


async def test_the_breaker_speaks_before_the_lease() -> None:
    async with fake_api.running() as fake:
        fake.objects.pop(fake.lease_path)
        fake.objects[fake.breaker_path] = {"data": {"state": '{"open":true,"reason":"cannot be pulled"}'}}
        async with facts_of(fake) as known:
            assert known.paused == "cannot be pulled"


async def test_the_token_is_read_from_its_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with fake_api.running() as fake, KubeApi(Address(url=fake.url, token_file=token)) as api:
        await api.get_bytes("/version")
        token.write_text("second")
        await api.get_bytes("/version")
        monkeypatch.setattr(kubeapi, "TOKEN_SECONDS", -1.0)
        await api.get_bytes("/version")
        assert fake.tokens == {"Bearer first", "Bearer second"}


async def test_lists_are_read_page_by_page() -> None:
    async with fake_api.running() as fake, KubeApi(Address(url=fake.url)) as api:
        fake.objects["/api/v1/nodes"] = [node(f"n{i}") for i in range(5)]
        pages = [len(page) async for page in api.pages("/api/v1/nodes", NodeObject)]
        assert pages == [2, 2, 1]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://nowhere.invalid"])
async def test_no_answer_is_an_api_error(url: str) -> None:
    async with KubeApi(Address(url=url), timeout_seconds=0.5) as api:
        with pytest.raises(ApiError) as caught:
            await api.get_bytes("/version")
        assert caught.value.status is None


async def test_an_answer_of_another_form_is_an_api_error() -> None:
    async with fake_api.running() as fake, KubeApi(Address(url=fake.url)) as api:
        fake.objects["/api/v1/nodes/x"] = {"metadata": 7}
        with pytest.raises(ApiError):
            await api.get("/api/v1/nodes/x", NodeObject)


def test_the_address_inside_a_cluster() -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert kubeapi.in_cluster(environment).url == "https://[fd00::1]:6443"
    with pytest.raises(ApiError):
        kubeapi.in_cluster({})
