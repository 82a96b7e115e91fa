# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pod's last half hour: what is kept, for how long, and the trace that is made of it."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sidecar import test_staging as staged
from verl_gpumonitor.cli.diagnose import diagnose
from verl_gpumonitor.cli.traces import TraceReader
from verl_gpumonitor.model.report import StageNow
from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample
from verl_gpumonitor.model.trace import GpuLine, HostLine, MarkLine, NvmlLine, Record, StepLine, XidLine
from verl_gpumonitor.model.vocabulary import GpuState, Source, UnavailableReason
from verl_gpumonitor.timeline.steps import Step
from verl_gpumonitor.timeline.words import Part
from verl_gpumonitor_sidecar.flight_record import FlightRecord, Place
from verl_gpumonitor_sidecar.recorder import MAX_RING_BYTES, SAMPLES, Recorder
from verl_gpumonitor_sidecar.ring import SLOT_BYTES, GpuRing, Kept
from verl_gpumonitor_sidecar.staging import Heard
from verl_gpumonitor_sidecar.state import OwnGpu, PodState, StagePicture

START = 1e9
GIB = 2**30


class Pod:
    """A pod whose pictures are made by hand."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        self.now = 0.0
        self.jitter = 0.0
        self.offset = 0.0
        """By which the Unix clock was set."""
        self.recorder = Recorder(gpus_requested=gpus)
        self.record = FlightRecord(
            self.recorder,
            Place(pod="w-0", node="n-1"),
            clock=lambda: 100.0 + self.now,
            unix_clock=lambda: START + self.offset + self.now,
        )
        self.decided: tuple[Part, ...] = ()
        self.running: StageNow | None = None
        self.steps: tuple[Step, ...] = ()
        self.used = [10 * GIB] * gpus
        self.peaks: list[int] = []
        self.loads = [0.5] * gpus
        self.watts = 300.04
        self.state = GpuState.OK
        self.error: str | None = None
        self.away: UnavailableReason | None = None
        self.xids: dict[int, int] = {}
        self.host: HostSample | None = None
        self.throttled: tuple[str, ...] | None = ()

    def gpu(self, number: int) -> OwnGpu:
        at = 100.0 + self.now + (self.jitter if self.now % 3 else -self.jitter)
        readings = [(at - 0.5, used) for used in self.peaks] + [(at, self.used[number])]
        well = self.state is GpuState.OK
        return OwnGpu(
            sample=GpuSample(
                uuid=f"GPU-{number}",
                index=number,
                state=self.state,
                error=self.error,
                taken_at=at,
                utilization=self.loads[number] if well else None,
                memory_used_bytes=self.used[number] if well else None,
                memory_total_bytes=80 * GIB,
                power_watts=self.watts,
                temperature_celsius=61.0,
                throttled=self.throttled,
            ),
            counters=GpuCounters(memory_readings=tuple(readings), xid_errors=self.xids),
            xid_last_unix=dict.fromkeys(self.xids, START + self.now),
        )

    def turn(self, seconds: int = 1) -> None:
        """Let seconds go by, with a look in each."""
        for _ in range(seconds):
            self.now += 1.0
            state = PodState(
                gpus_requested=self.gpus,
                source=Source.NONE if self.away else Source.NVML,
                unavailable=self.away,
                gpus=tuple(self.gpu(number) for number in range(self.gpus)),
                host=self.host,
                stages=StagePicture(decided=self.decided, now=self.running, steps=self.steps),
            )
            self.recorder.look(state, now=100.0 + self.now, now_unix=START + self.offset + self.now)
            self.decided = ()

    def decide(self, stage: str, begin: float, end: float, *, step: int | None = None) -> None:
        role = {"gen": "rollout", "unknown": "unknown", "other": "unknown"}.get(stage, "actor")
        cut = [Part(START + at, START + min(end, at + 1.0), stage, role, "", step) for at in _whole(begin, end)]
        self.decided += tuple(cut)

    def lines(self) -> list[Record]:
        """The trace, read as any reader does, without a complaint."""
        reader = TraceReader(iter(b"".join(self.record.pieces()).splitlines()))
        found = list(reader.records())
        assert not reader.problems
        assert [line.t for line in found] == sorted(line.t for line in found)
        return found


def _whole(begin: float, end: float) -> list[float]:
    return [begin + number for number in range(int(end - begin + 0.999))]


def marks(lines: Sequence[Record]) -> list[tuple[float, str, str]]:
    return [(line.t, line.state, line.stage) for line in lines if isinstance(line, MarkLine)]


@given(
    st.lists(
        st.builds(
            Kept,
            at=st.floats(0, 4e9),
            utilization=st.none() | st.integers(0, 200).map(lambda n: n / 200),
            memory_used_bytes=st.none() | st.integers(0, 2**44),
            memory_peak_bytes=st.none() | st.integers(0, 2**44),
            power_watts=st.none() | st.integers(0, 1000).map(float),
            temperature_celsius=st.none() | st.integers(-40, 200).map(float),
            throttled=st.none() | st.integers(0, 2**15 - 1),
        ),
        max_size=30,
    ),
    st.integers(2, 10),
)
def test_what_goes_into_a_ring_comes_out_the_newest_alone(samples: list[Kept], capacity: int) -> None:
    """Unknown stays unknown, and zero is zero."""
    ring = GpuRing(capacity)
    for sample in samples:
        ring.add(sample)
    assert list(ring.samples()) == samples[max(0, len(samples) - capacity + 1) :]


def test_what_is_overwritten_while_it_is_read_is_passed_over() -> None:
    ring = GpuRing(4)
    for number in range(4):
        ring.add(Kept(float(number)))
    reading = ring.samples()
    first = next(reading)
    for number in range(4, 6):
        ring.add(Kept(float(number)))
    assert [first.at, *(kept.at for kept in reading)] == [1.0, 3.0]


def test_one_of_two_samples_is_kept_with_the_peak_of_both() -> None:
    pod = Pod()
    for number in range(10):
        pod.peaks = [40 * GIB] if number == 4 else []
        pod.turn()
    samples = [line for line in pod.lines() if isinstance(line, GpuLine)]
    assert [line.t for line in samples] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert [line.memory_peak_bytes == 40 * GIB for line in samples] == [False, False, True, False, False]
    assert samples[0] == GpuLine(
        t=0.0,
        pod="w-0",
        uuid="GPU-0",
        utilization=0.5,
        memory_used_bytes=10 * GIB,
        memory_peak_bytes=10 * GIB,
        power_watts=300.0,
        temperature_celsius=61.0,
        throttled=[],
    )


def test_samples_that_come_a_little_early_or_late_are_kept_at_the_same_pace() -> None:
    pod = Pod()
    pod.jitter = 0.04
    pod.turn(301)
    times = [line.t for line in pod.lines() if isinstance(line, GpuLine)]
    assert len(times) == 151
    assert all(1.8 < after - before < 2.2 for before, after in pairwise(times))


def test_what_cannot_be_read_is_unknown_and_never_zero() -> None:
    pod = Pod()
    pod.throttled = None
    pod.turn(3)
    pod.state, pod.error = GpuState.LOST, "GPU_IS_LOST"
    pod.turn(4)
    pod.state, pod.error = GpuState.OK, None
    pod.turn(2)
    lines = pod.lines()
    assert [line.t for line in lines if isinstance(line, GpuLine)] == [0.0, 2.0, 7.0]
    assert all(line.throttled is None for line in lines if isinstance(line, GpuLine))
    assert [(line.t, line.uuid, line.error) for line in lines if isinstance(line, NvmlLine)] == [
        (3.0, "GPU-0", "GPU_IS_LOST"),
        (7.0, "GPU-0", None),
    ]


def test_while_the_library_is_away_that_is_one_problem() -> None:
    pod = Pod(gpus=2)
    pod.turn(2)
    pod.away, pod.state, pod.error = UnavailableReason.NOT_RESPONDING, GpuState.NOT_RESPONDING, "CALL_TIMED_OUT"
    pod.turn(2)
    pod.away, pod.state, pod.error = None, GpuState.OK, None
    pod.turn(2)
    found = [(line.uuid, line.error) for line in pod.lines() if isinstance(line, NvmlLine)]
    assert found == [(None, "TIMEOUT"), (None, None)]


def test_each_xid_is_told_once() -> None:
    pod = Pod()
    pod.turn(2)
    pod.xids = {79: 1, 31: 2}
    pod.turn(3)
    found = [(line.t, line.code) for line in pod.lines() if isinstance(line, XidLine)]
    assert set(found) == {(2.0, 31), (2.0, 79)}


def test_host_memory_has_the_time_at_which_it_was_said() -> None:
    pod = Pod()
    for _ in range(3):
        pod.host = HostSample(taken_at=100.0 + pod.now, memory_used_bytes=5, memory_limit_bytes=9)
        pod.turn(7)
    lines = [line for line in pod.lines() if isinstance(line, HostLine)]
    assert [(line.t, line.memory_used_bytes, line.shm_size_bytes) for line in lines] == [
        (6.0, 5, None),
        (13.0, 5, None),
    ]


def test_stages_are_begins_and_ends_however_they_were_cut() -> None:
    pod = Pod()
    pod.turn(30)
    pod.decide("gen", 5, 12, step=3)
    pod.turn(5)
    pod.decide("update_actor", 12, 20.5, step=3)
    pod.decide("other", 20.5, 25)
    pod.decide("gen", 25, 35, step=4)
    pod.turn(1)
    assert marks(pod.lines()) == [
        (4.0, "begin", "gen"),
        (11.0, "end", "gen"),
        (11.0, "begin", "update_actor"),
        (19.5, "end", "update_actor"),
        (24.0, "begin", "gen"),
    ]


def test_a_picture_that_is_looked_at_twice_says_nothing_twice() -> None:
    pod = Pod()
    pod.turn(5)
    pod.decide("gen", 1, 4)
    again = pod.decided
    pod.turn(1)
    pod.decided = again
    pod.turn(1)
    assert [mark[1:] for mark in marks(pod.lines())] == [("begin", "gen"), ("end", "gen"), ("begin", "unknown")]


@pytest.mark.parametrize(
    ("running", "told"),
    [
        pytest.param(None, [(9.0, "end", "gen"), (9.0, "begin", "unknown")], id="nobody tells what runs"),
        pytest.param(StageNow(stage="gen", role="rollout"), [], id="the same runs on"),
        pytest.param(
            StageNow(stage="ref", role="actor", since=START + 15),
            [(9.0, "end", "gen"), (9.0, "begin", "unknown"), (14.0, "end", "unknown"), (14.0, "begin", "ref")],
            id="another runs, since a known time",
        ),
    ],
)
def test_the_last_minute_is_what_runs_now(running: StageNow | None, told: list[tuple[float, str, str]]) -> None:
    """A hang must not look like a change: where nothing changed, nothing is told."""
    pod = Pod()
    pod.turn(10)
    pod.decide("gen", 0, 10)
    pod.running = running
    pod.turn(10)
    assert marks(pod.lines()) == [(0.0, "begin", "gen"), *told]


class Recorded(staged.World):
    """A pod whose stages come late from its head, with a recorder at the loop's place."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder(gpus_requested=self.gpus)

    def turn(self, heard: Heard, *, final: bool = False) -> None:
        super().turn(heard, final=final)
        state = msgspec.structs.replace(self.state(), stages=self.picture)
        self.recorder.look(state, now=1000.0 + self.now, now_unix=staged.START + self.now)


