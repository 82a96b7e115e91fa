# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which pods get the sidecar, and that no pod is refused, or lies pending, that would have run without us."""

import time
import uuid
from typing import Any

import pytest

from tests.cluster import jobs
from tests.cluster.kubectl import Kubectl, eventually
from tests.cluster.monitors import await_running, sidecar
from verl_gpumonitor.model import wiring

pytestmark = pytest.mark.usefixtures("release")

RESTRICTED_POD: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED_CONTAINER: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
GUARANTEED: dict[str, Any] = {"cpu": "100m", "memory": "64Mi"}


def skip_reason(pod: jobs.Object) -> str:
    """Why the webhook left a pod alone, or nothing."""
    return str(pod["metadata"].get("annotations", {}).get(wiring.ANNOTATION_SKIP_REASON, ""))


@pytest.mark.parametrize(
    ("labels", "gpus", "injected"),
    [
        pytest.param(jobs.ray_labels(), 1, True, id="a Ray worker with GPUs"),
        pytest.param(jobs.torch_labels(), 1, True, id="a PyTorchJob pod with GPUs"),
        pytest.param(jobs.torch_labels(), 0, False, id="a PyTorchJob pod without GPUs"),
        pytest.param(jobs.ray_labels(), 0, False, id="a Ray worker without GPUs"),
        pytest.param({"app": "web"}, 1, False, id="a GPU pod of no training job"),
        pytest.param(
            {"ray.io/originated-from-cr-name": "job", "ray.io/originated-from-crd": "RayJob"},
            0,
            False,
            id="a RayJob's submitter",
        ),
        pytest.param({**jobs.ray_labels(), wiring.INJECT: "disabled"}, 1, False, id="a pod opted out by label"),
    ],
)
def test_who_is_injected(kubectl: Kubectl, namespace: str, labels: dict[str, str], gpus: int, injected: bool) -> None:
    pod = kubectl.create(jobs.pod("p", labels=labels, containers=[jobs.container(gpus=gpus)]), namespace)
    assert (sidecar(pod) is not None) == injected


def test_a_namespace_can_opt_out(kubectl: Kubectl, namespace: str) -> None:
    kubectl.run("label", "namespace", namespace, f"{wiring.INJECT}=disabled")
    pod = kubectl.create(jobs.pod("p", labels=jobs.ray_labels()), namespace)
    assert sidecar(pod) is None


