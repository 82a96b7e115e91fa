# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The webhook over TLS: whatever comes in, the pod is admitted, and in time."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import jsonpatch as independent_jsonpatch
import pytest
from aiohttp import web

from tests.unit.admission import samples
from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.admission import attendance, mutation, preflight, refusals
from verl_gpumonitor_operator.admission import server as server_module
from verl_gpumonitor_operator.admission.server import Server
from verl_gpumonitor_operator.listening import Pages, ServerLimits

from . import fake_api
from .fake_api import FakeApi
from .serving import SERVER_NAME, Client, bundle_of, patch_of, plain, review, serving

UID = "705ab4f5-6393-11e8-b7cc-42010a800002"
WORKER = samples.ray_worker()


def annotation(response: dict[str, Any]) -> str:
    """Skip reason that an answer writes; empty if it writes none."""
    for operation in patch_of(response):
        if "skip-reason" in operation["path"]:
            return str(operation["value"])
    return ""


def is_injected(response: dict[str, Any]) -> bool:
    return any("initContainers" in operation["path"] for operation in patch_of(response))


DEEP = b'{"request":{"uid":"%s","object":' % UID.encode() + b"[" * 200_000


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="an empty body"),
        pytest.param(b"nonsense", id="no JSON"),
        pytest.param(b"\x00\xff\xfe", id="no text"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="an array"),
        pytest.param(b'{"request":null}', id="request null"),
        pytest.param(b'{"request":{"uid":7}}', id="uid a number"),
        pytest.param(review(WORKER)[:-30], id="cut off"),
        pytest.param(DEEP, id="nested without end"),
        pytest.param(review(None), id="object null"),
        pytest.param(review([]), id="object an array"),
        pytest.param(review("pod"), id="object a text"),
        pytest.param(review({}), id="object empty"),
        pytest.param(review({**WORKER, "metadata": None}), id="metadata null"),
        pytest.param(review({**WORKER, "spec": None}), id="spec null"),
        pytest.param(review(samples.with_spec(WORKER, containers=None)), id="containers missing"),
        pytest.param(review(samples.with_spec(WORKER, containers=[None, 3, "x"])), id="containers of other kinds"),
        pytest.param(review(samples.with_spec(WORKER, initContainers={"a": 1})), id="init containers an object"),
        pytest.param(review(samples.with_spec(WORKER, volumes="none")), id="volumes a text"),
        pytest.param(review(samples.with_spec(WORKER, resources=[1])), id="pod resources an array"),
        pytest.param(review(WORKER, namespace="../../secrets?x=y"), id="a namespace with a path"),
        pytest.param(review(WORKER, namespace=""), id="no namespace"),
        pytest.param(review(samples.with_labels(samples.ray_head(), {"ray.io/cluster": "../.."})), id="odd cluster"),
        pytest.param(review(samples.with_spec(WORKER, hostname="x" * 3_000_000)), id="a pod of 3 MB"),
        pytest.param(review(samples.with_spec(WORKER, hostname="x" * 9_000_000)), id="a pod of 9 MB"),
        pytest.param(review({**WORKER, "unknown": {"field": [1e308, -1, "\ud800"]}}), id="unknown fields"),
    ],
)
async def test_hostile_input_is_allowed(body: bytes) -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        answer = await client.post(body)
        assert answer["allowed"] is True
        assert answer["uid"] == (UID if UID.encode() in body else "")
        if patch_of(answer):
            independent_jsonpatch.apply_patch(json.loads(body)["request"]["object"], patch_of(answer))
        assert is_injected(await client.post(review(WORKER)))
        assert (await plain(server, "/healthz"))[0] == 200


@pytest.mark.parametrize("annotations", [None, {}, {"a/b": "c"}])
async def test_a_pod_is_injected_whatever_its_annotations(annotations: dict[str, str] | None) -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        assert is_injected(await client.post(review(samples.with_annotations(WORKER, annotations))))


