# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pods' cgroups: killing all that runs in them, and removing them. Works for version 1, 2 and both at once."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from devcluster.process import kill_all

_TOP = "kubepods"


def hierarchies(mountinfo: str) -> list[Path]:
    """Return the roots of all cgroup hierarchies. `mountinfo`: /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if after.split(" ", 1)[0] in {"cgroup", "cgroup2"}:
            found.append(Path(before.split()[4]))
    return found


def remove_pods() -> None:
    """Kill every process of every pod and remove the pods' cgroups."""
    tops = [root / _TOP for root in hierarchies(Path("/proc/self/mountinfo").read_text())]
    for _ in range(3):  # a process may be forking while we look
        if not kill_all({pid for top in tops for pid in _members(top)}):
            break
    for top in tops:
        _remove(top)


def _members(top: Path) -> Iterator[int]:
    for folder in _folders(top):
        with contextlib.suppress(OSError):
            yield from map(int, (folder / "cgroup.procs").read_text().split())


def _remove(top: Path) -> None:
    for folder in reversed(list(_folders(top))):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _folders(top: Path) -> Iterator[Path]:
    """Yield a folder and those in it, outer ones first. By os.walk, since others vanish while we look."""
    for folder, _, _ in os.walk(top):
        yield Path(folder)
