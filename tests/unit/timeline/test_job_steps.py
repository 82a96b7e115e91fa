# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Steps and seconds of Ray jobs that share a pod, at once and one after another."""

import pytest

from verl_gpumonitor.model.samples import GpuCounters
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.timeline.job_steps import JobSteps
from verl_gpumonitor.timeline.stages import StageTimeline
from verl_gpumonitor.timeline.words import Voice

CYCLE = (("gen", 4.0), ("old_log_prob", 2.0), ("update_actor", 3.0), ("update_weights", 1.0))


def cycles(job: str, begin: float, steps: int, *, rest: float = 0.0) -> list[StageInterval]:
    """Intervals of so many steps of a job."""
    found, at = [], begin
    for _ in range(steps):
        for stage, seconds in CYCLE:
            found.append(StageInterval(stage=stage, role="actor", begin=at, end=at + seconds, job=job))
            at += seconds
        at += rest
    return found


def play(intervals: list[StageInterval], *, until: float) -> tuple[StageTimeline, JobSteps]:
    """Go through the time a second at a time; the source speaks each 5 s."""
    timeline, steps = StageTimeline(), JobSteps()
    for now in range(1, int(until) + 1):
        timeline.elapse(now, 1.0)
        counters = GpuCounters(observed_seconds=float(now), busy_seconds=now / 2, energy_joules=100.0 * now)
        timeline.observe("GPU-0", counters, at=now)
        told = now // 5 * 5.0
        seen = tuple(sorted((each for each in intervals if each.begin < told), key=lambda each: each.begin))
        word = StageWord(source=StageSource.RAY_STATE, known_from=0.0, known_until=told, intervals=seen)
        steps.take(timeline.settle([Voice(word)], now=now))
    return timeline, steps


def by_job(steps: JobSteps) -> dict[str, int]:
    found: dict[str, int] = {}
    for step in steps.kept:
        found[step.job] = found.get(step.job, 0) + 1
    return found


@pytest.mark.parametrize("behind", [0.0, 0.3, 5.0, 12.0])
def test_each_job_has_its_own_steps(behind: float) -> None:
    both = cycles("one", 2.0, 3) + cycles("two", 2.0 + behind, 5)
    _, steps = play(both, until=110.0)
    assert by_job(steps) == {"one": 3, "two": 5}
    assert steps.ended == 8
    assert [step.number for step in steps.kept] == list(range(1, 9))
    for step in steps.kept:
        assert {each.stage: round(each.seconds, 6) for each in step.stages if each.stage != "other"} == dict(CYCLE)


def test_one_after_the_other() -> None:
    _, steps = play(cycles("one", 2.0, 2) + cycles("two", 30.0, 2), until=100.0)
    assert by_job(steps) == {"one": 2, "two": 2}


def test_a_job_that_breaks_off_before_its_update_has_no_further_step() -> None:
    _, steps = play(cycles("one", 2.0, 3)[:-2] + cycles("two", 2.0, 3), until=100.0)
    assert by_job(steps) == {"one": 2, "two": 3}


def test_time_is_shared_out_and_none_is_lost() -> None:
    timeline, _ = play(cycles("one", 2.0, 3) + cycles("two", 4.5, 5), until=150.0)
    counts = timeline.gpu_counts("GPU-0")
    waiting = timeline.waiting("GPU-0")
    assert sum(each.observed_seconds for each in counts) + waiting[0] == pytest.approx(150.0)
    assert sum(each.busy_seconds for each in counts) + waiting[1] == pytest.approx(75.0)
    assert sum(each.energy_joules or 0.0 for each in counts) + waiting[2] == pytest.approx(15_000.0)
    of_one = {each.stage: each.observed_seconds for each in counts if each.job == "one"}
    assert of_one["gen"] == pytest.approx(2.5 + (12.0 - 2.5) / 2), "alone at first, then half of it"


def test_what_runs() -> None:
    _, steps = play(cycles("one", 2.0, 3) + cycles("two", 2.0, 5), until=48.0)
    assert (steps.running("one"), steps.running("two"), steps.running("three")) == (3, 5, None)
