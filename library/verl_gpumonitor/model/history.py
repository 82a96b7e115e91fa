# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a GPU: what one stage of one step did on it. Pure.

These are the rules' food. Whoever has samples (a trace) adds them up in a piece; whoever has finished steps (a
controller, from reports) makes the pieces at once.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import isnan
from typing import Final

import msgspec

IDLE_UTILIZATION: Final = 0.05
"""Below this nobody computes: a stray kernel of a health check or of the collector itself is less."""
TOP_SHARE: Final = 0.98
"""Memory within 2% of the highest is the same level."""
USUAL_UTILIZATION: Final = 0.3
"""A step in which the GPU did less than this in a stage says nothing of that stage's usual power."""
SPIN_OF_USUAL: Final = 0.65
"""Below this share of the usual power a GPU that is busy all the time computes nothing."""
LEARNT_STEPS: Final = 8
"""Steps from which a stage's usual power is taken."""


class Piece(msgspec.Struct, kw_only=True, gc=False):
    """One stage of one step on one GPU. What could not be read is None. It grows until the step ends."""

    stage: str
    role: str
    step: int
    """Counted from 0 by whoever watches, not verl's number."""
    seconds: float = 0.0
    """Time for which the GPU was seen in it."""
    known_seconds: float = 0.0
    """Of these, those whose utilisation is known."""
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Time with utilisation below IDLE_UTILIZATION."""
    powered_seconds: float = 0.0
    """Time for which power is known."""
    energy_joules: float = 0.0
    peak_bytes: float | None = None
    """Highest memory in use; only of spans that lay wholly in this stage."""
    floor_bytes: float | None = None
    level_bytes: float | None = None
    """Highest memory in use as samples found it, and not for a moment between two of them."""
    level_samples: int = 0
    """Samples within 2% of that level: one of many is a moment's."""
    used_samples: int = 0
    throttled_seconds: float = 0.0
    """Time in which heat or power brakes held the clocks down."""
    throttle_known_seconds: float = 0.0

    def add_memory(self, used_bytes: float | None, peak_bytes: float | None) -> None:
        """Take one sample's memory; `peak_bytes`: the most that is known of its span, None if that saw other stages."""
        if used_bytes is not None:
            self.floor_bytes = used_bytes if self.floor_bytes is None else min(used_bytes, self.floor_bytes)
            self.used_samples += 1
            if self.level_bytes is None or used_bytes * TOP_SHARE > self.level_bytes:
                self.level_samples = 0
            if self.level_bytes is None or used_bytes >= TOP_SHARE * self.level_bytes:
                self.level_samples += 1
            self.level_bytes = used_bytes if self.level_bytes is None else max(used_bytes, self.level_bytes)
        if peak_bytes is not None:
            self.peak_bytes = peak_bytes if self.peak_bytes is None else max(peak_bytes, self.peak_bytes)

    @property
    def utilization(self) -> float | None:
        """Mean, 0..1; None where it was never known."""
        return self.busy_seconds / self.known_seconds if self.known_seconds > 0 else None

    @property
    def power_watts(self) -> float | None:
        """Mean power; None where it was never known."""
        return self.energy_joules / self.powered_seconds if self.powered_seconds > 0 else None

    @property
    def throttled_ratio(self) -> float | None:
        """Share of the time in which clocks were held down by heat or a power brake."""
        return self.throttled_seconds / self.throttle_known_seconds if self.throttle_known_seconds > 0 else None


_FIGURES: Final = (
    "step",
    "seconds",
    "known_seconds",
    "busy_seconds",
    "idle_seconds",
    "powered_seconds",
    "energy_joules",
    "peak_bytes",
    "floor_bytes",
    "level_bytes",
    "level_samples",
    "used_samples",
    "throttled_seconds",
    "throttle_known_seconds",
)
_WIDTH: Final = len(_FIGURES)
_SECONDS, _PEAK, _FLOOR = (_FIGURES.index(name) for name in ("seconds", "peak_bytes", "floor_bytes"))
_NOT_KNOWN: Final = float("nan")


