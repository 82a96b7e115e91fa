# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a recording is made of, part by part: order, GPUs, spans, jobs, /proc, Ray's tasks, and the file."""

import gzip
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from verl_gpumonitor.cli.recording.file import TraceFile
from verl_gpumonitor.cli.recording.gpus import GpuLines
from verl_gpumonitor.cli.recording.jobs import FollowedJob
from verl_gpumonitor.cli.recording.order import InOrder
from verl_gpumonitor.cli.recording.processes import UNLISTED, Processes
from verl_gpumonitor.cli.recording.ray import RayNews, RayWatch, running_names
from verl_gpumonitor.cli.recording.recorder import Recorder, Sources
from verl_gpumonitor.cli.recording.spans import Spans
from verl_gpumonitor.cli.times import seconds
from verl_gpumonitor.model.report import RayJobInfo
from verl_gpumonitor.model.samples import GpuCounters, GpuProcess, GpuSample, NodeSample
from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.model.trace import JobLine, NvmlLine, StepLine, XidLine
from verl_gpumonitor.model.vocabulary import GpuState, UnavailableReason
from verl_gpumonitor.reading.machine import MachineReader
from verl_gpumonitor.stages.cluster import ClusterMap, RayActor, RayTask
from verl_gpumonitor.stages.sources.job_processes import UNLISTED_SECONDS
from verl_gpumonitor.stages.sources.kin import holders_of
from verl_gpumonitor.stages.sources.ray_host import dashboard_url

GIB = 2**30
UPDATE = "ray::WorkerDict.actor_rollout_ref_update_actor"

# --- order -----------------------------------------------------------------------------------------------------


def test_lines_wait_for_each_other_and_come_by_time() -> None:
    order = InOrder(3.0)
    for t in (5.0, 4.0, 4.5, 7.5):
        order.add(StepLine(t=t))
    assert [line.t for line in order.due(8.0)] == [4.0, 4.5, 5.0]
    assert [line.t for line in order.rest()] == [7.5]


def test_a_line_that_comes_too_late_has_the_time_of_the_one_before() -> None:
    order = InOrder(1.0)
    order.add(StepLine(t=5.0, step=1))
    assert len(order.due(6.0)) == 1
    order.add(JobLine(t=3.0, phase="Running"))
    order.add(StepLine(t=3.5, step=2))
    assert [(type(line), line.t) for line in order.rest()] == [(JobLine, 5.0), (StepLine, 5.0)]


# --- GPUs ------------------------------------------------------------------------------------------------------


def node(sample: GpuSample, *readings: tuple[float, int], xids: dict[int, int] | None = None) -> NodeSample:
    counters = GpuCounters(
        memory_readings=readings, xid_errors=xids or {}, xid_last_at=dict.fromkeys(xids or {}, 101.25)
    )
    return NodeSample(gpus=(sample,), counters={sample.uuid: counters})


def sample(at: float, used: int, *pids: int) -> GpuSample:
    processes = tuple(GpuProcess(pid=pid, memory_used_bytes=GIB) for pid in pids)
    return GpuSample(uuid="GPU-a", taken_at=at, memory_used_bytes=used, memory_taken_at=at, processes=processes)


def test_a_peak_between_two_lines_is_not_missed() -> None:
    lines = GpuLines("h", began=100.0)
    lines.events(node(sample(100.0, 5), (99.0, 90), (100.5, 70), (101.0, 5)), 101.0)
    lines.events(node(sample(101.0, 5), (101.0, 5), (101.5, 60)), 101.5)
    (line,) = lines.samples(node(sample(101.0, 5)), lambda _: None)
    assert (line.t, line.memory_used_bytes, line.memory_peak_bytes) == (1.0, 5, 70)
    lines.events(node(sample(102.0, 8), (101.0, 5), (101.5, 60), (102.0, 8)), 102.0)
    (line,) = lines.samples(node(sample(102.0, 8)), lambda _: None)
    assert line.memory_peak_bytes == 8


