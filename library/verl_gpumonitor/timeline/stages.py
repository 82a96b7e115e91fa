# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Samples joined with stages: what each GPU of a pod spent in which stage. Pure: times come in.

What a GPU's counters rise by between two looks is a piece of time with load and energy in it. A piece waits until its
whole time is decided (`words`), is then split over the stages in it by their length, and counted. So each second is
counted once, whatever the sources say late, twice or never: the stages' sum is what the GPU's own counters rose by,
less what still waits. What was counted is never changed.

A reading of memory is of one moment, and of the stage of that moment. Of a peak whose reading was missed only the time
is known in which it was: it belongs to the stage that lasted for all of that, else to `unknown`.

Example: a second at load 0.5, of which 0.4 s were `gen` and 0.6 s `old_log_prob`, gives 0.2 and 0.3 busy seconds.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Final

import msgspec

from verl_gpumonitor.model.report import MAX_GPUS, MAX_STAGES, StageCount
from verl_gpumonitor.model.samples import GpuCounters
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .words import OTHER, POD, WATERMARK_SECONDS, Own, Part, Span, Voice, decided, jobs_in, narrowed, parts

MAX_PENDING: Final = 128
"""Pieces that wait for one GPU. Those of a minute are 60; more come only of a clock that was set back."""
MIN_PIECE_SECONDS: Final = 0.9
"""Shorter pieces are put together, so that a minute has no more of them than that, however often is sampled."""
MAX_LANES: Final = 8
"""Ray jobs in one pod at a time that are told apart; more, and their work is taken as one's."""
MAX_READINGS: Final = 24
"""Readings of memory in one piece: more than come in a second. Of more, those of each moment's highest and lowest."""
_FEWER: Final = 4
_SAME_SECONDS: Final = 0.001
_SNAP_SECONDS: Final = 0.05
"""Two times of one clock that differ by less are one: they were told by another clock's difference."""

Key = tuple[str, str, str]
"""Job, stage, role."""
OVERFLOW: Final[Key] = ("", OTHER, UNKNOWN)
"""Where stages go for which there is no more room."""


class Totals:
    """What added up in one stage."""

    __slots__ = (
        *("busy_seconds", "energy_joules", "engine_floor_bytes", "engine_peak_bytes", "memory_floor_bytes"),
        *("memory_peak_bytes", "observed_seconds", "throttled_seconds"),
    )

    def __init__(self) -> None:
        self.observed_seconds = 0.0
        self.busy_seconds = 0.0
        self.energy_joules: float | None = None
        self.throttled_seconds: float | None = None
        self.memory_peak_bytes: int | None = None
        self.memory_floor_bytes: int | None = None
        self.engine_peak_bytes: int | None = None
        """Most and least that processes of a rollout engine held, as far as they were listed."""
        self.engine_floor_bytes: int | None = None

    def add(self, *, observed: float, busy: float, energy: float | None, throttled: float | None = None) -> None:
        """Add a share of a piece; None: it is not known."""
        self.observed_seconds += observed
        self.busy_seconds += busy
        if energy is not None:
            self.energy_joules = (self.energy_joules or 0.0) + energy
        if throttled is not None:
            self.throttled_seconds = (self.throttled_seconds or 0.0) + throttled

    def take(self, share: "Share") -> None:
        """Add what a GPU did in a part of the time."""
        self.add(
            observed=share.observed_seconds,
            busy=share.busy_seconds,
            energy=share.energy_joules,
            throttled=share.throttled_seconds,
        )
        for used in share.memory:
            self.see(used)
        self.list_engine(share.engine_bytes)

    def see(self, used: int) -> None:
        """Take in a reading of memory."""
        self.memory_peak_bytes = used if self.memory_peak_bytes is None else max(used, self.memory_peak_bytes)
        self.memory_floor_bytes = used if self.memory_floor_bytes is None else min(used, self.memory_floor_bytes)

    def list_engine(self, held: int | None) -> None:
        """Take in what an engine's processes were seen to hold; None: no list was read."""
        if held is not None:
            self.engine_peak_bytes = max(held, self.engine_peak_bytes or 0)
            self.engine_floor_bytes = held if self.engine_floor_bytes is None else min(held, self.engine_floor_bytes)

    def join(self, other: "Totals") -> None:
        """Add another's."""
        self.add(
            observed=other.observed_seconds,
            busy=other.busy_seconds,
            energy=other.energy_joules,
            throttled=other.throttled_seconds,
        )
        for used in (other.memory_peak_bytes, other.memory_floor_bytes):
            if used is not None:
                self.see(used)
        for held in (other.engine_peak_bytes, other.engine_floor_bytes):
            self.list_engine(held)


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU did in a part of the time, as it is counted now."""

    uuid: str
    part: Part
    observed_seconds: float
    busy_seconds: float
    energy_joules: float | None
    throttled_seconds: float | None = None
    memory: tuple[int, ...] = ()
    engine_bytes: int | None = None
    """What processes of a rollout engine held, if a list of processes was read in it."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """What one Ray job did in the pod, of what was counted in one go."""

    pod: tuple[Part, ...]
    """What the pod as a whole was in for it, in order; `other` where it did nothing."""
    shares: tuple[Share, ...]


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted in one go: for whoever makes steps of it."""

    until: float
    """All time before is decided and counted."""
    pod: tuple[Part, ...] = ()
    """What the pod as a whole was in, in order."""
    shares: tuple[Share, ...] = ()
    jobs: tuple[str, ...] = ()
    """Ray jobs that worked in this time; empty: work that no job is named for."""
    lanes: Mapping[str, Lane] = {}
    """By job, where there were several at a time."""


