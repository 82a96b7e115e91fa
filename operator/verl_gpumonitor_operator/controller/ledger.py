# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What has added up for a workload: counters by (pod uid, start id), so that nothing is lost or counted twice. Pure.

A report's counters are cumulative since the start of its sidecar, so the newest report of a start says all of that
start, and those that were lost on the way are not missed. The sum of a pod runs over its starts, that of a workload
over its pods. What can never report again (a pod that is gone) is folded into one sum, so that memory stays bounded.

The ledger can be written down and read back, for the life after a restart of the controller. A start that goes on
reporting then simply replaces what was written; one that ended meanwhile keeps its last known sum. Where there is no
room for all pods, sums of what can never report again are kept, and starts that will most likely report again are not.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from verl_gpumonitor.model.report import MAX_GPUS, GpuReport, Report

MAX_STARTS: Final = 16
"""Starts of one pod that are kept apart. A sidecar that restarts more often has its oldest starts folded."""


class Peak(NamedTuple):
    """Highest memory in use of one GPU."""

    used_bytes: int
    total_bytes: int

    @property
    def ratio(self) -> float:
        """Share of the GPU's memory, at most 1."""
        return min(1.0, self.used_bytes / self.total_bytes)


def higher(one: Peak | None, other: Peak | None) -> Peak | None:
    """Return the peak that is nearer to its GPU's limit; None if neither is known."""
    if one is None or other is None:
        return one or other
    return one if one.used_bytes * other.total_bytes >= other.used_bytes * one.total_bytes else other