def test_a_sample_makes_one_line() -> None:
    lines = GpuLines("h", began=100.0)
    assert len(lines.samples(node(sample(101.0, 5)), lambda _: None)) == 1
    assert lines.samples(node(sample(101.0, 5)), lambda _: None) == []


def test_processes_are_written_when_they_change_and_now_and_then() -> None:
    lines = GpuLines("h", began=100.0)
    told = []
    for at, pids in ((101.0, (7,)), (102.0, (7,)), (103.0, (7, 8)), (104.0, (7, 8)), (115.0, (7, 8))):
        (line,) = lines.samples(node(sample(at, 5, *pids)), lambda pid: f"p{pid}")
        told.append(None if line.processes is None else [process.title for process in line.processes])
    assert told == [["p7"], None, ["p7", "p8"], None, ["p7", "p8"]]


def test_an_error_and_its_end_are_told_once() -> None:
    lines = GpuLines("h", began=100.0)
    lost = GpuSample(uuid="GPU-a", state=GpuState.LOST, error="GPU_IS_LOST")
    hung = GpuSample(uuid="GPU-a", state=GpuState.NOT_RESPONDING, error="CALL_TIMED_OUT")
    found = [lines.events(node(one), 101.0) for one in (sample(101.0, 5), lost, lost, hung, sample(102.0, 5))]
    assert [[line.error for line in each if isinstance(line, NvmlLine)] for each in found] == [
        [],
        ["GPU_IS_LOST"],
        [],
        ["TIMEOUT"],
        [None],
    ]
    assert lines.samples(node(lost), lambda _: None) == []


def test_a_library_that_is_away_is_one_problem() -> None:
    lines = GpuLines("h", began=100.0)
    lost = GpuSample(uuid="GPU-a", state=GpuState.LOST, error="UNKNOWN")
    away = NodeSample(gpus=(lost,), unavailable=UnavailableReason.NVML_ERROR, error="DRIVER_NOT_LOADED")
    (line,) = lines.events(away, 101.0)
    assert isinstance(line, NvmlLine)
    assert (line.uuid, line.error) == (None, "DRIVER_NOT_LOADED")


def test_each_xid_is_a_line_with_its_own_time() -> None:
    lines = GpuLines("h", began=100.0)
    lines.events(node(sample(101.0, 5), xids={79: 1}), 101.5)
    found = lines.events(node(sample(101.0, 5), xids={79: 3}), 102.0)
    assert found == [XidLine(t=1.25, pod="h", uuid="GPU-a", code=79)] * 2


# --- spans -----------------------------------------------------------------------------------------------------


def span(begin: float, end: float | None = None, rank: int | None = None, stage: str = "gen") -> StageInterval:
    return StageInterval(stage=stage, role="rollout", begin=begin, end=end, local_rank=rank, pid=1)


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        pytest.param([[span(1)], [span(1)], [span(1, 4)], [span(1, 4)]], ["begin 1", "end 4"], id="each once"),
        pytest.param([[span(1, 4)]], ["begin 1", "end 4"], id="over before it was seen"),
        pytest.param([[span(1)], []], ["begin 1", "end 101"], id="not told of any more"),
        pytest.param([[span(1, 2), span(3)]], ["begin 1", "end 2", "begin 3"], id="by time"),
    ],
)
def test_spans(looks: Sequence[Sequence[StageInterval]], told: Sequence[str]) -> None:
    spans = Spans()
    changes = [change for number, look in enumerate(looks) for change in spans.look(look, 100.0 + number)]
    assert [f"{change.state} {change.at:g}" for change in changes] == told


def test_an_end_has_the_rank_of_its_begin() -> None:
    spans = Spans()
    spans.look([span(1, rank=None)], 2.0)
    (end,) = spans.look([span(1, 3, rank=0)], 4.0)
    assert end.interval.local_rank is None


# --- Ray -------------------------------------------------------------------------------------------------------


def job(status: str, name: str = "job-1") -> RayJobInfo:
    return RayJobInfo(submission_id=name, status=status, entrypoint=f"python3 {name}.py")


