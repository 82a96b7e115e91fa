# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How often Ray is asked, and what becomes of its silence: virtual time, no network."""

from verl_gpumonitor.model.report import RayNode
from verl_gpumonitor.model.samples import RayAgentSample
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.stages.sources.ray_agent import AgentStages
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.ray_watch import AgentPage, RayWatch

NODE = RayNode(node_ip="10.0.0.1", gpu_uuids=["GPU-a"])


class World:
    """A Ray that answers as told, and notes when it was asked."""

    def __init__(self, *, head: bool = False) -> None:
        self.now = 0.0
        self.nodes: tuple[RayNode, ...] = ()
        self.fault: Exception | None = None
        self.asked_agent: list[float] = []
        self.asked_nodes: list[float] = []
        self.lines: list[bytes] = []
        self.names: tuple[str, ...] = ()
        self.submitted: frozenset[bytes] = frozenset()
        self.changes = 0
        self.watch = RayWatch(
            read_agent=self.read_agent,
            read_nodes=self.read_nodes if head else None,
            stages=AgentStages(),
            changed=self.change,
            journal=Journal(self.lines.append),
            clock=lambda: self.now,
            unix_clock=lambda: 1e9 + self.now,
        )

    def change(self) -> None:
        self.changes += 1

    def read_agent(self) -> AgentPage:
        self.asked_agent.append(self.now)
        if self.fault:
            raise self.fault
        return AgentPage(sample=RayAgentSample(), names=self.names, submitted=self.submitted)

    def read_nodes(self) -> tuple[RayNode, ...]:
        self.asked_nodes.append(self.now)
        if self.fault:
            raise self.fault
        return self.nodes

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.watch.due_at()) < end:
            self.now = max(self.now, due)
            self.watch.turn()
        self.now = end


def test_the_agent_is_asked_each_5_s_while_it_is_needed_and_else_each_15_s() -> None:
    world = World()
    world.run(11)
    assert world.asked_agent == [0, 5, 10]
    world.watch.set_needed(False)
    world.run(40)
    assert world.asked_agent == [0, 5, 10, 15, 30, 45]


def test_the_nodes_are_asked_seldom_and_soon_after_a_change() -> None:
    world = World(head=True)
    world.run(200)
    assert world.asked_nodes == [0, 20, 60, 120, 180]
    world.nodes = (NODE,)
    world.run(80)
    assert world.asked_nodes[5:] == [240, 250, 270]
    assert world.watch.latest().nodes == (NODE,)


def test_silence_is_forgotten_and_said_once() -> None:
    world = World()
    world.run(1)
    assert world.watch.latest().agent is not None
    world.fault = ValueError("garbage")
    world.run(44)
    assert world.watch.latest().agent is not None
    world.run(2)
    assert world.watch.latest().agent is None
    assert len([line for line in world.lines if b"does not answer" in line]) == 1
    world.fault = None
    world.run(6)
    assert world.watch.latest().agent is not None


def test_the_agent_tells_the_stages_of_the_pod() -> None:
    world = World()
    world.names = ("ray::WorkerDict.actor_rollout_ref_update_actor",)
    world.run(11)
    world.names = ("ray::WorkerDict",)
    world.run(5)
    word = world.watch.latest().stages
    assert word is not None
    assert (word.source, word.known_from, word.known_until) == (StageSource.RAY_AGENT, 1e9, 1e9 + 15)
    (interval,) = word.intervals
    assert (interval.stage, interval.role) == ("update_actor", "actor")
    assert world.changes == 2
    world.fault = ValueError("garbage")
    world.run(100)
    assert world.watch.latest().stages == word, "what it said stays true of that time"


def test_what_a_driver_gives_away_is_a_hint() -> None:
    world = World(head=True)
    world.submitted = frozenset({b"WorkerDict.update_actor"})
    world.run(11)
    assert world.changes == 0, "what it gave away before is no change"
    world.submitted = frozenset()
    world.run(10)
    assert world.changes == 1