def add(one: float | None, other: float | None) -> float | None:
    """Sum of what is known; None only if nothing is."""
    if one is None or other is None:
        return one if other is None else other
    return one + other


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over GPUs and time."""

    gpu_seconds: float = 0.0
    """GPU time covered by utilisation samples."""
    busy_seconds: float = 0.0
    energy_joules: float | None = None
    """None while no GPU offers it."""
    peak: Peak | None = None
    gaps_seconds: float = 0.0
    """Time between two starts of a sidecar, in which nobody counted."""
    lost_starts: int = 0
    """Starts that ended without a last report."""

    def plus(self, other: "Totals") -> "Totals":
        """Both together."""
        return Totals(
            gpu_seconds=self.gpu_seconds + other.gpu_seconds,
            busy_seconds=self.busy_seconds + other.busy_seconds,
            energy_joules=add(self.energy_joules, other.energy_joules),
            peak=higher(self.peak, other.peak),
            gaps_seconds=self.gaps_seconds + other.gaps_seconds,
            lost_starts=self.lost_starts + other.lost_starts,
        )

    def minus(self, base: "Totals") -> "Totals":
        """What came after `base`, never below zero. The peak stays: nobody can say when it was."""
        energy = None if self.energy_joules is None else max(0.0, self.energy_joules - (base.energy_joules or 0.0))
        return Totals(
            gpu_seconds=max(0.0, self.gpu_seconds - base.gpu_seconds),
            busy_seconds=max(0.0, self.busy_seconds - base.busy_seconds),
            energy_joules=energy,
            peak=self.peak,
            gaps_seconds=max(0.0, self.gaps_seconds - base.gaps_seconds),
            lost_starts=max(0, self.lost_starts - base.lost_starts),
        )

    @property
    def utilization(self) -> float | None:
        """Mean load over the whole time; None if nothing was observed."""
        return min(1.0, self.busy_seconds / self.gpu_seconds) if self.gpu_seconds > 0 else None


class GpuCount(NamedTuple):
    """Counters of one GPU in one start."""

    observed_seconds: float
    busy_seconds: float
    energy_joules: float | None
    peak: Peak | None

    @classmethod
    def of(cls, gpu: GpuReport) -> "GpuCount":
        """Take them from a report."""
        peak = (
            Peak(gpu.memory_peak_bytes, gpu.memory_total_bytes)
            if gpu.memory_peak_bytes is not None and gpu.memory_total_bytes
            else None
        )
        return cls(gpu.observed_seconds, gpu.busy_seconds, gpu.energy_joules, peak)


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
    written: Totals = Totals()
    """What a ledger before said of this start; a lower bound."""
    _totals: Totals | None = None

    def count(self, report: Report) -> None:
        """Take the counters of a later report of this start."""
        self.sequence = report.sequence
        self.sent_at = report.sent_at
        self.final = self.final or report.final
        self._totals = None
        for gpu in report.gpus:
            if gpu.uuid in self.gpus or len(self.gpus) < MAX_GPUS:
                self.gpus[gpu.uuid] = GpuCount.of(gpu)

    @property
    def totals(self) -> Totals:
        """Sum over its GPUs. Remembered, since it is asked for more often than a report comes."""
        if self._totals is None:
            self._totals = self._sum()
        return self._totals

    def _sum(self) -> Totals:
        observed = busy = 0.0
        energy: float | None = None
        peak = self.written.peak
        for gpu in self.gpus.values():
            observed += gpu.observed_seconds
            busy += gpu.busy_seconds
            energy = add(energy, gpu.energy_joules)
            peak = higher(peak, gpu.peak)
        known = self.written.energy_joules
        return Totals(
            gpu_seconds=max(self.written.gpu_seconds, observed),
            busy_seconds=max(self.written.busy_seconds, busy),
            energy_joules=known if energy is None else max(energy, known or 0.0),
            peak=peak,
        )


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
    folded: Totals = Totals()
    """Sum over starts that are no longer kept apart."""
    folded_until: float = 0.0
    """Latest `started_at` among them: a start that began no later is one of these, and its reports are replays."""

    def count(self, report: Report) -> Counted:
        """Count a report, unless it is a replay: a sequence that does not rise, or of a start that was folded."""
        start = self.starts.get(report.start_id)
        if start is not None:
            if report.sequence <= start.sequence:
                return Counted(start.sequence, replay=True, new_start=False)
            start.count(report)
            return Counted(start.sequence, replay=False, new_start=False)
        if report.started_at <= self.folded_until:
            return Counted(report.sequence, replay=True, new_start=False)
        start = StartLedger(sequence=report.sequence, started_at=report.started_at, sent_at=report.sent_at)
        start.count(report)
        self.starts[report.start_id] = start
        self._fold_oldest()
        return Counted(start.sequence, replay=False, new_start=True)

    def totals(self, *, gone: bool) -> Totals:
        """Sum over all starts. `gone`: the pod is no more, so that its last start has ended, too."""
        if len(self.starts) == 1 and not gone and self.folded_until == 0.0:
            return next(iter(self.starts.values())).totals
        ordered = sorted(self.starts.values(), key=lambda start: start.started_at)
        total = self.folded
        for number, start in enumerate(ordered):
            before = ordered[number - 1] if number else None
            gap = max(0.0, start.started_at - before.sent_at) if before else 0.0
            ended = gone or number + 1 < len(ordered)
            lost = 1 if ended and not start.final else 0
            total = total.plus(start.totals).plus(Totals(gaps_seconds=gap, lost_starts=lost))
        return total

    def with_newest_alone(self) -> "PodLedger":
        """Return the same counters with all starts folded but the newest."""
        if len(self.starts) < 2:
            return self
        ledger = PodLedger(starts=dict(self.starts), folded=self.folded, folded_until=self.folded_until)
        ledger._fold_oldest(keep=1)
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


# The written form: arrays, because field names would be most of the text, and without what stands at its default at
# their ends, which is most of the rest.


def _short(values: list[Any], defaults: tuple[Any, ...]) -> list[Any]:
    """Return the values without those at the end that equal their defaults."""
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    return values


class _WrittenTotals(msgspec.Struct, frozen=True, array_like=True):
    gpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    energy_joules: float | None = None
    peak: tuple[int, int] | None = None
    gaps_seconds: float = 0.0
    lost_starts: int = 0


class _WrittenStart(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    started_at: float
    seconds: float
    """From `started_at` to `sent_at`."""
    totals: _WrittenTotals = _WrittenTotals()
    final: bool = False


class _WrittenPod(msgspec.Struct, frozen=True, array_like=True):
    starts: dict[str, _WrittenStart]
    folded: _WrittenTotals = _WrittenTotals()
    folded_until: float = 0.0


class _Written(msgspec.Struct, frozen=True, array_like=True):
    folded: _WrittenTotals
    base: _WrittenTotals
    pods: dict[str, _WrittenPod]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenLedger:
    """A workload's ledger as it is kept in its GPUMonitor."""

    folded: Totals = Totals()
    """Sum over pods that are gone."""
    base: Totals = Totals()
    """What a borrowed cluster had counted before this workload began."""
    pods: Mapping[str, PodLedger] = field(default_factory=dict)
    """By pod uid."""


MAX_WRITTEN: Final = 32_768
"""Longest text of a ledger, as the schema of GPUMonitor bounds it: some 300 pods."""

VERSION: Final = "2:"
"""The text begins with it."""

_MAX_READ: Final = 2**20
"""Longest document in a text. A text of `MAX_WRITTEN` could be made to say a thousand times that."""

_LEAST_PER_POD: Final = 40
"""No pod takes less of a text than this: the uids alone, which no compression makes shorter, take half of it."""


class WrittenText(NamedTuple):
    """A ledger as text."""

    text: str
    left_out: int
    """Pods for whose newest starts there was no room."""


