# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What NVML's errors mean: of one reading, of a GPU, of the library. And the sentences for a person."""

from typing import Final

import pynvml

from verl_gpumonitor.model.vocabulary import UnavailableReason

NOT_OFFERED: Final = frozenset(
    {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA}
)
"""Not here, on this GPU or driver: quiet."""
OLDER_SYMBOL: Final = frozenset(
    {
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
GPU_GONE: Final = frozenset(
    {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND}
)
LIBRARY_GONE: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
_ERROR_NAMES: Final[dict[int, str]] = {
    getattr(pynvml, name): name.removeprefix("NVML_ERROR_") for name in dir(pynvml) if name.startswith("NVML_ERROR_")
}
_MESSAGES: Final = {
    UnavailableReason.NO_LIBRARY: (
        "libnvidia-ml.so.1 is not in the sidecar's container: the node has no NVIDIA driver, or the container runtime"
        " gave the container none of the driver's files; see the chart's injection.visibility"
    ),
    UnavailableReason.DRIVER_NOT_LOADED: (
        "the NVIDIA kernel driver is not loaded on this node, or does not fit the library ({error}); after an update"
        " of the driver, pods that started before it need a restart"
    ),
    UnavailableReason.NO_DEVICE_ACCESS: (
        "NVML answers but shows no GPU ({error}): the sidecar's container has no access to the GPU devices; see the"
        " chart's injection.visibility"
    ),
    UnavailableReason.NVML_ERROR: "NVML cannot be used: {error}",
}


def sentence(reason: UnavailableReason, error: str | None) -> str:
    """Return what a person reads; `error` is NVML's name of it, None where there was none."""
    return _MESSAGES[reason].format(error=error or "it counts none")


def error_name(code: int) -> str:
    """Return NVML's name of an error without its prefix, such as `GPU_IS_LOST`."""
    return _ERROR_NAMES.get(code, f"ERROR_{code}")


def unavailable_reason(code: int, *, driver_is_loaded: bool) -> UnavailableReason:
    """Say what an error at the opening of the library means.

    In a container without device nodes NVML claims that no driver is loaded, or fails with UNKNOWN; the kernel's own
    word (`/proc/driver/nvidia`) tells the two apart.
    """
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return UnavailableReason.NO_LIBRARY
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return UnavailableReason.NO_DEVICE_ACCESS
    if code in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_UNKNOWN) and driver_is_loaded:
        return UnavailableReason.NO_DEVICE_ACCESS
    if code in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
        return UnavailableReason.DRIVER_NOT_LOADED
    return UnavailableReason.NVML_ERROR


class GpuLost(Exception):  # noqa: N818 - passes within this package
    """The GPU is gone; the text is NVML's name of the error."""


class LibraryLost(Exception):  # noqa: N818
    """The library must be opened again."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
