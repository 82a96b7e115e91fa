# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What has added up for a workload: counters by (pod uid, start id), so that nothing is lost or counted twice. Pure.

A report's counters are cumulative since the start of its sidecar, so the newest report of a start says all of that
start, and those that were lost on the way are not missed. The sum of a pod runs over its starts, that of a workload
over its pods. What can never report again (a pod that is gone) is folded into one sum, so that memory stays bounded.
Counters by stage follow the same rules.

`ledger_text` writes it down and reads it back, for the life after a restart of the controller. A start that goes on
reporting then simply replaces what was written; one that ended meanwhile keeps its last known sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec

from verl_gpumonitor.model.report import MAX_GPUS, GpuReport, Report, StageCount
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .totals import (
    NO_STAGES,
    NOTHING,
    OTHER,
    Peak,
    StageSums,
    Totals,
    add,
    higher,
    observed,
    of_gpus,
    sum_of,
)

MAX_STARTS: Final = 16
"""Starts of one pod that are kept apart. A sidecar that restarts more often has its oldest starts folded."""


_stage_decoder = msgspec.msgpack.Decoder(list[StageCount])
_stage_encoder = msgspec.msgpack.Encoder()


class GpuCount(NamedTuple):
    """Counters of one GPU in one start."""

    observed_seconds: float
    busy_seconds: float
    energy_joules: float | None
    peak: Peak | None
    total_bytes: int | None = None
    """Memory of the GPU."""
    stages: bytes = b""
    """Its counters by stage, packed: unpacked they would take 3 KB for each GPU there is, and are needed together."""

    @classmethod
    def of(cls, gpu: GpuReport) -> "GpuCount":
        """Take them from a report."""
        total = gpu.memory_total_bytes
        peak = Peak(gpu.memory_peak_bytes, total) if gpu.memory_peak_bytes is not None and total else None
        return cls(gpu.observed_seconds, gpu.busy_seconds, gpu.energy_joules, peak, total, _packed(gpu.stages))

    def after_end(self, gpu: GpuReport) -> "GpuCount":
        """Take from a later report only what it has learnt of stages, since they come to be known a minute late.

        What nobody can name is left as it was: it is what a GPU does when there is no job.
        """
        named = [count for count in gpu.stages if count.stage not in UNNAMED]
        unnamed = [count for count in self.stage_counts() if count.stage in UNNAMED]
        return self._replace(stages=_packed(named + unnamed))

    def stage_counts(self) -> list[StageCount]:
        """Counters by stage."""
        return _stage_decoder.decode(self.stages) if self.stages else []


UNNAMED: Final = (OTHER, UNKNOWN)


def _packed(counts: list[StageCount]) -> bytes:
    return _stage_encoder.encode(counts) if counts else b""


@dataclass(kw_only=True, slots=True)
class StartLedger:
    """One start of one sidecar."""

    sequence: int
    started_at: float
    """By the pod's clock, like `sent_at`."""
    sent_at: float
    final: bool = False
    """It said goodbye: its counters are complete."""
    gpus: dict[str, GpuCount] = field(default_factory=dict)
    """By UUID. A GPU that a later report leaves out keeps its last counters. At most `MAX_GPUS`: no pod has
    more, and one that sent new ones with each report would take all memory; those past them do not count."""
    steps: int = 0
    """Whole training steps that it has seen."""
    written: Totals = NOTHING
    """What a ledger before said of this start; a lower bound."""
    _totals: Totals | None = None

    def count(self, report: Report, *, after_end: bool = False) -> None:
        """Take the counters of a later report of this start. `after_end`: that of the job, when little counts."""
        self.sequence = report.sequence
        self.sent_at = report.sent_at
        self.final = self.final or report.final
        self.steps = max(self.steps, report.stage_quality.steps, *(step.number for step in report.steps))
        self._totals = None
        for gpu in report.gpus:
            before = self.gpus.get(gpu.uuid)
            if after_end:
                if before is not None:
                    self.gpus[gpu.uuid] = before.after_end(gpu)
            elif before is not None or len(self.gpus) < MAX_GPUS:
                self.gpus[gpu.uuid] = GpuCount.of(gpu)

    def summed(self) -> "StartLedger":
        """Return its sums alone, in place of each GPU's, which its next report would say again."""
        return replace(self, gpus={}, written=self.totals, _totals=None) if self.gpus else self

    def without_stages(self) -> "StartLedger":
        """Return its sums alone, as if they had been written."""
        return replace(self, gpus={}, written=replace(self.totals, stages=NO_STAGES), _totals=None)

    @property
    def totals(self) -> Totals:
        """Sum over its GPUs. Remembered, since it is asked for more often than a report comes."""
        if self._totals is None:
            self._totals = self._sum()
        return self._totals

    def _sum(self) -> Totals:
        gpu_seconds = busy = 0.0
        energy: float | None = None
        peak = self.written.peak
        for gpu in self.gpus.values():
            gpu_seconds += gpu.observed_seconds
            busy += gpu.busy_seconds
            energy = add(energy, gpu.energy_joules)
            peak = higher(peak, gpu.peak)
        known = self.written.energy_joules
        return Totals(
            gpu_seconds=max(self.written.gpu_seconds, gpu_seconds),
            busy_seconds=max(self.written.busy_seconds, busy),
            energy_joules=known if energy is None else max(energy, known or 0.0),
            peak=peak,
            stages=self._sum_stages(),
        )

    def _sum_stages(self) -> StageSums:
        """Sum by stage: as it is said now or as it was written, whichever is further on; never a mixture of both.

        What was written may have `other` in place of some stages, and adding these up twice would be easy.
        """
        now = of_gpus((gpu.stage_counts(), gpu.total_bytes) for gpu in self.gpus.values() if gpu.stages)
        return now if observed(now) >= observed(self.written.stages) else self.written.stages


