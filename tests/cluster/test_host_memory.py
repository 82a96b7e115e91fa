# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory of a job whose program tells none: from a real kubelet, by way of metrics-server."""

import pytest

from tests.cluster import jobs, monitors
from tests.cluster.kubectl import Kubectl

pytestmark = pytest.mark.usefixtures("release")

MIB = 2**20
FILLED = f"held = b'x' * (985 * {MIB})\n" + jobs.HOLD
"""A program without marks, and without Ray, that fills nearly all of 1 GiB."""


def test_a_job_without_marks_that_fills_its_memory_is_a_host_memory_risk(kubectl: Kubectl, namespace: str) -> None:
    command = ["python3", "-c", FILLED, *jobs.hold(600, utilization=[0.6] * 8, used_gib=[30.0] * 8)[3:]]
    job = jobs.pytorchjob("filled", command=command, gpus=8)
    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    container["resources"]["limits"]["memory"] = "1Gi"
    kubectl.apply(job, namespace)
    monitors.await_gpus(kubectl, "filled", namespace, "8/8")
    found = monitors.await_condition(
        kubectl, "filled", namespace, "HostMemoryRisk", value="True", reason="HostMemoryRisk", within=180
    )
    assert "of its 1.0 GiB of host memory" in found["message"]
    now = monitors.status(kubectl, "filled", namespace)
    assert now["dataQuality"]["hostMemory"] == "metrics.k8s.io"
    assert "HostMemoryRisk" in now["health"]
