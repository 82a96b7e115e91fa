# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""When the loop turns."""

import pytest

from verl_gpumonitor_sidecar.program import BEHIND_SECONDS, next_turn_in


@pytest.mark.parametrize(
    ("newest_at", "now", "expected"),
    [
        pytest.param(None, 100.0, 1.0, id="no pass yet"),
        pytest.param(100.0, 100.3, 0.7 + BEHIND_SECONDS, id="soon after the next pass"),
        pytest.param(100.0, 100.9, 0.5, id="never twice at once"),
        pytest.param(100.0, 101.5, 0.5, id="the pass is late"),
        pytest.param(100.0, 103.0, 1.0, id="no pass for long"),
        pytest.param(100.0, 90.0, 1.5, id="no clock makes it wait for long"),
    ],
)
def test_the_loop_turns_when_samples_are_new(newest_at: float | None, now: float, expected: float) -> None:
    assert next_turn_in(1.0, newest_at=newest_at, now=now) == pytest.approx(expected)


def test_turns_fall_into_step_with_the_passes() -> None:
    now = 0.0
    for _ in range(10):
        now += next_turn_in(1.0, newest_at=int(now + 0.7) - 0.7 if now > 0.3 else None, now=now)
    assert now % 1.0 == pytest.approx(0.3 + BEHIND_SECONDS)