class StageTimeline:
    """The counters by stage of one pod's GPUs, and of the pod's own time. One thread uses it."""

    def __init__(self) -> None:
        self._gpus: dict[str, _Gpu] = {}
        self._pod = _Track()
        self._pod_totals: dict[Key, Totals] = {}

    def elapse(self, now: float, seconds: float) -> None:
        """Let so much of the pod's own time go by, up to this moment (Unix seconds)."""
        if seconds > 0.0:
            self._pod.append(_Piece(now - seconds, now, observed=seconds))

    def observe(
        self,
        uuid: str,
        counters: GpuCounters,
        *,
        at: float,
        memory: Sequence[tuple[float, int]] = (),
        engine_bytes: int | None = None,
        own: Own = POD,
    ) -> None:
        """Take in what a GPU's counters have come to by `at`, the time of its newest sample.

        `memory`: the readings (time, bytes) since the last call, oldest first; those behind `at` may wait for the next
        one. More GPUs than a report can carry are not followed. `engine_bytes`: what a list of processes that was read
        at `at` says of a rollout engine's; None: none was read, or none of them is there.
        """
        gpu = self._gpus.get(uuid)
        if gpu is None:
            if len(self._gpus) >= MAX_GPUS:
                return
            gpu = self._gpus[uuid] = _Gpu()
        gpu.own = own
        gpu.take_in(counters, at, memory, engine_bytes)

    def settle(self, voices: Sequence[Voice], *, now: float, patient: bool = True) -> Settled:
        """Count what is decided; `voices` best first. See `words.decided`."""
        too_many = max(track.surplus_until() for track in self._tracks())
        return self._settle(voices, now=now, patient=patient, old=max(now - WATERMARK_SECONDS, too_many))

    def finish(self, voices: Sequence[Voice], *, now: float) -> Settled:
        """Count all that waits, with what is known at this last moment."""
        ends = (piece.end for track in self._tracks() for piece in track.pending)
        # A moment later, for what has no length lies in no time that ends with it.
        return self._settle(voices, now=now, patient=False, old=max([now, *ends]) + _SAME_SECONDS)

    def gpu_counts(self, uuid: str) -> tuple[StageCount, ...]:
        """Return a GPU's counters by stage, in the order in which the stages were first seen."""
        gpu = self._gpus.get(uuid)
        return tuple(_count(key, totals) for key, totals in gpu.totals.items()) if gpu else ()

    def pod_seconds(self) -> dict[Key, float]:
        """Return the wall time of the pod by (job, stage, role), as far as it is counted."""
        return {key: totals.observed_seconds for key, totals in self._pod_totals.items()}

    def waiting(self, uuid: str) -> tuple[float, float, float]:
        """Return observed and busy seconds, and joules, of a GPU that wait for their stage."""
        pending = self._gpus[uuid].track.pending if uuid in self._gpus else ()
        return (
            sum(piece.observed for piece in pending),
            sum(piece.busy for piece in pending),
            sum(piece.energy or 0.0 for piece in pending),
        )

    def waiting_seconds(self) -> float:
        """Return the pod's own time that waits."""
        return sum(piece.observed for piece in self._pod.pending)

    def _tracks(self) -> list["_Track"]:
        return [self._pod, *(gpu.track for gpu in self._gpus.values())]

    def _settle(self, voices: Sequence[Voice], *, now: float, patient: bool, old: float) -> Settled:
        begins = [track.begin for track in self._tracks() if track.pending]
        if not begins:
            return Settled(until=now)
        spans = decided(voices, min(begins), now=now, patient=patient, old=old)
        if not spans:
            return Settled(until=min(begins))
        until = spans[-1].end
        if not any(track.is_ready(until) for track in self._tracks()):
            return Settled(until=until)  # The last piece before it reaches beyond it, as mostly.
        spans = [narrowed(span) for span in spans]
        jobs = jobs_in(spans)
        if 1 < len(jobs) <= MAX_LANES:
            return self._settle_apart(spans, jobs, until)
        by_own: dict[Own, _Line] = {}
        pod = self._settle_pod(_line(by_own, spans, POD), until)
        shares: list[Share] = []
        for uuid, gpu in self._gpus.items():
            line = _line(by_own, spans, gpu.own)
            for piece in gpu.track.ready(until):
                for share in line.split(piece, uuid):
                    _credit(gpu.totals, share)
                    shares.append(share)
        return Settled(until=until, pod=pod, shares=tuple(shares), jobs=jobs if len(jobs) <= 1 else ("",))

    def _settle_pod(self, line: "_Line", until: float) -> tuple[Part, ...]:
        seen: list[Part] = []
        for piece in self._pod.ready(until):
            for share in line.split(piece, ""):
                _credit(self._pod_totals, share)
                seen.append(share.part)
        return tuple(seen)

    def _settle_apart(self, spans: list[Span], jobs: tuple[str, ...], until: float) -> Settled:
        """Count the time of a pod in which several Ray jobs work: each GPU's is shared out evenly among those that do.

        Which GPUs are whose is mostly not known, and with equal shares no second is counted twice.
        """
        by_own: dict[Own, _Line] = {}
        pod: dict[str, list[Part]] = {job: [] for job in jobs}
        shares: dict[str, list[Share]] = {job: [] for job in jobs}
        lines = _lines(by_own, spans, POD, jobs)
        for piece in self._pod.ready(until):
            for found in _apart(lines, piece, "").values():
                for share in found:
                    _credit(self._pod_totals, share)
            for job, line in lines.items():
                pod[job].extend(share.part for share in line.split(piece, ""))
        for uuid, gpu in self._gpus.items():
            lines = _lines(by_own, spans, gpu.own, jobs)
            for piece in gpu.track.ready(until):
                for job, found in _apart(lines, piece, uuid).items():
                    for share in found:
                        _credit(gpu.totals, share)
                    shares[job].extend(found)
        return Settled(
            until=until,
            pod=tuple(pod[jobs[0]]),
            shares=tuple(share for found in shares.values() for share in found),
            jobs=jobs,
            lanes={job: Lane(pod=tuple(pod[job]), shares=tuple(shares[job])) for job in jobs},
        )


