# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a GPU's counters rise by between two looks: pieces of time that wait for their stage. Pure: times come in."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from verl_gpumonitor.model.samples import GpuCounters

from .totals import Key, Totals
from .words import POD

MAX_PENDING: Final = 128
"""Pieces that wait for one GPU. Those of a minute are 60; more come only of a clock that was set back."""
MIN_PIECE_SECONDS: Final = 0.9
"""Shorter pieces are put together, so that a minute has no more of them than that, however often is sampled."""
MAX_READINGS: Final = 24
"""Readings of memory in one piece: more than come in a second. Of more, those of each moment's highest and lowest."""
_FEWER: Final = 4
_SNAP_SECONDS: Final = 0.05
"""Two times of one clock that differ by less are one: they were told by another clock's difference."""


class Piece:
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

    def joins(self, last: "Piece") -> bool:
        """Say whether it may become one with the piece before, whose end it begins at."""
        if self.lost is not None or last.lost is not None or (self.observed > 0.0) != (last.observed > 0.0):
            return False
        return 0.0 <= self.end - last.begin < MIN_PIECE_SECONDS

    def take_in(self, other: "Piece") -> None:
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


class Track:
    """What waits of one GPU, or of the pod's own time, in the order in which it came."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: deque[Piece] = deque()

    @property
    def begin(self) -> float:
        """The earliest time that waits. A gap's energy reaches back behind the pieces before it."""
        return min(piece.begin for piece in self.pending)

    def append(self, piece: Piece) -> None:
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
        piece = Piece(readings[0][0], readings[-1][0])
        piece.memory = few(readings)
        self.pending.append(piece)

    def surplus_until(self) -> float:
        """Return the end of what must not wait any longer, because too much does."""
        surplus = len(self.pending) - MAX_PENDING
        return max((piece.end for piece in islice(self.pending, max(0, surplus))), default=float("-inf"))

    def is_ready(self, until: float) -> bool:
        """Say whether any of it lies before that time."""
        return bool(self.pending) and self.pending[0].end <= until

    def ready(self, until: float) -> Iterator[Piece]:
        """Take out what lies before that time, first come first. What comes behind a later piece waits for it."""
        while self.is_ready(until):
            yield self.pending.popleft()


class GpuPieces:
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
        self.track = Track()
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
        load = Piece(self._begin(at, observed, memory), at, observed=observed)
        load.busy = max(0.0, counters.busy_seconds - self.busy)
        load.engine = None if engine_bytes is None else (at, engine_bytes)
        if counters.throttled_seconds is not None:
            load.throttled = max(0.0, counters.throttled_seconds - self.throttled)
            self.throttled = counters.throttled_seconds
        since = self.seen_at if self.seen_at is not None and self.seen_at < at else load.begin
        if lost is not None:
            self.track.append(lost_peak(since, at, lost))
        if energy is not None and load.begin - since > _SNAP_SECONDS:  # After a gap: the energy of all of it.
            self.track.append(Piece(since, at, energy=energy))
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


def lost_peak(begin: float, end: float, peak: int) -> Piece:
    """Return a piece with a peak alone, whose moment in it is not known."""
    piece = Piece(begin, end)
    piece.lost = peak
    return piece
