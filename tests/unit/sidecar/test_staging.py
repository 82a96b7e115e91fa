# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A pod's seconds by stage, second after second, from sources that speak late: virtual time."""

from collections.abc import Sequence

import msgspec
import pytest

from verl_gpumonitor.model.report import PodStages, RayStage
from verl_gpumonitor.model.samples import GpuCounters, GpuProcess, GpuSample
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.model.vocabulary import Ownership, Source
from verl_gpumonitor_sidecar.staging import Context, Heard, Staging, word_of
from verl_gpumonitor_sidecar.state import OwnGpu, PodState, StagePicture

START = 1e9
STEP = (
    ("gen", "rollout", 20.3),
    ("old_log_prob", "actor", 5.2),
    ("ref", "ref", 4.1),
    ("update_actor", "actor", 10.4),
    ("update_weights", "actor", 3.0),
)
"""Stage, role, seconds."""


def truth(steps: int, begin: float = 10.0) -> list[StageInterval]:
    """What really ran: some steps, one after the other, after the start of the job."""
    at, found = begin, [StageInterval(stage="init", role="actor", begin=START + 1, end=START + begin)]
    for number in range(steps):
        for stage, role, seconds in STEP:
            end = START + at + seconds
            found.append(StageInterval(stage=stage, role=role, begin=START + at, end=end, step=number + 1))
            at += seconds
    return found


def known(intervals: Sequence[StageInterval], source: StageSource, until: float, *, numbered: bool) -> StageWord:
    """What a source knows of it at a moment."""
    begun = [each for each in intervals if each.begin <= until]
    told = tuple(
        StageInterval(
            stage=each.stage,
            role=each.role,
            begin=each.begin,
            end=each.end if each.end is not None and each.end <= until else None,
            step=each.step if numbered else None,
        )
        for each in begun
    )
    return StageWord(source=source, known_from=START, known_until=until, intervals=told)


class World:
    """A pod of GPUs whose stages are known, and what the sidecar makes of it."""

    def __init__(self, *, gpus: int = 2, ray_node_type: str = "worker", steps: int = 4) -> None:
        self.staging = Staging(Context(ray_node_type=ray_node_type, started_unix=START))
        self.truth = truth(steps)
        self.gpus = gpus
        self.now = 0.0
        self.picture = StagePicture()
        self.heard = Heard()

    def state(self, **values: object) -> PodState:
        at = 1000.0 + self.now
        counters = GpuCounters(
            observed_seconds=self.now,
            busy_seconds=self.now / 2,
            energy_joules=self.now * 300,
            memory_readings=((at - 0.5, 50), (at, 60)),
        )
        return PodState(
            gpus_requested=self.gpus,
            source=Source.NVML,
            ownership=Ownership.WHOLE_NODE,
            success=True,
            gpus=tuple(
                OwnGpu(sample=GpuSample(uuid=f"GPU-{number}", taken_at=at, **values), counters=counters)  # type: ignore[arg-type]
                for number in range(self.gpus)
            ),
        )

    def turn(self, heard: Heard, *, final: bool = False) -> None:
        now = 1000.0 + self.now
        self.picture = self.staging.turn(self.state(), heard, now=now, now_unix=START + self.now, final=final)

    def run(self, seconds: float, *, relay_each: float | None = None, agent: bool = False, marks: bool = False) -> None:
        relayed: StageWord | None = None
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            now = START + self.now
            if relay_each is not None and self.now % relay_each == 0:
                relayed = known(self.truth, StageSource.RAY_STATE, now - 4.0, numbered=False)
            self.heard = Heard(
                relayed=relayed,
                agent=known(self.truth, StageSource.RAY_AGENT, now - now % 5, numbered=False) if agent else None,
                marks=(known(self.truth, StageSource.MARKS, now, numbered=True),) if marks else (),
            )
            self.turn(self.heard)

    def seconds(self) -> dict[str, float]:
        return {count.stage: round(count.observed_seconds, 3) for count in self.picture.counts.get("GPU-0", ())}


def test_a_late_word_of_the_head_credits_the_right_seconds() -> None:
    world = World()
    world.run(10 + 4 * 43 + 40, relay_each=15)
    spent = world.seconds()
    for stage, _, seconds in STEP:
        assert spent[stage] == pytest.approx(4 * seconds, abs=0.01)
    assert world.picture.quality.source is StageSource.RAY_STATE
    assert world.picture.quality.steps == 3
    assert [step.number for step in world.picture.steps] == [1, 2, 3]
    step = world.picture.steps[1]
    assert {stage.stage: round(stage.seconds, 3) for stage in step.stages} == {
        stage: seconds for stage, _, seconds in STEP
    }
    assert {round(stage.gpus["GPU-1"].observed_seconds, 3) for stage in step.stages} == {s for _, _, s in STEP}


