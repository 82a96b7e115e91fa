# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing a GPU with its peers: what several rules need. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.findings import MAX_SCOPE, Finding, GpuWindow, Scope


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and what is compared of it."""

    gpu: GpuWindow
    value: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says of one pool that it could judge. A pool with too few known values has no verdict."""

    reason: str
    pool: str
    metric: str
    finding: Finding | None = None
    """None: all is well."""


def by_pool(gpus: Iterable[GpuWindow], value: Callable[[GpuWindow], float | None]) -> Mapping[str, Sequence[Reading]]:
    """Return the known values of each pool that has at least two: nobody can be compared with himself."""
    pools: dict[str, list[Reading]] = {}
    for gpu in gpus:
        known = value(gpu)
        if known is not None:
            pools.setdefault(gpu.pool, []).append(Reading(gpu=gpu, value=known))
    return {pool: readings for pool, readings in pools.items() if len(readings) >= 2}


def usual(readings: Sequence[Reading]) -> float:
    """Return what is usual in a pool: the median; of two the smaller, of an even number the lower of the middle ones.

    The lower one, so that of two GPUs the one that carries more is the odd one.
    """
    values = sorted(reading.value for reading in readings)
    return values[(len(values) - 1) // 2]


def few_enough(odd: Sequence[Reading], pool: Sequence[Reading]) -> bool:
    """Say whether these can be called odd: one of two or three, else at most a third.

    Half and half are two kinds of work, not an outlier.
    """
    return 0 < len(odd) <= max(1, len(pool) // 3)


def scope_of(odd: Sequence[Reading]) -> Scope:
    """Name the odd GPUs, in the order given, and their pods."""
    named = odd[:MAX_SCOPE]
    pods = tuple(dict.fromkeys(reading.gpu.pod for reading in named))
    return Scope(pods=pods, gpus=tuple(reading.gpu.uuid for reading in named))


def subject(odd: Sequence[Reading]) -> str:
    """Return `GPU 0 of pod w-0`, and how many more."""
    gpu = odd[0].gpu
    name = f"GPU {gpu.uuid if gpu.index is None else gpu.index} of pod {gpu.pod}"
    return name if len(odd) == 1 else f"{name} and {len(odd) - 1} more"


def memory_text(gpu: GpuWindow) -> str:
    """Return `78.0 of 80.0 GiB`; empty where it is not known."""
    used = gpu.memory_used_bytes if gpu.memory_peak_bytes is None else gpu.memory_peak_bytes
    if used is None or gpu.memory_total_bytes is None:
        return ""
    return f"{used / GIB:.1f} of {gpu.memory_total_bytes / GIB:.1f} GiB"
