# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Where a trace is written: a file, packed or plain, that can be read to its last flush whatever becomes of us; a pipe.

A packed file ends, after each flush, as gzip files end. The next flush writes over that end and goes on in the same
stream, so that lines are packed as well as in one piece, and a reader or a kill never meets half a file. The header is
a gzip member of its own: what is learnt of the workload later takes its place.
"""

import os
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

_GZIP: Final = 31
"""zlib's window bits for gzip's own wrapping."""
_LEVEL: Final = 6
_PIECE_BYTES: Final = 1 << 20


class Output(Protocol):
    """Takes whole lines."""

    def write(self, lines: bytes) -> None:
        """Take lines; they need not be written yet."""

    def flush(self) -> None:
        """Write what was taken, so that a reader sees it. Raises OSError."""

    def rewrite_head(self, head: bytes) -> None:
        """Put another first line in the place of the first, where that can be done. Raises OSError."""

    def close(self) -> None:
        """Write nothing more."""


class Pipe:
    """Standard output, or another file that cannot be gone back in: plain lines."""

    def __init__(self, head: bytes, file: int | None = None) -> None:
        """`file`: a descriptor, closed at the end; None is standard output. Raises OSError."""
        self._own = file
        self._file = sys.stdout.fileno() if file is None else file
        self._waiting = bytearray(head)
        self.flush()

    def write(self, lines: bytes) -> None:
        """Take lines."""
        self._waiting += lines

    def flush(self) -> None:
        """Write what was taken. Raises BrokenPipeError when nobody reads any more."""
        while self._waiting:
            del self._waiting[: os.write(self._file, self._waiting)]

    def rewrite_head(self, head: bytes) -> None:
        """Do nothing: it is read already."""

    def close(self) -> None:
        """Let the file go if it is ours."""
        if self._own is not None:
            os.close(self._own)


class TraceFile:
    """A file on disk, packed where its name ends in `.gz`."""

    def __init__(self, path: Path, head: bytes) -> None:
        """Begin a new file with its first line. What is there by this name is kept aside. Raises OSError."""
        self.path = path
        self.kept_as = _keep_aside(path)
        """Where the file went that had this name; None where there was none."""
        self._waiting = bytearray()
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP) if path.suffix == ".gz" else None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._end = b""
        """What a packed file ends with until more comes."""
        self._size = self._head_size = 0
        """Without the end."""
        self._put(self._packed_head(head), b"")
        self._head_size = self._size

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._size + len(self._end)

    def write(self, lines: bytes) -> None:
        """Take lines."""
        self._waiting += lines

    def flush(self) -> None:
        """Write what was taken. Raises OSError; what was flushed before stays readable."""
        if not self._waiting:
            return
        lines = bytes(self._waiting)
        self._waiting.clear()
        if self._packer is None:
            self._put(lines, b"")
            return
        packed = self._packer.compress(lines) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._put(packed, self._packer.copy().flush(zlib.Z_FINISH))

    def rewrite_head(self, head: bytes) -> None:
        """Replace the first line, in one step for whoever opens the file. Raises OSError."""
        first = self._packed_head(head)
        beside = self.path.with_name(f"{self.path.name}.part")
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write_at(file, first, 0)
            at = 0
            while piece := os.pread(self._file, _PIECE_BYTES, self._head_size + at):
                _write_at(file, piece, len(first) + at)
                at += len(piece)
            beside.replace(self.path)
        except OSError:
            os.close(file)
            beside.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = file
        self._size += len(first) - self._head_size
        self._head_size = len(first)

    def close(self) -> None:
        """Let the file go; it ends as it should already."""
        os.close(self._file)

    def _packed_head(self, head: bytes) -> bytes:
        if self._packer is None:
            return head
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        return packer.compress(head) + packer.flush()

    def _put(self, data: bytes, end: bytes) -> None:
        try:
            _write_at(self._file, data + end, self._size)
        except OSError:
            # The disk is full, as a rule. What was there before is put back as it was.
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
                _write_at(self._file, self._end, self._size)
            raise
        self._size, self._end = self._size + len(data), end


def open_output(path: Path | None, head: bytes) -> Output:
    """Return where to write: None is standard output; a pipe or a device gets plain lines. Raises OSError."""
    if path is None:
        return Pipe(head)
    if path.exists() and not path.is_file():
        return Pipe(head, os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    return TraceFile(path, head)


def _keep_aside(path: Path) -> Path | None:
    """Give a file that has the name another one, with the first number that is free."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _write_at(file: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
