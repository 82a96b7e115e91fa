# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the sidecar knows of its pod at one moment: the loop makes it, exporter and reporter render it. Pure.

Times named `…_at` are of the monotonic clock, those named `…_unix` are Unix seconds.
"""

import msgspec

from verl_gpumonitor.model.report import RayNode
from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample, ReadingHealth
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source, UnavailableReason

FRESH_INTERVALS = 3
"""A value older than so many intervals of its source is no longer shown."""


class OwnGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that is the pod's own."""

    sample: GpuSample
    counters: GpuCounters
    xid_last_unix: dict[int, float] = {}
    """Xid code -> time of the last one."""


class PodState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture. Before the first pass it says nothing but the number of GPUs that were asked for."""

    gpus_requested: int
    source: Source = Source.NONE
    ownership: Ownership = Ownership.UNKNOWN
    unavailable: UnavailableReason | None = None
    """None while GPU values are there, none were asked for, or nothing was tried yet."""
    message: str | None = None
    gpus: tuple[OwnGpu, ...] = ()
    gpus_visible: int | None = None
    driver_version: str | None = None
    interval_seconds: float = 1.0
    """Time between two samples of the present source."""
    host: HostSample | None = None
    health: ReadingHealth = ReadingHealth()
    last_success_unix: float | None = None
    """When GPU values were last read, from whatever source."""
    success: bool | None = None
    """Whether the newest attempt to read GPU values succeeded; None before the first, or when none are asked for."""
    ray_nodes: tuple[RayNode, ...] = ()

    @property
    def started(self) -> bool:
        """Whether anything was tried: before that, silence means nothing."""
        return self.success is not None or self.ownership is Ownership.NONE_REQUESTED


def is_fresh(taken_at: float | None, state: PodState, now: float) -> bool:
    """Return whether a reading taken then may still be shown as the present value."""
    return taken_at is not None and now - taken_at <= FRESH_INTERVALS * state.interval_seconds


def gauges(sample: GpuSample, state: PodState, now: float) -> GpuSample:
    """Return the sample with whatever is too old made unknown. Memory and load are read at paces of their own."""
    load = sample.state is GpuState.OK and is_fresh(sample.taken_at, state, now)
    memory_taken_at = sample.taken_at if sample.memory_taken_at is None else sample.memory_taken_at
    memory = sample.state is GpuState.OK and is_fresh(memory_taken_at, state, now)
    if load and memory:
        return sample  # Nothing is too old: the usual case.
    kept = {field: getattr(sample, field) for field in _IDENTITY}
    if load:
        kept |= {field: getattr(sample, field) for field in _LOAD}
    if memory:
        kept |= {field: getattr(sample, field) for field in _MEMORY}
    return GpuSample(**kept)


def recent_peak(gpu: OwnGpu, present: GpuSample) -> int | None:
    """Return the recent peak of memory while memory is being read; `present` is what `gauges` returned."""
    return None if present.memory_used_bytes is None else gpu.counters.memory_recent_peak_bytes


_IDENTITY = ("uuid", "state", "error", "index", "model", "taken_at", "memory_taken_at")
_MEMORY = ("memory_used_bytes", "memory_reserved_bytes", "memory_total_bytes")
_LOAD = tuple(field for field in GpuSample.__struct_fields__ if field not in _IDENTITY and field not in _MEMORY)
