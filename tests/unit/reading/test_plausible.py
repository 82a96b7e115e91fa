# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Range checks: whatever comes, nothing impossible leaves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.reading import plausible

SENTINELS = [2**64 - 1, 2**63 - 1, 2**63 - 16, 9223372036854775794, 2**32 - 1, -1, -(2**31), -(2**63)]
numbers = st.one_of(st.integers(-(2**64), 2**64), st.floats(), st.sampled_from(SENTINELS))


@pytest.mark.parametrize("raw", [*SENTINELS, 101, math.nan, math.inf, -math.inf])
def test_no_share(raw: float) -> None:
    assert plausible.percent(raw) is None


@pytest.mark.parametrize(("raw", "ratio"), [(0, 0.0), (55, 0.55), (100, 1.0)])
def test_a_share(raw: int, ratio: float) -> None:
    assert plausible.percent(raw) == ratio


@given(raw=numbers)
def test_what_leaves_is_finite_and_within_its_bounds(raw: float) -> None:
    bounds = [
        (plausible.percent, 0, 1),
        (plausible.power_watts, 0, 5000),
        (plausible.temperature, -40, 200),
        (plausible.energy_joules, 0, 1e14),
        (plausible.counter, 0, 2**62),
    ]
    for check, low, high in bounds:
        value = check(raw)
        assert value is None or (math.isfinite(value) and low <= value <= high)


@given(part=st.integers(-(2**64), 2**64), total=st.one_of(st.none(), st.integers(-(2**64), 2**64)))
def test_a_part_of_memory_is_within_the_whole(part: int, total: int | None) -> None:
    size = None if total is None else plausible.memory_total(total)
    value = plausible.memory_part(part, size)
    assert value is None or (size is not None and 0 <= value <= size <= plausible.MAX_MEMORY_BYTES)


@pytest.mark.parametrize("raw", ["", " ", "a" * 97, "GPU\n0", "GPU\x00"])
def test_no_name(raw: str) -> None:
    assert plausible.text(raw) is None


@pytest.mark.parametrize(
    ("raw", "expected"), [(0, None), (1, 1), (4194304, 4194304), (4194305, None), (2**32 - 1, None)]
)
def test_process_ids(raw: int, expected: int | None) -> None:
    assert plausible.pid(raw) == expected
