# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which processes of a host are the job's on its GPUs, found in /proc scan by scan.

They are those with a tie to who holds a GPU (`Kin`). Where the driver does not list who does, they are those of the
only job that there is; where there are several, of none. That it does not list them is believed only when it lasts: a
list is some seconds old, so that it may lack a process that has just begun, and name one that has ended. Most processes
are nobody's of interest: these are looked at again seldom, in turns. Not for a pod, whose processes are one job's.
"""

import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from verl_gpumonitor.model.redaction import redact
from verl_gpumonitor.model.report import RayJobInfo

from .kin import Kin
from .proc_files import beginning_of, pids_in
from .ray_jobs import only_alive
from .titles import PROC, parse_stat, parse_title

MAX_COMMAND: Final = 65536
RARE_SCANS: Final = 20
"""A process without a title is looked at again once in so many scans."""
UNLISTED_SECONDS: Final = 15.0
"""So long the driver must have listed nobody who is to be seen here, while GPUs are in use. Lists come each 10 s at
most."""
RAY: Final = "ray::"
"""How the titles begin that Ray gives its processes."""
_LEADS: Final = re.compile(rb"[^\0]*python[^/\0]*\0(?:[^\0]*\0)*?(?:verl\.trainer\.|[^\0]*verl/trainer/)")
"""Command line of a verl driver: Python with one of verl's trainers, and not a shell or an editor that names one."""
_SUBMITS: Final = b"\0job\0submit\0"
"""Who submits a job to Ray does not lead it: the driver has the same words in its own command."""
_MAX_ANCESTORS: Final = 16


class Titled(NamedTuple):
    """A process with a title of Ray's or of a rollout engine's, which it may have no more."""

    raw: bytes
    """Its command line, which is the title."""
    parent: int | None

    @property
    def is_rays(self) -> bool:
        """Whether the title is one of Ray's."""
        return self.raw.startswith(RAY.encode())


