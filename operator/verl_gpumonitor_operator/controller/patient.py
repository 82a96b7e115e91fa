# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One running workload before the library's diagnosis: its reports as typed records of a trace. Pure.

Times are seconds since the first report, by the time of receipt. Load and power are means since the report before, by
the differences of counters; a GPU that does not answer has no line. Steps come whole from those who sampled them.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from sys import intern
from types import MappingProxyType
from typing import Final, NamedTuple

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.reported import ReportedHistory, piece_of
from verl_gpumonitor.diagnosis.rulebook import RULES
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.history import Piece
from verl_gpumonitor.model.report import GpuReport, HostReport, Report, StageNow, StepReport
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.trace import (
    TRACE_FORMAT,
    Frameworks,
    GpuLine,
    Header,
    HostLine,
    JobLine,
    NvmlLine,
    PodLine,
    TraceGpu,
    TracePod,
    XidLine,
)
from verl_gpumonitor.model.trace import Workload as Subject
from verl_gpumonitor.model.vocabulary import UNKNOWN, GpuState

from .holders import engines_of, holders_of
from .launch import Command
from .podtrack import USAGE_SECONDS, PodTrack
from .ports import PodRecord
from .workload import Workload

TELEMETRY: Final = frozenset(("TelemetryUnavailable", "TelemetryPartial"))
"""Of what is not seen the controller knows more than its lines tell."""
_ERRORS: Final = {GpuState.LOST: "GPU_IS_LOST", GpuState.NOT_RESPONDING: "TIMEOUT", GpuState.ERROR: "UNKNOWN"}
OLD_REPORTS: Final = 4
"""Host memory that so many reports have not told is not known any more."""
SOME: Final = 2
"""GPUs of a pod that are followed where there is no room for all: the fullest and the idlest."""


class Follows(StrEnum):
    """How much of a workload the diagnosis looks at."""

    ALL = "all"
    SOME = "some"
    """Of each pod the fullest and the idlest GPU."""
    NONE = "none"


class Counted(NamedTuple):
    """Counters of one GPU at the last report."""

    observed_seconds: float
    busy_seconds: float
    energy_joules: float | None
    xids: Mapping[str, int]
    state: GpuState
    stages: Sequence[str]
    """Shared by the GPUs of a pod."""
    peaks: "array[int]"
    """Of each of these stages the highest memory so far, bytes; 0 where it is not known."""


@dataclass(kw_only=True, slots=True)
class PodChart:
    """What is remembered of one pod between two reports."""

    uid: str
    start_id: str = ""
    last_step: int = 0
    gpus: dict[str, Counted] = field(default_factory=dict)
    """Those that are followed."""
    stages: list[str] = field(default_factory=list)
    """Those of the GPU that was counted last; GPUs of a pod have the same as a rule."""
    phase: str = ""
    restarts: int = 0
    ended: tuple[str | None, int] = (None, 0)
    """Reason of the main container's newest end that was told, and its restarts then."""
    sampled_at: float = 0.0
    """Of the newest sample of metrics.k8s.io that was taken."""


