# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The commands in a process of their own, on the simulated library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import simgpu

FAKE = Path(__file__).parents[2] / "fakenvml"


class Host:
    """A machine with simulated GPUs, or without a driver, on which commands are run."""

    def __init__(self, *, library: Path, file: simgpu.StateFile) -> None:
        self.file = file
        self._environment = {**os.environ, "FAKENVML_STATE": str(file.path), "LD_LIBRARY_PATH": str(library)}

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of ours in the background."""
        command = [sys.executable, "-m", "verl_gpumonitor.cli", *arguments]
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of ours, to its end."""
        process = self.popen(*arguments)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def library() -> Path:
    """Folder of the simulated library."""
    subprocess.run(["make", "-s", "-C", str(FAKE)], check=True)
    return FAKE / "build"


@pytest.fixture
def host(library: Path, tmp_path: Path) -> Host:
    """A machine with four GPUs."""
    return Host(library=library, file=simgpu.init(tmp_path / "state", gpus=4))


@pytest.fixture
def bare_host(tmp_path: Path) -> Host:
    """A machine without a driver."""
    return Host(library=tmp_path / "nothing", file=simgpu.init(tmp_path / "state", gpus=4))
