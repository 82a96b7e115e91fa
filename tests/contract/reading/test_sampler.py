# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler on the simulated library: hangs, losses, and who touches NVML."""

import time
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
import simgpu

from verl_gpumonitor.model.vocabulary import GpuState, Source, UnavailableReason

from .conftest import FAST, Driven, Moment

GIB = 2**30

CALLS_OF_A_GPU = [
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetFieldValues",
]


def state_of(index: int, state: GpuState) -> Callable[[Moment], bool]:
    return lambda moment: moment.gpu(index).state is state


def passed(moment: Moment, passes: int) -> Callable[[Moment], bool]:
    target = moment.sample.health.collections + passes
    return lambda later: later.sample.health.collections >= target


@pytest.mark.slow
@pytest.mark.parametrize("function", CALLS_OF_A_GPU)
def test_a_hanging_call_costs_its_gpu_alone(function: str, own_state: simgpu.StateFile, sampler: Driven) -> None:
    """No stale value is shown for it, the others stay fresh, and it is back when the call returns (pai#889)."""
    fault = simgpu.hang(gpu=3, function=function, file=own_state)
    moment = sampler.until(state_of(3, GpuState.NOT_RESPONDING))
    assert moment.gpu(3).error == "CALL_TIMED_OUT"
    frozen = moment.gpu(3).taken_at
    moment = sampler.until(passed(moment, 5))
    hung = moment.gpu(3)
    assert (hung.utilization, hung.memory_used_bytes, hung.power_watts, hung.energy_joules) == (None,) * 4
    assert hung.taken_at == frozen
    for index in (0, 1, 2, 4, 5, 6, 7):
        assert moment.gpu(index).state is GpuState.OK
        assert moment.gpu(index).utilization is not None
        assert moment.age(index) < 0.35, "three intervals and a little"
    assert moment.sample.health.timeouts == 1
    assert moment.sample.unavailable is None
    simgpu.clear_fault(fault, file=own_state)
    moment = sampler.until(state_of(3, GpuState.OK))
    assert moment.gpu(3).utilization is not None
    assert moment.age(3) < 0.35


def test_while_nothing_hangs_one_thread_alone_touches_nvml(own_state: simgpu.StateFile, sampler: Driven) -> None:
    """However many ask for the latest values at once (concurrent scrapes have crashed a kernel)."""
    moment = sampler.latest()
    for _ in range(100):
        sampler.latest()
    sampler.until(passed(moment, 10))
    assert simgpu.max_concurrency(own_state) == 1
    client = simgpu.clients(own_state)[-1]
    assert (client.threads, client.inits) == (1, 1)


def test_reading_the_latest_values_makes_no_call(own_state: simgpu.StateFile, start: Callable[..., Driven]) -> None:
    sampler = start()
    sampler.sample(interval_seconds=30, memory_interval_seconds=30, call_limit_seconds=1)
    sampler.until(lambda moment: moment.sample.health.collections > 0)
    before = sum(simgpu.calls(own_state).values())
    for _ in range(200):
        sampler.latest()
    assert sum(simgpu.calls(own_state).values()) == before


def test_while_one_call_hangs_one_other_thread_goes_on(own_state: simgpu.StateFile, sampler: Driven) -> None:
    simgpu.hang(gpu=3, function="nvmlDeviceGetUtilizationRates", file=own_state)
    moment = sampler.until(state_of(3, GpuState.NOT_RESPONDING))
    sampler.until(passed(moment, 10))
    assert simgpu.max_concurrency(own_state) == 2


@pytest.mark.slow
def test_all_gpus_may_hang_and_all_come_back(own_state: simgpu.StateFile, sampler: Driven) -> None:
    fault = simgpu.hang(function="nvmlDeviceGetUtilizationRates", file=own_state)
    moment = sampler.until(
        lambda moment: all(gpu.state is GpuState.NOT_RESPONDING for gpu in moment.sample.gpus), seconds=15
    )
    assert moment.sample.health.timeouts == 8
    time.sleep(1)
    assert simgpu.max_concurrency(own_state) <= 9, "one stuck thread a GPU, and the one that lives"
    simgpu.clear_fault(fault, file=own_state)
    sampler.until(lambda moment: all(gpu.state is GpuState.OK for gpu in moment.sample.gpus))


def test_a_gpu_that_hangs_again_is_held_out_for_a_while(own_state: simgpu.StateFile, sampler: Driven) -> None:
    for _ in range(2):
        fault = simgpu.hang(gpu=1, function="nvmlDeviceGetUtilizationRates", file=own_state)
        sampler.until(state_of(1, GpuState.NOT_RESPONDING))
        simgpu.clear_fault(fault, file=own_state)
        moment = sampler.latest()
        moment = sampler.until(passed(moment, 8))
    assert moment.gpu(1).state is GpuState.NOT_RESPONDING
    sampler.advance(11)
    sampler.until(state_of(1, GpuState.OK))


def test_hanging_events_cost_the_events_alone(own_state: simgpu.StateFile, sampler: Driven) -> None:
    simgpu.hang(function="nvmlEventSetWait", file=own_state)
    moment = sampler.until(lambda moment: moment.sample.health.timeouts == 1)
    moment = sampler.until(passed(moment, 5))
    assert all(gpu.state is GpuState.OK for gpu in moment.sample.gpus)
    assert moment.age(0) < 0.35


