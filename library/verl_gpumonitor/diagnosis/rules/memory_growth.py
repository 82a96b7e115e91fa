# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""MemoryGrowth: the same stage takes more memory step after step.

Within a step memory goes up and down as stages follow each other, so a stage is compared with itself in other steps,
by its floor and by its peak. A leak raises all stages alike, also those in which the engine sleeps
(hiyouga/EasyR1#11002); growing answers raise one, and by more before it is worth a word. Noise has no direction: the
rise must be a line over eight steps. What fills up in the first steps and then stays (allocator caches, captured
graphs) is no growth: much of the rise must lie in the second half. With many GPUs some course looks like a line by
chance, so that of a GPU alone much of the rise must be its own, and not its pool's, and its peaks in one stage alone
are no growth: a leak stays, and answers grow for all. What is held between stages is
what one of them left, now this and now that one: growth there is a leak's if stages grow too, and nothing by itself.
From where a rise of one stage is a risk, it is OOMRisk's to tell.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from verl_gpumonitor.diagnosis.history import DEPTH, GpuHistory, History
from verl_gpumonitor.diagnosis.rule import Cadence, Case, Open, Rule, Verdict, finding, fit, in_stage, median, subject
from verl_gpumonitor.diagnosis.thresholds import MemoryGrowth, Thresholds
from verl_gpumonitor.diagnosis.work import OTHER
from verl_gpumonitor.model.figures import gib
from verl_gpumonitor.model.findings import Evidence

REASON = "MemoryGrowth"


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of one pool that grows."""

    stage: str
    role: str
    rise: float
    """Over the steps looked at, as a share of a GPU's memory."""
    per_step: float
    gpus: Sequence[GpuHistory]
    levels: Sequence[float]
    what: str
    """`floor` or `peak`."""
    lone: bool
    """Whether some GPUs grow that are not what the pool has in common."""
    seconds: float
    """Of the stage in a step: where several grow, the longest is named."""
    peak: float
    """Highest peak of the last step, whatever was looked at."""


def memory_growth(history: History, thresholds: Thresholds, open_now: Open) -> Verdict:
    """Report each pool with growth; one finding, for the longest stage that grew."""
    limits = thresholds.memory_growth
    cases = []
    for pool, gpus in history.pools().items():
        known = sorted(
            stage for stage in {s for gpu in gpus for s in gpu.past} - {"init"} if _told(gpus, stage, limits)
        )
        grown = [growth for stage in known if (growth := _stage_growth(gpus, stage, limits)) is not None]
        if not grown:
            continue
        everywhere = len(grown) * 2 >= len(known)
        named = [growth for growth in grown if growth.stage != OTHER or not history.stages_told]
        if not named:
            continue
        told = [growth for growth in named if growth.stage == open_now.get(pool)]
        worst = max(told or named, key=lambda growth: (growth.seconds, growth.stage))
        most = max((growth.rise for growth in named if not (growth.lone and growth.what == "peak")), default=0.0)
        alone = most >= limits.least_alone and worst.peak < thresholds.oom_risk.rising_from_ratio
        if everywhere or alone or pool in open_now:
            cases.append(_case(pool, worst, len(grown), everywhere=everywhere))
    return cases


def _told(gpus: Sequence[GpuHistory], stage: str, limits: MemoryGrowth) -> bool:
    """Say whether a stage was seen in steps enough; a short one escapes a sampler that looks each 10 s."""
    return any(len(_levels(gpu, stage, "floor")) >= limits.steps for gpu in gpus)


def _stage_growth(gpus: Sequence[GpuHistory], stage: str, limits: MemoryGrowth) -> Growth | None:
    courses = {what: {gpu.uuid: _levels(gpu, stage, what) for gpu in gpus} for what in ("floor", "peak")}
    for steps in (limits.steps, 2 * limits.steps):
        # A slow leak shows over more steps.
        longer = msgspec.structs.replace(limits, steps=min(steps, DEPTH))
        for what, series in courses.items():
            growth = _growth(gpus, stage, what, series, longer)
            if growth is not None:
                return growth
    return None


def _growth(
    gpus: Sequence[GpuHistory], stage: str, what: str, series: Mapping[str, list[float]], limits: MemoryGrowth
) -> Growth | None:
    """Look at what the pool's GPUs have in common; a GPU that leaks alone needs a clearer course."""
    whole = {uuid: levels[-limits.steps :] for uuid, levels in series.items() if len(levels) >= limits.steps}
    if not whole:
        return None
    common = [median(levels[place] for levels in whole.values()) or 0.0 for place in range(limits.steps)]
    grown = [gpu for gpu in gpus if gpu.uuid in whole]
    lone = not _grows(common, limits, limits.least)
    if lone:
        grown = [gpu for gpu in grown if _grows(whole[gpu.uuid], limits, limits.least * 2) and _by_itself(gpu, whole)]
        if not grown:
            return None
        common = max((whole[gpu.uuid] for gpu in grown), key=lambda levels: levels[-1] - levels[0])
    last = grown[0].pieces(stage, 1)[-1]
    return Growth(
        stage=stage,
        role=last.role,
        rise=common[-1] - common[0],
        per_step=fit(common).slope,
        gpus=sorted(grown, key=lambda gpu: (-whole[gpu.uuid][-1], gpu.uuid)),
        levels=common,
        what=what,
        lone=lone,
        seconds=median(piece.seconds for piece in grown[0].pieces(stage)) or 0.0,
        peak=max((levels[-1] for gpu in grown if (levels := _levels(gpu, stage, "peak"))), default=0.0),
    )


def _by_itself(gpu: GpuHistory, whole: Mapping[str, Sequence[float]]) -> bool:
    """Say whether at least half of a GPU's rise is not its peers' too."""
    own = whole[gpu.uuid]
    others = [levels for uuid, levels in whole.items() if uuid != gpu.uuid]
    peers = median(levels[-1] - levels[0] for levels in others) or 0.0
    return own[-1] - own[0] >= 2 * peers


def _levels(gpu: GpuHistory, stage: str, what: str) -> list[float]:
    total, past = gpu.total_bytes, gpu.past.get(stage)
    if not total or past is None:
        return []
    sizes = zip(past.steps, past.floors if what == "floor" else past.peaks, strict=True)
    return [size / total for step, size in sizes if step > 0 and size is not None]


def _grows(levels: Sequence[float], limits: MemoryGrowth, least: float) -> bool:
    rise = levels[-1] - levels[0]
    late = levels[-1] - levels[len(levels) // 2 - 1]
    return (
        rise >= least
        and late >= limits.late_share * rise
        and sum(b > a for a, b in pairwise(levels)) * 3 >= 2 * (len(levels) - 1)
        and fit(levels).correlation >= limits.correlation
    )


def _case(pool: str, growth: Growth, stages: int, *, everywhere: bool) -> Case:
    total = growth.gpus[0].total_bytes or 0
    per_step = growth.per_step * total
    where = f" in {stages} stages, among them {growth.stage}" if stages > 1 else in_stage(growth.stage)
    message = (
        f"{subject(growth.gpus)}: memory grows by {gib(per_step)} a step{where},"
        f" {_as_what(growth, stages, everywhere=everywhere)};"
        f" {gib(growth.levels[0] * total)} became {gib(growth.levels[-1] * total)} in {len(growth.levels)} steps"
    )
    evidence: Evidence = {
        "memory_total_bytes": total,
        "growth_bytes_per_step": round(per_step),
        "steps": len(growth.levels),
        "stages": stages,
        "level": growth.what,
        "step_bytes": [float(round(level * total)) for level in growth.levels],
        "steps_left": round(max(0.0, (0.995 - growth.levels[-1]) / growth.per_step), 1),
    }
    found = finding(REASON, message, gpus=growth.gpus, stage=growth.stage, role=growth.role, evidence=evidence)
    return Case(key=pool, finding=found)


def _as_what(growth: Growth, stages: int, *, everywhere: bool) -> str:
    """Say what grows so. Where a job only trains, it has one stage and no answers."""
    if growth.gpus[0].pod.trains:
        return "as a leak does" if growth.what == "floor" else "as growing batches do"
    return "as a leak does" if everywhere and stages > 1 else "as growing answers do"


RULE = Rule(reason=REASON, judge=memory_growth, cadence=Cadence.STEP)