@pytest.mark.parametrize(
    ("resources", "qos"),
    [
        pytest.param({}, "BestEffort", id="BestEffort stays BestEffort"),
        pytest.param({"requests": {"cpu": "50m"}}, "Burstable", id="Burstable stays Burstable"),
        pytest.param({"requests": GUARANTEED, "limits": GUARANTEED}, "Guaranteed", id="Guaranteed stays Guaranteed"),
    ],
)
def test_the_qos_class_is_kept(kubectl: Kubectl, namespace: str, resources: dict[str, Any], qos: str) -> None:
    body = jobs.container(gpus=1, requests=resources.get("requests"), limits=resources.get("limits"))
    created = kubectl.create(jobs.pod("p", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert sidecar(created)
    assert await_running(kubectl, "p", namespace)["status"]["qosClass"] == qos


def test_restricted_pod_security_admits_the_sidecar(kubectl: Kubectl, namespace: str) -> None:
    kubectl.run("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    body = {**jobs.container(), "securityContext": RESTRICTED_CONTAINER}
    pod = jobs.pod("p", labels=jobs.ray_labels(), containers=[body], securityContext=RESTRICTED_POD)
    assert sidecar(kubectl.create(pod, namespace))
    await_running(kubectl, "p", namespace)


LIMIT_RANGES: list[Any] = [
    pytest.param({"min": {"cpu": "90m", "memory": "60Mi"}}, id="a minimum above the sidecar"),
    pytest.param({"max": {"cpu": "100m", "memory": "70Mi"}}, id="a maximum below the sidecar's limit"),
    pytest.param(
        {"default": {"cpu": "100m", "memory": "64Mi"}, "defaultRequest": {"cpu": "100m", "memory": "64Mi"}},
        id="defaults for what says nothing",
    ),
    pytest.param(
        {"maxLimitRequestRatio": {"cpu": "2"}, "default": {"cpu": "100m"}, "defaultRequest": {"cpu": "60m"}},
        id="a ratio of limit to request",
    ),
]


@pytest.mark.parametrize("limits", LIMIT_RANGES)
@pytest.mark.parametrize("guaranteed", [True, False], ids=["Guaranteed", "BestEffort"])
def test_a_limit_range_refuses_no_pod(
    kubectl: Kubectl, namespace: str, limits: dict[str, Any], guaranteed: bool
) -> None:
    """What is admitted without us is admitted with us, in the same QoS class."""
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "limits"},
            "spec": {"limits": [{"type": "Container", **limits}]},
        },
        namespace,
    )
    size = GUARANTEED if guaranteed else None
    body = jobs.container(gpus=1, requests=size, limits=size)
    plain = jobs.pod("plain", labels={**jobs.ray_labels(), wiring.INJECT: "disabled"}, containers=[body])
    expected = kubectl.create(plain, namespace)
    watched = kubectl.create(jobs.pod("watched", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert watched["status"]["qosClass"] == expected["status"]["qosClass"]
    assert sidecar(watched) or skip_reason(watched)


@pytest.mark.parametrize(
    ("hard", "injected"),
    [
        pytest.param({"limits.cpu": "100", "limits.memory": "100Gi"}, True, id="room for many sidecars"),
        pytest.param({"limits.cpu": "200m", "limits.memory": "256Mi"}, False, id="room for the job alone"),
    ],
)
def test_a_quota_on_limits_refuses_no_pod(
    kubectl: Kubectl, namespace: str, hard: dict[str, str], injected: bool
) -> None:
    kubectl.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, "spec": {"hard": hard}}, namespace
    )
    eventually(
        lambda: (kubectl.get("resourcequota", "quota", namespace) or {}).get("status", {}).get("hard"),
        within=30,
        what="the quota counted",
    )
    body = jobs.container(gpus=1, requests=GUARANTEED, limits=GUARANTEED)
    created = kubectl.create(jobs.pod("p", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert (sidecar(created) is not None) == injected
    assert injected or skip_reason(created)


def test_a_pod_that_fills_the_node_still_fits(kubectl: Kubectl, namespace: str) -> None:
    """A Guaranteed pod of the node's whole allocatable CPU would fit no node with a sidecar: it gets none."""
    whole = kubectl.list("node")[0]["status"]["allocatable"]["cpu"]
    size = {"cpu": whole, "memory": "64Mi"}
    body = jobs.container(gpus=1, requests=size, limits=size)
    created = kubectl.create(jobs.pod("p", labels=jobs.ray_labels(), containers=[body]), namespace)
    assert sidecar(created) is None
    assert skip_reason(created)


def test_two_pods_on_the_host_network(kubectl: Kubectl, namespace: str) -> None:
    for name in ("a", "b"):
        created = kubectl.create(jobs.pod(name, labels=jobs.ray_labels(), hostNetwork=True), namespace)
        ours = sidecar(created)
        assert ours is not None
        assert not ours.get("ports")
    for name in ("a", "b"):
        await_running(kubectl, name, namespace)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            {"initContainers": [{"name": "gpumonitor", "image": jobs.BASE_IMAGE, "command": ["true"]}]}, id="init"
        ),
        pytest.param({"containers": [jobs.container("gpumonitor")]}, id="container"),
        pytest.param({"volumes": [{"name": wiring.TOKEN_VOLUME, "emptyDir": {}}]}, id="volume"),
    ],
)
def test_a_pod_that_has_our_name_already_is_admitted(kubectl: Kubectl, namespace: str, change: dict[str, Any]) -> None:
    containers = change.pop("containers", None)
    pod = jobs.pod(f"p-{uuid.uuid4().hex[:4]}", labels=jobs.ray_labels(), containers=containers, **change)
    created = kubectl.create(pod, namespace)
    names = [one["name"] for one in created["spec"].get("initContainers", [])]
    assert names.count(wiring.CONTAINER_NAME) <= 1
    assert wiring.ANNOTATION_INJECTED not in created["metadata"].get("annotations", {})


def test_the_sidecar_runs_and_a_pod_with_it_ends_as_soon(kubectl: Kubectl, namespace: str) -> None:
    """The end of a pod, from its deletion to its disappearance, takes at most 2 s longer with the sidecar."""
    took = {}
    for name, labels in (("plain", {wiring.INJECT: "disabled"}), ("watched", {})):
        kubectl.create(jobs.pod(name, labels={**jobs.ray_labels(), **labels}), namespace)
        await_running(kubectl, name, namespace)
        begin = time.monotonic()
        kubectl.delete("pod", name, namespace)
        took[name] = time.monotonic() - begin
    assert took["watched"] <= took["plain"] + 2.0, took