def test_a_hanging_count_costs_nothing_that_is_known(own_state: simgpu.StateFile, sampler: Driven) -> None:
    simgpu.hang(function="nvmlDeviceGetCount", file=own_state)
    sampler.advance(11)
    moment = sampler.until(lambda moment: moment.sample.health.timeouts == 1)
    moment = sampler.until(passed(moment, 5))
    assert all(gpu.state is GpuState.OK for gpu in moment.sample.gpus)


def test_a_gpu_that_hangs_from_the_start_does_not_hide_the_others(
    own_state: simgpu.StateFile, start: Callable[..., Driven]
) -> None:
    simgpu.hang(gpu=6, file=own_state)
    sampler = start()
    sampler.sample(**FAST)
    moment = sampler.until(lambda moment: len(moment.sample.gpus) == 7)
    assert all(gpu.state is GpuState.OK for gpu in moment.sample.gpus)
    assert moment.sample.visible == 8
    simgpu.clear_faults(file=own_state)
    sampler.advance(11)
    sampler.until(lambda moment: len(moment.sample.gpus) == 8)


def test_an_init_that_hangs_is_said_and_waited_for(own_state: simgpu.StateFile, start: Callable[..., Driven]) -> None:
    fault = simgpu.hang(function="init", file=own_state)
    sampler = start()
    sampler.sample(**FAST)
    moment = sampler.until(lambda moment: moment.sample.unavailable is not None)
    assert moment.sample.unavailable is UnavailableReason.NOT_RESPONDING
    assert moment.sample.source is Source.NONE
    assert "nvmlInitWithFlags" in (moment.sample.message or "")
    time.sleep(1.2)
    assert sampler.latest().sample.health.timeouts == 1
    assert simgpu.max_concurrency(own_state) == 1, "a second init would hang as well, so none is tried"
    simgpu.clear_fault(fault, file=own_state)
    moment = sampler.until(lambda moment: len(moment.sample.gpus) == 8)
    assert moment.sample.unavailable is None
    assert moment.sample.source is Source.NVML


def test_stopping_takes_half_a_second_even_while_a_call_hangs(own_state: simgpu.StateFile, sampler: Driven) -> None:
    simgpu.hang(gpu=3, function="nvmlDeviceGetUtilizationRates", file=own_state)
    sampler.until(state_of(3, GpuState.NOT_RESPONDING))
    assert float(sampler.order("stop")) < 0.6


def test_a_lost_gpu_keeps_its_counters_and_goes_on_counting(own_state: simgpu.StateFile, sampler: Driven) -> None:
    simgpu.set_values(2, file=own_state, gpu_utilization_percent=50)
    sampler.until(lambda moment: moment.sample.counters[simgpu.uuid_of(2)].busy_seconds > 0.1)
    fault = simgpu.lose(2, file=own_state)
    lost = sampler.until(state_of(2, GpuState.LOST))
    before = lost.sample.counters[simgpu.uuid_of(2)]
    later = sampler.until(passed(lost, 5)).sample.counters[simgpu.uuid_of(2)]
    assert later == before, "a gap counts neither as busy nor as idle"
    simgpu.clear_fault(fault, file=own_state)
    sampler.advance(2)
    sampler.until(lambda moment: moment.sample.counters[simgpu.uuid_of(2)].busy_seconds > before.busy_seconds)


def test_peaks_xids_and_energy_add_up(own_state: simgpu.StateFile, sampler: Driven) -> None:
    uuid = simgpu.uuid_of(4)
    simgpu.set_values(4, file=own_state, memory_used_bytes=70 * GIB)
    sampler.until(lambda moment: moment.gpu(4).memory_used_bytes == 70 * GIB)
    simgpu.set_values(4, file=own_state, memory_used_bytes=10 * GIB)
    simgpu.xid(4, 31, file=own_state)
    simgpu.xid(4, 31, file=own_state)
    moment = sampler.until(
        lambda moment: (
            moment.gpu(4).memory_used_bytes == 10 * GIB and moment.sample.counters[uuid].xid_errors == {31: 2}
        )
    )
    counters = moment.sample.counters[uuid]
    assert counters.memory_peak_bytes == counters.memory_recent_peak_bytes == 70 * GIB
    assert counters.xid_last_at[31] <= moment.now
    moment = sampler.until(lambda moment: moment.sample.counters[uuid].observed_seconds > 1)
    energy = moment.sample.counters[uuid].energy_joules
    assert energy is not None
    assert 30 < energy < 150, "60 W, idle, for something over a second"
    sampler.advance(66)
    sampler.until(lambda moment: moment.sample.counters[uuid].memory_recent_peak_bytes == 10 * GIB)
    assert sampler.latest().sample.counters[uuid].memory_peak_bytes == 70 * GIB


def test_a_library_and_driver_that_come_late(tmp_path: Path, library: Path, start: Callable[..., Driven]) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    sampler = start(folder)
    sampler.sample(**FAST)
    moment = sampler.until(lambda moment: moment.sample.unavailable is UnavailableReason.NO_LIBRARY)
    assert moment.sample.health.collections == 0
    assert moment.sample.health.failures > 0
    copy(library / "libnvidia-ml.so.1", folder)
    sampler.advance(16)
    sampler.until(lambda moment: moment.sample.unavailable is UnavailableReason.DRIVER_NOT_LOADED)
    simgpu.init(tmp_path / "state", gpus=2)
    sampler.advance(16)
    moment = sampler.until(lambda moment: moment.sample.unavailable is None and len(moment.sample.gpus) == 2)
    assert moment.sample.source is Source.NVML
    assert moment.sample.error is None
