# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A recorded run as its sidecars would have reported it: each quarter of a minute, steps whole, stages as they run.

The trace's own history stands for the sidecars' sampling and attribution.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_gpumonitor.diagnosis.history import GpuHistory, History, PodHistory
from verl_gpumonitor.model.report import (
    MAX_PROCESSES,
    REPORT_FORMAT,
    GpuProcesses,
    GpuReport,
    HostReport,
    PodRef,
    ProcessReport,
    Report,
    StageNow,
    StageQuality,
    StepEngine,
    StepGpu,
    StepReport,
    StepStage,
)
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.trace import GpuLine, Header, HostLine, JobLine, NvmlLine, PodLine, Record, XidLine
from verl_gpumonitor.model.vocabulary import UNKNOWN, GpuState, Ownership, Source
from verl_gpumonitor.stages.programs import program_of

BEGAN = 1_000_000.0
"""Unix time of the trace's begin."""


class Told(NamedTuple):
    """What the controller hears at a time of the trace."""

    t: float
    what: Report | PodLine | JobLine


@dataclass
class Gpu:
    """Counters of one GPU."""

    observed: float = 0.0
    busy: float = 0.0
    energy: float = 0.0
    last_t: float | None = None
    line: GpuLine | None = None
    recent: list[tuple[float, float]] = field(default_factory=list)
    xids: dict[str, int] = field(default_factory=dict)
    error: str | None = None


