# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is remembered of all GPUs of a pod: finished steps in columns, 20 bytes for a stage of a step on a GPU. Pure.

The GPUs of a pod finish a step together, so that its number, the stage's name and role are kept once for all of them.
Seconds and bytes keep seven digits (80 GB are known to 8 KB), shares four and a half, power a tenth of a watt. What no
rule asks of reported steps is not kept: time without load, and how samples lay, for a reported peak is its own level.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from sys import intern
from typing import Final, TypeVar

from .history import LEARNT_STEPS, USUAL_UTILIZATION, Past, Piece, known, known_of, usual_power

_NOT_KNOWN: Final = float("nan")
_SIZES: Final = 3
_SECONDS, _PEAK, _FLOOR = range(_SIZES)
"""Figures of a GPU in `sizes`, seconds and bytes; the seconds are NaN where it was not in this stage."""
_SHARES: Final = 4
"""Figures in `shares`: known of all seconds, busy of the known, mean power, throttled of the known."""
_WHOLE: Final = 65_534
_NO_SHARE: Final = 65_535
_PER_WATT: Final = 10.0


class StageRow:
    """One stage of one step on the GPUs of a pod."""

    __slots__ = ("role", "shares", "sizes")

    def __init__(self, width: int) -> None:
        self.role = ""
        self.sizes = array("f", (_NOT_KNOWN,)) * (_SIZES * width)
        self.shares = array("H", (_NO_SHARE,)) * (_SHARES * width)

    def put(self, place: int, piece: Piece) -> None:
        """Take what the GPU at a place did."""
        self.role = piece.role
        at = _SIZES * place
        self.sizes[at] = piece.seconds
        self.sizes[at + 1] = _NOT_KNOWN if piece.peak_bytes is None else piece.peak_bytes
        self.sizes[at + 2] = _NOT_KNOWN if piece.floor_bytes is None else piece.floor_bytes
        at, power = _SHARES * place, piece.power_watts
        self.shares[at] = _share(piece.known_seconds, piece.seconds)
        self.shares[at + 1] = _share(piece.busy_seconds, piece.known_seconds)
        self.shares[at + 2] = _NO_SHARE if power is None else min(_WHOLE, round(_PER_WATT * power))
        self.shares[at + 3] = _share(piece.throttled_seconds, piece.throttle_known_seconds)


Rows = Mapping[str, StageRow]
"""Stage -> what the GPUs of a pod did in it, in one step."""


def rows_of(pieces: Iterable[tuple[int, Piece]], width: int) -> Rows:
    """Pack one step: place of a GPU, and what one stage did on it; one piece for each stage of a GPU."""
    rows: dict[str, StageRow] = {}
    for place, piece in pieces:
        row = rows.get(piece.stage)
        if row is None:
            row = rows[piece.stage] = StageRow(width)
        row.put(place, piece)
    return rows


class StageColumns:
    """Finished steps of one stage on the GPUs of one pod, oldest first."""

    __slots__ = ("_shares", "_sizes", "_usual_watts", "_width", "depth", "longest_seconds", "role", "stage", "steps")

    def __init__(self, stage: str, *, depth: int, width: int) -> None:
        # Each report brings its names anew.
        self.stage, self.depth, self._width = intern(stage), depth, width
        self.role = ""
        """The newest step's."""
        self.longest_seconds = 0.0
        """Of all that were ever taken, on any of the GPUs."""
        self.steps = array("i")
        """Numbers of the steps."""
        # At once for all steps: columns that grow would leave holes behind them, half as much as they take.
        self._sizes = array("f", (_NOT_KNOWN,)) * (_SIZES * width * depth)
        self._shares = array("H", (_NO_SHARE,)) * (_SHARES * width * depth)
        self._usual_watts = array("f", (_NOT_KNOWN,)) * width

    def append(self, step: int, row: StageRow) -> None:
        """Take one more step; the oldest goes when there are more than `depth`."""
        self.role = intern(row.role)
        full = len(self.steps) == self.depth
        if full:
            del self.steps[0]
        rows = len(self.steps)
        self.steps.append(step)
        _put(self._sizes, rows, _widened(row.sizes, len(row.sizes), _SIZES * self._width, _NOT_KNOWN), full=full)
        _put(self._shares, rows, _widened(row.shares, len(row.shares), _SHARES * self._width, _NO_SHARE), full=full)
        # NaN, of a GPU that did not do this, is never greater.
        self.longest_seconds = max(self.longest_seconds, *row.sizes[::_SIZES])

    def widen(self, width: int) -> None:
        """Make room for GPUs that have joined."""
        self._sizes = _widened(self._sizes, _SIZES * self._width, _SIZES * width, _NOT_KNOWN)
        self._shares = _widened(self._shares, _SHARES * self._width, _SHARES * width, _NO_SHARE)
        self._usual_watts = _widened(self._usual_watts, self._width, width, _NOT_KNOWN)
        self._width = width

    def figures(self, which: int, place: int) -> "array[float]":
        """Return one of the sizes of the GPU at a place, of all rows; NaN where it is not known."""
        stride = _SIZES * self._width
        return self._sizes[_SIZES * place + which : stride * len(self.steps) : stride]

    def piece(self, row: int, place: int) -> Piece:
        """Unpack what one GPU did in one step."""
        cell = row * self._width + place
        seconds, peak, floor = self._sizes[_SIZES * cell : _SIZES * (cell + 1)]
        known_share, busy, power, throttled = self._shares[_SHARES * cell : _SHARES * (cell + 1)]
        seen = 0.0 if known_share == _NO_SHARE else seconds * known_share / _WHOLE
        powered, peak_bytes, samples = power != _NO_SHARE, known(peak), max(1, round(seconds))
        return Piece(
            stage=self.stage,
            role=self.role,
            step=self.steps[row],
            seconds=seconds,
            known_seconds=seen,
            busy_seconds=0.0 if busy == _NO_SHARE else seen * busy / _WHOLE,
            powered_seconds=seconds if powered else 0.0,
            energy_joules=seconds * power / _PER_WATT if powered else 0.0,
            peak_bytes=peak_bytes,
            floor_bytes=known(floor),
            level_bytes=peak_bytes,
            level_samples=samples,
            used_samples=samples,
            throttled_seconds=0.0 if throttled == _NO_SHARE else seen * throttled / _WHOLE,
            throttle_known_seconds=0.0 if throttled == _NO_SHARE else seen,
        )

    def learn(self) -> None:
        """Take the power of the last steps into what is usual, for each GPU."""
        width, begin = self._width, max(0, len(self.steps) - LEARNT_STEPS)
        for place in range(width):
            loads = self._shares[_SHARES * (begin * width + place) + 1 :: _SHARES * width]
            powers = self._shares[_SHARES * (begin * width + place) + 2 :: _SHARES * width]
            worked = [
                power / _PER_WATT
                for load, power in zip(loads, powers, strict=True)
                if power != _NO_SHARE and USUAL_UTILIZATION * _WHOLE <= load <= _WHOLE
            ]
            usual = usual_power(worked, self.usual_watts(place))
            if usual is not None:
                self._usual_watts[place] = usual

    def usual_watts(self, place: int) -> float | None:
        """Return the median power of the last steps in which the GPU worked; None before there is one."""
        return known(self._usual_watts[place])


