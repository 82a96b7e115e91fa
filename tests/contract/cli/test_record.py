# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon record` and `gpumon replay` on simulated GPUs: what is written, what is left after a kill, what is read."""

import gzip
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import simgpu

from tests.contract.cli.conftest import FAKE, Host
from tests.contract.cli.neighbours import (
    UPDATE,
    go_on,
    line_of,
    listing,
    mark,
    only_if_told_apart,
    run_a_job,
    strangers,
    tasks_page,
)
from tests.contract.sidecar.ray import Ray
from verl_gpumonitor.cli.recording.ray import RayWatch
from verl_gpumonitor.cli.recording.recorder import TURN_SECONDS, Recorder, Sources
from verl_gpumonitor.cli.records import open_run
from verl_gpumonitor.model.samples import NodeSample
from verl_gpumonitor.model.trace import (
    GpuLine,
    Header,
    HostLine,
    JobLine,
    MarkLine,
    NvmlLine,
    Record,
    StepLine,
    TaskLine,
    TitleLine,
    XidLine,
    parse_line,
)
from verl_gpumonitor.model.wiring import MARKS_PORT
from verl_gpumonitor.reading.machine import MachineReader
from verl_gpumonitor.stages.sources.marks import MarkReceiver, MarkSender

pytestmark = pytest.mark.slow

GIB = 2**30
QUIET = ("--ray", "off", "--no-marks", "--no-proc")
"""Other programs on the machine that runs the tests are nobody's business."""


def read(path: Path) -> tuple[Header, list[Record]]:
    """A trace by our own reader, which must have nothing to complain of; by time."""
    with open_run(str(path)) as run:
        records = list(run.records)
        assert list(run.complaints) == []
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()
    times = [json.loads(line)["t"] for line in lines[1:]]
    assert times == sorted(times), "a trace is in order as it is written"
    return run.header, records


def wait_for(path: Path, found: Callable[[list[Record]], bool], seconds: float = 20.0) -> list[Record]:
    """The records once some are there."""
    end = time.monotonic() + seconds
    records: list[Record] = []
    while time.monotonic() < end:
        if path.exists():
            _, records = read(path)
            if found(records):
                return records
        time.sleep(0.3)
    raise AssertionError(f"not found in {records[-20:]}")


