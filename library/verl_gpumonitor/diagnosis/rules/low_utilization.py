# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""LowUtilization: a stage wastes GPU time over whole steps.

A low mean over a job says nothing: stages differ (97% in training and 47% in rollout is a healthy job,
verl-project/verl#2181), first steps compile, checkpoints and validation stop everything now and then, and a colocated
step has idle parts by construction. So a stage is judged by itself, over several steps in a row, the first left out,
and only where it takes a good part of the step. Generation is low by nature when few long answers are left; what
counts there is time in which *no* GPU of the pool does anything: the engine stands, or it waits for rewards or tools
(verl-project/verl#3114). Time between stages counts as a pause (stage `other`): data, reward functions, the driver.
A checkpoint now and then is none, one in each step that takes as much is, and so are weights that are handed over for
as long. GPUs that only serve a reward model or a
teacher wait by design, and so does for a while whoever trains or generates in turn with another pool; but a rollout
pool that stands still for most of each step is larger than its trainer can use, and one for which the trainer waits
through much of each step is too small.
"""

from collections.abc import Mapping, Sequence

import msgspec

from verl_gpumonitor.diagnosis.alike import GENERATES, alike, trains
from verl_gpumonitor.diagnosis.history import RESUME, WINDOW_SECONDS, GpuHistory, History
from verl_gpumonitor.diagnosis.rule import ENGINE, TRAINING, Cadence, Case, Open, Rule, Verdict, duration, finding
from verl_gpumonitor.diagnosis.thresholds import LowUtilization, Thresholds
from verl_gpumonitor.diagnosis.work import GEN, OTHER
from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.findings import Evidence
from verl_gpumonitor.model.vocabulary import UNKNOWN

REASON = "LowUtilization"
SAVE = "save_checkpoint"
_ROLLOUTS = 3
POOL_IDLE = 0.6
"""Part of each step in which a rollout pool stands still, from which on it is too large, and not only out of step with
its trainer; and in which the trainer waits, from which on the rollout pool is too small."""


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of one step over all GPUs of a pool."""

    step: int
    seconds: float
    share: float
    """Of the step."""
    utilization: float
    idle: float
    """Part of the stage in which all of them stood still."""


def low_utilization(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report the stages of each pool that waste GPU time."""
    limits = thresholds.low_utilization
    cases = []
    pools = history.pools()
    # Engines may have workers of their own, so that those count alone only where nothing was trained yet.
    trainers = [pool for pool, gpus in pools.items() if any(trains(gpu) for gpu in gpus)]
    trainers = trainers or [p for p, gpus in pools.items() if any(gpu.pod.work.workers_seen for gpu in gpus)]
    for pool, gpus in pools.items():
        if not history.stages_told:
            cases += _windows(pool, gpus, limits)
            continue
        if pool not in trainers:
            cases += _too_large(history, pool, gpus, limits) if pool == _rollout_pool(pools, trainers) else []
            continue
        parts = alike(gpus)
        own = [part for part in parts if any(trains(gpu) for gpu in part)] if len(parts) > 1 else parts
        for part in own:
            lengths = _lengths(part, limits.steps)
            waits = len(pools) > 1 or len(parts) > 1
            beside = waits and any("update_actor" in gpu.past for gpu in part) and not _generates(part)
            for stage in sorted({stage for gpu in part for stage in gpu.past}):
                # A trainer beside others waits for them by design, which nobody tells from its own pauses; if it does
                # little else, they are its rollout's.
                if not waits or (beside and stage in (GEN, OTHER)) or stage not in _not_its_own(len(parts)):
                    cases += _stage(history, pool, part, stage, lengths, limits, beside=beside)
    return cases


def _generates(gpus: Sequence[GpuHistory]) -> bool:
    """Say whether these GPUs took part in the last rollouts: the first sample of a wait may find the load before it."""
    pieces = [piece for gpu in gpus for piece in gpu.pieces(GEN, _ROLLOUTS) if piece.known_seconds > 0]
    seconds = sum(piece.known_seconds for piece in pieces)
    return seconds > 0 and sum(piece.busy_seconds for piece in pieces) >= GENERATES * seconds


def _not_its_own(parts: int) -> Sequence[str]:
    """Return the stages in which a trainer beside others may wait for them."""
    return (OTHER,) if parts == 1 else (OTHER, *ENGINE)


def _rollout_pool(pools: Mapping[str, Sequence[GpuHistory]], trainers: Sequence[str]) -> str | None:
    """Return the pool that generates for trainers without engines; None where engines may be a reward model's."""
    serving = [pool for pool, gpus in pools.items() if any(gpu.pod.work.servers_seen for gpu in gpus)]
    return serving[0] if len(serving) == 1 and trainers and serving[0] not in trainers else None


def _too_large(history: History, pool: str, gpus: Sequence[GpuHistory], limits: LowUtilization) -> list[Case]:
    """Report a rollout pool that stands still for most of each step."""
    lengths = _lengths(gpus, limits.steps + 1)
    stages = sorted({stage for gpu in gpus for stage in gpu.past})
    wastes = []
    for step, length in lengths.items():
        pieces = [piece for gpu in gpus for past in gpu.past.values() if (piece := past.at(step)) is not None]
        known = sum(piece.known_seconds for piece in pieces)
        still = sum(history.standstill.steps.get((pool, stage, step), 0.0) for stage in stages)
        if known > 0 and length >= limits.seconds:
            busy = sum(piece.busy_seconds for piece in pieces) / known
            waste = Waste(step=step, seconds=length, share=1.0, utilization=busy, idle=min(1.0, still / length))
            wastes.append(waste)
    wastes = [waste for waste in wastes if waste.idle >= POOL_IDLE]
    return [_case(pool, gpus, GEN, wastes, cause="pool")] if len(wastes) > limits.steps else []


def _steps(gpus: Sequence[GpuHistory]) -> list[int]:
    return sorted({step for gpu in gpus for past in gpu.past.values() for step in past.steps})


def _lengths(gpus: Sequence[GpuHistory], count: int) -> Mapping[int, float]:
    """Return the last steps but the first, and how long each took."""
    lengths: dict[int, float] = {}
    for step in [step for step in _steps(gpus) if step > 0][-count:]:
        lengths[step] = max(sum(past.seconds_at(step) for past in gpu.past.values()) for gpu in gpus)
    return lengths


def _stage(
    history: History,
    pool: str,
    gpus: Sequence[GpuHistory],
    stage: str,
    lengths: Mapping[int, float],
    limits: LowUtilization,
    *,
    beside: bool,
) -> list[Case]:
    """Judge one stage. `beside`: these GPUs train the actor, and others generate for it; a critic's wait by design."""
    # What a trainer has of generation is the time in which it waits for it: a pause.
    pause = beside and stage in (GEN, OTHER)
    wastes = [_waste(history, pool, gpus, stage, step, length) for step, length in lengths.items()]
    known = [w for w in wastes if w is not None and (_waits(w, limits) if pause else _wastes(stage, w, limits))]
    if len(known) < limits.steps:
        return []
    others = len(history.gpus) - len(gpus)
    return [_case(pool, gpus, stage, known, cause="rollout" if pause else None, others=others)]


def _waste(
    history: History, pool: str, gpus: Sequence[GpuHistory], stage: str, step: int, length: float
) -> Waste | None:
    pasts = [gpu.past[stage] for gpu in gpus if stage in gpu.past]
    pieces = [p for past in pasts if (p := past.at(step)) is not None and p.known_seconds > 0]
    if not pieces or length <= 0:
        return None
    seconds = max(p.seconds for p in pieces)
    return Waste(
        step=step,
        seconds=seconds,
        share=seconds / length,
        utilization=sum(p.busy_seconds for p in pieces) / sum(p.known_seconds for p in pieces),
        idle=min(1.0, history.standstill.steps.get((pool, stage, step), 0.0) / seconds) if seconds > 0 else 0.0,
    )


def _wastes(stage: str, waste: Waste, limits: LowUtilization) -> bool:
    if waste.share < limits.share_of_step or waste.seconds < limits.seconds:
        return False
    if stage == GEN:
        return waste.utilization < limits.gen_utilization or waste.idle >= limits.gen_idle
    if stage in (OTHER, SAVE):
        return waste.share >= limits.pause_share and waste.utilization < 0.1
    if stage == RESUME:
        return waste.share >= limits.pause_share and waste.utilization < limits.training_utilization
    return stage in TRAINING and waste.utilization < limits.training_utilization


def _waits(waste: Waste, limits: LowUtilization) -> bool:
    return waste.share >= POOL_IDLE and waste.seconds >= limits.seconds and waste.utilization < 0.1


def _case(
    pool: str,
    gpus: Sequence[GpuHistory],
    stage: str,
    wastes: Sequence[Waste],
    *,
    cause: str | None = None,
    others: int = 0,
) -> Case:
    """Make the case. `cause`: `pool`, the rollout's is too large; `rollout`, the trainer waits for `others`."""
    seconds = sum(w.seconds for w in wastes) / len(wastes)
    utilization = sum(w.utilization for w in wastes) / len(wastes)
    share = sum(w.share for w in wastes) / len(wastes)
    idle = min(w.idle for w in wastes)
    what = "between stages" if stage == OTHER else f"in {stage}"
    row = f"in {len(wastes)} steps in a row"
    if cause == "pool":
        message = (
            f"GPUs of the rollout pool stand still for {percent(idle)} of a step and more, {row}, and are"
            f" {percent(utilization)} busy: the trainer cannot use so many"
        )
    elif cause == "rollout":
        message = (
            f"GPUs of the trainer wait {duration(seconds)}, {percent(share)} of a step, {row}, for what other GPUs"
            f" generate: the rollout cannot keep up"
        )
    else:
        message = (
            f"GPUs are {percent(utilization)} busy {what}, which takes {duration(seconds)} and {percent(share)} of a"
            f" step, {row}"
        )
        message += f"; for {percent(idle)} of it none of them does anything" if idle >= 0.2 else ""
    evidence: Evidence = {
        "utilization": round(utilization, 4),
        "idle_ratio": round(idle, 4),
        "step_seconds" if cause == "pool" else "stage_seconds": round(seconds, 1),
        "step_share": round(share, 4),
        "steps": len(wastes),
    }
    headroom = _headroom(gpus, stage, len(wastes)) if stage in TRAINING else None
    if headroom is not None:
        evidence["headroom_bytes"] = headroom
    if cause is not None:
        evidence["cause"] = cause
    if cause == "rollout":
        evidence |= {"trainer_gpus": len(gpus), "other_gpus": others}
    stages = (stage,) if cause != "rollout" else sorted(TRAINING, key=lambda name: name != "update_actor")
    role = next((p.role for gpu in gpus for name in stages for p in gpu.pieces(name, 1)), UNKNOWN)
    named = sorted(gpus, key=lambda gpu: (gpu.pod.name, gpu.index or 0))
    found = finding(REASON, message, gpus=named, stage=stage, role=role, evidence=evidence)
    return Case(key=f"{pool}/{stage}", finding=found)


def _headroom(gpus: Sequence[GpuHistory], stage: str, steps: int) -> int | None:
    """Return what a stage left free on its fullest GPU: a larger batch takes its memory in this stage alone."""
    left = []
    for gpu in gpus:
        peaks = [piece.peak_bytes for piece in gpu.pieces(stage, steps) if piece.peak_bytes is not None]
        if gpu.total_bytes and peaks:
            left.append(round(gpu.total_bytes - max(peaks)))
    return max(0, min(left)) if left else None


def _windows(pool: str, gpus: Sequence[GpuHistory], limits: LowUtilization) -> list[Case]:
    """Judge stretches of time, where nobody tells stages: work must be seen in each, or have been seen before."""
    means: list[float] = []
    for step in _steps(gpus):
        pieces = [p for gpu in gpus for past in gpu.past.values() if (p := past.at(step)) is not None]
        known = sum(p.known_seconds for p in pieces)
        means.append(sum(p.busy_seconds for p in pieces) / known if known > 0 else 1.0)
    last = means[-limits.windows :]
    if len(last) < limits.windows or len(means) < limits.windows + 2 or max(last) >= limits.window_utilization:
        return []
    worked = max(means[: -limits.windows], default=0.0) >= limits.window_utilization or min(last) >= 0.02
    if not worked:
        return []
    mean = sum(last) / len(last)
    lasted = limits.windows * WINDOW_SECONDS
    message = (
        f"GPUs are {percent(mean)} busy over the last {duration(lasted)}: data loading, logging or saving keeps them"
        f" waiting, or the batch is too small for them"
    )
    evidence: Evidence = {"utilization": round(mean, 4), "seconds": lasted}
    role = "trainer"
    found = finding(REASON, message, gpus=gpus, stage=OTHER, role=role, evidence=evidence)
    return [Case(key=f"{pool}/{OTHER}", finding=found)]


RULE = Rule(reason=REASON, judge=low_utilization, cadence=Cadence.STEP)
