# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A sidecar that cannot start never holds a job: rescue, circuit breaker, and how narrow the right to patch is."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from devcluster import product
from tests.cluster import jobs, monitors
from tests.cluster.conftest import REPOSITORY, wait_for_injection
from tests.cluster.kubectl import Kubectl, KubectlError, eventually
from tests.cluster.monitors import sidecar
from verl_gpumonitor.model import wiring

pytestmark = [pytest.mark.disturbing, pytest.mark.usefixtures("release")]

CONTROLLER = f"system:serviceaccount:{product.NAMESPACE}:{product.RELEASE}-controller"


def waiting_reason(pod: jobs.Object) -> str | None:
    """Why our container of a pod waits, if it does."""
    for one in pod["status"].get("initContainerStatuses", []):
        if one["name"] == wiring.CONTAINER_NAME:
            reason: str | None = one["state"].get("waiting", {}).get("reason")
            return reason
    return None


FAILING = {"ErrImagePull", "ImagePullBackOff", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}


def freed_after(kubectl: Kubectl, name: str, namespace: str) -> tuple[jobs.Object, float]:
    """Wait until a pod whose sidecar failed runs; returns it and the seconds since the failure was first seen."""
    failed: list[float] = []

    def look() -> jobs.Object | None:
        pod = kubectl.get("pod", name, namespace)
        if pod is None:
            return None
        if waiting_reason(pod) in FAILING and not failed:
            failed.append(time.monotonic())
        return pod if pod["status"].get("phase") == "Running" else None

    pod = eventually(look, within=90, what=f"pod {name} freed", every=0.2)
    return pod, (time.monotonic() - failed[0]) if failed else 0.0


def await_injection(kubectl: Kubectl, namespace: str, *, injected: bool, within: float) -> None:
    """Create GPU pods until one is injected, or is not."""
    made = 0

    def look() -> bool:
        nonlocal made
        made += 1
        pod = kubectl.create(jobs.pod(f"probe-{made}", labels=jobs.ray_labels()), namespace)
        kubectl.delete("pod", f"probe-{made}", namespace, wait=False)
        return (sidecar(pod) is not None) == injected

    eventually(look, within=within, what=f"a pod with injected={injected}", every=2)


def test_an_image_that_cannot_be_pulled(
    kubectl: Kubectl, access: product.Access, values: dict[str, Any], namespace: str
) -> None:
    """The pod runs within 10 s of the failure, injection stops, and resumes once our image is another."""
    chart = REPOSITORY / "charts" / "gpumonitor"
    broken = {**values, "image": {**values["image"], "sidecar": {"tag": "never-pushed"}}}
    product.install(access, chart=chart, values=broken)
    wait_for_injection(kubectl)
    try:
        command = jobs.hold(300, utilization=[0.5], used_gib=[10.0])
        kubectl.apply(jobs.pytorchjob("held", command=command, gpus=1), namespace)
        pod, seconds = freed_after(kubectl, "held-master-0", namespace)
        assert seconds < 10
        ours = sidecar(pod)
        assert ours
        assert ours["image"] == pod["spec"]["containers"][0]["image"]
        await_injection(kubectl, namespace, injected=False, within=20)
    finally:
        product.install(access, chart=chart, values=values)
        wait_for_injection(kubectl)
    await_injection(kubectl, namespace, injected=True, within=30)


def test_a_container_that_cannot_be_created(kubectl: Kubectl, namespace: str) -> None:
    """NVIDIA's runtime finds no CDI device `all`: the same program in an image without the variable takes over."""
    command = jobs.hold(300, utilization=[0.5], used_gib=[10.0])
    job = jobs.pytorchjob("uncreated", command=command, gpus=1, runtime_class="nvidia-no-all")
    kubectl.apply(job, namespace)
    pod, seconds = freed_after(kubectl, "uncreated-master-0", namespace)
    assert seconds < 10
    ours = sidecar(pod)
    assert ours
    assert "/operator" in ours["image"]
    monitors.await_condition(kubectl, "uncreated", namespace, "TelemetryAvailable", value="False")
    await_injection(kubectl, namespace, injected=True, within=120)


