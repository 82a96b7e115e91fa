# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor_operator.controller.rates import Bucket, KeyedBuckets, Rate

RATE = Rate(burst=3, per_second=2)


def test_a_burst_passes_and_then_one_each_half_second() -> None:
    bucket = Bucket(RATE, 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(0.25) == pytest.approx(0.25)
    assert bucket.take(0.5) == 0.0
    assert bucket.take(0.5) == pytest.approx(0.5)


def test_a_clock_set_back_neither_gives_nor_takes() -> None:
    bucket = Bucket(RATE, 100.0)
    for _ in range(3):
        bucket.take(100.0)
    assert bucket.take(50.0) == pytest.approx(0.5)
    assert bucket.take(50.5) == 0.0


@given(st.lists(st.floats(min_value=0.0, max_value=5.0), max_size=200))
def test_no_more_pass_than_the_burst_and_the_rate_allow(gaps: list[float]) -> None:
    bucket, now, passed = Bucket(RATE, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        passed += bucket.take(now) == 0.0
    assert passed <= RATE.burst + RATE.per_second * now + 1e-6


def test_keys_do_not_pay_for_each_other_and_are_bounded() -> None:
    buckets = KeyedBuckets(Rate(burst=1, per_second=0.1), capacity=2)
    assert buckets.take("a", 0.0) == 0.0
    assert buckets.take("a", 0.0) > 0.0
    assert buckets.take("b", 0.0) == 0.0
    for number in range(1000):
        buckets.take(str(number), 0.0)
    assert len(buckets) == 2
