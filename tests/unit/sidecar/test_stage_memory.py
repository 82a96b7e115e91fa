# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Memory by stage: each reading is its own moment's stage's, and no peak is lost, whatever sources and clocks do."""

from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.model.vocabulary import Ownership, Source
from verl_gpumonitor.timeline.accumulate import GpuAccumulator, add_sample
from verl_gpumonitor_sidecar.staging import Context, Heard, Staging
from verl_gpumonitor_sidecar.state import OwnGpu, PodState, StagePicture

UNIX = 1e9
"""Unix time of the moment 0 of the monotonic clock."""
STAGES = ("gen", "old_log_prob", "update_actor", "update_weights")

Stays = Sequence[tuple[str, float]]
"""Stages one after the other, and how long each lasted."""


class World:
    """A GPU whose memory is read fast, all else slowly, and the sidecar's staging, which looks now and then."""

    def __init__(self, stays: Stays, *, interval: float, loaded: bool, source: StageSource) -> None:
        self.staging = Staging(Context(ray_node_type="worker", started_unix=UNIX))
        self.stays = stays
        self.interval = interval
        self.loaded = loaded
        """Whether the GPU tells its load: a MIG instance does not."""
        self.source = source
        self.accumulator = GpuAccumulator()
        self.sample = GpuSample(uuid="GPU-0")
        self.readings: list[tuple[float, int]] = []
        self.now = 0.0
        self.ahead = UNIX
        """What the wall clock is ahead of the monotonic one."""
        self.picture = StagePicture()

    def read(self, at: float, used: int | None, *, full: bool) -> None:
        """One pass of the sampler; `used` None: memory could not be read."""
        self.now = at
        if used is not None:
            self.readings.append((at, used))
        self.sample = GpuSample(
            uuid="GPU-0",
            taken_at=at if full else self.sample.taken_at,
            utilization=0.5 if self.loaded else None,
            memory_taken_at=self.sample.memory_taken_at if used is None else at,
            memory_used_bytes=used,
        )
        self.accumulator = add_sample(self.accumulator, self.sample, interval_seconds=self.interval)

    def look(self, *, told_until: float | None, final: bool = False) -> None:
        """One turn of the loop. `told_until`: up to when the source speaks; None: nobody does."""
        own = OwnGpu(sample=self.sample, counters=self.accumulator.counters)
        state = PodState(
            gpus_requested=1, source=Source.NVML, ownership=Ownership.WHOLE_NODE, success=True, gpus=(own,)
        )
        word = None if told_until is None else self.word(told_until)
        heard = Heard(marks=(word,)) if word and self.source is StageSource.MARKS else Heard(relayed=word)
        self.picture = self.staging.turn(state, heard, now=self.now, now_unix=self.ahead + self.now, final=final)

    def word(self, until: float) -> StageWord:
        ran = tuple(
            StageInterval(
                stage=stage,
                role="actor",
                begin=self.ahead + begin,
                end=self.ahead + end if end <= until else None,
            )
            for stage, begin, end in times(self.stays)
            if begin <= until
        )
        return StageWord(source=self.source, known_from=self.ahead - 1.0, known_until=self.ahead + until, intervals=ran)

    def ranges(self) -> dict[str, tuple[int | None, int | None]]:
        """Floor and peak by stage."""
        counts = self.picture.counts.get("GPU-0", ())
        ranges = {count.stage: (count.memory_floor_bytes, count.memory_peak_bytes) for count in counts}
        return {stage: read for stage, read in ranges.items() if read != (None, None)}


def times(stays: Stays) -> Iterator[tuple[str, float, float]]:
    begin = 0.0
    for stage, seconds in stays:
        yield stage, begin, begin + seconds
        begin += seconds


def expected(stays: Stays, readings: Sequence[tuple[float, int]]) -> Mapping[str, tuple[int, int]]:
    """Floor and peak of all readings in each stage's time."""
    found: dict[str, list[int]] = {}
    for at, used in readings:
        stage = next((stage for stage, begin, end in times(stays) if begin <= at < end), "other")
        found.setdefault(stage, []).append(used)
    return {stage: (min(used), max(used)) for stage, used in found.items()}


