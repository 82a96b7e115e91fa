# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Each step counts once, and a job is as far as its pods are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.controller.builders import report
from verl_gpumonitor.model.report import Report, StageNow, StageQuality, StepReport, StepStage
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor_operator.controller.steps import (
    MAX_JOBS,
    MAX_RECENT,
    PodSteps,
    PoolSteps,
    StepSeen,
    pace_of,
)


def step(number: int, *, verl: int | None = None, job: str = "", seconds: float = 10.0, **stages: float) -> StepReport:
    return StepReport(
        number=number,
        step=verl,
        job=job,
        begin=100.0 * number,
        end=100.0 * number + seconds,
        stages=[StepStage(stage=name, role="actor", begin=1.0, seconds=value) for name, value in stages.items()],
    )


def told(
    *steps: StepReport,
    start: str = "start-001",
    now: StageNow | None = None,
    source: StageSource = StageSource.MARKS,
) -> Report:
    return report("w-0", start_id=start, steps=list(steps), stage=now, stage_quality=StageQuality(source=source))


def counted(*reports: Report) -> PodSteps:
    pod = PodSteps()
    for item in reports:
        pod.take(item)
    return pod


@given(
    cuts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=10),
)
def test_a_step_that_is_told_again_counts_once(cuts: list[tuple[int, int]]) -> None:
    """Each report tells the steps up to some number, and some of those before it again."""
    pod, highest = PodSteps(), 0
    for until, again in cuts:
        if until <= highest:
            continue
        pod.take(told(*(step(number) for number in range(max(1, highest + 1 - again), until + 1))))
        highest = until
    assert pod.counted == {"": highest}
    assert len(pod.recent) == min(highest, MAX_RECENT)


def test_another_start_counts_its_steps_from_one_again() -> None:
    pod = counted(told(step(1), step(2)), told(step(1), start="start-002"))
    assert pod.counted == {"": 3}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param([told(step(1), step(2))], {}, id="nobody says verl's number"),
        pytest.param([told(step(1, verl=41), step(2, verl=42))], {"": 42}, id="of a whole step"),
        pytest.param(
            [told(step(1, verl=42), now=StageNow(stage="gen", role="rollout", step=43))],
            {"": 43},
            id="of the present one",
        ),
        pytest.param(
            [told(step(1), now=StageNow(stage="gen", role="rollout", step=2), source=StageSource.RAY_STATE)],
            {},
            id="a sidecar's own count is not verl's",
        ),
        pytest.param([told(step(1, verl=42)), told(step(2, verl=7))], {"": 42}, id="the highest stays"),
        pytest.param([told(step(1, verl=1, job="a"), step(2, verl=9, job="b"))], {"a": 1, "b": 9}, id="by job"),
    ],
)
def test_verls_own_number(reports: list[Report], expected: dict[str, int]) -> None:
    assert counted(*reports).highest == expected


def test_a_cluster_that_runs_jobs_for_weeks_takes_no_more_memory() -> None:
    pod = counted(*(told(step(number, verl=number, job=f"raysubmit_{number}")) for number in range(1, 100)))
    assert len(pod.counted) == len(pod.highest) == MAX_JOBS
    assert "raysubmit_99" in pod.highest


def test_the_pieces_of_a_stage_are_one() -> None:
    item = StepReport(
        number=1,
        begin=0.0,
        end=10.0,
        stages=[StepStage(stage="gen", role="rollout", begin=b, seconds=2.0) for b in (0.0, 5.0)],
    )
    assert StepSeen.of(item).stages == {("gen", "rollout"): 4.0}


@pytest.mark.parametrize(
    ("pools", "cycles"),
    [
        pytest.param([], 0, id="nobody"),
        pytest.param([[5, 5, 5, 4]], 5, id="one pod is late"),
        pytest.param([[5, 4, 4, 4]], 4, id="one pod is early"),
        pytest.param([[5, 0]], 0, id="half of the pods have not seen it"),
        pytest.param([[0, 0, 0, 0, 0, 0], [7, 7]], 7, id="a pool of its own for rollout goes through no steps"),
        pytest.param([[7, 7, 0]], 7, id="a pod was replaced"),
    ],
)
def test_how_far_a_job_is(pools: list[list[int]], cycles: int) -> None:
    assert pace_of(PoolSteps(pool, []) for pool in pools).cycles == cycles


def test_seconds_are_means_over_the_newest_steps() -> None:
    steps = [
        StepSeen("", 10.0, {("gen", "rollout"): 6.0, ("update_actor", "actor"): 4.0}),
        StepSeen("", 20.0, {("gen", "rollout"): 8.0, ("update_actor", "actor"): 4.0, ("testing", "rollout"): 8.0}),
    ]
    pace = pace_of([PoolSteps([2, 2], [steps, steps])])
    assert pace.seconds_per_step == 15.0
    assert pace.stages == {("gen", "rollout"): 7.0, ("update_actor", "actor"): 4.0, ("testing", "rollout"): 4.0}


def test_before_the_first_step_no_seconds_are_known() -> None:
    pace = pace_of([PoolSteps([0, 0], [[], []])])
    assert (pace.seconds_per_step, pace.stages) == (None, {})
