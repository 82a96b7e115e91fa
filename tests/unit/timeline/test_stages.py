# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Counters by stage: no second lost, none counted twice, whatever the sources do."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.report import MAX_STAGES, StageCount
from verl_gpumonitor.model.samples import GpuCounters
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.timeline.pieces import MAX_PENDING, MAX_READINGS, few
from verl_gpumonitor.timeline.stages import Settled, StageTimeline
from verl_gpumonitor.timeline.words import Own, Voice

BEGIN = 1e9


def run(stage: str, begin: float, end: float | None = None, **values: object) -> StageInterval:
    end = None if end is None else BEGIN + end
    return StageInterval(stage=stage, role="actor", begin=BEGIN + begin, end=end, **values)  # type: ignore[arg-type]


def state(begin: float, end: float, *intervals: StageInterval) -> Voice:
    source = StageSource.RAY_STATE
    return Voice(StageWord(source=source, known_from=BEGIN + begin, known_until=BEGIN + end, intervals=intervals))


class Pod:
    """A pod whose GPUs are as busy as told."""

    def __init__(self, gpus: int = 1) -> None:
        self.timeline = StageTimeline()
        self.now = 0.0
        self.counters = {f"GPU-{number}": GpuCounters(energy_joules=0.0) for number in range(gpus)}
        for uuid, counters in self.counters.items():
            self.timeline.observe(uuid, counters, at=BEGIN)

    def go_on(
        self,
        seconds: float,
        utilization: float = 1.0,
        *,
        used: int = 0,
        own: Own = Own(),  # noqa: B008
        held: float | None = None,
    ) -> None:
        """Let time pass; `held`: share of it in which the clocks were held down."""
        self.now += seconds
        self.timeline.elapse(BEGIN + self.now, seconds)
        for uuid, before in self.counters.items():
            after = self.counters[uuid] = GpuCounters(
                observed_seconds=before.observed_seconds + seconds,
                busy_seconds=before.busy_seconds + seconds * utilization,
                energy_joules=(before.energy_joules or 0.0) + 100 * seconds,
                throttled_seconds=None if held is None else (before.throttled_seconds or 0.0) + held * seconds,
            )
            at = BEGIN + self.now
            self.timeline.observe(uuid, after, at=at, memory=[(at - min(0.2, seconds / 2), used), (at, used)], own=own)

    def settle(self, *words: Voice, patient: bool = True) -> Settled:
        return self.timeline.settle(words, now=BEGIN + self.now, patient=patient)

    def seconds(self, uuid: str = "GPU-0") -> dict[str, float]:
        return {count.stage: round(count.observed_seconds, 6) for count in self.timeline.gpu_counts(uuid)}


def test_a_sample_is_split_by_the_stages_in_it() -> None:
    pod = Pod()
    pod.go_on(1.0, 0.5)
    pod.settle(state(0, 1, run("gen", 0, 0.4), run("ref", 0.4)))
    counts = pod.timeline.gpu_counts("GPU-0")
    assert [(count.stage, count.role) for count in counts] == [("gen", "actor"), ("ref", "actor")]
    assert [count.observed_seconds for count in counts] == pytest.approx([0.4, 0.6])
    assert [count.busy_seconds for count in counts] == pytest.approx([0.2, 0.3])
    assert [count.energy_joules for count in counts] == pytest.approx([40.0, 60.0])
    assert pod.timeline.pod_seconds() == pytest.approx({("", "gen", "actor"): 0.4, ("", "ref", "actor"): 0.6})


def test_time_held_down_is_split_as_load_is() -> None:
    pod = Pod()
    pod.go_on(1.0)
    pod.go_on(2.0, held=0.5)
    pod.go_on(1.0, held=0.0)
    settled = pod.settle(state(0, 4, run("gen", 0, 2), run("ref", 2)))
    held: dict[str, float] = {}
    for share in settled.shares:
        if share.throttled_seconds is not None:
            held[share.part.stage] = held.get(share.part.stage, 0.0) + share.throttled_seconds
    assert held == pytest.approx({"gen": 0.5, "ref": 0.5})


