# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A state in, a report that the controller's own decoder takes out."""

from verl_gpumonitor.model.report import (
    MAX_GPUS,
    MAX_REPORT_BYTES,
    ClusterStages,
    NodeStages,
    PodRef,
    RayJobInfo,
    RayNode,
    RayStage,
    StageCount,
    StageNow,
    StageQuality,
    StepGpu,
    decode_report,
    encode,
)
from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample, ReadingHealth
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source
from verl_gpumonitor.timeline.steps import Step, StepStageSums
from verl_gpumonitor.timeline.totals import Totals
from verl_gpumonitor_sidecar.reports import JobsDue, NodesDue, Sender, Turn, build, fit
from verl_gpumonitor_sidecar.state import OwnGpu, PodState, StagePicture

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


# ---- stages ----


def totals(seconds: float) -> Totals:
    found = Totals()
    found.add(observed=seconds, busy=seconds / 2, energy=seconds * 100, throttled=seconds / 4)
    found.see(70)
    found.see(50)
    return found


def step(number: int, *, uuids: tuple[str, ...] = ("GPU-a", "GPU-b"), stages: int = 1) -> Step:
    return Step(
        number=number,
        step=None,
        begin=1e9,
        end=1e9 + 40,
        job="job",
        stages=tuple(
            StepStageSums(
                stage=f"stage_{place}",
                role="actor",
                begin=1e9,
                seconds=40.0,
                gpus={uuid: totals(40.0) for uuid in uuids},
            )
            for place in range(stages)
        ),
    )


def staged(picture: StagePicture, *uuids: str) -> PodState:
    return PodState(gpus_requested=len(uuids), gpus=tuple(own(GpuSample(uuid=uuid)) for uuid in uuids), stages=picture)


def test_a_report_tells_the_stages() -> None:
    counts = (StageCount("gen", "rollout", 9.0, 3.0, 900.0, 70, 50, "job"),)
    picture = StagePicture(
        now=StageNow(stage="gen", role="rollout", step=2),
        now_unix=1e9 + 9,
        quality=StageQuality(source=StageSource.RAY_STATE, steps=1),
        counts={"GPU-b": counts},
        steps=(step(1), step(2)),
    )
    turn = Turn(sequence=3, now=100.0, now_unix=1e9 + 10, steps_arrived=1)
    report = build(SENDER, staged(picture, "GPU-b", "GPU-a"), turn)
    assert decode_report(encode(report)) == report
    assert (report.stage, report.stage_quality) == (picture.now, picture.quality)
    assert [gpu.stages for gpu in report.gpus] == [list(counts), []]
    (told,) = report.steps
    assert (told.number, told.begin, told.end, told.job) == (2, 1e9, 1e9 + 40, "job")
    assert told.stages[0].gpus == [StepGpu(place, 40.0, 20.0, 4000.0, 70, 50, 10.0) for place in (1, 0)]


def test_what_was_found_long_ago_is_not_told_as_the_present() -> None:
    picture = StagePicture(now=StageNow(stage="gen", role="rollout"), now_unix=1e9)
    assert build(SENDER, staged(picture), TURN).stage is None


def test_a_report_carries_the_oldest_steps() -> None:
    picture = StagePicture(steps=tuple(step(number) for number in range(1, 30)))
    report = build(SENDER, staged(picture, "GPU-a"), TURN)
    assert [told.number for told in report.steps] == list(range(1, 17))


def test_a_report_that_is_too_large_gives_up_steps_first_and_counters_never() -> None:
    uuids = tuple(f"GPU-{number:036}" for number in range(MAX_GPUS))
    counts = tuple(
        StageCount(f"stage_{n}", "actor", 1e5 + 1 / 3, 1e5 + 1 / 3, 1e7 + 1 / 3, 2**36, 2**35) for n in range(32)
    )
    picture = StagePicture(
        counts=dict.fromkeys(uuids, counts),
        steps=tuple(step(number, uuids=uuids, stages=10) for number in range(1, 17)),
    )
    cluster = ClusterStages(
        source=StageSource.RAY_STATE,
        known_from=1.0,
        known_until=2.0,
        nodes=[NodeStages(node_ip=f"10.0.0.{n}", intervals=[RayStage("gen", "rollout", 1.0)] * 40) for n in range(100)],
    )
    turn = Turn(
        sequence=3,
        now=100.0,
        now_unix=1e9,
        cluster_stages=cluster,
        ray_jobs=(RayJobInfo(submission_id="a", entrypoint="x" * 16_000),) * 16,
    )
    report = build(SENDER, staged(picture, *uuids), turn)
    assert len(encode(report)) > MAX_REPORT_BYTES
    fitting = fit(report)
    assert len(encode(fitting)) <= MAX_REPORT_BYTES
    assert (fitting.steps, fitting.gpus) == ([], report.gpus)
    small = build(SENDER, staged(StagePicture(steps=(step(1),)), "GPU-a"), TURN)
    assert fit(small) is small


def test_the_jobs_are_told_when_they_change() -> None:
    due, jobs = JobsDue(), (RayJobInfo(submission_id="a"),)
    assert due.take(jobs, 0.0) == jobs
    due.arrived(0.0)
    assert due.take(jobs, 15.0) == ()
    assert due.take(jobs, 61.0) == jobs