def test_a_job_is_followed_to_its_end_and_then_the_next_one() -> None:
    followed = FollowedJob()
    phases = []
    for infos in (
        [job("FAILED", "old")],
        [job("PENDING"), job("FAILED", "old")],
        [job("RUNNING"), job("FAILED", "old")],
        [job("RUNNING", "job-2"), job("SUCCEEDED")],
        [job("RUNNING", "job-2"), job("SUCCEEDED")],
        [job("RUNNING", "job-2"), job("SUCCEEDED")],
    ):
        change = followed.look(infos)
        phases.append(None if change is None else change.phase)
    assert phases == [None, "Pending", "Running", "Succeeded", "Running", None]
    assert followed.first is not None
    assert followed.first.submission_id == "job-1"


def test_of_two_jobs_of_one_ray_it_is_not_known_which_is_recorded() -> None:
    followed = FollowedJob()
    assert followed.look([job("RUNNING", "job-2"), job("RUNNING")]) is None
    assert followed.first is None
    change = followed.look([job("RUNNING", "job-2"), job("SUCCEEDED")])
    assert change is not None


def task(name: str, number: int, begin: float | None = 5.0, actor: str = "") -> RayTask:
    return RayTask(task_id=f"t{number}", name=name, node_id="n", pid=41, begin=begin, actor_id=actor)


def test_many_calls_of_a_server_are_one_thing_since_the_first() -> None:
    calls = [task("vLLMHttpServer.generate", number, 9.0 - number) for number in range(3)]
    (thing,) = running_names(calls, ClusterMap())
    assert (thing.stage, thing.begin, thing.pid) == ("vLLMHttpServer.generate", 7.0, 41)


def test_a_worker_has_its_rank_and_what_nobody_knows_is_left_out() -> None:
    actor = RayActor(actor_id="a", class_name="WorkerDict", name="klmIFKWorkerDict_0:5", node_id="n")
    tasks = [task("WorkerDict.actor_rollout_ref_update_actor", 1, actor="a"), task("score", 2), task("WorkerDict", 3)]
    (thing,) = running_names(tasks, ClusterMap((), (actor,)))
    assert (thing.key, thing.local_rank) == ("t1", 5)


def test_the_dashboard_is_where_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert dashboard_url(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert dashboard_url(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://10.0.0.1:8265/")
    assert dashboard_url(None) == "http://10.0.0.1:8265"
    assert dashboard_url("http://10.0.0.2:8265") == "http://10.0.0.2:8265"


# --- /proc -----------------------------------------------------------------------------------------------------


class Proc:
    """A /proc of our own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(
        self, pid: int, command: str, *, parent: int = 1, pages: int = 10, container: str = "", inner: int | None = None
    ) -> None:
        """A process. `container`: 64 hexadecimal digits of a runtime's, or nothing; `inner`: its number therein."""
        folder = self.path / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "cmdline").write_bytes(
            command.replace(" ", "\0").encode() if command[:5] != "ray::" else command.encode()
        )
        name = command.split()[0].rpartition("/")[2] if command else "x"
        (folder / "stat").write_text(f"{pid} ({name[:15]}) S {parent} " + "0 " * 18)
        (folder / "cgroup").write_text(f"0::/kubepods/pod1/{container}\n" if container else "0::/session-3.scope\n")
        (folder / "status").write_text(f"Name:\tx\nNSpid:\t{pid}" + (f"\t{inner}" if inner else "") + "\n")
        (folder / "statm").write_text(f"100 {pages} 0 0 0 0 0")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.path / str(pid))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def titles(processes: Processes, now: float, *, ray: bool = True) -> list[tuple[int, str]]:
    return [(new.pid, new.title) for new in processes.titles(now, ray=ray)]


def test_a_title_is_told_when_it_changes(proc: Proc) -> None:
    processes = Processes(proc.path)
    proc.put(3, "raylet")
    proc.put(7, "ray::WorkerDict", parent=3)
    proc.put(8, "VLLM::EngineCore", parent=3)
    proc.put(9, "bash -c x")
    assert titles(processes, 0.0) == [(8, "VLLM::EngineCore")]
    proc.put(7, UPDATE, parent=3)
    assert [(new.pid, new.title, new.parent_pid) for new in processes.titles(0.5)] == [(7, UPDATE, 3)]
    assert titles(processes, 1.0) == []
    proc.put(7, "ray::WorkerDict", parent=3)
    assert titles(processes, 1.5) == [(7, "ray::WorkerDict")]


