# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on purpose: errors, delays, hangs, GPUs that vanish, a driver that does not load."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import simgpu

from tests.contract.fakenvml import programs

ERRORS = [*range(1, 31), 999]

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "nvmlDeviceGetIndex": lambda n, d: n.nvmlDeviceGetIndex(d),
    "nvmlDeviceGetName": lambda n, d: n.nvmlDeviceGetName(d),
    "nvmlDeviceGetUUID": lambda n, d: n.nvmlDeviceGetUUID(d),
    "nvmlDeviceGetPciInfo": lambda n, d: n.nvmlDeviceGetPciInfo(d),
    "nvmlDeviceGetMemoryInfo": lambda n, d: n.nvmlDeviceGetMemoryInfo(d, version=n.nvmlMemory_v2),
    "nvmlDeviceGetUtilizationRates": lambda n, d: n.nvmlDeviceGetUtilizationRates(d),
    "nvmlDeviceGetTemperature": lambda n, d: n.nvmlDeviceGetTemperature(d, 0),
    "nvmlDeviceGetPowerUsage": lambda n, d: n.nvmlDeviceGetPowerUsage(d),
    "nvmlDeviceGetEnforcedPowerLimit": lambda n, d: n.nvmlDeviceGetEnforcedPowerLimit(d),
    "nvmlDeviceGetTotalEnergyConsumption": lambda n, d: n.nvmlDeviceGetTotalEnergyConsumption(d),
    "nvmlDeviceGetClockInfo": lambda n, d: n.nvmlDeviceGetClockInfo(d, 1),
    "nvmlDeviceGetPerformanceState": lambda n, d: n.nvmlDeviceGetPerformanceState(d),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda n, d: n.nvmlDeviceGetCurrentClocksEventReasons(d),
    "nvmlDeviceGetPcieThroughput": lambda n, d: n.nvmlDeviceGetPcieThroughput(d, 0),
    "nvmlDeviceGetTotalEccErrors": lambda n, d: n.nvmlDeviceGetTotalEccErrors(d, 0, 0),
    "nvmlDeviceGetRemappedRows": lambda n, d: n.nvmlDeviceGetRemappedRows(d),
    "nvmlDeviceGetRetiredPages": lambda n, d: n.nvmlDeviceGetRetiredPages(d, 0),
    "nvmlDeviceGetFieldValues": lambda n, d: n.nvmlDeviceGetFieldValues(d, [83]),
    "nvmlDeviceGetComputeRunningProcesses": lambda n, d: n.nvmlDeviceGetComputeRunningProcesses(d),
    "nvmlDeviceGetGraphicsRunningProcesses": lambda n, d: n.nvmlDeviceGetGraphicsRunningProcesses(d),
    "nvmlDeviceGetMigMode": lambda n, d: n.nvmlDeviceGetMigMode(d),
    "nvmlDeviceGetGpuOperationMode": lambda n, d: n.nvmlDeviceGetGpuOperationMode(d),
}


def _error(nvml: Any, call: Callable[[], Any]) -> int:
    """Return the NVML code that the call fails with; 0 where it does not."""
    try:
        call()
    except nvml.NVMLError as error:
        return int(error.value)
    return 0


@pytest.mark.parametrize("code", ERRORS)
def test_each_error_code_on_one_gpu(nvml: Any, device: Any, code: int) -> None:
    other = nvml.nvmlDeviceGetHandleByIndex(1)
    fault = simgpu.fail(code, gpu=0, function="nvmlDeviceGetPowerUsage")
    assert _error(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(device)) == code
    assert _error(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(other)) == 0
    assert _error(nvml, lambda: nvml.nvmlDeviceGetName(device)) == 0
    simgpu.clear_fault(fault)
    assert _error(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(device)) == 0


@pytest.mark.parametrize("code", ERRORS)
def test_each_error_code_of_initialisation(pynvml: Any, code: int) -> None:
    simgpu.set_driver(init_error=code)
    assert _error(pynvml, pynvml.nvmlInit) == code
    simgpu.set_driver(init_error=0)
    fault = simgpu.fail(code, function="init")
    assert _error(pynvml, pynvml.nvmlInit) == code
    simgpu.clear_fault(fault)
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()


@pytest.mark.parametrize("function", CALLS)
def test_each_function_can_fail_by_name(nvml: Any, device: Any, function: str) -> None:
    simgpu.fail(15, function=function)
    assert _error(nvml, lambda: CALLS[function](nvml, device)) == 15
    others = [name for name in CALLS if not name.startswith(function)]
    assert {_error(nvml, partial(CALLS[name], nvml, device)) for name in others} <= {0, 3}


