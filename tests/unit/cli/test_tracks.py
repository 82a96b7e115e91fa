# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Buckets of a run: whatever is joined, no second and no peak is lost, and there are never too many."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.cli.reports.charts import stage_runs, time_ticks
from verl_gpumonitor.cli.reports.tracks import Axis, Bucket, Seen

SAMPLES = st.lists(
    st.builds(
        Seen,
        seconds=st.floats(0, 60),
        stage=st.sampled_from(["gen", "update_actor"]),
        utilization=st.none() | st.floats(0, 1),
        memory_used_bytes=st.none() | st.floats(0, 1e11),
    ),
    max_size=60,
)


@given(SAMPLES, st.floats(0.1, 100_000))
def test_what_was_seen_is_kept_however_long_the_run(samples: list[Seen], apart: float) -> None:
    axis = Axis(max_buckets=8)
    track = axis.track()
    for number, seen in enumerate(samples):
        track.add(number * apart, seen)
    whole = track.total()
    assert len(list(track)) <= 8
    assert whole.seconds == pytest.approx(sum(seen.seconds for seen in samples))
    assert sum(whole.stages.values()) == pytest.approx(whole.seconds)
    used = [seen.memory_used_bytes for seen in samples if seen.memory_used_bytes is not None]
    assert (whole.memory_low_bytes, whole.memory_high_bytes) == ((min(used), max(used)) if used else (None, None))
    busy = [seen.seconds * seen.utilization for seen in samples if seen.utilization is not None]
    assert whole.busy_seconds == pytest.approx(sum(busy))


def test_a_gap_speaks_for_a_quarter_of_an_hour_at_most() -> None:
    track = Axis().track()
    track.add(10_000.0, Seen(seconds=10_000.0, stage="gen", utilization=1.0))
    assert track.total().seconds == 900.0


def bucket(**stages: float) -> Bucket:
    return Bucket(seconds=sum(stages.values()), stages=stages)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        pytest.param([(0, bucket(gen=10)), (10, bucket(gen=9, ref=1))], [(0, 20, "gen")], id="neighbours are joined"),
        pytest.param([(0, bucket(gen=5, ref=5))], [], id="a stretch of two stages has no colour"),
        pytest.param([(0, bucket(gen=10)), (30, bucket(gen=10))], [(0, 10, "gen"), (30, 40, "gen")], id="a gap parts"),
    ],
)
def test_stage_runs(points: list[tuple[float, Bucket]], expected: list[tuple[float, float, str]]) -> None:
    assert stage_runs(points, 10.0) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param(0.0, [0.0], id="nothing"),
        pytest.param(60.0, [0, 15, 30, 45, 60], id="a minute"),
        pytest.param(86_400.0, [0, 21_600, 43_200, 64_800, 86_400], id="a day"),
    ],
)
def test_time_ticks(seconds: float, expected: list[float]) -> None:
    assert time_ticks(seconds) == expected


def test_time_ticks_of_an_axis_that_begins_later_are_round_too() -> None:
    assert time_ticks(3600.0, begin=7210.0) == [8100.0, 9000.0, 9900.0, 10800.0]


@pytest.mark.parametrize(
    ("apart", "late", "width"),
    [
        pytest.param(1.0, 0.05, 2.0, id="a second"),
        pytest.param(5.0, 0.0, 8.0, id="five"),
        pytest.param(10.0, 0.5, 16.0, id="ten, now and then late"),
    ],
)
def test_a_bucket_is_as_wide_as_samples_are_apart(apart: float, late: float, width: float) -> None:
    """A row each second with columns in between that are empty would look like a lost second."""
    axis = Axis()
    track = axis.track()
    for number in range(1, 40):
        track.add(number * apart + late * (number % 2), Seen(seconds=apart, stage="gen", utilization=0.5))
    axis.settle()
    begins = [begin for begin, _ in track]
    assert axis.width == width
    assert all(after - before == width for before, after in pairwise(begins))


def test_a_gap_makes_no_bucket_wider() -> None:
    axis = Axis()
    track = axis.track()
    for t in (*range(1, 30), 600, *range(601, 630)):
        track.add(float(t), Seen(seconds=1.0 if t != 600 else 571.0, stage="gen", utilization=0.5))
    axis.settle()
    assert axis.width == 4.0


def test_two_samples_leave_one_bucket_at_least() -> None:
    axis = Axis()
    track = axis.track()
    for t in (0.0, 300.0):
        track.add(t, Seen(seconds=t, stage="gen", utilization=0.5))
    axis.settle()
    assert len(list(track)) == 1