async def test_the_sidecar_is_told_address_and_ca_of_the_controller() -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        patch = patch_of(await client.post(review(WORKER)))
        environment = {entry["name"]: entry.get("value") for entry in patch[0]["value"]["env"]}
        assert environment["GPUMON_REPORT_URL"] == "https://10.96.7.7:8443/v1/report"
        assert environment["GPUMON_REPORT_CA"] == bundle_of(fake).decode()


async def test_an_exception_is_allowed_counted_and_logged_without_the_body(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(mutation, "mutate", broken)
    pod = samples.with_annotations(WORKER, {"secret": "hunter2"})
    with caplog.at_level(logging.INFO):
        async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
            assert await client.post(review(pod)) == {"uid": UID, "allowed": True}
            _, page = await plain(server, "/metrics")
    assert 'gpumonitor_admission_requests_total{reason="Exception",result="failed"} 1.0' in page
    assert "ZeroDivisionError" in caplog.text
    assert "hunter2" not in caplog.text


async def test_an_api_server_that_is_slow_costs_a_second_and_the_sidecar() -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        fake.delay_seconds["/api/v1/namespaces/team-a/resourcequotas"] = 30.0
        started = time.monotonic()
        answer = await client.post(review(WORKER))
        assert time.monotonic() - started < 3.0
        assert annotation(answer).startswith("PreflightUnavailable: ")


async def test_more_pods_than_turns_are_all_answered_in_time() -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        fake.delay_seconds["/api/v1/namespaces/team-a"] = 5.0
        answers = await asyncio.gather(*(client.post(review(WORKER)) for _ in range(100)))
        assert all(answer["allowed"] for answer in answers)
        _, page = await plain(server, "/metrics")
        assert 'reason="Timeout",result="failed"' in page
        assert 'gpumonitor_admission_duration_seconds_bucket{le="3.0"} 100.0' in page


async def test_a_handler_that_takes_too_long_answers_without_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(preflight, "LIVE_SECONDS", 30.0)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        fake.delay_seconds["/api/v1/namespaces/team-a"] = 5.0
        assert await client.post(review(WORKER)) == {"uid": UID, "allowed": True}


async def test_too_many_at_once_are_allowed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_IN_FLIGHT", 3)
    monkeypatch.setattr(server_module, "ANSWER_SECONDS", 30.0)
    monkeypatch.setattr(preflight, "LIVE_SECONDS", 30.0)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        fake.delay_seconds["/api/v1/namespaces/team-a"] = 0.3
        answers = await asyncio.gather(*(client.post(review(WORKER)) for _ in range(10)))
        assert all(answer["allowed"] for answer in answers)
        assert sum(map(is_injected, answers)) == 3


@pytest.mark.parametrize(
    ("path", "status"),
    [
        pytest.param("/api/v1/namespaces/team-a", 403, id="namespace refused"),
        pytest.param("/api/v1/namespaces/team-a/limitranges", 500, id="limit ranges fail"),
        pytest.param("/api/v1/namespaces/team-a/resourcequotas", 404, id="quotas not there"),
    ],
)
async def test_limits_that_cannot_be_read_mean_no_sidecar(path: str, status: int) -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        fake.refused[path] = status
        answer = await client.post(review(WORKER))
        assert annotation(answer).startswith("PreflightUnavailable: ")


OWNED = {
    **WORKER,
    "metadata": {**WORKER["metadata"], "ownerReferences": [{"uid": "u-1", "kind": "RayCluster", "controller": True}]},
}
"""A worker whose controller asks for it again where it is refused."""


async def test_a_pod_that_another_policy_refuses_for_its_sidecar_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "LEAST_SECONDS", 0.2)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        pods = fake.objects["/api/v1/namespaces/team-a/pods"] = []
        for _ in range(4):
            assert is_injected(await client.post(review(OWNED)))
        await asyncio.sleep(0.3)
        assert is_injected(await client.post(review(OWNED, dry_run=True)))
        answer = await client.post(review(OWNED))
        assert annotation(answer).startswith("Refused: ")
        pods.append({"metadata": {"name": "w-0", "annotations": {"gpumonitor.dev/skip-reason": annotation(answer)}}})
        await asyncio.sleep(0.3)
        for _ in range(5):
            assert annotation(await client.post(review(OWNED))).startswith("Refused: ")
        assert is_injected(await client.post(review(WORKER)))
        _, page = await plain(server, "/metrics")
        assert 'gpumonitor_admission_requests_total{reason="Refused",result="skipped"} 6.0' in page