def test_a_lost_gpu_fails_every_call_and_comes_back(nvml: Any, device: Any) -> None:
    other = nvml.nvmlDeviceGetHandleByIndex(1)
    fault = simgpu.lose(0)
    assert {_error(nvml, partial(call, nvml, device)) for call in CALLS.values()} == {15}
    assert {_error(nvml, partial(call, nvml, other)) for call in CALLS.values()} == {0, 3}
    assert nvml.nvmlDeviceGetCount() == 4
    assert _error(nvml, lambda: nvml.nvmlDeviceGetHandleByIndex(0)) == 15
    assert _error(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(simgpu.uuid_of(0))) == 15
    simgpu.clear_fault(fault)
    assert _error(nvml, lambda: nvml.nvmlDeviceGetName(device)) == 0


def test_an_absent_gpu_is_lost_to_those_who_hold_it_and_unlisted_for_new_ones(nvml: Any, device: Any) -> None:
    simgpu.set_present(0, False)
    assert _error(nvml, lambda: nvml.nvmlDeviceGetName(device)) == 15
    nvml.nvmlShutdown()
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetCount() == 3
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)) == simgpu.uuid_of(1)
    simgpu.set_present(0, True)
    nvml.nvmlShutdown()
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetCount() == 4


def test_a_fault_may_come_late_and_end(nvml: Any, device: Any) -> None:
    simgpu.fail(10, function="nvmlDeviceGetPowerUsage", skip=2, limit=3)
    codes = [_error(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(device)) for _ in range(7)]
    assert codes == [0, 0, 10, 10, 10, 0, 0]


def test_exact_means_one_version(nvml: Any, device: Any) -> None:
    simgpu.fail(3, function="nvmlDeviceGetMemoryInfo_v2")
    assert _error(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)) == 3
    assert _error(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(device)) == 0
    simgpu.clear_faults()
    simgpu.fail(3, function="nvmlDeviceGetMemoryInfo", exact=True)
    assert _error(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)) == 0
    assert _error(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(device)) == 3


def test_a_misspelt_function_is_refused(state: object) -> None:
    with pytest.raises(ValueError, match="no NVML function"):
        simgpu.hang(function="nvmlDeviceGetPower")


def test_a_sleeping_delay_takes_time_and_a_spinning_one_cpu(nvml: Any, device: Any) -> None:
    for spin, least, most in [(False, 0.0, 0.03), (True, 0.05, 0.2)]:
        fault = simgpu.delay(50_000, spin=spin, gpu=0, function="nvmlDeviceGetPowerUsage")
        start, cpu = time.monotonic(), time.thread_time()
        nvml.nvmlDeviceGetPowerUsage(device)
        assert time.monotonic() - start >= 0.05
        assert least <= time.thread_time() - cpu <= most
        simgpu.clear_fault(fault)


def test_a_delay_of_all_calls(nvml: Any, device: Any) -> None:
    simgpu.delay(10_000)
    start = time.monotonic()
    nvml.nvmlDeviceGetName(device)
    nvml.nvmlDeviceGetCount()
    assert time.monotonic() - start >= 0.02


def test_a_hanging_call_returns_when_another_process_clears_it(nvml: Any, device: Any, state: Any) -> None:
    answers: list[int] = []
    number = programs.result(state, "import simgpu; print(simgpu.hang(gpu=0, function='nvmlDeviceGetPowerUsage'))")
    thread = threading.Thread(target=lambda: answers.append(nvml.nvmlDeviceGetPowerUsage(device)), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert simgpu.clients()[-1].inside == 1
    assert nvml.nvmlDeviceGetPowerUsage(nvml.nvmlDeviceGetHandleByIndex(1)) == 60000, "others go on"
    programs.result(state, f"import simgpu; simgpu.clear_fault({number}); print(0)")
    thread.join(2.0)
    assert answers == [60000]


def test_a_cleared_hang_is_over_though_another_takes_its_place(nvml: Any, device: Any) -> None:
    fault = simgpu.hang(gpu=0, function="nvmlDeviceGetPowerUsage")
    thread = threading.Thread(target=nvml.nvmlDeviceGetPowerUsage, args=[device], daemon=True)
    thread.start()
    thread.join(0.1)
    simgpu.clear_fault(fault)
    assert simgpu.hang(gpu=3) == fault, "the same place in the table"
    thread.join(2.0)
    assert not thread.is_alive()


def test_initialisation_can_hang(pynvml: Any) -> None:
    fault = simgpu.hang(function="init")
    thread = threading.Thread(target=pynvml.nvmlInit, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    simgpu.clear_fault(fault)
    thread.join(2.0)
    assert not thread.is_alive()
    pynvml.nvmlShutdown()


def test_reset_ends_faults_and_values(nvml: Any, device: Any) -> None:
    simgpu.lose(0)
    simgpu.set_values(1, power_milliwatts=1)
    simgpu.set_driver(init_error=9, duplicate_processes=2)
    simgpu.reset()
    assert nvml.nvmlDeviceGetPowerUsage(device) == 60000
    assert simgpu.show()["faults"] == []
    assert simgpu.show()["init_error"] == 0
