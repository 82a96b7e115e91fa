# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The reader on the simulated library: what it reads, and what it makes of a driver's errors and garbage."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import msgspec
import pytest
import simgpu

from verl_gpumonitor.model.vocabulary import GpuState, UnavailableReason
from verl_gpumonitor.reading.reader import Reading
from verl_gpumonitor.reading.samples import GpuSample

from .conftest import FAKE, Driven

GIB = 2**30
GAUGES = (
    "utilization",
    "memory_bandwidth_utilization",
    "memory_used_bytes",
    "memory_reserved_bytes",
    "power_watts",
    "temperature_celsius",
    "memory_temperature_celsius",
    "energy_joules",
    "throttled",
)


def gauges_of(gpu: GpuSample) -> dict[str, object]:
    return {name: getattr(gpu, name) for name in GAUGES}


def assert_silent(gpu: GpuSample) -> None:
    assert set(gauges_of(gpu).values()) == {None}


# --- what is read ---


def test_all_signals_of_a_busy_gpu(state: simgpu.StateFile, reader: Driven) -> None:
    with simgpu.Gpu(2, state=state.path) as used:
        used.allocate(20 * GIB)
        used.busy(0.6, power_watts=250)
        reading = reader.read()
    assert reading.unavailable is None
    assert reading.visible == 8
    assert reading.driver_version == "570.124.06"
    gpu = reading.gpus[2]
    assert (gpu.uuid, gpu.index, gpu.model) == (simgpu.uuid_of(2), 2, "NVIDIA A100-SXM4-80GB")
    assert gpu.utilization == 0.6
    assert gpu.memory_used_bytes == 20 * GIB
    assert gpu.memory_reserved_bytes == 600 * 2**20
    assert gpu.memory_total_bytes == 80 * GIB
    assert gpu.power_watts == 250.0
    assert gpu.power_limit_watts == 400.0
    assert gpu.temperature_celsius is not None
    assert gpu.energy_joules is not None
    assert gpu.throttled is not None
    assert gpu.processes is None
    assert reading.gpus[3].utilization == 0.0


def test_memory_bandwidth_is_not_memory_in_use(state: simgpu.StateFile, reader: Driven) -> None:
    """`utilization.memory` is the share of time in which memory was touched (ray#61456)."""
    used = 70 * GIB
    simgpu.set_values(0, file=state, memory_utilization_percent=5, memory_used_bytes=used)
    gpu = reader.read().gpus[0]
    assert gpu.memory_bandwidth_utilization == 0.05
    assert gpu.memory_used_bytes == used
    assert gpu.memory_total_bytes is not None
    assert used / gpu.memory_total_bytes == 0.875