@pytest.mark.parametrize(
    "there",
    [
        pytest.param([{"metadata": {"annotations": {"gpumonitor.dev/injected": "0.1.0"}}}], id="one has the sidecar"),
        pytest.param(None, id="nobody can say which are there"),
    ],
)
async def test_pods_that_are_not_known_to_be_refused_get_the_sidecar(
    monkeypatch: pytest.MonkeyPatch, there: list[dict[str, Any]] | None
) -> None:
    monkeypatch.setattr(refusals, "LEAST_SECONDS", 0.2)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        if there is None:
            fake.delay_seconds["/api/v1/namespaces/team-a/pods"] = 30.0
        else:
            fake.objects["/api/v1/namespaces/team-a/pods"] = there
        for pause in (0.0, 0.0, 0.3, 0.0, 0.3, 0.0):
            await asyncio.sleep(pause)
            assert is_injected(await client.post(review(OWNED)))


async def test_a_quota_is_read_for_each_pod() -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        assert is_injected(await client.post(review(WORKER)))
        quota = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "9"}}, "status": {"used": {}}}
        fake.objects["/api/v1/namespaces/team-a/resourcequotas"] = [
            {"metadata": {"name": name}, "spec": {"hard": {"pods": "5"}}, "status": {}} for name in ("a", "b")
        ] + [quota]
        assert annotation(await client.post(review(WORKER))).startswith("ResourceQuota: ")


async def test_a_head_without_gpus_follows_its_cluster() -> None:
    path = "/apis/ray.io/v1/namespaces/team-a/rayclusters/grpo-8b-x7k2p"
    cpu_only: dict[str, Any] = {
        "spec": {"headGroupSpec": {}, "workerGroupSpecs": [{"template": {"spec": {"containers": [{}]}}}]}
    }
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        assert is_injected(await client.post(review(samples.ray_head()))), "not readable: injected"
        fake.objects[path] = cpu_only
        assert patch_of(await client.post(review(samples.ray_head()))) == []
        assert is_injected(await client.post(review(samples.ray_head(gpus=1))))


async def test_what_is_free_on_a_small_cluster_is_read_live() -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        other = {"spec": {"containers": [{"resources": {"requests": {"cpu": "87880m"}}}]}}
        fake.objects["/api/v1/pods"] = [other]
        answer = await client.post(review(samples.ray_worker(cpu="8", memory="64Gi")))
        assert annotation(answer).startswith("WouldNotFit: ")


async def test_the_breaker_holds_injection_back_and_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "GUARD_SECONDS", 0.05)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        state = {"open": True, "image": samples.SETTINGS.images.sidecar, "reason": "cannot be pulled"}
        fake.objects[fake.breaker_path] = {"data": {"state": json.dumps(state)}}
        await asyncio.sleep(0.4)
        answer = await client.post(review(WORKER))
        assert annotation(answer) == "InjectionPaused: cannot be pulled"
        assert "gpumonitor_admission_injection_paused 1.0" in (await plain(server, "/metrics"))[1]
        fake.objects[fake.breaker_path] = {"data": {"state": '{"open":false}'}}
        await asyncio.sleep(0.4)
        assert is_injected(await client.post(review(WORKER)))


