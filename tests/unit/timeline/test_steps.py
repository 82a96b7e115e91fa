# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Steps from the order of stages, and what they hold."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.timeline.stages import Settled
from verl_gpumonitor.timeline.steps import MAX_KEPT, Step, Steps
from verl_gpumonitor.timeline.totals import Share
from verl_gpumonitor.timeline.words import Part

STEP = ["gen 4", "other 0.2", "old_log_prob 1", "ref 1", "adv 0.1", "update_actor 3", "update_weights 1"]
START = ["unknown 2", "init 30"]
AGAIN = ["other 8", "init 30"]


def line(*stages: str, at: float = 0.0) -> list[Part]:
    """Parts one after the other. `gen 4`: four seconds; `#7`: of verl's step 7; `~`: it ran already."""
    found = []
    for text in stages:
        stage, length, *more = text.split()
        step = next((int(each[1:]) for each in more if each.startswith("#")), None)
        begun = stage != "unknown" and "~" not in more
        found.append(Part(at, at + float(length), stage, "actor", step=step, begun=begun))
        at = found[-1].end
    return found


def pieces(part: Part, longest: float = 1.0) -> list[Part]:
    """A part as it is settled: a second at a time."""
    found, at = [], part.begin
    while at < part.end:
        end = min(part.end, at + longest)
        found.append(Part(at, end, part.stage, part.role, part.job, part.step, part.begun and at == part.begin))
        at = end
    return found


def share(part: Part, uuid: str = "GPU-0", *, busy: float = 1.0) -> Share:
    length = part.end - part.begin
    return Share(
        uuid=uuid,
        part=part,
        observed_seconds=length,
        busy_seconds=length * busy,
        energy_joules=100 * length,
        memory=(int(part.end),),
    )


def play(stages: Sequence[str], *, finish: bool = False, at: float = 0.0) -> Steps:
    steps = Steps()
    for part in line(*stages, at=at):
        for piece in pieces(part):
            steps.take(Settled(until=piece.end, pod=(piece,), shares=(share(piece),)))
    if finish:
        steps.finish()
    return steps


@pytest.mark.parametrize(
    ("stages", "ended"),
    [
        pytest.param([*START, *STEP * 3], 2, id="a step ends where the next begins"),
        pytest.param([*START, *STEP * 3, "other 29"], 2, id="not while the pod rests for a moment"),
        pytest.param([*START, *STEP * 3, "other 31"], 3, id="the last one by what follows: nothing"),
        pytest.param([*START, *STEP * 3, "other 40", *STEP, "gen 2"], 4, id="after a rest it goes on"),
        pytest.param([*START, "update_weights 1", *STEP * 3], 2, id="the first weights end no step"),
        pytest.param([*START, *[*STEP, "testing 20"] * 3], 2, id="validation is none"),
        pytest.param(
            [*START, *[*STEP, "gen 20"] * 3], 3, id="validation that looks like generation belongs to the next"
        ),
        pytest.param(
            [*START, *[*STEP[:-1], "save_checkpoint 40", "update_weights 1"] * 3], 2, id="nor is a checkpoint"
        ),
        pytest.param([*START, *["gen 4", "values 1", "update_critic 2"] * 3], 2, id="while only the critic is trained"),
        pytest.param(
            [*START, *["gen 4", "values 1", "update_critic 2", "gen 0.2", "update_actor 2"] * 3],
            2,
            id="a server that shines through between two updates is no step",
        ),
        pytest.param([*START, *["other 9", "old_log_prob 1", "update_actor 3"] * 3], 2, id="a pool that only trains"),
        pytest.param([*START, *["gen 9", "update_weights 1"] * 3], 2, id="a pool that only generates"),
        pytest.param([*START, *["gen 9", "other 1"] * 3], 0, id="and is never given weights"),
        pytest.param([*START, *["other 5", "save_checkpoint 2"] * 9], 0, id="fine-tuning has no cycle"),
        pytest.param(
            ["unknown 2", "ref 1 ~", *STEP[4:], *STEP, "gen 1"],
            1,
            id="one that was half over at the start is not whole",
        ),
        pytest.param([*START, *STEP, "unknown 300", *STEP, "gen 1"], 2, id="a silence between two"),
        pytest.param([*START, *STEP, "gen 9", *AGAIN, *STEP * 2, "gen 1"], 3, id="a job that broke off and began anew"),
        pytest.param([*START, *STEP, *STEP[:-1], *AGAIN, *STEP, "gen 1"], 2, id="in its update, too"),
        pytest.param([*START, *STEP * 2, *AGAIN, *STEP, "gen 1"], 3, id="the last step of a job that ended was whole"),
        pytest.param([*START, *STEP[:-2], "init 1", *STEP[-2:], "gen 1"], 1, id="a call of an instant begins nothing"),
    ],
)
def test_steps_are_counted(stages: list[str], ended: int) -> None:
    assert play(stages).ended == ended