def test_samples_wait_for_a_late_word_and_are_counted_once() -> None:
    pod = Pod()
    for _ in range(20):
        pod.go_on(1.0)
        pod.settle()
    assert pod.seconds() == {}
    told = state(0, 20, run("gen", 0, 12.5), run("update_actor", 12.5))
    for _ in range(3):
        pod.settle(told)
    assert pod.seconds() == {"gen": 12.5, "update_actor": 7.5}
    pod.settle(state(0, 20, run("ref", 0)))
    assert pod.seconds() == {"gen": 12.5, "update_actor": 7.5}, "what was counted stays"


def test_what_nobody_tells_is_unknown_after_a_minute() -> None:
    pod = Pod()
    for _ in range(100):
        pod.go_on(1.0)
        pod.settle()
    assert pod.seconds() == {"unknown": 40.0}
    assert pod.timeline.waiting("GPU-0")[0] == 60.0


def test_the_last_moment_counts_all() -> None:
    pod = Pod()
    for _ in range(10):
        pod.go_on(1.0)
    pod.timeline.finish([state(0, 6, run("gen", 0))], now=BEGIN + 10)
    assert pod.seconds() == {"gen": 6.0, "unknown": 4.0}
    assert pod.timeline.waiting("GPU-0") == (0.0, 0.0, 0.0)


def test_memory_belongs_to_the_stage_of_its_moment() -> None:
    pod = Pod()
    at = BEGIN + 1.0
    counters = GpuCounters(observed_seconds=1.0, busy_seconds=1.0)
    readings = [(at - 0.9, 10), (at - 0.4, 70), (at, 30)]
    pod.timeline.observe("GPU-0", counters, at=at, memory=readings)
    pod.timeline.observe("GPU-0", counters, at=at, memory=readings)
    pod.now = 1.0
    pod.settle(state(0, 1, run("gen", 0, 0.5), run("ref", 0.5)))
    ranges = {c.stage: (c.memory_floor_bytes, c.memory_peak_bytes) for c in pod.timeline.gpu_counts("GPU-0")}
    assert ranges == {"gen": (10, 10), "ref": (30, 70)}


def test_the_energy_of_a_gap_belongs_to_the_stages_of_the_gap() -> None:
    """The load of a gap is not known, but the GPU's own counter of energy ran on."""
    pod = Pod()
    counters = GpuCounters(observed_seconds=1.0, busy_seconds=1.0, energy_joules=2000.0)
    pod.timeline.observe("GPU-0", counters, at=BEGIN + 20)
    pod.now = 20.0
    pod.settle(state(0, 20, run("gen", 0, 15), run("ref", 15)))
    counts = {c.stage: c for c in pod.timeline.gpu_counts("GPU-0")}
    assert counts["gen"].energy_joules == pytest.approx(1500.0)
    assert (counts["gen"].observed_seconds, counts["ref"].observed_seconds) == (0.0, 1.0)
    assert counts["ref"].energy_joules == pytest.approx(500.0)


def test_each_gpu_has_the_stages_of_its_own_rank() -> None:
    pod = Pod(gpus=2)
    counters = GpuCounters(observed_seconds=1.0)
    for number, uuid in enumerate(pod.counters):
        pod.timeline.observe(uuid, counters, at=BEGIN + 1, own=Own(local_rank=number))
    pod.now = 1.0
    pod.settle(state(0, 1, run("ref", 0, 0.25, local_rank=0), run("ref", 0, 0.75, local_rank=1)))
    assert pod.seconds("GPU-0") == {"ref": 0.25, "other": 0.75}
    assert pod.seconds("GPU-1") == {"ref": 0.75, "other": 0.25}


def test_jobs_that_share_a_pod_are_kept_apart() -> None:
    pod = Pod()
    pod.go_on(2.0)
    pod.settle(state(0, 2, run("gen", 0, 1, job="one"), run("gen", 1, job="two")))
    assert [(c.job, c.observed_seconds) for c in pod.timeline.gpu_counts("GPU-0")] == [("one", 1.0), ("two", 1.0)]