def write(ledger: WrittenLedger) -> WrittenText:
    """Return the ledger as text of at most `MAX_WRITTEN` characters.

    Where all of it would be longer, each pod's ended starts are folded. Where that is not enough, pods are left out,
    those first that have counted least: their newest start says all again with its next report, and is missed only if
    it ends before that. What their ended starts have counted joins the sum over pods that are gone.
    """
    if len(ledger.pods) * _LEAST_PER_POD <= MAX_WRITTEN:
        text = _text(ledger)
        if len(text) <= MAX_WRITTEN:
            return WrittenText(text, 0)
    pods = {uid: pod.with_newest_alone() for uid, pod in ledger.pods.items()}
    by_size = sorted(pods, key=lambda uid: pods[uid].totals(gone=False).gpu_seconds, reverse=True)
    room = min(len(by_size), MAX_WRITTEN // _LEAST_PER_POD)
    ended = {uid: sums for uid, pod in pods.items() if (sums := _ended(pod)) != Totals()}
    while True:
        kept, left_out = by_size[:room], by_size[room:]
        folded = ledger.folded
        for uid in left_out:
            folded = folded.plus(ended[uid]) if uid in ended else folded
        text = _text(WrittenLedger(folded=folded, base=ledger.base, pods={uid: pods[uid] for uid in kept}))
        if len(text) <= MAX_WRITTEN or not room:
            return WrittenText(text, len(left_out))
        # All pods take about the same, so that the second text mostly fits.
        room = min(room - 1, int(room * 0.97 * MAX_WRITTEN / len(text)))


def _ended(pod: PodLedger) -> Totals:
    """Sum of what cannot report again. `pod`: its newest start alone is kept apart."""
    ended = all(start.final for start in pod.starts.values())
    return pod.totals(gone=True) if ended else pod.folded


def _text(ledger: WrittenLedger) -> str:
    document = [
        _totals_out(ledger.folded),
        _totals_out(ledger.base),
        {uid: _pod_out(pod) for uid, pod in ledger.pods.items()},
    ]
    return VERSION + base64.b64encode(zlib.compress(msgspec.json.encode(document))).decode()


def read(text: str) -> WrittenLedger | None:
    """Read what `write` wrote; None for whatever else (somebody edited it, or another version wrote it)."""
    if not text.startswith(VERSION):
        return None
    try:
        packed = base64.b64decode(text.removeprefix(VERSION), validate=True)
        document = msgspec.json.decode(zlib.decompressobj().decompress(packed, _MAX_READ), type=_Written)
        return WrittenLedger(
            folded=_totals_in(document.folded),
            base=_totals_in(document.base),
            pods={uid: _pod_in(pod) for uid, pod in document.pods.items()},
        )
    except (binascii.Error, zlib.error, msgspec.DecodeError, ValueError, RecursionError):
        return None


def _whole(value: float, digits: int) -> float | int:
    """Round; without a fraction where there is none, since `.0` is two characters."""
    rounded = round(value, digits)
    return int(rounded) if rounded.is_integer() else rounded


def _totals_out(totals: Totals) -> list[Any]:
    return _short(
        [
            _whole(totals.gpu_seconds, 3),
            _whole(totals.busy_seconds, 3),
            None if totals.energy_joules is None else _whole(totals.energy_joules, 1),
            list(totals.peak) if totals.peak else None,
            _whole(totals.gaps_seconds, 1),
            totals.lost_starts,
        ],
        (0, 0, None, None, 0, 0),
    )


def _totals_in(totals: _WrittenTotals) -> Totals:
    return Totals(
        gpu_seconds=totals.gpu_seconds,
        busy_seconds=totals.busy_seconds,
        energy_joules=totals.energy_joules,
        peak=Peak(*totals.peak) if totals.peak and totals.peak[1] > 0 else None,
        gaps_seconds=totals.gaps_seconds,
        lost_starts=totals.lost_starts,
    )


def _start_out(start: StartLedger) -> list[Any]:
    started_at, seconds = round(start.started_at, 3), round(start.sent_at - start.started_at, 3)
    values = [start.sequence, started_at, seconds, _totals_out(start.totals), start.final]
    return _short(values, (None, None, None, [], False))


def _pod_out(pod: PodLedger) -> list[Any]:
    starts = {start_id: _start_out(start) for start_id, start in pod.starts.items()}
    return _short([starts, _totals_out(pod.folded), pod.folded_until], (None, [], 0))


def _pod_in(pod: _WrittenPod) -> PodLedger:
    starts = {
        start_id: StartLedger(
            sequence=start.sequence,
            started_at=start.started_at,
            sent_at=start.started_at + start.seconds,
            final=start.final,
            written=_totals_in(start.totals),
        )
        for start_id, start in pod.starts.items()
    }
    return PodLedger(starts=starts, folded=_totals_in(pod.folded), folded_until=pod.folded_until)


def total_of(pods: Iterable[PodLedger], *, gone: bool) -> Totals:
    """Sum over pods."""
    total = Totals()
    for pod in pods:
        total = total.plus(pod.totals(gone=gone))
    return total