def at_no_border(stays: Stays, at: float) -> bool:
    return all(abs(at - edge) > 0.06 for _, begin, end in times(stays) for edge in (begin, end))


STAYS = st.lists(st.tuples(st.sampled_from(STAGES), st.floats(0.2, 12.0)), min_size=1, max_size=8)


@given(
    stays=STAYS,
    used=st.lists(st.integers(1, 1000), min_size=150, max_size=150),
    interval=st.sampled_from([0.1, 0.2, 0.5, 1.0, 2.0]),
    offset=st.floats(0.0, 0.5),
    loaded=st.booleans(),
    late=st.sampled_from([None, 0.0, 3.0, 12.0]),
    stall=st.sampled_from([0, 0, 1, 2]),
)
def test_a_stages_range_is_that_of_the_readings_in_its_time(
    stays: Stays,
    used: list[int],
    interval: float,
    offset: float,
    loaded: bool,
    late: float | None,
    stall: int,
) -> None:
    """`late`: so much is the source behind; None: marks, which are not. `stall`: looks that are left out now and then.

    A reading within a few hundredths of a second of a border may be either's, so that none is there.
    """
    source = StageSource.MARKS if late is None else StageSource.RAY_STATE
    world = World(stays, interval=interval, loaded=loaded, source=source)
    for number, bytes_used in enumerate(used):
        at = offset + number * interval / 2
        world.read(at, bytes_used if at_no_border(stays, at) else None, full=number % 2 == 0)
        if number % 2 == 1 and (number // 2) % (stall + 1) == 0:
            world.look(told_until=at - (late or 0.0))
    world.now += 0.1
    world.look(told_until=world.now, final=True)
    assert world.ranges() == expected(stays, world.readings)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "sample", "sample", "look", "look", "gap", "clock"]),
        st.integers(1, 1000),
        st.sampled_from([-3600.0, -30.0, -0.7, 0.7, 30.0, 3600.0]),
        st.none() | st.floats(0.0, 30.0),
    ),
    max_size=80,
)


@given(stays=STAYS, moves=MOVES, loaded=st.booleans(), marks=st.booleans())
def test_the_gpus_peak_is_the_highest_of_its_stages(
    stays: Stays, moves: list[tuple[str, int, float, float | None]], loaded: bool, marks: bool
) -> None:
    """Whoever is silent, however long nobody looks, wherever the clock is set to, whatever the last reading says."""
    source = StageSource.MARKS if marks else StageSource.RAY_STATE
    world = World(stays, interval=1.0, loaded=loaded, source=source)
    world.read(0.0, 1, full=True)
    for move, used, step, behind in moves:
        if move == "clock":
            world.ahead += step
        elif move == "look":
            world.look(told_until=None if behind is None else world.now - behind)
        else:
            world.read(world.now + (40.0 if move == "gap" else 0.5), used, full=move != "read")
    world.look(told_until=None, final=True)
    peaks = [peak for _, peak in world.ranges().values() if peak is not None]
    assert max(peaks) == world.accumulator.counters.memory_peak_bytes == max(used for _, used in world.readings)


@pytest.mark.parametrize(
    ("stays", "stage"),
    [
        pytest.param([("gen", 5.0), ("update_actor", 55.0)], "update_actor", id="in one stage all the time: its"),
        pytest.param([("gen", 20.0), ("update_actor", 40.0)], "unknown", id="of two stages it is not known whose"),
    ],
)
def test_a_peak_whose_reading_was_missed(stays: Stays, stage: str) -> None:
    """Nobody looked for so long that the reading itself is not kept any more: between the tenth second and the last."""
    world = World(stays, interval=1.0, loaded=True, source=StageSource.MARKS)
    for number in range(100):
        world.read(number / 2, 900 if number == 30 else 5, full=number % 2 == 0)
        if number <= 20:
            world.look(told_until=world.now)
    world.look(told_until=world.now, final=True)
    assert {name for name, (_, peak) in world.ranges().items() if peak == 900} == {stage}
