# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Programs of one host: one on a GPU, others that hold none, and what a Ray there answers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import simgpu

from tests.contract.sidecar.ray import Ray

UPDATE = "WorkerDict.actor_rollout_ref_update_actor"
OTHER = "WorkerDict.ref_compute_ref_log_prob"
COMMAND = "python3 -m verl.trainer.main_ppo a=b"
HOLDER = """
import subprocess, sys, simgpu
simgpu.Gpu(0).hold()
worker = subprocess.Popen(["bash", "-c", "exec -a %s sleep 60"])
print(worker.pid, flush=True)
sys.stdin.readline()
worker.kill()
worker.wait()
sys.stdin.readline()
"""
"""A process on a GPU, and its child, which ends when a line comes."""
MARKING = """
from verl_gpumonitor.stages.sources.marks import MarkSender
MarkSender(environ={}).begin("gen", role="rollout", step=3)
"""


def only_if_told_apart() -> None:
    """Skip where all processes are in one container: they are one job's then."""
    if str(Path("/proc/self/ns/pid").readlink()) != "pid:[4026531836]":
        pytest.skip("the tests run in a container, in which all processes are one job's")


def hold(state: Path, title: str) -> subprocess.Popen[str]:
    """Start a process on a GPU with a child of this title, whose pid it prints."""
    environment = {**os.environ, "FAKENVML_STATE": str(state), "PYTHONPATH": str(Path(simgpu.__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER % title],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def strangers() -> Iterator[None]:
    """Let a worker of Ray's and a driver of verl's run that hold no GPU."""
    titled = f"exec -a ray::{OTHER} sleep 60"
    leading = f"exec -a python3 bash -c 'sleep 60; :' {COMMAND.partition(' ')[2]}"
    running = [subprocess.Popen(["bash", "-c", line]) for line in (titled, leading)]
    try:
        yield
    finally:
        for stranger in running:
            stranger.kill()
            stranger.wait()


def mark() -> None:
    """Let a program without a GPU say that it generates."""
    subprocess.run([sys.executable, "-c", MARKING], check=True)


def run_a_job(ray: Ray) -> None:
    """Let Ray's dashboard list a job, and a task of it that runs."""
    ray.pages["/api/v0/tasks"] = tasks_page(UPDATE, begin=time.time())
    ray.pages["/api/v0/nodes"] = listing({"node_id": "n1", "node_ip": "10.9.9.9", "resources_total": {"GPU": 4}})
    entry = {"job_id": "01", "submission_id": "raysubmit_x", "status": "RUNNING", "entrypoint": COMMAND}
    ray.pages["/api/jobs/"] = json.dumps([{**entry, "start_time": 1}]).encode()


def tasks_page(*names: str, begin: float) -> bytes:
    """The State API's answer."""
    tasks = [
        {
            "task_id": f"t-{name}-{begin}",
            "name": name,
            "node_id": "n1",
            "actor_id": "a1",
            "job_id": "01",
            "worker_pid": 4711,
            "start_time_ms": int(begin * 1000),
        }
        for name in names
    ]
    return json.dumps({"data": {"result": {"result": tasks, "num_filtered": len(tasks)}}}).encode()


def listing(*items: dict[str, object]) -> bytes:
    """A list of the State API."""
    return json.dumps({"data": {"result": {"result": list(items), "num_filtered": len(items)}}}).encode()


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    """Send a process a line."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