class Sidecars:
    """All sidecars of one run."""

    def __init__(self, header: Header, interval: float) -> None:
        self.history = History(header)
        self.interval = interval
        self.gpus: dict[str, Gpu] = {}
        self.hosts: dict[str, HostLine] = {}
        self.steps: dict[str, list[StepReport]] = {}
        self.next: dict[str, float] = {}
        self.sequences: dict[str, int] = {}
        self._step = 0

    def told(self, records: Iterable[Record]) -> Iterator[Told]:
        """Yield what the controller hears, in order of time."""
        for record in records:
            if isinstance(record, JobLine | PodLine):
                yield Told(record.t, record)
            self._take(record)
            for place, name in enumerate(self.history.pods):
                due = self.next.setdefault(name, record.t + self.interval * (0.2 + place % 5 / 8))
                if record.t >= due and name in self.history.heard:
                    self.next[name] = due + self.interval
                    yield Told(record.t, self._report(self.history.pods[name], record.t))

    def _take(self, record: Record) -> None:
        self.history.feed(record)
        if isinstance(record, GpuLine):
            self._sample(record)
        elif isinstance(record, HostLine):
            self.hosts[record.pod] = record
        elif isinstance(record, XidLine) and record.uuid is not None:
            xids = self.gpus.setdefault(record.uuid, Gpu()).xids
            xids[str(record.code)] = xids.get(str(record.code), 0) + 1
        elif isinstance(record, NvmlLine) and record.uuid is not None:
            self.gpus.setdefault(record.uuid, Gpu()).error = record.error
        if self.history.step != self._step:
            self._step = self.history.step
            if self.history.stages_told:
                self._finish(record.t)

    def _sample(self, line: GpuLine) -> None:
        gpu = self.gpus.setdefault(line.uuid, Gpu())
        seconds = 0.0 if gpu.last_t is None else min(5.0, line.t - gpu.last_t)
        gpu.last_t, gpu.line, gpu.error = line.t, line, None
        if line.utilization is not None:
            gpu.observed += seconds
            gpu.busy += seconds * line.utilization
        gpu.energy += seconds * (line.power_watts or 0.0)
        peak = max(float(line.memory_used_bytes or 0), float(line.memory_peak_bytes or 0))
        gpu.recent = [(t, size) for t, size in gpu.recent if t > line.t - 60.0] + [(line.t, peak)]

    def _finish(self, t: float) -> None:
        for name, pod in self.history.pods.items():
            stages: dict[tuple[str, str], list[StepGpu]] = {}
            lengths: dict[str, float] = {}
            for place, gpu in enumerate(pod.gpus.values()):
                for stage, past in gpu.past.items():
                    for piece in past.last(1):
                        if piece.step == self._step - 1:
                            lengths[stage] = max(lengths.get(stage, 0.0), piece.seconds)
                            stages.setdefault((stage, piece.role), []).append(
                                StepGpu(
                                    place,
                                    piece.known_seconds,
                                    piece.busy_seconds,
                                    piece.energy_joules if piece.powered_seconds else None,
                                    None if piece.peak_bytes is None else int(piece.peak_bytes),
                                    None if piece.floor_bytes is None else int(piece.floor_bytes),
                                    piece.throttled_seconds if piece.throttle_known_seconds else None,
                                )
                            )
            told = [
                StepStage(
                    stage=stage,
                    role=role,
                    begin=BEGAN + t,
                    seconds=lengths[stage],
                    gpus=gpus,
                    engines=[
                        StepEngine(place, int(gpu.engine_bytes[stage]))
                        for place, gpu in enumerate(pod.gpus.values())
                        if stage in gpu.engine_bytes
                    ],
                )
                for (stage, role), gpus in stages.items()
            ]
            step = StepReport(number=self._step, begin=BEGAN + t, end=BEGAN + t, stages=told)
            self.steps.setdefault(name, []).append(step)

    def _report(self, pod: PodHistory, t: float) -> Report:
        self.sequences[pod.name] = self.sequences.get(pod.name, 0) + 1
        host = self.hosts.get(pod.name)
        first = next(iter(pod.gpus.values()), None)
        told = pod.work.seen and first is not None and first.stage != UNKNOWN
        limit = None if host is None else host.memory_limit_bytes or pod.memory_limit_bytes
        return Report(
            format=REPORT_FORMAT,
            pod=PodRef(namespace="train", name=pod.name, uid=f"uid-{pod.name}"),
            start_id="start-001",
            sequence=self.sequences[pod.name],
            sent_at=BEGAN + t,
            started_at=BEGAN,
            source=Source.NVML,
            ownership=Ownership.WHOLE_NODE,
            gpus_requested=pod.gpus_requested,
            gpus=[self._gpu(gpu.uuid, gpu.index, gpu.total_bytes, gpu.power_limit_watts) for gpu in pod.gpus.values()],
            gpu_processes=[
                _holders(place, gpu) for place, gpu in enumerate(pod.gpus.values()) if gpu.processes_t is not None
            ],
            host=None
            if host is None
            else HostReport(
                memory_used_bytes=_whole(host.memory_used_bytes),
                memory_limit_bytes=_whole(limit),
                shm_used_bytes=_whole(host.shm_used_bytes),
                shm_size_bytes=_whole(host.shm_size_bytes),
            ),
            stage=StageNow(stage=first.stage, role=first.role) if told and first is not None else None,
            stage_quality=StageQuality(source=StageSource.RAY_STATE if told else StageSource.NONE),
            steps=self.steps.pop(pod.name, []),
        )

    def _gpu(self, uuid: str, index: int | None, total: float | None, limit: float | None) -> GpuReport:
        gpu = self.gpus.get(uuid, Gpu())
        line = gpu.line
        return GpuReport(
            uuid=uuid,
            index=index,
            state=GpuState.OK if gpu.error is None else GpuState.LOST if gpu.error == "GPU_IS_LOST" else GpuState.ERROR,
            error=gpu.error,
            utilization=None if line is None else line.utilization,
            memory_used_bytes=None if line is None else _whole(line.memory_used_bytes),
            memory_total_bytes=_whole(total),
            memory_recent_peak_bytes=_whole(max((size for _, size in gpu.recent), default=0.0) or None),
            power_watts=None if line is None else line.power_watts,
            power_limit_watts=limit,
            temperature_celsius=None if line is None else line.temperature_celsius,
            throttled=None if line is None else line.throttled,
            observed_seconds=gpu.observed,
            busy_seconds=gpu.busy,
            energy_joules=gpu.energy or None,
            xid_errors=dict(gpu.xids),
        )


def _holders(place: int, gpu: GpuHistory) -> GpuProcesses:
    named = sorted(gpu.processes.items(), key=lambda item: -item[1])[:MAX_PROCESSES]
    return GpuProcesses(
        place,
        [ProcessReport(pid, int(size), _program(gpu.titles.get(pid, ""))) for pid, size in named],
        len(gpu.processes) - len(named),
    )


def _program(title: str) -> str:
    """Return what a sidecar tells of a process with this title; a trace has blanks between the words."""
    return program_of(title.replace(" ", "\0").encode())


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