@pytest.mark.parametrize(
    ("stages", "numbers"),
    [
        pytest.param(["gen 3 #7", "update_actor 2 #7", "gen 3 #8", "gen 1 #9"], [7, 8], id="by verl's own number"),
        pytest.param(["train 3 #1", "train 3 #2", "train 2 #3"], [1, 2], id="also of fine-tuning"),
        pytest.param(
            ["gen 3 #7", "update_actor 2 #7", "gen 5", "update_weights 1 #7", "gen 3 #8", "gen 1 #9"],
            [7, 8],
            id="the number alone",
        ),
        pytest.param(
            ["gen 3 #7", "update_weights 1 #6", "update_actor 2 #7", "gen 1 #8"], [7], id="a straggler begins nothing"
        ),
        pytest.param(
            ["gen 3 #7", "update_actor 2 #7", "gen 3 #5", "update_actor 2 #5", "gen 1 #6"], [7, 5], id="back again"
        ),
        pytest.param(
            ["gen 3 #7", "update_actor 2 #7", *STEP * 4], [7, None, None], id="numbers that stop leave it to the cycle"
        ),
        pytest.param(
            ["gen 3 #7", "update_actor 2 #7", "other 40", "update_weights 1 #7", "gen 1 #8", "gen 1 #9"],
            [7, 8],
            id="late weights are no step of their own",
        ),
    ],
)
def test_numbers_of_marks(stages: list[str], numbers: list[int | None]) -> None:
    steps = play([*START, *stages, "other 10"])
    assert [step.step for step in steps.kept] == numbers


def test_a_step_holds_its_stages() -> None:
    steps = play([*START, *STEP * 3])
    first, second = steps.kept[0], play([*START, *STEP * 3, "other 40"]).kept[1]
    assert (first.number, first.begin) == (1, 32.0)
    assert second.begin == pytest.approx(42.3)
    assert first.end == pytest.approx(42.3)
    assert {stage.stage: round(stage.seconds, 3) for stage in first.stages} == {
        "gen": 4.0,
        "other": 0.2,
        "old_log_prob": 1.0,
        "ref": 1.0,
        "adv": 0.1,
        "update_actor": 3.0,
        "update_weights": 1.0,
    }
    gen = first.stages[0].gpus["GPU-0"]
    assert (gen.observed_seconds, gen.busy_seconds, gen.energy_joules) == (4.0, 4.0, 400.0)
    assert (gen.memory_floor_bytes, gen.memory_peak_bytes) == (33, 36)


def test_the_rest_after_the_last_step_is_not_in_it() -> None:
    (step,) = play([*START, *STEP, "other 100"]).kept
    assert step.end == pytest.approx(42.3)
    assert sum(stage.seconds for stage in step.stages) == pytest.approx(10.3)


def test_the_time_between_two_jobs_is_in_no_step() -> None:
    steps = play([*START, *STEP, "gen 9", *AGAIN, *STEP, "gen 1", "other 10"])
    assert [step.end - step.begin for step in steps.kept] == [pytest.approx(10.3)] * 2


