# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""OOMRisk, the simple rule: a GPU near its memory's end while its peers are not.

Without stages nobody can tell a rollout engine that fills its GPU on purpose from a training step that is about to
fail, so that only an outlier against its own pool is called a risk. What it misses by that: a job all of whose GPUs
come near the end together.
"""

from collections.abc import Sequence

from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.findings import Finding, GpuWindow
from verl_gpumonitor.model.vocabulary import Severity

from .limits import OomRiskLimits
from .pools import Reading, Verdict, by_pool, few_enough, memory_text, scope_of, subject, usual

REASON = "OOMRisk"


def oom_risk(gpus: Sequence[GpuWindow], limits: OomRiskLimits) -> list[Verdict]:
    """Judge each pool. Example: 98, 24, 23 and 25% raise it for the first; four times 97% raise nothing."""
    return [
        Verdict(reason=REASON, pool=pool, metric="memory", finding=_finding(readings, limits))
        for pool, readings in by_pool(gpus, lambda gpu: gpu.memory_ratio).items()
    ]


def _finding(readings: Sequence[Reading], limits: OomRiskLimits) -> Finding | None:
    middle = usual(readings)
    floor = max(limits.min_ratio, middle + limits.min_above_peers)
    odd = sorted((r for r in readings if r.value >= floor), key=lambda r: (-r.value, r.gpu.uuid))
    if not few_enough(odd, readings):
        return None
    worst = odd[0]
    return Finding(
        reason=REASON,
        severity=Severity.WARNING,
        scope=scope_of(odd),
        message=(
            f"{subject(odd)} holds {memory_text(worst.gpu)} ({percent(worst.value)}) while its pool's usual is"
            f" {percent(middle)}, and will be the first to run out of memory: look there for processes of other ranks"
            f" (nvidia-smi), and if it is the update that fills it, lower"
            f" actor_rollout_ref.actor.ppo_max_token_len_per_gpu (with use_dynamic_bsz) or ppo_micro_batch_size_per_gpu"
        ),
        evidence={
            "memory_ratio": round(worst.value, 4),
            "pool_memory_ratio": round(middle, 4),
            "memory_peak_bytes": worst.gpu.memory_peak_bytes or worst.gpu.memory_used_bytes or 0,
            "memory_total_bytes": worst.gpu.memory_total_bytes or 0,
            "gpus_compared": len(readings),
        },
    )
