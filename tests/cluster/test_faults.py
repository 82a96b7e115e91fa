# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs, drivers and sidecars that fail: the job goes on, the rest is still reported, and the reason is said."""

import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import simgpu

from devcluster.layout import default_layout
from tests.cluster import jobs, monitors
from tests.cluster.kubectl import Kubectl, condition, eventually

pytestmark = pytest.mark.usefixtures("release")

POD = "faulty-master-0"
UP = "gpumonitor_gpu_up"


@pytest.fixture(scope="module")
def gpus() -> simgpu.StateFile:
    """The simulated GPUs of the node, as seen from outside."""
    return simgpu.open_state(default_layout().nvml / "state.d" / "state")


@pytest.fixture
def healthy(gpus: simgpu.StateFile) -> Iterator[simgpu.StateFile]:
    """The same, without faults before and after the test."""
    yield gpus
    simgpu.clear_faults(file=gpus)
    simgpu.set_driver(init_error=0, file=gpus)
    for number in range(8):
        simgpu.clear_values(number, file=gpus)
        simgpu.set_present(number, True, file=gpus)


@pytest.fixture(scope="module")
def whole_node(kubectl: Kubectl, release: str) -> Iterator[str]:
    """A job on all 8 GPUs, shared by these tests. Its namespace; the job is called `faulty`."""
    namespace = "test-faults"
    kubectl.delete("namespace", namespace)
    kubectl.run("create", "namespace", namespace)
    command = jobs.hold(1800, utilization=[0.5] * 8, used_gib=[20.0] * 8)
    kubectl.apply(jobs.pytorchjob("faulty", command=command, gpus=8), namespace)
    monitors.await_gpus(kubectl, "faulty", namespace, "8/8")
    yield namespace
    kubectl.delete("namespace", namespace, wait=True, timeout=120)


def up(kubectl: Kubectl, namespace: str) -> dict[str, float]:
    """gpumonitor_gpu_up by UUID."""
    series = monitors.sidecar_metrics(kubectl, POD, namespace)
    return {dict(labels)["uuid"]: number for (name, labels), number in series.items() if name == UP}


def await_up(kubectl: Kubectl, namespace: str, count: int, within: float = 40) -> dict[str, float]:
    """Wait until so many GPUs are up."""

    def look() -> dict[str, float] | None:
        found = up(kubectl, namespace)
        return found if sum(found.values()) == count else None

    return eventually(look, within=within, what=f"{count} GPUs up")


def job_is_unharmed(kubectl: Kubectl, namespace: str) -> None:
    """The job's own container has run without a restart."""
    pod = kubectl.get("pod", POD, namespace)
    assert pod
    main = pod["status"]["containerStatuses"][0]
    assert main["state"].get("running")
    assert main["restartCount"] == 0


def test_a_lost_gpu_is_a_lost_gpu(kubectl: Kubectl, whole_node: str, healthy: simgpu.StateFile) -> None:
    simgpu.lose(2, file=healthy)
    found = await_up(kubectl, whole_node, 7)
    assert found[simgpu.uuid_of(2)] == 0
    series = monitors.sidecar_metrics(kubectl, POD, whole_node)
    assert monitors.value(series, "gpumonitor_gpu_memory_used_bytes", uuid=simgpu.uuid_of(2)) is None
    monitors.await_gpus(kubectl, "faulty", whole_node, "7/8", within=40)
    partial = monitors.await_condition(
        kubectl, "faulty", whole_node, "TelemetryAvailable", value="True", reason="Partial"
    )
    assert "GPU_IS_LOST" in partial["message"] or "lost" in partial["message"]
    simgpu.clear_faults(file=healthy)
    await_up(kubectl, whole_node, 8)
    job_is_unharmed(kubectl, whole_node)


