# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""RolloutMemoryNotReleased: the rollout engine was put to sleep and kept its memory.

Between two rollouts a colocated engine frees its weights and its cache (`free_cache_engine`), and the training stages
have the GPU. Graphs, the context and some buffers stay, up to about 8 GiB; more than a third of what it had is not
sleep. The engine's processes are told from training by their titles (`VLLM::`, `sglang::`). Older versions run both in
one process, and often no process list is offered: vLLM is then judged by what a pause between stages frees of the share
that it was given, and of other engines nothing can be said, which `unjudged` says. An engine on GPUs of its own never
sleeps, nor does one that `free_cache_engine=False` keeps awake: both as they should.
Source: vllm-project/vllm#17117 (sleep frees 19.5 of 45.8 GB).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.rule import TRAINING, Cadence, Case, Open, Rule, Verdict, finding, subject
from verl_gpumonitor.diagnosis.thresholds import RolloutMemory, Thresholds
from verl_gpumonitor.diagnosis.work import GEN, OTHER
from verl_gpumonitor.model.figures import gib
from verl_gpumonitor.model.findings import Evidence

REASON = "RolloutMemoryNotReleased"
FREED_STEPS: Final = 3
"""Steps that must be known where processes are not listed."""
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
        if not any(_is_listed(gpu, thresholds.rollout_memory) for gpu in gpus):
            cases += _unlisted(history, pool, gpus, thresholds.rollout_memory)
            continue
        kept = [gpu for gpu in gpus if _keeps(gpu, history, thresholds.rollout_memory)]
        if kept:
            kept.sort(key=lambda gpu: (-asleep(gpu), gpu.uuid))
            cases.append(_case(pool, kept))
    return cases


def unjudged(history: History) -> str | None:
    """Say why it cannot be told whether an engine gives its memory back; None where it can, or where none sleeps.

    For who shows findings: that there is none says something only where there could be one.
    """
    if _KEEPS_AWAKE.search(history.entrypoint) or history.step < FREED_STEPS:
        return None
    by_share = "rollout.name=vllm" in history.entrypoint and _SHARE.search(history.entrypoint) is not None
    for gpus in history.pools().values():
        generating = _one_that_generates(gpus)
        if generating is None or not any(gpu.pod.work.workers_seen for gpu in gpus):
            continue
        listed = all(GEN in gpu.engine_bytes and not TRAINING.isdisjoint(gpu.engine_bytes) for gpu in gpus)
        if not listed and not by_share:
            return _UNTOLD.format("for vLLM by gpu_memory_utilization on the command line")
        if not listed and len(_freed(generating)) < FREED_STEPS:
            return _UNTOLD.format("by a pause between stages whose memory is known")
    return None


_UNTOLD: Final = (
    "whether the rollout engine gives its memory back while it sleeps is seen by the processes on each GPU, or {}, and "
    "neither is told"
)


def _one_that_generates(gpus: Iterable[GpuHistory]) -> GpuHistory | None:
    """Return a GPU that generates itself; those of a pod are alike."""
    by_pod = {gpu.pod.name: gpu for gpu in gpus}
    return next((gpu for gpu in by_pod.values() if GEN in gpu.past), None)


def _is_listed(gpu: GpuHistory, limits: RolloutMemory) -> bool:
    """Say whether the engine itself is listed: the front of one that computes elsewhere holds next to nothing."""
    return gpu.engine_bytes.get(GEN, 0.0) >= max(1.0, limits.kept_of_gpu * float(gpu.total_bytes or 0))


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
    freed = _freed(gpu)
    if len(freed) < FREED_STEPS or not gpu.total_bytes or not 0 < share <= 1:
        return False
    reserved = share * gpu.total_bytes
    # Of an engine that never held its share there is nothing to free.
    held = min(size for size in _awake(gpu).values() if size is not None)
    return held >= 0.8 * reserved and max(freed) < limits.freed_of_reserved * reserved


def _awake(gpu: GpuHistory) -> Mapping[int, float | None]:
    return {p.step: p.level_bytes for p in gpu.pieces(GEN, 4)}


def _freed(gpu: GpuHistory) -> list[float]:
    """Return what the GPU had less, in the emptiest moment between stages, than in generation: of the last steps."""
    awake = _awake(gpu)
    return [
        awake_bytes - p.floor_bytes
        for p in gpu.pieces(OTHER, 4)
        if p.step > 0 and (awake_bytes := awake.get(p.step)) is not None and p.floor_bytes is not None
    ]


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