class Patient:
    """One workload under diagnosis."""

    def __init__(
        self,
        workload: Workload,
        *,
        follows: Follows,
        depth: int,
        interval_seconds: float,
        thresholds: Thresholds,
        began: float,
    ) -> None:
        self.follows = follows
        self.depth = depth
        self.began = began
        """When its first report came; Unix seconds."""
        job = workload.job
        self._subject = Subject(kind=job.kind.value, namespace=job.namespace, name=job.name)
        self._interval = interval_seconds
        self._command: Command | None = None
        self._phase = ""
        self._pods: dict[str, PodChart] = {}
        """By name."""
        self.unfollowed: set[str] = set()
        """Pods for whose GPUs there was no room."""
        header = Header(format=TRACE_FORMAT, workload=self._subject, pods=[])
        self.history = ReportedHistory(header, depth=depth, interval_seconds=interval_seconds)
        self.diagnosis = self._diagnosis(thresholds)
        self._judged_t = float("-inf")
        self.judgements = 0
        """How often all rules were asked."""

    def _diagnosis(self, thresholds: Thresholds) -> Diagnosis:
        rules = [rule for rule in RULES if rule.reason not in TELEMETRY]
        return Diagnosis(self.history.header, thresholds, rules=rules, history=self.history)

    @property
    def gpus(self) -> int:
        """GPUs that are followed."""
        return len(self.history.gpus)

    def t_of(self, at: float) -> float:
        """Return the time of the trace; it never runs back."""
        return max(self.history.t, at - self.began)

    def launched(self, command: Command | None) -> None:
        """Take the command line, once it is known."""
        if command is None or command == self._command:
            return
        self._command = command
        self.history.launched(
            Header(
                format=TRACE_FORMAT,
                workload=self._subject,
                entrypoint=command.text,
                frameworks=Frameworks(verl=command.verl_version),
            )
        )
        self.history.ran(command.ray_names)

    def take(self, workload: Workload, track: PodTrack, report: Report, at: float, *, room: int) -> None:
        """Take a report that was counted. `room`: so many more GPUs may be followed."""
        t, name = self.t_of(at), track.record.name
        chart = self._pods.get(name)
        if chart is None or chart.uid != track.record.uid:
            self.drop(name)
            chart = self._pods[name] = PodChart(uid=track.record.uid)
            self.history.add_pod(_pod(track))
        if chart.start_id != report.start_id:
            chart.start_id, chart.last_step, chart.gpus = report.start_id, 0, dict.fromkeys(chart.gpus, _NOTHING)
        self._container(chart, track.record, t)
        self._follow(chart, track, report, room)
        self._stage(workload, name, report, t)
        holders = holders_of(report) if chart.gpus else {}
        for gpu in report.gpus:
            if gpu.uuid in chart.gpus:
                # First: what a GPU held before anybody was listed on it is from before the job.
                self.history.holders(gpu.uuid, holders.get(gpu.uuid), t=t)
                self._gpu(chart, name, gpu, t)
        self._host(chart, track, report, t, at)
        for step in report.steps:
            if step.number > chart.last_step:
                chart.last_step = step.number
                if workload.counts(step.job):
                    engines = [one for one in engines_of(step, report) if one[0] in chart.gpus]
                    self.history.take_step(name, list(_pieces(step, report, chart)), t=t, engines=engines)

    def drop(self, name: str) -> None:
        """Forget a pod."""
        if self._pods.pop(name, None) is not None:
            self.history.drop_pod(name)
            self.unfollowed.discard(name)

    def keep(self, names: set[str]) -> None:
        """Forget all pods but these."""
        for name in [name for name in self._pods if name not in names]:
            self.drop(name)

    def judging(self, at: float, *, phase: str, every_seconds: float) -> Iterator[None]:
        """Ask the rules, one after the other, if there is something new and the time has come."""
        t = self.t_of(at)
        if phase != self._phase:
            self._phase = phase
            self.history.feed(JobLine(t=t, phase=phase))
        newest = self.history.t
        if newest <= self._judged_t or t - self._judged_t < every_seconds:
            return
        # From here on: what comes while rules are asked is for the next time.
        self._judged_t = newest
        self._forget_old_host(t)
        self.history.settle(t)
        yield
        yield from self.diagnosis.judging(newest)
        self.judgements += 1

    # Lines

    def _follow(self, chart: PodChart, track: PodTrack, report: Report, room: int) -> None:
        if self.follows is Follows.NONE or chart.gpus or not report.gpus:
            return
        wanted = report.gpus
        if self.follows is Follows.SOME and len(wanted) > SOME:
            wanted = _extremes(wanted)
        if len(wanted) > room:
            self.unfollowed.add(track.record.name)
            return
        self.unfollowed.discard(track.record.name)
        chart.gpus = {gpu.uuid: _NOTHING for gpu in wanted}
        self.history.add_pod(_pod(track, wanted, requested=len(wanted)))

    def _container(self, chart: PodChart, record: PodRecord, t: float) -> None:
        main = record.main
        restarts = main.restart_count if main is not None else 0
        reason, code = (None, None) if main is None else (main.reason, main.exit_code)
        if code is None and main is not None and restarts > chart.restarts:
            reason, code = main.last_reason, main.last_exit_code
        ended = (reason if code is not None else None, restarts)
        if (record.phase, restarts, ended) == (chart.phase, chart.restarts, chart.ended):
            return
        told = code is not None and ended != chart.ended
        chart.phase, chart.restarts, chart.ended = record.phase, restarts, ended
        self.history.feed(
            PodLine(
                t=t,
                pod=record.name,
                phase=record.phase,
                container="main",
                reason=reason if told else None,
                exit_code=code if told else None,
                restart_count=restarts,
            )
        )

    def container(self, record: PodRecord, at: float) -> None:
        """Take the state of a pod's containers, which is news also where no report comes."""
        chart = self._pods.get(record.name)
        if chart is not None and chart.uid == record.uid:
            self._container(chart, record, self.t_of(at))

    def _stage(self, workload: Workload, name: str, report: Report, t: float) -> None:
        if report.stage_quality.source in (StageSource.NONE, StageSource.LAUNCH):
            return
        told: Iterable[StageNow] = (*([report.stage] if report.stage is not None else []), *report.other_stages)
        now = next((one for one in told if workload.counts(one.job)), None)
        if now is not None and now.stage != UNKNOWN:
            self.history.present(name, now.stage, now.role, t=t)

    def _gpu(self, chart: PodChart, name: str, gpu: GpuReport, t: float) -> None:
        before = chart.gpus[gpu.uuid]
        chart.gpus[gpu.uuid] = Counted(
            gpu.observed_seconds,
            gpu.busy_seconds,
            gpu.energy_joules,
            gpu.xid_errors or _NO_XIDS,
            gpu.state,
            _stages_of(gpu, chart),
            array("q", [stage.memory_peak_bytes or 0 for stage in gpu.stages]),
        )
        for code, number in gpu.xid_errors.items():
            if number > before.xids.get(code, 0):
                self.history.feed(XidLine(t=t, pod=name, uuid=gpu.uuid, code=int(code)))
        if gpu.state is not before.state:
            error = gpu.error or _ERRORS.get(gpu.state)
            self.history.feed(NvmlLine(t=t, pod=name, uuid=gpu.uuid, error=None if gpu.state is GpuState.OK else error))
        if gpu.state is GpuState.OK:
            self.history.feed(_line(before, gpu, name, t))
        now = chart.gpus[gpu.uuid]
        if before is not _NOTHING and (now.peaks != before.peaks or now.stages is not before.stages):
            peaks = dict(zip(before.stages, before.peaks, strict=True))
            for stage in gpu.stages:
                peak = stage.memory_peak_bytes
                if peak is not None and peak > peaks.get(stage.stage, 0):
                    self.history.peak(gpu.uuid, stage.stage, stage.role, peak)

    def _host(self, chart: PodChart, track: PodTrack, report: Report, t: float, at: float) -> None:
        """Take the pod's host memory: what its report says, else what metrics.k8s.io said since the report before."""
        host = report.host or _NO_HOST
        used, limit = host.memory_used_bytes, host.memory_limit_bytes
        usage = track.usage_at(at) if used is None else None
        if usage is not None:
            if usage.sampled_at == chart.sampled_at:
                # A sample counts once: told again, it would say that nothing has changed since.
                return
            chart.sampled_at = usage.sampled_at
            used, limit = usage.memory_used_bytes, track.record.memory_limit_bytes
        if used is None and host.shm_used_bytes is None:
            return
        self.history.feed(
            HostLine(
                t=t,
                pod=track.record.name,
                memory_used_bytes=used,
                memory_limit_bytes=limit,
                shm_used_bytes=host.shm_used_bytes,
                shm_size_bytes=host.shm_size_bytes,
            )
        )

    def _forget_old_host(self, t: float) -> None:
        """Have it not known any more what was in use long ago: nobody has told it since."""
        for pod in self.history.pods.values():
            line = pod.last_host
            old = line is not None and t - line.t > max(USAGE_SECONDS, OLD_REPORTS * self._interval)
            if line is not None and old and line.memory_used_bytes is not None and not pod.ended:
                self.history.feed(HostLine(t=t, pod=pod.name, memory_limit_bytes=line.memory_limit_bytes))


