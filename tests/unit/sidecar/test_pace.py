# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The schedule of reports as a state machine: time and chance are arguments."""

import pytest

from verl_gpumonitor_sidecar import pace as pacing
from verl_gpumonitor_sidecar.pace import Pace


def lowest() -> float:
    return 0.0


def highest() -> float:
    return 0.999_999


def middle() -> float:
    return 0.5


def test_the_first_report_is_due_within_seconds() -> None:
    assert pacing.begin(15.0, now=100.0, chance=lowest).due_at == 100.0
    assert 102.9 < pacing.begin(15.0, now=100.0, chance=highest).due_at < 103.0


def test_the_interval_has_jitter_of_a_tenth() -> None:
    pace = Pace(interval_seconds=15.0, due_at=0.0)
    assert pacing.answered(pace, now=100.0, chance=lowest).due_at == pytest.approx(113.5)
    assert pacing.answered(pace, now=100.0, chance=middle).due_at == pytest.approx(115.0)
    assert pacing.answered(pace, now=100.0, chance=highest).due_at == pytest.approx(116.5, abs=0.001)


def test_an_answer_may_change_the_interval_for_good() -> None:
    pace = pacing.answered(Pace(interval_seconds=15.0, due_at=0.0), now=0.0, chance=middle, interval_seconds=60.0)
    assert (pace.due_at, pace.interval_seconds) == (60.0, 60.0)
    assert pacing.answered(pace, now=60.0, chance=middle).due_at == 120.0


def test_back_off_doubles_with_full_jitter_up_to_a_minute() -> None:
    pace = Pace(interval_seconds=15.0, due_at=0.0)
    longest, shortest = [], []
    for _ in range(9):
        longest.append(pacing.failed(pace, now=0.0, chance=highest).due_at)
        shortest.append(pacing.failed(pace, now=0.0, chance=lowest).due_at)
        pace = pacing.failed(pace, now=0.0, chance=middle)
    assert longest == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60], rel=1e-4)
    assert shortest == [0.25] * 9


def test_a_thousand_failures_overflow_nothing() -> None:
    pace = Pace(interval_seconds=15.0, due_at=0.0, failures=100_000)
    assert pacing.failed(pace, now=0.0, chance=highest).due_at <= 60.0


def test_retry_after_is_kept_and_spread() -> None:
    pace = Pace(interval_seconds=15.0, due_at=0.0)
    assert pacing.failed(pace, now=0.0, chance=lowest, retry_after_seconds=30.0).due_at == 30.25
    assert pacing.failed(pace, now=0.0, chance=lowest, retry_after_seconds=1e9).due_at == 600.25


def test_success_ends_the_back_off() -> None:
    pace = pacing.answered(Pace(interval_seconds=15.0, due_at=0.0, failures=7), now=0.0, chance=middle)
    assert pace.failures == 0


@pytest.mark.parametrize(
    ("pace", "now", "due_at"),
    [
        pytest.param(Pace(interval_seconds=15.0, due_at=20.0), 6.0, 6.0, id="at once before the first report"),
        pytest.param(
            Pace(interval_seconds=15.0, due_at=20.0, attempted_at=5.0), 6.0, 10.0, id="5 s after the last report"
        ),
        pytest.param(
            Pace(interval_seconds=15.0, due_at=20.0, attempted_at=5.0), 12.0, 12.0, id="at once when that is long ago"
        ),
        pytest.param(
            Pace(interval_seconds=15.0, due_at=7.0, attempted_at=5.0), 6.0, 7.0, id="never later than it was due"
        ),
        pytest.param(
            Pace(interval_seconds=15.0, due_at=50.0, attempted_at=5.0, failures=3), 12.0, 50.0, id="back-off is kept"
        ),
    ],
)
def test_urgent(pace: Pace, now: float, due_at: float) -> None:
    assert pacing.urgent(pace, now=now).due_at == due_at
