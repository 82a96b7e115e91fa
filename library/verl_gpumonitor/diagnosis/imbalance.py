# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Imbalance, the simple rule: few GPUs of a pool differ much from the rest, in memory or in load."""

from collections.abc import Sequence

from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.findings import Finding, GpuWindow
from verl_gpumonitor.model.vocabulary import Severity

from .limits import ImbalanceLimits
from .pools import Reading, Verdict, by_pool, few_enough, memory_text, scope_of, subject, usual

REASON = "Imbalance"
MEMORY, UTILIZATION = "memory", "utilization"


def imbalance(gpus: Sequence[GpuWindow], limits: ImbalanceLimits) -> list[Verdict]:
    """Judge each pool twice. Example: 85, 12, 10 and 11% of load raise it for the first; 65, 63, 62, 60% do not."""
    memory = by_pool(gpus, lambda gpu: gpu.memory_ratio)
    load = by_pool(gpus, lambda gpu: gpu.utilization)
    return [
        *(Verdict(reason=REASON, pool=p, metric=MEMORY, finding=_memory(r, limits)) for p, r in memory.items()),
        *(Verdict(reason=REASON, pool=p, metric=UTILIZATION, finding=_load(r, limits)) for p, r in load.items()),
    ]


def _odd(readings: Sequence[Reading], middle: float, difference: float) -> Sequence[Reading]:
    """Return the GPUs so far from the middle, the farthest first; none if they are too many to be odd."""
    far = [r for r in readings if abs(r.value - middle) >= difference]
    far.sort(key=lambda r: (-abs(r.value - middle), r.gpu.uuid))
    return far if few_enough(far, readings) else ()


def _memory(readings: Sequence[Reading], limits: ImbalanceLimits) -> Finding | None:
    middle = usual(readings)
    odd = _odd(readings, middle, limits.memory_difference)
    if not odd:
        return None
    worst = odd[0]
    message = (
        f"{subject(odd)} holds {memory_text(worst.gpu)} ({percent(worst.value)}) while its pool's usual is"
        f" {percent(middle)}: the fullest GPU sets the batch size of all, so look for what it alone carries, such as"
        f" other ranks' processes or a part of the model, and check that trainer.balance_batch is not turned off"
    )
    return _found(odd, readings, MEMORY, middle, message)


def _load(readings: Sequence[Reading], limits: ImbalanceLimits) -> Finding | None:
    if max(r.value for r in readings) < limits.min_utilization:
        return None
    middle = usual(readings)
    odd = _odd(readings, middle, limits.utilization_difference)
    if not odd:
        return None
    worst = odd[0]
    above = worst.value > middle
    message = (
        f"{subject(odd)} is {percent(worst.value)} busy while its pool's usual is {percent(middle)}:"
        f" {'the others wait for it' if above else 'it waits for the others, or stands still'};"
        f" check that trainer.balance_batch is not turned off, and that each rank has a GPU of its own"
    )
    return _found(odd, readings, UTILIZATION, middle, message)


def _found(odd: Sequence[Reading], readings: Sequence[Reading], metric: str, middle: float, message: str) -> Finding:
    return Finding(
        reason=REASON,
        severity=Severity.WARNING,
        scope=scope_of(odd),
        message=message,
        evidence={
            "metric": metric,
            "value": round(odd[0].value, 4),
            "pool_value": round(middle, 4),
            "gpus_compared": len(readings),
        },
    )
