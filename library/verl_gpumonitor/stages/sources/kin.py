# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which of a host's processes belong to the job on its GPUs.

Who holds one does, who began it or was begun by it, and whoever is in one container with it. A host may run other jobs:
other pods of the node, a cluster of Ray without a GPU, somebody's tests. Their commands and stages are not those of the
GPUs. A process without any such tie is a stranger, even if it has the right name.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from verl_gpumonitor.model.samples import NodeSample
from verl_gpumonitor.model.vocabulary import GpuState

from .titles import PROC, ProcessStat, parse_stat

UNLISTED_BYTES: Final = 2**30
"""Memory that a GPU has in use, and no process listed on it: the driver shows them not to us. Below, it may be its own
part, which older drivers do not tell apart."""
MAX_ANCESTORS: Final = 32
_CONTAINER: Final = re.compile(rb"[0-9a-f]{32,64}")
"""The id that a container's runtime gives to its cgroup."""
_HOSTS_PROCESSES: Final = "pid:[4026531836]"
"""The kernel's own process namespace, whose number is the same on each machine: we are in no container."""
_RAYLET: Final = "raylet"


class Place(NamedTuple):
    """A container, by what can be seen of it from outside."""

    cgroup: bytes
    mounts: str | None
    """Its mount namespace; None where that is not to be read, which takes the same user."""


def holders_of(node: NodeSample) -> frozenset[int] | None:
    """Return the processes on a host's GPUs; None where the driver does not list them."""
    gpus = [gpu for gpu in node.gpus if gpu.state is GpuState.OK]
    lists = [gpu.processes for gpu in gpus if gpu.processes is not None]
    pids = frozenset(process.pid for listed in lists for process in listed)
    unlisted = any(not gpu.processes and (gpu.memory_used_bytes or 0) >= UNLISTED_BYTES for gpu in gpus)
    return None if not pids and (unlisted or not lists) else pids


class Kin:
    """Tells the job's processes from others. What once held a GPU stays the job's, and so does its container.

    The container does as long as a process lives by which it was known: then its number may be given to another one.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._roots: set[int] = set()
        """They and all that they began are the job's."""
        self._above: set[int] = set()
        """These alone: a shell may have begun other things, too."""
        self._places: dict[Place, set[int]] = {}
        """Container -> processes by which it is known."""
        self._known: dict[int, bool] = {}
        self._inner: dict[int, int | None] = {}
        self._contained = self._link("self", "pid") not in (None, _HOSTS_PROCESSES)
        self._outside = Place(self._cgroup("1"), self._link("1", "mnt") or self._link("self", "mnt"))

    def keep(self, pids: Collection[int]) -> None:
        """Forget processes that are gone: their numbers are given to others."""
        self._roots.intersection_update(pids)
        self._above.intersection_update(pids)
        for pid in self._known.keys() - pids:
            del self._known[pid]
        for pid in self._inner.keys() - pids:
            del self._inner[pid]
        for members in self._places.values():
            members.intersection_update(pids)
        self._places = {place: members for place, members in self._places.items() if members}

    def join(self, pid: int) -> bool:
        """Take a process, and those with a tie to it, for the job's; False where it is not to be seen."""
        if pid in self._roots:
            return True
        if self.stat(pid) is None:
            return False
        above = list(self.ancestors(pid))
        self._roots.add(pid)
        # Ray's workers are its raylet's children, as is the driver of a submitted job.
        self._roots.update(one for one in above if self.is_raylet(one))
        self._above.update(above)
        place = self.place(pid)
        if place is not None:
            within = (one for one in above if self.place(one) == place)
            self._places.setdefault(place, set()).update((pid, *within))
        self._known = {one: True for one, ours in self._known.items() if ours}
        return True

    def has(self, pid: int) -> bool:
        """Say whether a process is the job's, as far as that is known."""
        known = self._known.get(pid)
        if known is None:
            known = self._known[pid] = self._has(pid)
        return known

    def ancestors(self, pid: int) -> Iterator[int]:
        """Yield who began a process, who began that one, and so on; without the first of all."""
        for _ in range(MAX_ANCESTORS):
            stat = self.stat(pid)
            if stat is None or stat.parent <= 1:
                return
            pid = stat.parent
            yield pid

    def place(self, pid: int) -> Place | None:
        """Return the container that a process is in; None: in none, or that cannot be said."""
        found = Place(self._cgroup(str(pid)), self._link(str(pid), "mnt"))
        if found.mounts is None:
            return found if found.cgroup and found.cgroup != self._outside.cgroup else None
        return found if found.mounts != self._outside.mounts or self._contained else None

    def stat(self, pid: int) -> ProcessStat | None:
        """Return what matters of a process; None where it is gone."""
        return parse_stat(self._text(str(pid), "stat"))

    def inner(self, pid: int) -> int | None:
        """Return the number that a process has in its own container; None where the system does not tell."""
        if pid not in self._inner:
            _, found, rest = self._text(str(pid), "status").partition(b"\nNSpid:")
            words = rest.partition(b"\n")[0].split()
            self._inner[pid] = int(words[-1]) if found and words and words[-1].isdigit() else None
        return self._inner[pid]

    def is_raylet(self, pid: int) -> bool:
        """Say whether a process is the one that begins all others of Ray on its node."""
        stat = self.stat(pid)
        return stat is not None and stat.name == _RAYLET

    def _has(self, pid: int) -> bool:
        if pid in self._above or pid in self._roots or any(one in self._roots for one in self.ancestors(pid)):
            return True
        members = self._places.get(place) if self._places and (place := self.place(pid)) is not None else None
        if members is None:
            return False
        members.add(pid)
        return True

    def _cgroup(self, pid: str) -> bytes:
        """Return the ids of containers in a process's cgroups; empty where there are none."""
        return b"/".join(sorted(set(_CONTAINER.findall(self._text(pid, "cgroup")))))

    def _text(self, pid: str, what: str) -> bytes:
        try:
            return Path(self._proc, pid, what).read_bytes()
        except OSError:
            return b""

    def _link(self, pid: str, kind: str) -> str | None:
        try:
            return str(Path(self._proc, pid, "ns", kind).readlink())
        except OSError:
            return None
