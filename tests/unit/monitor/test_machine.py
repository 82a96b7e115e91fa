# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""CPU and memory by cgroups of both generations and /proc, from folders that look like them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from verl_gpumonitor.reading.machine import MachineReader, MachineSample

HOST = {
    "proc/stat": "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n",
    "proc/meminfo": "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\nHugePages_Total:  0\n",
}
GIB = 2**30


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read_twice(root: Path, before: Mapping[str, str], after: Mapping[str, str]) -> MachineSample:
    """Return the second of two readings, 10 s apart."""
    now = [100.0]
    write(root, before)
    reader = MachineReader(root=root, clock=lambda: now[0])
    now[0] += 10.0
    write(root, after)
    return reader.read()


def test_the_host_where_nothing_limits(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    cores = os.cpu_count() or 1
    busy = f"cpu  {100 + 5 * cores * tick} 0 100 {700 + 5 * cores * tick} 100 0 0 0 0 0\n"
    sample = read_twice(tmp_path, HOST | {"proc/self/cgroup": "0::/user.slice\n"}, {"proc/stat": busy})
    assert sample.cpu_utilization == pytest.approx(0.5)
    assert sample == MachineSample(
        cpu_utilization=sample.cpu_utilization,
        cpu_cores=float(cores),
        memory_used_bytes=400 * 1024,
        memory_total_bytes=1000 * 1024,
    )


def test_a_container_of_version_2(tmp_path: Path) -> None:
    before = HOST | {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/cpu.stat": "usage_usec 1000000\nuser_usec 1\n",
        "sys/fs/cgroup/memory.max": str(8 * GIB),
        "sys/fs/cgroup/memory.current": str(6 * GIB),
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    sample = read_twice(tmp_path, before, {"sys/fs/cgroup/cpu.stat": "usage_usec 21000000\n"})
    assert sample.cpu_utilization == pytest.approx(0.5)
    assert sample == MachineSample(
        cpu_utilization=sample.cpu_utilization,
        cpu_cores=4.0,
        memory_used_bytes=4 * GIB,
        memory_total_bytes=8 * GIB,
        memory_in_container=True,
    )


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/container"
    before = HOST | {
        "proc/self/cgroup": "0::/pod/container\n",
        f"{group}/memory.max": "max",
        f"{group}/memory.current": str(GIB),
        "sys/fs/cgroup/pod/memory.max": str(4 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(3 * GIB),
        f"{group}/cpu.max": "max 100000",
    }
    sample = read_twice(tmp_path, before, {})
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (3 * GIB, 4 * GIB)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    before = HOST | {
        "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpuacct/cpuacct.usage": "0",
    }
    sample = read_twice(tmp_path, before, {"sys/fs/cgroup/cpuacct/cpuacct.usage": str(5 * 10**9)})
    assert sample.cpu_utilization == pytest.approx(0.25)
    assert sample == MachineSample(
        cpu_utilization=sample.cpu_utilization,
        cpu_cores=2.0,
        memory_used_bytes=2 * GIB,
        memory_total_bytes=4 * GIB,
        memory_in_container=True,
    )


def test_version_1_without_a_limit_is_the_host(tmp_path: Path) -> None:
    before = HOST | {
        "proc/self/cgroup": "5:memory:/\n4:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    sample = read_twice(tmp_path, before, {})
    assert (sample.memory_total_bytes, sample.cpu_cores) == (1000 * 1024, float(os.cpu_count() or 1))


def test_the_first_reading_and_one_too_soon_know_no_cpu(tmp_path: Path) -> None:
    now = [0.0]
    write(tmp_path, HOST)
    reader = MachineReader(root=tmp_path, clock=lambda: now[0])
    assert reader.read().cpu_utilization is None
    now[0] = 1.0
    assert reader.read().cpu_utilization == 0.0


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({}, id="nothing there"),
        pytest.param({"proc/stat": "cpu x y\n", "proc/meminfo": "MemTotal: lots\n"}, id="no numbers"),
        pytest.param({"proc/stat": "\x00\xff", "proc/meminfo": "", "proc/self/cgroup": ":::\n0\n\n"}, id="garbage"),
    ],
)
def test_what_cannot_be_read_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    sample = read_twice(tmp_path, files, {})
    assert (sample.cpu_utilization, sample.memory_used_bytes, sample.memory_total_bytes) == (None, None, None)


def test_this_machine() -> None:
    sample = MachineReader().read()
    assert sample.memory_total_bytes is not None
    assert sample.memory_used_bytes is not None
    assert 0 < sample.memory_used_bytes <= sample.memory_total_bytes
    assert sample.cpu_cores is not None