def test_what_the_timeline_decides_is_kept_to_the_second() -> None:
    """The head speaks each 15 s of what was 4 s ago: each stage has its own times all the same, and none is lost."""
    world = Recorded()
    world.run(10 + 4 * 43 + 40, relay_each=15)
    kept = [stay for stay in world.recorder.snapshot().stays if stay.stage not in ("other", "unknown", "init")]
    truth = [each for each in world.truth if each.stage != "init"]
    behind = staged.START - 1000.0
    assert [stay.stage for stay in kept] == [each.stage for each in truth]
    for stay, each in zip(kept, truth, strict=True):
        assert stay.begin + behind == pytest.approx(each.begin, abs=0.1)
        assert stay.end + behind == pytest.approx(each.end, abs=0.1)


def test_where_nobody_tells_stages_none_is_told() -> None:
    """A mark of `unknown` would look as if somebody told them."""
    pod = Pod()
    pod.turn(10)
    pod.decide("unknown", 0, 8)
    pod.turn(2)
    assert marks(pod.lines()) == []


def test_steps_are_told_once() -> None:
    pod = Pod()
    pod.turn(10)
    pod.steps = (Step(number=1, step=7, begin=START + 1, end=START + 6, stages=(), job=""),)
    pod.turn(3)
    assert [(line.t, line.step) for line in pod.lines() if isinstance(line, StepLine)] == [(5.0, 7)]