class PodColumns:
    """Finished steps of all stages on the GPUs of one pod."""

    __slots__ = ("_depth", "_width", "stages")

    def __init__(self, depth: int) -> None:
        self._depth, self._width = depth, 0
        self.stages: dict[str, StageColumns] = {}

    @property
    def width(self) -> int:
        """GPUs that have a place."""
        return self._width

    def place(self) -> int:
        """Return the place of a GPU that joins."""
        self._width += 1
        for columns in self.stages.values():
            columns.widen(self._width)
        return self._width - 1

    def append(self, step: int, rows: Rows) -> None:
        """Take one step."""
        for stage, row in rows.items():
            columns = self.stages.get(stage)
            if columns is None:
                columns = StageColumns(stage, depth=self._depth, width=self._width)
                self.stages[columns.stage] = columns
            columns.append(step, row)
        for columns in self.stages.values():
            columns.learn()

    def past(self, place: int) -> dict[str, Past]:
        """Return what one GPU did, by stage. It holds until the next step is taken."""
        found = ((stage, ColumnPast(columns, place)) for stage, columns in self.stages.items())
        return {stage: past for stage, past in found if len(past)}


class ColumnPast(Past):
    """One stage on one GPU, as rules look at it: pieces are unpacked as they are asked for."""

    __slots__ = ("_all_seconds", "_columns", "_place", "_rows", "_steps")

    def __init__(self, columns: StageColumns, place: int) -> None:
        super().__init__(columns.stage)
        self._columns, self._place = columns, place
        self.role, self.longest_seconds = columns.role, columns.longest_seconds
        self._all_seconds = columns.figures(_SECONDS, place)
        self._rows: Sequence[int] = range(len(self._all_seconds))
        self._steps: Sequence[int] = columns.steps
        if isnan(sum(self._all_seconds)):
            self._rows = [row for row in self._rows if not isnan(self._all_seconds[row])]
            self._steps = [columns.steps[row] for row in self._rows]

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> Sequence[int]:
        """Numbers of the steps."""
        return self._steps

    @property
    def seconds(self) -> Sequence[float]:
        """For how long it was in this stage."""
        return self._of_rows(self._all_seconds)

    @property
    def peaks(self) -> Sequence[float | None]:
        """Highest memory in use."""
        return known_of(self._of_rows(self._columns.figures(_PEAK, self._place)))

    @property
    def floors(self) -> Sequence[float | None]:
        """Lowest memory in use."""
        return known_of(self._of_rows(self._columns.figures(_FLOOR, self._place)))

    def _of_rows(self, figures: "array[float]") -> Sequence[float]:
        return figures if len(self._steps) == len(figures) else [figures[row] for row in self._rows]

    def _piece(self, number: int) -> Piece:
        return self._columns.piece(self._rows[number], self._place)


def _share(part: float, whole: float) -> int:
    return round(min(1.0, part / whole) * _WHOLE) if whole > 0 else _NO_SHARE


N = TypeVar("N", float, int)


def _put(column: "array[N]", number: int, row: "array[N]", *, full: bool) -> None:
    """Write the row of a number; where there was no room for it all move up first, and the oldest goes."""
    width = len(row)
    if full:
        column[:-width] = column[width:]
    column[number * width : (number + 1) * width] = row


def _widened(column: "array[N]", width: int, wider: int, fill: N) -> "array[N]":
    """Return rows of a width as rows of a greater one."""
    if width == wider or not column:
        return column
    out, rest = column[:0], [fill] * (wider - width)
    for begin in range(0, len(column), width):
        out.extend(column[begin : begin + width])
        out.extend(rest)
    return out
