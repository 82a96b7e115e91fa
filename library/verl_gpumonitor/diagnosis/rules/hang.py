# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Hang: the job no longer makes progress.

Utilisation says that a kernel was resident, not that it computes: in a collective that waits for a peer all ranks show
100% at a quarter of their power, and the one at 0% is the cause (pytorch/pytorch#118369, NVIDIA/nccl#968). So a GPU
works only if it is neither still nor spinning at a power that real work in this stage never has. If nobody in a pool
works, nothing ends and no step finishes, for longer than this stage ever took, the pool hangs.

What looks like it: an update of an hour at full power (long context); generation whose last long answers run on few
GPUs at low power, hence the longer patience there; waiting for tools or rewards; loading, compiling, saving to slow
storage; processes that died, which free their memory and end the job by themselves.
"""

from collections.abc import Mapping, Sequence

import msgspec

from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.rule import (
    ENGINE,
    PAUSES,
    TRAINING,
    Case,
    Open,
    Rule,
    Verdict,
    duration,
    finding,
    in_stage,
)
from verl_gpumonitor.diagnosis.thresholds import Hang, Thresholds
from verl_gpumonitor.diagnosis.work import OTHER
from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.findings import Evidence
from verl_gpumonitor.model.history import IDLE_UTILIZATION
from verl_gpumonitor.model.vocabulary import UNKNOWN

REASON = "Hang"
_GONE_BYTES = 2**30
"""A process that died holds nothing; a context alone takes about half of this."""


class Stillness(msgspec.Struct, frozen=True, kw_only=True):
    """A pool in which nobody works."""

    gpus: Sequence[GpuHistory]
    stage: str
    role: str
    quiet_seconds: float
    """For so long nobody worked and nothing ended."""
    stage_seconds: float
    longest_seconds: float | None
    """Longest that this stage took in a finished step."""
    spinning: Sequence[GpuHistory]
    still: Sequence[GpuHistory]


def hang(history: History, thresholds: Thresholds, open_now: Open) -> Verdict:
    """Report each pool that makes no progress."""
    if history.phase not in (None, "Running") or any(pod.phase == "Failed" for pod in history.pods.values()):
        return []
    cases = []
    for pool, gpus in _parts(history).items():
        stillness = _stillness(history, gpus)
        if stillness is None:
            continue
        if pool in open_now or _hangs(history, stillness, thresholds.hang):
            cases.append(_case(history, pool, stillness))
    return cases


def _parts(history: History) -> Mapping[str, Sequence[GpuHistory]]:
    """Return the pools. All pods of a trainer by itself wait for each other, however they are called, so are one."""
    if history.trainer_only and not history.stages_told:
        return {"": [*history.gpus.values()]}
    return history.pools()


def _stillness(history: History, gpus: Sequence[GpuHistory]) -> Stillness | None:
    seen = [g for g in gpus if g.last is not None and history.t - g.last.t <= max(30.0, 5 * g.interval)]
    if not seen or 2 * len(seen) < len(gpus) or any(gpu.worked_t is None for gpu in seen):
        return None
    if all(_gone(gpu) for gpu in seen):
        return None
    progress = max(
        max(gpu.worked_t or 0.0 for gpu in seen),
        max((gpu.pod.work.last_change or 0.0) for gpu in seen),
        history.step_ends[-1] if history.step_ends else 0.0,
    )
    if history.t - progress < 20.0:
        return None
    stage, role = _stage(seen)
    since = max(gpu.stage_since for gpu in seen)
    past = [gpu.past[stage].longest_seconds for gpu in seen if stage in gpu.past]
    return Stillness(
        gpus=seen,
        stage=stage,
        role=role,
        quiet_seconds=history.t - progress,
        stage_seconds=history.t - since,
        longest_seconds=max(past, default=None),
        spinning=[g for g in seen if g.last is not None and g.spins(g.last.utilization, g.last.power_watts)],
        still=[g for g in seen if g.last is not None and (g.last.utilization or 0.0) < IDLE_UTILIZATION],
    )


def _gone(gpu: GpuHistory) -> bool:
    """Say whether the processes of a GPU are gone, with all that they held."""
    used = None if gpu.last is None else gpu.last.memory_used_bytes
    return used is not None and used < _GONE_BYTES and gpu.highest_bytes > 2 * _GONE_BYTES


def _stage(gpus: Sequence[GpuHistory]) -> tuple[str, str]:
    """Return the stage of most."""
    counts: dict[tuple[str, str], int] = {}
    for gpu in gpus:
        counts[gpu.stage, gpu.role] = counts.get((gpu.stage, gpu.role), 0) + 1
    return max(counts, key=lambda key: (counts[key], key))


def _hangs(history: History, now: Stillness, limits: Hang) -> bool:
    patience = _patience(history, now, limits)
    if patience is None or now.quiet_seconds < patience:
        return False
    if now.stage in TRAINING:
        return now.stage_seconds >= limits.longer_than_usual * (now.longest_seconds or 2 * limits.spin_seconds)
    if now.stage in ENGINE:
        return now.stage_seconds >= limits.gen_longer_than_usual * (now.longest_seconds or 5 * limits.spin_seconds)
    return True


def _patience(history: History, now: Stillness, limits: Hang) -> float | None:
    """Return for how long nobody may work before it is a hang; None where standing still is in order."""
    spins = bool(now.spinning)
    longest = now.longest_seconds or 0.0
    if now.stage in TRAINING:
        return limits.spin_seconds if spins else limits.idle_seconds
    if now.stage in ENGINE:
        return limits.spin_seconds if spins else _longer_than_ever(history, now, limits.idle_seconds)
    if now.stage in PAUSES:
        return _patience_in_pauses(now, limits, longest, spins=spins)
    if not history.stages_told:
        return _patience_untold(now, limits)
    if history.step == 0 or not any(gpu.pod.work.workers_seen for gpu in now.gpus):
        # GPUs that serve others wait by design; before the first step nothing is usual.
        return None
    usual = 2 * (history.usual_step_seconds() or 0.0)
    return max(usual, 600.0 if spins else _longer_than_ever(history, now, limits.between_seconds))


def _longer_than_ever(history: History, now: Stillness, least: float) -> float:
    """Return a time far beyond that for which this pool ever stood still in this stage and then went on."""
    return max(least, 3 * history.standstill.longest.get((now.gpus[0].pool, now.stage), 0.0))


def _patience_in_pauses(now: Stillness, limits: Hang, longest: float, *, spins: bool) -> float:
    """What loads or saves may take long the first time; later its own length is the measure."""
    if spins:
        return max(limits.pause_spin_seconds, 5 * longest)
    if not longest or now.stage == "init":
        return limits.pause_seconds
    if now.stage == "save_checkpoint":
        # Storage may well be ten times slower than the last time.
        return max(limits.pause_seconds / 2, 10 * longest)
    return max(limits.pause_spin_seconds, 5 * longest)


def _patience_untold(now: Stillness, limits: Hang) -> float | None:
    """Where no stage is told, only a GPU that worked before can be seen to have stopped."""
    if not any(gpu.usual_watts for gpu in now.gpus):
        return None
    return 2 * limits.spin_seconds if now.spinning else limits.untold_idle_seconds


def _case(history: History, pool: str, now: Stillness) -> Case:
    culprits = list(now.still) if now.spinning and len(now.still) * 2 < len(now.gpus) else []
    named = culprits or list(now.gpus)
    ranks = [rank for gpu in named if (rank := gpu.pod.rank_of(gpu)) is not None]
    stage = OTHER if now.stage == UNKNOWN else now.stage
    evidence: Evidence = {
        "quiet_seconds": round(now.quiet_seconds),
        "stage_seconds": round(now.stage_seconds),
        "spinning_gpus": len(now.spinning),
        "still_gpus": len(now.still),
    }
    if now.longest_seconds is not None:
        evidence["longest_stage_seconds"] = round(now.longest_seconds)
    return Case(
        key=pool,
        finding=finding(
            REASON,
            _message(now, culprits, stage),
            gpus=named,
            stage=stage,
            role="trainer" if not history.stages_told and history.trainer_only else now.role,
            ranks=ranks,
            evidence=evidence,
        ),
    )


def _message(now: Stillness, culprits: Sequence[GpuHistory], stage: str) -> str:
    lasted = duration(now.quiet_seconds)
    if culprits:
        first = culprits[0]
        name = f"GPU {first.uuid if first.index is None else first.index} of pod {first.pod.name}"
        more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        stand = "stand" if more else "stands"
        return (
            f"No progress{in_stage(stage)} for {lasted}: {name}{more} {stand} still while {len(now.spinning)} others"
            f" spin at low power in a collective that waits for it. Look at that rank's stack (py-spy dump) and restart"
            f" from the last checkpoint"
        )
    if now.spinning:
        power = now.spinning[0]
        usual = power.usual_watts.get(power.stage)
        share = ""
        if usual and power.last is not None and power.last.power_watts is not None:
            share = f", at {percent(power.last.power_watts / usual)} of the usual power"
        return (
            f"No progress{in_stage(stage)} for {lasted}: {len(now.spinning)} of {len(now.gpus)} GPUs are busy without"
            f" computing{share}, and nothing has ended since. Look at the stacks (py-spy dump) of engine and workers"
        )
    return (
        f"No progress{in_stage(stage)} for {lasted}: all {len(now.gpus)} GPUs stand still and nothing has ended since."
        f" Look at what the driver and the workers wait for (py-spy dump)"
    )


RULE = Rule(reason=REASON, judge=hang)
