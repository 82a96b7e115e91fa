# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is read of one GPU: a whole sample, or its memory alone.

Calls are what costs here: 5 a GPU and second (load, clocks' event reasons, one for field values with power and energy,
memory twice). Each 5 s a sixth for temperature, and more field values in the one there is. Every reading is optional,
and every number is checked.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pynvml

from verl_gpumonitor.model.vocabulary import GpuState
from verl_gpumonitor.reading import plausible
from verl_gpumonitor.reading.samples import GpuProcess, GpuSample

from .calls import Calls
from .errors import GpuLost
from .fields import POWER, SLOW, read_fields
from .gpu import Gpu, Handle
from .questions import (
    clocks_event_reasons,
    clocks_throttle_reasons,
    memory_v1,
    memory_v2,
    reason_names,
    temperature,
    utilization,
)

SLOW_SECONDS: Final = 5.0
"""Time between two readings of what changes slowly (temperatures), or only ever adds up (traffic, memory errors).

In between the last ones stand; they go with the sample when the GPU does not answer."""


class Values:
    """Reads GPUs that were found. Everything raises GpuLost and LibraryLost."""

    def __init__(self, calls: Calls, *, slow_seconds: float, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._slow_seconds = slow_seconds
        self._clock = clock

    def meet(self, gpu: Gpu, handle: Handle) -> None:
        """Read what does not change."""
        name = self._calls.offered(gpu, "model", pynvml.nvmlDeviceGetName, handle)
        limit = self._calls.offered(gpu, "power_limit_watts", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        checked = self._calls.checked
        gpu.sample = msgspec.structs.replace(
            gpu.sample,
            index=gpu.index,
            model=gpu.sample.model if name is None else checked("model", plausible.text(name)),
            power_limit_watts=None if limit is None else checked("power_limit_watts", plausible.power_watts(limit)),
        )

    def sample(self, gpu: Gpu, *, processes: bool) -> GpuSample:
        """Read one GPU. The lists of processes on it are read where they are asked for."""
        handle = gpu.handle
        if handle is None:
            raise GpuLost("NOT_FOUND")
        rates = self._calls.offered(gpu, "utilization", utilization, handle)
        others = self._read_slow_and_quick(gpu, handle)
        memory = self._read_memory(gpu)
        check = self._calls.checked
        return GpuSample(
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.sample.model,
            power_limit_watts=gpu.sample.power_limit_watts,
            utilization=None if rates is None else check("utilization", plausible.percent(rates[0])),
            memory_bandwidth_utilization=(
                None if rates is None else check("memory_bandwidth_utilization", plausible.percent(rates[1]))
            ),
            throttled=self._read_throttled(gpu),
            processes=(self._read_processes(gpu, memory["memory_total_bytes"]) if processes else gpu.sample.processes),
            **others,
            **memory,
            taken_at=self._clock(),
        )

    def read_memory(self, gpu: Gpu) -> None:
        """Read memory alone, into the sample that is there."""
        gpu.sample = msgspec.structs.replace(gpu.sample, **self._read_memory(gpu))

    def _read_memory(self, gpu: Gpu) -> dict[str, Any]:
        """Return the memory fields of a sample. The older call counts the driver's reserve as used."""
        info = self._calls.newest(gpu, "memory_used_bytes", (memory_v2, memory_v1))
        if info is None:
            return {"memory_used_bytes": None, "memory_reserved_bytes": None, "memory_total_bytes": None}
        total = self._calls.checked("memory_total_bytes", plausible.memory_total(info[0]))
        used = self._calls.checked("memory_used_bytes", plausible.memory_part(info[1], total))
        reserved = info[2]
        if reserved is not None:
            reserved = self._calls.checked("memory_reserved_bytes", plausible.memory_part(reserved, total))
        return {
            "memory_used_bytes": used,
            "memory_reserved_bytes": reserved,
            "memory_total_bytes": total,
            "memory_taken_at": self._clock() if used is not None else gpu.sample.memory_taken_at,
        }

    def _read_throttled(self, gpu: Gpu) -> tuple[str, ...] | None:
        raw = self._calls.newest(
            gpu,
            "throttled",
            (clocks_event_reasons, clocks_throttle_reasons),
        )
        return None if raw is None else self._calls.checked("throttled", reason_names(raw))

    def _read_slow_and_quick(self, gpu: Gpu, handle: Handle) -> dict[str, Any]:
        """Read power, energy, and what is read slowly if it is due; else take that over from the sample before."""
        now, before = self._clock(), gpu.sample
        if now < gpu.slow_at and before.taken_at is not None and before.state is GpuState.OK:
            found = read_fields(self._calls, gpu, slow=False)
            found.update({name: getattr(before, name) for name in SLOW})
        else:
            found = read_fields(self._calls, gpu, slow=True)
            heat = self._calls.offered(gpu, "temperature_celsius", temperature, handle)
            if heat is not None:
                found["temperature_celsius"] = self._calls.checked("temperature_celsius", plausible.temperature(heat))
            gpu.slow_at = now + self._slow_seconds
        if not found.get(POWER):
            power = self._calls.offered(gpu, POWER, pynvml.nvmlDeviceGetPowerUsage, handle)
            found[POWER] = None if power is None else self._calls.checked(POWER, plausible.power_watts(power))
        return found

    def _read_processes(self, gpu: Gpu, total: int | None) -> tuple[GpuProcess, ...] | None:
        found = self._calls.newest(
            gpu,
            "processes",
            (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2),
        )
        if found is None:
            return None
        memory: dict[int, int | None] = {}
        for process in found:
            if (pid := self._calls.checked("processes", plausible.pid(process.pid))) is None:
                continue
            used = process.usedGpuMemory
            used = None if used is None else self._calls.checked("processes", plausible.memory_part(used, total))
            memory[pid] = _larger(memory.get(pid), used)
        return tuple(GpuProcess(pid=pid, memory_used_bytes=used) for pid, used in sorted(memory.items()))


def _larger(one: int | None, other: int | None) -> int | None:
    """Return the larger of two, as far as they are known: some drivers list a process twice."""
    return max((value for value in (one, other) if value is not None), default=None)
