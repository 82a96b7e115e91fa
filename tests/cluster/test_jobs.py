# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whole jobs: they run to their end with the sidecar, and their GPUMonitor tells the truth about them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import jobs, monitors, rayclusters
from tests.cluster.kubectl import Kubectl, condition, eventually

pytestmark = pytest.mark.usefixtures("release")


@pytest.fixture(scope="module")
def rayjob(kubectl: Kubectl, release: str) -> Iterator[tuple[str, str]]:
    """The example RayJob, running: (name, namespace). Shared, because a Ray cluster takes most of a minute to start."""
    namespace, name = "test-rayjob", "verl-grpo"
    kubectl.delete("namespace", namespace)
    kubectl.run("create", "namespace", namespace)
    kubectl.run("apply", "-n", namespace, "-k", "examples/rayjob-grpo")
    monitors.await_phase(kubectl, name, namespace, "Running", within=240)
    yield name, namespace
    kubectl.delete("namespace", namespace, wait=False)


def ray_pods(kubectl: Kubectl, namespace: str, node_type: str) -> list[jobs.Object]:
    """Pods of the test's Ray cluster by type."""
    return kubectl.list("pod", namespace, selector=f"ray.io/node-type={node_type}")


def test_a_rayjob_shows_each_pods_own_gpus_and_no_others(kubectl: Kubectl, rayjob: tuple[str, str]) -> None:
    """Two workers use 4 GPUs each on one node, where every sidecar sees all 8; the CPU-only head owns none."""
    name, namespace = rayjob
    monitors.await_gpus(kubectl, name, namespace, "8/8", within=120)
    workers = ray_pods(kubectl, namespace, "worker")
    assert len(workers) == 2
    named = [monitors.owned(kubectl, pod["metadata"]["name"], namespace, 4) for pod in workers]
    assert not named[0] & named[1]
    head = ray_pods(kubectl, namespace, "head")[0]
    assert monitors.sidecar(head)
    assert not monitors.uuids(monitors.sidecar_metrics(kubectl, head["metadata"]["name"], namespace))


def test_each_worker_names_the_gpus_that_the_device_plugin_gave_it(kubectl: Kubectl, rayjob: tuple[str, str]) -> None:
    """The truth is the variable in the job's own container, which the sidecar cannot see."""
    _, namespace = rayjob
    workers = ray_pods(kubectl, namespace, "worker")
    assert len(workers) == 2
    for pod in workers:
        name = pod["metadata"]["name"]
        given = kubectl.exec(name, namespace, "printenv", "NVIDIA_VISIBLE_DEVICES", container="ray-worker")
        assert monitors.owned(kubectl, name, namespace, 4) == set(given.strip().split(","))


def test_a_submitter_has_no_sidecar(kubectl: Kubectl, rayjob: tuple[str, str]) -> None:
    _, namespace = rayjob
    submitters = eventually(
        lambda: kubectl.list("pod", namespace, selector="batch.kubernetes.io/job-name=verl-grpo"),
        within=120,
        what="a submitter",
    )
    assert not any(monitors.sidecar(pod) for pod in submitters if "ray.io/node-type" not in pod["metadata"]["labels"])


def test_a_rayjob_ends_as_it_does_without_us(kubectl: Kubectl, rayjob: tuple[str, str]) -> None:
    """Last test of the shared job: SUCCEEDED, in the job's own status and in ours; its last numbers stay."""
    name, namespace = rayjob

    def ended() -> jobs.Object | None:
        now: jobs.Object = (kubectl.get("rayjob", name, namespace) or {}).get("status", {})
        return now if now.get("jobStatus") in ("SUCCEEDED", "FAILED") else None

    assert eventually(ended, within=300, what="the RayJob's end", every=2)["jobStatus"] == "SUCCEEDED"
    monitors.await_phase(kubectl, name, namespace, "Succeeded", within=60)
    console = kubectl.run("logs", f"job/{name}", "-n", namespace)
    before = monitors.await_steps(kubectl, name, namespace, len(rayclusters.timings(console)))
    assert before["totals"]["gpuSeconds"] > 0
    monitors.assert_seconds(before, rayclusters.mean_timings(console), within=1.0)
    assert before["launch"]["program"] == rayclusters.PROGRAM
    assert before["launch"]["source"] == "spec"
    kubectl.delete("rayjob", name, namespace, timeout=90)
    after = monitors.status(kubectl, name, namespace)
    assert after["phase"] == "Succeeded"
    assert after["totals"]["gpuSeconds"] >= before["totals"]["gpuSeconds"]