def test_a_server_is_idle_only_after_a_while(proc: Proc) -> None:
    processes = Processes(proc.path)
    proc.put(7, "ray::vLLMHttpServer.generate")
    assert titles(processes, 0.0) == [(7, "ray::vLLMHttpServer.generate")]
    proc.put(7, "ray::vLLMHttpServer")
    assert titles(processes, 0.5) == []
    proc.put(7, "ray::vLLMHttpServer.generate")
    assert titles(processes, 1.0) == []
    proc.put(7, "ray::vLLMHttpServer")
    assert titles(processes, 1.5) == []
    assert titles(processes, 4.0) == [(7, "ray::vLLMHttpServer")]


def test_a_process_that_ends_in_a_stage_has_left_it(proc: Proc) -> None:
    processes = Processes(proc.path)
    proc.put(7, UPDATE)
    titles(processes, 0.0)
    proc.end(7)
    assert titles(processes, 0.5) == [(7, "ray::WorkerDict")]


def test_a_process_that_nobody_has_waited_for_has_left_it_too(proc: Proc) -> None:
    processes = Processes(proc.path)
    proc.put(7, UPDATE)
    titles(processes, 0.0)
    assert processes.sees_ray
    proc.put(7, "")
    assert titles(processes, 0.5) == [(7, "ray::WorkerDict")]
    assert titles(processes, 1.0) == []
    assert not processes.sees_ray


@pytest.mark.parametrize(
    ("command", "leads"),
    [
        ("python3 -m verl.trainer.main_ppo a=b", True),
        ("/usr/bin/python3.10 -u /opt/verl/trainer/main_ppo.py", True),
        ("/usr/bin/python3 /usr/bin/torchrun --nproc 8 -m verl.trainer.sft_trainer", True),
        ("bash -c python3\u00a0-m\u00a0verl.trainer.main_ppo", False),
        ("vim verl/trainer/main_ppo.py", False),
        ("python3 -m pip install verl", False),
        ("python3 /usr/bin/ray job submit --address http://h:8265 -- python3 -m verl.trainer.main_ppo a=b", False),
    ],
)
def test_the_driver_is_known_by_its_command(proc: Proc, command: str, leads: bool) -> None:
    processes = Processes(proc.path)
    proc.put(5, command)
    processes.titles(0.0)
    assert processes.command == (command if leads else None)


def test_a_forked_child_has_its_title_from_its_parent(proc: Proc) -> None:
    processes = Processes(proc.path)
    proc.put(7, UPDATE, parent=3)
    proc.put(3, "raylet")
    proc.put(20, UPDATE, parent=7)
    assert titles(processes, 0.0) == [(7, UPDATE)]


def test_where_the_state_api_tells_tasks_titles_of_ray_are_taken_back(proc: Proc) -> None:
    processes = Processes(proc.path)
    proc.put(7, UPDATE)
    titles(processes, 0.0)
    assert titles(processes, 0.5, ray=False) == [(7, "ray::WorkerDict")]
    assert titles(processes, 1.0, ray=False) == []


def test_secrets_are_not_kept(proc: Proc) -> None:
    processes = Processes(proc.path)
    proc.put(5, "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 HF_TOKEN=hf_abcdefghijkl")
    processes.titles(0.0)
    assert processes.command == "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 HF_TOKEN=***"
    assert processes.title_of(5) == processes.command
    assert processes.title_of(6) is None


def test_the_largest_processes_come_first(proc: Proc) -> None:
    for pid, pages in ((5, 10), (6, 30), (7, 20)):
        proc.put(pid, f"p{pid}", pages=pages)
    found = Processes(proc.path).largest(2)
    assert [(one.pid, one.title, one.rss_bytes) for one in found] == [
        (6, "p6", 30 * os.sysconf("SC_PAGE_SIZE")),
        (7, "p7", 20 * os.sysconf("SC_PAGE_SIZE")),
    ]


