# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Training steps of one pod in which several Ray jobs may work, at once or one after another. Pure.

Each job has a cycle of its own: its steps are recognised as if it were alone, and one that does nothing rests. Steps
of all jobs share one row of numbers, by which the controller tells them apart.
"""

from collections import deque
from typing import Final

import msgspec

from verl_gpumonitor.model.vocabulary import UNKNOWN

from .stages import Settled
from .steps import MAX_KEPT, Step, Steps
from .words import OTHER, Part

MAX_JOBS: Final = 8
"""Jobs whose steps are followed; of more, the one that has rested longest is let go."""


class JobSteps:
    """Makes steps of what the timeline settles, for each job apart."""

    def __init__(self) -> None:
        self._jobs: dict[str, Steps] = {}
        """The one that worked last comes last."""
        self._kept: deque[Step] = deque(maxlen=MAX_KEPT)
        self._numbered = 0
        self._ended_before = 0
        """Steps of jobs that were let go."""
        self._newest: str | None = None

    @property
    def ended(self) -> int:
        """Whole steps that ended, those included whose last samples are still to come."""
        return self._ended_before + sum(steps.ended for steps in self._jobs.values())

    def running(self, job: str | None = None) -> int | None:
        """Return the number of a job's step, as `Steps.running`; None: of the job that worked last."""
        name = self._newest if job is None else job
        return self._jobs[name].running if name is not None and name in self._jobs else None

    @property
    def kept(self) -> tuple[Step, ...]:
        """Closed steps that were not forgotten yet, oldest first."""
        return tuple(self._kept)

    def forget(self, number: int) -> None:
        """Let go of the steps up to this one: they arrived."""
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()

    def take(self, settled: Settled) -> None:
        """Take in what the timeline has counted."""
        for job in settled.jobs:
            steps = self._jobs.pop(job, None)
            self._jobs[job] = Steps(known_before=self._newest is not None) if steps is None else steps
            self._newest = job
        while len(self._jobs) > MAX_JOBS:
            self._let_go(next(iter(self._jobs)))
        for job, steps in self._jobs.items():
            steps.take(_of_job(settled, job))
        self._collect()

    def finish(self) -> None:
        """Close what is open, at the end of the pod."""
        for steps in self._jobs.values():
            steps.finish()
        self._collect()

    def _let_go(self, job: str) -> None:
        steps = self._jobs[job]
        steps.finish()
        self._collect()
        self._ended_before += steps.ended
        del self._jobs[job]

    def _collect(self) -> None:
        """Number the steps that were closed, in the order in which they ended."""
        closed = [(step.end, job, step) for job, steps in self._jobs.items() for step in steps.kept]
        for _, job, step in sorted(closed, key=lambda item: item[0]):
            self._numbered += 1
            self._kept.append(msgspec.structs.replace(step, number=self._numbered, job=step.job or job))
            self._jobs[job].forget(step.number)


def _of_job(settled: Settled, job: str) -> Settled:
    """Return what a job sees of it: its own work, and rest in the time of others'."""
    lane = settled.lanes.get(job)
    if lane is not None:
        return Settled(until=settled.until, pod=lane.pod, shares=lane.shares)
    if not settled.jobs or settled.jobs == (job,):
        return settled
    idle = tuple(Part(part.begin, part.end, OTHER, UNKNOWN) for part in settled.pod)
    return Settled(until=settled.until, pod=idle)
