# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a GPU: what one stage of one step did on it. Pure.

These are the rules' food. Whoever has samples (a trace) adds them up in a piece; whoever has finished steps (a
controller, from reports) makes the pieces at once.
"""

from array import array
from collections.abc import Iterator
from math import isnan
from typing import Final

import msgspec

IDLE_UTILIZATION: Final = 0.05
"""Below this nobody computes: a stray kernel of a health check or of the collector itself is less."""
TOP_SHARE: Final = 0.98
"""Memory within 2% of the highest is the same level."""


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
        """Take one sample's memory; `peak_bytes` since the sample before, None if that span saw other stages."""
        if used_bytes is not None:
            self.floor_bytes = used_bytes if self.floor_bytes is None else min(used_bytes, self.floor_bytes)
            self.used_samples += 1
            if self.level_bytes is None or used_bytes * TOP_SHARE > self.level_bytes:
                self.level_samples = 0
            if self.level_bytes is None or used_bytes >= TOP_SHARE * self.level_bytes:
                self.level_samples += 1
            self.level_bytes = used_bytes if self.level_bytes is None else max(used_bytes, self.level_bytes)
        peak = used_bytes if peak_bytes is None else peak_bytes
        if peak is not None:
            self.peak_bytes = peak if self.peak_bytes is None else max(peak, self.peak_bytes)

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
_NOT_KNOWN: Final = float("nan")


class Past:
    """Finished pieces of one stage on one GPU, oldest first, packed: 56 bytes each, for a cluster has many.

    Figures keep seven digits, so that 80 GB are known to 8 KB.
    """

    __slots__ = ("_figures", "_pieces", "depth", "longest_seconds", "role", "stage")

    def __init__(self, stage: str, depth: int) -> None:
        self.stage, self.depth = stage, depth
        self.role = ""
        """The newest piece's."""
        self.longest_seconds = 0.0
        """Of all that were ever taken."""
        self._figures = array("f")
        self._pieces: list[Piece] | None = None

    def append(self, piece: Piece) -> None:
        """Take one more; the oldest goes when there are more than `depth`."""
        self.role = piece.role
        self.longest_seconds = max(self.longest_seconds, piece.seconds)
        for name in _FIGURES:
            value = getattr(piece, name)
            self._figures.append(_NOT_KNOWN if value is None else value)
        if len(self) > self.depth:
            del self._figures[:_WIDTH]
        self._pieces = None

    def pack(self) -> None:
        """Let go of what was unpacked."""
        self._pieces = None

    def __len__(self) -> int:
        return len(self._figures) // _WIDTH

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.last(len(self)))

    def last(self, count: int) -> list[Piece]:
        """Return the newest, oldest first."""
        if self._pieces is None:
            self._pieces = [self._piece(place * _WIDTH) for place in range(len(self))]
        return self._pieces[-count:] if count else []

    def _piece(self, place: int) -> Piece:
        figures = self._figures[place : place + _WIDTH]
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
            peak_bytes=_known(figures[7]),
            floor_bytes=_known(figures[8]),
            level_bytes=_known(figures[9]),
            level_samples=int(figures[10]),
            used_samples=int(figures[11]),
            throttled_seconds=figures[12],
            throttle_known_seconds=figures[13],
        )


def _known(figure: float) -> float | None:
    return None if isnan(figure) else figure
