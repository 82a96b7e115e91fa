# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The guide's worked case on real parts: what is raised, where it is shown, and what must stay silent.

A course of memory and a hang are jobs of the stand-in for verl, whose stages are known: what is advised names settings
of the job's own command line, and all is over once its cause is gone.
"""

from functools import partial
from typing import Any

import pytest

from tests.cluster import jobs, monitors, rayclusters
from tests.cluster.kubectl import Kubectl, condition, eventually

pytestmark = pytest.mark.usefixtures("release")

HOT = {"utilization": [0.85, 0.10, 0.11, 0.12], "used_gib": [74.5, 18.0, 18.5, 19.0]}
EVEN = {"utilization": [0.65, 0.63, 0.62, 0.60], "used_gib": [37.5, 36.0, 35.0, 34.0]}
FULL = {"utilization": [0.95, 0.94, 0.96, 0.95], "used_gib": [77.3, 77.2, 77.4, 77.3]}


def start(kubectl: Kubectl, namespace: str, name: str, shape: dict[str, list[float]]) -> None:
    """Run a job of 4 GPUs in this shape, and wait until all of them are seen."""
    command = jobs.hold(600, **shape)
    kubectl.apply(jobs.pytorchjob(name, command=command, gpus=4, shared_processes=True), namespace)
    monitors.await_gpus(kubectl, name, namespace, "4/4")


def test_one_hot_gpu_is_an_oom_risk_and_an_imbalance(kubectl: Kubectl, namespace: str) -> None:
    start(kubectl, namespace, "hot", HOT)
    risk = monitors.await_condition(kubectl, "hot", namespace, "OOMRisk", value="True", reason="OOMRisk")
    uneven = monitors.await_condition(kubectl, "hot", namespace, "Imbalanced", value="True", reason="Imbalance")
    assert "GiB" in risk["message"]
    assert uneven["message"]
    assert monitors.status(kubectl, "hot", namespace)["health"] == "OOMRisk+1"
    job = kubectl.get("pytorchjob", "hot", namespace)
    ours = monitors.monitor(kubectl, "hot", namespace)
    assert job
    for uid in (job["metadata"]["uid"], ours["metadata"]["uid"]):
        about = eventually(partial(monitors.events, kubectl, namespace, uid), within=30, what="Events about the object")
        assert {"OOMRisk", "Imbalance"} <= {one["reason"] for one in about}
    assert "OOMRisk" in kubectl.run("describe", "pytorchjob", "hot", "-n", namespace)
    assert "OOMRisk" in kubectl.run("describe", "gpumonitor", "hot", "-n", namespace)


@pytest.mark.parametrize("shape", [pytest.param(EVEN, id="after the fix"), pytest.param(FULL, id="97% on all GPUs")])
def test_what_must_stay_silent(kubectl: Kubectl, namespace: str, shape: dict[str, list[float]]) -> None:
    """A balanced job, and one whose engine fills all GPUs alike by design, raise nothing."""
    start(kubectl, namespace, "calm", shape)
    monitors.await_condition(kubectl, "calm", namespace, "OOMRisk", value="False", reason="NotDetected")
    eventually(lambda: monitors.status(kubectl, "calm", namespace).get("health") == "OK", within=60, what="HEALTH OK")
    found = monitors.monitor(kubectl, "calm", namespace)
    assert condition(found, "Imbalanced")["status"] == "False"


def test_contexts_on_gpu_0_are_found_and_over_once_they_are_gone(kubectl: Kubectl, namespace: str) -> None:
    name, kind = "contexts", "ForeignGPUMemory"
    command = jobs.contexts(240)
    kubectl.apply(jobs.pytorchjob(name, command=command, gpus=4, shared_processes=True), namespace)
    monitors.await_gpus(kubectl, name, namespace, "4/4")
    found = monitors.await_condition(kubectl, name, namespace, kind, value="True", reason="ForeignProcess", within=180)
    assert "3 processes of other ranks" in found["message"]
    assert "ForeignProcess" in kubectl.run("describe", "pytorchjob", name, "-n", namespace)
    monitors.await_condition(kubectl, name, namespace, kind, value="False", reason="NotDetected", within=300)


def test_without_a_shared_namespace_foreign_processes_are_unknown(kubectl: Kubectl, namespace: str) -> None:
    """Of a whole node the GPUs are known without looking at processes."""
    name, kind = "apart", "ForeignGPUMemory"
    kubectl.apply(jobs.pytorchjob(name, command=jobs.hold(300, **EVEN), gpus=8), namespace)
    monitors.await_gpus(kubectl, name, namespace, "8/8")
    monitors.await_condition(kubectl, name, namespace, kind, value="Unknown", reason="NoProcessLists")


SETTINGS = (
    "data.max_prompt_length=1024",
    "data.max_response_length=2048",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576",
    "actor_rollout_ref.rollout.name=vllm",
)
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def start_verl(kubectl: Kubectl, namespace: str, name: str, *, scenario: str, steps: int, **environment: str) -> None:
    """Run the stand-in for verl in a scenario, on one worker of four GPUs, and wait until all of them are seen."""
    rayclusters.add_program(kubectl, namespace)
    command = rayclusters.entrypoint(steps=steps, more=SETTINGS)
    job = rayclusters.rayjob(name, command=command, environment={"SCENARIO": scenario, **environment})
    kubectl.apply(job, namespace)
    monitors.await_phase(kubectl, name, namespace, "Running", within=240)
    monitors.await_gpus(kubectl, name, namespace, "4/4", within=120)


def told(kubectl: Kubectl, name: str, namespace: str, reason: str) -> list[dict[str, Any]]:
    """Events of a reason about the job and its GPUMonitor, both there."""

    def look() -> list[dict[str, Any]] | None:
        job = kubectl.get("rayjob", name, namespace)
        assert job
        uids = (job["metadata"]["uid"], monitors.monitor(kubectl, name, namespace)["metadata"]["uid"])
        every = [[one for one in monitors.events(kubectl, namespace, uid) if one["reason"] == reason] for uid in uids]
        return [one for about in every for one in about] if all(every) else None

    return eventually(look, within=30, what=f"Events {reason} about both objects")


def test_a_course_of_memory_is_told_with_the_setting_to_change_and_is_over_once_mended(
    kubectl: Kubectl, namespace: str
) -> None:
    name = "course"
    start_verl(kubectl, namespace, name, scenario="oom-course", steps=26)
    risk = monitors.await_condition(kubectl, name, namespace, "OOMRisk", value="True", reason="OOMRisk", within=300)
    assert "update_actor" in risk["message"]
    now = monitors.status(kubectl, name, namespace)
    assert now["health"].startswith("OOMRisk")
    (found,) = [one for one in now["findings"] if one["reason"] == "OOMRisk"]
    assert (found["stage"], found["role"]) == ("update_actor", "actor")
    (tokens,) = [one for one in now["recommendations"] if one.get("parameter") == TOKENS]
    assert tokens["current"] == "24576"
    assert int(tokens["suggested"]) < 24576
    first = told(kubectl, name, namespace, "OOMRisk")
    assert len(first) == 2
    assert all("update_actor" in one["note"] and TOKENS in one["note"] for one in first)
    assert TOKENS in kubectl.run("describe", "rayjob", name, "-n", namespace)
    monitors.await_condition(kubectl, name, namespace, "OOMRisk", value="False", reason="NotDetected", within=420)
    assert len(told(kubectl, name, namespace, "OOMRiskResolved")) == 2
    again = told(kubectl, name, namespace, "OOMRisk")
    assert [one["metadata"]["name"] for one in again] == [one["metadata"]["name"] for one in first]


def test_a_hang_names_the_rank_that_stands_still_and_is_over_when_it_goes_on(kubectl: Kubectl, namespace: str) -> None:
    """The GPUMonitor, made by hand, asks for less patience than three minutes."""
    name = "hangs"
    reference = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": name}
    mine = {
        "apiVersion": "gpumonitor.dev/v1alpha1",
        "kind": "GPUMonitor",
        "metadata": {"name": name},
        "spec": {"workloadRef": reference, "thresholds": {"hang": {"spinSeconds": 40}}},
    }
    kubectl.apply(mine, namespace)
    start_verl(kubectl, namespace, name, scenario="hang", steps=14, HANG_SECONDS="600")
    monitors.await_condition(kubectl, name, namespace, "SpecAccepted", value="True", reason="Accepted")
    hung = monitors.await_condition(kubectl, name, namespace, "Hung", value="True", reason="Hang", within=300)
    assert "update_actor" in hung["message"]
    now = monitors.status(kubectl, name, namespace)
    assert now["health"].startswith("Hang")
    (found,) = [one for one in now["findings"] if one["reason"] == "Hang"]
    assert len(found["gpus"]) == 1
    assert len(told(kubectl, name, namespace, "Hang")) == 2
    assert condition(monitors.monitor(kubectl, name, namespace), "Imbalanced")["status"] != "True"
    (worker,) = kubectl.list("pod", namespace, selector="ray.io/node-type=worker")
    kubectl.exec(worker["metadata"]["name"], namespace, "touch", "/tmp/hang-is-over", container="ray-worker")
    monitors.await_condition(kubectl, name, namespace, "Hung", value="False", reason="NotDetected", within=120)
    assert len(told(kubectl, name, namespace, "HangResolved")) == 2


def test_thresholds_that_cannot_be_are_said_and_not_used(kubectl: Kubectl, namespace: str) -> None:
    start(kubectl, namespace, "strict", EVEN)
    kubectl.patch("gpumonitor", "strict", namespace, {"spec": {"thresholds": {"oomRisk": {"nearRatio": 7}}}})
    said = monitors.await_condition(kubectl, "strict", namespace, "SpecAccepted", value="False")
    assert "nearRatio" in said["message"]
