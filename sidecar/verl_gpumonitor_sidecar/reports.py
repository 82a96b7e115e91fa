# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the report of one moment from the state. Pure.

The controller refuses a report as a whole when one value breaks its bound, so a value out of bounds is unknown here.
"""

import math
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

import msgspec

from verl_gpumonitor.model.report import (
    MAX_BYTES,
    MAX_GPUS,
    MAX_PROCESSES,
    MAX_REPORT_BYTES,
    MAX_STAGES,
    REPORT_FORMAT,
    ClusterStages,
    CollectionReport,
    GpuProcesses,
    GpuReport,
    HostReport,
    PodRef,
    ProcessReport,
    RayJobInfo,
    RayNode,
    Report,
    StageNow,
    StepEngine,
    StepGpu,
    StepReport,
    StepStage,
    encode,
)
from verl_gpumonitor.model.samples import GpuProcess, HostSample
from verl_gpumonitor.timeline.steps import Step
from verl_gpumonitor.timeline.totals import Totals

from .state import OwnGpu, PodState, gauges, is_present, recent_peak

NODES_AGAIN_SECONDS: Final = 60.0
"""A controller that was restarted has forgotten the nodes; it hears them again after so long."""
_MAX_STEPS: Final = 16
_MAX_REASONS: Final = 16
_MAX_OTHERS: Final = 8
_MAX_RAY_JOBS: Final = 16
_MAX_RAY_NODES: Final = 4096
_MAX_NODES_BYTES: Final = 160 * 1024
"""Part of a report that the nodes may take: some 400 of 8 GPUs. Those beyond are not named."""


T = TypeVar("T")


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """Who reports: constant from the sidecar's start to its end."""

    pod: PodRef
    start_id: str
    started_unix: float
    version: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What is particular to one report."""

    sequence: int
    now: float
    """Monotonic, to tell what is too old to be sent."""
    now_unix: float
    final: bool = False
    dropped_reports: int = 0
    ray_nodes: tuple[RayNode, ...] = ()
    ray_jobs: tuple[RayJobInfo, ...] = ()
    cluster_stages: ClusterStages | None = None
    steps_arrived: int = 0
    """Steps up to this number are with the controller."""


class Due(Generic[T]):
    """Which reports carry a list that seldom changes: when it changed, until that arrived, and then each 60 s."""

    def __init__(self) -> None:
        self._sent: tuple[T, ...] = ()
        self._arrived: tuple[T, ...] = ()
        self._arrived_at: float | None = None

    def take(self, items: tuple[T, ...], now: float) -> tuple[T, ...]:
        """Return what the next report carries."""
        current = self._arrived_at is not None and now - self._arrived_at < NODES_AGAIN_SECONDS
        self._sent = () if current and items == self._arrived else items
        return self._sent

    def arrived(self, now: float) -> None:
        """Note that the last report was accepted."""
        if self._sent:
            self._arrived, self._arrived_at = self._sent, now


class NodesDue(Due[RayNode]):
    """The GPUs of a Ray head's nodes."""


class JobsDue(Due[RayJobInfo]):
    """The jobs of a Ray head."""


def build(sender: Sender, state: PodState, turn: Turn) -> Report:
    """Return the report. Only the pod's own GPUs are in it."""
    return Report(
        format=REPORT_FORMAT,
        pod=sender.pod,
        start_id=sender.start_id,
        sequence=turn.sequence,
        sent_at=max(0.0, turn.now_unix),
        started_at=max(0.0, sender.started_unix),
        version=sender.version[:64],
        final=turn.final,
        source=state.source,
        unavailable=state.unavailable,
        message=state.message[:512] if state.message else None,
        gpus_requested=state.gpus_requested,
        gpus_visible=state.gpus_visible,
        ownership=state.ownership,
        gpus=[_gpu(gpu, state, turn.now) for gpu in state.gpus[:MAX_GPUS]],
        gpu_processes=_processes(state, turn.now),
        host=_host(state.host),
        collection=CollectionReport(
            collections=state.health.collections,
            failures=state.health.failures,
            timeouts=state.health.timeouts,
            dropped_reports=turn.dropped_reports,
        ),
        ray_nodes=_fitting(turn.ray_nodes),
        stage=_stage_now(state, turn),
        other_stages=list(state.stages.others_now[:_MAX_OTHERS]) if is_present(state, turn.now_unix) else [],
        stage_quality=state.stages.quality,
        steps=_steps(state, turn),
        cluster_stages=turn.cluster_stages,
        ray_jobs=list(turn.ray_jobs[:_MAX_RAY_JOBS]),
    )


