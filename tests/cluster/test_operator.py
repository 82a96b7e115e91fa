# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What happens to the jobs while parts of ours, or of the cluster, are away. These tests disturb the whole cluster."""

import base64
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import product
from tests.cluster import jobs, monitors, rayclusters, untrusted
from tests.cluster.conftest import REPOSITORY, wait_for_injection
from tests.cluster.kubectl import Kubectl, eventually
from verl_gpumonitor.model import wiring

pytestmark = [pytest.mark.disturbing, pytest.mark.usefixtures("release")]

WEBHOOK = f"{product.RELEASE}-webhook"
CONTROLLER = f"{product.RELEASE}-controller"
CHART = REPOSITORY / "charts" / "gpumonitor"


def scale(kubectl: Kubectl, deployment: str, replicas: int) -> None:
    """Scale a Deployment of ours and wait until it is so."""
    kubectl.run("scale", "deployment", deployment, "-n", product.NAMESPACE, f"--replicas={replicas}")

    def done() -> bool:
        pods = kubectl.list(
            "pod", product.NAMESPACE, selector=f"app.kubernetes.io/component={deployment.split('-')[-1]}"
        )
        ready = [
            pod
            for pod in pods
            if any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))
        ]
        return len(pods) == len(ready) == replicas

    eventually(done, within=90, what=f"{replicas} replicas of {deployment}")


def kill_controller(kubectl: Kubectl) -> None:
    """End the controller with SIGKILL, so that it can write nothing more, and keep it away."""
    program = b"/opt/gpumonitor/bin/gpumon-controller"
    running = [int(entry.parent.name) for entry in Path("/proc").glob("[0-9]*/cmdline") if program in _words(entry)]
    assert running, "the local cluster's pods are processes of this machine"
    # It stands still while its Deployment is scaled down, else it would be killed and started again before that.
    for pid in running:
        os.kill(pid, signal.SIGSTOP)
    try:
        kubectl.run("scale", "deployment", CONTROLLER, "-n", product.NAMESPACE, "--replicas=0")
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    scale(kubectl, CONTROLLER, 0)


def _words(cmdline: Path) -> list[bytes]:
    try:
        return cmdline.read_bytes().split(b"\0")
    except OSError:
        return []


@contextmanager
def webhook_changed(kubectl: Kubectl, client: dict[str, Any], *, timeout_seconds: int = 3) -> Iterator[None]:
    """Point both entries of the webhook configuration elsewhere for a while."""
    name = product.RELEASE
    before: Any = kubectl.get("mutatingwebhookconfiguration", name)
    scale(kubectl, CONTROLLER, 0)  # it would mend a wrong caBundle at once
    hooks = [
        {**hook, "timeoutSeconds": timeout_seconds, "clientConfig": {**hook["clientConfig"], **client}}
        for hook in before["webhooks"]
    ]
    try:
        kubectl.patch("mutatingwebhookconfiguration", name, None, {"webhooks": hooks})
        yield
    finally:
        kubectl.patch("mutatingwebhookconfiguration", name, None, {"webhooks": before["webhooks"]})
        scale(kubectl, CONTROLLER, 1)
        wait_for_injection(kubectl)


def creation_seconds(kubectl: Kubectl, namespace: str, name: str) -> tuple[jobs.Object, float]:
    """Create a GPU pod; returns it and how long that took."""
    begin = time.monotonic()
    pod = kubectl.create(jobs.pod(name, labels=jobs.ray_labels()), namespace)
    return pod, time.monotonic() - begin


def test_pods_start_while_the_webhook_is_away_and_are_listed(kubectl: Kubectl, namespace: str) -> None:
    scale(kubectl, WEBHOOK, 0)
    try:
        command = jobs.hold(300, utilization=[0.5], used_gib=[10.0])
        kubectl.apply(jobs.pytorchjob("unseen", command=command, gpus=1), namespace)
        pod = monitors.await_running(kubectl, "unseen-master-0", namespace)
    finally:
        scale(kubectl, WEBHOOK, 2)
    assert not monitors.sidecar(pod)

    def listed() -> Any:
        now = monitors.status(kubectl, "unseen", namespace)
        return [one for one in now.get("unmonitoredPods", []) if one["name"] == "unseen-master-0"]

    assert eventually(listed, within=60, what="the pod among the unmonitored")[0]["reason"] == "NotInjected"
    monitors.await_condition(kubectl, "unseen", namespace, "TelemetryAvailable", value="False")


def wrong_bundle() -> dict[str, Any]:
    """Make a caBundle of a CA that signed nothing here."""
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "/dev/null", "-subj", "/CN=nobody"],
        capture_output=True,
        check=True,
    )
    return {"caBundle": base64.b64encode(done.stdout).decode()}


def nobody() -> dict[str, Any]:
    """Name a Service that does not exist."""
    return {"service": {"name": "nobody", "namespace": product.NAMESPACE, "path": "/mutate", "port": 443}}