class _Piece:
    """A time of a GPU that waits for its stage."""

    __slots__ = ("begin", "busy", "end", "energy", "engine", "lost", "memory", "observed", "throttled")

    def __init__(
        self,
        begin: float,
        end: float,
        *,
        observed: float = 0.0,
        busy: float = 0.0,
        energy: float | None = None,
        throttled: float | None = None,
    ) -> None:
        self.begin = begin
        self.end = end
        self.observed = observed
        self.busy = busy
        self.energy = energy
        self.throttled = throttled
        self.memory: list[tuple[float, int]] = []
        self.engine: tuple[float, int] | None = None
        """When an engine's processes were listed in it, and what they held."""
        self.lost: int | None = None
        """A peak of memory that was at some moment in it, and nothing else."""

    def joins(self, last: "_Piece") -> bool:
        """Say whether it may become one with the piece before, whose end it begins at."""
        if self.lost is not None or last.lost is not None or (self.observed > 0.0) != (last.observed > 0.0):
            return False
        return 0.0 <= self.end - last.begin < MIN_PIECE_SECONDS

    def take_in(self, other: "_Piece") -> None:
        """Become one with the piece that follows."""
        self.begin = min(self.begin, other.begin)
        self.end = max(self.end, other.end)
        self.observed += other.observed
        self.busy += other.busy
        if other.energy is not None:
            self.energy = (self.energy or 0.0) + other.energy
        if other.throttled is not None:
            self.throttled = (self.throttled or 0.0) + other.throttled
        self.memory = few([*self.memory, *other.memory])
        self.engine = other.engine or self.engine