def test_samples_that_come_behind_are_in_their_step() -> None:
    steps, late = Steps(), []
    for part in (piece for stage in line(*START, *STEP, *STEP, "other 40") for piece in pieces(stage)):
        late.append(share(part))
        ready = late[:-4]
        steps.take(Settled(until=part.end, pod=(part,), shares=tuple(ready)))
        del late[: len(ready)]
    for step in steps.kept:
        assert sum(stage.gpus["GPU-0"].observed_seconds for stage in step.stages) == pytest.approx(10.3)


@pytest.mark.parametrize(
    ("stages", "ended"),
    [
        pytest.param([*START, *STEP * 2], 2, id="one that came to its update"),
        pytest.param([*START, *STEP * 2, "other 5"], 2, id="even a moment ago"),
        pytest.param([*START, *STEP * 2, "gen 5"], 2, id="one that did not is none"),
        pytest.param([*START, *STEP, *STEP[:-1]], 1, id="nor is one that broke off in its update"),
        pytest.param([*START, *STEP[:-1]], 1, id="where that is the end of a step, it is one"),
        pytest.param([*START, *STEP, "gen 3 #2", "other 1"], 2, id="one of marks that ended"),
        pytest.param([*START], 0, id="none"),
    ],
)
def test_the_end_of_the_pod_ends_a_step(stages: list[str], ended: int) -> None:
    steps = play(stages, finish=True)
    assert (steps.ended, len(steps.kept)) == (ended, ended)


@pytest.mark.parametrize(
    ("stages", "steps"),
    [
        pytest.param(
            ["gen 3 #7", "update_actor 2 #7", "other 2", "other 1 #8", "gen 3 #8", "gen 1 #9"],
            [(7, 0, 7), (8, 7, 11)],
            id="a number ends a rest",
        ),
        pytest.param(
            ["gen 3", "update_actor 2", "gen 0.1", "other 1 #1", "other 1 #2", "gen 1 #3"],
            [(1, 0, 6.1), (2, 6.1, 7.1)],
            id="a first half too short to be one, then numbers",
        ),
    ],
)
def test_where_numbered_steps_begin(stages: list[str], steps: list[tuple[int, float, float]]) -> None:
    kept = play(stages, finish=True).kept
    assert [step.step for step in kept] == [number for number, *_ in steps]
    assert [(step.begin, step.end) for step in kept] == [pytest.approx((begin, end)) for _, begin, end in steps]


def test_which_step_runs() -> None:
    assert play(START).running is None
    assert play([*START, *STEP]).running == 1
    assert play([*START, *STEP, "gen 2"]).running == 2
    assert play([*START, *STEP, "other 60"]).running == 1
    assert play([*START, "gen 3 #41"]).running == 41


def test_steps_are_kept_until_they_arrived_and_not_without_end() -> None:
    steps = play([*START, *STEP * 50])
    assert [step.number for step in steps.kept] == list(range(50 - MAX_KEPT, 50))
    steps.forget(48)
    assert [step.number for step in steps.kept] == [49]


@given(
    stages=st.lists(
        st.tuples(
            st.sampled_from(["gen", "old_log_prob", "update_actor", "update_weights", "other", "unknown", "init", "x"]),
            st.sampled_from([0.05, 0.5, 1.0, 10.0, 40.0]),
            st.none() | st.integers(1, 3),
        ),
        max_size=60,
    )
)
def test_whatever_comes_steps_do_not_overlap_and_count_nothing_twice(
    stages: list[tuple[str, float, int | None]],
) -> None:
    texts = [f"{stage} {length}" + ("" if number is None else f" #{number}") for stage, length, number in stages]
    steps = play(texts, finish=True)
    kept: Sequence[Step] = steps.kept
    assert all(one.end <= other.begin for one, other in pairwise(kept))
    for step in kept:
        assert step.begin < step.end
        assert sum(stage.seconds for stage in step.stages) <= step.end - step.begin + 1e-6
        observed = sum(totals.observed_seconds for stage in step.stages for totals in stage.gpus.values())
        assert observed <= step.end - step.begin + 1e-6
    assert [step.number for step in kept] == list(range(steps.ended - len(kept) + 1, steps.ended + 1))
    assert len(steps._open) <= 20
