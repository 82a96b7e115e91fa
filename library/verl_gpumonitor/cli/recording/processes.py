# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What /proc shows of this host's processes: titles that Ray and engines give them, memory, the command that leads.

Command lines may hold secrets, which are taken out before anything is kept. Titles and commands are told of the job's
own processes alone (`JobProcesses`).
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

from verl_gpumonitor.model.redaction import redact
from verl_gpumonitor.model.trace import HostProcess
from verl_gpumonitor.stages.names import classify
from verl_gpumonitor.stages.sources.job_processes import RAY, JobProcesses, Titled
from verl_gpumonitor.stages.sources.titles import PROC, parse_title
from verl_gpumonitor.stages.tables import Kind

MAX_TITLE: Final = 256
"""Characters of a title that are kept."""
IDLE_SECONDS: Final = 2.5
"""A server of rollouts shows itself idle whenever one of its calls ends: only after so long it is."""
SEVERAL: Final = "Several jobs run on these GPUs: of none of them the command is told."
UNLISTED: Final = (
    "The driver does not list the processes on the GPUs, and several jobs run on this host: whose record this is is not"
    " known, so that commands, stages and marks of none of them are in it."
)


class NewTitle(NamedTuple):
    """A process has this title from now on."""

    pid: int
    title: str
    parent_pid: int | None


class _Told:
    """What was told of a process."""

    __slots__ = ("idle_since", "parent", "said")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.said = ""
        """What was told last."""
        self.idle_since: float | None = None


class Processes(JobProcesses):
    """Scans /proc, and tells what is new. For one thread; nothing raises."""

    def __init__(self, proc: Path = PROC) -> None:
        """`proc`: of the process namespace that is recorded."""
        super().__init__(proc)
        self._titles_told: dict[int, _Told] = {}
        self._several = False
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._shown: dict[int, tuple[bytes, str]] = {}
        self.command: str | None = None
        """Command line of the job's driver, without secrets; None while none was seen, or more than one."""

    @property
    def note(self) -> str | None:
        """Why something is not told that is to be seen."""
        return UNLISTED if self.undecided else SEVERAL if self._several else None

    def titles(self, now: float, *, ray: bool = True) -> list[NewTitle]:
        """Scan, and return the titles that are new since the last call. `ray`: those of Ray's workers, too.

        Where they are wanted no more, what they said last is taken back: they are idle, as far as is told here.
        """
        self.scan(now)
        self._find_command()
        titled = self.titled()
        found = [self._end(pid) for pid in self._titles_told.keys() - titled.keys()]
        found += [self._tell(pid, process, now, ray=ray) for pid, process in titled.items()]
        return [title for title in found if title is not None]

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

    def _find_command(self) -> None:
        """Take the job's command once, while there is only one: who comes later has another record."""
        if self.command is not None or self._several:
            return
        commands = self.leading()
        if len(commands) == 1:
            self.command = commands.pop()
        elif commands:
            self._several = True

    def _tell(self, pid: int, process: Titled, now: float, *, ray: bool) -> NewTitle | None:
        told = self._titles_told.setdefault(pid, _Told(process.parent))
        title = parse_title(process.raw)
        if not title:
            title = _idle(told.said)  # It has ended, and its parent has not heard of it yet.
        elif title.startswith(RAY) and not ray:
            title = _idle(title)
        if _works(title):
            told.idle_since = None
        elif _works(told.said):
            told.idle_since = now if told.idle_since is None else told.idle_since
            if ray and _serves(told.said) and now - told.idle_since < IDLE_SECONDS:
                return None
        elif title.startswith(RAY):
            return None  # From nothing to nothing.
        if title == told.said:
            return None
        told.said = title
        return NewTitle(pid, title[:MAX_TITLE], told.parent)

    def _end(self, pid: int) -> NewTitle | None:
        """Return the last word on a process that is gone: that it does nothing any more."""
        told = self._titles_told.pop(pid)
        return NewTitle(pid, _idle(told.said), told.parent) if _works(told.said) else None

    def _resident_pages(self, pid: int) -> int:
        words = self._read(pid, "statm", 256).split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _works(title: str) -> bool:
    """Say whether a title of Ray's tells of work that matters."""
    said = classify(title) if title.startswith(RAY) else None
    return said is not None and said.kind is not Kind.OTHER


def _serves(title: str) -> bool:
    said = classify(title)
    return said is not None and said.kind is Kind.SERVER


def _idle(title: str) -> str:
    """Return the title that a Ray worker has between two calls: `ray::WorkerDict.x` gives `ray::WorkerDict`."""
    return title.rpartition(".")[0] or title
