# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One pass over a recorded run, and all that a report says of it. Pure but for the lines it is handed."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.cli.diagnose import advised
from verl_gpumonitor.cli.first_look import first_look, only_looked, unjudged
from verl_gpumonitor.cli.part import Part
from verl_gpumonitor.diagnosis.coverage import Coverage, coverage
from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.health import OK, health_text
from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.model.findings import TrackedFinding
from verl_gpumonitor.model.trace import GpuLine, Header, Record

from .tracks import Axis, Bucket, Seen, Track

GAP_SECONDS: Final = 60.0
GAP_INTERVALS: Final = 5.0
"""A silence longer than both, in seconds and in a GPU's usual intervals, is one of which nothing is known."""


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over all that is shown of the run, all GPUs together."""

    stage: str
    role: str
    gpu_seconds: float
    share: float
    """Of all GPU time."""
    seconds_per_step: float | None
    """Mean wall time in a whole step; None where none is known. The first, with the start in it, is none."""
    utilization: float | None
    memory_peak_ratio: float | None
    """Of the fullest GPU."""
    power_watts: float | None
    """Mean of a GPU."""


class GpuRun(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU over the run."""

    pod: str
    pool: str
    uuid: str
    index: int | None
    model: str | None
    memory_total_bytes: float | None
    points: tuple[tuple[float, Bucket], ...]
    """Begin of a stretch, in seconds since the begin of what is shown, and what is known of it."""
    whole: Bucket
    reasons: tuple[str, ...] = ()
    """Findings that name it."""

    @property
    def name(self) -> str:
        """As people call it."""
        return f"GPU {self.index}" if self.index is not None else self.uuid

    @property
    def memory_peak_ratio(self) -> float | None:
        """Highest memory as a share of the GPU's own."""
        high, total = self.whole.memory_high_bytes, self.memory_total_bytes
        return None if high is None or not total else min(1.0, high / total)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run that a report shows. What is unknown is None."""

    header: Header
    seconds: float
    """Of the record, or of its part that is shown."""
    width_seconds: float
    """Of one stretch."""
    gpus: tuple[GpuRun, ...]
    stages: tuple[StageRow, ...]
    steps: int
    step_seconds: float | None
    """Mean length of a whole step, which the stages' seconds add up to; None where none is known."""
    findings: tuple[TrackedFinding, ...]
    complaints: tuple[str, ...]
    """Lines that could not be read."""
    coverage: Coverage = Coverage()
    """What there was to judge by."""
    unjudged: str | None = None
    """Why the GPUs were not compared, so that a run without findings is not thereby healthy."""
    only_looked: str | None = None
    """Why no more than a first look was taken."""
    gap_seconds: float = 0.0
    """GPU time within the record for which there are no samples; it counts nowhere."""
    part: Part | None = None
    """What is shown of the record; None: all of it."""

    @property
    def begin(self) -> float:
        """Of what is shown, in seconds of the record."""
        return 0.0 if self.part is None else self.part.begin

    @property
    def end(self) -> float:
        """Of what is shown, in seconds of the record."""
        return self.begin + self.seconds

    @property
    def whole(self) -> Bucket:
        """All GPUs and all the time."""
        total = Bucket(stages={})
        for gpu in self.gpus:
            total = total.join(gpu.whole)
        return total

    @property
    def gpu_hours(self) -> float:
        """GPU time that was watched."""
        return sum(gpu.whole.seconds for gpu in self.gpus) / 3600

    @property
    def memory_peak_ratio(self) -> float | None:
        """Of the GPU nearest to its limit."""
        return max((r for gpu in self.gpus if (r := gpu.memory_peak_ratio) is not None), default=None)

    @property
    def headroom_bytes(self) -> float | None:
        """Least memory that any GPU had left."""
        known = [
            gpu.memory_total_bytes - gpu.whole.memory_high_bytes
            for gpu in self.gpus
            if gpu.memory_total_bytes and gpu.whole.memory_high_bytes is not None
        ]
        return max(0.0, min(known)) if known else None

    @property
    def verdict(self) -> str:
        """HEALTH of the whole run: the gravest finding, open or over, and how many others."""
        known = any(gpu.whole.utilization is not None or gpu.whole.memory_high_bytes is not None for gpu in self.gpus)
        telemetry = known and self.unjudged is None
        return health_text((tracked.finding.reason for tracked in self.findings), telemetry=telemetry)

    @property
    def healthy(self) -> bool:
        """Whether nothing was found, and there was something to look at."""
        return self.verdict == OK


