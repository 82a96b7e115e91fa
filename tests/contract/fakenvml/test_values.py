# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Readings: those of an idle GPU, of a GPU at work, and those that a test sets."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import simgpu

Read = Callable[[Any, Any], Any]
GIB = 1 << 30

IDLE: list[tuple[str, Read, Any]] = [
    ("name", lambda n, d: n.nvmlDeviceGetName(d), "NVIDIA A100-SXM4-80GB"),
    ("uuid", lambda n, d: n.nvmlDeviceGetUUID(d), "GPU-00000000-5eed-4a00-8000-000000000000"),
    ("driver", lambda n, _: n.nvmlSystemGetDriverVersion(), "570.124.06"),
    ("nvml", lambda n, _: n.nvmlSystemGetNVMLVersion(), "12.570.124.06"),
    ("cuda", lambda n, _: n.nvmlSystemGetCudaDriverVersion(), 12080),
    ("cuda_v2", lambda n, _: n.nvmlSystemGetCudaDriverVersion_v2(), 12080),
    ("bus id", lambda n, d: n.nvmlDeviceGetPciInfo_v3(d).busId, "00000000:07:00.0"),
    ("legacy bus id", lambda n, d: n.nvmlDeviceGetPciInfo_v3(d).busIdLegacy, "0000:07:00.0"),
    ("serial", lambda n, d: n.nvmlDeviceGetSerial(d), "1564021000000"),
    ("bar1", lambda n, d: n.nvmlDeviceGetBAR1MemoryInfo(d).bar1Used, 3 << 20),
    ("utilization", lambda n, d: n.nvmlDeviceGetUtilizationRates(d).gpu, 0),
    ("encoder", lambda n, d: n.nvmlDeviceGetEncoderUtilization(d), [0, 167000]),
    ("decoder", lambda n, d: n.nvmlDeviceGetDecoderUtilization(d), [0, 167000]),
    ("power", lambda n, d: n.nvmlDeviceGetPowerUsage(d), 60000),
    ("enforced limit", lambda n, d: n.nvmlDeviceGetEnforcedPowerLimit(d), 400000),
    ("limit", lambda n, d: n.nvmlDeviceGetPowerManagementLimit(d), 400000),
    ("default limit", lambda n, d: n.nvmlDeviceGetPowerManagementDefaultLimit(d), 400000),
    ("temperature", lambda n, d: n.nvmlDeviceGetTemperature(d, 0), 36),
    ("temperature, versioned", lambda n, d: n.nvmlDeviceGetTemperatureV(d, 0), 36),
    ("slowdown threshold", lambda n, d: n.nvmlDeviceGetTemperatureThreshold(d, 1), 89),
    ("SM clock", lambda n, d: n.nvmlDeviceGetClockInfo(d, 1), 210),
    ("memory clock", lambda n, d: n.nvmlDeviceGetClockInfo(d, 2), 1593),
    ("highest SM clock", lambda n, d: n.nvmlDeviceGetMaxClockInfo(d, 1), 1410),
    ("performance state", lambda n, d: n.nvmlDeviceGetPerformanceState(d), 0),
    ("event reasons", lambda n, d: n.nvmlDeviceGetCurrentClocksEventReasons(d), 1),
    ("throttle reasons", lambda n, d: n.nvmlDeviceGetCurrentClocksThrottleReasons(d), 1),
    ("PCIe sent", lambda n, d: n.nvmlDeviceGetPcieThroughput(d, 0), 400),
    ("PCIe received", lambda n, d: n.nvmlDeviceGetPcieThroughput(d, 1), 700),
    ("ECC", lambda n, d: n.nvmlDeviceGetTotalEccErrors(d, 1, 0), 0),
    ("remapped rows", lambda n, d: n.nvmlDeviceGetRemappedRows(d), (0, 0, 0, 0)),
    ("retired pages", lambda n, d: n.nvmlDeviceGetRetiredPages(d, 0), []),
    ("MIG", lambda n, d: n.nvmlDeviceGetMigMode(d), [0, 0]),
    ("compute mode", lambda n, d: n.nvmlDeviceGetComputeMode(d), 0),
    ("persistence", lambda n, d: n.nvmlDeviceGetPersistenceMode(d), 1),
    ("processes", lambda n, d: n.nvmlDeviceGetComputeRunningProcesses(d), []),
    ("samples", lambda n, d: n.nvmlDeviceGetSamples(d, 0, 0)[1][0].sampleValue.uiVal, 60000),
]


