# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory: what is not known stays unknown."""

from pathlib import Path

from verl_gpumonitor.reading.host import host_sample, shared_memory
from verl_gpumonitor.reading.samples import HostSample

RAY = HostSample(taken_at=1.0, memory_used_bytes=5, memory_limit_bytes=10, source="ray-agent")


def test_nothing_known_is_nothing_said() -> None:
    assert host_sample(ray=None, shm_path="") is None


def test_a_path_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    assert shared_memory(str(tmp_path / "none")) is None


def test_shared_memory_is_measured() -> None:
    shm = shared_memory("/dev/shm")
    assert shm is not None
    assert 0 <= shm.used_bytes <= shm.size_bytes


def test_both_are_joined() -> None:
    sample = host_sample(ray=RAY, shm_path="/dev/shm")
    assert sample is not None
    assert (sample.memory_used_bytes, sample.source) == (5, "ray-agent")
    assert sample.shm_size_bytes is not None


def test_shared_memory_alone_says_nothing_of_memory() -> None:
    sample = host_sample(ray=None, shm_path="/dev/shm")
    assert sample is not None
    assert (sample.memory_used_bytes, sample.memory_limit_bytes, sample.source) == (None, None, None)
