# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Throttled: clocks are held down by heat or a power brake for a large part of a stage.

In a collective the slowest GPU sets the pace, so one hot GPU slows all. `sw_power_cap` is left out: a GPU at its own
power limit under full load shows it as a matter of course; so are idle clocks and settings. A moment of heat is
nothing; a third of a stage in two of the last three steps is. Source: NVIDIA/dcgm-exporter#589; NVML's
clocks-event reasons.
"""

from collections.abc import Sequence

from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, finding, in_stage, subject
from verl_gpumonitor.diagnosis.thresholds import Thresholds, Throttling
from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.findings import Evidence
from verl_gpumonitor.model.history import Piece

REASON = "Throttled"


def throttled(history: History, thresholds: Thresholds, open_now: Open) -> Verdict:
    """Report, for each pool, the GPUs that are held down, with the stage that suffers most."""
    limits = thresholds.throttling
    cases = []
    for pool, gpus in history.pools().items():
        found = [(worst, gpu) for gpu in gpus if (worst := _worst(gpu, limits, is_open=pool in open_now)) is not None]
        if found:
            found.sort(key=lambda pair: (-(pair[0].throttled_ratio or 0.0), pair[1].uuid))
            cases.append(_case(pool, found[0][0], [gpu for _, gpu in found]))
    return cases


def _worst(gpu: GpuHistory, limits: Throttling, *, is_open: bool) -> Piece | None:
    """Return the piece of the stage in which the GPU is held down most; None if it is in none."""
    if gpu.throttled_seconds < limits.seconds:
        return None
    ratio = limits.ratio * (0.7 if is_open else 1.0)
    held = []
    for stage, past in gpu.past.items():
        last = past.last(limits.steps + 1)
        over = [p for p in last if _over(p, ratio, limits.seconds)]
        held += over[-1:] if len(over) >= limits.steps else []
        live = gpu.now.get(stage)
        if live is not None and _over(live, ratio, limits.live_seconds):
            held.append(live)
    held += [p for p in gpu.now.values() if p.stage not in gpu.past and _over(p, ratio, limits.live_seconds)]
    return max(held, key=lambda p: p.throttled_seconds, default=None)


def _over(piece: Piece, ratio: float, seconds: float) -> bool:
    return piece.throttled_seconds >= seconds and (piece.throttled_ratio or 0.0) >= ratio


def _case(pool: str, piece: Piece, gpus: Sequence[GpuHistory]) -> Case:
    worst = gpus[0]
    reasons = ", ".join(worst.held_by)
    share = piece.throttled_ratio or 0.0
    of = piece.stage if in_stage(piece.stage) else "the time"
    evidence: Evidence = {"throttled_ratio": round(share, 3), "stage_seconds": round(piece.seconds, 1)}
    heat = ""
    if worst.held_celsius is not None:
        evidence["temperature_celsius"] = worst.held_celsius
        heat = f" at {worst.held_celsius:.0f} C"
    if reasons:
        evidence["throttle_reasons"] = reasons
    message = (
        f"{subject(gpus)}: clocks were held down by {_by(reasons)} for {percent(share)} of {of}{heat};"
        f" the slowest GPU sets the pace of all, so look after its {_after(reasons)} or its node"
    )
    return Case(
        key=pool, finding=finding(REASON, message, gpus=gpus, stage=piece.stage, role=piece.role, evidence=evidence)
    )


def _by(reasons: str) -> str:
    """Return what it was, as far as NVML tells: `hw_slowdown` alone is either of the two."""
    heat, brake = "thermal" in reasons, "power_brake" in reasons
    return "heat or a power brake" if heat == brake else "heat" if heat else "a power brake"


def _after(reasons: str) -> str:
    heat, brake = "thermal" in reasons, "power_brake" in reasons
    return "cooling, its power supply" if heat == brake else "cooling" if heat else "power supply"


RULE = Rule(reason=REASON, judge=throttled)