def test_stages_past_the_bound_are_counted_together() -> None:
    pod = Pod()
    for number in range(100):
        pod.go_on(1.0)
        pod.settle(state(number, number + 1, run(f"epoch_{number}", number)))
    counts = pod.timeline.gpu_counts("GPU-0")
    assert len(counts) == MAX_STAGES
    assert counts[-1].stage == "other"
    assert counts[-1].observed_seconds == pytest.approx(69.0)
    assert sum(count.observed_seconds for count in counts) == pytest.approx(100.0)


def test_a_clock_that_was_set_back_fills_no_memory() -> None:
    pod = Pod()
    pod.now = 5000.0
    for _ in range(1000):
        pod.now -= 4.0
        pod.go_on(1.0)
        pod.settle()
        assert len(pod.timeline._gpus["GPU-0"].track.pending) <= MAX_PENDING + 1
        assert len(pod.timeline._pod.pending) <= MAX_PENDING + 1
    total = sum(pod.seconds().values()) + pod.timeline.waiting("GPU-0")[0]
    assert total == pytest.approx(1000.0)


def test_samples_that_come_often_wait_in_few_pieces() -> None:
    pod = Pod()
    for _ in range(700):
        pod.go_on(0.1)
        pod.settle()
    assert len(pod.timeline._gpus["GPU-0"].track.pending) <= 70
    assert pod.seconds()["unknown"] == pytest.approx(10.0, abs=1.0)


def test_of_many_readings_the_extremes_are_kept() -> None:
    readings = [(float(number), number) for number in range(MAX_READINGS + 1)]
    kept = few(readings)
    assert len(kept) <= MAX_READINGS
    assert kept[0] == readings[0]
    assert kept[-1] == readings[-1]
    assert few(readings[:-1]) == readings[:-1]


# ---- whatever happens ----

SOURCES = [StageSource.MARKS, StageSource.TITLES, StageSource.RAY_STATE, StageSource.RAY_AGENT]
TIMES = st.floats(-100, 10)
"""Relative to the present."""
INTERVALS = st.builds(
    lambda stage, begin, length, rank: (stage, begin, None if length is None else begin + length, rank),
    st.sampled_from(["gen", "ref", "update_actor", "init", "other"]),
    TIMES,
    st.none() | st.floats(-5, 50),
    st.none() | st.integers(0, 2),
)
WORDS = st.lists(
    st.tuples(st.integers(0, 3), TIMES, TIMES, st.lists(INTERVALS, max_size=6)), max_size=4, unique_by=lambda w: w[0]
)
ENERGY = st.none() | st.floats(0, 700)
MOVES = st.tuples(
    st.sampled_from([0.3, 1.0, 1.0, 1.0, 5.0, 70.0]),
    st.floats(0, 1),
    st.floats(0, 1),
    ENERGY,
    st.booleans(),
    WORDS,
    st.sampled_from([0.0, 0.0, 0.0, 0.0, -30.0, 500.0]),
)


def _words(
    drawn: Sequence[tuple[int, float, float, list[tuple[str, float, float | None, int | None]]]], now: float
) -> list[Voice]:
    voices = []
    for place, known_from, known_until, intervals in sorted(drawn, key=lambda each: each[0]):
        told = tuple(
            StageInterval(
                stage=stage, role="actor", begin=now + begin, end=None if end is None else now + end, local_rank=rank
            )
            for stage, begin, end, rank in intervals
        )
        word = StageWord(
            source=SOURCES[place], known_from=now + known_from, known_until=now + known_until, intervals=told
        )
        voices.append(Voice(word, late=place != 0))
    return voices


def _sums(counts: Sequence[StageCount]) -> tuple[float, float, float]:
    return (
        sum(count.observed_seconds for count in counts),
        sum(count.busy_seconds for count in counts),
        sum(count.energy_joules or 0.0 for count in counts),
    )


