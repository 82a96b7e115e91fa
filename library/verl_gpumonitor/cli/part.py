# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A part of a recorded run, as `--from` and `--to` ask for it.

Reading ends at the part's end, as if the record ended there. What is before the part is read all the same: the
diagnosis has to hear it to know since when something is wrong, and in which stage and step the part begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from verl_gpumonitor.model.findings import TrackedFinding
from verl_gpumonitor.model.trace import Record, TraceError

from .logcells import date_of
from .records import Began, RecordedRun, open_run
from .times import clock, seconds

_GUIDE: Final = "write +2h30m, -30m from the end, 2:30:00 as pages show it, or a date and time such as 2026-12-31 14:30"


class PartError(TraceError):
    """A part that the record does not have, or that cannot be read. The text names the record's range."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """From when to when, both included, in seconds of the record."""

    begin: float = 0.0
    end: float = float("inf")

    def holds(self, tracked: TrackedFinding) -> bool:
        """Say whether a finding was open in it, of a record that was read up to its end."""
        return tracked.resolved is None or tracked.resolved >= self.begin

    def sentence(self, t: float) -> str:
        """Say what it is, for a reader. `t`: of the last line that was read."""
        return (
            f"Only {clock(self.begin)} to {clock(t)} of the record is shown. Findings are those that were open in it,"
            " judged by the record from its beginning to there."
        )


@contextmanager
def open_part(
    path: str, *, begin: str | None, end: str | None, interval_seconds: float
) -> Iterator[tuple[RecordedRun, Part | None]]:
    """Open a run of which a part is asked for; None: all of it. Raises TraceError, as do its lines.

    A time from the end takes a reading of the whole file before: nobody knows beforehand how long it is.
    """
    if begin is None and end is None:
        with open_run(path, interval_seconds=interval_seconds) as recorded:
            yield recorded, None
        return
    length = None
    if any(text is not None and text.startswith("-") for text in (begin, end)):
        length = _length(path, interval_seconds)
    with open_run(path, interval_seconds=interval_seconds) as recorded:
        try:
            part = part_of(begin, end, began=recorded.began, length=length)
        except ValueError as error:
            raise PartError(f"{error}; {_range(recorded, 0.0)}") from error
        asked = " ".join(f"{name} {text}" for name, text in (("--from", begin), ("--to", end)) if text is not None)
        yield RecordedRun(recorded.header, _cut(recorded, part, asked), recorded.complaints), part


def part_of(begin: str | None, end: str | None, *, began: Began | None, length: float | None) -> Part:
    """Return the part that is meant. `length`: of the record, needed for times from its end. Raises ValueError."""
    first = 0.0 if begin is None else seconds_at(begin, began=began, length=length)
    last = float("inf") if end is None else seconds_at(end, began=began, length=length)
    if begin is not None and end is not None and first >= last:
        raise ValueError(f"--from {begin} is not before --to {end}")
    return Part(begin=max(0.0, first), end=last)


def seconds_at(text: str, *, began: Began | None, length: float | None) -> float:
    """Return a moment in seconds of the record; it may lie outside. Raises ValueError.

    With a record of an hour that began at noon: `+10m`, `10:00`, `-50m` and `2026-12-31 12:10` are all 600.
    """
    try:
        if text.startswith("-"):
            return (length or 0.0) - seconds(text[1:])
        return seconds(text.removeprefix("+"))
    except ValueError:
        pass
    try:
        unix = date_of(text, zone=None if began is None else began.zone)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no time: {_GUIDE}") from None
    if began is None:
        raise ValueError(f"the record does not tell the hour at which it began, so {text!r} cannot be found: {_GUIDE}")
    return unix - began.unix


def _length(path: str, interval_seconds: float) -> float:
    if path == "-" or Path(path).is_fifo():
        raise PartError("cannot be read twice, so there is no time from its end: count from its beginning, +2h30m")
    with open_run(path, interval_seconds=interval_seconds) as recorded:
        return max((record.t for record in recorded.records), default=0.0)


def _cut(recorded: RecordedRun, part: Part, asked: str) -> Iterator[Record]:
    """Yield the lines up to a part's end. Raises PartError after the last where none was in the part."""
    read, given = 0.0, -1.0
    for record in recorded.records:
        read = record.t
        if read > part.end:
            break
        given = read
        yield record
    if given < part.begin:
        raise PartError(f"nothing was recorded in {asked}; {_range(recorded, read)}")


def _range(recorded: RecordedRun, read: float) -> str:
    """Return what the record covers, after reading what is left. `read`: time of the last line that was read."""
    end = max((record.t for record in recorded.records), default=read)
    found = f"the record goes from 0:00 to {clock(end)}"
    if recorded.began is None:
        return found
    first, last = (
        datetime.fromtimestamp(recorded.began.unix + t, recorded.began.zone).strftime("%Y-%m-%d %H:%M:%S")
        for t in (0.0, end)
    )
    return f"{found}, {first} to {last}"