def test_sent_and_received_are_not_swapped(state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_values(0, file=state, nvlink_tx_kibibytes=1, nvlink_rx_kibibytes=2, pcie_tx_bytes=3, pcie_rx_bytes=4)
    gpu = reader.read().gpus[0]
    assert (gpu.nvlink_sent_bytes, gpu.nvlink_received_bytes) == (1024, 2048)
    assert (gpu.pcie_sent_bytes, gpu.pcie_received_bytes) == (3, 4)


def test_throttling_by_name(state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_values(0, file=state, clocks_event_reasons=0x44)
    assert reader.read().gpus[0].throttled == ("sw_power_cap", "hw_thermal_slowdown")


def test_a_second_of_reading_costs_41_calls_and_each_fifth_49(
    own_state: simgpu.StateFile, start: Callable[..., Driven]
) -> None:
    reader = start()
    reader.order("begin anew", slow_seconds=5.0)
    reader.read()
    costs = []
    for _ in range(10):
        before = sum(simgpu.calls(own_state).values())
        reader.advance(1.0)
        reader.read()
        reader.read_memory()
        costs.append(sum(simgpu.calls(own_state).values()) - before)
    # At the tenth second the GPUs are counted, too.
    assert costs == [41, 41, 41, 41, 49, 41, 41, 41, 41, 50]


SLOW = {
    "temperature_celsius": 71,
    "memory_temperature_celsius": 81,
    "ecc_uncorrected_volatile": 3,
    "pcie_tx_bytes": 1024,
    "nvlink_rx_kibibytes": 1,
}


def slow_of(gpu: GpuSample) -> tuple[object, ...]:
    return (
        gpu.temperature_celsius,
        gpu.memory_temperature_celsius,
        gpu.ecc_uncorrected_errors,
        gpu.pcie_sent_bytes,
        gpu.nvlink_received_bytes,
    )


def test_what_changes_slowly_is_read_each_five_seconds(state: simgpu.StateFile, reader: Driven) -> None:
    reader.order("begin anew", slow_seconds=5.0)
    simgpu.set_values(0, file=state, **dict.fromkeys(SLOW, 0))
    first = slow_of(reader.read().gpus[0])
    simgpu.set_values(0, file=state, gpu_utilization_percent=40, power_milliwatts=321_000, **SLOW)
    reader.advance(4.0)
    gpu = reader.read().gpus[0]
    assert (gpu.utilization, gpu.power_watts) == (0.4, 321.0), "these change at once"
    assert slow_of(gpu) == first
    reader.advance(1.5)
    assert slow_of(reader.read().gpus[0]) == (71.0, 81.0, 3, 1024, 1024)
    simgpu.set_values(0, file=state, **dict.fromkeys(SLOW, simgpu.Unanswered()))
    reader.advance(5.5)
    assert slow_of(reader.read().gpus[0]) == (None,) * 5, "unknown is not the last one"


def test_a_gpu_that_comes_back_is_asked_for_everything(state: simgpu.StateFile, reader: Driven) -> None:
    reader.order("begin anew", slow_seconds=3600.0)
    reader.read()
    fault = simgpu.lose(2, file=state)
    assert_silent(reader.read().gpus[2])
    simgpu.clear_fault(fault, file=state)
    simgpu.set_values(2, file=state, temperature_celsius=77)
    reader.advance(2.0)
    assert reader.read().gpus[2].temperature_celsius == 77.0


@pytest.mark.parametrize(
    "field_values",
    [pytest.param(3, id="not supported"), pytest.param(999, id="failing")],
)
def test_power_is_read_by_its_own_call_where_field_values_say_nothing(
    field_values: int, own_state: simgpu.StateFile, start: Callable[..., Driven]
) -> None:
    reader = start()
    reader.read()
    assert "nvmlDeviceGetPowerUsage" not in simgpu.calls(own_state)
    simgpu.fail(field_values, function="nvmlDeviceGetFieldValues", file=own_state)
    simgpu.set_values(0, file=own_state, power_milliwatts=250_000)
    assert reader.read().gpus[0].power_watts == 250.0
    simgpu.fail(3, gpu=0, function="nvmlDeviceGetPowerUsage", file=own_state)
    reading = reader.read()
    assert reading.gpus[0].power_watts is None
    assert reading.unsupported["power_watts"] == 1


def test_memory_alone_is_read_into_the_last_sample(state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_values(0, file=state, gpu_utilization_percent=40)
    first = reader.read().gpus[0]
    simgpu.set_values(0, file=state, memory_used_bytes=3 * GIB, gpu_utilization_percent=80)
    second = reader.read_memory().gpus[0]
    assert second.memory_used_bytes == 3 * GIB
    assert (second.utilization, second.taken_at) == (0.4, first.taken_at)
    assert second.memory_taken_at is not None
    assert first.memory_taken_at is not None
    assert second.memory_taken_at > first.memory_taken_at


# --- processes ---


def test_processes_of_this_namespace_once_each(state: simgpu.StateFile, reader: Driven) -> None:
    """Drivers list a process of a container more than once; it is one process, with the larger memory."""
    simgpu.set_driver(file=state, duplicate_processes=2)
    with simgpu.Gpu(0, state=state.path) as gpu:
        gpu.allocate(5 * GIB)
        found = reader.read(processes=True).gpus[0].processes
    assert found is not None
    assert [(process.pid, process.memory_used_bytes) for process in found] == [(os.getpid(), 5 * GIB)]


def test_processes_without_memory_on_drivers_before_565(state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_driver(file=state, process_mode="namespace-no-memory")
    with simgpu.Gpu(0, state=state.path) as gpu:
        gpu.allocate(5 * GIB)
        found = reader.read(processes=True).gpus[0].processes
    assert found is not None
    assert [(process.pid, process.memory_used_bytes) for process in found] == [(os.getpid(), None)]


def test_impossible_pids_are_dropped(state: simgpu.StateFile, reader: Driven) -> None:
    """A library whose structures differ from the binding's yields such (k8s-device-plugin#331)."""
    with simgpu.Gpu(0, state=state.path) as gpu:
        gpu.allocate(5 * GIB)
        simgpu.set_driver(file=state, process_mode="host")
        with state.changing() as raw:
            contexts = [context for context in raw.contexts if context.used and context.gpu == 0]
            contexts[0].host_pid = 2**32 - 1
        reading = reader.read(processes=True)
    assert reading.gpus[0].processes == ()
    assert reading.implausible["processes"] == 1


def test_processes_that_share_a_gpu_are_told_apart_and_never_summed(state: simgpu.StateFile, reader: Driven) -> None:
    """Each has its own memory; load is the GPU's alone (dcgm-exporter#151)."""
    program = [sys.executable, str(FAKE / "simgpu.py"), "use", "--state", str(state.path), "--gpu", "0"]
    with subprocess.Popen([*program, "--memory", "3GiB", "--busy", "0.5"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with simgpu.Gpu(0, state=state.path) as own:
            own.allocate(5 * GIB)
            gpu = reader.read(processes=True).gpus[0]
        other.terminate()
    assert gpu.processes is not None
    found = {process.pid: process.memory_used_bytes for process in gpu.processes}
    assert found == {os.getpid(): 5 * GIB, other.pid: 3 * GIB}
    assert (gpu.memory_used_bytes, gpu.utilization) == (8 * GIB, 0.5)


# --- errors ---

FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": {"utilization", "memory_bandwidth_utilization"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_reserved_bytes"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttled"},
    "nvmlDeviceGetFieldValues": {"memory_temperature_celsius", "energy_joules"},
}
GONE = {15: "GPU_IS_LOST", 16: "RESET_REQUIRED", 28: "GPU_NOT_FOUND"}
LIBRARY_GONE = {1: "UNINITIALIZED", 9: "DRIVER_NOT_LOADED", 18: "LIB_RM_VERSION_MISMATCH"}
OLDER_SYMBOL = {13, 25, 26}
"""The name before (…ThrottleReasons) is then asked, and answers."""
LASTING = [2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 29, 30, 999, 12345]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_failing_call_costs_its_own_values_alone(function: str, state: simgpu.StateFile, reader: Driven) -> None:
    """No error of one call may take other values of that GPU, or any of another (slurm-job-exporter#30)."""
    whole = reader.read()
    for code in LASTING:
        if function == "nvmlDeviceGetCurrentClocksEventReasons" and code in OLDER_SYMBOL:
            continue
        fault = simgpu.fail(code, gpu=3, function=function, file=state)
        reading = reader.read()
        simgpu.clear_fault(fault, file=state)
        missing = {name for name, value in gauges_of(reading.gpus[3]).items() if value is None}
        assert missing == FUNCTIONS[function], code
        assert reading.gpus[3].state is GpuState.OK
        for index in (0, 1, 2, 4, 5, 6, 7):
            assert None not in gauges_of(reading.gpus[index]).values(), code
    assert {name for name, value in gauges_of(reader.read().gpus[3]).items() if value is None} == set()
    assert len(whole.gpus) == 8


@pytest.mark.parametrize("code", GONE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gpu_that_falls_off_the_bus_is_lost_and_comes_back(
    function: str, code: int, state: simgpu.StateFile, reader: Driven
) -> None:
    reader.read()
    fault = simgpu.fail(code, gpu=2, function=function, file=state)
    reading = reader.read()
    gpu = reading.gpus[2]
    assert (gpu.state, gpu.error) == (GpuState.LOST, GONE[code])
    assert_silent(gpu)
    assert gpu.taken_at is not None
    assert [other.state for other in reading.gpus].count(GpuState.OK) == 7
    simgpu.clear_fault(fault, file=state)
    reader.advance(2)
    gpu = reader.read().gpus[2]
    assert (gpu.state, gpu.error) == (GpuState.OK, None)
    assert None not in gauges_of(gpu).values()


def test_lost_on_every_call_and_identity_stays(state: simgpu.StateFile, reader: Driven) -> None:
    reader.read()
    simgpu.lose(5, file=state)
    for _ in range(3):
        gpu = reader.read().gpus[5]
        assert (gpu.state, gpu.error) == (GpuState.LOST, "GPU_IS_LOST")
        assert (gpu.uuid, gpu.model, gpu.index) == (simgpu.uuid_of(5), "NVIDIA A100-SXM4-80GB", 5)
        reader.advance(20)


def test_a_lost_gpu_is_not_asked_at_every_pass(own_state: simgpu.StateFile, start: Callable[..., Driven]) -> None:
    reader = start()
    simgpu.lose(5, file=own_state)
    reader.read()
    before = sum(simgpu.calls(own_state).values())
    reader.read()
    assert sum(simgpu.calls(own_state).values()) - before == 7 * 5 + 1


def test_a_gpu_lost_from_the_start_does_not_hide_the_others(state: simgpu.StateFile, reader: Driven) -> None:
    fault = simgpu.lose(5, file=state)
    reading = reader.read()
    assert [gpu.index for gpu in reading.gpus if gpu.state is GpuState.OK] == [0, 1, 2, 3, 4, 6, 7]
    assert reading.visible == 8
    assert reading.unavailable is None
    simgpu.clear_fault(fault, file=state)
    reader.advance(11)
    assert [gpu.state for gpu in reader.read().gpus] == [GpuState.OK] * 8


def test_a_vanished_gpu_is_lost_until_the_library_is_opened_anew(state: simgpu.StateFile, reader: Driven) -> None:
    reader.read()
    simgpu.set_present(4, False, file=state)
    assert reader.read().gpus[4].state is GpuState.LOST
    simgpu.set_present(4, True, file=state)
    for _ in range(5):
        reader.advance(16)
        reader.read()
    assert [gpu.state for gpu in reader.read().gpus] == [GpuState.OK] * 8


def test_a_gpu_whose_every_call_fails_is_in_error(state: simgpu.StateFile, reader: Driven) -> None:
    reader.read()
    simgpu.fail(999, gpu=1, file=state)
    gpu = reader.read().gpus[1]
    assert (gpu.state, gpu.error) == (GpuState.ERROR, "UNKNOWN")
    assert_silent(gpu)


@pytest.mark.parametrize("code", LIBRARY_GONE)
def test_a_library_that_lost_its_driver_is_opened_again(code: int, state: simgpu.StateFile, reader: Driven) -> None:
    reader.read()
    fault = simgpu.fail(code, gpu=0, function="nvmlDeviceGetUtilizationRates", file=state)
    reading = reader.read()
    assert reading.unavailable is not None
    assert reading.error == LIBRARY_GONE[code]
    assert reading.visible is None
    assert {(gpu.state, gpu.error) for gpu in reading.gpus} == {(GpuState.ERROR, LIBRARY_GONE[code])}
    for gpu in reading.gpus:
        assert_silent(gpu)
    simgpu.clear_fault(fault, file=state)
    reader.advance(1.5)
    reading = reader.read()
    assert reading.unavailable is None
    assert [gpu.state for gpu in reading.gpus] == [GpuState.OK] * 8


INIT_REASONS = [
    (4, False, UnavailableReason.NO_DEVICE_ACCESS),
    (9, False, UnavailableReason.DRIVER_NOT_LOADED),
    (9, True, UnavailableReason.NO_DEVICE_ACCESS),
    (18, False, UnavailableReason.DRIVER_NOT_LOADED),
    (18, True, UnavailableReason.DRIVER_NOT_LOADED),
    (999, False, UnavailableReason.NVML_ERROR),
    (999, True, UnavailableReason.NO_DEVICE_ACCESS),
    (8, False, UnavailableReason.NVML_ERROR),
    (20, False, UnavailableReason.NVML_ERROR),
]


@pytest.mark.parametrize(("code", "loaded", "reason"), INIT_REASONS)
def test_why_the_library_does_not_open(
    code: int, loaded: bool, reason: UnavailableReason, state: simgpu.StateFile, reader: Driven
) -> None:
    reader.order("driver", loaded=loaded)
    simgpu.fail(code, function="init", file=state)
    reading = reader.read()
    assert reading.unavailable is reason
    assert reading.gpus == ()
    assert reading.message
    assert "{" not in reading.message


def test_a_driver_that_comes_late_is_found(start: Callable[..., Driven], tmp_path: Path) -> None:
    """No state file: the simulated driver is not loaded (dcgm-exporter#717)."""
    reader = start()
    assert reader.read().unavailable is UnavailableReason.DRIVER_NOT_LOADED
    for _ in range(6):
        reader.advance(16)
        assert reader.read().unavailable is UnavailableReason.DRIVER_NOT_LOADED
    simgpu.init(tmp_path / "state", gpus=2)
    reader.advance(16)
    reading = reader.read()
    assert reading.unavailable is None
    assert len(reading.gpus) == 2


def test_a_library_that_comes_late_is_found(
    own_state: simgpu.StateFile, start: Callable[..., Driven], library: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    reader = start(folder)
    reading = reader.read()
    assert reading.unavailable is UnavailableReason.NO_LIBRARY
    assert reading.error == "LIBRARY_NOT_FOUND"
    copy(library / "libnvidia-ml.so.1", folder)
    assert reader.read().unavailable is UnavailableReason.NO_LIBRARY, "not looked for at every pass"
    reader.advance(1.5)
    assert reader.read().unavailable is None


def test_no_gpu_is_no_device_access(tmp_path: Path, start: Callable[..., Driven]) -> None:
    simgpu.init(tmp_path / "state", gpus=0)
    reading = start().read()
    assert reading.visible == 0
    assert reading.unavailable is UnavailableReason.NO_DEVICE_ACCESS


def test_gpus_that_cannot_be_opened_are_no_device_access(state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.fail(4, function="nvmlDeviceGetHandleByIndex", file=state)
    reading = reader.read()
    assert reading.visible == 8
    assert (reading.unavailable, reading.error) == (UnavailableReason.NO_DEVICE_ACCESS, "NO_PERMISSION")


def test_the_library_is_opened_once_over_a_day(own_state: simgpu.StateFile, start: Callable[..., Driven]) -> None:
    """Drivers have hung after hours of init and shutdown (go-nvml#152)."""
    reader = start()
    for _ in range(200):
        reader.read()
        reader.advance(432)
    assert [client.inits for client in simgpu.clients(own_state)] == [1]
    assert "nvmlShutdown" not in simgpu.calls(own_state)


def test_a_gpu_lost_for_good_reopens_the_library_ever_more_rarely(
    own_state: simgpu.StateFile, start: Callable[..., Driven]
) -> None:
    reader = start()
    reader.read()
    simgpu.set_present(4, False, file=own_state)
    for _ in range(24 * 12):
        reader.advance(300)
        reader.read()
    assert 20 < simgpu.calls(own_state)["nvmlShutdown"] < 35


# --- garbage ---

SENTINELS = [
    simgpu.NOT_AVAILABLE,
    simgpu.BLANK,
    2**63 - 1,
    2**63 - 16,
    2**32 - 1,
    0x7FFFFFFFFFFFFFF0,
    -1,
    -(2**63),
    10**19,
]
CHECKED = {
    "gpu_utilization_percent": "utilization",
    "memory_utilization_percent": "memory_bandwidth_utilization",
    "memory_used_bytes": "memory_used_bytes",
    "memory_reserved_bytes": "memory_reserved_bytes",
    "power_milliwatts": "power_watts",
    "temperature_celsius": "temperature_celsius",
    "memory_temperature_celsius": "memory_temperature_celsius",
    "energy_millijoules": "energy_joules",
    "nvlink_tx_kibibytes": "nvlink_sent_bytes",
    "nvlink_rx_kibibytes": "nvlink_received_bytes",
    "clocks_event_reasons": "throttled",
}


def assert_plausible(reading: Reading) -> None:
    for gpu in reading.gpus:
        assert gpu.utilization is None or 0 <= gpu.utilization <= 1
        assert gpu.memory_bandwidth_utilization is None or 0 <= gpu.memory_bandwidth_utilization <= 1
        assert gpu.memory_total_bytes is None or 0 < gpu.memory_total_bytes <= 2**44
        for part in (gpu.memory_used_bytes, gpu.memory_reserved_bytes):
            assert part is None or 0 <= part <= (gpu.memory_total_bytes or 0)
        assert gpu.power_watts is None or 0 <= gpu.power_watts <= 5000
        for heat in (gpu.temperature_celsius, gpu.memory_temperature_celsius):
            assert heat is None or -40 <= heat <= 200
        assert gpu.energy_joules is None or 0 <= gpu.energy_joules <= 1e14
        for counter in (gpu.nvlink_sent_bytes, gpu.nvlink_received_bytes, gpu.pcie_sent_bytes):
            assert counter is None or 0 <= counter < 2**62 * 1024


@pytest.mark.parametrize("name", CHECKED)
def test_sentinels_and_garbage_never_leave_the_reader(name: str, state: simgpu.StateFile, reader: Driven) -> None:
    """What is thrown away is None and counted; the other values stay (dcgm-exporter, gpu-monitoring-tools#97)."""
    field = CHECKED[name]
    thrown = 0
    for value in [*SENTINELS, math.nan, math.inf, -1e300]:
        simgpu.set_values(3, file=state, **{name: value})
        reading = reader.read()
        assert_plausible(reading)
        if getattr(reading.gpus[3], field) is None:
            thrown += 1
        assert reading.gpus[3].state is GpuState.OK
        assert getattr(reading.gpus[2], field) is not None
        counted = reading.implausible.get(field, 0)
        assert counted >= thrown
    assert thrown >= 5


@pytest.mark.parametrize("value", [101, 200, 65535])
def test_more_than_all_the_time_is_no_utilisation(value: int, state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_values(0, file=state, gpu_utilization_percent=value)
    reading = reader.read()
    assert reading.gpus[0].utilization is None
    assert reading.implausible["utilization"] == 1


def test_more_memory_in_use_than_there_is(state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_values(0, file=state, memory_used_bytes=81 * GIB)
    gpu = reader.read().gpus[0]
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (None, 80 * GIB)


@pytest.mark.parametrize("total", [0, simgpu.NOT_AVAILABLE, 2**50])
def test_memory_of_no_size_is_unknown(total: int, state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_values(0, file=state, memory_total_bytes=total)
    gpu = reader.read().gpus[0]
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (None, None)
    assert gpu.utilization is not None


def test_a_gpu_without_memory_information_is_kept(state: simgpu.StateFile, reader: Driven) -> None:
    """Unified memory (GB10) offers none; some tools then drop the GPU, or show the host's (ray PR#65550)."""
    simgpu.set_values(0, file=state, **dict.fromkeys(("memory_used_bytes", "memory_total_bytes"), simgpu.Unanswered(3)))
    reading = reader.read()
    gpu = reading.gpus[0]
    assert gpu.state is GpuState.OK
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.memory_reserved_bytes) == (None, None, None)
    assert gpu.utilization is not None
    assert reading.unsupported["memory_used_bytes"] == 1
    assert not reading.failed


def test_utilisation_that_mig_does_not_offer_is_not_zero(state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.set_values(0, file=state, mig_mode=1, gpu_utilization_percent=simgpu.Unanswered(3))
    reading = reader.read()
    assert reading.gpus[0].utilization is None
    assert reading.gpus[0].state is GpuState.OK
    assert reading.gpus[0].power_watts is not None
    assert len({gpu.uuid for gpu in reading.gpus}) == 8, "the parent counts once"


def test_the_binding_choking_on_a_name_costs_the_name_alone(state: simgpu.StateFile, reader: Driven) -> None:
    with state.changing() as raw:
        raw.gpus[0].name = b"\xff\xfe garbage"
    gpu = reader.read().gpus[0]
    assert gpu.model is None
    assert gpu.utilization is not None


def test_a_gpu_without_a_legible_uuid_has_no_identity(state: simgpu.StateFile, reader: Driven) -> None:
    with state.changing() as raw:
        raw.gpus[1].uuid = b"\xff\xfe"
    reading = reader.read()
    assert len(reading.gpus) == 7
    assert reading.implausible["uuid"] == 1


# --- an old driver's library ---


def test_an_old_library_is_read_by_its_older_symbols(
    own_state: simgpu.StateFile, start: Callable[..., Driven], library: Path
) -> None:
    """It lacks memory v2, process lists v2 and v3, field values, clocks' event reasons and event wait v2."""
    reader = start(library / "old")
    with simgpu.Gpu(0, state=own_state.path) as used:
        used.allocate(10 * GIB)
        reading = reader.read(processes=True)
    gpu = reading.gpus[0]
    assert reading.unavailable is None
    assert gpu.state is GpuState.OK
    assert gpu.memory_reserved_bytes is None
    assert gpu.memory_used_bytes == 10 * GIB + 600 * 2**20, "the older call counts the reserve as used"
    assert gpu.throttled is not None
    assert gpu.processes is None
    assert (gpu.energy_joules, gpu.memory_temperature_celsius) == (None, None)
    assert gpu.power_watts is not None
    assert not reading.failed


# --- Xids ---


def test_each_xid_counts_also_the_same_one_again(state: simgpu.StateFile, reader: Driven) -> None:
    """A gauge of the last Xid hides a repeat and never ends (dcgm-exporter#500)."""
    reader.read()
    for gpu, code in [(1, 31), (1, 31), (1, 62), (7, 79)]:
        simgpu.xid(gpu, code, file=state)
    xids = [(xid.uuid, xid.code) for xid in reader.read().xids]
    one, seven = simgpu.uuid_of(1), simgpu.uuid_of(7)
    assert sorted(xids) == sorted([(one, 31), (one, 31), (one, 62), (seven, 79)])
    assert reader.read().xids == ()


def test_the_xid_of_a_gpu_that_then_falls_off_the_bus_is_seen(state: simgpu.StateFile, reader: Driven) -> None:
    reader.read()
    simgpu.xid(3, 79, file=state)
    simgpu.lose(3, file=state)
    reading = reader.read()
    assert [(xid.uuid, xid.code) for xid in reading.xids] == [(simgpu.uuid_of(3), 79)]
    assert reading.gpus[3].state is GpuState.LOST


def test_xids_go_on_after_a_gpu_was_lost(state: simgpu.StateFile, reader: Driven) -> None:
    reader.read()
    fault = simgpu.lose(3, file=state)
    reader.read()
    reader.advance(20)
    reader.read()
    simgpu.xid(2, 31, file=state)
    assert [xid.code for xid in reader.read().xids] == [31]
    simgpu.clear_fault(fault, file=state)
    reader.advance(20)
    reader.read()
    reader.advance(20)
    reader.read()
    simgpu.xid(3, 43, file=state)
    assert [(xid.uuid, xid.code) for xid in reader.read().xids] == [(simgpu.uuid_of(3), 43)]


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"])
def test_a_driver_without_events_is_read_all_the_same(function: str, state: simgpu.StateFile, reader: Driven) -> None:
    simgpu.fail(3, function=function, file=state)
    reading = reader.read()
    assert reading.unavailable is None
    assert [gpu.state for gpu in reading.gpus] == [GpuState.OK] * 8
    assert not reading.failed


def test_an_absurd_xid_code_is_thrown_away(state: simgpu.StateFile, reader: Driven) -> None:
    reader.read()
    simgpu.xid(0, 2**64 - 1, file=state)
    reading = reader.read()
    assert reading.xids == ()
    assert reading.implausible["xid_errors"] == 1


def test_a_reading_survives_the_wire(state: simgpu.StateFile, reader: Driven) -> None:
    """Infinity and NaN would not: JSON has neither."""
    for index in range(8):
        simgpu.set_values(index, file=state, energy_millijoules=math.nan, memory_temperature_celsius=math.inf)
    reading = reader.read()
    assert msgspec.json.decode(msgspec.json.encode(reading), type=Reading) == reading
