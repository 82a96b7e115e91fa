# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whose stages count on a host: those of the job on its GPUs."""

from pathlib import Path

import pytest

from tests.unit.stages.fakeray import T0, URL, FakeHead, Task
from verl_gpumonitor.model.report import RayJobInfo
from verl_gpumonitor.model.samples import GpuProcess, GpuSample, NodeSample, RayAgentSample, ReadingHealth
from verl_gpumonitor.model.stages import StageSource, StageWord
from verl_gpumonitor.model.vocabulary import GpuState
from verl_gpumonitor.stages.sources.job_processes import UNLISTED_SECONDS, JobProcesses
from verl_gpumonitor_sidecar.host_job import HostJob, JobStages
from verl_gpumonitor_sidecar.host_program import HostFacts, HostState
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.ray_watch import RayView
from verl_gpumonitor_sidecar.stage_watch import StageView

UPDATE = "ray::WorkerDict.actor_rollout_ref_update_actor"
LISTED = (RayJobInfo(submission_id="raysubmit_1", status="RUNNING"),)
LOOKED = ReadingHealth(collections=1)


def put(proc: Path, pid: int, title: str, *, parent: int = 1) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(title.encode())
    (folder / "stat").write_text(f"{pid} ({title[:15]}) S {parent} " + "0 " * 18)


def word(until: float) -> StageWord:
    return StageWord(source=StageSource.RAY_STATE, known_from=0.0, known_until=until)


class Watch:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.view = StageView()
        self.needed = True

    def latest(self) -> StageView:
        return self.view

    def set_titles_needed(self, needed: bool) -> None:
        self.needed = needed


class Host:
    """A host with one GPU, on which one process may be, and with Ray's workers."""

    def __init__(self, proc: Path) -> None:
        self.processes = JobProcesses(proc)
        self.node = NodeSample()
        self.now = 0.0
        self.lines: list[bytes] = []
        self.job = HostJob(
            lambda: self.node,
            journal=Journal(write=self.lines.append),
            processes=self.processes,
            clock=lambda: self.now,
        )
        self.watch = Watch()
        self.stages = JobStages(self.watch, self.processes)

    def on_gpu(self, *pids: int, listed: bool = True) -> None:
        processes = tuple(GpuProcess(pid=pid) for pid in pids)
        used = 2**34 if pids or not listed else 0
        gpu = GpuSample(uuid="GPU-0", memory_used_bytes=used, processes=processes if listed else None)
        self.node = NodeSample(gpus=(gpu,), health=LOOKED)
        for _ in range(2):
            self.job.turn()
            self.now += UNLISTED_SECONDS

    def said(self, until: float) -> StageView:
        self.watch.view = StageView(own=word(until), titles=word(until), jobs=LISTED)
        return self.stages.latest()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    put(tmp_path, 10, "raylet")
    put(tmp_path, 11, UPDATE, parent=10)
    put(tmp_path, 20, "python3 train.py")
    return Host(tmp_path)


def test_ray_is_heard_while_it_is_the_jobs(host: Host) -> None:
    host.on_gpu(11)
    said = host.said(1.0)
    assert (said.own, said.jobs) == (word(1.0), LISTED)
    assert host.stages.has_ray


def test_ray_is_not_heard_while_another_program_is_on_the_gpus(host: Host) -> None:
    host.on_gpu(20)
    said = host.said(1.0)
    assert (said.own, said.jobs, said.titles) == (None, (), word(1.0))
    assert not host.stages.has_ray
    host.stages.set_titles_needed(False)
    assert not host.watch.needed


def test_what_ray_said_before_it_was_anothers_stays(host: Host, tmp_path: Path) -> None:
    """The seconds of the last stage still wait to be counted."""
    host.on_gpu(11)
    host.said(1.0)
    for file in (tmp_path / "11").iterdir():
        file.unlink()
    (tmp_path / "11").rmdir()
    host.on_gpu()
    said = host.said(9.0)
    assert (said.own, said.titles) == (word(1.0), word(9.0))


def test_nobody_is_believed_before_the_gpus_were_looked_at(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.job.turn()
    assert not host.processes.is_the_jobs(99)
    assert host.said(1.0).own is None
    host.on_gpu(listed=False)
    assert host.processes.is_the_jobs(99), "all may be in another container"
    assert host.said(1.0).own == word(1.0), "the only job of the only Ray"
    host.on_gpu()
    assert host.processes.is_the_jobs(99), "a job in another container that rests is not listed either"


def test_several_jobs_and_a_driver_that_lists_nobody_are_said(host: Host, tmp_path: Path) -> None:
    put(tmp_path, 30, "ray::WorkerDict.critic_update_critic")
    host.on_gpu(listed=False)
    assert b"whose GPUs these are is not known" in host.lines[-1]
    assert not host.processes.has(11)
    host.on_gpu(11)
    assert b"it is known by now" in host.lines[-1]
    assert len(host.lines) == 2


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(GpuSample(uuid="GPU-0", memory_used_bytes=2**34, processes=()), id="one that has just begun"),
        pytest.param(
            GpuSample(uuid="GPU-0", memory_used_bytes=0, processes=(GpuProcess(pid=99),)), id="one that has just ended"
        ),
        pytest.param(GpuSample(uuid="GPU-0", state=GpuState.ERROR), id="whoever it is, the GPU does not answer"),
    ],
)
def test_a_list_that_is_some_seconds_old_makes_no_strangers_ours(host: Host, gpu: GpuSample) -> None:
    """The only job that is to be seen holds no GPU, and the list lacks who does."""
    host.node = NodeSample(gpus=(gpu,), health=LOOKED)
    for _ in range(10):
        host.job.turn()
        host.now += 1.0
    assert not host.processes.has(11)
    assert not host.processes.is_the_jobs(77)
    assert host.said(9.0).own is None
    host.on_gpu(20)
    host.node = NodeSample(gpus=(gpu,), health=LOOKED)
    for _ in range(100):
        host.job.turn()
        host.now += 1.0
    assert not host.processes.has(11), "a driver that has listed somebody lists whoever there is"


def test_the_agent_is_heard_while_ray_is_the_jobs() -> None:
    ours = True
    told = word(1.0)

    class Agent:
        def latest(self) -> RayView:
            return RayView(agent=RayAgentSample(), stages=told)

        def set_needed(self, needed: bool) -> None:
            """It is always."""

    facts = HostFacts(Agent(), is_the_jobs=lambda: ours)  # type: ignore[arg-type]
    assert facts.latest().stages == word(1.0)
    ours, told = False, word(9.0)
    assert facts.latest().stages == word(1.0)


@pytest.mark.parametrize(
    ("nodes", "stages"),
    [
        pytest.param([("n1", "10.9.9.9")], {"update_actor"}, id="the only node"),
        pytest.param([("n0", "192.0.2.7"), ("n1", "127.0.0.1")], {"update_actor"}, id="the node with an own address"),
        pytest.param([("n1", "192.0.2.7"), ("n2", "192.0.2.8")], set(), id="nodes that are all elsewhere"),
    ],
)
def test_whatever_address_ray_chose_its_node_is_this_host(nodes: list[tuple[str, str]], stages: set[str]) -> None:
    tasks = [Task(name=UPDATE.removeprefix("ray::"), node="n1", begin=0.0, end=9.0)]
    head = FakeHead(nodes=nodes, tasks=tasks, now=2.0)
    state = HostState(URL, read=head.read, clock=head.clock, wall=head.wall)
    for now in (2.0, 3.0):
        head.now = now
        state.ask()
    assert {each.stage for each in state.word(T0 + 3.0, "10.0.0.1").intervals} == stages
