# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The recording of one host: who is asked at each turn, and what lines that makes."""

import importlib.metadata
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from verl_gpumonitor.cli.times import began_note
from verl_gpumonitor.model.samples import NodeSample
from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.model.trace import (
    TRACE_FORMAT,
    Frameworks,
    Header,
    HostLine,
    JobLine,
    MarkLine,
    Record,
    StepLine,
    TaskLine,
    TitleLine,
    TraceGpu,
    TracePod,
    Workload,
)
from verl_gpumonitor.reading.host import shared_memory
from verl_gpumonitor.reading.machine import MachineReader
from verl_gpumonitor.stages.sources.kin import holders_of
from verl_gpumonitor.stages.sources.mark_book import StepSpan
from verl_gpumonitor.stages.sources.marks import MarkReceiver

from .gpus import GpuLines
from .jobs import FollowedJob
from .order import InOrder
from .processes import Processes
from .ray import RayNews, RayWatch
from .spans import Change, Spans

TURN_SECONDS: Final = 0.5
"""Memory is read twice a second, and titles are looked at as often."""
HOST_SECONDS: Final = 10.0
LARGEST: Final = 10
"""Processes of a host line."""
SHM: Final = "/dev/shm"  # noqa: S108 - it is measured, nothing is written
UNCHECKED: Final = "Processes were not looked at: whether Ray and marks tell of the job on these GPUs was not checked."
_encoder: Final = msgspec.json.Encoder()


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asked; None: not."""

    node: Callable[[], NodeSample]
    """As `Sampler.latest`."""
    machine: MachineReader
    processes: Processes | None = None
    ray: RayWatch | None = None
    marks: MarkReceiver | None = None


class Recorder:
    """Turns what the sources say into lines, in order of time. For one thread."""

    def __init__(
        self,
        sources: Sources,
        *,
        interval: float,
        pod: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """The trace begins now. `interval`: seconds between two lines of a GPU. `pod`: name of the host."""
        self._sources = sources
        self._interval = interval
        self._pod = pod or socket.gethostname() or "host"
        self._clock, self._wall = clock, wall
        self._began, self._began_unix = clock(), wall()
        self._gpus = GpuLines(self._pod, began=self._began)
        self._samples_due = self._host_due = self._began
        self._tasks, self._marks, self._steps = Spans(), Spans(), StepEnds()
        self._job = FollowedJob()
        self._order = InOrder()
        self._ray_is_ours = False
        """Whether Ray's servers are those of the job on the GPUs; once they are, they stay."""
        self._entrypoint: str | None = None
        self._noted: list[str] = []
        self.lines = 0
        """Lines that were given out."""
        self._add(JobLine(t=0.0, phase="Running", message="the recording began"))

    @property
    def seconds(self) -> float:
        """Length of the trace up to now."""
        return self._clock() - self._began

    def header(self) -> Header:
        """Return the first line, by what is known now."""
        news = self._news()
        job = self._job.first
        node = self._sources.node()
        machine = self._sources.machine.read()
        gpus = [
            TraceGpu(
                uuid=gpu.uuid,
                index=gpu.index,
                model=gpu.model,
                memory_total_bytes=gpu.memory_total_bytes,
                power_limit_watts=gpu.power_limit_watts,
            )
            for gpu in node.gpus
        ]
        self._entrypoint, self._noted = self._known_entrypoint(), self.notes
        return Header(
            format=TRACE_FORMAT,
            workload=Workload(kind="Host", name=(job and job.submission_id) or self._pod),
            entrypoint=self._entrypoint,
            frameworks=Frameworks(
                verl=(job and job.verl_version) or _installed("verl"),
                ray=(news.ray_version if self._ray_is_ours else None) or _installed("ray"),
                torch=_installed("torch"),
            ),
            pods=[
                TracePod(
                    name=self._pod,
                    node=self._pod,
                    node_role="worker",
                    gpus_requested=len(gpus),
                    memory_limit_bytes=machine.memory_total_bytes,
                    gpus=gpus,
                )
            ],
            notes=[began_note(self._began_unix), *self._noted],
        )

    @property
    def header_is_old(self) -> bool:
        """Whether the job's command is known now that was not when the header was made, or there is more to note."""
        return (self._entrypoint is None and self._known_entrypoint() is not None) or self._noted != self.notes

    @property
    def notes(self) -> list[str]:
        """What is not in the record, and why, and what was not checked."""
        sources = self._sources
        if sources.processes is not None:
            return [] if sources.processes.note is None else [sources.processes.note]
        return [UNCHECKED] if sources.marks is not None or (sources.ray is not None and not sources.ray.named) else []

    def turn(self) -> bytes:
        """Look at everything that is due; return the lines that are ready. To be called twice a second."""
        now = self._clock()
        self._look_at_gpus(now)
        self._look_at_titles(now)
        self._look_at_ray()
        self._look_at_marks()
        if now >= self._host_due:
            self._host_due = now + max(HOST_SECONDS, self._interval)
            self._look_at_host()
        return self._encoded(self._order.due(now - self._began))

    def end(self, message: str) -> bytes:
        """Return the last lines. What becomes of the job is not known, unless Ray has said it."""
        phase = self._job.phase if self._job.phase not in (None, "Pending", "Running") else "Unknown"
        self._add(JobLine(t=self._t(), phase=phase, message=message))
        return self._encoded(self._order.rest())

    def _look_at_gpus(self, now: float) -> None:
        node = self._sources.node()
        if self._sources.processes is not None:
            self._sources.processes.on_gpus(holders_of(node))
        self._extend(self._gpus.events(node, now))
        if now >= self._samples_due:
            self._samples_due = max(self._samples_due + self._interval, now + self._interval / 2)
            self._extend(self._gpus.samples(node, self._title_of))

    def _title_of(self, pid: int) -> str | None:
        return None if self._sources.processes is None else self._sources.processes.title_of(pid)

    def _look_at_titles(self, now: float) -> None:
        if self._sources.processes is None:
            return
        t = self._t()
        by_state = self._ray_is_ours and self._news().by == "state"
        found = self._sources.processes.titles(now, ray=not by_state)
        self._extend(
            TitleLine(t=t, pod=self._pod, pid=new.pid, title=new.title, parent_pid=new.parent_pid) for new in found
        )
        if found and self._sources.ray is not None:
            self._sources.ray.hint()

    def _look_at_ray(self) -> None:
        ray, processes = self._sources.ray, self._sources.processes
        if ray is None:
            return
        ray.agent_wanted = processes is None or not processes.sees_ray
        news = ray.latest()
        self._ray_is_ours = self._ray_is_ours or self._is_ours(ray)
        if not self._ray_is_ours:
            return
        told = news.by == "state" or (news.by == "agent" and ray.agent_wanted)
        for change in self._tasks.look(news.running if told else (), self._wall()):
            interval = change.interval
            self._add(
                TaskLine(
                    t=self._t(change.at),
                    pod=self._pod,
                    pid=interval.pid,
                    local_rank=interval.local_rank,
                    name=interval.stage,
                    state=change.state,
                )
            )
        phase = self._job.look(news.jobs)
        if phase is not None:
            self._add(JobLine(t=self._t(), phase=phase.phase, message=phase.message))

    def _is_ours(self, ray: RayWatch) -> bool:
        """Say whether Ray's servers are the job's: named by the user, or by what the processes show."""
        processes = self._sources.processes
        return ray.named or processes is None or processes.has_ray(ray.latest().jobs)

    def _look_at_marks(self) -> None:
        marks = self._sources.marks
        if marks is None:
            return
        now = self._wall()
        intervals = [interval for word in marks.words(now) for interval in word.intervals]
        self._extend(self._mark(change) for change in self._marks.look(intervals, now))
        self._extend(StepLine(t=self._t(span.end), step=span.step) for span in self._steps.look(marks.steps(now)))

    def _mark(self, change: Change) -> MarkLine:
        interval: StageInterval = change.interval
        return MarkLine(
            t=self._t(change.at),
            pod=self._pod,
            rank=interval.local_rank,
            stage=interval.stage,
            role=interval.role,
            state=change.state,
            step=interval.step,
        )

    def _look_at_host(self) -> None:
        machine, shm = self._sources.machine.read(), shared_memory(SHM)
        processes = self._sources.processes
        self._add(
            HostLine(
                t=self._t(),
                pod=self._pod,
                memory_used_bytes=machine.memory_used_bytes,
                memory_limit_bytes=machine.memory_total_bytes,
                shm_used_bytes=None if shm is None else shm.used_bytes,
                shm_size_bytes=None if shm is None else shm.size_bytes,
                processes=None if processes is None else processes.largest(LARGEST),
            )
        )

    def _known_entrypoint(self) -> str | None:
        job, processes = self._job.first, self._sources.processes
        if job is not None and job.entrypoint:
            return job.entrypoint
        return None if processes is None else processes.command

    def _news(self) -> RayNews:
        return RayNews() if self._sources.ray is None else self._sources.ray.latest()

    def _t(self, unix: float | None = None) -> float:
        """Return a Unix time, or now, in the trace's own time: never before its begin, and not ahead."""
        now = self.seconds
        t = now if unix is None else now - (self._wall() - unix)
        return round(min(now, max(0.0, t)), 3)

    def _extend(self, records: Iterable[Record]) -> None:
        for record in records:
            self._add(record)

    def _add(self, record: Record) -> None:
        self._order.add(record)

    def _encoded(self, records: list[Record]) -> bytes:
        self.lines += len(records)
        return b"".join(encoded(record) for record in records)


class StepEnds:
    """Tells each step's end once."""

    def __init__(self) -> None:
        self._newest = float("-inf")

    def look(self, spans: Iterable[StepSpan]) -> list[StepSpan]:
        """Return the steps that have ended since the last call, by their end."""
        new = [span for span in spans if span.end is not None and span.end > self._newest]
        new.sort(key=lambda span: span.end or 0.0)
        if new:
            self._newest = new[-1].end or self._newest
        return new


def encoded(line: Header | Record) -> bytes:
    """Return a line as it is written."""
    return _encoder.encode(line) + b"\n"


def _installed(package: str) -> str | None:
    """Return the version of a package beside us: where the job runs in the same environment, it is the job's."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
