# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""CPU and memory of the container that this process runs in, or of the host, from cgroups and /proc.

Where a cgroup above this process sets a limit, that is what the process can run into, and its use counts against it;
where none does, the host's use counts against the host. Both generations of cgroups. For the library inside the
program: a sidecar's own cgroup is not the job's.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

MIN_SECONDS: Final = 0.05
"""CPU use over a shorter time is noise: kernels count in hundredths of a second."""
_NO_LIMIT: Final = 1 << 60
"""cgroup v1 writes no limit as a number near 2**63."""


class MachineSample(msgspec.Struct, frozen=True, kw_only=True):
    """CPU and memory, each of the container where that has a limit, else of the host. None: not to be read."""

    cpu_utilization: float | None = None
    """Share (0..1) of `cpu_cores` in use since the reading before; None at the first."""
    cpu_cores: float | None = None
    memory_used_bytes: int | None = None
    """Without what the kernel can drop at once."""
    memory_total_bytes: int | None = None
    memory_in_container: bool = False
    """Whether the memory is that of a cgroup with a limit."""


class _Cpu(msgspec.Struct, frozen=True):
    cores: float
    used_seconds: float
    at: float


class MachineReader:
    """Reads CPU and memory. `root` stands before every path, for tests."""

    def __init__(self, *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        """Take the first reading of CPU, so that the next one has a difference."""
        self._proc = root / "proc"
        self._cgroups = root / "sys/fs/cgroup"
        self._clock = clock
        self._cpu = self._read_cpu()

    def read(self) -> MachineSample:
        """Return what is used now. Never raises."""
        used, total, in_container = self._memory()
        utilization, cores = self._cpu_since()
        return MachineSample(
            cpu_utilization=utilization,
            cpu_cores=cores,
            memory_used_bytes=used,
            memory_total_bytes=total,
            memory_in_container=in_container,
        )

    # --- CPU -------------------------------------------------------------------------------------------------

    def _cpu_since(self) -> tuple[float | None, float | None]:
        before, now = self._cpu, self._read_cpu()
        if now is None:
            return None, None
        if before is None or before.cores != now.cores:
            self._cpu = now
            return None, now.cores
        seconds = now.at - before.at
        if seconds < MIN_SECONDS:
            return None, now.cores
        self._cpu = now
        share = (now.used_seconds - before.used_seconds) / seconds / now.cores
        return min(1.0, max(0.0, share)), now.cores

    def _read_cpu(self) -> _Cpu | None:
        cores, group = min(self._cpu_limits(), default=(None, None), key=lambda limit: limit[0])
        used = self._host_cpu_seconds() if group is None else _cpu_seconds(group)
        if used is None:
            return None
        return _Cpu(cores or float(os.cpu_count() or 1), used, self._clock())

    def _cpu_limits(self) -> Iterator[tuple[float, Path]]:
        """Return cores and folder of each cgroup above this process that limits CPU."""
        for group in self._groups("cpu"):
            raw = _text(group / "cpu.max").split() or [_text(group / "cpu.cfs_quota_us")]
            quota = _integer(raw[0])
            period = _integer(raw[1] if len(raw) > 1 else _text(group / "cpu.cfs_period_us"))
            if quota and period and quota > 0:
                yield quota / period, group

    def _host_cpu_seconds(self) -> float | None:
        """Return what all cores together spent busy since the start of the machine."""
        numbers = [_integer(word) or 0 for word in _text(self._proc / "stat").partition("\n")[0].split()[1:9]]
        if len(numbers) < 8:
            return None
        return (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for disks

    # --- memory ----------------------------------------------------------------------------------------------

    def _memory(self) -> tuple[int | None, int | None, bool]:
        limits = [(limit, group) for group in self._groups("memory") if (limit := _memory_limit(group)) is not None]
        if limits:
            limit, group = min(limits, key=lambda pair: pair[0])
            used = _memory_used(group)
            if used is not None:
                return used, limit, True
        sizes = _keyed(_text(self._proc / "meminfo"))
        total, free = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
        if total is None or free is None:
            return None, None, False
        return (total - free) * 1024, total * 1024, False

    # --- cgroups ---------------------------------------------------------------------------------------------

    def _groups(self, controller: str) -> Iterator[Path]:
        """Return the folders of this process's cgroup and of those above it, as far as they are to be seen."""
        for line in _text(self._proc / "self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                yield from _upwards(self._cgroups, path)
            elif controller in controllers.split(","):
                # Version 1. In a container the path is often the host's, and its own group is mounted as the root.
                yield from _upwards(self._cgroups / controller, path)


def _upwards(top: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _memory_limit(group: Path) -> int | None:
    """Return the limit of a cgroup; None where it has none, or is not there."""
    limit = _integer(_text(group / "memory.max") or _text(group / "memory.limit_in_bytes"))
    return limit if limit is not None and 0 < limit < _NO_LIMIT else None


def _memory_used(group: Path) -> int | None:
    """Return the working set, as the kubelet counts it: files that were not read for long can be dropped."""
    used = _integer(_text(group / "memory.current") or _text(group / "memory.usage_in_bytes"))
    if used is None:
        return None
    stat = _keyed(_text(group / "memory.stat"))
    return max(0, used - stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _cpu_seconds(group: Path) -> float | None:
    """Return the CPU time that a cgroup has used."""
    usage = _keyed(_text(group / "cpu.stat")).get("usage_usec")
    if usage is not None:
        return usage / 1e6
    nanoseconds = _integer(_text(group / "cpuacct.usage"))
    if nanoseconds is None:  # Version 1 where the two are mounted apart.
        accounts = Path(*("cpuacct" if part == "cpu" else part for part in group.parts))
        nanoseconds = _integer(_text(accounts / "cpuacct.usage"))
    return None if nanoseconds is None else nanoseconds / 1e9


def _text(path: Path) -> str:
    """Return a small file's text; empty where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 65536).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _keyed(text: str) -> dict[str, int]:
    """Return the lines `key number …` of a file."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        key, *rest = line.split(None, 2) or [""]
        number = _integer(rest[0]) if rest else None
        if number is not None:
            found[key] = number
    return found