class Counted(NamedTuple):
    """What became of a report."""

    accepted: int
    """Highest sequence of its start that counts."""
    replay: bool
    new_start: bool


@dataclass(kw_only=True, slots=True)
class PodLedger:
    """All starts of the sidecar of one pod."""

    starts: dict[str, StartLedger] = field(default_factory=dict)
    folded: Totals = NOTHING
    """Sum over starts that are no longer kept apart."""
    folded_until: float = 0.0
    """Latest `started_at` among them: a start that began no later is one of these, and its reports are replays."""
    folded_steps: int = 0
    """Training steps that they have seen."""

    def count(self, report: Report, *, after_end: bool = False) -> Counted:
        """Count a report, unless it is a replay: a sequence that does not rise, or of a start that was folded.

        `after_end`: the job has ended, so that of what is counted now only the stages belong to it.
        """
        start = self.starts.get(report.start_id)
        if start is not None:
            if report.sequence <= start.sequence:
                return Counted(start.sequence, replay=True, new_start=False)
            start.count(report, after_end=after_end)
            return Counted(start.sequence, replay=False, new_start=False)
        if report.started_at <= self.folded_until:
            return Counted(report.sequence, replay=True, new_start=False)
        start = StartLedger(sequence=report.sequence, started_at=report.started_at, sent_at=report.sent_at)
        start.count(report, after_end=after_end)
        # Of starts before this one nothing more is expected; whole, sixteen of them can take megabytes.
        self.starts = {start_id: one.summed() for start_id, one in self.starts.items()}
        self.starts[report.start_id] = start
        self._fold_oldest()
        return Counted(start.sequence, replay=False, new_start=True)

    def totals(self, *, gone: bool) -> Totals:
        """Sum over all starts. `gone`: the pod is no more, so that its last start has ended, too."""
        if len(self.starts) == 1 and not gone and self.folded_until == 0.0:
            return next(iter(self.starts.values())).totals
        ordered = sorted(self.starts.values(), key=lambda start: start.started_at)
        parts = [self.folded]
        for number, start in enumerate(ordered):
            before = ordered[number - 1] if number else None
            gap = max(0.0, start.started_at - before.sent_at) if before else 0.0
            ended = gone or number + 1 < len(ordered)
            lost = 1 if ended and not start.final else 0
            parts += [start.totals, Totals(gaps_seconds=gap, lost_starts=lost)]
        return sum_of(parts)

    @property
    def steps(self) -> int:
        """Whole training steps that its sidecar has seen, in all its starts."""
        return self.folded_steps + sum(start.steps for start in self.starts.values())

    def lean(self) -> "PodLedger":
        """Return the same counters with all starts folded but the newest, and that one without its stages.

        It says them all again with its next report, unless it has ended.
        """
        ledger = PodLedger(
            starts=dict(self.starts),
            folded=self.folded,
            folded_until=self.folded_until,
            folded_steps=self.folded_steps,
        )
        ledger._fold_oldest(keep=1)
        ledger.starts = {
            start_id: start if start.final else start.without_stages() for start_id, start in ledger.starts.items()
        }
        return ledger

    def _fold_oldest(self, *, keep: int = MAX_STARTS) -> None:
        while len(self.starts) > keep:
            oldest = min(self.starts, key=lambda start_id: self.starts[start_id].started_at)
            start = self.starts.pop(oldest)
            following = min(self.starts.values(), key=lambda other: other.started_at)
            gap = max(0.0, following.started_at - start.sent_at)
            self.folded = self.folded.plus(start.totals).plus(
                Totals(gaps_seconds=gap, lost_starts=0 if start.final else 1)
            )
            self.folded_until = max(self.folded_until, start.started_at)
            self.folded_steps += start.steps


def total_of(pods: Iterable[PodLedger], *, gone: bool) -> Totals:
    """Sum over pods."""
    return sum_of(pod.totals(gone=gone) for pod in pods)