_NO_HOST: Final = HostReport()
_NO_XIDS: Final[Mapping[str, int]] = MappingProxyType({})
_NOTHING: Final = Counted(0.0, 0.0, None, _NO_XIDS, GpuState.OK, (), array("q"))
"""Counters at the start of a sidecar, or before it was heard."""


def _stages_of(gpu: GpuReport, chart: PodChart) -> Sequence[str]:
    """Return a GPU's stages as the pod's, if they are the same: a report brings each name anew."""
    stages = [stage.stage for stage in gpu.stages]
    if stages != chart.stages:
        chart.stages = [intern(stage) for stage in stages]
    return chart.stages


def _pod(track: PodTrack, gpus: Iterable[GpuReport] = (), *, requested: int | None = None) -> TracePod:
    record = track.record
    return TracePod(
        name=record.name,
        node=record.node_name,
        node_role="head" if track.is_head else "worker",
        group=track.pool,
        gpus_requested=record.gpus_requested if requested is None else requested,
        gpus=[
            TraceGpu(
                uuid=gpu.uuid,
                index=gpu.index,
                model=gpu.model,
                memory_total_bytes=gpu.memory_total_bytes,
                power_limit_watts=gpu.power_limit_watts,
            )
            for gpu in gpus
        ],
    )


def _extremes(gpus: Iterable[GpuReport]) -> list[GpuReport]:
    """Return the fullest GPU, and the idlest of the others."""
    ordered = sorted(gpus, key=lambda gpu: (-(gpu.memory_used_bytes or 0), gpu.uuid))
    return [ordered[0], min(ordered[1:], key=lambda gpu: (gpu.busy_seconds, gpu.uuid))]