# --- whose processes they are ----------------------------------------------------------------------------------

POD, OTHER_POD = "a" * 64, "b" * 64
PPO = "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8"
SFT = "python3 -m verl.trainer.sft_trainer model=qwen"


def other_pods_ray(proc: Proc) -> None:
    """Another pod of the node, in which a Ray job runs."""
    proc.put(40, "raylet", container=OTHER_POD)
    proc.put(41, UPDATE, parent=40, container=OTHER_POD)
    proc.put(42, "ray::IDLE", parent=40, container=OTHER_POD)
    proc.put(43, PPO, parent=40, container=OTHER_POD)
    proc.put(44, f"python3 /usr/bin/ray job submit -- {PPO}", container=OTHER_POD)


def looked(processes: Processes, *holders: int, listed: bool = True) -> set[int]:
    """Look at /proc while these hold the GPUs; return whose titles are told."""
    processes.on_gpus(frozenset(holders) if listed else None)
    return {new.pid for now in (0.0, UNLISTED_SECONDS) for new in processes.titles(now)}


def said(processes: Processes) -> tuple[str | None, str | None]:
    """The job's command, and why something is not told."""
    return processes.command, processes.note


def test_another_pods_job_is_not_told_for_ones_own(proc: Proc) -> None:
    other_pods_ray(proc)
    proc.put(7, "python3 train.py")
    processes = Processes(proc.path)
    assert looked(processes, 7) == set()
    assert (processes.command, processes.note) == (None, None)
    assert not processes.sees_ray
    assert not any(map(processes.is_the_jobs, (40, 41, 42, 43, 44)))
    assert processes.is_the_jobs(7)


def test_nothing_is_told_before_it_is_known_who_holds_the_gpus(proc: Proc) -> None:
    other_pods_ray(proc)
    processes = Processes(proc.path)
    assert looked(processes) == set()
    assert (processes.command, processes.sees_ray) == (None, False)
    assert looked(processes, 41) == {41}, "what it does is told as soon as it is"
    assert (processes.command, processes.sees_ray) == (PPO, True)


@pytest.mark.parametrize("container", [POD, ""], ids=["in a container", "on the host"])
def test_the_driver_and_all_workers_of_a_ray_job_are_its_own(proc: Proc, container: str) -> None:
    other_pods_ray(proc)
    proc.put(10, "raylet", container=container)
    for pid in (11, 12):
        proc.put(pid, UPDATE, parent=10, container=container)
    proc.put(13, "ray::JobSupervisor", parent=10, container=container)
    proc.put(14, f"{SFT}", parent=13, container=container)
    processes = Processes(proc.path)
    assert looked(processes, 11) == {11, 12}
    assert processes.command == SFT


def test_a_driver_in_the_container_is_the_jobs_whoever_began_it(proc: Proc) -> None:
    other_pods_ray(proc)
    proc.put(10, "raylet", container=POD)
    proc.put(11, UPDATE, parent=10, container=POD)
    proc.put(20, SFT, container=POD)
    processes = Processes(proc.path)
    looked(processes, 11)
    assert processes.command == SFT


def test_a_driver_on_the_host_is_that_of_the_ray_beside_it_if_it_is_the_only_one(proc: Proc) -> None:
    proc.put(10, "raylet")
    proc.put(11, UPDATE, parent=10)
    proc.put(19, "bash")
    proc.put(20, PPO, parent=19)
    one = Processes(proc.path)
    looked(one, 11)
    assert one.command == PPO
    proc.put(21, SFT, parent=19)
    two = Processes(proc.path)
    looked(two, 11)
    assert two.command is None


def test_ranks_have_the_command_of_whoever_began_them(proc: Proc) -> None:
    launcher = f"python3 /usr/bin/torchrun --nproc 2 -m {SFT.removeprefix('python3 -m ')}"
    proc.put(20, launcher)
    for pid in (21, 22):
        proc.put(pid, SFT, parent=20)
    processes = Processes(proc.path)
    looked(processes, 21, 22)
    assert processes.command == launcher


