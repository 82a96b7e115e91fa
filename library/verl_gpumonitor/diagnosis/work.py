# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who works now in a pod, from tasks, titles and marks as they come; and so which stage each of its GPUs is in. Pure.

Lines may be lost: a begin of a worker ends what the same process did before, because a worker does one thing at a
time, and what has not ended for a whole step is dropped.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.model.trace import MarkLine, TaskLine, TitleLine
from verl_gpumonitor.model.vocabulary import UNKNOWN
from verl_gpumonitor.stages.choice import choose
from verl_gpumonitor.stages.names import Classified, classify
from verl_gpumonitor.stages.releases import SLEEP
from verl_gpumonitor.stages.tables import Kind

OTHER: Final = "other"
GEN: Final = "gen"
_COUNTS: Final = frozenset({Kind.WORKER, Kind.SERVER, Kind.HELPER})
_MANY_AT_ONCE: Final = frozenset({Kind.SERVER, Kind.HELPER})
_WAKES: Final = frozenset({"wake_up", "generate", "chat_completion", "resume_generation", "resume_engine_generation"})
MAX_RUNNING: Final = 4096
"""Things that run in one pod at a time; past it a trace is not plausible and new ones are not taken."""


class Worker(NamedTuple):
    """One of a job's workers: by its process, as tasks and titles tell it, or by its rank, as marks do."""

    pid: int | None = None
    rank: int | None = None


class Running:
    """One name that runs in one process, so many times at once."""

    __slots__ = ("begin", "count", "interval", "kind", "local_rank", "name", "pid", "said")

    def __init__(self, name: str, said: Classified, *, begin: float, pid: int | None, local_rank: int | None) -> None:
        self.name, self.said, self.kind, self.pid, self.local_rank = name, said, said.kind, pid, local_rank
        self.begin = begin
        self.count = 1
        self.interval = StageInterval(stage=said.stage, role=said.role, begin=begin, pid=pid, local_rank=local_rank)


