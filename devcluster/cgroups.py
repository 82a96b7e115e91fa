# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pods' cgroups: killing all that runs in them, and removing them. Works for version 1, 2 and both at once."""

import contextlib
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
    for file in top.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            yield from map(int, file.read_text().split())


def _remove(top: Path) -> None:
    folders = [path for path in top.rglob("*") if path.is_dir()] if top.is_dir() else []
    for folder in sorted([*folders, top], key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
