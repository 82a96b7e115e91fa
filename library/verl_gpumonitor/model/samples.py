# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What one reading of a node's GPUs and of the job's host memory says: frozen values, all of them optional.

Whatever could not be read is None: never zero, a sentinel or the last good value. Times named `…_at` are seconds of
the reader's monotonic clock, good for differences alone.
"""

import msgspec

from .vocabulary import GpuState, Source, UnavailableReason


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds a context on a GPU. `pid` is of the reader's own PID namespace (drivers since 565)."""

    pid: int
    memory_used_bytes: int | None = None


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment, as NVML or Ray's agent tells it.

    When `state` is not `ok`, the gauges are None and `taken_at` is the time of the last reading that worked.
    """

    uuid: str
    """Identity. A GPU that Ray names by index alone gets its UUID elsewhere, or no sample."""
    state: GpuState = GpuState.OK
    error: str | None = None
    """NVML's name of the error without its prefix (`GPU_IS_LOST`), when `state` is not `ok`."""
    index: int | None = None
    """Index as the reader saw it, for display alone: it is not CUDA's."""
    model: str | None = None
    taken_at: float | None = None
    """When load and power were read; None if they never were.

    Temperatures, traffic and memory errors may be 5 s older.
    """
    utilization: float | None = None
    """Share (0..1) of the last sample period in which a kernel was resident."""
    memory_bandwidth_utilization: float | None = None
    """Share (0..1) of the period in which memory was read or written; says nothing about memory in use."""
    memory_taken_at: float | None = None
    """When memory was read: twice as often as the rest."""
    memory_used_bytes: int | None = None
    """Held by processes; the driver's reserved part is apart, except where `memory_reserved_bytes` is None."""
    memory_reserved_bytes: int | None = None
    """The driver's own part; None where the driver only offers the older call, whose `used` includes it."""
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    energy_joules: float | None = None
    """The GPU's own counter since the driver was loaded; a GPU that was reset begins again."""
    pcie_sent_bytes: int | None = None
    """The GPU's own counters of PCIe and NVLink traffic (all links), where it has them; seen from the GPU."""
    pcie_received_bytes: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    ecc_uncorrected_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    throttled: tuple[str, ...] | None = None
    """NVML's clocks-event reasons in snake case (`hw_thermal_slowdown`); empty: none, None: not offered."""
    processes: tuple[GpuProcess, ...] | None = None
    """Only when they were asked for; empty: none of this PID namespace, None: not asked or not offered."""


class GpuCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What has added up for one GPU since the reader's start. Gaps count neither as observed nor as idle."""

    observed_seconds: float = 0.0
    """Time covered by utilisation samples."""
    busy_seconds: float = 0.0
    """Integral of utilisation over the observed time."""
    throttled_seconds: float | None = None
    """Observed time in which heat or a power brake held the clocks down; None where nobody says why they are."""
    energy_joules: float | None = None
    """From the GPU's counter, else integrated from power; None where it offers neither."""
    memory_peak_bytes: int | None = None
    memory_recent_peak_bytes: int | None = None
    """Highest memory in use in the last 60 s before the newest sample."""
    memory_readings: tuple[tuple[float, int], ...] = ()
    """The last few readings of memory in use, (time, bytes), oldest first: they come more often than samples do."""
    xid_errors: dict[int, int] = {}
    """Xid code -> number seen."""
    xid_last_at: dict[int, float] = {}
    """Xid code -> time of the last one."""


class ReadingHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Health of the reading itself, apart from the values."""

    collections: int = 0
    """Passes over all GPUs that came to their end."""
    failures: int = 0
    """Passes in which the library could not be used at all."""
    timeouts: int = 0
    """Calls that hung longer than the limit; each cost a sampler thread."""
    last_success_at: float | None = None
    """End of the last pass in which at least one GPU answered."""
    last_pass_seconds: float | None = None
    unsupported: dict[str, int] = {}
    """Field -> readings that this driver or GPU does not offer."""
    implausible: dict[str, int] = {}
    """Field -> readings that were thrown away as impossible: sentinels and garbage."""
    failed: dict[str, int] = {}
    """NVML's name of an error -> calls it ended, `NOT_SUPPORTED` and its like left out."""


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs that this reader sees, at the end of its newest pass."""

    source: Source = Source.NONE
    """`nvml` while the library answers, else `none`."""
    gpus: tuple[GpuSample, ...] = ()
    """In the order of their index. A GPU once seen stays here, lost if need be, until the reader's end."""
    counters: dict[str, GpuCounters] = {}
    """UUID -> what has added up."""
    unavailable: UnavailableReason | None = None
    """Why no GPU can be read; None while one can."""
    error: str | None = None
    """NVML's name of that error, without its prefix."""
    message: str | None = None
    """One sentence to `unavailable` that a person can act on."""
    driver_version: str | None = None
    visible: int | None = None
    """GPUs that the library counts now; None while it cannot be asked."""
    health: ReadingHealth = ReadingHealth()


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """The job's host memory in this pod, as far as somebody can tell."""

    taken_at: float | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_size_bytes: int | None = None
    source: str | None = None
    """Who told the memory: `ray-agent` or None. /dev/shm is always measured by ourselves."""


class RayAgentSample(msgspec.Struct, frozen=True, kw_only=True):
    """What Ray's metrics agent in this pod says."""

    gpus: tuple[GpuSample, ...] = ()
    """Exactly the GPUs of Ray's container, where the agent names them by UUID."""
    unnamed_gpus: dict[int, GpuSample] = {}
    """Index within Ray's container -> sample with an empty `uuid`, where an older Ray names no UUID."""
    host: HostSample | None = None