class _Track:
    """What waits of one GPU, or of the pod's own time, in the order in which it came."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: deque[_Piece] = deque()

    @property
    def begin(self) -> float:
        """The earliest time that waits. A gap's energy reaches back behind the pieces before it."""
        return min(piece.begin for piece in self.pending)

    def append(self, piece: _Piece) -> None:
        """Let a piece wait. Very short ones are put together, so that their number is bounded."""
        last = self.pending[-1] if self.pending else None
        if last is not None and abs(piece.begin - last.end) < _SNAP_SECONDS:
            piece.begin = last.end
            if piece.joins(last):
                last.take_in(piece)
                return
        self.pending.append(piece)

    def read(self, readings: list[tuple[float, int]]) -> None:
        """Let readings of memory wait that are of no new piece's time: with the last one, or by themselves."""
        last = self.pending[-1] if self.pending else None
        if not readings:
            return
        if last is not None and last.lost is None and last.begin <= readings[0][0] and readings[-1][0] <= last.end:
            last.memory = few(sorted([*last.memory, *readings]))
            return
        piece = _Piece(readings[0][0], readings[-1][0])
        piece.memory = few(readings)
        self.pending.append(piece)

    def surplus_until(self) -> float:
        """Return the end of what must not wait any longer, because too much does."""
        surplus = len(self.pending) - MAX_PENDING
        return max((piece.end for piece in islice(self.pending, max(0, surplus))), default=float("-inf"))

    def is_ready(self, until: float) -> bool:
        """Say whether any of it lies before that time."""
        return bool(self.pending) and self.pending[0].end <= until

    def ready(self, until: float) -> Iterator[_Piece]:
        """Take out what lies before that time, first come first. What comes behind a later piece waits for it."""
        while self.is_ready(until):
            yield self.pending.popleft()


class _Gpu:
    """One GPU: what its counters were when last seen, what waits, what is counted."""

    __slots__ = ("busy", "energy", "observed", "own", "peak", "seen_at", "throttled", "totals", "track")

    def __init__(self) -> None:
        self.own = POD
        self.seen_at: float | None = None
        self.observed = 0.0
        self.busy = 0.0
        self.energy: float | None = None
        self.throttled = 0.0
        self.peak: int | None = None
        """The highest reading of memory that came."""
        self.track = _Track()
        self.totals: dict[Key, Totals] = {}

    def take_in(
        self, counters: GpuCounters, at: float, memory: Sequence[tuple[float, int]], engine_bytes: int | None
    ) -> None:
        """Put what came since the last look into pieces that wait."""
        observed = max(0.0, counters.observed_seconds - self.observed)
        energy = self._energy_rise(counters.energy_joules, news=observed > 0.0)
        lost = self._lost_peak(counters, memory)
        if observed <= 0.0 and energy is None and not memory and lost is None:
            return
        load = _Piece(self._begin(at, observed, memory), at, observed=observed)
        load.busy = max(0.0, counters.busy_seconds - self.busy)
        load.engine = None if engine_bytes is None else (at, engine_bytes)
        if counters.throttled_seconds is not None:
            load.throttled = max(0.0, counters.throttled_seconds - self.throttled)
            self.throttled = counters.throttled_seconds
        since = self.seen_at if self.seen_at is not None and self.seen_at < at else load.begin
        if lost is not None:
            self.track.append(_lost(since, at, lost))
        if energy is not None and load.begin - since > _SNAP_SECONDS:  # After a gap: the energy of all of it.
            self.track.append(_Piece(since, at, energy=energy))
        else:
            load.energy = energy
        load.memory = few([each for each in memory if load.begin <= each[0] <= at])
        self.track.read([each for each in memory if each[0] < load.begin])
        self.track.append(load)
        self.track.read([each for each in memory if each[0] > at])
        self.observed, self.busy = counters.observed_seconds, counters.busy_seconds
        self.energy = counters.energy_joules if counters.energy_joules is not None else self.energy
        self.seen_at = at

    def _begin(self, at: float, observed: float, memory: Sequence[tuple[float, int]]) -> float:
        """Return when the piece begins that ends at `at`: where no load is known, with what else is."""
        if observed > 0.0 or not memory:
            return at - observed
        first = min(at, memory[0][0])
        before = self.seen_at
        return before if before is not None and 0.0 <= first - before < MIN_PIECE_SECONDS else first

    def _lost_peak(self, counters: GpuCounters, memory: Sequence[tuple[float, int]]) -> int | None:
        """Return the highest reading since the last look if it is not among those that are kept; None: it is."""
        read = max((used for _, used in memory), default=None)
        self.peak = read if self.peak is None else max(self.peak, read or 0)
        peak = counters.memory_peak_bytes
        if peak is None or (self.peak is not None and peak <= self.peak):
            return None
        if any(used >= peak for _, used in counters.memory_readings):
            return None  # It comes with the next sample.
        self.peak = peak
        return peak

    def _energy_rise(self, total: float | None, *, news: bool) -> float | None:
        """Return joules since the last look; None when they are not known, or when nothing is new."""
        if total is None:
            return None
        rise = max(0.0, total - (self.energy or 0.0))
        return rise if news or rise > 0.0 or self.energy is None else None


