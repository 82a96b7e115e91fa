# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The reader in a process of its own, on the simulated library."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import simgpu

from verl_gpumonitor.reading.reader import Reading
from verl_gpumonitor.reading.samples import GpuSample, NodeSample

FAKE = Path(__file__).parents[2] / "fakenvml"
PROGRAM = Path(__file__).with_name("drive.py")


@pytest.fixture(scope="session")
def library() -> Path:
    """Folder of the simulated library; `old` beneath it holds an old driver's."""
    subprocess.run(["make", "-s", "-C", str(FAKE)], check=True)
    return FAKE / "build"


class Moment(msgspec.Struct):
    """What the sampler shows at one moment of its own clock."""

    now: float
    sample: NodeSample

    def gpu(self, index: int) -> GpuSample:
        return next(gpu for gpu in self.sample.gpus if gpu.uuid == simgpu.uuid_of(index))

    def age(self, index: int) -> float:
        taken_at = self.gpu(index).taken_at
        assert taken_at is not None
        return self.now - taken_at


class Driven:
    """A process that reads GPUs on orders."""

    def __init__(self, *, library: Path, state: Path) -> None:
        # GPUMON-free on purpose: the reader takes nothing from the environment.
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKENVML_STATE": str(state)}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def order(self, do: str, **arguments: Any) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode({"do": do, **arguments}) + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process ended"
        return answer

    def read(self, *, processes: bool = False) -> Reading:
        return msgspec.json.decode(self.order("read", skip=[], processes=processes), type=Reading)

    def read_memory(self) -> Reading:
        return msgspec.json.decode(self.order("memory"), type=Reading)

    def advance(self, seconds: float) -> None:
        self.order("advance", seconds=seconds)

    def sample(self, **settings: float) -> None:
        self.order("sample", settings=settings)

    def latest(self) -> Moment:
        return msgspec.json.decode(self.order("latest"), type=Moment)

    def until(self, holds: Callable[[Moment], bool], *, seconds: float = 8.0) -> Moment:
        """Look until the moment is as wanted. Fails with the last one seen."""
        end = time.monotonic() + seconds
        while not holds(moment := self.latest()):
            assert time.monotonic() < end, f"still {moment}"
            time.sleep(0.03)
        return moment

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def shared(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[simgpu.StateFile, Driven]]:
    """One state file and one process for all tests that need no process of their own: to start one takes 0.5 s."""
    state = simgpu.init(tmp_path_factory.mktemp("fakenvml") / "state")
    driven = Driven(library=library, state=state.path)
    yield state, driven
    driven.close()


@pytest.fixture
def state(shared: tuple[simgpu.StateFile, Driven]) -> simgpu.StateFile:
    """Eight simulated GPUs, as new."""
    return simgpu.init(shared[0].path, gpus=8)


@pytest.fixture
def reader(shared: tuple[simgpu.StateFile, Driven], state: simgpu.StateFile) -> Driven:
    """A new reader on these GPUs."""
    shared[1].order("begin anew")
    return shared[1]


@pytest.fixture
def own_state(tmp_path: Path) -> simgpu.StateFile:
    """Eight simulated GPUs of this test alone, for those that `start` a process."""
    return simgpu.init(tmp_path / "state", gpus=8)


@pytest.fixture
def start(library: Path, tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    """Start a reading process; by default on the library of a driver of today."""
    started: list[Driven] = []

    def start_one(folder: Path | None = None) -> Driven:
        started.append(Driven(library=folder or library, state=tmp_path / "state"))
        return started[-1]

    yield start_one
    for driven in started:
        driven.close()


FAST = {"interval_seconds": 0.1, "memory_interval_seconds": 0.05, "call_limit_seconds": 0.4}


@pytest.fixture
def sampler(own_state: simgpu.StateFile, start: Callable[..., Driven]) -> Driven:
    """A sampler on eight GPUs, ten times as fast as in production, that has made its first pass."""
    driven = start()
    driven.sample(**FAST)
    driven.until(lambda moment: moment.sample.health.collections > 0)
    return driven
