# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""RolloutMemoryNotReleased: the rollout engine was put to sleep and kept its memory.

Between two rollouts a colocated engine frees its weights and its cache (`free_cache_engine`), and the training stages
have the GPU. Graphs, the context and some buffers stay, up to about 8 GiB; more than a third of what it had is not
sleep. The engine's processes are told from training by their titles (`VLLM::`, `sglang::`); older versions run both in
one process, and where no process list is offered nothing can be said, so the rule is silent. An engine on GPUs of its
own never sleeps, nor does one that `free_cache_engine=False` keeps awake: both as they should.
Source: vllm-project/vllm#17117 (sleep frees 19.5 of 45.8 GB).
"""

import re
from collections.abc import Sequence

from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.rule import TRAINING, Cadence, Case, Open, Rule, Verdict, finding, subject
from verl_gpumonitor.diagnosis.thresholds import RolloutMemory, Thresholds
from verl_gpumonitor.diagnosis.work import GEN, OTHER
from verl_gpumonitor.model.figures import gib
from verl_gpumonitor.model.findings import Evidence

REASON = "RolloutMemoryNotReleased"
_SHARE = re.compile(r"rollout\.gpu_memory_utilization=['\"]?([0-9.]+)")
_KEEPS_AWAKE = re.compile(r"(?:free_cache_engine|enable_sleep_mode)=['\"]?false", re.IGNORECASE)


def rollout_memory(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report, for each pool, the GPUs whose engine keeps its memory while training runs."""
    if _KEEPS_AWAKE.search(history.entrypoint):
        return []
    cases = []
    for pool, gpus in history.pools().items():
        if not any(gpu.pod.work.workers_seen for gpu in gpus):
            # Engines on GPUs of their own never sleep.
            continue
        if not any(gpu.engine_bytes for gpu in gpus):
            cases += _unlisted(history, pool, gpus, thresholds.rollout_memory)
            continue
        kept = [gpu for gpu in gpus if _keeps(gpu, history, thresholds.rollout_memory)]
        if kept:
            kept.sort(key=lambda gpu: (-asleep(gpu), gpu.uuid))
            cases.append(_case(pool, kept))
    return cases


def asleep(gpu: GpuHistory) -> float:
    """Return the least that the engine held in a training stage, as listed; 0 if it was never listed there."""
    return min((size for stage, size in gpu.engine_bytes.items() if stage in TRAINING), default=0.0)


def _keeps(gpu: GpuHistory, history: History, limits: RolloutMemory) -> bool:
    awake = gpu.engine_bytes.get(GEN)
    if not awake or not gpu.total_bytes:
        return False
    trained = max((len(gpu.pieces(stage)) for stage in TRAINING), default=0)
    kept = asleep(gpu)
    slept = history.sleeps > 0 or kept < 0.9 * awake
    return (
        trained >= limits.steps
        and slept
        and kept >= limits.kept_of_engine * awake
        and kept >= limits.kept_of_gpu * gpu.total_bytes
    )


def _unlisted(history: History, pool: str, gpus: Sequence[GpuHistory], limits: RolloutMemory) -> list[Case]:
    """Judge by what sleep frees of the GPU, where no process is listed, and vLLM's share of the GPU is told."""
    shares = _SHARE.findall(history.entrypoint)
    if not shares or not history.sleeps or "rollout.name=vllm" not in history.entrypoint:
        return []
    share = float(shares[-1])
    kept = [gpu for gpu in gpus if _frees_little(gpu, share, limits)]
    if len(kept) * 2 <= len(gpus):
        return []
    worst = kept[0]
    total = float(worst.total_bytes or 0)
    message = (
        f"{subject(kept)}: the rollout engine sleeps and frees less than half of the {gib(share * total)} that"
        f" gpu_memory_utilization={share:g} gives it; training stages go without the rest"
    )
    evidence: Evidence = {"memory_total_bytes": round(total), "engine_bytes": round(share * total)}
    found = finding(REASON, message, gpus=kept, stage="update_actor", role="rollout", evidence=evidence)
    return [Case(key=pool, finding=found)]


def _frees_little(gpu: GpuHistory, share: float, limits: RolloutMemory) -> bool:
    """Compare generation with the emptiest moment between stages, in three steps."""
    awake = {p.step: p.level_bytes for p in gpu.pieces(GEN, 4)}
    freed = [
        awake_bytes - p.floor_bytes
        for p in gpu.pieces(OTHER, 4)
        if p.step > 0 and (awake_bytes := awake.get(p.step)) is not None and p.floor_bytes is not None
    ]
    if len(freed) < 3 or not gpu.total_bytes or not 0 < share <= 1:
        return False
    reserved = share * gpu.total_bytes
    # Of an engine that never held its share there is nothing to free.
    held = min(size for size in awake.values() if size is not None)
    return held >= 0.8 * reserved and max(freed) < limits.freed_of_reserved * reserved


def _case(pool: str, gpus: Sequence[GpuHistory]) -> Case:
    worst = gpus[0]
    kept, awake = asleep(worst), worst.engine_bytes[GEN]
    message = (
        f"{subject(gpus)}: the rollout engine sleeps and still holds {gib(kept)} of the {gib(awake)} that it has while"
        f" it generates; training stages go without them"
    )
    return Case(
        key=pool,
        finding=finding(
            REASON,
            message,
            gpus=gpus,
            stage="update_actor",
            role="rollout",
            evidence={
                "memory_total_bytes": worst.total_bytes or 0,
                "engine_bytes": round(awake),
                "kept_bytes": round(kept),
                "missing_bytes": round(kept),
            },
        ),
    )


RULE = Rule(reason=REASON, judge=rollout_memory, cadence=Cadence.STEP)
