# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What runs in this pod, by the titles that Ray gives its processes, where the pod shares its process namespace.

`/proc/<pid>/cmdline` of a worker reads `ray::WorkerDict.actor_rollout_ref_update_actor` while that runs. Two traps:
- A forked child keeps the title that its parent had at the time, for ever. Only what descends from the raylet without
  another such title between counts.
- A rollout server answers many calls at once, and its title falls back to idle whenever one of them ends. What tells
  the rollout is the CPU that the server and vLLM's engine core take: next to none while they wait. (Their workers and
  SGLang's schedulers tell nothing: they spin while they wait.)

A pod may have hundreds of processes, of which a few dozen matter: what has long not been Ray's is seldom looked at.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from verl_gpumonitor.model.stages import StageSource, StageWord
from verl_gpumonitor.stages.book import Book, Manner, Running
from verl_gpumonitor.stages.names import Classified, classify
from verl_gpumonitor.stages.sources.proc_files import MAX_BYTES, ProcFiles
from verl_gpumonitor.stages.tables import ENGINE_TITLES, Kind

PROC: Final = Path("/proc")
MANNER: Final = Manner(gap_seconds=5.0)
MAX_PROCESSES: Final = 8192
LIST_SCANS: Final = 3
"""New processes are looked for at each third scan: listing a pod's processes takes the kernel longer than reading the
titles that matter, and a worker takes longer than that to start."""
LIST_ANYWAY_SCANS: Final = 15
"""They are listed so often at least, where none seems to be new: some systems make up the number given last."""
SETTLED_SCANS: Final = 30
"""A process that is none of Ray's after so many scans will hardly become one."""
RARE_SCANS: Final = 30
"""Such a process is looked at so seldom, for its number may be given to another."""
SERVER_BUSY_SHARE: Final = 0.1
CORE_BUSY_SHARE: Final = 0.2
"""Shares of a CPU from which on a rollout server and an engine core are busy."""

_RAYLET: Final = "raylet"
_ENGINE_CORE: Final = "VLLM::EngineCore"
_TITLES: Final = ("ray::", *ENGINE_TITLES)
_MAX_ANCESTORS: Final = 16


class ProcessStat(msgspec.Struct, frozen=True):
    """What `/proc/<pid>/stat` says, as far as it matters."""

    name: str
    """Of the program; at most 15 characters."""
    parent: int
    cpu_ticks: int
    started: int
    """In ticks since the machine's boot: with the pid, it is the process's identity."""


class _Process(msgspec.Struct):
    stat: ProcessStat
    cmdline: bytes = b""
    title: str = ""
    """Empty for what is none of Ray's or an engine's."""
    busy_from: float | None = None
    """Share of a CPU from which on it generates; None where its CPU tells nothing."""
    unknown_scans: int = 0
    """How often it was looked at and was none of them."""
    cpu_at: float = 0.0
    busy: float = 0.0
    """Share of a CPU since the scan before."""


def parse_stat(text: bytes) -> ProcessStat | None:
    """Return what matters of a line of `/proc/<pid>/stat`; None where it is none. The name may hold anything."""
    head, closing, rest = text.rpartition(b")")
    fields = rest.split()
    try:
        numbers = [int(field) for field in (fields[1], fields[11], fields[12], fields[19])]
    except (IndexError, ValueError):
        return None
    if not closing:
        return None
    parent, user, system, started = numbers
    name = head.partition(b"(")[2].decode("utf-8", "replace")
    return ProcessStat(name=name, parent=parent, cpu_ticks=user + system, started=started)


def parse_title(cmdline: bytes) -> str:
    """Return the title that a command line is, without its padding; empty for any other command line."""
    title = cmdline[:MAX_BYTES].rstrip(b"\0 ").partition(b"\0")[0].decode("utf-8", "replace")
    return title if title.startswith(_TITLES) else ""


