# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The loop's turn with sources of a few lines and a virtual clock."""

import json
import os

import pytest

from verl_gpumonitor.model.report import PodStages, RayStage, ReportAnswer
from verl_gpumonitor.model.samples import (
    GpuCounters,
    GpuProcess,
    GpuSample,
    HostSample,
    NodeSample,
    RayAgentSample,
    ReadingHealth,
)
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.model.vocabulary import Ownership, Source
from verl_gpumonitor_sidecar.join import Terms
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.loop import Loop
from verl_gpumonitor_sidecar.ray_watch import RayView
from verl_gpumonitor_sidecar.stage_watch import StageView
from verl_gpumonitor_sidecar.staging import Context


class World:
    """A node of GPUs, a Ray, and what the loop made of them."""

    def __init__(self, *, requested: int = 1, shared_processes: bool = False, context: Context | None = None) -> None:
        self.now = 100.0
        self.node = NodeSample()
        self.view = RayView()
        self.needed: list[bool] = []
        self.urgent = 0
        self.lines: list[dict[str, object]] = []
        self.fault: Exception | None = None
        self.seen = StageView()
        self.titles_needed = True
        self.marks = _Marks()
        self.loop = Loop(
            Terms(gpus_requested=requested),
            node=_Node(self),
            ray=_Ray(self),
            stages=_Stages(self),
            marks=self.marks,
            context=context,
            shared_processes=shared_processes,
            journal=Journal(lambda line: self.lines.append(json.loads(line))),
            urgent=self.hurry,
            clock=lambda: self.now,
            unix_clock=lambda: 1e9 + self.now,
        )

    def hurry(self) -> None:
        self.urgent += 1

    def see(self, *gpus: GpuSample) -> None:
        """Let NVML show these."""
        health = ReadingHealth(collections=1, last_success_at=self.now)
        self.node = NodeSample(source=Source.NVML, gpus=gpus, visible=len(gpus), health=health)

    def gpu(self, uuid: str, used: int = 1, *, pid: int | None = None) -> GpuSample:
        return GpuSample(
            uuid=uuid,
            taken_at=self.now,
            memory_taken_at=self.now,
            memory_used_bytes=used,
            memory_total_bytes=100,
            processes=() if pid is None else (GpuProcess(pid=pid),),
        )


class _Node:
    def __init__(self, world: World) -> None:
        self._world = world

    def latest(self) -> NodeSample:
        if self._world.fault:
            raise self._world.fault
        return self._world.node


class _Ray:
    def __init__(self, world: World) -> None:
        self._world = world

    def latest(self) -> RayView:
        return self._world.view

    def set_needed(self, needed: bool) -> None:
        self._world.needed.append(needed)


class _Stages:
    def __init__(self, world: World) -> None:
        self._world = world

    def latest(self) -> StageView:
        return self._world.seen

    def set_titles_needed(self, needed: bool) -> None:
        self._world.titles_needed = needed


class _Marks:
    def __init__(self) -> None:
        self.problem: str | None = None
        self.own: tuple[StageWord, ...] = ()
        self.uuids: tuple[str, ...] = ()
        self.host: HostSample | None = None
        self.fault: Exception | None = None

    def words(self, now_unix: float) -> tuple[StageWord, ...]:
        assert now_unix > 0
        return self.own

    def cluster_word(self, now_unix: float) -> StageWord:
        if self.fault:
            raise self.fault
        return self.own[0] if self.own else word(now_unix, now_unix)

    def own_uuids(self, now_unix: float) -> tuple[str, ...]:
        assert now_unix > 0
        return self.uuids

    def host_sample(self, now_unix: float) -> HostSample | None:
        assert now_unix > 0
        return self.host


def word(known_from: float, known_until: float, *intervals: StageInterval) -> StageWord:
    return StageWord(source=StageSource.MARKS, known_from=known_from, known_until=known_until, intervals=intervals)


def test_a_turn_publishes_a_picture_and_says_it_once() -> None:
    world = World()
    for _ in range(3):
        world.see(world.gpu("a"))
        world.loop.turn()
        world.now += 1
    assert [own.sample.uuid for own in world.loop.state.gpus] == ["a"]
    assert [line["message"] for line in world.lines] == ["source of GPU values", "state of a GPU"]


def test_ray_is_needed_until_all_gpus_are_known_and_nvml_reads_them() -> None:
    world = World()
    world.loop.turn()
    world.see(world.gpu("a"))
    world.loop.turn()
    world.node = NodeSample()
    world.view = RayView(agent=RayAgentSample(gpus=(world.gpu("a"),)), agent_at=world.now)
    world.loop.turn()
    assert world.needed == [True, False, True]


def test_what_the_controller_relays_names_the_gpus() -> None:
    world = World()
    world.see(world.gpu("a"), world.gpu("b"))
    world.loop.turn()
    assert world.loop.state.ownership is Ownership.UNKNOWN
    world.loop.take_answer(ReportAnswer(accepted=1))
    world.loop.take_answer(ReportAnswer(accepted=2, gpu_uuids=["b"]))
    world.loop.turn()
    assert [own.sample.uuid for own in world.loop.state.gpus] == ["b"]


@pytest.mark.parametrize(
    ("shared", "pid", "own"),
    [
        pytest.param(True, os.getpid(), ["b"], id="a process of this namespace"),
        pytest.param(True, 2**22 + 7, [], id="a pid that is not in our /proc"),
        pytest.param(False, os.getpid(), [], id="no shared namespace: the pid may be anybody's"),
    ],
)
def test_processes_show_whose_a_gpu_is(shared: bool, pid: int, own: list[str]) -> None:
    world = World(shared_processes=shared)
    world.see(world.gpu("a"), world.gpu("b", pid=pid))
    world.loop.turn()
    assert [gpu.sample.uuid for gpu in world.loop.state.gpus] == own


