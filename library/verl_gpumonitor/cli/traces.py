# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Traces from files: plain or gzip, line by line, put in order of time.

What was recorded by several pods may be out of order by a moment, and a line may come twice: lines wait in a buffer of
two seconds of the trace's own time. A line that cannot be read, or comes later than that, is reported with its number
and passed over; a file that ends in the middle of its compression is read as far as it goes. Text may begin with a byte
order mark and be UTF-16, as Windows' shell writes it, and its lines may end as on any system.
"""

import gzip
import heapq
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from io import BufferedReader, TextIOWrapper
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
_PACKED: Final = {
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PAR1": "Parquet",
}
_UTF8_MARK: Final = b"\xef\xbb\xbf"
_UTF16_MARKS: Final = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_SLACK: Final = 1e-6


class BrokenOff(TraceError):  # noqa: N818 - of a file whose beginning could be read it is a remark
    """A file cannot be read, or not to its end."""

    def __init__(self, error: Exception) -> None:
        """Say it in the system's words."""
        self.reason = getattr(error, "strerror", None) or str(error)
        super().__init__(f"cannot be read: {self.reason}")


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
                yield number, line.strip(), record
        except BrokenOff as error:
            self._problem(0, f"ends too early: {error.reason}")

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
    """Open a file of lines, unpacked if it is packed, as UTF-8; `-` is standard input. Raises TraceError.

    So do the lines where one cannot be read: BrokenOff.
    """
    if path == "-":
        with open(sys.stdin.fileno(), "rb", closefd=False) as file, closing(_lines(file)) as lines:
            yield lines
        return
    try:
        opened = Path(path).open("rb")  # noqa: SIM115 - what goes wrong in the block is not the file's fault
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise BrokenOff(error) from error
    # The lines end before their file does: one that is left in its middle would look for it later.
    with opened as file, closing(_lines(file)) as lines:
        yield lines


def _lines(file: BufferedReader) -> Generator[bytes, None, None]:
    """Yield the lines of a file; one beyond all bounds is cut, and so is broken."""
    try:
        packed = file.peek(len(_GZIP)).startswith(_GZIP)
        unpacked: BufferedReader | gzip.GzipFile = gzip.GzipFile(fileobj=file) if packed else file
        for line in _decoded(unpacked):
            # Only here does a lone carriage return end a line: a spreadsheet of an old Mac.
            if b"\r" in line and line.find(b"\r") < len(line) - 2:
                yield from line.splitlines(keepends=True)
            else:
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise BrokenOff(error) from error


def _decoded(unpacked: BufferedReader | gzip.GzipFile) -> Iterator[bytes]:
    """Return the lines in UTF-8, without a mark before the first. Raises TraceError."""
    begin = unpacked.peek(8)[:8]
    for magic, name in _PACKED.items():
        if begin.startswith(magic):
            raise TraceError(f"is packed as {name}: unpack it first, or pack it by gzip")
    if begin.startswith(_UTF8_MARK):
        unpacked.read(len(_UTF8_MARK))
    encoding = _UTF16_MARKS.get(begin[:2])
    if encoding is not None:
        unpacked.read(2)
    elif len(begin) >= 4 and begin[1] == begin[3] == 0 and begin[0] and begin[2]:
        encoding = "utf-16-le"
    if encoding is None:
        return iter(partial(unpacked.readline, MAX_READ_BYTES), b"")
    return _from_utf16(unpacked, encoding)


def _from_utf16(unpacked: BufferedReader | gzip.GzipFile, encoding: str) -> Iterator[bytes]:
    text = TextIOWrapper(unpacked, encoding=encoding, errors="replace", newline="\n")
    try:
        for line in iter(partial(text.readline, MAX_READ_BYTES), ""):
            yield line.encode("utf-8", errors="replace")
    finally:
        text.detach()  # else it would close the file, which is not its own
