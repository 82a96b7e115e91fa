# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""OOMRisk: GPU memory is likely to run out in a named stage.

A high value alone says nothing: a rollout engine fills 90% and more by design and for ever (vllm-project/vllm#7553),
so generation is judged by a rise or against its peers alone. In a training stage memory is what this step's batch
needs, so that its *peak* counts, of a second and not of a sample, for the same stage from step to step (within a step a
sawtooth is normal). It is a risk when

- the peaks rise and the line through them meets the end within a few steps (verl-project/verl#1232, #2828, #3620);
- the peak comes so near in two steps that one longer batch would not fit, or once so near that the next step may fail;
- one GPU is full and its peers are not: it is the first to fail;
- the rollout resumes: in that window trained and served weights share the GPU (vllm-project/vllm#15254,
  verl-project/verl#302). What counts is memory above that of generation itself, which is the engine's own reservation.

Where no stage is told, an allocator that caches may fill a GPU without harm, so that only the rise and the very end
count. One GPU that is full in all stages by the same thing is one problem, not one for each stage.
"""

from collections.abc import Iterator, Sequence

import msgspec

from verl_gpumonitor.diagnosis.alike import alike
from verl_gpumonitor.diagnosis.history import RESUME, GpuHistory, History
from verl_gpumonitor.diagnosis.rule import (
    ENGINE,
    TRAINING,
    Cadence,
    Case,
    Open,
    Rule,
    Verdict,
    few,
    finding,
    fit,
    in_stage,
    median,
    subject,
)
from verl_gpumonitor.diagnosis.thresholds import OomRisk, Thresholds
from verl_gpumonitor.diagnosis.work import GEN, OTHER
from verl_gpumonitor.model.figures import gib
from verl_gpumonitor.model.findings import Evidence, Finding
from verl_gpumonitor.model.history import Piece
from verl_gpumonitor.model.vocabulary import UNKNOWN, Severity

REASON = "OOMRisk"
_SAMPLES = 8
"""Fewer tell no level."""
_MOMENT_SHARE = 0.15
_LAST = 8
"""Steps that a rise is looked for in."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's peaks in one stage, as shares of its memory, oldest first; the running step's last."""

    gpu: GpuHistory
    ratios: Sequence[float]
    earlier: float
    """Highest peak before these."""
    floor: float | None
    seconds: float

    @property
    def last(self) -> float:
        """The newest peak."""
        return self.ratios[-1]


class Risk(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a pool in which memory may run out."""

    stage: str
    role: str
    why: str
    """`rising`, `near`, `peers` or `resume`."""
    courses: Sequence[Course]
    """Of the GPUs at risk, the fullest first."""
    per_step: float = 0.0
    steps_left: float | None = None
    middle: float | None = None
    """Median of the pool."""


def oom_risk(history: History, thresholds: Thresholds, open_now: Open) -> Verdict:
    """Judge each stage of each pool."""
    cases: list[Case] = []
    for pool, gpus in history.pools().items():
        risks = [
            risk
            for part in alike(gpus)
            for stage in _stages(part)
            if (risk := _risk(history, part, stage, thresholds, open_now, pool))
        ]
        cases += _joined(pool, risks, thresholds.oom_risk, open_now)
    return cases


def _stages(gpus: Sequence[GpuHistory]) -> list[str]:
    return sorted({stage for gpu in gpus for stage in (*gpu.past, *gpu.now)} - {"init"})


def _courses(gpus: Sequence[GpuHistory], stage: str, *, critical: float) -> list[Course]:
    courses = []
    for gpu in gpus:
        total, past, live = gpu.total_bytes, gpu.past.get(stage), gpu.now.get(stage)
        if not total:
            continue
        all_peaks = past.peaks if past is not None else ()
        peaks, old = [*all_peaks[-_LAST:]], all_peaks[:-_LAST]
        floors, seconds = ([*past.floors[-_LAST:]], [*past.seconds[-_LAST:]]) if past is not None else ([], [])
        if live is not None and (live.peak_bytes or 0.0) >= critical * total:
            # A step that is not over may still rise; what it has so far counts if it is at the end already.
            peaks, floors, seconds = [*peaks, live.peak_bytes], [*floors, live.floor_bytes], [*seconds, live.seconds]
        ratios = [peak / total for peak in peaks if peak is not None]
        if ratios:
            courses.append(
                Course(
                    gpu=gpu,
                    ratios=ratios,
                    earlier=max((peak / total for peak in old if peak is not None), default=0.0),
                    floor=min((floor for floor in floors if floor is not None), default=None),
                    seconds=max(seconds),
                )
            )
    return courses


def _risk(
    history: History,
    gpus: Sequence[GpuHistory],
    stage: str,
    thresholds: Thresholds,
    open_now: Open,
    pool: str,
) -> Risk | None:
    limits = thresholds.oom_risk
    courses = _courses(gpus, stage, critical=limits.critical_ratio)
    if not courses:
        return None
    told = history.stages_told
    if told and stage in (RESUME, OTHER, UNKNOWN):
        return _resume(courses, stage, limits, is_open=f"{pool}/{RESUME}" in open_now)
    is_open = f"{pool}/{stage}" in open_now
    near = _near_ratio(stage, told=told, limits=limits)
    found = _rising(courses, stage, limits, near=near)
    if found is None and near is not None:
        found = _near(courses, stage, limits, near=near - (0.01 if is_open else 0.0), at_once=is_open)
    if found is None and stage in ENGINE and told:
        found = _spike(courses, stage, limits, is_open=is_open)
    return found or _peers(courses, stage, limits)


def _near_ratio(stage: str, *, told: bool, limits: OomRisk) -> float | None:
    """Return from where a peak is a risk by itself; None where it never is."""
    if stage in TRAINING:
        return limits.near_ratio
    if stage in ENGINE or told:
        return None
    return limits.trainer_near_ratio


def _role(courses: Sequence[Course], stage: str) -> str:
    for course in courses:
        piece = course.gpu.now.get(stage) or next(iter(course.gpu.pieces(stage, 1)), None)
        if piece is not None:
            return piece.role
    return UNKNOWN


def _fullest(courses: Sequence[Course]) -> list[Course]:
    """Return those that will fail about together, the fullest first."""
    top = max(course.last for course in courses)
    return sorted((c for c in courses if c.last >= top - 0.03), key=lambda c: (-c.last, c.gpu.uuid))


def _rising(courses: Sequence[Course], stage: str, limits: OomRisk, *, near: float | None) -> Risk | None:
    """Look for a rise in what the pool's GPUs have in common, and then in each by itself.

    A rise is new heights: a newest peak below one of long ago is noise.
    """
    rise = _rise(list(_together(courses)), limits, stage=stage, near=near)
    at = [course for course in courses if course.last >= course.earlier]
    if rise is None:
        alone = [(r, c) for c in at if (r := _rise(c.ratios, limits, stage=stage, near=near, strict=True)) is not None]
        at = [course for _, course in alone]
        rise = max((r for r, _ in alone), default=None)
    if rise is None or not at:
        return None
    slope, seen = rise
    left = max(0.0, (limits.full_ratio - max(course.last for course in at)) / slope)
    if left > min(limits.steps_left, seen):
        return None
    role = _role(courses, stage)
    return Risk(stage=stage, role=role, why="rising", courses=_fullest(at), per_step=slope, steps_left=left)


def _together(courses: Sequence[Course]) -> Iterator[float]:
    """Yield the pool's median peak of each step that all have."""
    steps = min(len(course.ratios) for course in courses)
    for place in range(-steps, 0):
        yield median(course.ratios[place] for course in courses) or 0.0


def _rise(
    ratios: Sequence[float], limits: OomRisk, *, stage: str, near: float | None, strict: bool = False
) -> tuple[float, int] | None:
    """Return by how much the peaks rise a step, and over how many it was seen; None if they do not, or not surely.

    The last steps count as well as the whole: what fills up at first and then stays is no rise.
    """
    engine = near is None or stage in ENGINE
    need = limits.rising_steps + (1 if engine else 0)
    correlation = limits.rising_correlation + (0.04 if engine or strict else 0.0)
    least = limits.rising_least * (1.5 if engine else 1.0)
    low = limits.rising_from_ratio + (0.07 if engine else 0.0)
    for length in range(min(_LAST, len(ratios)), need - 1, -1):
        last = ratios[-length:]
        recent = (last[-1] - last[-3]) / 2
        # Of most GPUs this is all that must be looked at.
        if recent <= 0 or last[-1] < low or last[-1] - last[0] < least:
            continue
        line = fit(last)
        slope = min(line.slope, recent)
        if line.correlation >= correlation and slope > 0:
            return slope, length
    return None


def _near(courses: Sequence[Course], stage: str, limits: OomRisk, *, near: float, at_once: bool) -> Risk | None:
    at_risk = [
        course
        for course in courses
        if course.last >= max(limits.critical_ratio, near)
        or (course.last >= near and (at_once or (len(course.ratios) > 1 and course.ratios[-2] >= near)))
    ]
    if not at_risk:
        return None
    middle = median(course.last for course in courses)
    return Risk(stage=stage, role=_role(courses, stage), why="near", courses=_fullest(at_risk), middle=middle)


def _spike(courses: Sequence[Course], stage: str, limits: OomRisk, *, is_open: bool) -> Risk | None:
    """Look for moments in generation that reach the end, above what the engine holds all the time."""
    at_risk = []
    for course in courses:
        total = course.gpu.total_bytes or 1
        pieces = course.gpu.pieces(stage, 2)
        spikes = [
            p.peak_bytes is not None and p.peak_bytes >= limits.near_ratio * total and _momentary(p, total, limits)
            for p in pieces
        ]
        if len(spikes) == 2 and (all(spikes) or (is_open and any(spikes))):
            at_risk.append(course)
    if not at_risk:
        return None
    return Risk(stage=stage, role=_role(courses, stage), why="resume", courses=_fullest(at_risk))


def _momentary(piece: Piece, total: float, limits: OomRisk) -> bool:
    """Say whether a piece's peak was a moment's: above what samples found, or found by few of them."""
    if piece.level_bytes is None or piece.peak_bytes is None or piece.used_samples < _SAMPLES:
        return False
    above = piece.peak_bytes - piece.level_bytes >= limits.spike_above_gen * total
    return above or piece.level_samples <= _MOMENT_SHARE * piece.used_samples


def _peers(courses: Sequence[Course], stage: str, limits: OomRisk) -> Risk | None:
    middle = median(course.last for course in courses)
    if middle is None or len(courses) < 2:
        return None
    floor = max(limits.beside_peers_ratio, middle + limits.beside_peers)
    odd = [c for c in courses if c.last >= floor and len(c.ratios) > 1 and c.ratios[-2] >= floor - 0.02]
    if not few(odd, courses):
        return None
    return Risk(stage=stage, role=_role(courses, stage), why="peers", courses=_fullest(odd), middle=middle)


def _resume(courses: Sequence[Course], stage: str, limits: OomRisk, *, is_open: bool) -> Risk | None:
    """Judge the window in which the rollout resumes: above generation's own level, and near the end."""
    at_risk = []
    for course in courses:
        level = median(p.peak_bytes for p in course.gpu.pieces(GEN) if p.peak_bytes is not None)
        total = course.gpu.total_bytes
        if level is None or not total:
            continue
        above = [r for r in course.ratios if r >= level / total + limits.resume_above_gen]
        if is_open and above and course.ratios.index(above[-1]) >= len(course.ratios) - 3:
            at_risk.append(course)
        if is_open or len(above) < 2 or course.last != above[-1]:
            continue
        rise = _rise(above, limits, stage=stage, near=limits.near_ratio)
        soon = rise is not None and (limits.full_ratio - above[-1]) / rise[0] <= min(limits.steps_left, rise[1])
        if soon or min(above[-2:]) >= limits.near_ratio:
            at_risk.append(course)
    if not at_risk:
        return None
    role = "rollout" if stage != RESUME else _role(courses, stage)
    return Risk(stage=RESUME, role=role, why="resume", courses=_fullest(at_risk))


def _joined(pool: str, risks: Sequence[Risk], limits: OomRisk, open_now: Open) -> list[Case]:
    """Make cases; stages that are full by the same thing become one."""
    static = [r for r in risks if r.why in ("near", "peers")]
    moving = [r for r in risks if r.why not in ("near", "peers")]
    if len(static) >= (2 if any(_beside_peers(r, limits) for r in static) else 3):
        keys = {f"{pool}/{r.stage}": r for r in static}
        known = [r for key, r in keys.items() if key in open_now]
        chosen = known[0] if known else max(static, key=lambda r: (r.courses[0].seconds, r.stage))
        static = [chosen]
    merged: dict[str, Risk] = {}
    for risk in (*moving, *static):
        merged.setdefault(f"{pool}/{risk.stage}", risk)
    return [Case(key=key, finding=_finding(risk, limits)) for key, risk in merged.items()]


def _beside_peers(risk: Risk, limits: OomRisk) -> bool:
    return risk.middle is not None and risk.courses[0].last - risk.middle >= limits.beside_peers


def _finding(risk: Risk, limits: OomRisk) -> Finding:
    worst = risk.courses[0]
    total = worst.gpu.total_bytes or 0
    peak = worst.last * total
    growth = risk.per_step * total
    ahead = peak + 3 * growth
    evidence: Evidence = {
        "memory_total_bytes": total,
        "peak_bytes": round(peak),
        "headroom_bytes": round(total - peak),
        "missing_bytes": max(0, round(ahead - limits.safe_ratio * total)),
        "step_peak_bytes": [float(round(r * total)) for r in worst.ratios],
        "cause": risk.why,
    }
    if worst.floor is not None:
        evidence["lowest_bytes"] = round(worst.floor)
    if risk.steps_left is not None:
        evidence["growth_bytes_per_step"] = round(growth)
        evidence["steps_left"] = round(risk.steps_left, 1)
    if risk.middle is not None:
        evidence["pool_peak_bytes"] = round(risk.middle * total)
        evidence["beside_peers"] = int(_beside_peers(risk, limits))
    critical = worst.last >= limits.critical_ratio or (risk.steps_left is not None and risk.steps_left <= 1.5)
    return finding(
        REASON,
        _message(risk, peak, total, growth),
        gpus=[course.gpu for course in risk.courses],
        stage=risk.stage,
        role=risk.role,
        evidence=evidence,
        severity=Severity.CRITICAL if critical else Severity.WARNING,
    )


def _message(risk: Risk, peak: float, total: float, growth: float) -> str:
    gpus = [course.gpu for course in risk.courses]
    reached = f"{subject(gpus)} reached {gib(peak).removesuffix(' GiB')} of {gib(total)}{in_stage(risk.stage)}"
    if risk.why == "rising":
        steps = len(risk.courses[0].ratios)
        left = round(risk.steps_left or 0)
        when = "the next step may fail" if left <= 1 else f"full in about {left} steps"
        return f"{reached}, +{gib(growth)} a step over {steps} steps; {when}"
    if risk.why == "resume":
        return (
            f"{reached}, while the rollout resumes and trained and served weights share the GPU; it is above what"
            f" generation itself takes, and {gib(total - peak)} are left"
        )
    if risk.middle is not None and risk.courses[0].last - risk.middle >= 0.15:
        return f"{reached} while its pool's usual is {gib(risk.middle * total)}: it will be the first to run out"
    return f"{reached}; {gib(total - peak)} are left, less than one longer batch may take"


RULE = Rule(reason=REASON, judge=oom_risk, cadence=Cadence.STEP)
