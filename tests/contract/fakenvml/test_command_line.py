# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The command line does what the functions do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simgpu

from tests.contract.fakenvml import programs


def _run(state: Path, *arguments: str) -> str:
    command = [sys.executable, str(programs.SIMULATION / "simgpu.py"), *arguments]
    done = subprocess.run(command, env=programs.environment(state), check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def test_init_takes_the_path_and_the_number(state: Path, tmp_path: Path) -> None:
    other = tmp_path / "folder" / "other"
    _run(state, "init", "--state", str(other), "--gpus", "2", "--memory", "24GiB", "--name", "NVIDIA Test")
    description = json.loads(_run(state, "show", "--state", str(other), "--json"))
    assert [gpu["uuid"] for gpu in description["gpus"]] == [simgpu.uuid_of(0), simgpu.uuid_of(1)]
    assert {(gpu["name"], gpu["memory_total_bytes"]) for gpu in description["gpus"]} == {("NVIDIA Test", 24 << 30)}


def test_set_and_clear(nvml: Any, device: Any, state: Path) -> None:
    _run(state, "set", "--gpu", "0", "power_milliwatts=na", "temperature_celsius=-3", "energy_millijoules=error:3")
    assert nvml.nvmlDeviceGetPowerUsage(device) == 2**32 - 1
    assert nvml.nvmlDeviceGetTemperatureV(device, 0) == -3
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetTotalEnergyConsumption(device)
    assert "power_milliwatts" in _run(state, "show")
    _run(state, "clear", "--gpu", "0", "power_milliwatts")
    assert nvml.nvmlDeviceGetPowerUsage(device) == 60000
    assert nvml.nvmlDeviceGetTemperatureV(device, 0) == -3
    _run(state, "clear")
    assert nvml.nvmlDeviceGetTemperatureV(device, 0) == 36


def test_faults_and_their_end(nvml: Any, device: Any, state: Path) -> None:
    number = _run(state, "fault", "error", "10", "--gpu", "0", "--function", "nvmlDeviceGetName").strip()
    with pytest.raises(nvml.NVMLError_Timeout):
        nvml.nvmlDeviceGetName(device)
    _run(state, "clear", "--fault", number)
    _run(state, "fault", "lost", "--gpu", "0")
    with pytest.raises(nvml.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetName(device)
    _run(state, "reset")
    assert nvml.nvmlDeviceGetName(device)


def test_driver_and_xid(state: Path) -> None:
    _run(state, "driver", "--init-error", "9", "--process-mode", "host", "--version", "535.1", "--duplicates", "1")
    _run(state, "xid", "3", "79")
    description = simgpu.show()
    assert (description["init_error"], description["process_mode"]) == (9, "host")
    assert (description["driver_version"], description["duplicate_processes"]) == ("535.1", 1)
    assert simgpu.open_state().state.event_sequence == 1


def test_use_holds_until_it_is_killed(nvml: Any, device: Any, state: Path) -> None:
    command = [sys.executable, str(programs.SIMULATION / "simgpu.py"), "use", "--memory", "1GiB", "--busy", "0.3"]
    with subprocess.Popen(command, env=programs.environment(state), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"pid {process.pid}")
        assert [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(device)] == [process.pid]
        assert nvml.nvmlDeviceGetUtilizationRates(device).gpu == 30
        process.terminate()
        assert process.wait() == 0
    assert nvml.nvmlDeviceGetComputeRunningProcesses(device) == []


def test_an_error_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(programs.SIMULATION / "simgpu.py"), "show", "--state", str(tmp_path / "none")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("simgpu: no state file")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("2GiB", 2 << 30), ("1.5Gi", 3 << 29), ("5k", 5000)])
def test_sizes(text: str, size: int) -> None:
    assert simgpu.parse_size(text) == size
