# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a container can truly know of the host memory of the job beside it.

Its own cgroup is not the job's, and is not read. The job's memory comes from Ray's agent; /dev/shm is measured by
statvfs on the pod's shm volume, where the pod has one. The rest stays None.
"""

import os
from typing import Final

import msgspec

from .samples import HostSample

_DRIVER_VERSION: Final = "/proc/driver/nvidia/version"


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Use and size of a tmpfs."""

    used_bytes: int
    size_bytes: int


def driver_loaded() -> bool:
    """Say whether the kernel has NVIDIA's driver. /proc/driver is the node's, also in a container."""
    return os.path.exists(_DRIVER_VERSION)  # noqa: PTH110 - pathlib costs memory that is counted


def shared_memory(path: str) -> SharedMemory | None:
    """Measure the tmpfs mounted at `path`. None without a path, a mount, or with a size of zero (no limit)."""
    if not path:
        return None
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    if stat.f_blocks == 0:
        return None
    return SharedMemory(
        used_bytes=(stat.f_blocks - stat.f_bfree) * stat.f_frsize, size_bytes=stat.f_blocks * stat.f_frsize
    )


def host_sample(*, ray: HostSample | None, shm_path: str) -> HostSample | None:
    """Join what Ray's agent says with what is measured here; None when nothing is known."""
    shm = shared_memory(shm_path)
    if ray is None and shm is None:
        return None
    base = HostSample() if ray is None else ray
    if shm is None:
        return base
    return msgspec.structs.replace(base, shm_used_bytes=shm.used_bytes, shm_size_bytes=shm.size_bytes)