def test_news_are_passed_on() -> None:
    world = World()
    world.see(world.gpu("a", used=50))
    world.loop.turn()
    assert world.urgent == 0
    world.see(world.gpu("a", used=96))
    world.loop.turn()
    assert world.urgent == 1


def test_a_fault_of_ours_stops_no_turn() -> None:
    world = World()
    world.see(world.gpu("a"))
    world.loop.turn()
    world.fault = RuntimeError("x")
    world.now += 60
    world.loop.turn()
    assert world.loop.healthy()
    assert world.lines[-1]["message"] == "a turn failed for a fault of ours"
    assert [own.sample.uuid for own in world.loop.state.gpus] == ["a"]


def test_a_loop_that_does_not_turn_is_not_healthy() -> None:
    world = World()
    world.now += 29
    assert world.loop.healthy()
    world.now += 1
    assert not world.loop.healthy()


# ---- stages ----

WORKER = Context(ray_node_type="worker", started_unix=1e9)


def staged(world: World, seconds: int, utilization: float = 0.5) -> None:
    """Let so many seconds go by."""
    for _ in range(seconds):
        world.now += 1
        observed = world.now - 100.0
        counters = GpuCounters(observed_seconds=observed, busy_seconds=observed * utilization)
        world.see(world.gpu("a"))
        world.node = NodeSample(
            source=Source.NVML,
            gpus=world.node.gpus,
            visible=1,
            health=world.node.health,
            counters={"a": counters},
        )
        world.loop.turn()


def counted(world: World) -> dict[str, float]:
    return {count.stage: count.observed_seconds for count in world.loop.state.stages.counts.get("a", ())}


def test_seconds_are_counted_by_stage_when_the_head_has_spoken() -> None:
    world = World(context=WORKER)
    staged(world, 10)
    assert counted(world) == {}
    begin = 1e9 + 100
    told = PodStages(
        source=StageSource.RAY_STATE,
        known_from=begin,
        known_until=begin + 8,
        intervals=[RayStage("gen", "rollout", begin, begin + 6), RayStage("ref", "ref", begin + 6)],
    )
    world.loop.take_answer(ReportAnswer(accepted=1, stages=told))
    world.loop.take_answer(ReportAnswer(accepted=2))
    staged(world, 1)
    assert counted(world) == {"gen": pytest.approx(6.0), "ref": pytest.approx(2.0)}
    world.loop.end()
    assert sum(counted(world).values()) == pytest.approx(11.0)


def test_another_stage_is_news() -> None:
    world = World(context=WORKER)
    staged(world, 3)
    assert world.urgent == 0
    gen = StageInterval(stage="gen", role="rollout", begin=1e9 + 100)
    for seconds, intervals, urgent in (
        (3, (gen,), 1),
        (3, (), 1),
        (3, (gen,), 1),
        (1, (StageInterval(stage="ref", role="ref", begin=1e9 + 105),), 2),
    ):
        world.marks.own = (word(1e9 + 100, 1e9 + 300, *intervals),)
        staged(world, seconds)
        assert world.urgent == urgent


def test_another_stage_in_the_cluster_is_news_for_a_head_without_gpus() -> None:
    world = World(requested=0)
    world.loop.turn()
    world.seen = StageView(cluster_changes=1)
    world.loop.turn()
    world.loop.turn()
    assert world.urgent == 1
    assert world.loop.state.stages.counts == {}


def test_names_are_wanted_from_the_agent_while_stages_are() -> None:
    world = World(context=WORKER)
    staged(world, 2)
    assert (world.needed, world.titles_needed) == ([True, True], True)
    for known_from, known_until, rests in ((50, 104, True), (50, 90, False), (95, 104, False)):
        world.marks.own = (word(1e9 + known_from, 1e9 + known_until),)
        staged(world, 1)
        assert (world.needed[-1], world.titles_needed) == (not rests, not rests)


def test_titles_that_tell_all_let_the_agent_rest() -> None:
    world = World(context=WORKER)
    for known_from, rests in ((50, True), (95, False)):
        world.seen = StageView(titles=word(1e9 + known_from, 1e9 + 101))
        staged(world, 1)
        assert (world.needed[-1], world.titles_needed) == (not rests, True)


def test_the_agents_page_says_when_to_ask_a_slow_state_api() -> None:
    world = World(requested=0)
    for seconds, wanted in ((1.0, False), (30.0, True)):
        world.seen = StageView(ask_seconds=seconds)
        world.loop.turn()
        assert world.needed[-1] is wanted


def test_marks_name_the_gpus_and_the_host_memory_where_nobody_better_does() -> None:
    world = World(context=WORKER)
    world.marks.uuids = ("b",)
    world.marks.host = HostSample(taken_at=100.0, memory_used_bytes=7, source="marks")
    world.see(world.gpu("a"), world.gpu("b"))
    world.loop.turn()
    assert world.loop.state.ownership is Ownership.MARKS
    assert world.loop.state.host == world.marks.host


def test_a_port_that_is_taken_is_said_once() -> None:
    world = World(context=WORKER)
    world.marks.problem = "UDP 127.0.0.1:9411: Address already in use"
    staged(world, 5)
    assert len([line for line in world.lines if line["message"] == "marks cannot be received"]) == 1


def test_a_fault_with_stages_costs_no_gpu_values() -> None:
    world = World(context=WORKER)
    world.marks.fault = RuntimeError("x")
    staged(world, 2)
    assert [own.sample.uuid for own in world.loop.state.gpus] == ["a"]
    assert len([line for line in world.lines if line["message"] == "stages are not told, for a fault of ours"]) == 1
