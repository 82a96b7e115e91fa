# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The library as such: symbols, layout, visibility, counting, a driver that is not there."""

import ctypes
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import simgpu

from tests.contract.fakenvml import programs

STRUCTURES = {
    "fake_gpu": simgpu.FakeGpu,
    "fake_context": simgpu.FakeContext,
    "fake_fault": simgpu.FakeFault,
    "fake_event": simgpu.FakeEvent,
    "fake_call": simgpu.FakeCall,
    "fake_client": simgpu.FakeClient,
    "fake_state": simgpu.FakeState,
}


def _exported(library: Path) -> set[str]:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, stdout=subprocess.PIPE, text=True
    )
    return {line.split()[-1] for line in listing.stdout.splitlines()}


def _c_layout(library: ctypes.CDLL) -> list[str]:
    text = ctypes.create_string_buffer(65536)
    library.fakenvml_layout.restype = ctypes.c_size_t
    assert library.fakenvml_layout(text, ctypes.c_size_t(len(text))) < len(text)
    return text.value.decode().splitlines()


def _python_layout() -> list[str]:
    lines = [f"{name} 0 {ctypes.sizeof(structure)}" for name, structure in STRUCTURES.items()]
    for name, structure in STRUCTURES.items():
        for field in structure._fields_:
            member = getattr(structure, field[0])
            lines.append(f"{name}.{field[0]} {member.offset} {member.size}")
    return lines + [f"reading {number} {name}" for number, name in enumerate(simgpu.READINGS)]


def test_c_and_python_agree_on_the_layout(library: ctypes.CDLL) -> None:
    assert _c_layout(library) == _python_layout()


def test_every_symbol_of_the_header_is_exported(library: ctypes.CDLL) -> None:
    names = set((programs.SIMULATION / "symbols.txt").read_text().split())
    assert len(names) > 430
    assert _exported(programs.BUILD / "libnvidia-ml.so.1") == names | {"fakenvml_layout"}


def test_the_old_driver_lacks_what_its_list_says(library: ctypes.CDLL) -> None:
    lacks = set((programs.SIMULATION / "old-driver-lacks.txt").read_text().split())
    old = _exported(programs.BUILD / "old" / "libnvidia-ml.so.1")
    assert _exported(programs.BUILD / "libnvidia-ml.so.1") - old == lacks


def test_the_binding_meets_missing_symbols_of_an_old_driver(state: Path) -> None:
    script = """
import json, pynvml, simgpu
pynvml.nvmlInit()
simgpu.Gpu(0).allocate(1 << 30)
device = pynvml.nvmlDeviceGetHandleByIndex(0)
def code(call):
    try: return call()
    except pynvml.NVMLError as error: return f"error {error.value}"
print(json.dumps([
    code(lambda: pynvml.nvmlDeviceGetMemoryInfo(device).used >> 20),
    code(lambda: pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).used),
    code(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses_v3(device)),
    code(lambda: len(pynvml.nvmlDeviceGetFieldValues(device, [83]))),
    code(lambda: pynvml.nvmlDeviceGetTemperature(device, 0) > 0),
]))"""
    answers = programs.result(state, script, LD_LIBRARY_PATH=str(programs.BUILD / "old"))
    assert answers == [1024 + 600, "error 13", "error 13", "error 13", True]


def test_a_symbol_without_an_answer_is_not_supported(nvml: Any, device: Any) -> None:
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetGpuOperationMode(device)