def fit(report: Report) -> Report:
    """Return the report without what would make it too large to be taken: steps first, counters never.

    A step, a cluster's stages or a list that is left out now goes with a later report.
    """
    smaller = (
        report,
        msgspec.structs.replace(report, steps=report.steps[: len(report.steps) // 4]),
        msgspec.structs.replace(report, steps=[]),
        msgspec.structs.replace(report, steps=[], cluster_stages=None),
        msgspec.structs.replace(report, steps=[], cluster_stages=None, ray_jobs=report.ray_jobs[:1]),
    )
    bare = msgspec.structs.replace(report, steps=[], cluster_stages=None, ray_jobs=[], ray_nodes=[], gpu_processes=[])
    return next((fitting for fitting in smaller if len(encode(fitting)) <= MAX_REPORT_BYTES), bare)


def _stage_now(state: PodState, turn: Turn) -> StageNow | None:
    """Return what runs, if that was found a moment ago."""
    return state.stages.now if is_present(state, turn.now_unix) else None


def _steps(state: PodState, turn: Turn) -> list[StepReport]:
    """Return the oldest of the steps that the controller does not have."""
    places = {gpu.sample.uuid: place for place, gpu in enumerate(state.gpus[:MAX_GPUS])}
    new = [step for step in state.stages.steps if step.number > turn.steps_arrived]
    return [_step(step, places) for step in new[:_MAX_STEPS]]


def _step(step: Step, places: Mapping[str, int]) -> StepReport:
    return StepReport(
        number=step.number,
        step=step.step if step.step is not None and step.step >= 0 else None,
        begin=max(0.0, step.begin),
        end=max(0.0, step.end),
        stages=[
            StepStage(
                stage=stage.stage,
                role=stage.role,
                begin=max(0.0, stage.begin),
                seconds=stage.seconds,
                gpus=[
                    StepGpu(
                        places[uuid],
                        totals.observed_seconds,
                        totals.busy_seconds,
                        _within(totals.energy_joules, 0.0, 1e15),
                        _whole(totals.memory_peak_bytes, MAX_BYTES),
                        _whole(totals.memory_floor_bytes, MAX_BYTES),
                        totals.throttled_seconds,
                    )
                    for uuid, totals in stage.gpus.items()
                    if uuid in places
                ],
                engines=[
                    StepEngine(places[uuid], held)
                    for uuid, totals in stage.gpus.items()
                    if uuid in places and (held := _engine(stage.stage, totals)) is not None
                ],
            )
            for stage in step.stages[:MAX_STAGES]
        ],
        job=step.job,
    )


def _engine(stage: str, totals: Totals) -> int | None:
    """Return what an engine had where it works, and what it kept elsewhere."""
    return _whole(totals.engine_peak_bytes if stage == "gen" else totals.engine_floor_bytes, MAX_BYTES)


def _processes(state: PodState, now: float) -> list[GpuProcesses]:
    """Return who holds each GPU, where lists can be had: those that name nobody say something, too."""
    programs = state.programs
    if programs is None:
        return []
    found = []
    for place, gpu in enumerate(state.gpus[:MAX_GPUS]):
        listed = gauges(gpu.sample, state, now).processes
        if listed is not None:
            named = sorted(listed, key=lambda each: (-(each.memory_used_bytes or 0), each.pid))[:MAX_PROCESSES]
            found.append(
                GpuProcesses(place, [_process(each, programs) for each in named], max(0, len(listed) - len(named)))
            )
    return found


def _process(process: GpuProcess, programs: Mapping[int, str]) -> ProcessReport:
    used = _whole(process.memory_used_bytes, MAX_BYTES)
    return ProcessReport(process.pid, used, programs.get(process.pid, "")[:64])


def _fitting(nodes: tuple[RayNode, ...]) -> list[RayNode]:
    """Return as many nodes as a report can take."""
    fitting, taken = [], 0
    for node in nodes[:_MAX_RAY_NODES]:
        taken += 48 + len(node.node_ip) + sum(len(uuid) + 3 for uuid in node.gpu_uuids)
        if taken > _MAX_NODES_BYTES:
            break
        fitting.append(node)
    return fitting


def _gpu(gpu: OwnGpu, state: PodState, now: float) -> GpuReport:
    sample, counters = gauges(gpu.sample, state, now), gpu.counters
    return GpuReport(
        uuid=sample.uuid,
        state=sample.state,
        error=sample.error[:128] if sample.error else None,
        index=_whole(sample.index, 1024),
        model=sample.model[:256] if sample.model else None,
        utilization=_within(sample.utilization, 0.0, 1.0),
        memory_used_bytes=_whole(sample.memory_used_bytes, MAX_BYTES),
        memory_reserved_bytes=_whole(sample.memory_reserved_bytes, MAX_BYTES),
        memory_total_bytes=_whole(sample.memory_total_bytes, MAX_BYTES),
        memory_peak_bytes=_whole(counters.memory_peak_bytes, MAX_BYTES),
        memory_recent_peak_bytes=_whole(recent_peak(gpu, sample), MAX_BYTES),
        power_watts=_within(sample.power_watts, 0.0, 5000.0),
        power_limit_watts=_within(sample.power_limit_watts, 0.0, 5000.0),
        temperature_celsius=_within(sample.temperature_celsius, -50.0, 250.0),
        throttled=None if sample.throttled is None else list(sample.throttled[:_MAX_REASONS]),
        observed_seconds=counters.observed_seconds,
        busy_seconds=counters.busy_seconds,
        energy_joules=_within(counters.energy_joules, 0.0, 1e15),
        stages=list(state.stages.counts.get(sample.uuid, ())[:MAX_STAGES]),
        xid_errors={str(code): count for code, count in counters.xid_errors.items() if 0 <= code <= 99_999},
    )


def _host(host: HostSample | None) -> HostReport | None:
    if host is None:
        return None
    return HostReport(
        memory_used_bytes=_whole(host.memory_used_bytes, MAX_BYTES),
        memory_limit_bytes=_whole(host.memory_limit_bytes, MAX_BYTES),
        shm_used_bytes=_whole(host.shm_used_bytes, MAX_BYTES),
        shm_size_bytes=_whole(host.shm_size_bytes, MAX_BYTES),
        source=host.source,
    )


def _within(value: float | None, lowest: float, highest: float) -> float | None:
    """Return the value if it is a number between the bounds, else None."""
    return value if value is not None and math.isfinite(value) and lowest <= value <= highest else None


def _whole(value: int | None, highest: int) -> int | None:
    return value if value is not None and 0 <= value <= highest else None