def test_of_two_jobs_on_the_gpus_no_command_is_told(proc: Proc) -> None:
    proc.put(7, SFT, container=POD)
    proc.put(8, PPO, container=OTHER_POD)
    processes = Processes(proc.path)
    looked(processes, 7, 8)
    assert processes.command is None
    assert "Several jobs" in (processes.note or "")
    proc.end(8)
    looked(processes, 7)
    assert processes.command is None, "whose the record is is not known any better"


def test_the_next_job_on_the_gpus_does_not_change_the_command(proc: Proc) -> None:
    proc.put(7, SFT, container=POD)
    processes = Processes(proc.path)
    looked(processes, 7)
    proc.end(7)
    proc.put(8, PPO, container=OTHER_POD)
    looked(processes, 8)
    assert processes.command == SFT


def test_a_number_that_is_given_to_another_process_is_anothers(proc: Proc) -> None:
    proc.put(7, "python3 train.py")
    processes = Processes(proc.path)
    looked(processes, 7)
    proc.end(7)
    looked(processes)
    proc.put(7, UPDATE, container=OTHER_POD)
    assert looked(processes) == set()


def test_where_the_driver_lists_nobody_the_only_job_is_told(proc: Proc) -> None:
    other_pods_ray(proc)
    processes = Processes(proc.path)
    assert looked(processes, listed=False) == {41}
    assert (processes.command, processes.note) == (PPO, None)
    proc.put(20, SFT, container=POD)
    looked(processes, listed=False)
    assert (processes.command, processes.note) == (PPO, None), "whose record it is is known by now"


def test_where_the_driver_lists_nobody_and_there_are_two_jobs_none_is_told(proc: Proc) -> None:
    other_pods_ray(proc)
    proc.put(20, SFT, container=POD)
    processes = Processes(proc.path)
    assert looked(processes, listed=False) == set()
    assert looked(processes, 999) == set(), "nor where the processes that it lists are not to be seen"
    assert said(processes) == (None, UNLISTED)
    assert not processes.sees_nobody
    assert looked(processes, 41) == {41}
    assert said(processes) == (PPO, None)


def test_a_mark_tells_the_number_that_its_process_has_in_its_container(proc: Proc) -> None:
    proc.put(10, "raylet", container=POD)
    proc.put(11, UPDATE, parent=10, container=POD)
    proc.put(12, PPO, parent=10, container=POD, inner=7)
    proc.put(43, SFT, container=OTHER_POD, inner=9)
    processes = Processes(proc.path)
    looked(processes, 11)
    assert processes.is_the_jobs(7)
    assert not processes.is_the_jobs(9)


def gpu(used: int, *pids: int, listed: bool = True, state: GpuState = GpuState.OK) -> GpuSample:
    processes = tuple(GpuProcess(pid=pid) for pid in pids) if listed else None
    return GpuSample(uuid=f"GPU-{used}", memory_used_bytes=used, processes=processes, state=state)


