# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A recorded run from whatever file holds it: a trace, or a log of GPUs (nvidia-smi's, or ours).

A GPUMonitor is no recorded run; it is told from one here, as a file says itself what it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timezone
from itertools import chain
from typing import Final, NamedTuple

from verl_gpumonitor.model.trace import Header, Record, TraceError

from .gpulogs import trace_of
from .logrows import Problems
from .monitors import MAX_BYTES, MonitorGiven, is_object
from .times import began_unix
from .traces import TraceReader, lines_of

DEFAULT_INTERVAL_SECONDS: Final = 1.0
"""Between two rows of a log without times, unless the caller knows better."""
_TRACE_MARK: Final = b'"format"'
_MOST_BEFORE: Final = 20
"""Empty lines and comments before what a file begins with."""


class Began(NamedTuple):
    """The hour at which a record began."""

    unix: float
    zone: timezone | None
    """Of a time without one that is to be compared with it; None is this machine's. A log's own times have none."""


class RecordedRun:
    """A run that is being read: who it is, its lines in order of time, and what was passed over."""

    def __init__(
        self, header: Header, records: Iterator[Record], complaints: "Complaints", began: Began | None = None
    ) -> None:
        self.header = header
        self.began = began
        """None: it does not tell."""
        self.records = records
        self.complaints = complaints


class Complaints:
    """What could not be read, in words, once the run was read."""

    def __init__(self, source: TraceReader | Problems) -> None:
        self._source = source

    def __iter__(self) -> Iterator[str]:
        """Yield a line for each of the first few, and one that counts the others."""
        source = self._source
        if isinstance(source, Problems):
            yield from source.notes
            yield from source.first
            shown, all_of_them = len(source.first), source.rows
        else:
            for problem in source.problems:
                yield f"line {problem.line}: {problem.text}" if problem.line else problem.text
            shown, all_of_them = len(source.problems), source.problem_count
        if all_of_them > shown:
            yield f"{all_of_them - shown} more lines were passed over"


@contextmanager
def open_run(path: str, *, interval_seconds: float = DEFAULT_INTERVAL_SECONDS) -> Iterator[RecordedRun]:
    """Open a run; `-` is standard input, gzip is unpacked. Raises TraceError, whose text says what is wrong.

    It is MonitorGiven where the file is an object of Kubernetes, such as a GPUMonitor, which some commands read.
    `interval_seconds`: time between two rows of a GPU in a log without times.
    """
    with lines_of(path) as lines:
        before, first = _beginning(lines)
        everything = chain([first] if first else [], lines)
        is_trace = _TRACE_MARK in first[:4096] and b'"header"' in first[:4096]
        if not is_trace and is_object(first):
            raise MonitorGiven(_document(everything))
        if is_trace:
            reader = TraceReader(everything)
            unix = began_unix(reader.header.notes or ())
            began = None if unix is None else Began(unix, None)
            yield RecordedRun(reader.header, reader.records(), Complaints(reader), began)
        else:
            problems = Problems()
            header, rows, unix = trace_of(
                chain(before, everything), interval_seconds=interval_seconds, problems=problems
            )
            began = None if unix is None else Began(unix, timezone.utc)
            yield RecordedRun(header, rows, Complaints(problems), began)


def _beginning(lines: Iterator[bytes]) -> tuple[list[bytes], bytes]:
    """Return empty lines and comments that a file begins with, and the line that says what it is."""
    before: list[bytes] = []
    for line in lines:
        if line.strip() and not line.startswith(b"#"):
            return before, line
        before.append(line)
        if len(before) >= _MOST_BEFORE:
            break
    return before, b""


def _document(lines: Iterator[bytes]) -> bytes:
    """Return all of a file that is one object, or more than any object has."""
    document = bytearray()
    for line in lines:
        document += line
        if len(document) > MAX_BYTES:
            break
    return bytes(document)


__all__ = ["DEFAULT_INTERVAL_SECONDS", "MonitorGiven", "RecordedRun", "TraceError", "open_run"]
