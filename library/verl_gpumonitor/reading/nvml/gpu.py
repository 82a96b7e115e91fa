# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One GPU that was seen, and its way back when it is lost."""

import pynvml

from verl_gpumonitor.reading.samples import GpuSample

Handle = pynvml.c_nvmlDevice_t


class Gpu:
    """What the reader knows of it."""

    __slots__ = ("answered", "error", "find_at", "find_wait", "handle", "index", "sample", "slow_at", "uuid")

    def __init__(self, uuid: str, index: int) -> None:
        self.uuid = uuid
        self.index = index
        self.handle: Handle | None = None
        self.sample = GpuSample(uuid=uuid, index=index)
        self.find_at = 0.0
        self.find_wait = 1.0
        self.slow_at = 0.0
        """When what is read slowly is due."""
        self.answered = False
        self.error: str | None = None