def test_a_hanging_call_leaves_the_others_fresh(kubectl: Kubectl, whole_node: str, healthy: simgpu.StateFile) -> None:
    simgpu.hang(gpu=3, file=healthy)
    found = await_up(kubectl, whole_node, 7)
    assert found[simgpu.uuid_of(3)] == 0

    def busy() -> float:
        series = monitors.sidecar_metrics(kubectl, POD, whole_node)
        return monitors.value(series, "gpumonitor_gpu_observed_seconds_total", uuid=simgpu.uuid_of(5)) or 0.0

    before = busy()
    eventually(lambda: busy() > before + 3, within=20, what="fresh seconds of another GPU")
    simgpu.clear_faults(file=healthy)
    await_up(kubectl, whole_node, 8)
    job_is_unharmed(kubectl, whole_node)


def test_no_sentinel_and_no_garbage_leaves(kubectl: Kubectl, whole_node: str, healthy: simgpu.StateFile) -> None:
    simgpu.set_values(
        1,
        gpu_utilization_percent=4294967295,
        power_milliwatts=simgpu.NOT_AVAILABLE,
        memory_used_bytes=simgpu.NOT_AVAILABLE,
        temperature_celsius=-1000,
        file=healthy,
    )

    def gone() -> bool:
        series = monitors.sidecar_metrics(kubectl, POD, whole_node)
        name = "gpumonitor_gpu_utilization_ratio"
        return (
            monitors.value(series, name, uuid=simgpu.uuid_of(1)) is None
            and monitors.value(series, name, uuid=simgpu.uuid_of(0)) is not None
        )

    eventually(gone, within=20, what="the garbage away and the rest there")
    for (name, _), number in monitors.sidecar_metrics(kubectl, POD, whole_node).items():
        assert not math.isnan(number), name
        assert abs(number) < 1e15, name


def restarts(kubectl: Kubectl, namespace: str) -> int:
    """How often the sidecar was restarted."""
    pod: Any = kubectl.get("pod", POD, namespace)
    return int(pod["status"]["initContainerStatuses"][-1]["restartCount"])


def test_a_killed_sidecar_comes_back_and_the_totals_go_on(
    kubectl: Kubectl, whole_node: str, healthy: simgpu.StateFile
) -> None:
    before = monitors.status(kubectl, "faulty", whole_node)["totals"]["gpuSeconds"]
    count = restarts(kubectl, whole_node)
    container = monitors.sidecar_pid(kubectl, POD, whole_node)
    os.kill(container, signal.SIGKILL)
    eventually(lambda: restarts(kubectl, whole_node) > count, within=60, what="a restart of the sidecar")
    await_up(kubectl, whole_node, 8, within=60)

    def grown() -> bool:
        now: float = monitors.status(kubectl, "faulty", whole_node)["totals"]["gpuSeconds"]
        return bool(now > before + 8 * 5)

    eventually(grown, within=60, what="totals above those before the kill")
    job_is_unharmed(kubectl, whole_node)


def test_a_driver_that_comes_late(kubectl: Kubectl, gpus: simgpu.StateFile, namespace: str, whole_node: str) -> None:
    """Not loaded while the sidecar starts: it says so, waits, and reads once the driver is there."""
    # Faults of the tests before are shown for a minute, and nobody can judge them while nothing is read.
    eventually(
        lambda: monitors.status(kubectl, "faulty", whole_node).get("health") == "OK", within=150, what="HEALTH OK again"
    )
    simgpu.set_driver(init_error=9, file=gpus)
    try:
        count = restarts(kubectl, whole_node)
        os.kill(monitors.sidecar_pid(kubectl, POD, whole_node), signal.SIGKILL)
        eventually(lambda: restarts(kubectl, whole_node) > count, within=60, what="a restart of the sidecar")
        monitors.await_condition(
            kubectl, "faulty", whole_node, "TelemetryAvailable", value="False", reason="DriverNotLoaded"
        )
        assert monitors.status(kubectl, "faulty", whole_node)["health"] in ("Unknown", "TelemetryUnavailable")
    finally:
        simgpu.set_driver(init_error=0, file=gpus)
    await_up(kubectl, whole_node, 8, within=60)
    eventually(
        lambda: condition(monitors.monitor(kubectl, "faulty", whole_node), "TelemetryAvailable")["status"] == "True",
        within=40,
        what="telemetry back",
    )
