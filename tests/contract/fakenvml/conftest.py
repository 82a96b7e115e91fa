# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The real nvidia-ml-py on the simulated library, in this process."""

import ctypes
import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simgpu

from tests.contract.fakenvml.programs import BUILD, SIMULATION


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """Build and load the library. Loaded once, its soname answers every later request by name."""
    subprocess.run(["make", "-s", "-C", str(SIMULATION)], check=True)
    return ctypes.CDLL(str(BUILD / "libnvidia-ml.so.1"))


@pytest.fixture
def state(library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh state file of four GPUs, which this process sees all."""
    for name in [name for name in os.environ if name.startswith("FAKENVML_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "state"
    monkeypatch.setenv("FAKENVML_STATE", str(path))
    simgpu.init(path, gpus=4)
    return path


@pytest.fixture
def pynvml(state: Path) -> Any:
    """The binding, not initialised. As Any: the project's stub knows only what the product calls."""
    binding: Any = importlib.import_module("pynvml")
    # A reader of another test may have left it open in this process, as readers do where a call hung.
    with pytest.raises(binding.NVMLError_Uninitialized):
        while True:
            binding.nvmlShutdown()
    return binding


@pytest.fixture
def nvml(pynvml: Any) -> Iterator[Any]:
    """The binding, initialised."""
    pynvml.nvmlInit()
    yield pynvml
    simgpu.reset()
    pynvml.nvmlShutdown()


@pytest.fixture
def device(nvml: Any) -> Any:
    """A handle of GPU 0."""
    return nvml.nvmlDeviceGetHandleByIndex(0)


@pytest.fixture
def gpu(nvml: Any) -> Iterator[simgpu.Gpu]:
    """GPU 0 as a program of this process uses it."""
    gpu = simgpu.Gpu(0)
    yield gpu
    gpu.close()