class JobProcesses:
    """Scans /proc. One thread scans, others may ask meanwhile; nothing raises."""

    def __init__(self, proc: Path = PROC) -> None:
        """`proc`: of the process namespace that is looked at."""
        self._proc = proc
        self._kin = Kin(proc)
        self._holders: frozenset[int] | None = None
        self._told = False
        """Whether anybody says who holds the GPUs."""
        self._lists = False
        """The driver has listed somebody who is to be seen: it can."""
        self._unlisted_since: float | None = None
        self._unlisted = False
        """Who holds the GPUs is not listed, or not to be seen here."""
        self._others: set[int] = set()
        """Processes without such a title, and those that have only inherited one."""
        self._scans = 0
        self._lock = threading.Lock()
        """Guards the ties and what follows. Command lines, whose reading may hang, are read without it."""
        self._titled: dict[int, Titled] = {}
        self._leads: dict[int, str] = {}
        """Processes that lead a job, anybody's -> command line, without secrets."""
        self.undecided = False
        """Whether several jobs are here, and the driver does not list whose processes are on the GPUs."""

    def on_gpus(self, holders: frozenset[int] | None) -> None:
        """Say who holds the host's GPUs; None where the driver does not list them."""
        self._holders, self._told = holders, True

    def scan(self, now: float) -> None:
        """Look at all processes, and learn which are the job's. `now`: of any clock that does not jump."""
        self._scans += 1
        pids = self._pids()
        titled = {pid: process for pid, process in self._titled.items() if pid in pids}
        leads = {pid: command for pid, command in self._leads.items() if pid in pids}
        self._others &= pids
        turn = self._scans % RARE_SCANS
        for pid in [pid for pid in pids if pid not in self._others or pid % RARE_SCANS == turn]:
            self._look_at(pid, titled, leads)
        with self._lock:
            self._titled, self._leads = titled, leads
            self._kin.keep(pids)
            self._learn_kin(now)

    def has(self, pid: int) -> bool:
        """Say whether a process is the job's, by its number here."""
        with self._lock:
            return self._kin.has(pid)

    def is_the_jobs(self, pid: int) -> bool:
        """Say whether a process is the job's. `pid`: its number here, or in its own container.

        Where nobody is to be seen, all may be in another container, and whoever speaks is believed.
        """
        with self._lock:
            if self._kin.has(pid) or self._sees_nobody():
                return True
            ours = [one for one in (*self._titled, *self._leads) if self._kin.has(one)]
            return any(self._kin.inner(one) == pid for one in ours)

    @property
    def sees_ray(self) -> bool:
        """Whether a process of the job has a title of Ray's."""
        with self._lock:
            return any(process.is_rays and self._kin.has(pid) for pid, process in self._titled.items())

    def has_ray(self, jobs: Sequence[RayJobInfo]) -> bool:
        """Say whether Ray's servers on this host are the job's: seen on the GPUs, or all that is to be seen.

        `jobs`: what these servers list.
        """
        return self.sees_ray or (self.sees_nobody and only_alive(jobs) is not None)

    @property
    def sees_nobody(self) -> bool:
        """Whether the driver lists nobody, and no job's process is to be seen: all may be in another container."""
        with self._lock:
            return self._sees_nobody()

    def titled(self) -> dict[int, Titled]:
        """Return the job's own processes with a title, as of the last scan."""
        with self._lock:
            return {pid: process for pid, process in self._titled.items() if self._kin.has(pid)}

    def leading(self) -> set[str]:
        """Return the command lines that lead the job, without secrets: one, if it is one job."""
        with self._lock:
            return {self._leads[pid] for pid in self._topmost(pid for pid in self._leads if self._kin.has(pid))}

    def _sees_nobody(self) -> bool:
        return self._unlisted and not self._titled and not self._leads

    def _learn_kin(self, now: float) -> None:
        joined = [pid for pid in self._holders or () if self._kin.join(pid)]
        self._unlisted = self._is_unlisted(now, seen=bool(joined))
        if joined or self._holders == frozenset():
            self.undecided = False
            self._join_driver()
        elif self._unlisted:
            self._join_only_job()

    def _is_unlisted(self, now: float, *, seen: bool) -> bool:
        """Say whether the driver does not tell who holds the GPUs, or names processes of elsewhere alone.

        Once that was found, GPUs that nobody seems to use for a while say nothing against it.
        """
        self._lists = self._lists or seen
        if self._lists or self._holders == frozenset():
            self._unlisted_since = None
            return self._unlisted and not self._lists
        if self._unlisted_since is None:
            self._unlisted_since = now
        return not self._told or now - self._unlisted_since >= UNLISTED_SECONDS

    def _join_only_job(self) -> None:
        heads = {self._head_of(pid) for pid in (*self._titled, *self._leads)}
        jobs = {self._kin.place(head) or head for head in heads}
        if any(map(self._kin.has, heads)):
            return
        if len(jobs) == 1:
            self._kin.join(heads.pop())
            self.undecided = False
        elif jobs:
            self.undecided = True

    def _join_driver(self) -> None:
        """Take the only driver there is, outside of containers, for that of the job's Ray, of which it is no child."""
        loose = [pid for pid in self._topmost(self._leads) if self._kin.place(pid) is None]
        rays = [pid for pid, process in self._titled.items() if process.is_rays and self._kin.has(pid)]
        if len(loose) == 1 and rays and all(self._kin.place(pid) is None for pid in rays):
            self._kin.join(loose[0])

    def _head_of(self, pid: int) -> int:
        """Return the topmost process above this one that is of a job: a raylet, or one with a title or command."""
        above = [
            one
            for one in self._kin.ancestors(pid)
            if one in self._titled or one in self._leads or self._kin.is_raylet(one)
        ]
        return above[-1] if above else pid

    def _topmost(self, pids: Iterable[int]) -> list[int]:
        """Return those that none of the others began."""
        among = set(pids)
        return [pid for pid in among if among.isdisjoint(self._kin.ancestors(pid))]

    def _look_at(self, pid: int, titled: dict[int, Titled], leads: dict[int, str]) -> None:
        raw = self._read(pid, "cmdline", 1024)
        known = titled.get(pid)
        if known is not None:
            titled[pid] = Titled(raw, known.parent)
            return
        title = parse_title(raw)
        if title and self._is_its_own(pid, title):
            self._others.discard(pid)
            titled[pid] = Titled(raw, self._parent(pid))
            return
        self._others.add(pid)
        if pid not in leads and _LEADS.match(raw) and _SUBMITS not in raw:
            text = self._read(pid, "cmdline", MAX_COMMAND).rstrip(b"\0 ").replace(b"\0", b" ")
            leads[pid] = redact(text.decode("utf-8", "replace"))

    def _is_its_own(self, pid: int, title: str) -> bool:
        """Say whether no parent has a title of Ray's: a forked child keeps the one that its parent had."""
        if not title.startswith(RAY):
            return True
        for _ in range(_MAX_ANCESTORS):
            parent = self._parent(pid)
            if not parent or parent == 1:
                return True
            if parse_title(self._read(parent, "cmdline", 1024)).startswith(RAY):
                return False
            pid = parent
        return True

    def _parent(self, pid: int) -> int | None:
        stat = parse_stat(self._read(pid, "stat", 1024))
        return None if stat is None else stat.parent

    def _pids(self) -> set[int]:
        return pids_in(self._proc)

    def _read(self, pid: int, what: str, most: int) -> bytes:
        return beginning_of(f"{self._proc}/{pid}/{what}", most)
