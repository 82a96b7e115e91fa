# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""When those who know of stages are asked: virtual time, no network."""

from collections.abc import Mapping

from verl_gpumonitor.model.report import RayJobInfo
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.stage_watch import StageWatch

IP = "10.0.0.1"


class _Cluster:
    def __init__(self, known_until: float, nodes: Mapping[str, tuple[StageInterval, ...]]) -> None:
        self.known_from = 0.0
        self.known_until = known_until
        self.nodes = nodes
        self.ahead: Mapping[str, float] = {}


class _Trouble:
    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.message = "the message"


class _State:
    """A State API asked each `pace` seconds, on which something changes as told."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._due = 0.0
        self.pace = 1.0
        self.changed = False
        self.stage = "gen"
        self.hints = 0
        self.asked = 0
        self.pictures = 0
        self.trouble: _Trouble | None = None

    @property
    def ask_seconds(self) -> float:
        return self.pace

    def due_at(self) -> float:
        return self._due

    def hint(self) -> None:
        self.hints += 1
        self._due = self._world.now

    def ask(self) -> bool:
        self.asked += 1
        self._due = self._world.now + self.pace
        return self.changed

    def cluster(self, now_unix: float) -> _Cluster:
        self.pictures += 1
        return _Cluster(now_unix, {IP: (StageInterval(stage=self.stage, role="actor", begin=1.0),)})

    def word(self, now_unix: float, node_ip: str) -> StageWord:
        assert node_ip == IP
        return StageWord(source=StageSource.RAY_STATE, known_from=0.0, known_until=now_unix)


class _Jobs:
    def __init__(self) -> None:
        self.infos: tuple[RayJobInfo, ...] = ()
        self.asked = 0
        self.fault: Exception | None = None

    def ask(self) -> None:
        self.asked += 1
        if self.fault:
            raise self.fault
        self.infos = (RayJobInfo(submission_id=f"job {self.asked}"),)


class _Titles:
    def __init__(self) -> None:
        self.scans = 0

    def observe(self, at: float) -> bool:
        assert at >= 1e9
        self.scans += 1
        return False

    def word(self, now_unix: float) -> StageWord:
        return StageWord(source=StageSource.TITLES, known_from=0.0, known_until=now_unix)


class World:
    def __init__(self, *, head: bool = True, titles: bool = False) -> None:
        self.now = 0.0
        self.state = _State(self)
        self.jobs = _Jobs()
        self.titles = _Titles()
        self.lines: list[bytes] = []
        self.watch = StageWatch(
            state=self.state if head else None,
            jobs=self.jobs if head else None,
            titles=self.titles if titles else None,
            own_ip=IP,
            journal=Journal(self.lines.append),
            clock=lambda: self.now,
            unix_clock=lambda: 1e9 + self.now,
        )

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.watch.due_at()) < end:
            self.now = max(self.now, due)
            self.watch.turn()
        self.now = end


def test_the_state_api_is_asked_at_its_own_pace_and_jobs_each_15_s() -> None:
    world = World()
    world.run(60)
    assert (world.state.asked, world.jobs.asked) == (60, 4)
    view = world.watch.latest()
    assert view.jobs == (RayJobInfo(submission_id="job 4"),)
    assert view.ask_seconds == 1.0
    assert view.own is not None
    assert view.own.known_until == 1e9 + 59


def test_the_cluster_is_put_together_seldom_and_more_often_while_it_changes() -> None:
    world = World()
    world.run(60)
    assert world.state.pictures == 10
    world.state.changed = True
    world.run(60)
    assert 28 <= world.state.pictures <= 31


def test_another_stage_anywhere_is_news_and_another_task_of_it_is_none() -> None:
    world = World()
    world.state.changed = True
    world.run(30)
    assert world.watch.latest().cluster_changes == 1
    world.state.stage = "update_actor"
    world.run(4)
    assert world.watch.latest().cluster_changes == 2


def test_a_hint_lets_ask_soon() -> None:
    world = World()
    world.state.pace = 30.0
    world.run(5)
    world.watch.hint()
    world.watch.turn()
    assert (world.state.hints, world.state.asked) == (1, 2)


def test_titles_are_read_each_second() -> None:
    world = World(head=False, titles=True)
    world.run(10)
    assert world.titles.scans == 10
    assert world.watch.latest().titles is not None
    assert world.watch.latest().cluster is None
    world.watch.set_titles_needed(False)
    world.run(10)
    world.watch.set_titles_needed(True)
    world.run(2)
    assert world.titles.scans == 12, "they rest while nobody wants them"


def test_trouble_is_said_once_and_passed_on() -> None:
    world = World()
    world.state.trouble = _Trouble("DashboardGuarded")
    world.jobs.fault = ValueError("garbage")
    world.run(60)
    trouble = world.watch.latest().trouble
    assert trouble is not None
    assert trouble.reason == "DashboardGuarded"
    assert len(world.lines) == 2


def test_nobody_to_ask() -> None:
    world = World(head=False)
    world.run(300)
    assert (world.state.asked, world.titles.scans) == (0, 0)