class PodWork:
    """What runs in one pod."""

    def __init__(self) -> None:
        self.running: dict[tuple[object, ...], Running] = {}
        self.marks: dict[int | None, list[StageInterval]] = {}
        self.seen = False
        """Whether anybody ever told what runs here."""
        self.workers_seen = False
        self.servers_seen = False
        self.servers_asleep = False
        """Whether its engines were put to sleep, and were not seen to wake or to generate since."""
        self.first_seen: float | None = None
        """When a process of the job was first seen here."""
        self.first_began = False
        """Whether that first word was the begin of something, and not a thing that ran already."""
        self.last_change: float | None = None
        """When a worker last began or ended something, or a server ended something: a request that begins is no
        progress."""
        self.ranks: dict[int, int] = {}
        """Process -> local rank, as tasks say it."""
        self.marking: frozenset[int] = frozenset()
        """Ranks that were ever heard to mark."""
        self.times: dict[tuple[str, Worker], float] = {}
        """Stage and worker -> seconds that it took for it in this step."""
        self.homes: dict[int, str] = {}
        """Process -> the GPU on which it holds most."""

    def task(self, line: TaskLine) -> bool:
        """Take a begin or an end. Returns whether the stage of the pod's GPUs may be another now."""
        said = classify(line.name)
        if said is None:
            return False
        if line.pid is not None and line.local_rank is not None:
            self.ranks[line.pid] = line.local_rank
        key = (line.pid, line.name)
        if line.state == "begin":
            return self._begin(key, line.name, said, t=line.t, pid=line.pid, local_rank=line.local_rank)
        if line.state == "end":
            return self._end(key, line.t)
        return False

    def title(self, line: TitleLine) -> bool:
        """Take a process's present title: it ends the one before."""
        self._touch(line.t, began=True)
        key = (line.pid, "title")
        said = classify(line.title)
        before = self.running.get(key)
        if said is None or said.kind not in _COUNTS:
            return self._end(key, line.t, all_of_it=True)
        if before is not None and before.name == line.title:
            return False
        if before is not None:
            self._end(key, line.t, all_of_it=True)
        rank = self.ranks.get(line.pid)
        return self._begin(key, line.title, said, t=line.t, pid=line.pid, local_rank=rank)

    def mark(self, line: MarkLine) -> bool:
        """Take a mark of the program."""
        self._touch(line.t, began=line.state == "begin")
        self.last_change = line.t
        marks = self.marks.setdefault(line.rank, [])
        if line.rank is not None:
            self.marking |= {line.rank}
            for ended in (m for m in marks if m.stage == line.stage and line.state == "end"):
                self._took(line.stage, Worker(rank=line.rank), line.t - ended.begin)
        marks[:] = [m for m in marks if m.stage != line.stage]
        if line.state == "begin" and len(marks) < MAX_RUNNING:
            interval = StageInterval(
                stage=line.stage, role=line.role or UNKNOWN, begin=line.t, local_rank=line.rank, step=line.step
            )
            marks.append(interval)
        return True

    def drop_older(self, than: float) -> bool:
        """Forget what began before: its end was lost. Returns whether anything went."""
        old = [key for key, running in self.running.items() if running.begin < than]
        for key in old:
            del self.running[key]
        for marks in self.marks.values():
            marks[:] = [m for m in marks if m.begin >= than]
        return bool(old)

    def clear(self) -> None:
        """Forget all that runs: the container began anew."""
        self.running.clear()
        self.marks.clear()
        self.marking = frozenset()
        self.first_seen = None
        self.servers_asleep = False

    def stage(self, gpu: str, *, rank: int | None = None) -> StageInterval | None:
        """Return what runs for one GPU of the pod: a process known to be at home on another one does not count.

        `rank`: whose GPU it is, if that is known. Marks of other ranks do not count then; the driver's, which have no
        rank, do.
        """
        if any(self.marks.values()):
            heard = [marks for one, marks in self.marks.items() if rank is None or one in (None, rank)]
            return choose((mark for marks in heard for mark in marks), nested=True)
        return choose(
            r.interval
            for r in self.running.values()
            if r.kind is not Kind.HELPER and (r.pid is None or self.homes.get(r.pid, gpu) == gpu)
        )

    def workers(self, stage: str) -> Iterable[Running]:
        """Return the workers that are in a stage now."""
        return [r for r in self.running.values() if r.kind is Kind.WORKER and r.said.stage == stage]

    def generating(self, kind: Kind) -> bool:
        """Say whether a server, or a helper, is generating here."""
        return any(r.kind is kind and r.said.stage == GEN for r in self.running.values())

    def listed(self, t: float, *, began: bool) -> None:
        """A process was listed on a GPU, in a workload that tells nothing else."""
        if self.first_seen is None:
            self.first_seen, self.first_began = t, began

    def _touch(self, t: float, *, began: bool) -> None:
        self.seen = True
        if self.first_seen is None:
            self.first_seen, self.first_began = t, began

    def _begin(
        self,
        key: tuple[object, ...],
        name: str,
        said: Classified,
        *,
        t: float,
        pid: int | None,
        local_rank: int | None,
    ) -> bool:
        if said.kind not in _COUNTS:
            return False
        self._touch(t, began=True)
        self.workers_seen |= said.kind is Kind.WORKER
        self.servers_seen |= said.kind is Kind.SERVER
        if said.kind is Kind.SERVER:
            self._told_by_server(name)
        if said.kind is Kind.WORKER:
            self.last_change = t
        known = self.running.get(key)
        if known is not None and said.kind in _MANY_AT_ONCE:
            known.count += 1
            return False
        if said.kind is Kind.WORKER and pid is not None:
            for other in [k for k, r in self.running.items() if r.pid == pid and r.kind is Kind.WORKER and k != key]:
                del self.running[other]
        if len(self.running) < MAX_RUNNING:
            self.running[key] = Running(name, said, begin=t, pid=pid, local_rank=local_rank)
        return True

    def _told_by_server(self, name: str) -> None:
        method = name.removesuffix("()").rpartition(".")[2]
        if method == SLEEP:
            self.servers_asleep = True
        elif method in _WAKES:
            self.servers_asleep = False

    def _end(self, key: tuple[object, ...], t: float, *, all_of_it: bool = False) -> bool:
        known = self.running.get(key)
        if known is None:
            return False
        if known.kind is not Kind.HELPER:
            self.last_change = t
        known.count -= 1
        if known.count > 0 and not all_of_it:
            return False
        del self.running[key]
        if known.kind is Kind.WORKER and known.pid is not None:
            self._took(known.said.stage, Worker(pid=known.pid), t - known.begin)
        return True

    def _took(self, stage: str, worker: Worker, seconds: float) -> None:
        self.times[stage, worker] = self.times.get((stage, worker), 0.0) + seconds
