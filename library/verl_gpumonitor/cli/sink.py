# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Where a log goes: standard output, or a file that is begun anew when it has grown too large.

Each line is written whole and flushed, so that a reader, or a machine that dies, never sees half of one.
"""

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Final, Protocol

KEPT_FILES: Final = 5
"""Files that are kept beside the present one when it is rotated: `gpu.csv.1` is the newest."""


class Sink(Protocol):
    """Takes whole lines."""

    def write(self, line: bytes) -> None:
        """Write one line and flush it. Raises OSError."""

    def close(self) -> None:
        """Write nothing more."""


class StandardOutput:
    """The terminal or a pipe."""

    def __init__(self, first: bytes = b"") -> None:
        """`first`: the head of the table."""
        if first:
            self.write(first)

    def write(self, line: bytes) -> None:
        """Write one line and flush it. Raises BrokenPipeError when nobody reads any more."""
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Leave it open: it is not ours."""


class RotatingFile:
    """A file that gets lines, each file with the table's head."""

    def __init__(self, path: Path, *, first: bytes = b"", max_bytes: int | None = None, kept: int = KEPT_FILES) -> None:
        """Go on with `path` if it has the same head, else keep it aside as `.1` and begin anew. Raises OSError.

        A last line that was cut off (a machine that died) is ended, so that the next one is whole.
        """
        self._path, self._first, self._max_bytes, self._kept = path, first, max_bytes, kept
        if path.exists() and path.stat().st_size and not self._goes_on():
            self._rotate()
        self._file = self._open()

    def write(self, line: bytes) -> None:
        """Write one line and flush it; begin another file first if this one would grow too large. Raises OSError."""
        if self._max_bytes is not None and self._size > len(self._first) and self._size + len(line) > self._max_bytes:
            full = self._file
            self._rotate()
            self._file = self._open()
            os.close(full)  # last: where a name cannot be changed, this file is still there to be closed
        self._append(line)

    def close(self) -> None:
        """Write nothing more."""
        os.close(self._file)

    def _goes_on(self) -> bool:
        with self._path.open("rb") as file:
            return file.read(len(self._first)) == self._first

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(file).st_size
        self._file = file
        if self._size == 0:
            self._append(self._first)
        elif os.pread(file, 1, self._size - 1) != b"\n":
            self._append(b"\n")
        return file

    def _append(self, text: bytes) -> None:
        """Write all of a text or nothing: of a line that no longer fits on the disk, no part may stay."""
        written = os.write(self._file, text)
        if written < len(text):
            with contextlib.suppress(OSError):  # no file that could be cut, such as a pipe
                os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(text)

    def _rotate(self) -> None:
        """Move the present file to `.1`, that one to `.2`, and so on; the oldest goes."""
        for number in range(self._kept, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1) if number > 1 else self._path
            if newer.exists():
                newer.replace(older)
        if self._kept == 0:
            self._path.unlink(missing_ok=True)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
