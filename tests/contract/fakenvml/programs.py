# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that use the simulated GPUs, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIMULATION = Path(__file__).resolve().parents[2] / "fakenvml"
BUILD = SIMULATION / "build"
IN_NEW_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def environment(state: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a program on the simulated GPUs, with no choice among them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FAKENVML_")}
    return kept | {
        "FAKENVML_STATE": str(state),
        "LD_LIBRARY_PATH": str(BUILD),
        "PYTHONPATH": str(SIMULATION),
        **extra,
    }


@contextmanager
def running(state: Path, script: str, *, prefix: Sequence[str] = (), **extra: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python script and go on when it has printed a line. It gets a pipe as stdin; killed at the end."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", script],
        env=environment(state, **extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "the program ended before it was ready"
            yield process
        finally:
            process.kill()


def holder(*, gpu: int = 0, memory_bytes: int = 1 << 30, busy: float = 0.5, power_watts: float = 200.0) -> str:
    """Return a script that holds a GPU until it is killed."""
    return (
        "import simgpu, sys\n"
        f"gpu = simgpu.Gpu({gpu}); gpu.allocate({memory_bytes}); gpu.busy({busy}, power_watts={power_watts})\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )


def result(state: Path, script: str, *, prefix: Sequence[str] = (), **extra: str) -> Any:
    """Run a Python script to its end and return the JSON it printed."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", script],
        env=environment(state, **extra),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)