class _Line:
    """The stages of the time that is decided, to split pieces by."""

    def __init__(self, stages: list[Part]) -> None:
        self._parts = stages
        self._begins = [part.begin for part in stages]

    def split(self, piece: _Piece, uuid: str) -> list[Share]:
        """Return the piece's shares: all of it, whatever the lengths. It lies within the line."""
        first = max(0, bisect_right(self._begins, piece.begin) - 1)
        last = max(first, bisect_left(self._begins, piece.end) - 1)
        found = self._parts[first : last + 1]
        length = piece.end - piece.begin
        if piece.lost is not None:
            return [_found_again(piece, uuid, found)]
        if len(found) == 1 or length <= 0.0:
            return [_share(piece, uuid, found[-1], 1.0, [used for _, used in piece.memory], piece.engine)]
        shares: list[Share] = []
        for part in found:
            begin, end = max(part.begin, piece.begin), min(part.end, piece.end)
            within = [used for at, used in piece.memory if self._at(at, found) is part]
            listed = piece.engine if piece.engine and self._at(piece.engine[0], found) is part else None
            if piece.observed <= 0.0 and piece.energy is None and not within and listed is None:
                continue  # Only readings of memory are in the piece, and none of this part.
            shares.append(_share(piece, uuid, part, (end - begin) / length, within, listed))
        return shares

    @staticmethod
    def _at(at: float, found: list[Part]) -> Part:
        """Return the part of a moment; of one before or behind all of them, the nearest."""
        return next((part for part in found if at < part.end), found[-1])


