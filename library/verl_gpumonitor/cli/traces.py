# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Traces from files: plain or gzip, line by line, put in order of time.

What was recorded by several pods may be out of order by a moment, and a line may come twice: lines wait in a buffer of
two seconds of the trace's own time. A line that cannot be read, or comes later than that, is reported with its number
and passed over; a file that ends in the middle of its compression is read as far as it goes.
"""

import gzip
import heapq
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from verl_gpumonitor.model.trace import BrokenLine, Header, NotATrace, Record, TraceError, parse_header, parse_line

REORDER_SECONDS: Final = 2.0
MAX_WAITING: Final = 200_000
"""Lines that wait at most; a trace with so many in two seconds is read without putting it in order."""
MAX_PROBLEMS: Final = 50
"""Problems that are kept word for word; the others are counted."""
MAX_READ_BYTES: Final = 8 * 1024 * 1024
_GZIP: Final = b"\x1f\x8b"
_SLACK: Final = 1e-6


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A line that was passed over."""

    line: int
    """Counted from 1, the header; 0: the file as a whole."""
    text: str


class TraceReader:
    """A trace as it is read: the header at once, the records in order of time as they are asked for."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        """Read the header. Raises NotATrace."""
        self._lines = enumerate(lines, start=1)
        first = next(self._lines, None)
        if first is None:
            raise NotATrace("it is empty")
        self.header: Header = parse_header(first[1])
        self.problems: list[Problem] = []
        self.problem_count = 0
        self.records_read = 0

    def records(self) -> Iterator[Record]:
        """Yield the records, oldest first; each once."""
        waiting: list[tuple[float, int, bytes, Record]] = []
        known: set[bytes] = set()
        newest, given = 0.0, 0.0
        for number, line, record in self._parsed():
            if record.t < given - _SLACK:
                self._problem(number, f"comes too late: t {record.t:g} after {given:g} was passed")
                continue
            if line in known:
                continue
            heapq.heappush(waiting, (record.t, number, line, record))
            known.add(line)
            newest = max(newest, record.t)
            while waiting and (waiting[0][0] <= newest - REORDER_SECONDS or len(waiting) > MAX_WAITING):
                given, _, old, ready = heapq.heappop(waiting)
                known.discard(old)
                yield ready
        while waiting:
            yield heapq.heappop(waiting)[3]

    def _parsed(self) -> Iterator[tuple[int, bytes, Record]]:
        try:
            for number, line in self._lines:
                if not line.strip():
                    continue
                try:
                    record = parse_line(line)
                except BrokenLine as error:
                    self._problem(number, str(error))
                    continue
                if record is None or isinstance(record, Header):
                    continue
                self.records_read += 1
                yield number, line.strip(), record
        except (OSError, EOFError, zlib.error) as error:
            self._problem(0, f"ends too early: {error}")

    def _problem(self, line: int, text: str) -> None:
        self.problem_count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(line=line, text=text))


@contextmanager
def open_trace(path: str) -> Iterator[TraceReader]:
    """Open a trace; `-` is standard input. Raises TraceError, whose text says what is wrong with the file."""
    with lines_of(path) as lines:
        yield TraceReader(lines)


@contextmanager
def lines_of(path: str) -> Iterator[Iterator[bytes]]:
    """Open a file of lines, unpacked if it is packed; `-` is standard input. Raises TraceError."""
    if path == "-":
        with open(sys.stdin.fileno(), "rb", closefd=False) as file:
            yield _lines(file)
        return
    try:
        with Path(path).open("rb") as file:
            yield _lines(file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"cannot be read: {reason}") from error


def _lines(file: BufferedReader) -> Iterator[bytes]:
    """Return the lines of a file, unpacked if it is packed; one beyond all bounds is cut, and so is broken."""
    packed = file.peek(len(_GZIP)).startswith(_GZIP)
    unpacked: BufferedReader | gzip.GzipFile = gzip.GzipFile(fileobj=file) if packed else file
    return iter(partial(unpacked.readline, MAX_READ_BYTES), b"")
