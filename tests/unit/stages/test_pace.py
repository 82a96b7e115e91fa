# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How often somebody is asked, and how far another clock is from ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.stages.pace import SHARE, WINDOW_SECONDS, Pace
from verl_gpumonitor.stages.skew import Skew


def asked(pace: Pace, *, cost: float, seconds: float, hint_every: float | None = None) -> list[float]:
    """Ask whenever due for so long; returns when."""
    times: list[float] = []
    hint_at = hint_every
    now = 0.0
    while True:
        if hint_at is not None and hint_every is not None and hint_at <= pace.due_at():
            now = max(now, hint_at)
            pace.hint()
            hint_at += hint_every
        now = max(now, pace.due_at())
        if now >= seconds:
            return times
        times.append(now)
        pace.spend(now, cost)
        now += cost


@pytest.mark.parametrize(
    ("cost", "hint_every", "questions"),
    [
        pytest.param(0.005, None, 600, id="a cheap answer is asked for each second"),
        pytest.param(0.010, None, 600, id="one of 10 ms just so"),
        pytest.param(0.3, None, 21, id="a dear one every 30 s"),
        pytest.param(0.3, 7.0, 21, id="hints cost no more in the long run"),
        pytest.param(4.0, None, 3, id="a very dear one seldom"),
    ],
)
def test_the_budget_holds(cost: float, hint_every: float | None, questions: int) -> None:
    times = asked(Pace(0.0), cost=cost, seconds=600, hint_every=hint_every)
    assert abs(len(times) - questions) <= 3
    assert len(times) * cost <= SHARE * (600 + WINDOW_SECONDS) + 4 * cost


def settled(cost: float) -> Pace:
    """A pace that knows the cost, with all of its budget at 600 s."""
    pace = Pace(0.0)
    for at in range(0, 300, 30):
        pace.spend(at, cost)
    pace.spend(600.0 - cost, cost)
    return pace


def test_a_hint_asks_at_once_while_something_is_left_for_it() -> None:
    pace = settled(0.3)
    assert pace.due_at() == pytest.approx(630)
    pace.hint()
    assert pace.due_at() == pytest.approx(600.7)
    pace.spend(600.7, 0.3)
    pace.hint()
    assert pace.due_at() == pytest.approx(630, abs=1)


def test_a_hint_never_asks_twice_in_a_second() -> None:
    pace = Pace(0.0)
    pace.spend(0.0, 0.001)
    pace.hint()
    assert pace.due_at() == 1.0


def test_the_pace_is_told() -> None:
    assert Pace(0.0).seconds == 1.0
    assert settled(0.3).seconds == pytest.approx(30)


def test_answers_that_waited_for_others_do_not_slow_the_pace() -> None:
    pace = Pace(0.0)
    for at, cost in enumerate([0.6, 0.05, 0.008, 0.5, 0.3, 0.02, 0.08, 0.6, 0.04, 0.009, 0.3, 0.2]):
        assert pace.due_at() <= at + 1
        pace.spend(float(at), cost)
        assert pace.seconds <= 5


@given(st.floats(0, 5), st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60))
def test_whatever_an_answer_costs_the_share_is_kept(cost: float, calls: list[tuple[float, bool]]) -> None:
    pace = Pace(0.0)
    now = spent = 0.0
    for wait, hinted in calls:
        if hinted:
            pace.hint()
        assert pace.due_at() <= now + 600
        now = max(now + wait, pace.due_at())
        pace.spend(now, cost)
        now += cost
        spent += cost
        assert spent <= SHARE * (now + WINDOW_SECONDS) + 5 * cost


@pytest.mark.parametrize(
    ("tasks", "seconds"),
    [
        pytest.param([], 0.0, id="nothing is known"),
        pytest.param([(9.5, 9, 10)], 0.0, id="nothing speaks against the same clock"),
        pytest.param([(40.0, 9, 10)], 30.0, id="a begin after the look is of a clock ahead"),
        pytest.param([(40.0, 9, 10), (51.9, 20, 21)], 30.9, id="the closest bound holds"),
        pytest.param([(2.0, 9, 10)], -8.0, id="one before the last look is of a clock behind"),
        pytest.param([(40.0, 9, 10), (20.5, 20, 21)], 0.0, id="a clock that was set counts as it is now"),
    ],
)
def test_skew(tasks: list[tuple[float, float, float]], seconds: float) -> None:
    skew = Skew()
    for begin, first, last in tasks:
        skew.began(begin, first, last)
    assert skew.seconds == pytest.approx(seconds)
