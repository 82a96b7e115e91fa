# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What /proc shows of this host's processes: titles that Ray and engines give them, memory, the command that leads.

Command lines may hold secrets, which are taken out before anything is kept. Most processes are nobody's of interest:
these are looked at again seldom, in turns. Titles and commands are told of the job's own processes alone (`Kin`): of
those with a tie to who holds a GPU. Where the driver does not list who does, of the only job that there is; where there
are several, of none.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from verl_gpumonitor.model.redaction import redact
from verl_gpumonitor.model.trace import HostProcess
from verl_gpumonitor.stages.names import classify
from verl_gpumonitor.stages.sources.titles import PROC, parse_stat, parse_title
from verl_gpumonitor.stages.tables import Kind

from .kin import Kin

MAX_TITLE: Final = 256
"""Characters of a title that are kept."""
MAX_COMMAND: Final = 65536
RARE_SCANS: Final = 20
"""A process without a title is looked at again once in so many scans."""
IDLE_SECONDS: Final = 2.5
"""A server of rollouts shows itself idle whenever one of its calls ends: only after so long it is."""
_LEADS: Final = re.compile(rb"[^\0]*python[^/\0]*\0(?:[^\0]*\0)*?(?:verl\.trainer\.|[^\0]*verl/trainer/)")
"""Command line of a verl driver: Python with one of verl's trainers, and not a shell or an editor that names one."""
_SUBMITS: Final = b"\0job\0submit\0"
"""Who submits a job to Ray does not lead it: the driver has the same words in its own command."""
_RAY: Final = "ray::"
SEVERAL: Final = "Several jobs run on these GPUs: of none of them the command is told."
UNLISTED: Final = (
    "The driver does not list the processes on the GPUs, and several jobs run on this host: whose record this is is not"
    " known, so that commands, stages and marks of none of them are in it."
)
_MAX_ANCESTORS: Final = 16


class NewTitle(NamedTuple):
    """A process has this title from now on."""

    pid: int
    title: str
    parent_pid: int | None


class _Titled:
    __slots__ = ("idle_since", "parent", "raw", "said")

    def __init__(self, raw: bytes, parent: int | None) -> None:
        self.raw, self.parent = raw, parent
        self.said = ""
        """What was told last."""
        self.idle_since: float | None = None


