# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From a Ray head to the counters of a worker: State API, head's report, controller's relay, worker's timeline.

Virtual time; the head answers as late and as slowly as a real one, and reports go at the pace of real sidecars.
"""

import msgspec
import pytest

from tests.unit.stages.fakeray import GEN_SECONDS, NODES, SERVERS, STAGES, T0, URL, WORKERS, FakeHead, Task, verl_job
from verl_gpumonitor.model.report import PodStages, ReportAnswer
from verl_gpumonitor.model.samples import GpuCounters, GpuSample
from verl_gpumonitor.model.stages import StageSource, StageWord
from verl_gpumonitor.model.vocabulary import Source
from verl_gpumonitor.stages.skew import Skew
from verl_gpumonitor.stages.sources.ray_agent import AgentStages
from verl_gpumonitor.stages.sources.ray_state import RayState
from verl_gpumonitor.timeline.steps import Step
from verl_gpumonitor_operator.controller.relay import ClusterRelay
from verl_gpumonitor_sidecar.cluster_report import ClusterDue
from verl_gpumonitor_sidecar.join import Terms
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.loop import Loop
from verl_gpumonitor_sidecar.stage_watch import StageWatch
from verl_gpumonitor_sidecar.staging import Context, Heard, Staging
from verl_gpumonitor_sidecar.state import ClusterStagesSeen, OwnGpu, PodState, StagePicture

IPS = {"n0": "10.0.0.0", "n1": "10.0.0.1"}
SECONDS = {"gen": GEN_SECONDS, **{stage: seconds for stage, _, seconds in STAGES}}
TIMES_LONGER = 6.0
"""The stages of a real job last longer than those of the head's own tests."""


class Worker:
    """A worker's sidecar: two GPUs, a report each 15 s, sooner when its own Ray agent shows another stage."""

    def __init__(self, node: str, ahead: float = 0.0) -> None:
        """`ahead`: how far its clock is before the head's."""
        self.node = node
        self.unix = T0 + ahead
        self.controller = Skew()
        self.staging = Staging(Context(ray_node_type="worker", started_unix=self.unix))
        self.agent = AgentStages()
        self.agent_word: StageWord | None = None
        self.relayed: StageWord | None = None
        self.reported_at = 0.0
        self.hurry = False
        self.steps: list[Step] = []
        self.picture = StagePicture()

    def turn(self, now: float, *, final: bool = False) -> None:
        counters = GpuCounters(observed_seconds=now, busy_seconds=now / 2)
        gpus = tuple(OwnGpu(sample=GpuSample(uuid=uuid, taken_at=now), counters=counters) for uuid in ("a", "b"))
        state = PodState(gpus_requested=2, source=Source.NVML, gpus=gpus)
        heard = Heard(relayed=self.relayed, agent=self.agent_word)
        self.picture = self.staging.turn(state, heard, now=now, now_unix=self.unix + now, final=final)
        for step in self.picture.steps:
            if not self.steps or step.number > self.steps[-1].number:
                self.steps.append(step)
        if self.steps:
            self.staging.forget_steps(self.steps[-1].number)

    def hear(self, answer: ReportAnswer, now: float) -> None:
        """Take the answer to a report, as the loop does."""
        loop = Loop(
            Terms(gpus_requested=2, sample_interval_seconds=1.0),
            node=None,
            ray=None,
            journal=Journal(lambda _: None),
            unix_clock=lambda: self.unix + now,
        )
        loop.take_answer(answer, ahead=self.controller.bearable_seconds)
        self.relayed = loop._relayed

    def read_agent(self, now: float, tasks: list[Task]) -> None:
        """Read a page that is up to 5 s old."""
        at = now - now % 5.0 - 0.2
        names = tuple(task.name for task in tasks if task.node == self.node and task.begin <= at < task.end)
        self.hurry = self.agent.observe(self.unix + now, names) or self.hurry
        self.agent_word = self.agent.word(self.unix + now)