def test_a_sidecar_that_keeps_ending_leaves_the_pod_ready(kubectl: Kubectl, namespace: str) -> None:
    """Killed at each start, it waits longer and longer, and the pod is not ready meanwhile; another image ends that."""
    command = jobs.hold(600, utilization=[0.5], used_gib=[10.0])
    kubectl.apply(jobs.pytorchjob("crashing", command=command, gpus=1), namespace)
    name = "crashing-master-0"
    image = (sidecar(monitors.await_running(kubectl, name, namespace)) or {})["image"]

    def rescued() -> bool:
        pod = kubectl.get("pod", name, namespace)
        assert pod is not None
        if (sidecar(pod) or {})["image"] != image:
            return True
        with suppress(KubectlError, ProcessLookupError):
            os.kill(monitors.sidecar_pid(kubectl, name, namespace), signal.SIGKILL)
        return False

    def ready() -> bool:
        pod = kubectl.get("pod", name, namespace)
        found = {one["type"]: one["status"] for one in pod["status"]["conditions"]} if pod is not None else {}
        return found.get("Ready") == "True"

    eventually(rescued, within=240, what="another image", every=1)
    eventually(ready, within=180, what="a pod that is ready", every=1)
    main = kubectl.get("pod", name, namespace) or {}
    assert main["status"]["containerStatuses"][0]["restartCount"] == 0


FORBIDDEN: list[Any] = [
    pytest.param(
        [{"op": "replace", "path": "/spec/initContainers/0/image", "value": "evil.example/x:1"}], id="foreign image"
    ),
    pytest.param(
        [{"op": "replace", "path": "/spec/containers/0/image", "value": "evil.example/x:1"}], id="main container"
    ),
    pytest.param([{"op": "add", "path": "/metadata/labels/x", "value": "y"}], id="a label"),
    pytest.param([{"op": "add", "path": "/metadata/annotations/x", "value": "y"}], id="an annotation"),
    pytest.param([{"op": "add", "path": "/metadata/finalizers", "value": ["gpumonitor.dev/x"]}], id="a finalizer"),
    pytest.param([{"op": "add", "path": "/spec/activeDeadlineSeconds", "value": 1}], id="a deadline"),
    pytest.param(
        [{"op": "add", "path": "/spec/tolerations/-", "value": {"key": "x", "operator": "Exists"}}], id="a toleration"
    ),
]


@pytest.fixture(scope="module")
def victim(kubectl: Kubectl, release: str) -> Iterator[str]:
    """An injected pod that our ServiceAccount shall try to change. Its namespace; its name is `p`."""
    namespace = "test-patch-rights"
    kubectl.delete("namespace", namespace)
    kubectl.run("create", "namespace", namespace)

    def injected_pod() -> bool:
        kubectl.delete("pod", "p", namespace)
        labels = jobs.ray_labels()
        pod = kubectl.create(jobs.pod("p", labels=labels, annotations={"kept": "yes"}), namespace)
        return sidecar(pod) is not None

    eventually(injected_pod, within=120, what="an injected pod", every=3)
    yield namespace
    kubectl.delete("namespace", namespace)


@pytest.fixture(scope="module")
def patch_victim(kubectl: Kubectl, victim: str) -> Iterator[Callable[[list[dict[str, Any]]], tuple[int, str]]]:
    """Patch that pod as our ServiceAccount, and return status and answer.

    Not by `kubectl patch`, which reads the object first: that is refused, and would say nothing of the patch.
    """
    with kubectl.popen("proxy", "--port=0", "--as", CONTROLLER) as proxy:
        assert proxy.stdout
        address = proxy.stdout.readline().rpartition(" ")[2].strip()

        def patch(operations: list[dict[str, Any]]) -> tuple[int, str]:
            request = urllib.request.Request(
                f"http://{address}/api/v1/namespaces/{victim}/pods/p",
                data=json.dumps(operations).encode(),
                headers={"Content-Type": "application/json-patch+json"},
                method="PATCH",
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        yield patch
        proxy.kill()


@pytest.mark.parametrize("operations", FORBIDDEN)
def test_our_service_account_may_not(
    patch_victim: Callable[[list[dict[str, Any]]], tuple[int, str]], operations: list[dict[str, Any]]
) -> None:
    status, answer = patch_victim(operations)
    assert (status, "ValidatingAdmissionPolicy" in answer) == (403, True), answer


def test_our_service_account_may_give_the_sidecar_the_pods_own_image(
    kubectl: Kubectl, victim: str, patch_victim: Callable[[list[dict[str, Any]]], tuple[int, str]]
) -> None:
    pod = kubectl.get("pod", "p", victim)
    assert pod
    image = pod["spec"]["containers"][0]["image"]
    status, answer = patch_victim([{"op": "replace", "path": "/spec/initContainers/0/image", "value": image}])
    assert status == 200, answer