class Processes:
    """Scans /proc. For one thread; nothing raises."""

    def __init__(self, proc: Path = PROC) -> None:
        """`proc`: of the process namespace that is recorded."""
        self._proc = proc
        self._kin = Kin(proc)
        self._holders: frozenset[int] | None = None
        self._leads: dict[int, str] = {}
        """Processes that lead a job, anybody's -> command line, without secrets."""
        self._titled: dict[int, _Titled] = {}
        self._others: set[int] = set()
        """Processes without such a title, and those that have only inherited one."""
        self._scans = 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._shown: dict[int, tuple[bytes, str]] = {}
        self.command: str | None = None
        """Command line of the job's driver, without secrets; None while none was seen, or more than one."""
        self.note: str | None = None
        """Why something is not told that is to be seen."""

    def on_gpus(self, holders: frozenset[int] | None) -> None:
        """Say who holds the host's GPUs; None where the driver does not list them."""
        self._holders = holders

    def titles(self, now: float, *, ray: bool = True) -> list[NewTitle]:
        """Return the titles that are new since the last call. `ray`: those of Ray's workers, too.

        Where they are wanted no more, what they said last is taken back: they are idle, as far as is told here.
        """
        self._scans += 1
        pids = self._pids()
        gone = self._titled.keys() - pids
        found = [self._end(pid) for pid in gone]
        for pid in gone:
            del self._titled[pid]
        self._others &= pids
        for pid in self._leads.keys() - pids:
            del self._leads[pid]
        turn = self._scans % RARE_SCANS
        for pid in [pid for pid in pids if pid not in self._others or pid % RARE_SCANS == turn]:
            self._look_at(pid)
        self._learn_kin(pids)
        self._find_command()
        found += [self._tell(pid, process, now, ray=ray) for pid, process in self._titled.items() if self._kin.has(pid)]
        return [title for title in found if title is not None]

    @property
    def sees_ray(self) -> bool:
        """Whether a process of the job has a title of Ray's."""
        return any(_is_rays(process) and self._kin.has(pid) for pid, process in self._titled.items())

    @property
    def sees_nobody(self) -> bool:
        """Whether the driver lists nobody, and no job's process is to be seen: all may be in another container."""
        return not self._holders_seen and not self._titled and not self._leads

    def is_the_jobs(self, pid: int) -> bool:
        """Say whether a process is the job's. `pid`: its number here, or in its own container."""
        if self._kin.has(pid):
            return True
        ours = [one for one in (*self._titled, *self._leads) if self._kin.has(one)]
        return any(self._kin.inner(one) == pid for one in ours)

    def largest(self, count: int) -> list[HostProcess]:
        """Return the processes with most resident memory, the largest first."""
        sizes = [(pages, pid) for pid in self._pids() if (pages := self._resident_pages(pid))]
        sizes.sort(reverse=True)
        return [
            HostProcess(pid=pid, title=self.title_of(pid), rss_bytes=pages * self._page_bytes)
            for pages, pid in sizes[:count]
        ]

    def title_of(self, pid: int) -> str | None:
        """Return a process's title or command line, without secrets; None where it cannot be seen."""
        raw = self._read(pid, "cmdline", 4096)
        known = self._shown.get(pid)
        if known is not None and known[0] == raw:
            return known[1]
        text = raw.rstrip(b"\0 ").replace(b"\0", b" ").decode("utf-8", "replace")
        if not text:
            return None
        if len(self._shown) > 4096:
            self._shown.clear()
        shown = redact(text)[:MAX_TITLE]
        self._shown[pid] = (raw, shown)
        return shown

    @property
    def _holders_seen(self) -> bool:
        """Whether it is known who holds the GPUs: nobody, or somebody of whom a process is to be seen here."""
        return self._holders is not None and (not self._holders or any(map(self._kin.stat, self._holders)))

    def _learn_kin(self, pids: set[int]) -> None:
        self._kin.keep(pids)
        if self._holders_seen:
            self.note = None if self.note == UNLISTED else self.note
            for pid in self._holders or ():
                self._kin.join(pid)
            self._join_driver()
            return
        heads = {self._head_of(pid) for pid in (*self._titled, *self._leads)}
        jobs = {self._kin.place(head) or head for head in heads}
        if len(jobs) == 1 and not any(map(self._kin.has, heads)):
            self._kin.join(heads.pop())
        elif len(jobs) > 1 and not any(map(self._kin.has, heads)):
            self.note = UNLISTED

    def _join_driver(self) -> None:
        """Take the only driver there is, outside of containers, for that of the job's Ray, of which it is no child."""
        loose = [pid for pid in self._topmost(self._leads) if self._kin.place(pid) is None]
        rays = [pid for pid, process in self._titled.items() if _is_rays(process) and self._kin.has(pid)]
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

    def _find_command(self) -> None:
        """Take the job's command once, while there is only one: who comes later has another record."""
        if self.command is not None or self.note == SEVERAL:
            return
        leads = self._topmost(pid for pid in self._leads if self._kin.has(pid))
        commands = {self._leads[pid] for pid in leads}
        if len(commands) == 1:
            self.command = commands.pop()
        elif commands:
            self.note = SEVERAL

    def _look_at(self, pid: int) -> None:
        raw = self._read(pid, "cmdline", 1024)
        process = self._titled.get(pid)
        if process is None:
            title = parse_title(raw)
            if not title or not self._is_its_own(pid, title):
                self._meet_other(pid, raw)
                return
            self._others.discard(pid)
            process = self._titled[pid] = _Titled(raw, self._parent(pid))
        process.raw = raw

    def _tell(self, pid: int, process: _Titled, now: float, *, ray: bool) -> NewTitle | None:
        title = parse_title(process.raw)
        if not title:
            title = _idle(process.said)  # It has ended, and its parent has not heard of it yet.
        elif title.startswith(_RAY) and not ray:
            title = _idle(title)
        if _works(title):
            process.idle_since = None
        elif _works(process.said):
            process.idle_since = now if process.idle_since is None else process.idle_since
            if ray and _serves(process.said) and now - process.idle_since < IDLE_SECONDS:
                return None
        elif title.startswith(_RAY):
            return None  # From nothing to nothing.
        if title == process.said:
            return None
        process.said = title
        return NewTitle(pid, title[:MAX_TITLE], process.parent)

    def _end(self, pid: int) -> NewTitle | None:
        """Return the last word on a process that is gone: that it does nothing any more."""
        process = self._titled[pid]
        return NewTitle(pid, _idle(process.said), process.parent) if _works(process.said) else None

    def _meet_other(self, pid: int, raw: bytes) -> None:
        self._others.add(pid)
        if pid not in self._leads and _LEADS.match(raw) and _SUBMITS not in raw:
            text = self._read(pid, "cmdline", MAX_COMMAND).rstrip(b"\0 ").replace(b"\0", b" ")
            self._leads[pid] = redact(text.decode("utf-8", "replace"))

    def _is_its_own(self, pid: int, title: str) -> bool:
        """Say whether no parent has a title of Ray's: a forked child keeps the one that its parent had."""
        if not title.startswith(_RAY):
            return True
        for _ in range(_MAX_ANCESTORS):
            parent = self._parent(pid)
            if not parent or parent == 1:
                return True
            if parse_title(self._read(parent, "cmdline", 1024)).startswith(_RAY):
                return False
            pid = parent
        return True

    def _parent(self, pid: int) -> int | None:
        stat = parse_stat(self._read(pid, "stat", 1024))
        return None if stat is None else stat.parent

    def _resident_pages(self, pid: int) -> int:
        words = self._read(pid, "statm", 256).split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

    def _pids(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(self._proc) if name.isdecimal()}  # noqa: PTH208 - names alone
        except OSError:
            return set()

    def _read(self, pid: int, what: str, most: int) -> bytes:
        """Return the beginning of a file of a process; empty where the process is gone or hides it."""
        try:
            file = os.open(f"{self._proc}/{pid}/{what}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(file, most)
        except OSError:
            return b""
        finally:
            os.close(file)


def _is_rays(process: _Titled) -> bool:
    return process.raw.startswith(_RAY.encode())


def _works(title: str) -> bool:
    """Say whether a title of Ray's tells of work that matters."""
    said = classify(title) if title.startswith(_RAY) else None
    return said is not None and said.kind is not Kind.OTHER


def _serves(title: str) -> bool:
    said = classify(title)
    return said is not None and said.kind is Kind.SERVER


def _idle(title: str) -> str:
    """Return the title that a Ray worker has between two calls: `ray::WorkerDict.x` gives `ray::WorkerDict`."""
    return title.rpartition(".")[0] or title