def test_marks_go_before_all_and_bring_numbers() -> None:
    world = World(steps=3)
    world.run(10 + 43 + 5, relay_each=15, agent=True, marks=True)
    now = world.picture.now
    assert now is not None
    assert (now.stage, now.role, now.step) == ("gen", "rollout", 2)
    assert world.picture.roles == {"GPU-0": "rollout", "GPU-1": "rollout"}
    assert world.picture.quality.source is StageSource.MARKS
    assert world.picture.quality.resolution_seconds == 0.0
    world.run(30, relay_each=15, agent=True, marks=True)
    assert [step.step for step in world.picture.steps] == [1]


def test_while_the_head_is_late_the_agent_tells_the_present() -> None:
    world = World()
    world.run(48, relay_each=15, agent=True)
    assert world.picture.now is not None
    assert world.picture.now.stage == "update_actor"
    assert world.picture.quality.source is StageSource.RAY_STATE


def test_a_head_that_falls_silent_leaves_it_to_the_agent() -> None:
    world = World()
    world.run(30, relay_each=15, agent=True)
    told = world.heard.relayed
    for _ in range(120):
        world.now += 1.0
        now = START + world.now
        agent = known(world.truth, StageSource.RAY_AGENT, now, numbered=False)
        world.turn(Heard(relayed=told, agent=agent))
    quality = world.picture.quality
    assert (quality.source, quality.reason) == (StageSource.RAY_AGENT, "HeadSilent")
    assert "unknown" not in world.seconds()


def test_a_pod_of_which_nobody_tells_anything() -> None:
    world = World(ray_node_type="")
    world.run(30)
    assert world.seconds() == {"unknown": 26.0}, "counted each 5 s"
    world.run(1)
    assert world.seconds() == {"unknown": 31.0}
    quality = world.picture.quality
    assert (quality.source, quality.reason, quality.steps) == (StageSource.NONE, "NoSource", 0)
    assert world.picture.now is None
    assert world.picture.roles == {}


def test_a_worker_waits_for_the_first_word_of_its_head() -> None:
    world = World()
    world.run(30)
    assert world.seconds() == {}
    assert world.picture.quality.reason is None
    world.run(41)
    assert world.seconds() == {"unknown": 11.0}, "counted each 5 s, and a minute late"
    assert world.picture.quality.reason == "HeadSilent"


def test_the_last_turn_counts_all() -> None:
    world = World()
    world.run(30)
    world.now += 1.0
    world.turn(Heard(agent=known(world.truth, StageSource.RAY_AGENT, START + 28, numbered=False)), final=True)
    assert sum(world.seconds().values()) == pytest.approx(31.0)
    assert world.seconds()["gen"] == pytest.approx(18.0)
    assert sum(world.picture.pod_seconds.values()) == pytest.approx(30.0), "since the first turn"


def rank(number: int, end: float) -> StageInterval:
    return StageInterval(stage="ref", role="ref", begin=START, end=START + end, local_rank=number)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        pytest.param((0, 1), [2.0, 4.0], id="as many ranks as GPUs: each is one"),
        pytest.param((0,), [2.0, 2.0], id="fewer: they are the pod's"),
    ],
)
def test_ranks(ranks: tuple[int, ...], seconds: list[float]) -> None:
    world = World()
    world.turn(Heard())
    world.now = 5.0
    intervals = tuple(rank(number, 2.0 + 2.0 * number) for number in ranks)
    word = StageWord(source=StageSource.RAY_STATE, known_from=START, known_until=START + 5, intervals=intervals)
    world.turn(Heard(own=word))
    spent = [
        {count.stage: count.observed_seconds for count in world.picture.counts[uuid]}["ref"]
        for uuid in ("GPU-0", "GPU-1")
    ]
    assert spent == pytest.approx(seconds)


def test_ranks_of_a_job_that_is_over_say_nothing_of_the_next_ones() -> None:
    """The next job has one of the two GPUs, and which of them is not told."""
    world = World()
    over = [msgspec.structs.replace(rank(number, 2.0), job="one") for number in (0, 1)]
    runs = msgspec.structs.replace(rank(0, 40.0), job="two", begin=START + 20)
    word = StageWord(source=StageSource.RAY_STATE, known_from=START, known_until=START + 40, intervals=(*over, runs))
    world.turn(Heard())
    world.now = 19.0
    world.turn(Heard(own=msgspec.structs.replace(word, known_until=START + 19)))
    world.now = 40.0
    world.turn(Heard(own=word))
    spent = [
        {(count.job, count.stage): count.observed_seconds for count in world.picture.counts[uuid]}.get(("two", "ref"))
        for uuid in ("GPU-0", "GPU-1")
    ]
    assert spent == pytest.approx([20.0, 20.0])