class Titles:
    """Scans /proc, and turns scans into the word on this pod."""

    def __init__(
        self, proc: Path = PROC, *, ticks_per_second: int | None = None, wanted: Callable[[int], bool] | None = None
    ) -> None:
        """`proc`: of the pod's process namespace. `ticks_per_second`: None asks the system.

        `wanted`: says whether a process, by its pid, is one of those whose titles count; None: all.
        """
        self._wanted = wanted
        self._files = ProcFiles(proc)
        self._ticks = ticks_per_second or os.sysconf("SC_CLK_TCK")
        self._processes: dict[int, _Process] = {}
        self._settled: set[int] = set()
        """Those that are none of ours."""
        self._watched: list[int] = []
        """All others."""
        self._raylet = False
        self._newest_pid = b""
        self._listed_at = -LIST_ANYWAY_SCANS
        self._scans = 0
        self._book = Book(MANNER)

    def observe(self, at: float) -> bool:
        """Scan now, at Unix time `at`; says whether anything began or ended. Never raises.

        While no process of Ray is to be seen, the namespace not being shared, nothing is vouched for.
        """
        self._scan(at)
        titled = [pid for pid in self._watched if self._processes[pid].title]
        ours = [pid for pid in titled if self._is_live(pid, raylet=self._raylet)]
        if self._wanted is not None:
            ours = [pid for pid in ours if self._wanted(pid)]
        if not any(self._processes[pid].title.startswith("ray::") for pid in ours):
            self._book.interrupt()
            return False
        return self._book.look(at, self._running(ours))

    def word(self, now_unix: float) -> StageWord:
        """Return what ran in the pod; intervals of workers carry their pid, and none tells a rank."""
        return self._book.word(StageSource.TITLES, now_unix)

    def _running(self, pids: list[int]) -> list[Running]:
        things = []
        for pid in pids:
            process = self._processes[pid]
            said = classify(process.title)
            if said is not None and said.tells_pod:
                things.append(_thing(pid, said, process.title))
        # An engine that starts is busy too: it loads weights, and records its graphs.
        starts = any(thing.stage == "init" for thing in things)
        if not starts and any(_generates(self._processes[pid]) for pid in pids):
            things.append(Running(key="gen", stage="gen", role="rollout"))
        return things

    def _is_live(self, pid: int, *, raylet: bool) -> bool:
        """Say whether a title is its process's own, and not one that a parent of it had.

        `raylet`: whether one is to be seen; without it, whoever has no such parent is taken for Ray's.
        """
        process = self._processes[pid]
        if not process.title.startswith("ray::"):
            return True
        for _ in range(_MAX_ANCESTORS):
            parent = self._processes.get(process.stat.parent)
            if parent is None:
                return not raylet
            if parent.stat.name == _RAYLET or parent.title:
                return not parent.title
            process = parent
        return not raylet

    def _scan(self, at: float) -> None:
        turn = self._scans % RARE_SCANS
        for pid in self._watched:
            self._look_at(pid, at, rare=pid % RARE_SCANS == turn)
        if self._scans % LIST_SCANS == 0:
            if self._may_have_news():
                self._list(at)
            self._look_at_settled(at)
        self._watched = [pid for pid in self._processes if pid not in self._settled]
        self._scans += 1

    def _may_have_news(self) -> bool:
        """Say whether a process may have begun since the last list."""
        newest = self._files.newest_pid()
        same = bool(newest) and newest == self._newest_pid
        self._newest_pid = newest
        return not same or self._scans - self._listed_at >= LIST_ANYWAY_SCANS

    def _list(self, at: float) -> None:
        """See who is new and who is gone."""
        self._listed_at = self._scans
        pids = self._files.pids()
        for pid in self._processes.keys() - pids:
            self._drop(pid)
        for pid in pids - self._processes.keys():
            if len(self._processes) < MAX_PROCESSES:
                self._meet(pid, at)
        self._raylet = any(process.stat.name == _RAYLET for process in self._processes.values())

    def _look_at_settled(self, at: float) -> None:
        """Look again at some of those that are none of ours."""
        turns = RARE_SCANS // LIST_SCANS
        turn = self._scans // LIST_SCANS % turns
        for pid in [pid for pid in self._settled if pid % turns == turn]:
            self._look_at(pid, at, rare=True)

    def _look_at(self, pid: int, at: float, *, rare: bool) -> None:
        process = self._processes[pid]
        if (rare or process.stat.parent not in self._processes) and not self._is_same(pid, process):
            self._meet(pid, at)
            return
        self._read_title(pid, process, at)

    def _meet(self, pid: int, at: float) -> None:
        self._drop(pid)
        stat = self._stat(pid)
        if stat is not None:
            process = self._processes[pid] = _Process(stat, cpu_at=at)
            self._read_title(pid, process, at)

    def _drop(self, pid: int) -> None:
        self._processes.pop(pid, None)
        self._settled.discard(pid)
        self._files.forget(pid)

    def _is_same(self, pid: int, process: _Process) -> bool:
        """Read anew whose child it is; says whether it is the same process still."""
        stat = self._stat(pid)
        if stat is None or stat.started != process.stat.started:
            return False
        process.stat = msgspec.structs.replace(stat, cpu_ticks=process.stat.cpu_ticks)
        return True

    def _read_title(self, pid: int, process: _Process, at: float) -> None:
        cmdline = self._files.command_line(pid, keep=bool(process.title))
        if cmdline is None:  # It is gone, and its number may be another's.
            self._meet(pid, at)
            return
        if not cmdline and process.cmdline and self._stat(pid) is None:
            self._drop(pid)
            return
        if cmdline != process.cmdline:
            process.cmdline, process.title = cmdline, parse_title(cmdline)
            process.busy_from = _busy_from(process.title)
        if process.title:
            self._settled.discard(pid)
        else:
            self._files.forget(pid)
            process.unknown_scans += 1
            if process.unknown_scans >= SETTLED_SCANS:
                self._settled.add(pid)
        if process.busy_from is not None:
            self._read_cpu(pid, process, at)

    def _read_cpu(self, pid: int, process: _Process, at: float) -> None:
        stat = self._stat(pid)
        seconds = at - process.cpu_at
        if stat is not None and seconds > 0:
            process.busy = (stat.cpu_ticks - process.stat.cpu_ticks) / self._ticks / seconds
            process.stat = stat
            process.cpu_at = at

    def _stat(self, pid: int) -> ProcessStat | None:
        return parse_stat(self._files.stat(pid))


def _thing(pid: int, said: Classified, title: str) -> Running:
    if said.kind is Kind.WORKER:
        return Running(key=f"{pid}/{title}", stage=said.stage, role=said.role, pid=pid, lane=str(pid))
    return Running(key=said.stage, stage=said.stage, role=said.role)


def _busy_from(title: str) -> float | None:
    """Return the share of a CPU from which on a process generates; None for one whose CPU tells nothing."""
    if title.startswith(_ENGINE_CORE):
        return CORE_BUSY_SHARE
    if not title.startswith("ray::"):
        return None
    said = classify(f"{title}.generate") if classify(title) is None else classify(title)
    return SERVER_BUSY_SHARE if said is not None and said.kind is Kind.SERVER else None


def _generates(process: _Process) -> bool:
    return process.busy_from is not None and process.busy >= process.busy_from
