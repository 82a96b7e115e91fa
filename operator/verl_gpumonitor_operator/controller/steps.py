# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Training steps as pods have seen them, and what they say together of their job. Pure.

A pod tells each step once it is whole. It may tell it twice, where an answer was lost: it is known by the sidecar's
start and its number therein. How many steps there were is a counter of the sidecar (`ledger`); here are the newest
steps, of which the seconds are shown, and verl's own numbers, where a source says them.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from sys import intern
from typing import Final, NamedTuple

from verl_gpumonitor.model.report import Report, StepReport
from verl_gpumonitor.model.stages import StageSource

MAX_RECENT: Final = 8
"""Steps of one pod over which means are taken."""
MAX_JOBS: Final = 8
"""Ray jobs of one pod whose steps are counted apart, the newest."""

Pair = tuple[str, str]
"""Stage and role."""


class StepSeen(NamedTuple):
    """One whole step of one pod."""

    job: str
    """Ray's submission id; empty where the source does not tell jobs apart."""
    seconds: float
    stages: Mapping[Pair, float]
    """Wall time of each stage."""

    @classmethod
    def of(cls, step: StepReport) -> "StepSeen":
        """Keep what is shown of a step."""
        stages: dict[Pair, float] = {}
        for item in step.stages:
            pair = (intern(item.stage), intern(item.role))
            stages[pair] = stages.get(pair, 0.0) + item.seconds
        return cls(step.job, max(0.0, step.end - step.begin), stages)


@dataclass(kw_only=True, slots=True)
class PodSteps:
    """The steps of one pod."""

    start_id: str = ""
    last_number: int = 0
    """Number of the newest step of this start of the sidecar."""
    recent: deque[StepSeen] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """Oldest first."""
    counted: dict[str, int] = field(default_factory=dict)
    """Ray job -> steps that were told, the newest `MAX_JOBS`; for pods that several jobs share."""
    highest: dict[str, int] = field(default_factory=dict)
    """Ray job -> verl's own number of its newest step, where a source says it."""

    def take(self, report: Report) -> None:
        """Take the steps of a report that was counted, and the number of the one that runs."""
        if report.start_id != self.start_id:
            self.start_id, self.last_number = report.start_id, 0
        for step in report.steps:
            if step.number > self.last_number:
                self.last_number = step.number
                self.recent.append(StepSeen.of(step))
                _put(self.counted, step.job, self.counted.get(step.job, 0) + 1)
                self._number(step.job, step.step)
        if report.stage is not None and report.stage_quality.source is StageSource.MARKS:
            # Of other sources it is the sidecar's own count, of the step that runs.
            self._number(report.stage.job, report.stage.step)

    def _number(self, job: str, step: int | None) -> None:
        if step is not None:
            _put(self.highest, job, max(step, self.highest.get(job, 0)))


def _put(numbers: dict[str, int], job: str, value: int) -> None:
    """Set a job's number, and let the job go that was met first where there are too many."""
    numbers[intern(job)] = value
    if len(numbers) > MAX_JOBS:
        del numbers[next(iter(numbers))]


class PoolSteps(NamedTuple):
    """Pods that do the same work, with what each has seen."""

    counted: Sequence[int]
    """Whole steps of each pod."""
    recent: Sequence[Sequence[StepSeen]]
    """Newest steps of each pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How far a job has come, and how fast it goes."""

    cycles: int = 0
    """Whole cycles of its stages."""
    seconds_per_step: float | None = None
    """Mean over the newest steps; None while no whole step was seen."""
    stages: Mapping[Pair, float] = field(default_factory=dict)
    """Seconds of each stage in a mean step; one that not each step has counts for those that have none."""


def pace_of(pools: Iterable[PoolSteps]) -> Pace:
    """Put the pods' steps together.

    Of a pool counts what at least half of its pods have seen; of the pools, the one that has seen most: where rollout
    has GPUs of its own, only the trainer's pods go through whole steps.
    """
    found = list(pools)
    cycles = max((median_low(pool.counted) for pool in found if pool.counted), default=0)
    steps = [step for pool in found for pod in pool.recent for step in pod]
    if not steps:
        return Pace(cycles=cycles)
    sums: dict[Pair, float] = {}
    for step in steps:
        for pair, seconds in step.stages.items():
            sums[pair] = sums.get(pair, 0.0) + seconds
    return Pace(
        cycles=cycles,
        seconds_per_step=sum(step.seconds for step in steps) / len(steps),
        stages={pair: seconds / len(steps) for pair, seconds in sums.items()},
    )