class Chain:
    """Head, controller and workers."""

    def __init__(self, tasks: list[Task], *, cost: float = 0.005, ahead: float = 0.0, odd: float = 0.0) -> None:
        """`ahead`: how far the clocks of the workers' nodes are before the head's; `odd`: the controller's."""
        self.tasks = tasks
        self.odd = odd
        self.controller = Skew()
        self.head = FakeHead(
            tasks=tasks, actors=[*WORKERS, *SERVERS], nodes=NODES, cost=cost, ahead=dict.fromkeys(IPS, ahead)
        )
        state = RayState(URL, read=self.head.read, clock=self.head.clock, wall=self.head.wall)
        self.watch = StageWatch(
            state=state,
            jobs=None,
            titles=None,
            own_ip=None,
            journal=Journal(lambda _: None),
            clock=self.head.clock,
            unix_clock=self.head.wall,
        )
        self.due = ClusterDue()
        self.relay = ClusterRelay()
        self.workers = [Worker(node, ahead) for node in IPS]
        self.reported_at = 0.0
        self.changes = 0
        self.arrives = True

    def run(self, seconds: float, *, head: bool = True, agent: bool = True) -> None:
        end = self.head.now + seconds
        while self.head.now < end:
            tick = self.head.now + 1.0
            while head and self.watch.due_at() < tick:
                self.head.now = max(self.head.now, self.watch.due_at())
                self.watch.turn()
            self.head.now = max(self.head.now, tick)
            if head:
                self._report_of_head()
            for number, worker in enumerate(self.workers):
                if agent and int(tick) % 5 == number:
                    worker.read_agent(self.head.now, self.tasks)
                worker.turn(self.head.now)
                self._report_of(worker)

    def _report_of_head(self) -> None:
        now = self.head.now
        view = self.watch.latest()
        changed, self.changes = view.cluster_changes != self.changes, view.cluster_changes
        if view.cluster is None or now - self.reported_at < (5.0 if changed else 15.0):
            return
        self.reported_at = now
        seen = ClusterStagesSeen(
            known_from=view.cluster.known_from,
            known_until=view.cluster.known_until,
            nodes=view.cluster.nodes,
            ahead=view.cluster.ahead,
        )
        self.controller.said(float(int(T0 + now + self.odd)), T0 + now, T0 + now)
        told = self.due.take(seen, [], T0 + now, ahead=self.controller.bearable_seconds)
        if told is not None and self.arrives:
            self.relay.take(msgspec.json.decode(msgspec.json.encode(told), type=type(told)), T0 + now)
            self.due.arrived(told)

    def _report_of(self, worker: Worker) -> None:
        now = self.head.now
        if now - worker.reported_at < (5.0 if worker.hurry else 15.0):
            return
        worker.reported_at, worker.hurry = now, False
        said = self.relay.word_for(IPS[worker.node], now=T0 + now)
        if said is not None and self.arrives:
            worker.controller.said(float(int(T0 + now + self.odd)), worker.unix + now, worker.unix + now)
            said = msgspec.json.decode(msgspec.json.encode(said), type=PodStages)
            worker.hear(ReportAnswer(accepted=1, stages=said), now)


def longer(tasks: list[Task]) -> list[Task]:
    return [
        Task(name=t.name, node=t.node, begin=t.begin * TIMES_LONGER, end=t.end * TIMES_LONGER, actor=t.actor, job=t.job)
        for t in tasks
    ]


def assert_right(worker: Worker, steps: int, within: float, times: float = 1.0) -> None:
    assert [step.number for step in worker.steps] == list(range(1, steps + 1))
    for step in worker.steps:
        found = {stage.stage: stage.gpus["a"].observed_seconds for stage in step.stages if stage.stage in SECONDS}
        for stage, seconds in SECONDS.items():
            assert found[stage] == pytest.approx(times * seconds, abs=within), (step.number, stage)


@pytest.mark.parametrize("times", [1.0, TIMES_LONGER])
def test_by_the_state_api_each_stage_is_right_to_a_second_a_step(times: float) -> None:
    tasks = verl_job(5, begin=30) if times == 1.0 else longer(verl_job(5, begin=5))
    chain = Chain(tasks)
    chain.run(30 + 5 * 15.2 * times + 120)
    for worker in chain.workers:
        assert worker.picture.quality.source is StageSource.RAY_STATE
        assert_right(worker, 5, within=1.0, times=times)


