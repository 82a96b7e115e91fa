# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The guide's worked case on real parts: what is raised, where it is shown, and what must stay silent."""

from functools import partial

import pytest

from tests.cluster import jobs, monitors
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
