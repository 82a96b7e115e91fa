# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Contexts: who holds what, who sees whom, and what a death frees."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import simgpu

from tests.contract.fakenvml import programs
from tests.contract.fakenvml.programs import holder, result, running

GIB = 1 << 30
NAMESPACES = subprocess.run([*programs.IN_NEW_PID_NAMESPACE, "true"], check=False, capture_output=True).returncode == 0
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="a new PID namespace needs root")

LISTED = """
import json, pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
found = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
used = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).used
print(json.dumps([[[p.pid, p.usedGpuMemory] for p in found], used]))"""


def _listed(nvml: Any, device: Any) -> list[tuple[int, int | None]]:
    return [(p.pid, p.usedGpuMemory) for p in nvml.nvmlDeviceGetComputeRunningProcesses(device)]


def _used(nvml: Any, device: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).used)


def _wait_until_free(nvml: Any, device: Any) -> None:
    deadline = time.monotonic() + 5
    while _used(nvml, device) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (_used(nvml, device), _listed(nvml, device)) == (0, [])


def test_a_process_is_listed_with_its_memory(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.hold()
    assert _listed(nvml, device) == [(os.getpid(), 0)]
    gpu.allocate(3 * GIB)
    gpu.free(GIB)
    assert _listed(nvml, device) == [(os.getpid(), 2 * GIB)]
    gpu.close()
    assert _listed(nvml, device) == []


def test_two_objects_of_one_gpu_are_one_context(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.allocate(GIB)
    simgpu.Gpu(simgpu.uuid_of(0)).allocate(GIB)
    assert _listed(nvml, device) == [(os.getpid(), 2 * GIB)]


def test_a_full_gpu_refuses_and_nothing_changes(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.allocate(79 * GIB)
    with pytest.raises(simgpu.OutOfMemoryError, match="asked for"):
        gpu.allocate(GIB)
    assert _used(nvml, device) == 79 * GIB
    gpu.allocate(gpu.memory_free_bytes)
    assert nvml.nvmlDeviceGetMemoryInfo(device).free == 0


def test_programs_that_allocate_at_once_never_get_more_than_there_is(nvml: Any, device: Any, state: Path) -> None:
    script = """
import simgpu, sys
gpu = simgpu.Gpu(0)
got = 0
try:
    while True:
        gpu.allocate(1 << 30); got += 1
except simgpu.OutOfMemoryError:
    print(got, flush=True); sys.stdin.read()"""
    with running(state, script), running(state, script), running(state, script):
        assert _used(nvml, device) == 79 * GIB
        assert sum(memory or 0 for _, memory in _listed(nvml, device)) == 79 * GIB
        assert len(_listed(nvml, device)) == 3
    assert _used(nvml, device) == 0


def test_readers_and_programs_at_once_agree_on_energy(nvml: Any, device: Any, state: Path) -> None:
    script = """
import simgpu
gpu = simgpu.Gpu(0)
print('ready', flush=True)
while True:
    gpu.busy(1.0, power_watts=300)"""
    gpu = simgpu.open_state().state.gpus[0]
    with running(state, script), running(state, script):
        start, before = time.monotonic(), nvml.nvmlDeviceGetTotalEnergyConsumption(device)
        readings = [before]
        while time.monotonic() < start + 0.5:
            readings.append(nvml.nvmlDeviceGetTotalEnergyConsumption(device))
        seconds = time.monotonic() - start
    assert readings == sorted(readings)
    assert 60_000 * seconds <= readings[-1] - before <= 400_000 * seconds
    assert readings[-1] <= gpu.energy_millijoules + 400_000 * 0.5, "the file agrees with what was told"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_death_frees_memory_context_and_load(nvml: Any, device: Any, state: Path, end: signal.Signals) -> None:
    with running(state, holder(memory_bytes=5 * GIB, busy=0.5)) as process:
        assert _listed(nvml, device) == [(process.pid, 5 * GIB)]
        assert nvml.nvmlDeviceGetUtilizationRates(device).gpu == 50
        assert nvml.nvmlDeviceGetPowerUsage(device) == 200000
        process.send_signal(end)
        process.wait()
        assert _listed(nvml, device) == []
        assert (_used(nvml, device), nvml.nvmlDeviceGetUtilizationRates(device).gpu) == (0, 0)
        assert nvml.nvmlDeviceGetPowerUsage(device) == 60000


def test_energy_never_runs_back_when_a_load_dies(nvml: Any, device: Any, state: Path) -> None:
    readings = []
    with running(state, holder(busy=1.0, power_watts=400.0)) as process:
        for _ in range(5):
            readings.append(nvml.nvmlDeviceGetTotalEnergyConsumption(device))
            time.sleep(0.02)
        process.kill()
        process.wait()
    readings += [nvml.nvmlDeviceGetTotalEnergyConsumption(device) for _ in range(5)]
    assert readings == sorted(readings)
    assert readings[0] < readings[-1]


def test_a_forked_child_neither_keeps_nor_ends_the_parents_context(nvml: Any, device: Any, state: Path) -> None:
    script = """
import os, signal, simgpu, sys, time
gpu = simgpu.Gpu(0); gpu.allocate(1 << 30)
child = os.fork()
if child == 0:
    time.sleep(30); os._exit(0)
print('ready', flush=True); sys.stdin.readline()
os.kill(child, signal.SIGKILL); os.waitpid(child, 0)
if os.fork() == 0:
    time.sleep(30); os._exit(0)
print('ready', flush=True); sys.stdin.read()"""
    with running(state, script) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert _listed(nvml, device) == [(process.pid, GIB)]
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert _listed(nvml, device) == [(process.pid, GIB)]
        process.kill()
        process.wait()
        _wait_until_free(nvml, device)  # though a forked child lives on, once it has run at all


def test_utilisation_and_power_of_two_programs(nvml: Any, device: Any, state: Path) -> None:
    with running(state, holder(busy=0.5, power_watts=160)), running(state, holder(busy=0.6, power_watts=260)):
        assert nvml.nvmlDeviceGetUtilizationRates(device).gpu == 80
        assert nvml.nvmlDeviceGetPowerUsage(device) == 60000 + 100000 + 200000
        assert len(_listed(nvml, device)) == 2


@needs_namespaces
def test_a_caller_sees_its_own_pid_namespace_only(nvml: Any, device: Any, state: Path, gpu: simgpu.Gpu) -> None:
    gpu.allocate(GIB)
    inner = holder(memory_bytes=2 * GIB)
    with running(state, inner, prefix=programs.IN_NEW_PID_NAMESPACE):
        assert _listed(nvml, device) == [(os.getpid(), GIB)], "not the other namespace's process"
        assert _used(nvml, device) == 3 * GIB, "but its memory"
        assert result(state, LISTED, prefix=programs.IN_NEW_PID_NAMESPACE) == [[], 3 * GIB]


@needs_namespaces
def test_within_a_namespace_pids_are_its_own(state: Path) -> None:
    script = "import simgpu; gpu = simgpu.Gpu(0); gpu.allocate(1 << 30)\n" + LISTED
    assert result(state, script, prefix=programs.IN_NEW_PID_NAMESPACE) == [[[1, GIB]], GIB]


@needs_namespaces
def test_a_death_in_another_namespace_is_seen(nvml: Any, device: Any, state: Path) -> None:
    with running(state, holder(memory_bytes=GIB), prefix=programs.IN_NEW_PID_NAMESPACE) as process:
        assert _used(nvml, device) == GIB
        process.kill()
        process.wait()
        _wait_until_free(nvml, device)


def test_older_drivers_give_no_memory_or_host_pids(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.allocate(GIB)
    simgpu.set_driver(process_mode="namespace-no-memory")
    assert _listed(nvml, device) == [(os.getpid(), None)]
    simgpu.set_driver(process_mode="host")
    assert [memory for _, memory in _listed(nvml, device)] == [GIB]


@needs_namespaces
def test_the_oldest_drivers_show_all_processes(nvml: Any, device: Any, state: Path) -> None:
    simgpu.set_driver(process_mode="host")
    with running(state, holder(memory_bytes=GIB), prefix=programs.IN_NEW_PID_NAMESPACE):
        assert len(_listed(nvml, device)) == 1


def test_processes_may_be_listed_more_than_once(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.allocate(GIB)
    simgpu.set_driver(duplicate_processes=2)
    assert _listed(nvml, device) == [(os.getpid(), GIB)] * 3
    assert _used(nvml, device) == GIB


def test_graphics_contexts_stand_in_their_own_list(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.hold(kind=simgpu.CONTEXT_GRAPHICS)
    assert _listed(nvml, device) == []
    assert [p.pid for p in nvml.nvmlDeviceGetGraphicsRunningProcesses(device)] == [os.getpid()]
    assert nvml.nvmlDeviceGetMPSComputeRunningProcesses(device) == []


def test_each_way_to_ask_for_processes(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.allocate(GIB)
    gpu.busy(0.4)
    pid = os.getpid()
    assert [(p.pid, p.usedGpuMemory) for p in nvml.nvmlDeviceGetComputeRunningProcesses_v2(device)] == [(pid, GIB)]
    details = nvml.nvmlDeviceGetRunningProcessDetailList(device, nvml.nvmlProcessDetailList_v1, 0)
    assert [(p.pid, p.usedGpuMemory, p.usedGpuCcProtectedMemory) for p in details] == [(pid, GIB, 0)]
    assert [(s.pid, s.smUtil) for s in nvml.nvmlDeviceGetProcessUtilization(device, 0)] == [(pid, 40)]
    assert [(s.pid, s.smUtil) for s in nvml.nvmlDeviceGetProcessesUtilizationInfo(device, 0)] == [(pid, 40)]


def test_no_process_is_success_which_the_binding_raises(nvml: Any, device: Any) -> None:
    with pytest.raises(nvml.NVMLError) as raised:
        nvml.nvmlDeviceGetProcessUtilization(device, 0)
    assert raised.value.value == 0