@pytest.mark.parametrize(
    ("ahead", "odd"), [(-25, 0), (-12, 0), (-12, -20), (-5, 0), (-5, 20), (5, 0), (5, -20), (12, 0), (12, 20), (25, 0)]
)
def test_a_node_with_a_clock_of_its_own(ahead: float, odd: float) -> None:
    """Before the first task of a worker its clock is not known: the first step may be missed, or wrong by the rest."""
    chain = Chain(longer(verl_job(5, begin=5)), ahead=ahead, odd=odd)
    chain.run(30 + 5 * 15.2 * 6 + 120, agent=False)
    for worker in chain.workers:
        assert len(worker.steps) in (4, 5)
        for step in worker.steps[-4:]:
            found = {stage.stage: stage.gpus["a"].observed_seconds for stage in step.stages if stage.stage in SECONDS}
            assert found == pytest.approx({stage: 6 * seconds for stage, seconds in SECONDS.items()}, abs=1.5)


@pytest.mark.parametrize("odd", [-300.0, -40.0, -20.0, 20.0, 40.0, 300.0])
def test_a_controller_with_a_clock_of_its_own_changes_nothing(odd: float) -> None:
    chain = Chain(longer(verl_job(5, begin=5)), odd=odd)
    chain.run(30 + 5 * 15.2 * 6 + 120, agent=False)
    for worker in chain.workers:
        assert_right(worker, 5, within=1.0, times=TIMES_LONGER)


@pytest.mark.parametrize("ahead", [-300.0, -60.0])
def test_of_a_node_whose_clock_is_far_behind_nothing_is_told_by_its_head(ahead: float) -> None:
    """Rather than by wrong seconds; its own agent tells the stages."""
    for agent in (True, False):
        chain = Chain(longer(verl_job(5, begin=5)), ahead=ahead)
        chain.run(30 + 5 * 15.2 * 6 + 120, agent=agent)
        for worker in chain.workers:
            if agent:
                assert_right(worker, 5, within=5.0, times=TIMES_LONGER)
            else:
                assert {count.stage for count in worker.picture.counts["a"]} == {"unknown"}


def test_by_the_agent_alone_each_stage_is_right_to_5_s_a_step() -> None:
    chain = Chain(longer(verl_job(5)))
    chain.run(3 * 6 + 5 * 15.2 * 6 + 120, head=False)
    for worker in chain.workers:
        assert worker.picture.quality.source is StageSource.RAY_AGENT
        assert_right(worker, 5, within=5.0, times=TIMES_LONGER)


def test_with_many_stored_tasks_the_head_is_asked_seldom_and_steps_stay_right_to_5_s() -> None:
    chain = Chain(longer(verl_job(5)), cost=0.3)
    chain.run(3 * 6 + 5 * 15.2 * 6 + 120)
    for worker in chain.workers:
        assert_right(worker, 5, within=5.0, times=TIMES_LONGER)
    asked = chain.head.asked.count("/api/v0/tasks")
    assert asked * 0.3 / chain.head.now <= 0.0125


def test_a_controller_that_is_away_for_a_while_costs_some_exactness_and_no_step() -> None:
    chain = Chain(longer(verl_job(4)))
    chain.run(60)
    chain.arrives = False
    chain.run(30)
    chain.arrives = True
    chain.run(4 * 15.2 * 6 + 50)
    for worker in chain.workers:
        assert_right(worker, 4, within=5.0, times=TIMES_LONGER)


def test_a_controller_that_forgot_all_costs_an_interval_of_exactness_and_no_second() -> None:
    chain = Chain(longer(verl_job(4)))
    chain.run(150)
    chain.relay = ClusterRelay()
    chain.run(4 * 15.2 * 6)
    for worker in chain.workers:
        assert_right(worker, 4, within=5.0, times=TIMES_LONGER)
        worker.turn(chain.head.now, final=True)
        total = sum(count.observed_seconds for count in worker.picture.counts["a"])
        assert total == pytest.approx(chain.head.now)