@pytest.mark.parametrize(("read", "value"), [pytest.param(r, v, id=name) for name, r, v in IDLE])
def test_an_idle_gpu(nvml: Any, device: Any, read: Read, value: Any) -> None:
    assert read(nvml, device) == value


def test_the_fan_is_not_supported(nvml: Any, device: Any) -> None:
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetFanSpeed(device)
    simgpu.set_values(0, fan_speed_percent=30)
    assert nvml.nvmlDeviceGetFanSpeed(device) == 30


@pytest.mark.parametrize("bus_id", ["00000000:0F:00.0", "0000:0f:00.0"])
def test_handles_by_uuid_and_bus_id(nvml: Any, bus_id: str) -> None:
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByPciBusId(bus_id)) == 1
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(simgpu.uuid_of(2))) == 2
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID("GPU-other")


def test_the_second_memory_version_keeps_reserved_apart(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.allocate(10 * GIB)
    v1, v2 = nvml.nvmlDeviceGetMemoryInfo(device), nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    assert (v2.total, v2.used, v2.reserved) == (80 * GIB, 10 * GIB, 600 << 20)
    assert v2.free == v2.total - v2.used - v2.reserved
    assert (v1.total, v1.used, v1.free) == (v2.total, v2.used + v2.reserved, v2.free)


def test_a_gpu_at_work(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    with gpu.busy(0.8, power_watts=300):
        utilization = nvml.nvmlDeviceGetUtilizationRates(device)
        assert (utilization.gpu, utilization.memory) == (80, 32)
        assert nvml.nvmlDeviceGetPowerUsage(device) == 300000
        assert nvml.nvmlDeviceGetClockInfo(device, 1) == 1410
        assert nvml.nvmlDeviceGetCurrentClocksEventReasons(device) == 0
        assert nvml.nvmlDeviceGetPcieThroughput(device, 0) < nvml.nvmlDeviceGetPcieThroughput(device, 1)
        gpu.power(900)
        assert nvml.nvmlDeviceGetPowerUsage(device) == 400000, "no more than the limit"
        assert nvml.nvmlDeviceGetCurrentClocksEventReasons(device) == 4, "power cap"
    assert nvml.nvmlDeviceGetUtilizationRates(device).gpu == 0
    assert nvml.nvmlDeviceGetPowerUsage(device) == 60000


def test_a_load_ends_by_itself(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.busy(1.0, seconds=0.2)
    assert nvml.nvmlDeviceGetUtilizationRates(device).gpu == 100
    time.sleep(0.25)
    assert nvml.nvmlDeviceGetUtilizationRates(device).gpu == 0


def test_energy_is_power_over_time_and_counts_a_load_nobody_watched(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    before, start = nvml.nvmlDeviceGetTotalEnergyConsumption(device), time.monotonic()
    gpu.busy(1.0, power_watts=400, seconds=0.25)
    time.sleep(0.5)
    spent, seconds = nvml.nvmlDeviceGetTotalEnergyConsumption(device) - before, time.monotonic() - start
    assert spent == pytest.approx(400_000 * 0.25 + 60_000 * (seconds - 0.25), rel=0.05)


def test_temperature_follows_load_slowly(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    cold = nvml.nvmlDeviceGetTemperature(device, 0)
    gpu.busy(1.0, power_watts=400)
    assert nvml.nvmlDeviceGetTemperature(device, 0) <= cold + 1
    time.sleep(0.8)
    assert cold + 2 <= nvml.nvmlDeviceGetTemperature(device, 0) <= cold + 12


FIELDS = {
    1: 1, 3: 0, 4: 0, 5: 0, 6: 0, 31: 0, 38: 0, 52: 0, 59: 0, 82: 42, 91: 12, 94: 0, 142: 0, 143: 0, 144: 0, 145: 0,
    165: 1, 185: 60000, 186: 60000, 190: 400000,
}  # fmt: skip


def test_field_values_each_with_its_own_result(nvml: Any, device: Any) -> None:
    answers = nvml.nvmlDeviceGetFieldValues(device, [*FIELDS, 83, 230, 251, 400])
    assert {a.fieldId: a.value.ullVal for a in answers if a.fieldId in FIELDS} == FIELDS
    assert {a.fieldId: a.nvmlReturn for a in answers if a.nvmlReturn} == {251: 3, 400: 2}
    assert all(a.timestamp > 1e15 for a in answers)


def test_nvlink_counts_what_a_load_moves(nvml: Any, device: Any, gpu: simgpu.Gpu) -> None:
    gpu.busy(0.5)
    time.sleep(0.1)
    sent, received, pcie = (a.value.ullVal for a in nvml.nvmlDeviceGetFieldValues(device, [138, 139, 198]))
    assert 0 < received < sent
    assert pcie > 0


def _used_v2(n: Any, d: Any) -> int:
    return int(n.nvmlDeviceGetMemoryInfo(d, version=n.nvmlMemory_v2).used)


def _field(number: int) -> Read:
    return lambda n, d: n.nvmlDeviceGetFieldValues(d, [number])[0].value.ullVal


ALL_ONES = simgpu.NOT_AVAILABLE
SET: list[tuple[str, dict[str, simgpu.Value], Read, Any]] = [
    ("utilisation", {"gpu_utilization_percent": 97}, lambda n, d: n.nvmlDeviceGetUtilizationRates(d).gpu, 97),
    ("memory", {"memory_used_bytes": GIB}, _used_v2, GIB),
    ("power", {"power_milliwatts": 123}, lambda n, d: n.nvmlDeviceGetPowerUsage(d), 123),
    ("ECC", {"ecc_uncorrected_volatile": 7}, lambda n, d: n.nvmlDeviceGetTotalEccErrors(d, 1, 0), 7),
    ("rows", {"remapped_rows_pending": 1}, lambda n, d: n.nvmlDeviceGetRemappedRows(d), (0, 0, 1, 0)),
    ("pages", {"retired_pages_uncorrected": 2}, lambda n, d: len(n.nvmlDeviceGetRetiredPages(d, 1)), 2),
    ("reasons", {"clocks_event_reasons": 0x48}, lambda n, d: n.nvmlDeviceGetCurrentClocksEventReasons(d), 0x48),
    ("unavailable, 32 bits", {"power_milliwatts": ALL_ONES}, lambda n, d: n.nvmlDeviceGetPowerUsage(d), 2**32 - 1),
    ("unavailable, 64 bits", {"memory_used_bytes": ALL_ONES}, _used_v2, ALL_ONES),
    ("unavailable, v1", {"memory_used_bytes": ALL_ONES}, lambda n, d: n.nvmlDeviceGetMemoryInfo(d).used, ALL_ONES),
    (
        "blank",
        {"energy_millijoules": simgpu.BLANK},
        lambda n, d: n.nvmlDeviceGetTotalEnergyConsumption(d),
        simgpu.BLANK,
    ),
    ("blank field", {"nvlink_tx_kibibytes": simgpu.BLANK}, _field(138), 9223372036854775794),
    ("absurd percent", {"gpu_utilization_percent": -1}, lambda n, d: n.nvmlDeviceGetUtilizationRates(d).gpu, 2**32 - 1),
    ("more used than there is", {"memory_used_bytes": 90 * GIB}, _used_v2, 90 * GIB),
    ("negative degrees", {"temperature_celsius": -40}, lambda n, d: n.nvmlDeviceGetTemperatureV(d, 0), -40),
    ("absurd degrees", {"temperature_celsius": 4000}, lambda n, d: n.nvmlDeviceGetTemperature(d, 0), 4000),
]


@pytest.mark.parametrize(("values", "read", "value"), [pytest.param(v, r, x, id=name) for name, v, r, x in SET])
def test_a_reading_that_is_set(nvml: Any, device: Any, values: dict[str, Any], read: Read, value: Any) -> None:
    simgpu.set_values(0, **values)
    assert read(nvml, device) == value
    simgpu.clear_values(0)
    assert read(nvml, device) != value


def test_a_double_that_is_no_number(nvml: Any, device: Any) -> None:
    simgpu.set_values(0, memory_temperature_celsius=math.nan)
    answer = nvml.nvmlDeviceGetFieldValues(device, [82])[0]
    assert answer.valueType == nvml.NVML_VALUE_TYPE_DOUBLE
    assert math.isnan(answer.value.dVal)


def test_a_reading_without_answer_fails_in_calls_and_fields_alike(nvml: Any, device: Any) -> None:
    simgpu.set_values(0, memory_used_bytes=simgpu.Unanswered(), power_milliwatts=simgpu.Unanswered(21))
    for version in (None, nvml.nvmlMemory_v2):
        with pytest.raises(nvml.NVMLError_NotSupported):
            nvml.nvmlDeviceGetMemoryInfo(device, version=version)
    with pytest.raises(nvml.NVMLError_NoData):
        nvml.nvmlDeviceGetPowerUsage(device)
    assert nvml.nvmlDeviceGetFieldValues(device, [186])[0].nvmlReturn == 21


def test_an_unknown_reading_is_refused(state: object) -> None:
    with pytest.raises(ValueError, match="no reading"):
        simgpu.set_values(0, power=1)