def test_processes_on_a_gpu_tell_whose_stage_it_is() -> None:
    world = World(gpus=1)
    intervals = (
        StageInterval(stage="ref", role="ref", begin=START, pid=7),
        StageInterval(stage="gen", role="rollout", begin=START),
    )
    word = StageWord(source=StageSource.TITLES, known_from=START, known_until=START + 5, intervals=intervals)
    world.staging.turn(world.state(), Heard(), now=1000.0, now_unix=START)
    world.now = 5.0
    one = world.state(processes=(GpuProcess(pid=8),)).gpus[0]
    other = OwnGpu(
        sample=GpuSample(uuid="GPU-1", taken_at=1005.0, processes=(GpuProcess(pid=7),)), counters=one.counters
    )
    state = PodState(gpus_requested=2, gpus=(one, other))
    picture = world.staging.turn(state, Heard(titles=word), now=1005.0, now_unix=START + 5)
    assert picture.roles == {"GPU-0": "rollout", "GPU-1": "ref"}


@pytest.mark.parametrize(
    ("whole_host", "on_second", "stage"),
    [
        pytest.param(True, (), "other", id="on a host it is nobody's"),
        pytest.param(True, (8,), "gen", id="unless somebody is on it"),
        pytest.param(True, None, "gen", id="or that is not known"),
        pytest.param(False, (), "gen", id="in a pod it is the job's"),
    ],
)
def test_a_gpu_without_a_process(whole_host: bool, on_second: tuple[int, ...] | None, stage: str) -> None:
    """The first GPU has one, and both pool and rollout are told without any."""
    staging = Staging(Context(ray_node_type="head", started_unix=START, whole_host=whole_host))
    runs = StageInterval(stage="gen", role="rollout", begin=START)
    word = StageWord(source=StageSource.RAY_STATE, known_from=START, known_until=START + 5, intervals=(runs,))
    lists = ((7,), on_second)
    for now in (0.0, 5.0):
        gpus = tuple(
            OwnGpu(
                sample=GpuSample(
                    uuid=f"GPU-{number}",
                    taken_at=now,
                    processes=None if pids is None else tuple(GpuProcess(pid=pid) for pid in pids),
                ),
                counters=GpuCounters(observed_seconds=now),
            )
            for number, pids in enumerate(lists)
        )
        state = PodState(gpus_requested=2, source=Source.NVML, gpus=gpus)
        picture = staging.turn(state, Heard(own=word), now=now, now_unix=START + now)
    spent = [{count.stage: count.observed_seconds for count in picture.counts[uuid]} for uuid in ("GPU-0", "GPU-1")]
    assert spent == [{"gen": 5.0}, {stage: 5.0}]
    assert picture.now is not None
    assert picture.now.stage == "gen"


def test_what_the_controller_passes_on_is_a_word() -> None:
    said = PodStages(
        source=StageSource.RAY_STATE,
        known_from=1.0,
        known_until=9.0,
        intervals=[RayStage("gen", "rollout", 2.0, 3.0, 1, 7, "job", 0.5)],
    )
    assert word_of(said) == StageWord(
        source=StageSource.RAY_STATE,
        known_from=1.0,
        known_until=9.0,
        intervals=(
            StageInterval(
                stage="gen",
                role="rollout",
                begin=2.0,
                end=3.0,
                local_rank=1,
                step=7,
                job="job",
                resolution_seconds=0.5,
            ),
        ),
    )


def test_the_reason_of_the_state_api_is_passed_on() -> None:
    world = World(ray_node_type="head")
    world.turn(Heard(reason="DashboardGuarded", message="wants a token", ask_seconds=60.0))
    quality = world.picture.quality
    assert (quality.reason, quality.message, quality.ask_seconds) == ("DashboardGuarded", "wants a token", 60.0)


def test_what_a_job_was_started_with_holds_at_all_times() -> None:
    """The controller says it once, after some time; marks, while there are any, go before it."""
    world = World(ray_node_type="")
    said = word_of(
        PodStages(
            source=StageSource.LAUNCH,
            known_from=0.0,
            known_until=START + 5,
            intervals=[RayStage(stage="other", role="trainer", begin=0.0)],
        )
    )
    staging = world.staging
    state = PodState(gpus_requested=2)
    picture = StagePicture()
    for second in range(1, 40):
        heard = Heard(relayed=said if second > 5 else None)
        picture = staging.turn(state, heard, now=float(second), now_unix=START + second)
    assert picture.now is not None
    assert (picture.now.stage, picture.now.role, picture.now.since) == ("other", "trainer", None)
    assert (picture.quality.source, picture.quality.reason) == (StageSource.LAUNCH, "NoSource")
    # All but the first second, which was counted before the word came; the last three wait.
    assert picture.pod_seconds["", "other", "trainer"] == pytest.approx(35.0)
    marks = StageWord(
        source=StageSource.MARKS,
        known_from=START + 30,
        known_until=START + 40,
        intervals=(StageInterval(stage="update_actor", role="actor", begin=START + 31),),
    )
    picture = staging.turn(state, Heard(marks=(marks,), relayed=said), now=40.0, now_unix=START + 40)
    assert picture.now is not None
    assert (picture.now.stage, picture.quality.source) == ("update_actor", StageSource.MARKS)
    assert picture.steps == ()
