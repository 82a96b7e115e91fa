# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A state in, a report that the controller's own decoder takes out."""

from verl_gpumonitor.model.report import MAX_GPUS, MAX_REPORT_BYTES, PodRef, RayNode, decode_report, encode
from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample, ReadingHealth
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source
from verl_gpumonitor_sidecar.reports import NodesDue, Sender, Turn, build
from verl_gpumonitor_sidecar.state import OwnGpu, PodState

SENDER = Sender(pod=PodRef(namespace="n", name="p", uid="u"), start_id="12345678", started_unix=1e9, version="0.1.0")
TURN = Turn(sequence=3, now=100.0, now_unix=1e9 + 10, dropped_reports=2)


def own(sample: GpuSample, counters: GpuCounters = GpuCounters()) -> OwnGpu:  # noqa: B008 - frozen
    return OwnGpu(sample=sample, counters=counters)


def test_a_report_says_what_is_known() -> None:
    sample = GpuSample(
        uuid="GPU-a",
        index=4,
        taken_at=99.5,
        utilization=0.5,
        memory_used_bytes=60,
        memory_total_bytes=80,
        power_watts=99.0,
    )
    counters = GpuCounters(
        observed_seconds=10, busy_seconds=5, memory_peak_bytes=70, memory_recent_peak_bytes=65, xid_errors={79: 1}
    )
    state = PodState(
        gpus_requested=1,
        source=Source.NVML,
        ownership=Ownership.WHOLE_NODE,
        gpus=(own(sample, counters),),
        gpus_visible=8,
        host=HostSample(memory_used_bytes=5, source="ray-agent"),
        health=ReadingHealth(collections=9, failures=1, timeouts=2),
    )
    report = build(SENDER, state, TURN)
    assert decode_report(encode(report)) == report
    (gpu,) = report.gpus
    assert (gpu.index, gpu.utilization, gpu.memory_used_bytes, gpu.memory_recent_peak_bytes) == (4, 0.5, 60, 65)
    assert gpu.xid_errors == {"79": 1}
    assert (report.collection.collections, report.collection.dropped_reports) == (9, 2)
    assert report.host is not None
    assert report.host.memory_used_bytes == 5


def test_old_gauges_are_left_out_and_counters_stay() -> None:
    sample = GpuSample(uuid="GPU-a", taken_at=90.0, utilization=0.5, memory_used_bytes=60)
    counters = GpuCounters(observed_seconds=10, memory_peak_bytes=70, memory_recent_peak_bytes=65)
    (gpu,) = build(SENDER, PodState(gpus_requested=1, gpus=(own(sample, counters),)), TURN).gpus
    assert (gpu.utilization, gpu.memory_used_bytes, gpu.memory_recent_peak_bytes) == (None, None, None)
    assert (gpu.observed_seconds, gpu.memory_peak_bytes) == (10, 70)


def test_impossible_values_are_unknown_and_spoil_no_report() -> None:
    sample = GpuSample(
        uuid="GPU-a",
        taken_at=100.0,
        error="x" * 500,
        model="m" * 500,
        utilization=1.5,
        memory_used_bytes=-1,
        memory_total_bytes=2**60,
        power_watts=float("nan"),
        temperature_celsius=1000.0,
    )
    state = PodState(
        gpus_requested=1,
        gpus=(own(sample, GpuCounters(energy_joules=float("inf"), xid_errors={-1: 1})),),
        message="y" * 9999,
    )
    report = build(SENDER, state, TURN)
    assert decode_report(encode(report)) == report
    (gpu,) = report.gpus
    assert {gpu.utilization, gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.power_watts, gpu.energy_joules} == {
        None
    }


def test_a_lost_gpu_is_named() -> None:
    sample = GpuSample(uuid="GPU-a", state=GpuState.LOST, error="GPU_IS_LOST")
    (gpu,) = build(SENDER, PodState(gpus_requested=1, gpus=(own(sample),)), TURN).gpus
    assert (gpu.state, gpu.error) == (GpuState.LOST, "GPU_IS_LOST")


def test_the_largest_report_is_taken() -> None:
    gpus = tuple(
        own(
            GpuSample(uuid=f"GPU-{number:060}", model="m" * 256, taken_at=100.0, utilization=0.123456789012),
            GpuCounters(xid_errors=dict.fromkeys(range(20), 2**40)),
        )
        for number in range(MAX_GPUS + 10)
    )
    report = build(SENDER, PodState(gpus_requested=1, gpus=gpus), TURN)
    assert len(report.gpus) == MAX_GPUS
    assert len(encode(report)) < MAX_REPORT_BYTES


def test_nodes_are_told_until_they_arrive_and_again_after_a_minute() -> None:
    due, one = NodesDue(), (RayNode(node_ip="10.0.0.1", gpu_uuids=["a"]),)
    assert due.take((), 0.0) == ()
    due.arrived(0.0)
    assert due.take(one, 10.0) == one
    assert due.take(one, 20.0) == one, "the report before was lost"
    due.arrived(20.0)
    assert due.take(one, 30.0) == ()
    due.arrived(30.0)
    assert due.take(one, 79.0) == ()
    assert due.take(one, 80.0) == one
    more = (*one, RayNode(node_ip="10.0.0.2", gpu_uuids=["b"]))
    due.arrived(80.0)
    assert due.take(more, 81.0) == more


def test_many_nodes_do_not_make_a_report_too_large() -> None:
    nodes = tuple(
        RayNode(node_ip=f"10.0.{number // 256}.{number % 256}", gpu_uuids=[f"GPU-{number:036}"] * 8)
        for number in range(3000)
    )
    turn = Turn(sequence=1, now=1.0, now_unix=1e9, ray_nodes=nodes)
    report = build(SENDER, PodState(gpus_requested=0, ray_nodes=nodes), turn)
    assert len(report.ray_nodes) > 300
    assert len(encode(report)) < MAX_REPORT_BYTES