@given(moves=st.lists(MOVES, max_size=25), patient=st.booleans())
def test_the_sum_over_the_stages_is_what_was_observed(
    moves: list[tuple[float, float, float, float | None, bool, object, float]], patient: bool
) -> None:
    """Whatever arrives late, twice, out of order or never; with empty and overlapping intervals and a jumping clock."""
    timeline, now, elapsed = StageTimeline(), BEGIN, 0.0
    counters = GpuCounters()
    before: dict[tuple[str, str, str], StageCount] = {}
    for seconds, observed, utilization, watts, sampled, words, jump in moves:
        now += seconds + jump
        elapsed += seconds
        timeline.elapse(now, seconds)
        if sampled:
            energy = counters.energy_joules
            counters = GpuCounters(
                observed_seconds=counters.observed_seconds + seconds * observed,
                busy_seconds=counters.busy_seconds + seconds * observed * utilization,
                energy_joules=energy if watts is None else (energy or 0.0) + watts * seconds,
            )
            memory = [(now - 0.5, int(1e6 * utilization)), (now, int(1e6 * observed))]
            for _ in range(2):
                timeline.observe("GPU-0", counters, at=now, memory=memory, own=Own(local_rank=0))
        timeline.settle(_words(words, now), now=now, patient=patient)  # type: ignore[arg-type]
        counts = timeline.gpu_counts("GPU-0")
        whole = tuple(map(sum, zip(_sums(counts), timeline.waiting("GPU-0"), strict=True)))
        assert whole == pytest.approx((counters.observed_seconds, counters.busy_seconds, counters.energy_joules or 0.0))
        assert sum(timeline.pod_seconds().values()) + timeline.waiting_seconds() == pytest.approx(elapsed)
        after = {(count.job, count.stage, count.role): count for count in counts}
        assert set(before) <= set(after)
        for key, count in before.items():
            assert count.observed_seconds <= after[key].observed_seconds
            assert count.busy_seconds <= after[key].busy_seconds
            assert (count.energy_joules or 0.0) <= (after[key].energy_joules or 0.0)
        before = after
    timeline.finish([], now=now)
    assert timeline.waiting("GPU-0") == (0.0, 0.0, 0.0)
    assert _sums(timeline.gpu_counts("GPU-0")) == pytest.approx(
        (counters.observed_seconds, counters.busy_seconds, counters.energy_joules or 0.0)
    )


@given(words=st.lists(WORDS, min_size=1, max_size=70))
def test_nothing_waits_longer_than_the_watermark(words: list[object]) -> None:
    pod = Pod()
    for drawn in words:
        pod.go_on(1.0)
        pod.settle(*_words(drawn, BEGIN + pod.now))  # type: ignore[arg-type]
        assert pod.timeline.waiting("GPU-0")[0] <= 61.0
        assert len(pod.timeline.gpu_counts("GPU-0")) <= MAX_STAGES


@pytest.mark.parametrize(
    "intervals",
    [
        pytest.param([run("gen", 0)], id="one job"),
        pytest.param([run("gen", 0, job="one"), run("ref", 3, job="two")], id="two jobs at a time"),
        pytest.param([], id="nothing runs"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_no_peak_is_lost(intervals: Sequence[StageInterval], known: bool) -> None:
    """Be its reading there, before the time of which the load is known, or not kept any more."""
    pod = Pod()
    counters = GpuCounters(
        observed_seconds=1.0,
        memory_peak_bytes=90,
        memory_readings=((0.0, 7),),
    )
    readings = [(BEGIN + 4.2, 90), (BEGIN + 9.0, 7)] if known else [(BEGIN + 9.0, 7)]
    pod.timeline.elapse(BEGIN + 10, 10)
    pod.timeline.observe("GPU-0", counters, at=BEGIN + 10, memory=readings)
    pod.now = 10.0
    pod.settle(state(0, 10, *intervals))
    counts = pod.timeline.gpu_counts("GPU-0")
    assert max(count.memory_peak_bytes or 0 for count in counts) == 90
    assert sum(count.observed_seconds for count in counts) == pytest.approx(1.0)
    assert sum(pod.timeline.pod_seconds().values()) == pytest.approx(10.0)


def test_a_reading_behind_the_last_sample_of_all_is_counted() -> None:
    pod = Pod()
    pod.timeline.observe(
        "GPU-0", GpuCounters(observed_seconds=1.0), at=BEGIN + 1, memory=[(BEGIN + 1, 5), (BEGIN + 1.5, 90)]
    )
    pod.timeline.finish([state(0, 2, run("gen", 0, 1.2), run("ref", 1.2))], now=BEGIN + 1.6)
    assert {c.stage: c.memory_peak_bytes for c in pod.timeline.gpu_counts("GPU-0")} == {"gen": 5, "ref": 90}
