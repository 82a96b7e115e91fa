# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Counters of one GPU: nothing twice, nothing invented."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.vocabulary import GpuState
from verl_gpumonitor.timeline.accumulate import GpuAccumulator, add_sample, add_xid


def sample(
    t: float | None, utilization: float | None = None, *, used: int | None = None, **values: float | None
) -> GpuSample:
    return GpuSample(
        uuid="GPU-0",
        taken_at=t,
        utilization=utilization,
        memory_taken_at=None if used is None else t,
        memory_used_bytes=used,
        energy_joules=values.get("energy"),
        power_watts=values.get("power"),
    )


def added(samples: Iterable[GpuSample], state: GpuAccumulator = GpuAccumulator()) -> GpuAccumulator:  # noqa: B008
    for each in samples:
        state = add_sample(state, each, interval_seconds=1.0)
    return state


@pytest.mark.parametrize(
    ("samples", "observed", "busy"),
    [
        pytest.param([], 0, 0, id="nothing"),
        pytest.param([sample(0, 1.0)], 0, 0, id="the first one covers no time"),
        pytest.param([sample(0, 0.5), sample(1, 0.8), sample(2, 0.2)], 2, 1.0, id="each covers the time before it"),
        pytest.param([sample(0, 1.0), sample(1, 1.0), sample(1, 1.0)], 1, 1.0, id="the same one counts once"),
        pytest.param([sample(0, 1.0), sample(2, 1.0), sample(1, 1.0)], 2, 2.0, id="an older one counts nothing"),
        pytest.param([sample(0, 1.0), sample(3, 1.0)], 3, 3.0, id="three intervals are still covered"),
        pytest.param([sample(0, 1.0), sample(100, 1.0)], 1, 1.0, id="of a gap one interval is covered"),
        pytest.param([sample(0, 1.0), sample(1), sample(2, 1.0)], 1, 1.0, id="unknown load covers nothing"),
        pytest.param([sample(0, 1.0), sample(None), sample(1, 1.0)], 1, 1.0, id="a sample without time adds nothing"),
    ],
)
def test_load(samples: Sequence[GpuSample], observed: float, busy: float) -> None:
    counters = added(samples).counters
    assert (counters.observed_seconds, counters.busy_seconds) == (observed, busy)


HOT = ("sw_power_cap", "hw_thermal_slowdown")


@pytest.mark.parametrize(
    ("reasons", "seconds"),
    [
        pytest.param([None, None, None], None, id="nobody says why clocks are as they are"),
        pytest.param([(), (), ()], 0.0, id="no reason is none"),
        pytest.param([(), HOT, ()], 1.0, id="the time before a hot sample"),
        pytest.param([HOT, HOT, HOT], 2.0, id="the first covers no time"),
        pytest.param([(), ("sw_power_cap",), ("gpu_idle",)], 0.0, id="a limit under full load and idleness are none"),
        pytest.param([(), HOT, None], 1.0, id="what is not said adds nothing"),
    ],
)
def test_time_held_down(reasons: Sequence[tuple[str, ...] | None], seconds: float | None) -> None:
    samples = [
        GpuSample(uuid="GPU-0", taken_at=float(t), utilization=1.0, throttled=each) for t, each in enumerate(reasons)
    ]
    assert added(samples).counters.throttled_seconds == seconds


@pytest.mark.parametrize(
    ("samples", "joules"),
    [
        pytest.param([sample(0), sample(1)], None, id="neither energy nor power"),
        pytest.param([sample(0, energy=1000.0), sample(1, energy=1300.0)], 300.0, id="the rise of the counter"),
        pytest.param([sample(0, energy=1000.0), sample(500, energy=9000.0)], 8000.0, id="which ran on over a gap"),
        pytest.param([sample(0, energy=1000.0), sample(1, energy=50.0), sample(2, energy=150.0)], 100.0, id="a reset"),
        pytest.param([sample(0, energy=10.0), sample(1, energy=1e9), sample(2, energy=1e9 + 70)], 70.0, id="a jump"),
        pytest.param([sample(0, power=300.0), sample(1, power=200.0)], 200.0, id="power over the covered time"),
        pytest.param([sample(0, power=300.0), sample(100, power=200.0)], 200.0, id="of a gap one interval"),
        pytest.param(
            [sample(0, energy=0.0, power=300.0), sample(1, power=300.0), sample(2, energy=600.0, power=300.0)],
            600.0,
            id="the counter's next rise covers a moment without it: power is not added",
        ),
    ],
)
def test_energy(samples: Sequence[GpuSample], joules: float | None) -> None:
    assert added(samples).counters.energy_joules == joules


