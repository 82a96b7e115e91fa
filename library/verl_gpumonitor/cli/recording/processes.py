# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What /proc shows of this host's processes: titles that Ray and engines give them, memory, the command that leads.

Command lines may hold secrets, which are taken out before anything is kept. Most processes are nobody's of interest:
these are looked at again seldom, in turns.
"""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from verl_gpumonitor.model.redaction import redact
from verl_gpumonitor.model.trace import HostProcess
from verl_gpumonitor.stages.names import classify
from verl_gpumonitor.stages.sources.titles import PROC, parse_stat, parse_title
from verl_gpumonitor.stages.tables import Kind

MAX_TITLE: Final = 256
"""Characters of a title that are kept."""
MAX_COMMAND: Final = 65536
RARE_SCANS: Final = 20
"""A process without a title is looked at again once in so many scans."""
IDLE_SECONDS: Final = 2.5
"""A server of rollouts shows itself idle whenever one of its calls ends: only after so long it is."""
_LEADS: Final = re.compile(rb"[^\0]*python[^/\0]*\0(?:[^\0]*\0)*?(?:verl\.trainer\.|[^\0]*verl/trainer/)")
"""Command line of a verl driver: Python with one of verl's trainers, and not a shell or an editor that names one."""
_RAY: Final = "ray::"
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
        self._titled: dict[int, _Titled] = {}
        self._others: set[int] = set()
        """Processes without such a title, and those that have only inherited one."""
        self._scans = 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._shown: dict[int, tuple[bytes, str]] = {}
        self.command: str | None = None
        """Command line of verl's driver, without secrets; None while none was seen."""

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
        turn = self._scans % RARE_SCANS
        due = (pid for pid in pids if pid not in self._others or pid % RARE_SCANS == turn)
        found += [self._look_at(pid, now, ray=ray) for pid in due]
        return [title for title in found if title is not None]

    @property
    def sees_ray(self) -> bool:
        """Whether any process has a title of Ray's."""
        return any(process.raw.startswith(_RAY.encode()) for process in self._titled.values())

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

    def _look_at(self, pid: int, now: float, *, ray: bool) -> NewTitle | None:
        raw = self._read(pid, "cmdline", 1024)
        process = self._titled.get(pid)
        if process is None:
            title = parse_title(raw)
            if not title or not self._is_its_own(pid, title):
                self._meet_other(pid, raw)
                return None
            self._others.discard(pid)
            process = self._titled[pid] = _Titled(raw, self._parent(pid))
        process.raw = raw
        return self._tell(pid, process, parse_title(raw), now, ray=ray)

    def _tell(self, pid: int, process: _Titled, title: str, now: float, *, ray: bool) -> NewTitle | None:
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
        if self.command is None and _LEADS.match(raw):
            text = self._read(pid, "cmdline", MAX_COMMAND).rstrip(b"\0 ").replace(b"\0", b" ")
            self.command = redact(text.decode("utf-8", "replace"))

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