def test_calls_before_initialisation_say_so(pynvml: Any) -> None:
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        pytest.param({}, [0, 1, 2, 3], id="no choice: the host sees all"),
        pytest.param({"FAKENVML_GPU_2": "1"}, [2], id="one"),
        pytest.param({"FAKENVML_GPU_3": "1", "FAKENVML_GPU_1": "1"}, [1, 3], id="two, in the host's order"),
        pytest.param({"FAKENVML_GPU_0": "0"}, [], id="a choice of none"),
        pytest.param({"FAKENVML_GPU_2": "1", "FAKENVML_ALL": "1"}, [0, 1, 2, 3], id="all wins"),
    ],
)
def test_a_process_sees_the_gpus_it_was_given_numbered_anew(
    pynvml: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seen: list[int]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pynvml.nvmlInit()
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        assert [pynvml.nvmlDeviceGetUUID(handle) for handle in handles] == [simgpu.uuid_of(number) for number in seen]
        assert [pynvml.nvmlDeviceGetIndex(handle) for handle in handles] == list(range(len(seen)))
        assert [pynvml.nvmlDeviceGetMinorNumber(handle) for handle in handles] == seen
        assert [simgpu.Gpu(index).uuid for index in range(count)] == [simgpu.uuid_of(number) for number in seen]
        if len(seen) < 4:
            with pytest.raises(pynvml.NVMLError_NotFound):
                pynvml.nvmlDeviceGetHandleByUUID(simgpu.uuid_of(0 if seen != [0] else 1))
    finally:
        pynvml.nvmlShutdown()


def test_a_cuda_ordinal_heeds_cuda_visible_devices(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3,{simgpu.uuid_of(1)}")
    assert [simgpu.Gpu.cuda(ordinal).number for ordinal in (0, 1)] == [3, 1]
    with pytest.raises(simgpu.NoSuchGpuError):
        simgpu.Gpu.cuda(2)


def test_the_driver_may_come_late(pynvml: Any, state: Path) -> None:
    waiting = state.with_name("later")
    state.rename(waiting)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
    waiting.rename(state)
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 4
    pynvml.nvmlShutdown()


def test_another_layout_is_a_version_mismatch(pynvml: Any, state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[8] += 1
    state.unlink()
    state.write_bytes(content)
    with pytest.raises(pynvml.NVMLError_LibRmVersionMismatch):
        pynvml.nvmlInit()
    with pytest.raises(simgpu.NoDriverError):
        simgpu.open_state()


def test_init_makes_the_file_for_every_user_and_resets_in_place(state: Path) -> None:
    inode = state.stat().st_ino
    assert state.stat().st_mode & 0o777 == 0o666
    assert [path.name for path in state.parent.iterdir()] == ["state"]
    simgpu.set_values(0, power_milliwatts=1)
    simgpu.init(state, gpus=2)
    assert state.stat().st_ino == inode
    assert [gpu["set"] for gpu in simgpu.show()["gpus"]] == [{}, {}]


def test_calls_are_counted_by_function(nvml: Any, device: Any) -> None:
    simgpu.reset()
    for _ in range(3):
        nvml.nvmlDeviceGetPowerUsage(device)
    nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    assert simgpu.calls() == {"nvmlDeviceGetPowerUsage": 3, "nvmlDeviceGetMemoryInfo_v2": 1}


def test_concurrency_tells_whether_one_thread_touches_nvml(nvml: Any, device: Any) -> None:
    simgpu.reset()
    nvml.nvmlDeviceGetPowerUsage(device)
    assert (simgpu.max_concurrency(), simgpu.clients()[-1].max_inside) == (1, 1)
    simgpu.delay(100_000, function="nvmlDeviceGetPowerUsage")
    threads = [threading.Thread(target=nvml.nvmlDeviceGetPowerUsage, args=[device]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (simgpu.max_concurrency(), simgpu.clients()[-1].max_inside) == (3, 3)
    assert simgpu.clients()[-1].threads >= 3


def test_a_reset_counts_threads_anew(nvml: Any, device: Any) -> None:
    nvml.nvmlDeviceGetPowerUsage(device)
    simgpu.reset()
    nvml.nvmlDeviceGetPowerUsage(device)
    nvml.nvmlDeviceGetPowerUsage(device)
    own = simgpu.clients()[-1]
    assert (own.threads, own.calls, own.max_inside) == (1, 2, 1)


def test_a_busy_client_keeps_its_record_though_many_come_and_go(nvml: Any, device: Any, state: Path) -> None:
    nvml.nvmlDeviceGetPowerUsage(device)
    file = simgpu.open_state()
    for client in file.state.clients:
        if not client.pid:
            client.pid, client.last_call_at_ns = 1, 1
    for _ in range(3):
        programs.result(state, "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())")
    simgpu.reset()
    nvml.nvmlDeviceGetPowerUsage(device)
    assert [client.calls for client in simgpu.clients() if client.pid == os.getpid()] == [1]


def test_what_may_only_be_read_answers_but_does_not_count(state: Path) -> None:
    folder = state.parent
    prefix = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} && exec "$@"',
        "-",
    ]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    simgpu.set_values(1, temperature_celsius=71)
    simgpu.fail(15, gpu=2, skip=1)
    script = """
import json, pynvml, simgpu
pynvml.nvmlInit()
device = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(4)]
try: lost = pynvml.nvmlDeviceGetPowerUsage(device[2])
except pynvml.NVMLError as error: lost = error.value
energy = [pynvml.nvmlDeviceGetTotalEnergyConsumption(device[0]) for _ in range(3)]
try: simgpu.Gpu(0).hold(); held = True
except simgpu.SimulatedGpuError: held = False
warm = pynvml.nvmlDeviceGetTemperature(device[1], 0)
print(json.dumps([warm, lost, energy == sorted(energy), held, len(simgpu.show()["gpus"])]))"""
    assert programs.result(state, script, prefix=prefix) == [71, 15, True, False, 4]
    assert simgpu.calls() == {}