def test_a_pytorchjob_with_a_shared_process_namespace(kubectl: Kubectl, namespace: str) -> None:
    """Master and Worker with 3 GPUs each on one node of 8: told apart by their processes; to Succeeded."""
    command = jobs.hold(45, utilization=[0.6] * 3, used_gib=[30.0] * 3)
    kubectl.apply(jobs.pytorchjob("sft", command=command, gpus=3, workers=1, shared_processes=True), namespace)
    monitors.await_gpus(kubectl, "sft", namespace, "6/6")
    named = [monitors.owned(kubectl, f"sft-{role}-0", namespace, 3) for role in ("master", "worker")]
    assert not named[0] & named[1]
    assert monitors.await_phase(kubectl, "sft", namespace, "Succeeded", within=120)["gpus"]["requested"] == 6
    job: Any = kubectl.get("pytorchjob", "sft", namespace)
    assert any(one["type"] == "Succeeded" and one["status"] == "True" for one in job["status"]["conditions"])


def test_without_a_shared_process_namespace_nothing_foreign_is_shown(kubectl: Kubectl, namespace: str) -> None:
    command = jobs.hold(300, utilization=[0.6] * 3, used_gib=[30.0] * 3)
    kubectl.apply(jobs.pytorchjob("apart", command=command, gpus=3), namespace)
    found = monitors.await_condition(
        kubectl, "apart", namespace, "TelemetryAvailable", value="False", reason="OwnershipUnknown"
    )
    assert found["message"]
    assert not monitors.uuids(monitors.sidecar_metrics(kubectl, "apart-master-0", namespace))
    assert monitors.status(kubectl, "apart", namespace)["gpus"]["text"] == "0/3"


def test_a_whole_node_needs_no_names(kubectl: Kubectl, namespace: str) -> None:
    command = jobs.hold(300, utilization=[0.5] * 8, used_gib=[20.0] * 8)
    kubectl.apply(jobs.pytorchjob("whole", command=command, gpus=8), namespace)
    now = monitors.await_gpus(kubectl, "whole", namespace, "8/8")
    assert now["dataQuality"]["ownership"] == "whole-node"
    assert now["dataQuality"]["source"] == "nvml"


def test_a_failed_job_is_failed(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply(jobs.pytorchjob("broken", command=["python3", "-c", "raise SystemExit(3)"], gpus=1), namespace)
    monitors.await_phase(kubectl, "broken", namespace, "Failed")


def test_health_is_unknown_without_telemetry_and_ok_with_it(kubectl: Kubectl, namespace: str) -> None:
    command = jobs.hold(300, utilization=[0.5] * 8, used_gib=[20.0] * 8)
    kubectl.apply(jobs.pytorchjob("seen", command=command, gpus=8), namespace)
    monitors.await_gpus(kubectl, "seen", namespace, "8/8")
    now = eventually(
        lambda: monitors.status(kubectl, "seen", namespace).get("health") == "OK", within=60, what="HEALTH OK"
    )
    assert now
    assert condition(monitors.monitor(kubectl, "seen", namespace), "TelemetryAvailable")["status"] == "True"


def test_without_the_library_the_reason_is_said(kubectl: Kubectl, namespace: str) -> None:
    """A pod outside NVIDIA's runtime: no library, no GPU shown, and the job runs."""
    command = ["python3", "-c", "import time; time.sleep(300)"]
    job = jobs.pytorchjob("bare", command=command, gpus=1, runtime_class="nvidia")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        del replica["template"]["spec"]["runtimeClassName"]
    kubectl.apply(job, namespace)
    monitors.await_condition(kubectl, "bare", namespace, "TelemetryAvailable", value="False", reason="NoLibrary")
    assert monitors.status(kubectl, "bare", namespace)["gpus"]["text"] == "0/1"
