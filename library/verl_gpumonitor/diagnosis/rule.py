# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a rule is, and what several rules need. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.model.enums import StrEnum
from verl_gpumonitor.model.findings import MAX_SCOPE, Evidence, Finding, Scope
from verl_gpumonitor.model.vocabulary import UNKNOWN, Severity

from .health import REASONS
from .history import GpuHistory, History
from .hysteresis import Holds
from .thresholds import Thresholds
from .work import OTHER

TRAINING: Final = frozenset({"old_log_prob", "ref", "values", "update_critic", "update_actor", "reward"})
"""Stages in which training processes compute in step with each other, each with memory of its own making."""
ENGINE: Final = frozenset({"gen", "testing"})
"""Stages of the rollout engine, which takes its memory beforehand."""
PAUSES: Final = frozenset({"init", "save_checkpoint", "testing", "update_weights"})
"""Stages in which GPUs may well stand still."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a rule sees hold now."""

    key: str
    """Tells problems of one reason apart: the same problem has the same key at the next look."""
    finding: Finding
    since: float | None = None
    """When it began, where the rule knows; the time for which it must hold counts from then."""


class Unjudged(msgspec.Struct, frozen=True):
    """A problem that cannot be judged now, for what it rests on is not known any more. Open, it stays so a while."""

    key: str


class Cadence(StrEnum):
    """When a rule has to look again."""

    STEP = "step"
    """After a step, or the stretch of time that stands for one: it looks at finished steps only, and is its own
    judge of how long a thing must last."""
    TICK = "tick"
    """Each second of the trace."""


Open = Mapping[str, str | None]
"""Problems of a reason that are open now: key -> the stage they name."""
Verdict = Sequence[Case | Unjudged] | None
"""What holds now; None: nothing can be judged, and what is open stays so."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One reason's rule."""

    reason: str
    judge: Callable[[History, Thresholds, Open], Verdict]
    """History, thresholds, and what is open of this reason: for that a rule may ask for less, and keeps the stage."""
    cadence: Cadence = Cadence.TICK
    hold: Callable[[Thresholds], Holds] = lambda _: Holds(raise_seconds=0.0, clear_seconds=0.0)
    after_end: bool = False
    """Whether it is asked when the job has ended: what it looks at may be told late."""


def finding(
    reason: str,
    message: str,
    *,
    gpus: Iterable[GpuHistory] = (),
    pods: Iterable[str] = (),
    stage: str | None = None,
    role: str | None = None,
    ranks: Iterable[int] = (),
    evidence: Evidence | None = None,
    severity: Severity | None = None,
) -> Finding:
    """Make a finding of a reason's usual severity; GPUs in the order given, the worst first."""
    named = list(gpus)[:MAX_SCOPE]
    in_pods = dict.fromkeys([*(gpu.pod.name for gpu in named), *pods])
    return Finding(
        reason=reason,
        severity=severity or REASONS[reason].severity,
        scope=Scope(
            pods=tuple(in_pods)[:MAX_SCOPE],
            gpus=tuple(gpu.uuid for gpu in named),
            stage=stage,
            role=None if role == UNKNOWN else role,
            ranks=tuple(ranks)[:MAX_SCOPE],
        ),
        message=message,
        evidence=evidence or {},
    )


def median(values: Iterable[float]) -> float | None:
    """Return the lower median; None of nothing."""
    known = sorted(values)
    return known[(len(known) - 1) // 2] if known else None


def duration(seconds: float) -> str:
    """Return `40 s`, `5 min` or `2.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def gpu_name(gpu: GpuHistory) -> str:
    """Return `GPU 3 of pod w-1`."""
    return f"GPU {gpu.uuid if gpu.index is None else gpu.index} of pod {gpu.pod.name}"


def in_stage(stage: str) -> str:
    """Return ` in update_actor`; nothing where no stage is told, or none runs."""
    return "" if stage in (UNKNOWN, OTHER) else f" in {stage}"


def subject(gpus: Sequence[GpuHistory]) -> str:
    """Return the first by name, and how many more."""
    return gpu_name(gpus[0]) if len(gpus) == 1 else f"{gpu_name(gpus[0])} and {len(gpus) - 1} more"


def few(odd: Sequence[object], among: Sequence[object]) -> bool:
    """Say whether some may be called odd among others: one of two or three, else at most a third."""
    return 0 < len(odd) <= max(1, len(among) // 3)


class Line(msgspec.Struct, frozen=True):
    """A straight line through equally spaced values."""

    slope: float
    """Per place."""
    correlation: float
    """-1..1; 0 for values that do not change."""


def fit(values: Sequence[float]) -> Line:
    """Return the least-squares line. At least two values. Example: 1, 2, 3 give slope 1, correlation 1."""
    n = len(values)
    mean_x, mean_y = (n - 1) / 2, sum(values) / n
    sxx = sum((x - mean_x) ** 2 for x in range(n))
    sxy = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    syy = sum((y - mean_y) ** 2 for y in values)
    return Line(sxy / sxx, sxy / (sxx * syy) ** 0.5 if syy > 0 else 0.0)