def test_a_day_keeps_half_an_hour() -> None:
    """Nothing grows, the trace begins where the samples do, and says what it begins with."""
    pod = Pod()
    for number in range(1000):
        pod.decide("gen" if number % 2 else "other", number * 10, number * 10 + 10)
        pod.turn(10)
    lines = pod.lines()
    samples = [line.t for line in lines if isinstance(line, GpuLine)]
    assert samples[0] == 0.0
    assert 1790 <= samples[-1] <= 1800
    assert len(samples) == SAMPLES - 1
    told = marks(lines)
    assert told[0][:2] == (0.0, "begin")
    assert len([mark for mark in told if mark[0] == 0.0]) == 1


def test_many_gpus_have_less_time_in_the_same_memory() -> None:
    pod = Pod(gpus=64)
    pod.turn(1500)
    assert sum(ring.count - ring.first for ring in pod.recorder.rings().values()) * SLOT_BYTES <= MAX_RING_BYTES
    newest = [line.t for line in pod.lines() if isinstance(line, GpuLine)]
    assert newest[-1] >= 600


def test_a_clock_that_is_set_tears_nothing_apart() -> None:
    """An hour back: samples and stages stay side by side."""
    pod = Pod()
    pod.turn(10)
    pod.decide("gen", 0, 10)
    pod.turn(1)
    pod.offset = -3600.0
    pod.decide("ref", 10 - 3600, 20 - 3600)
    pod.turn(10)
    lines = pod.lines()
    assert [line.t for line in lines if isinstance(line, GpuLine)] == [float(t) for t in range(0, 21, 2)]
    assert [mark[:3:2] for mark in marks(lines)][:3] == [(0.0, "gen"), (9.0, "gen"), (9.0, "ref")]


