# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the sampler expects of a reader: `reading.nvml.reader.NvmlReader`, or a test's."""

from typing import Protocol

import msgspec

from verl_gpumonitor.model.vocabulary import GpuState, UnavailableReason

from .samples import GpuSample
from .watch import CallWatch

PART_INIT = "init"
"""Part of opening and closing the library. When it hangs, nobody else can do anything, so nobody takes over."""


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """One Xid event of the driver."""

    uuid: str
    code: int


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass over the GPUs found."""

    gpus: tuple[GpuSample, ...] = ()
    """All that were ever seen, in the order of their index; those left out hold what was known before."""
    xids: tuple[Xid, ...] = ()
    unavailable: UnavailableReason | None = None
    error: str | None = None
    message: str | None = None
    driver_version: str | None = None
    visible: int | None = None
    unsupported: dict[str, int] = {}
    implausible: dict[str, int] = {}
    failed: dict[str, int] = {}
    """The three are sums since the reader's start; see ReadingHealth."""


class Reader(Protocol):
    """Reads all GPUs of the node. Used by one thread at a time; nothing raises but Abandoned."""

    def use(self, watch: CallWatch) -> None:
        """Mark calls on this watch from now on: another thread takes over."""

    def read_all(self, *, skip: frozenset[str], processes: bool) -> Reading:
        """Read everything, without going into a part named in `skip`. `processes`: their lists too."""

    def read_memory(self, *, skip: frozenset[str]) -> Reading:
        """Read memory alone."""


def without_gauges(sample: GpuSample, state: GpuState, error: str | None) -> GpuSample:
    """Return what stays true of a GPU that does not answer: who it is, how large, and when it last did."""
    return GpuSample(
        uuid=sample.uuid,
        state=state,
        error=error,
        index=sample.index,
        model=sample.model,
        taken_at=sample.taken_at,
        memory_taken_at=sample.memory_taken_at,
        memory_total_bytes=sample.memory_total_bytes,
        power_limit_watts=sample.power_limit_watts,
    )