def test_peaks() -> None:
    counters = added([sample(0, used=5), sample(10, used=70), sample(20, used=8)]).counters
    assert (counters.memory_peak_bytes, counters.memory_recent_peak_bytes) == (70, 70)
    counters = added([sample(0, used=5), sample(10, used=70), sample(20, used=8), sample(76, used=9)]).counters
    assert (counters.memory_peak_bytes, counters.memory_recent_peak_bytes) == (70, 9)


def test_a_memory_reading_between_two_samples_counts_for_the_peak_alone() -> None:
    first = sample(0, 0.5, used=5)
    between = GpuSample(uuid="GPU-0", taken_at=0, utilization=0.5, memory_taken_at=0.5, memory_used_bytes=70)
    counters = added([first, between, sample(1, 0.5, used=5)]).counters
    assert (counters.observed_seconds, counters.memory_peak_bytes) == (1.0, 70)


def test_a_silent_gpu_adds_nothing() -> None:
    before = added([sample(0, 1.0, used=5), sample(1, 1.0, used=5)])
    silent = GpuSample(uuid="GPU-0", state=GpuState.LOST, error="GPU_IS_LOST", taken_at=1, memory_taken_at=1)
    assert added([silent] * 10, before) == before


def test_each_xid_counts() -> None:
    """31 twice, then 62: a repeat is seen, and when the last of each was."""
    state = GpuAccumulator()
    for code, at in [(31, 1.0), (31, 2.0), (62, 3.0)]:
        state = add_xid(state, code, at=at)
    assert state.counters.xid_errors == {31: 2, 62: 1}
    assert state.counters.xid_last_at == {31: 2.0, 62: 3.0}


# --- properties ---

moments = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.one_of(st.none(), st.floats(0, 1)),
        st.one_of(st.none(), st.integers(0, 2**40)),
        st.one_of(st.none(), st.floats(0, 1e9)),
        st.one_of(st.none(), st.floats(0, 5000)),
    ),
    max_size=60,
)


def timeline(
    steps: Sequence[tuple[float, float | None, int | None, float | None, float | None]],
) -> list[GpuSample]:
    t, samples = 100.0, []
    for wait, load, used, energy, power in steps:
        t += wait
        samples.append(sample(t, load, used=used, energy=energy, power=power))
    return samples


@given(steps=moments)
def test_counters_never_fall_and_never_outrun_time(
    steps: Sequence[tuple[float, float | None, int | None, float | None, float | None]],
) -> None:
    samples = timeline(steps)
    state = GpuAccumulator()
    for each in samples:
        before, state = state.counters, add_sample(state, each, interval_seconds=1.0)
        after = state.counters
        assert after.observed_seconds >= before.observed_seconds
        assert after.busy_seconds >= before.busy_seconds
        assert (after.energy_joules or 0) >= (before.energy_joules or 0)
        assert (after.memory_peak_bytes or 0) >= (before.memory_peak_bytes or 0)
        assert (after.memory_recent_peak_bytes or 0) <= (after.memory_peak_bytes or 0)
    elapsed = samples[-1].taken_at - samples[0].taken_at if samples else 0  # type: ignore[operator]
    counters = state.counters
    assert counters.busy_seconds <= counters.observed_seconds + 1e-9
    assert counters.observed_seconds <= elapsed + 1e-6
    assert (counters.energy_joules or 0) <= 5000 * elapsed + 1e-3
    assert len(state.peaks) <= 14


@given(steps=moments, again=st.lists(st.integers(0, 59), max_size=60))
def test_handing_samples_in_again_changes_nothing(
    steps: Sequence[tuple[float, float | None, int | None, float | None, float | None]], again: list[int]
) -> None:
    samples = timeline(steps)
    state = GpuAccumulator()
    for number, each in enumerate(samples):
        state = add_sample(state, each, interval_seconds=1.0)
        for earlier in [samples[i] for i in again if i <= number]:
            assert add_sample(state, earlier, interval_seconds=1.0) == state


def test_the_last_readings_of_memory_are_kept() -> None:
    counters = added(sample(t, used=10 * t) for t in [0, 1, 1, *range(2, 20)]).counters
    assert counters.memory_readings == tuple((t, 10 * t) for t in range(12, 20))