@pytest.mark.parametrize("by", [-3600.0, -20.0, 20.0, 3600.0])
def test_what_is_decided_after_the_clock_was_set_has_its_own_time(by: float) -> None:
    """It is told by the clock as it was when it ran."""
    pod = Pod()
    pod.turn(10)
    pod.decide("gen", 0, 8)
    pod.turn(2)
    pod.offset = by
    pod.turn(5)
    pod.decide("ref", 8, 12)
    pod.decide("update_actor", 12 + by, 16 + by)
    pod.turn(1)
    assert [mark[:3:2] for mark in marks(pod.lines())][:5] == [
        (0.0, "gen"),
        (7.0, "gen"),
        (7.0, "ref"),
        (11.0, "ref"),
        (11.0, "update_actor"),
    ]


def test_an_answer_that_broke_off_can_be_told() -> None:
    pod = Pod()
    pod.turn(10)
    pieces = b"".join(pod.record.pieces()).splitlines()
    end = msgspec.json.decode(pieces[-1])
    assert end == {"type": "end", "t": 8.0, "lines": len(pieces) - 2}
    header = msgspec.json.decode(pieces[0])
    assert (header["began_unix"], header["sent_unix"]) == (START + 1, START + 10)


STAGES = (("gen", 30, 0.5, 300.0), ("old_log_prob", 10, 0.9, 450.0), ("update_actor", 50, 0.95, 600.0))
"""Stage, seconds, load, watts."""


def train(pod: Pod, steps: int, *, growth_bytes: int = 0, odd: int | None = None) -> None:
    """Let steps go by. `odd`: a GPU that does a fifth of the work of the others in the update."""
    for step in range(steps):
        begin = pod.now
        for stage, seconds, load, watts in STAGES:
            update = stage == "update_actor"
            pod.used = [(66 * GIB + growth_bytes * step) if update else 40 * GIB] * pod.gpus
            pod.loads = [load / 5 if update and number == odd else load for number in range(pod.gpus)]
            pod.watts = watts
            start = pod.now
            pod.turn(seconds)
            pod.decide(stage, start, pod.now, step=step + 1)
        pod.steps = (Step(number=step + 1, step=step + 1, begin=START + begin, end=START + pod.now, stages=(), job=""),)
    pod.turn()


def found_in(pod: Pod) -> set[tuple[str, str | None]]:
    """Reasons and stages that the diagnosis finds in the pod's record."""
    reader = TraceReader(iter(b"".join(pod.record.pieces()).splitlines()))
    _, findings = diagnose(reader.header, reader.records())
    return {(tracked.finding.reason, tracked.finding.scope.stage) for tracked in findings}


def test_a_healthy_course_has_no_finding() -> None:
    """Neither in whole, nor where the record begins in the middle of it."""
    pod = Pod(gpus=4)
    train(pod, 8)
    assert found_in(pod) == set()
    train(pod, 30)
    assert found_in(pod) == set()


def test_a_peak_that_grows_is_found() -> None:
    pod = Pod(gpus=2)
    train(pod, 20, growth_bytes=6 * GIB // 10)
    assert ("OOMRisk", "update_actor") in found_in(pod)


def test_an_idle_rank_is_found() -> None:
    pod = Pod(gpus=4)
    train(pod, 8, odd=2)
    assert ("Imbalance", "update_actor") in found_in(pod)


def test_a_hang_is_found_while_nothing_is_decided_anew() -> None:
    """All wait for one rank: resident kernels at low power, in a stage that never took so long."""
    pod = Pod(gpus=4)
    train(pod, 6)
    begin = pod.now
    pod.loads, pod.watts = [1.0] * 4, 120.0
    pod.running = StageNow(stage="update_actor", role="actor", since=START + begin)
    for _ in range(60):
        pod.decide("update_actor", pod.now - 10, pod.now, step=7)
        pod.turn(10)
    assert ("Hang", "update_actor") in found_in(pod)
