# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The beginnings of small files under /proc, read again and again.

To find a process's file costs the kernel more than to write its text, so that files which are read each second stay
open. An open one is of its process for ever: when that is gone it says so, and never tells of another one to which
the number was given.
"""

import os
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 1024
MAX_OPEN: Final = 128
"""A program may be allowed 1024 open files. Beyond this number a file is opened for each reading."""


def pids_in(root: str | Path) -> set[int]:
    """Return all processes under a /proc; empty where there is none."""
    try:
        return {int(name) for name in os.listdir(root) if name.isdecimal()}  # noqa: PTH208 - names alone
    except OSError:
        return set()


def beginning_of(path: str, most: int = MAX_BYTES) -> bytes:
    """Return the first bytes of a file; empty where the process is gone or hides it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, most)
    except OSError:
        return b""
    finally:
        os.close(file)


class ProcFiles:
    """One process namespace's /proc. Used from one thread."""

    def __init__(self, root: Path) -> None:
        """`root`: /proc."""
        self._root = str(root)
        self._open: dict[int, int] = {}
        """Pid -> descriptor of its command line."""

    def pids(self) -> set[int]:
        """Return all processes; empty where there is no /proc."""
        return pids_in(self._root)

    def newest_pid(self) -> bytes:
        """Return the number that was given last, be it to a thread; empty where the system does not say.

        While it stays the same, nothing has begun.
        """
        return beginning_of(f"{self._root}/loadavg").rpartition(b" ")[2]

    def stat(self, pid: int) -> bytes:
        """Return the beginning of `/proc/<pid>/stat`; empty where the process is gone or hides it."""
        return beginning_of(f"{self._root}/{pid}/stat")

    def command_line(self, pid: int, *, keep: bool = False) -> bytes | None:
        """Return the beginning of a command line; empty for a process that has none any more, or hides it.

        `keep`: leave its file open until `forget`. None: the process whose file was open is gone.
        """
        file = self._open.get(pid)
        if file is None:
            if not keep or len(self._open) >= MAX_OPEN:
                return beginning_of(f"{self._root}/{pid}/cmdline")
            try:
                file = self._open[pid] = os.open(f"{self._root}/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return b""
        try:
            return os.pread(file, MAX_BYTES, 0)
        except OSError:
            self.forget(pid)
            return None

    def forget(self, pid: int) -> None:
        """Close what was left open of a process."""
        file = self._open.pop(pid, None)
        if file is not None:
            os.close(file)