async def test_the_breaker_of_one_namespace_holds_injection_back_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "GUARD_SECONDS", 0.05)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        pauses = {"team-a": {"reason": "cannot be pulled"}, "other": {"reason": "neither"}}
        state = {"open": False, "image": samples.SETTINGS.images.sidecar, "namespaces": pauses}
        fake.objects[fake.breaker_path] = {"data": {"state": json.dumps(state)}}
        await asyncio.sleep(0.4)
        answer = await client.post(review(WORKER))
        assert annotation(answer) == "InjectionPaused: in this namespace: cannot be pulled"
        assert "gpumonitor_admission_injection_paused 0.0" in (await plain(server, "/metrics"))[1]
        del pauses["team-a"]
        fake.objects[fake.breaker_path] = {"data": {"state": json.dumps(state)}}
        await asyncio.sleep(0.4)
        assert is_injected(await client.post(review(WORKER)))


async def test_a_controller_that_is_away_holds_injection_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "GUARD_SECONDS", 0.05)
    monkeypatch.setattr(attendance, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(attendance, "GRACE_LEASES", 0.0)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        await asyncio.sleep(1.2)
        assert is_injected(await client.post(review(WORKER))), "it is renewed all the time"
        fake.controller_is_away = True
        assert is_injected(await client.post(review(WORKER))), "a restart is no absence"
        await asyncio.sleep(1.4)
        assert "not renewed for 1 s" in annotation(await client.post(review(WORKER)))
        assert "gpumonitor_admission_injection_paused 1.0" in (await plain(server, "/metrics"))[1]
        fake.controller_is_away = False
        await asyncio.sleep(0.4)
        assert is_injected(await client.post(review(WORKER)))
        assert "gpumonitor_admission_injection_paused 0.0" in (await plain(server, "/metrics"))[1]


async def test_without_a_lease_nothing_is_injected_until_it_comes() -> None:
    """In the pace that it really has."""
    async with fake_api.running() as fake:
        held = fake.objects.pop(fake.lease_path)
        async with serving(fake) as server, Client(server, bundle_of(fake)) as client:
            answer = annotation(await client.post(review(WORKER)))
            assert answer.startswith("InjectionPaused: there is no Lease gpumonitor-system/gpumonitor-controller")
            assert "gpumonitor_admission_injection_paused 1.0" in (await plain(server, "/metrics"))[1]
            fake.objects[fake.lease_path] = held
            async with asyncio.timeout(3):
                while not is_injected(await client.post(review(WORKER))):  # noqa: ASYNC110 - the API server asks
                    await asyncio.sleep(0.1)


async def test_at_a_first_install_the_first_pod_is_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller takes the Lease and then makes the certificate, without which the webhook is not ready."""
    monkeypatch.setattr(preflight, "UNTIL_THERE_SECONDS", 0.05)
    monkeypatch.setattr(preflight, "GUARD_SECONDS", 60.0)
    async with fake_api.running() as fake:
        secret, lease = fake.objects.pop(fake.secret_path), fake.objects.pop(fake.lease_path)

        async def install() -> None:
            await asyncio.sleep(0.3)
            fake.objects |= {fake.lease_path: lease, fake.secret_path: secret}

        task = asyncio.create_task(install())
        async with serving(fake) as server, Client(server, bundle_of(fake)) as client:
            assert is_injected(await client.post(review(WORKER)))
        await task


async def test_the_certificate_changes_under_load_without_one_refused_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leaves are renewed and a CA is rotated while requests come on new and on kept connections."""
    monkeypatch.setattr(preflight, "CERTIFICATES_SECONDS", 0.05)
    served: set[bytes] = set()
    async with fake_api.running() as fake, serving(fake) as server:
        stop = asyncio.Event()
        errors: list[BaseException] = []

        async def load() -> None:
            while not stop.is_set():
                async with Client(server, bundle_of(fake)) as client:
                    try:
                        for _ in range(5):
                            assert (await client.post(review(WORKER)))["allowed"] is True
                    except (aiohttp.ClientError, OSError, AssertionError) as error:
                        errors.append(error)

        tasks = [asyncio.create_task(load()) for _ in range(4)]
        for data in _renewals(fake.certificates):
            fake.take(data)
            served.add(data[certs.LEAF])
            await asyncio.sleep(0.3)
        stop.set()
        await asyncio.gather(*tasks)
        assert not errors
        assert len(served) == 3
        assert 'certificate_loads_total{result="failed"}' not in (await plain(server, "/metrics"))[1]


def _renewals(data: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Step by step: a young leaf, a next CA (since the key of this one is lost), the switch to it, a young leaf."""
    names = [*certs.server_names("gpumonitor", "gpumonitor-system"), "localhost"]
    patient = certs.Rotation(bundle_wait=timedelta(0))
    eager = certs.Rotation(renew_at=0.0)
    for lost, rotation in ((), eager), ((certs.CA_KEY,), patient), ((), patient), ((), patient), ((), eager):
        held = {key: value for key, value in data.items() if key not in lost}
        now = datetime.now(UTC)
        data = certs.plan(held, now=now, names=names, published=certs.bundle(data), rotation=rotation) or data
        yield data


async def test_an_unusable_secret_leaves_the_old_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "CERTIFICATES_SECONDS", 0.05)
    async with fake_api.running() as fake, serving(fake) as server:
        bundle = bundle_of(fake)
        other = fake_api.made_certificates()
        fake.take({**fake.certificates, certs.LEAF: other[certs.LEAF]})
        await asyncio.sleep(0.5)
        async with Client(server, bundle) as client:
            assert is_injected(await client.post(review(WORKER)))
        assert 'certificate_loads_total{result="failed"}' in (await plain(server, "/metrics"))[1]


async def test_not_ready_before_the_certificate_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "UNTIL_THERE_SECONDS", 0.05)
    async with fake_api.running() as fake:
        held = fake.objects.pop(fake.secret_path)
        ready = asyncio.create_task(_first_ready(fake))
        await asyncio.sleep(0.5)
        assert not ready.done()
        fake.objects[fake.secret_path] = held
        assert await asyncio.wait_for(ready, 5)


async def _first_ready(fake: FakeApi) -> bool:
    async with serving(fake) as server:
        return server.is_ready


async def test_the_end_answers_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        fake.delay_seconds["/api/v1/namespaces/team-a"] = 0.3
        under_way = asyncio.create_task(client.post(review(WORKER)))
        await asyncio.sleep(0.15)
        server.stop()
        assert not server.is_ready
        assert is_injected(await under_way)


async def test_names_of_the_metrics_are_public() -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        await client.post(review(WORKER))
        _, page = await plain(server, "/metrics")
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE gpumonitor_")}
    assert {name for name in names if not name.endswith("_created")} == {
        "gpumonitor_admission_requests_total",
        "gpumonitor_admission_duration_seconds",
        "gpumonitor_admission_certificate_loads_total",
        "gpumonitor_admission_connections",
        "gpumonitor_admission_connections_refused_total",
        "gpumonitor_admission_injection_paused",
    }


async def raw(server: Server, fake: FakeApi) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection by TLS on which a stranger writes what he likes."""
    tls = ssl.create_default_context(cadata=bundle_of(fake).decode())
    port = server.addresses["mutate"][1]
    return await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=SERVER_NAME)


def head(length: int) -> bytes:
    return b"POST /mutate?timeout=3s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length


@pytest.mark.parametrize("sent", [b"", b"POST /mutate HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_connection_that_asks_for_nothing_is_closed(sent: bytes) -> None:
    """Anybody in the cluster may come to this port, and each connection takes memory."""
    limits = ServerLimits(first_request_seconds=0.2, idle_seconds=60)
    async with fake_api.running() as fake, serving(fake, limits=limits) as server:
        reader, writer = await raw(server, fake)
        writer.write(sent)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_the_api_servers_idle_connection_stays() -> None:
    limits = ServerLimits(first_request_seconds=0.2, idle_seconds=60)
    async with fake_api.running() as fake, serving(fake, limits=limits) as server:
        reader, writer = await raw(server, fake)
        for _ in range(2):
            body = review(WORKER)
            writer.write(head(len(body)) + body)
            async with asyncio.timeout(5):
                answer = await reader.readuntil(b"\r\n\r\n")
                length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["response"]["allowed"] is True
            await asyncio.sleep(0.5)
        writer.close()


async def test_connections_beyond_the_limit_are_closed_at_once() -> None:
    limits = ServerLimits(connections=20, connections_of_peer=3)
    async with fake_api.running() as fake, serving(fake, limits=limits) as server:
        port = server.addresses["mutate"][1]
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        assert 'connections_refused_total{reason="peer"} 1.0' in (await plain(server, "/metrics"))[1]
        for _, each in [*pairs, (reader, writer)]:
            each.close()
        async with Client(server, bundle_of(fake)) as client, asyncio.timeout(5):
            # A gauge has no event.
            while "gpumonitor_admission_connections 0.0" not in (await plain(server, "/metrics"))[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert is_injected(await client.post(review(WORKER)))


async def test_a_body_that_drips_is_answered_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.2)
    async with fake_api.running() as fake, serving(fake) as server:
        reader, writer = await raw(server, fake)
        writer.write(head(1_000_000) + review(WORKER)[:1000])
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        said = json.loads(answer.partition(b"\r\n\r\n")[2])["response"]
        assert said == {"uid": UID, "allowed": True}
        assert 'reason="Timeout",result="failed"} 1.0' in (await plain(server, "/metrics"))[1]


async def test_many_bodies_that_drip_take_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BODIES_BYTES", 2_500_000)
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        dripping = [await raw(server, fake) for _ in range(3)]
        for _, writer in dripping:
            writer.write(head(1_000_000) + review(WORKER)[:1000])
        async with asyncio.timeout(5):
            # One of the three has no room, and is answered while the others still have theirs.
            reads = [asyncio.create_task(reader.read(12)) for reader, _ in dripping]
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        assert 'reason="Overloaded",result="failed"} 1.0' in (await plain(server, "/metrics"))[1]
        assert is_injected(await client.post(review(WORKER))), "a body that is there needs no room"
        for _, writer in dripping:
            writer.close()
        await asyncio.gather(*reads, return_exceptions=True)


async def test_what_is_no_http_is_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_api.running() as fake, serving(fake) as server, Client(server, bundle_of(fake)) as client:
        reader, writer = await raw(server, fake)
        writer.write(b"\x16\x03 secret-of-a-stranger\r\n\r\n")
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
        _, writer = await raw(server, fake)
        writer.write(head(1_000_000) + b"{")
        await writer.drain()
        writer.close()
        assert is_injected(await client.post(review(WORKER)))
        assert 'connections_refused_total{reason="http"}' in (await plain(server, "/metrics"))[1]
    assert "secret-of-a-stranger" not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/mutate", 405), ("POST", "/", 404)])
async def test_other_requests_are_refused(method: str, path: str, status: int) -> None:
    async with fake_api.running() as fake, serving(fake) as server:
        reader, writer = await raw(server, fake)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(5):
            assert int((await reader.readline()).split()[1]) == status
        writer.close()


async def test_whoever_stays_on_the_health_port_does_not_keep_the_kubelet_out() -> None:
    limits = ServerLimits(connections=20, connections_of_peer=5, first_request_seconds=0.2, idle_seconds=0.2)
    pages = Pages({"/healthz": lambda: web.Response(text="ok")}, host="127.0.0.1", port=0, limits=limits)
    await pages.start()
    try:
        silent = [await asyncio.open_connection("127.0.0.1", pages.port) for _ in range(5)]
        async with asyncio.timeout(5):
            assert {await reader.read() for reader, _ in silent} == {b""}
        url = f"http://127.0.0.1:{pages.port}"
        async with aiohttp.ClientSession() as session:
            for method, path, status in (("GET", "/healthz?x", 200), ("POST", "/healthz", 405), ("GET", "/x", 404)):
                async with session.request(method, url + path) as response:
                    assert response.status == status
        for _, writer in silent:
            writer.close()
    finally:
        await pages.close(0.2)