def _line(before: Counted, gpu: GpuReport, name: str, t: float) -> GpuLine:
    observed = gpu.observed_seconds - before.observed_seconds
    utilization, power = gpu.utilization, gpu.power_watts
    if observed > 0 and before is not _NOTHING:
        utilization = min(1.0, max(0.0, gpu.busy_seconds - before.busy_seconds) / observed)
        if gpu.energy_joules is not None and before.energy_joules is not None:
            power = max(0.0, gpu.energy_joules - before.energy_joules) / observed
    return GpuLine(
        t=t,
        pod=name,
        uuid=gpu.uuid,
        utilization=utilization,
        memory_used_bytes=gpu.memory_used_bytes,
        memory_peak_bytes=gpu.memory_recent_peak_bytes,
        power_watts=power,
        temperature_celsius=gpu.temperature_celsius,
        throttled=gpu.throttled,
    )


def _pieces(step: StepReport, report: Report, chart: PodChart) -> Iterable[tuple[str, Piece]]:
    for stage in step.stages:
        for figures in stage.gpus:
            uuid = report.gpus[figures.gpu].uuid if figures.gpu < len(report.gpus) else ""
            if uuid in chart.gpus:
                yield (
                    uuid,
                    piece_of(
                        stage=stage.stage,
                        role=stage.role,
                        seconds=stage.seconds,
                        observed_seconds=figures.observed_seconds,
                        busy_seconds=figures.busy_seconds,
                        energy_joules=figures.energy_joules,
                        peak_bytes=figures.memory_peak_bytes,
                        floor_bytes=figures.memory_floor_bytes,
                        throttled_seconds=figures.throttled_seconds,
                    ),
                )