def finish(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    return err


def test_a_trace_of_the_host_is_written_and_diagnosed(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    simgpu.set_values(2, file=host.file, gpu_utilization_percent=50)
    done = host.run("record", *QUIET, "-o", str(path), "-l", "1", "--duration", "4")
    assert done.returncode == 0, done.stderr
    assert f"recording 4 GPUs to {path}" in done.stderr
    header, records = read(path)
    (pod,) = header.pods or []
    assert pod.gpus_requested == 4
    assert [gpu.uuid for gpu in pod.gpus or []] == [simgpu.uuid_of(index) for index in range(4)]
    assert header.workload is not None
    assert header.workload.kind == "Host"
    third = [line for line in records if isinstance(line, GpuLine) and line.uuid == simgpu.uuid_of(2)]
    assert 3 <= len(third) <= 5
    assert {line.utilization for line in third} == {0.5}
    assert all(line.memory_used_bytes is not None and line.power_watts for line in third)
    assert any(isinstance(line, HostLine) and line.memory_used_bytes for line in records)
    jobs = [line for line in records if isinstance(line, JobLine)]
    assert [line.phase for line in (jobs[0], jobs[-1])] == ["Running", "Unknown"]
    diagnosed = host.run("diagnose", str(path), "--json")
    assert diagnosed.returncode == 0, diagnosed.stderr
    assert json.loads(diagnosed.stdout)["findings"] == []
    assert diagnosed.stderr.count("\n") <= 1, "that it is short, and nothing else"


def test_a_peak_between_two_lines_is_written(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    process = host.popen("record", *QUIET, "-o", str(path), "-l", "4")
    time.sleep(2.5)
    with simgpu.Gpu(0, state=host.file.path) as gpu:
        gpu.allocate(20 * GIB)
        time.sleep(1.2)
    time.sleep(4.0)
    finish(process)
    _, records = read(path)
    lines = [line for line in records if isinstance(line, GpuLine) and line.uuid == simgpu.uuid_of(0)]
    assert max(line.memory_peak_bytes or 0 for line in lines) >= 20 * GIB
    assert lines[-1].memory_used_bytes == 0


def test_a_kill_costs_the_last_seconds_alone(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    process = host.popen("record", *QUIET, "-o", str(path), "-l", "0.5")
    wait_for(path, lambda records: any(line.t > 2.0 for line in records))
    process.kill()
    process.communicate()
    _, records = read(path)
    assert records
    diagnosed = host.run("diagnose", str(path))
    assert (diagnosed.returncode, diagnosed.stderr) == (0, "")


def test_a_lost_gpu_that_comes_back_and_an_xid(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    process = host.popen("record", *QUIET, "-o", str(path), "-l", "0.5")
    wait_for(path, lambda records: any(isinstance(line, GpuLine) for line in records))
    simgpu.xid(1, 79, file=host.file)
    fault = simgpu.lose(1, file=host.file)
    wait_for(path, lambda records: any(isinstance(line, NvmlLine) for line in records))
    simgpu.clear_fault(fault, file=host.file)
    wait_for(path, lambda records: any(isinstance(line, NvmlLine) and line.error is None for line in records))
    finish(process)
    _, records = read(path)
    errors = [(line.uuid, line.error) for line in records if isinstance(line, NvmlLine)]
    assert errors == [(simgpu.uuid_of(1), "GPU_IS_LOST"), (simgpu.uuid_of(1), None)]
    assert [(line.uuid, line.code) for line in records if isinstance(line, XidLine)] == [(simgpu.uuid_of(1), 79)]
    lost, back = (line.t for line in records if isinstance(line, NvmlLine))
    between = [line for line in records if isinstance(line, GpuLine) and lost < line.t < back]
    assert {line.uuid for line in between} == {simgpu.uuid_of(index) for index in (0, 2, 3)}
    found = json.loads(host.run("diagnose", str(path), "--json").stdout)["findings"]
    assert [finding["scope"]["gpus"] for finding in found if finding["reason"] == "GPUFault"] == [[simgpu.uuid_of(1)]]


def test_standard_output_can_be_diagnosed_as_it_comes(host: Host) -> None:
    done = host.run("record", *QUIET, "-o", "-", "--duration", "2", "-l", "0.5")
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["format"] == "gpumonitor-trace/1"
    assert lines[-1]["type"] == "job"


def test_what_is_there_is_kept(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("mine")
    done = host.run("record", *QUIET, "-o", str(path), "--duration", "1")
    assert done.returncode == 0
    assert (tmp_path / "run.jsonl.1").read_text() == "mine"
    assert "is kept as" in done.stderr


def test_a_folder_that_is_not_there_is_said(host: Host, tmp_path: Path) -> None:
    done = host.run("record", *QUIET, "-o", str(tmp_path / "no" / "run.jsonl"), "--duration", "1")
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_driver_it_says_so_and_writes_nothing(bare_host: Host, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    done = bare_host.run("record", *QUIET, "-o", str(path), "--duration", "1")
    assert done.returncode == 3
    assert "no NVIDIA driver here" in done.stderr
    assert not path.exists()


# --- stages ----------------------------------------------------------------------------------------------------


def test_tasks_and_the_job_come_from_rays_dashboard(host: Host, ray: Ray, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    ray.pages["/api/v0/tasks"] = tasks_page(begin=time.time())
    ray.pages["/api/v0/nodes"] = listing({"node_id": "n1", "node_ip": "10.9.9.9", "resources_total": {"GPU": 4}})
    ray.pages["/api/v0/actors"] = listing(
        {"actor_id": "a1", "class_name": "WorkerDict", "name": "xWorkerDict_0:2", "node_id": "n1", "job_id": "01"}
    )
    began = time.time()
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo WANDB_API_KEY=abc123secret"
    entry = {"job_id": "01", "submission_id": "raysubmit_x", "status": "RUNNING", "entrypoint": command}
    ray.pages["/api/jobs/"] = json.dumps([{**entry, "start_time": int(began * 1000)}]).encode()
    ray.pages["/api/version"] = json.dumps({"ray_version": "2.46.0"}).encode()
    process = host.popen("record", "--ray", ray.url, "--no-marks", "--no-proc", "-o", str(path), "-l", "0.5")
    # By what was asked, not by what is in the file: lines wait for some seconds on their way there, unless it ends.
    ray.wait_until_asked("/api/v0/tasks")
    ray.pages["/api/v0/tasks"] = tasks_page(UPDATE, begin=time.time())
    ray.wait_until_asked("/api/v0/tasks")
    ray.pages["/api/v0/tasks"] = tasks_page(begin=began)
    ray.pages["/api/jobs/"] = json.dumps([{**entry, "status": "SUCCEEDED", "start_time": int(began * 1000)}]).encode()
    ray.wait_until_asked("/api/jobs/")
    time.sleep(3 * TURN_SECONDS)
    finish(process)
    header, records = read(path)
    assert header.entrypoint == command.replace("abc123secret", "***")
    assert header.frameworks is not None
    assert header.frameworks.ray == "2.46.0"
    assert header.workload is not None
    assert header.workload.name == "raysubmit_x"
    told = [line for line in records if isinstance(line, TaskLine)]
    assert [(line.name, line.state, line.pid, line.local_rank) for line in told] == [
        (UPDATE, "begin", 4711, 2),
        (UPDATE, "end", 4711, 2),
    ]
    assert [line.phase for line in records if isinstance(line, JobLine)][-1] == "Succeeded"


def test_without_a_dashboard_the_agent_tells_names(ray: Ray) -> None:
    watch = RayWatch("http://127.0.0.1:9", agents=lambda: [ray.url + "/metrics"])
    recorder = Recorder(Sources(node=NodeSample, machine=MachineReader(), ray=watch), interval=1.0, pod="h")
    page = 'ray_component_rss_bytes{Component="ray::%s",SessionName="s"} %d\n'
    ray.pages["/metrics"] = (page % (UPDATE, 5e9)).encode()
    watch.turn()
    written = recorder.turn()
    assert watch.latest().by == "agent"
    assert "127.0.0.1:9" in (watch.latest().trouble or "")
    written += recorder.end("enough")
    told = [line for line in map(parse_line, written.splitlines()) if isinstance(line, TaskLine)]
    assert [(line.name, line.state, line.pid) for line in told] == [(UPDATE, "begin", None)]


def titles_of(pid: int, records: list[Record]) -> list[TitleLine]:
    return [line for line in records if isinstance(line, TitleLine) and line.pid == pid]


@pytest.mark.parametrize("holder", [f"ray::{UPDATE}"], indirect=True)
def test_titles_of_ray_and_engines_come_from_proc(host: Host, holder: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    worker = int(line_of(holder))
    process = host.popen("record", "--ray", "off", "--no-marks", "-o", str(path), "-l", "0.5")
    wait_for(path, lambda records: bool(titles_of(worker, records)))
    go_on(holder)
    records = wait_for(path, lambda records: len(titles_of(worker, records)) == 2)
    finish(process)
    assert [(line.title, line.parent_pid) for line in titles_of(worker, records)] == [
        (f"ray::{UPDATE}", holder.pid),
        ("ray::WorkerDict", holder.pid),
    ]


@pytest.mark.parametrize("holder", ["VLLM::EngineCore"], indirect=True)
def test_another_job_of_the_host_is_not_in_the_record(
    host: Host, holder: subprocess.Popen[str], ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver, workers, marks and a dashboard of somebody who holds no GPU here."""
    only_if_told_apart()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.url)
    host = Host(library=FAKE / "build", file=host.file)
    run_a_job(ray)
    worker = int(line_of(holder))
    path = tmp_path / "run.jsonl.gz"
    with strangers():
        process = host.popen("record", "-o", str(path), "-l", "0.5")
        try:
            wait_for(path, lambda records: bool(titles_of(worker, records)))
            ray.wait_until_asked("/api/jobs/")
            mark()
            time.sleep(3 * TURN_SECONDS)
        finally:
            finish(process)
    header, records = read(path)
    assert header.entrypoint is None
    assert [note.partition(" of it is ")[0] for note in header.notes or []] == ["0:00"], "nothing but when it began"
    assert header.workload is not None
    assert header.workload.name != "raysubmit_x"
    assert {line.pid for line in records if isinstance(line, TitleLine)} == {worker}
    assert not [line for line in records if isinstance(line, TaskLine | MarkLine | StepLine)]


def test_marks_and_steps_of_a_program() -> None:
    receiver = MarkReceiver(0)
    sources = Sources(node=NodeSample, machine=MachineReader(), marks=receiver)
    recorder = Recorder(sources, interval=1.0, pod="h")
    sender = MarkSender(port=receiver.port, environ={})
    written = recorder.turn()
    step = sender.begin("step", step=3)
    generating = sender.begin("gen", role="rollout", step=3)
    written += recorder.turn()
    time.sleep(0.3)
    sender.end(generating)
    sender.end(step)
    written += recorder.turn() + recorder.end("enough")
    receiver.close()
    records = [parse_line(line) for line in written.splitlines()]
    told = [line for line in records if isinstance(line, MarkLine)]
    assert [(line.stage, line.role, line.state, line.step) for line in told] == [
        ("gen", "rollout", "begin", 3),
        ("gen", "rollout", "end", 3),
    ]
    assert told[1].t - told[0].t >= 0.3
    assert [line.step for line in records if isinstance(line, StepLine)] == [3]


def take_the_marks_port(seconds: float = 60.0) -> socket.socket:
    """The port of marks, once the other tests that record on this machine leave it."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end = time.monotonic() + seconds
    while True:
        try:
            taken.bind(("127.0.0.1", MARKS_PORT))
        except OSError:
            if time.monotonic() >= end:
                taken.close()
                raise
            time.sleep(0.05)
        else:
            return taken


def test_a_busy_marks_port_is_said_once(host: Host, tmp_path: Path) -> None:
    with take_the_marks_port():
        done = host.run("record", "--ray", "off", "--no-proc", "-o", str(tmp_path / "r.jsonl"), "--duration", "1.5")
    assert done.returncode == 0
    assert done.stderr.count("marks of training programs are not recorded") == 1


# --- replay ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three minutes in which a GPU is lost for a minute."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    lines: list[dict[str, object]] = [
        {
            "type": "header",
            "format": "gpumonitor-trace/1",
            "pods": [
                {
                    "name": "h",
                    "gpus_requested": 2,
                    "gpus": [{"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-b", "index": 1}],
                }
            ],
        },
        {"type": "job", "t": 0.0, "phase": "Running"},
    ]
    for t in range(0, 180, 2):
        if t == 20:
            lines.append({"type": "task", "t": 20.0, "pod": "h", "pid": 5, "name": UPDATE, "state": "begin"})
        if t in (60, 120):
            lines.append(
                {"type": "nvml", "t": t, "pod": "h", "uuid": "GPU-b", "error": "GPU_IS_LOST" if t == 60 else None}
            )
        lines += [
            {"type": "gpu", "t": t, "pod": "h", "uuid": uuid, "utilization": 0.9, "memory_used_bytes": 10 * GIB}
            for uuid in ("GPU-a", "GPU-b")
            if uuid == "GPU-a" or not 60 <= t < 120
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_without_a_terminal_each_change_is_a_line(host: Host, run: Path) -> None:
    done = host.run("replay", str(run))
    assert done.returncode == 0, done.stderr
    lines = [line.split(None, 2) for line in done.stdout.splitlines()]
    assert ["0:20", "stage", "update_actor (actor)"] in lines
    raised = [line for line in lines if line[1] == "raised"]
    assert next((line[0], line[2].split()[0]) for line in raised) == ("1:00", "GPUFault")
    assert any(line[1] == "resolved" and line[2].startswith("GPUFault") for line in lines)
    assert lines[-1][:2] == ["2:58", "end"]


def test_a_part_of_a_run(host: Host, run: Path) -> None:
    done = host.run("replay", str(run), "--from", "50", "--to", "1:30")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} <= {f"{minutes}:{rest:02d}" for minutes in (0, 1) for rest in range(60)}
    assert lines[0][0] >= "0:50"
    assert lines[-1][0] == "1:30"
    assert host.run("replay", str(run), "--from", "90", "--to", "10").returncode == 2


def test_logs_are_played_too_and_others_are_refused(host: Host, tmp_path: Path) -> None:
    log = tmp_path / "gpu.csv"
    assert host.run("log", "-l", "0.2", "--count", "3", "-o", str(log)).returncode == 0
    assert host.run("replay", str(log)).returncode == 0
    log.write_text("a,b\n1,2\n")
    refused = host.run("replay", str(log))
    assert refused.returncode == 2
    assert "gpumon log" in refused.stderr


def test_in_a_terminal_it_is_a_view_that_keys_rule(run: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "verl_gpumonitor.cli", "replay", str(run), "--speed", "60"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        end = time.monotonic() + 20
        while text not in shown:
            assert time.monotonic() < end, shown[-2000:]
            shown += os.read(master, 65536)
        shown = b""

    try:
        until(b"[x60]")
        os.write(master, b"\x1b[C")
        until(b"[x120]")
        os.write(master, b" ")
        until(b"[paused]")
        os.write(master, b" +++")
        until(b"[the end]")
        os.write(master, b"q")
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
