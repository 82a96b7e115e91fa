# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""ResourceMonitor on the simulated library, each time in a process of its own, as a user's program has it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import simgpu

FAKE = Path(__file__).parents[2] / "fakenvml"


@pytest.fixture(scope="session")
def library() -> Path:
    """Folder of the simulated library."""
    subprocess.run(["make", "-s", "-C", str(FAKE)], check=True)
    return FAKE / "build"


def run(program: str, *, library: Path, state: Path, gpus: int = 8) -> str:
    """Run a program on simulated GPUs and return what it prints."""
    simgpu.init(state, gpus=gpus)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKENVML_STATE": str(state)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_gpus_are_collected(library: Path, tmp_path: Path) -> None:
    printed = run(
        """
        from verl_gpumonitor import ResourceMonitor
        sample = ResourceMonitor(interval=1).log("start")
        print([gpu.index for gpu in sample.gpus], {gpu.memory_total_bytes // 2**30 for gpu in sample.gpus})
        """,
        library=library,
        state=tmp_path / "state",
    )
    assert printed == "[0, 1, 2, 3, 4, 5, 6, 7] {80}\n"


def test_a_forked_worker_opens_nvml_anew(library: Path, tmp_path: Path) -> None:
    """The parent reads in the background when it forks; parent and child both go on reading."""
    printed = run(
        """
        import os, time, warnings
        from verl_gpumonitor import ResourceMonitor
        warnings.simplefilter("ignore", DeprecationWarning)
        monitor = ResourceMonitor(interval=0.1)
        monitor.collect()
        monitor.start_background()
        for _ in range(5):
            time.sleep(0.13)
            child = os.fork()
            if child == 0:
                monitor.start_background()
                time.sleep(0.3)
                monitor.stop()
                good = len(monitor.metrics) >= 2 and all(len(sample.gpus) == 8 for sample in monitor.metrics)
                os._exit(0 if good else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        monitor.stop()
        print(all(len(sample.gpus) == 8 for sample in monitor.metrics))
        """,
        library=library,
        state=tmp_path / "state",
    )
    assert printed.split() == ["0"] * 5 + ["True"]


def test_a_hanging_driver_does_not_keep_the_program(library: Path, tmp_path: Path) -> None:
    printed = run(
        """
        import os, sys, time
        import verl_gpumonitor
        sys.path.insert(0, os.environ["FAKENVML"])
        import simgpu
        monitor = verl_gpumonitor.ResourceMonitor(interval=0.2)
        monitor.collect()
        monitor.start_background()
        simgpu.hang(gpu=3, function="nvmlDeviceGetUtilizationRates")
        begin = time.monotonic()
        while monitor.collect().gpus[3].state != "not-responding":
            assert time.monotonic() - begin < 10
        begin = time.monotonic()
        monitor.stop()
        print(time.monotonic() - begin < 4)
        """.replace('os.environ["FAKENVML"]', repr(str(FAKE))),
        library=library,
        state=tmp_path / "state",
    )
    assert printed == "True\n"


def test_a_loaded_driver_without_gpus_is_an_empty_list(library: Path, tmp_path: Path) -> None:
    simgpu.init(tmp_path / "other", gpus=1)
    printed = run(
        """
        from verl_gpumonitor import ResourceMonitor
        monitor = ResourceMonitor(interval=1)
        print([monitor.collect().gpus for _ in range(2)])
        """,
        library=library,
        state=tmp_path / "state",
        gpus=0,
    )
    assert printed == "[(), ()]\n"
