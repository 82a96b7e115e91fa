# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The real sidecar in a shared process namespace: who holds the pod's GPUs, by NVML's lists and real processes."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import simgpu

from tests.contract.sidecar.conftest import Start
from tests.contract.sidecar.controller import Controller
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.report import ProcessReport, Report, encode

SHARED = {wiring.ENV_SHARED_PROCESSES: "1"}
SECRET = "hf_abcdefghijklmnop"
GIB = 2**30
HOLD = """
import sys
sys.path.insert(0, sys.argv[1])
import simgpu
wanted = [pair.split("=") for pair in sys.argv[2].split(",")]
held = [(simgpu.Gpu(int(gpu)), int(size)) for gpu, size in wanted]
for gpu, size in held:
    gpu.allocate(size)
print("held", flush=True)
sys.stdin.read()
"""
"""A program that holds memory on simulated GPUs until its input ends."""

Hold = Callable[..., int]


@pytest.fixture
def hold(gpus: simgpu.StateFile, tmp_path: Path) -> Iterator[Hold]:
    """Start processes that hold (GPU, bytes) under a title, which may be a program's name; returns the pid."""
    script = tmp_path / "evaluate.py"
    script.write_text(HOLD)
    running: list[subprocess.Popen[bytes]] = []

    def begin(title: str, *held: tuple[int, int]) -> int:
        sizes = ",".join(f"{gpu}={size}" for gpu, size in held)
        words = [title, str(script), str(Path(simgpu.__file__).parent), sizes, f"--token={SECRET}"]
        process = subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process.pid

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def listed(report: Report) -> dict[int, list[ProcessReport]]:
    """By the GPU's index."""
    return {report.gpus[each.gpu].index or 0: each.processes for each in report.gpu_processes}


def heard(controller: Controller, holds: Callable[[dict[int, list[ProcessReport]]], bool]) -> Report:
    controller.wait_for(lambda reports: any(holds(listed(report)) for report in reports), 20.0)
    return next(report for report in reversed(controller.reports) if holds(listed(report)))


def test_a_report_says_who_holds_each_gpu(
    start: Start, hold: Hold, controller: Controller, reporting: dict[str, str]
) -> None:
    rank0 = hold("ray::WorkerDict.actor_rollout_ref_update_actor", (0, 20 * GIB))
    rank1 = hold("ray::WorkerDict.actor_rollout_ref_update_actor", (1, 20 * GIB), (0, GIB // 2))
    engine = hold("VLLM::Worker_TP0", (0, 30 * GIB))
    stranger = hold("python3", (2, 3 * GIB))
    start(**SHARED, **reporting)
    report = heard(controller, lambda found: any(each.program for each in found.get(2, [])))
    found = listed(report)
    assert set(found) == set(range(8)), "a GPU that nobody holds is listed as such"
    assert [(each.pid, each.program) for each in found[0]] == [
        (engine, "VLLM::Worker_TP0"),
        (rank0, "ray::WorkerDict"),
        (rank1, "ray::WorkerDict"),
    ]
    assert [each.memory_used_bytes for each in found[0]] == sorted(
        (each.memory_used_bytes or 0 for each in found[0]), reverse=True
    )
    assert [(each.pid, each.program) for each in found[2]] == [(stranger, "python3 evaluate.py")]
    assert found[5] == []
    assert all(SECRET.encode() not in encode(each) for each in controller.reports)


@pytest.mark.slow
def test_a_process_that_ends_is_no_longer_listed(
    start: Start, gpus: simgpu.StateFile, controller: Controller, reporting: dict[str, str]
) -> None:
    start(**SHARED, **reporting)
    with simgpu.Gpu(3) as gpu:
        gpu.allocate(GIB)
        heard(controller, lambda found: bool(found.get(3)))
    count = len(controller.reports)
    controller.wait_for(
        lambda reports: any(each.gpu_processes and not listed(each)[3] for each in reports[count:]), 20.0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "driver"),
    [({}, {}), (SHARED, {"version": "550.54.15", "process_mode": "namespace-no-memory"})],
    ids=["the namespace is not shared", "the driver's lists say too little"],
)
def test_without_lists_nothing_is_said(
    start: Start,
    gpus: simgpu.StateFile,
    controller: Controller,
    reporting: dict[str, str],
    variables: dict[str, str],
    driver: dict[str, str],
) -> None:
    if driver:
        simgpu.set_driver(**driver)  # type: ignore[arg-type]
    with simgpu.Gpu(0) as gpu:
        gpu.allocate(GIB)
        start(**variables, **reporting)
        time.sleep(7.0)
    assert controller.reports[-1].gpus
    assert not any(report.gpu_processes for report in controller.reports)