class _Stage:
    """Sums of one stage while the record goes by."""

    def __init__(self) -> None:
        self.whole = Bucket(stages={})
        self.roles: dict[str, float] = {}
        self.peak_ratio: float | None = None

    def add(self, role: str, line: GpuLine, seconds: float, *, peak: float | None) -> None:
        """Take one sample; `peak`: highest memory that is this stage's for sure, as a share of the GPU's."""
        self.roles[role] = self.roles.get(role, 0.0) + seconds
        self.whole.seconds += seconds
        if line.utilization is not None:
            self.whole.known_seconds += seconds
            self.whole.busy_seconds += seconds * line.utilization
        if line.power_watts is not None:
            self.whole.powered_seconds += seconds
            self.whole.energy_joules += seconds * line.power_watts
        if peak is not None:
            self.peak_ratio = max(self.peak_ratio or 0.0, min(1.0, peak))


class _WholeSteps:
    """Steps that the record has from end to end: the one that it begins in, and the one that it ends in, are none."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.stages: dict[str, float] = {}
        """Stage -> GPU seconds in them."""
        self._end: float | None = None

    def end(self, history: History, *, since: float) -> None:
        """Take the step that has just ended; a stretch of time that stands for one where none are told is none.

        `since`: a step that began before is not taken.
        """
        if not history.step_ends:
            return
        begin, self._end = self._end, history.step_ends[-1]
        if begin is None or begin < since:
            return
        self.count += 1
        self.seconds += self._end - begin
        for gpu in history.gpus.values():
            for stage, past in gpu.past.items():
                self.stages[stage] = self.stages.get(stage, 0.0) + past.seconds_at(history.step - 1)

    def mean(self, stage: str, gpus: int) -> float | None:
        """Return a stage's seconds in a step; None where no whole step had it."""
        seconds = self.stages.get(stage)
        return seconds / gpus / self.count if seconds else None