@pytest.mark.parametrize(
    "client", [pytest.param(wrong_bundle, id="caBundle wrong"), pytest.param(nobody, id="Service gone")]
)
def test_pods_start_while_the_webhook_is_not_trusted(
    kubectl: Kubectl, namespace: str, client: Callable[[], dict[str, Any]]
) -> None:
    with webhook_changed(kubectl, client()):
        pod, seconds = creation_seconds(kubectl, namespace, "p")
    assert not monitors.sidecar(pod)
    assert wiring.ANNOTATION_SKIP_REASON not in pod["metadata"].get("annotations", {}), "the webhook was asked"
    assert seconds < 5


def test_pods_start_while_the_webhook_hangs(kubectl: Kubectl, namespace: str) -> None:
    """A server that accepts and never answers costs a pod the webhook's 3 s, and no more."""
    with untrusted.silent_server() as client, webhook_changed(kubectl, client):
        pod, seconds = creation_seconds(kubectl, namespace, "p")
    assert not monitors.sidecar(pod)
    assert wiring.ANNOTATION_SKIP_REASON not in pod["metadata"].get("annotations", {}), "the webhook was asked"
    assert seconds < 3 + 3


def test_pods_start_while_the_webhooks_certificate_has_expired(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    with untrusted.expired_server(tmp_path) as client, webhook_changed(kubectl, client):
        pod, seconds = creation_seconds(kubectl, namespace, "p")
    assert not monitors.sidecar(pod)
    assert wiring.ANNOTATION_SKIP_REASON not in pod["metadata"].get("annotations", {}), "the webhook was asked"
    assert seconds < 5


def counters(kubectl: Kubectl, name: str, namespace: str) -> dict[str, float]:
    """Totals of a job as its GPUMonitor shows them."""
    found: dict[str, float] = monitors.status(kubectl, name, namespace).get("totals", {})
    return found


def test_a_controller_that_was_away_loses_nothing(kubectl: Kubectl, namespace: str) -> None:
    """Killed, and gone for 75 s in the middle: the totals go on as if it had been there, and no Event comes twice.

    After a minute nobody could rescue a pod any more, so nothing is injected until it is back.
    """
    command = jobs.hold(600, utilization=[0.85, 0.1, 0.11, 0.12], used_gib=[74.5, 18, 18, 18])
    kubectl.apply(jobs.pytorchjob("steady", command=command, gpus=4, shared_processes=True), namespace)
    monitors.await_condition(kubectl, "steady", namespace, "OOMRisk", value="True")
    uid = monitors.monitor(kubectl, "steady", namespace)["metadata"]["uid"]
    eventually(lambda: monitors.events(kubectl, namespace, uid), within=30, what="Events")
    before, events_before = counters(kubectl, "steady", namespace), monitors.events(kubectl, namespace, uid)
    begin = time.monotonic()
    kill_controller(kubectl)
    time.sleep(75)
    alone, _ = creation_seconds(kubectl, namespace, "alone")
    scale(kubectl, CONTROLLER, 1)
    assert not monitors.sidecar(alone)
    assert "InjectionPaused" in alone["metadata"]["annotations"][wiring.ANNOTATION_SKIP_REASON]

    def injected_again() -> bool:
        kubectl.delete("pod", "again", namespace)
        return monitors.sidecar(creation_seconds(kubectl, namespace, "again")[0]) is not None

    eventually(injected_again, within=30, what="injection after the controller's return", every=2)

    def caught_up() -> bool:
        now = time.monotonic()
        grown = counters(kubectl, "steady", namespace)["gpuSeconds"] - before["gpuSeconds"]
        # What the status before was behind by, which is written each 30 s, is the most that there may be too much.
        assert grown <= 4 * (now - begin + 60), "counted twice"
        return grown >= 4 * (now - begin - 12)

    eventually(caught_up, within=60, what="totals as of an undisturbed run", every=2)
    events_after = monitors.events(kubectl, namespace, uid)
    assert {one["metadata"]["name"] for one in events_after} == {one["metadata"]["name"] for one in events_before}
    assert monitors.status(kubectl, "steady", namespace)["health"] == "OOMRisk+1"


def test_the_api_server_restarts(kubectl: Kubectl, namespace: str) -> None:
    subprocess.run([sys.executable, "-m", "devcluster", "restart", "kube-apiserver"], check=True, cwd=REPOSITORY)
    eventually(lambda: kubectl.raw("/readyz"), within=60, what="the API server")
    command = jobs.hold(300, utilization=[0.5] * 8, used_gib=[20.0] * 8)
    kubectl.apply(jobs.pytorchjob("after", command=command, gpus=8), namespace)
    monitors.await_gpus(kubectl, "after", namespace, "8/8", within=150)


def test_nothing_of_ours_holds_a_job_back(kubectl: Kubectl, namespace: str) -> None:
    """With the operator gone, jobs and their namespace are deleted at once."""
    command = jobs.hold(600, utilization=[0.5], used_gib=[10.0])
    kubectl.apply(jobs.pytorchjob("free", command=command, gpus=1), namespace)
    waiting = rayclusters.rayjob("free-ray", command="true")
    waiting["spec"]["suspend"] = True
    kubectl.apply(waiting, namespace)
    monitors.await_running(kubectl, "free-master-0", namespace)
    monitors.await_phase(kubectl, "free", namespace, "Running")
    monitors.await_phase(kubectl, "free-ray", namespace, "Pending")
    for deployment in (CONTROLLER, WEBHOOK):
        scale(kubectl, deployment, 0)
    try:
        for kind, name in (("pytorchjob", "free"), ("rayjob", "free-ray")):
            job: Any = kubectl.get(kind, name, namespace)
            ours = [*job["metadata"].get("finalizers", ()), *job["metadata"].get("annotations", {})]
            assert not [key for key in ours if "gpumonitor" in key or "kopf" in key]
        begin = time.monotonic()
        kubectl.delete("pytorchjob", "free", namespace)
        kubectl.delete("rayjob", "free-ray", namespace)
        kubectl.delete("namespace", namespace, timeout=90)
        assert time.monotonic() - begin < 60
    finally:
        scale(kubectl, CONTROLLER, 1)
        scale(kubectl, WEBHOOK, 2)


def test_a_kind_that_appears_later_is_picked_up(kubectl: Kubectl, namespace: str) -> None:
    """The training-operator's kinds are absent at the controller's start, and come afterwards."""
    devcluster = [sys.executable, "-m", "devcluster", "addons"]
    subprocess.run([*devcluster, "delete", "training-operator"], check=True, cwd=REPOSITORY)
    try:
        kubectl.run("rollout", "restart", f"deployment/{CONTROLLER}", "-n", product.NAMESPACE)
        kubectl.run("rollout", "status", f"deployment/{CONTROLLER}", "-n", product.NAMESPACE, "--timeout=90s")
    finally:
        subprocess.run([*devcluster, "apply", "training-operator"], check=True, cwd=REPOSITORY)
    command = jobs.hold(300, utilization=[0.5] * 8, used_gib=[20.0] * 8)
    eventually(lambda: kubectl.raw("/apis/kubeflow.org/v1/pytorchjobs"), within=60, what="the PyTorchJob kind")
    kubectl.apply(jobs.pytorchjob("late", command=command, gpus=8), namespace)
    monitors.await_gpus(kubectl, "late", namespace, "8/8", within=120)


OURS = "all,secret,configmap,lease,serviceaccount,role,rolebinding,poddisruptionbudget,networkpolicy"
EVERYWHERE = ",".join(
    (
        "clusterrole",
        "clusterrolebinding",
        "mutatingwebhookconfiguration",
        "validatingadmissionpolicy",
        "validatingadmissionpolicybinding",
    )
)
CRD = "gpumonitors.gpumonitor.dev"


def test_uninstall_leaves_the_crd_and_the_monitors_alone(
    kubectl: Kubectl, access: product.Access, values: dict[str, object], namespace: str
) -> None:
    kubectl.apply(jobs.pytorchjob("kept", command=jobs.hold(300, utilization=[0.5], used_gib=[5.0]), gpus=1), namespace)
    monitors.await_phase(kubectl, "kept", namespace, "Running")
    try:
        product.uninstall(access)
        assert kubectl.get("gpumonitor", "kept", namespace)

        def gone() -> bool:
            left = kubectl.run("get", OURS, "-o", "name", "-n", product.NAMESPACE).split()
            return not [name for name in left if product.RELEASE in name]

        eventually(gone, within=60, what="nothing of ours in the operator's namespace")
        assert not kubectl.run(
            "get", EVERYWHERE, "-o", "name", "-l", f"app.kubernetes.io/instance={product.RELEASE}"
        ).split()
        assert kubectl.get("crd", CRD)
    finally:
        product.install(access, chart=CHART, values=values)
        wait_for_injection(kubectl)


def status_fields(kubectl: Kubectl) -> set[str]:
    """Names of the status fields that the cluster's CRD has."""
    crd: Any = kubectl.get("crd", CRD)
    return set(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"])


def test_an_upgrade_brings_new_fields(
    kubectl: Kubectl, access: product.Access, values: dict[str, object], tmp_path: Path
) -> None:
    """From a chart whose CRD lacks a field to the present one."""
    older = tmp_path / "gpumonitor"
    shutil.copytree(CHART, older)
    file = older / "files" / "gpumonitor.dev_gpumonitors.yaml"
    crd = yaml.safe_load(file.read_text())
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["totals"]
    file.write_text(yaml.safe_dump(crd))
    try:
        product.install(access, chart=older, values=values)
        assert "totals" not in status_fields(kubectl)
    finally:
        product.install(access, chart=CHART, values=values)
    assert "totals" in status_fields(kubectl)
    wait_for_injection(kubectl)
