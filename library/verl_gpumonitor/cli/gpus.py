# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the commands that look at this host's GPUs share: reading them, choosing some, and saying why there are none."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import click

from verl_gpumonitor.model.samples import GpuSample, NodeSample
from verl_gpumonitor.model.vocabulary import UnavailableReason
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings

FIRST_PASS_SECONDS: Final = 10.0
"""Wait for the first look at the GPUs, anew from each call that was found to hang: the others are read after it."""

_MESSAGES: Final = {
    UnavailableReason.NO_LIBRARY: "no NVIDIA driver here: libnvidia-ml.so.1 was not found. Install the driver, or in a"
    " container let the runtime give it (docker run --gpus all, or NVIDIA_DRIVER_CAPABILITIES=utility)",
    UnavailableReason.DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded, or does not fit the library: try"
    " nvidia-smi, and after an update of the driver restart the machine or the container",
    UnavailableReason.NO_DEVICE_ACCESS: "the driver shows no GPU: check the container's devices and the rights on"
    " /dev/nvidia*",
    UnavailableReason.NOT_RESPONDING: "the NVIDIA driver does not answer: a call into it hangs; look for Xid in dmesg",
}


class NoGpuError(click.ClickException):
    """No GPU can be read; the text says why and what to do. It ends every command alike."""

    exit_code = 3


class UnknownGpuError(Exception):
    """Somebody asked for a GPU that is not here; the text names those that are."""


@contextmanager
def sampling(interval_seconds: float) -> Iterator[Sampler]:
    """Sample this host's GPUs in the background while the block runs. Raises NoGpuError when there are none."""
    sampler = Sampler(settings=SamplerSettings(interval_seconds=min(60.0, interval_seconds)))
    sampler.start()
    try:
        await_first(sampler)
        yield sampler
    finally:
        sampler.stop()


def await_first(sampler: Sampler, *, within: float = FIRST_PASS_SECONDS) -> NodeSample:
    """Wait for the first look at the GPUs. Raises NoGpuError."""
    end, timeouts = time.monotonic() + within, 0
    while True:
        node = sampler.latest()
        if node.gpus:
            return node
        if node.health.timeouts > timeouts:
            end, timeouts = time.monotonic() + within, node.health.timeouts
        if _is_settled(node):
            raise NoGpuError(why(node))
        if time.monotonic() >= end:
            raise NoGpuError(_MESSAGES[UnavailableReason.NOT_RESPONDING])
        time.sleep(0.02)


def _is_settled(node: NodeSample) -> bool:
    """Whether a node that shows no GPU will show none: until a pass is over, one GPU's hang hides the others."""
    if node.unavailable is None:
        return node.health.collections > 0 and node.visible == 0
    passes = node.health.collections + node.health.failures
    return passes > 0 or node.unavailable is not UnavailableReason.NOT_RESPONDING


def why(node: NodeSample) -> str:
    """Return why no GPU can be read, and what to do."""
    reason = node.unavailable or UnavailableReason.NO_DEVICE_ACCESS
    return _MESSAGES.get(reason, f"NVML cannot be used: {node.error or reason}")


def unread(node: NodeSample) -> str | None:
    """Say that the driver counts GPUs that were never read, such as one that was lost before; None where there is none.

    Nothing is known of these, neither index nor UUID, so no row can stand for them.
    """
    missing = (node.visible or 0) - len(node.gpus)
    if missing <= 0:
        return None
    return f"{missing} of {node.visible} GPUs that the driver counts cannot be read: look for Xid in dmesg"


def selected(gpus: Sequence[GpuSample], wanted: str | None) -> tuple[GpuSample, ...]:
    """Return the GPUs of a comma-separated list of indices and UUIDs; all for None. Raises UnknownGpuError."""
    if wanted is None:
        return tuple(gpus)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    found = {name: [gpu for gpu in gpus if name in (str(gpu.index), gpu.uuid)] for name in names}
    missing = [name for name, matches in found.items() if not matches]
    if missing or not names:
        here = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
        raise UnknownGpuError(f"there is no GPU {', '.join(missing) or wanted!r} here; there are: {here}")
    chosen = {gpu.uuid for matches in found.values() for gpu in matches}
    return tuple(gpu for gpu in gpus if gpu.uuid in chosen)
