# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How far another clock is ahead, by what it shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.stages.skew import MOST_SECONDS, Skew


def told(ahead: float, takes: float, times: int = 20) -> Skew:
    """Ask for whole seconds, each 14.3 s."""
    skew = Skew()
    for number in range(times):
        asked = 1e9 + 14.3 * number
        skew.said(float(int(asked + takes / 2 + ahead)), asked, asked + takes)
    return skew


@given(st.floats(-500, 500), st.floats(0.001, 0.2))
def test_whole_seconds_tell_the_difference_to_a_fraction(ahead: float, takes: float) -> None:
    found = told(ahead, takes).seconds
    assert found == pytest.approx(ahead, abs=0.3 + takes) or (found == 0.0 and abs(ahead) < 1.0 + takes)


@pytest.mark.parametrize("takes", [0.001, 2.0])
def test_clocks_that_agree_have_no_difference(takes: float) -> None:
    assert told(0.0, takes).seconds == 0.0


def test_a_clock_that_was_set_meanwhile_counts_as_it_is_now() -> None:
    skew = told(0.0, 0.01)
    skew.said(1e9 + 312.0, 1e9 + 300.2, 1e9 + 300.3)
    assert skew.seconds == pytest.approx(12.0, abs=1.0)


def test_what_is_too_much_is_not_set_right() -> None:
    assert told(MOST_SECONDS - 2, 0.01).bearable_seconds == pytest.approx(MOST_SECONDS - 2, abs=0.5)
    assert told(MOST_SECONDS + 2, 0.01).bearable_seconds == 0.0
