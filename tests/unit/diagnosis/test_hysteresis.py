# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The state machine against flapping."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.diagnosis.hysteresis import Alert, AlertPhase, Holds, advance

HOLD = Holds(raise_seconds=30, clear_seconds=60, unknown_seconds=300)
CLEAR = Alert(phase=AlertPhase.CLEAR, since=0, seen=0)
PENDING = Alert(phase=AlertPhase.PENDING, since=10, seen=10)
RAISED = Alert(phase=AlertPhase.RAISED, since=40, seen=40)
CLEARING = Alert(phase=AlertPhase.CLEARING, since=50, seen=50)


@pytest.mark.parametrize(
    ("before", "t", "holds", "after"),
    [
        pytest.param(CLEAR, 5.0, False, AlertPhase.CLEAR, id="nothing, nothing"),
        pytest.param(CLEAR, 10.0, True, AlertPhase.PENDING, id="begins to wait"),
        pytest.param(PENDING, 39.9, True, AlertPhase.PENDING, id="waits just below the hold time"),
        pytest.param(PENDING, 40.0, True, AlertPhase.RAISED, id="raises at the hold time"),
        pytest.param(PENDING, 20.0, False, AlertPhase.CLEAR, id="a short spike never raises"),
        pytest.param(PENDING, 309.0, None, AlertPhase.PENDING, id="what cannot be judged goes on waiting"),
        pytest.param(PENDING, 310.0, None, AlertPhase.CLEAR, id="but not for ever"),
        pytest.param(RAISED, 50.0, True, AlertPhase.RAISED, id="stays"),
        pytest.param(RAISED, 50.0, False, AlertPhase.CLEARING, id="begins to clear"),
        pytest.param(RAISED, 339.9, None, AlertPhase.RAISED, id="unknown is not over"),
        pytest.param(RAISED, 340.0, None, AlertPhase.CLEAR, id="unknown for too long is over"),
        pytest.param(CLEARING, 109.9, False, AlertPhase.CLEARING, id="clears not before its time"),
        pytest.param(CLEARING, 110.0, False, AlertPhase.CLEAR, id="clears at its time"),
        pytest.param(CLEARING, 60.0, True, AlertPhase.RAISED, id="comes back without a new alarm"),
        pytest.param(RAISED, 1.0, True, AlertPhase.RAISED, id="time running back does nothing"),
    ],
)
def test_advance(before: Alert, t: float, holds: bool | None, after: AlertPhase) -> None:
    assert advance(before, t=t, holds=holds, hold=HOLD).phase is after


def test_without_hold_times_it_follows_at_once() -> None:
    at_once = Holds(raise_seconds=0, clear_seconds=0)
    raised = advance(CLEAR, t=1, holds=True, hold=at_once)
    assert raised.phase is AlertPhase.RAISED
    assert advance(raised, t=2, holds=False, hold=at_once).phase is AlertPhase.CLEAR


steps = st.lists(st.tuples(st.floats(0, 100), st.sampled_from([True, False, None])), max_size=60)


@given(steps=steps)
def test_it_is_raised_only_after_holding_and_cleared_only_after_being_away(
    steps: list[tuple[float, bool | None]],
) -> None:
    alert, t = CLEAR, 0.0
    held_since: float | None = None
    for wait, holds in steps:
        t += wait
        before, alert = alert, advance(alert, t=t, holds=holds, hold=HOLD)
        assert alert.seen >= before.seen
        if holds is True:
            held_since = t if held_since is None else held_since
        elif holds is False:
            held_since = None
        if alert.open and not before.open:
            assert held_since is not None
            assert t - held_since >= HOLD.raise_seconds
        if before.open and not alert.open:
            assert holds is not True
            assert t - before.since >= min(HOLD.clear_seconds, HOLD.unknown_seconds)


@given(flips=st.lists(st.booleans(), max_size=100))
def test_flipping_faster_than_the_hold_times_alarms_at_most_once(flips: list[bool]) -> None:
    """The same finding every few seconds makes no flood of Events."""
    alert, alarms, t = CLEAR, 0, 0.0
    for holds in flips:
        t += 10
        before, alert = alert, advance(alert, t=t, holds=holds, hold=Holds(raise_seconds=30, clear_seconds=2000))
        alarms += alert.open and not before.open
    assert alarms <= 1
