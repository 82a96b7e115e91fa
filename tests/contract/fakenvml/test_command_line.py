# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The command line does what the functions do."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simgpu

from tests.contract.fakenvml import programs

Run = Callable[..., str]


@pytest.fixture
def run(state: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in this process and return what it printed."""

    def command(*arguments: str) -> str:
        assert simgpu.main(arguments) == 0
        return capsys.readouterr().out

    return command


def test_init_takes_the_path_and_the_number(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "folder" / "other"
    run("init", "--state", str(other), "--gpus", "2", "--memory", "24GiB", "--name", "NVIDIA Test")
    description = json.loads(run("show", "--state", str(other), "--json"))
    assert [gpu["uuid"] for gpu in description["gpus"]] == [simgpu.uuid_of(0), simgpu.uuid_of(1)]
    assert {(gpu["name"], gpu["memory_total_bytes"]) for gpu in description["gpus"]} == {("NVIDIA Test", 24 << 30)}


def test_set_and_clear(nvml: Any, device: Any, run: Run) -> None:
    run("set", "--gpu", "0", "power_milliwatts=na", "temperature_celsius=-3", "energy_millijoules=error:3")
    assert nvml.nvmlDeviceGetPowerUsage(device) == 2**32 - 1
    assert nvml.nvmlDeviceGetTemperatureV(device, 0) == -3
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetTotalEnergyConsumption(device)
    assert "power_milliwatts" in run("show")
    run("clear", "--gpu", "0", "power_milliwatts")
    assert nvml.nvmlDeviceGetPowerUsage(device) == 60000
    assert nvml.nvmlDeviceGetTemperatureV(device, 0) == -3
    run("clear")
    assert nvml.nvmlDeviceGetTemperatureV(device, 0) == 36


def test_faults_and_their_end(nvml: Any, device: Any, run: Run) -> None:
    number = run("fault", "error", "10", "--gpu", "0", "--function", "nvmlDeviceGetName").strip()
    with pytest.raises(nvml.NVMLError_Timeout):
        nvml.nvmlDeviceGetName(device)
    run("clear", "--fault", number)
    run("fault", "lost", "--gpu", "0")
    with pytest.raises(nvml.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetName(device)
    run("reset")
    assert nvml.nvmlDeviceGetName(device)


def test_driver_and_xid(run: Run) -> None:
    run("driver", "--init-error", "9", "--process-mode", "host", "--version", "535.1", "--duplicates", "1")
    run("xid", "3", "79")
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
