# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The commands in a process of their own, on the simulated library."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import simgpu

from tests.contract.cli.neighbours import hold
from tests.contract.sidecar.ray import Ray

FAKE = Path(__file__).parents[2] / "fakenvml"
ENDS_SECONDS = 30.0
"""A program that has not ended so long after its start is killed, so that its test fails and does not wait."""


class Host:
    """A machine with simulated GPUs, or without a driver, on which commands are run."""

    def __init__(self, *, library: Path, file: simgpu.StateFile) -> None:
        self.file = file
        self._environment = {**os.environ, "FAKENVML_STATE": str(file.path), "LD_LIBRARY_PATH": str(library)}
        # Machines for tests set it, and people do not: with them output waits in a buffer, and may fail at the end.
        self._environment.pop("PYTHONUNBUFFERED", None)

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of ours in the background."""
        command = [sys.executable, "-m", "verl_gpumonitor.cli", *arguments]
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def shell(self, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A line of the shell in which `gpumon` is ours."""
        gpumon = f'gpumon() {{ "{sys.executable}" -m verl_gpumonitor.cli "$@"; }}; '
        variables = {**self._environment, **environment}
        return subprocess.run(
            ["bash", "-c", gpumon + line], env=variables, capture_output=True, text=True, timeout=60, check=False
        )

    def in_terminal(self, *arguments: str, ends: int, after: bytes) -> tuple[int, bytes]:
        """A command of ours in a terminal that gets a signal once it has shown something: its status, all it wrote."""
        child, terminal = pty.fork()
        if child == 0:
            os.execve(  # noqa: S606 - a terminal needs a fork
                sys.executable,
                [sys.executable, "-m", "verl_gpumonitor.cli", *arguments],
                {**self._environment, "TERM": "xterm"},
            )
        too_late = threading.Timer(ENDS_SECONDS, os.kill, (child, signal.SIGKILL))
        too_late.start()
        shown, sent = b"", False
        with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as file:  # EIO: it has ended
            while piece := file.read(65536):
                shown += piece
                if after in shown and not sent:
                    sent = True
                    os.kill(child, ends)
        status = os.waitpid(child, 0)[1]
        too_late.cancel()
        return os.waitstatus_to_exitcode(status), shown

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


@pytest.fixture
def holder(host: Host, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process on a GPU of the host, with a child whose title is the parameter."""
    process = hold(host.file.path, request.param)
    yield process
    process.communicate("\n\n", timeout=10)


@pytest.fixture
def ray() -> Iterator[Ray]:
    """Ray's servers, which answer nothing yet."""
    running = Ray()
    yield running
    running.close()
