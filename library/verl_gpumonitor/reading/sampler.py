# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler thread, and the watchdog that replaces it when a call into NVML hangs.

Imports are counted here: this runs in a sidecar of 30 MiB, so no logging, dataclasses or asyncio.
"""

import time
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from .samples import NodeSample


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often is read, and how long a call may take."""

    interval_seconds: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """Time between two full samples of each GPU."""
    memory_interval_seconds: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """Time between two readings of memory."""
    call_limit_seconds: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """A call that takes longer counts as hung."""
    processes_interval_seconds: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """Time between two readings of the processes on each GPU; None: not read."""


class Reader(Protocol):
    """What the sampler drives; `reading.nvml.NvmlReader` is the real one. Used by one thread at a time."""


class Sampler:
    """Reads all GPUs in a thread of its own; `latest()` never waits for it.

    Nothing raises: without a library, without a GPU, with a hanging driver, `latest()` says so.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader] | None = None,
        settings: SamplerSettings = SamplerSettings(),  # noqa: B008 - frozen
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet. `open_reader` None means NVML."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the sampler thread and its watchdog."""
        raise NotImplementedError

    def latest(self) -> NodeSample:
        """Return the newest picture of all GPUs. Lock-free, at once, from any thread.

        Before the first pass it is a NodeSample with no GPU, no reason and `health.collections` 0.
        """
        raise NotImplementedError

    def stop(self, *, wait_seconds: float = 0.5) -> None:
        """Tell the threads to end, and wait that long at most: a hung one is left behind (they are daemons)."""
        raise NotImplementedError