def few(readings: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the readings; of too many, of each few in a row the highest and the lowest."""
    while len(readings) > MAX_READINGS:
        readings = [
            each for first in range(0, len(readings), _FEWER) for each in _extremes(readings[first : first + _FEWER])
        ]
    return readings


def _extremes(readings: list[tuple[float, int]]) -> list[tuple[float, int]]:
    lowest = min(readings, key=lambda reading: reading[1])
    highest = max(readings, key=lambda reading: reading[1])
    return [lowest] if lowest is highest else sorted([lowest, highest])


def _lost(begin: float, end: float, peak: int) -> _Piece:
    """Return a piece with a peak alone, whose moment in it is not known."""
    piece = _Piece(begin, end)
    piece.lost = peak
    return piece


def _found_again(piece: _Piece, uuid: str, found: list[Part]) -> Share:
    """Return the share that is a peak whose moment is not known: of the only stage it can be of, else of none."""
    only = found[0] if len({(part.stage, part.role, part.job) for part in found}) == 1 else None
    part = only or Part(piece.begin, piece.end, UNKNOWN, UNKNOWN)
    return _share(piece, uuid, part, 0.0, [piece.lost or 0], None)


def _line(lines: dict[Own, _Line], spans: list[Span], own: Own) -> _Line:
    """Return the stages as this GPU has them, worked out once for all GPUs alike."""
    if own not in lines:
        lines[own] = _Line(parts(spans, own))
    return lines[own]


def _lines(lines: dict[Own, _Line], spans: list[Span], own: Own, jobs: tuple[str, ...]) -> dict[str, _Line]:
    """Return the stages as this GPU has them, for each job as if it were alone."""
    return {job: _line(lines, spans, msgspec.structs.replace(own, job=job)) for job in jobs}


def _apart(lines: Mapping[str, _Line], piece: _Piece, uuid: str) -> dict[str, list[Share]]:
    """Return the piece's shares by job: equal ones of those that work at a time; where none does, the first one's."""
    found: dict[str, list[Share]] = {job: [] for job in lines}
    if piece.lost is not None:
        first = next(iter(lines))
        found[first].append(_found_again(piece, uuid, [Part(piece.begin, piece.end, UNKNOWN, UNKNOWN)]))
        return found
    for section in _sections(lines, piece):
        here = {job: line.split(section, uuid) for job, line in lines.items()}
        working = {job: shares for job, shares in here.items() if any(_works(share.part) for share in shares)}
        for job, shares in (working or dict(islice(here.items(), 1))).items():
            found[job].extend(_part_of(share, max(1, len(working))) for share in shares)
    return found


def _sections(lines: Mapping[str, _Line], piece: _Piece) -> list[_Piece]:
    """Cut a piece wherever any job's stage begins or ends."""
    parts = [share.part for line in lines.values() for share in line.split(piece, "")]
    cuts = sorted({piece.begin, piece.end, *(part.begin for part in parts), *(part.end for part in parts)})
    length = piece.end - piece.begin
    if len(cuts) < 3 or length <= 0.0:
        return [piece]
    sections = [_section(piece, begin, end, (end - begin) / length) for begin, end in pairwise(cuts)]
    for reading in piece.memory:
        next((each for each in sections if reading[0] < each.end), sections[-1]).memory.append(reading)
    if piece.engine is not None:
        listed_at = piece.engine[0]
        next((each for each in sections if listed_at < each.end), sections[-1]).engine = piece.engine
    return sections


def _section(piece: _Piece, begin: float, end: float, share: float) -> _Piece:
    energy = None if piece.energy is None else piece.energy * share
    throttled = None if piece.throttled is None else piece.throttled * share
    return _Piece(
        begin, end, observed=piece.observed * share, busy=piece.busy * share, energy=energy, throttled=throttled
    )


def _works(part: Part) -> bool:
    return bool(part.job) or part.stage not in (OTHER, UNKNOWN)


def _part_of(share: Share, among: int) -> Share:
    return msgspec.structs.replace(
        share,
        observed_seconds=share.observed_seconds / among,
        busy_seconds=share.busy_seconds / among,
        energy_joules=None if share.energy_joules is None else share.energy_joules / among,
        throttled_seconds=None if share.throttled_seconds is None else share.throttled_seconds / among,
    )


def _share(
    piece: _Piece, uuid: str, part: Part, share: float, memory: list[int], engine: tuple[float, int] | None
) -> Share:
    begin, end = max(part.begin, piece.begin), min(part.end, piece.end)
    return Share(
        uuid=uuid,
        part=Part(begin, end, part.stage, part.role, part.job, part.step, part.begun and begin == part.begin),
        observed_seconds=piece.observed * share,
        busy_seconds=piece.busy * share,
        energy_joules=None if piece.energy is None else piece.energy * share,
        throttled_seconds=None if piece.throttled is None else piece.throttled * share,
        memory=tuple(memory),
        engine_bytes=None if engine is None else engine[1],
    )


def _credit(totals: dict[Key, Totals], share: Share) -> None:
    """Count a share. The first stages have counters of their own, all others one together."""
    key = (share.part.job, share.part.stage, share.part.role)
    if key not in totals and len(totals) >= MAX_STAGES - 1:
        key = OVERFLOW
    found = totals.get(key)
    if found is None:
        found = totals[key] = Totals()
    found.take(share)


def _count(key: Key, totals: Totals) -> StageCount:
    job, stage, role = key
    return StageCount(
        stage,
        role,
        totals.observed_seconds,
        totals.busy_seconds,
        totals.energy_joules,
        totals.memory_peak_bytes,
        totals.memory_floor_bytes,
        job,
    )