class Past(ABC):
    """Finished pieces of one stage on one GPU, oldest first. They are packed, and unpacked once for all who look."""

    __slots__ = ("_pieces", "longest_seconds", "role", "stage")

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.role = ""
        """The newest piece's."""
        self.longest_seconds = 0.0
        """Of all that were ever taken."""
        self._pieces: list[Piece] = []
        """The newest, as far back as somebody asked."""

    @abstractmethod
    def __len__(self) -> int: ...

    # Figures of each piece, for which nothing is unpacked; None where it is not known.

    @property
    @abstractmethod
    def steps(self) -> Sequence[int]:
        """Numbers of the steps."""

    @property
    @abstractmethod
    def seconds(self) -> Sequence[float]:
        """For how long it was in this stage."""

    @property
    @abstractmethod
    def peaks(self) -> Sequence[float | None]:
        """Highest memory in use, bytes."""

    @property
    @abstractmethod
    def floors(self) -> Sequence[float | None]:
        """Lowest memory in use, bytes."""

    @abstractmethod
    def _piece(self, number: int) -> Piece: ...

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.last(len(self)))

    def last(self, count: int) -> list[Piece]:
        """Return the newest, oldest first."""
        if len(self._pieces) < count:
            whole, have = len(self), len(self._pieces)
            older = range(max(0, whole - count), whole - have)
            self._pieces[:0] = [self._piece(number) for number in older]
        return self._pieces[-count:] if count > 0 else []

    def at(self, step: int) -> Piece | None:
        """Return the piece of a step; None if it had none."""
        back = self._back(step)
        return None if back is None else self.last(back)[0]

    def seconds_at(self, step: int) -> float:
        """Return for how long it was in this stage in a step; 0 if it was not."""
        back = self._back(step)
        return 0.0 if back is None else self.seconds[-back]

    def _back(self, step: int) -> int | None:
        for back, known_step in enumerate(reversed(self.steps), 1):
            if known_step <= step:
                return back if known_step == step else None
        return None

    def pack(self) -> None:
        """Let go of what was unpacked."""
        self._pieces = []


class OwnPast(Past):
    """The past of a GPU by itself: 56 bytes a piece.

    Figures keep seven digits, so that 80 GB are known to 8 KB.
    """

    __slots__ = ("_figures", "depth")

    def __init__(self, stage: str, depth: int) -> None:
        super().__init__(stage)
        self.depth = depth
        self._figures = array("f")

    def append(self, piece: Piece) -> None:
        """Take one more; the oldest goes when there are more than `depth`."""
        self.role = piece.role
        self.longest_seconds = max(self.longest_seconds, piece.seconds)
        for name in _FIGURES:
            value = getattr(piece, name)
            self._figures.append(_NOT_KNOWN if value is None else value)
        if len(self) > self.depth:
            del self._figures[:_WIDTH]
        self.pack()

    def __len__(self) -> int:
        return len(self._figures) // _WIDTH

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps."""
        return [int(step) for step in self._figures[::_WIDTH]]

    @property
    def seconds(self) -> Sequence[float]:
        """For how long it was in this stage."""
        return self._figures[_SECONDS::_WIDTH]

    @property
    def peaks(self) -> Sequence[float | None]:
        """Highest memory in use."""
        return known_of(self._figures[_PEAK::_WIDTH])

    @property
    def floors(self) -> Sequence[float | None]:
        """Lowest memory in use."""
        return known_of(self._figures[_FLOOR::_WIDTH])

    def _piece(self, number: int) -> Piece:
        figures = self._figures[number * _WIDTH : (number + 1) * _WIDTH]
        return Piece(
            stage=self.stage,
            role=self.role,
            step=int(figures[0]),
            seconds=figures[1],
            known_seconds=figures[2],
            busy_seconds=figures[3],
            idle_seconds=figures[4],
            powered_seconds=figures[5],
            energy_joules=figures[6],
            peak_bytes=known(figures[7]),
            floor_bytes=known(figures[8]),
            level_bytes=known(figures[9]),
            level_samples=int(figures[10]),
            used_samples=int(figures[11]),
            throttled_seconds=figures[12],
            throttle_known_seconds=figures[13],
        )


def known(figure: float) -> float | None:
    """Return a packed figure; None where it was not known."""
    return None if isnan(figure) else figure


def known_of(figures: Sequence[float]) -> Sequence[float | None]:
    """Return packed figures, None where one was not known."""
    return [None if isnan(figure) else figure for figure in figures] if isnan(sum(figures)) else figures


def usual_power(powers: Iterable[float], before: float | None) -> float | None:
    """Return the upper median of what a stage took in steps in which it worked, but those far below what was usual."""
    worked = sorted(power for power in powers if power >= SPIN_OF_USUAL * (before or 0.0))
    return worked[len(worked) // 2] if worked else None