@pytest.mark.parametrize(
    ("gpus", "holders"),
    [
        pytest.param([gpu(0), gpu(1)], set(), id="nobody is there"),
        pytest.param([gpu(5 * GIB, 7), gpu(6 * GIB, 7, 8)], {7, 8}, id="some are"),
        pytest.param([gpu(5 * GIB, listed=False)], None, id="the driver does not list them"),
        pytest.param([gpu(5 * GIB), gpu(1)], None, id="memory is held, and nobody listed"),
        pytest.param([gpu(GIB // 2), gpu(1)], set(), id="the driver's own part"),
        pytest.param([gpu(5 * GIB), gpu(6 * GIB, 7)], {7}, id="listed on one"),
        pytest.param([gpu(5 * GIB, 7, state=GpuState.LOST)], None, id="the only one is lost"),
    ],
)
def test_who_holds_the_gpus(gpus: list[GpuSample], holders: set[int] | None) -> None:
    assert holders_of(NodeSample(gpus=tuple(gpus))) == holders


@pytest.mark.parametrize(
    ("held", "jobs", "command"),
    [
        pytest.param(gpu(5 * GIB, listed=False), [job("RUNNING")], "python3 job-1.py", id="nobody is listed, one job"),
        pytest.param(gpu(5 * GIB, 999), [job("RUNNING")], "python3 job-1.py", id="who is listed is in no sight"),
        pytest.param(gpu(5 * GIB, listed=False), [job("RUNNING"), job("RUNNING", "b")], None, id="two jobs"),
        pytest.param(gpu(5 * GIB, 7), [job("RUNNING")], None, id="somebody else holds the GPU"),
        pytest.param(gpu(0), [job("RUNNING")], None, id="nobody holds the GPU yet"),
    ],
)
def test_a_ray_of_which_no_process_is_in_sight(
    proc: Proc, held: GpuSample, jobs: list[RayJobInfo], command: str | None
) -> None:
    """As in a container beside Ray's: its dashboard answers, and its processes are not to be seen."""
    proc.put(7, "python3 train.py")
    watch = RayWatch(agents=list)
    watch.latest = lambda: RayNews(jobs=tuple(jobs), ray_version="2.46.0")  # type: ignore[method-assign]
    sources = Sources(
        node=lambda: NodeSample(gpus=(held,)), machine=MachineReader(), processes=Processes(proc.path), ray=watch
    )
    now = 0.0
    recorder = Recorder(sources, interval=1.0, pod="h", clock=lambda: now)
    recorder.turn()
    assert recorder.header().entrypoint is None, "a list may be some seconds old"
    now = UNLISTED_SECONDS
    recorder.turn()
    header = recorder.header()
    assert header.entrypoint == command
    assert header.workload is not None
    assert header.workload.name == ("job-1" if command else "h")
    assert header.frameworks is not None
    assert (header.frameworks.ray == "2.46.0") == (command is not None)


# --- the file --------------------------------------------------------------------------------------------------


def line(number: int) -> bytes:
    return msgspec.json.encode({"n": number}) + b"\n"


@pytest.mark.parametrize("name", ["run.jsonl.gz", "run.jsonl"])
def test_a_file_is_whole_after_each_flush(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    file = TraceFile(path, line(0))
    expected = line(0)
    for number in range(1, 30):
        file.write(line(number))
        file.flush()
        expected += line(number)
        raw = path.read_bytes()
        assert (gzip.decompress(raw) if name.endswith(".gz") else raw) == expected
        assert file.size_bytes == len(raw)
    file.close()


@pytest.mark.parametrize("name", ["run.jsonl.gz", "run.jsonl"])
def test_the_first_line_can_be_another_one_later(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    file = TraceFile(path, line(0))
    file.write(line(1))
    file.flush()
    file.rewrite_head(line(10**12))
    file.write(line(2))
    file.flush()
    file.rewrite_head(line(7))
    file.write(line(3))
    file.flush()
    file.close()
    raw = path.read_bytes()
    assert (gzip.decompress(raw) if name.endswith(".gz") else raw) == line(7) + line(1) + line(2) + line(3)
    assert [found.name for found in tmp_path.iterdir()] == [name]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl.gz"
    file = TraceFile(path, line(0))
    file.write(line(1))
    file.flush()
    before = path.read_bytes()
    real = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if at >= len(before):
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(before) - at], at)

    monkeypatch.setattr(os, "pwrite", full)
    file.write(b"".join(line(number) for number in range(2, 500)))
    with pytest.raises(OSError, match="No space"):
        file.flush()
    file.close()
    assert path.read_bytes() == before


def test_a_file_that_has_the_name_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for number in range(3):
        file = TraceFile(path, line(number))
        file.close()
    assert path.read_bytes() == line(2)
    assert (tmp_path / "run.jsonl.1").read_bytes() == line(0)
    assert file.kept_as == tmp_path / "run.jsonl.2"


# --- times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90.0), ("1.5s", 1.5), ("10m", 600.0), ("1h30m", 5400.0), ("1:02:03", 3723.0), ("2:03", 123.0), ("0", 0.0)],
)
def test_times(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-5", "10d", "1:2:3:4"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="no time"):
        seconds(text)