class Gatherer:
    """Takes a record line by line, up to the end of what is shown of it."""

    def __init__(self, header: Header, part: Part | None = None) -> None:
        self.diagnosis = Diagnosis(header)
        self._part = part
        self._begin = 0.0 if part is None else part.begin
        self._steps_before = 0
        """Steps that ended before what is shown."""
        self._axis = Axis()
        self._tracks: dict[str, Track] = {}
        self._last: dict[str, float] = {}
        self._usual: dict[str, float] = {}
        """GPU -> seconds between its last samples."""
        self._gap_seconds = 0.0
        self._before: dict[str, str] = {}
        """GPU -> its stage at the sample before."""
        self._stages: dict[str, _Stage] = {}
        self._whole = _WholeSteps()

    def take(self, record: Record) -> None:
        """Take one line, in order of time."""
        before = self.diagnosis.history.step
        self.diagnosis.feed(record)
        if isinstance(record, GpuLine):
            self._sample(record)
        if self.diagnosis.history.step != before:
            self._whole.end(self.diagnosis.history, since=self._begin)
            if record.t < self._begin:
                self._steps_before = self._steps()

    def _sample(self, line: GpuLine) -> None:
        gpu = self.diagnosis.history.gpus.get(line.uuid)
        if gpu is None:
            return
        last = self._last.get(line.uuid, line.t)
        if line.uuid in self._last and line.t <= last:
            return
        self._last[line.uuid] = line.t
        seconds = self._spoken_for(line, last)
        goes_on = self._before.get(line.uuid) == gpu.stage
        self._before[line.uuid] = gpu.stage
        if line.t < self._begin:
            return
        since_begin = line.t - self._begin
        seconds = min(seconds, since_begin)
        # A peak since a sample before the part may be of before it.
        peak_bytes = line.memory_peak_bytes if last >= self._begin else None
        if line.uuid not in self._tracks:
            self._tracks[line.uuid] = self._axis.track()
        seen = Seen(
            seconds=seconds,
            stage=gpu.stage,
            utilization=line.utilization,
            memory_used_bytes=line.memory_used_bytes,
            memory_peak_bytes=peak_bytes,
            power_watts=line.power_watts,
            temperature_celsius=line.temperature_celsius,
        )
        # A sample speaks for the time before it.
        self._tracks[line.uuid].add(since_begin - seconds / 2, seen)
        # Nor need it be of this stage, where another was before.
        known = [line.memory_used_bytes, peak_bytes if goes_on else None]
        peak = max((size for size in known if size is not None), default=None)
        self._stages.setdefault(gpu.stage, _Stage()).add(
            gpu.role, line, seconds, peak=peak / gpu.total_bytes if peak is not None and gpu.total_bytes else None
        )

    def _spoken_for(self, line: GpuLine, last: float) -> float:
        """Return for how much of the time since a GPU's sample before a sample speaks: of a gap, as long as usual."""
        uuid, seconds = line.uuid, line.t - last
        usual = self._usual.get(uuid)
        if usual is None or seconds <= max(GAP_SECONDS, GAP_INTERVALS * usual):
            if seconds > 0:
                self._usual[uuid] = seconds
            return seconds
        self._gap_seconds += max(0.0, line.t - usual - max(last, self._begin))
        return usual

    def run(self, complaints: Iterable[str] = ()) -> Run:
        """Return what was gathered, after the last line."""
        history = self.diagnosis.history
        findings = tuple(advised(self.diagnosis, first_look(self.diagnosis)))
        if self._part is not None:
            findings = tuple(filter(self._part.holds, findings))
        self._axis.settle()
        return Run(
            header=history.header,
            part=self._part,
            seconds=max(self._axis.end, history.t - self._begin),
            width_seconds=self._axis.width,
            gpus=tuple(self._gpu(uuid, findings) for uuid in self._ordered()),
            stages=self._stage_rows(),
            steps=self._steps() - self._steps_before,
            step_seconds=self._whole.seconds / self._whole.count if self._whole.count else None,
            findings=findings,
            coverage=coverage(history),
            unjudged=unjudged(history),
            only_looked=only_looked(history),
            gap_seconds=self._gap_seconds,
            complaints=tuple(complaints),
        )

    def _steps(self) -> int:
        history = self.diagnosis.history
        return max(len(history.step_ends), history.step) if history.step_ends else 0

    def _ordered(self) -> list[str]:
        gpus = self.diagnosis.history.gpus
        return sorted(
            gpus, key=lambda uuid: (gpus[uuid].pod.name, gpus[uuid].index is None, gpus[uuid].index or 0, uuid)
        )

    def _gpu(self, uuid: str, findings: Sequence[TrackedFinding]) -> GpuRun:
        gpu = self.diagnosis.history.gpus[uuid]
        track = self._tracks.get(uuid) or Axis().track()
        return GpuRun(
            pod=gpu.pod.name,
            pool=gpu.pool,
            uuid=uuid,
            index=gpu.index,
            model=gpu.model,
            memory_total_bytes=gpu.total_bytes,
            points=tuple(track),
            whole=track.total(),
            reasons=tuple(dict.fromkeys(t.finding.reason for t in findings if uuid in t.finding.scope.gpus)),
        )

    def _stage_rows(self) -> tuple[StageRow, ...]:
        everything = sum(stage.whole.seconds for stage in self._stages.values())
        gpus = max(1, len(self._tracks))
        rows = [
            StageRow(
                stage=name,
                role=max(stage.roles, key=lambda role, known=stage.roles: known[role]),  # type: ignore[misc]
                gpu_seconds=stage.whole.seconds,
                share=stage.whole.seconds / everything if everything else 0.0,
                seconds_per_step=self._whole.mean(name, gpus),
                utilization=stage.whole.utilization,
                memory_peak_ratio=stage.peak_ratio,
                power_watts=(
                    stage.whole.energy_joules / stage.whole.powered_seconds if stage.whole.powered_seconds else None
                ),
            )
            for name, stage in self._stages.items()
            if stage.whole.seconds > 0
        ]
        return tuple(sorted(rows, key=lambda row: -row.gpu_seconds))


def gather(header: Header, records: Iterable[Record], complaints: Iterable[str] = (), part: Part | None = None) -> Run:
    """Read a run to its end, or to that of the part that is shown, where `records` end.

    `complaints` are read last: they grow while the record is read.
    """
    gatherer = Gatherer(header, part)
    for record in records:
        gatherer.take(record)
    return gatherer.run(complaints)
