# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a record could not show, whatever happened in it: too short for a rule, or without what the rule looks at. Pure.

That a problem is not found says something only where it could have been. Lengths are those of the thresholds; where
nobody tells steps, `WINDOW_SECONDS` stand for one. Events (Xids, a lost GPU) need no length and are not here.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from verl_gpumonitor.model.findings import Finding

from .history import WINDOW_SECONDS, GpuHistory, History
from .rule import ENGINE, duration
from .rules import host_memory, rollout_memory
from .thresholds import Thresholds
from .work import GEN


class Lack(msgspec.Struct, frozen=True, kw_only=True):
    """A reason that could not be found."""

    reason: str
    message: str
    """Why, as a clause after its name: `needs 6 min where no stages are told, and 45 s are recorded`."""
    needs: str | None = None
    """How long the record must be, such as `6 min` or `3 steps`; None: more of the same would not help."""


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a workload there is to judge by."""

    seconds: float = 0.0
    """For which lines came."""
    steps: int = 0
    """Finished steps, or the stretches of time that stand for them."""
    stage_steps: Mapping[str, int] = {}
    """Stage -> finished steps that had it, as far as they are remembered."""
    stages_told: bool = False
    lacks: tuple[Lack, ...] = ()

    def why_not(self, finding: Finding, thresholds: Thresholds | None = None) -> str | None:
        """Say why a finding of another record could not have been made in this one; None where it could."""
        lack = next((lack for lack in self.lacks if lack.reason == finding.reason), None)
        if lack is not None:
            return lack.message
        need = _steps_of(finding, thresholds or Thresholds(), stages_told=self.stages_told)
        seen = self.stage_steps.get(finding.scope.stage or "", self.steps) if self.stages_told else self.steps
        return None if seen >= need else self.short(need, seen)

    def short(self, need: int, seen: int) -> str:
        """Say that so many steps are needed and so many are seen; as lengths of time where nobody tells steps."""
        if self.stages_told:
            return f"needs {_steps(need)}, and {_steps(seen)} {'is' if seen == 1 else 'are'} recorded"
        return self.too_short(need * WINDOW_SECONDS)

    def too_short(self, seconds: float) -> str:
        """Say the same of a length of time."""
        return f"needs {duration(seconds)} where no stages are told, and {duration(self.seconds)} are recorded"


def _steps(number: int) -> str:
    return f"{number} whole step{'' if number == 1 else 's'}"


def least_steps(thresholds: Thresholds, *, stages_told: bool) -> Mapping[str, int]:
    """Return for each reason that looks at whole steps how many it needs at least.

    The first step does not count for load, nor do the first two stretches where no steps are told.
    """
    low = thresholds.low_utilization
    return {
        "OOMRisk": 2,
        "RolloutMemoryNotReleased": thresholds.rollout_memory.steps,
        "Throttled": thresholds.throttling.steps,
        "Imbalance": thresholds.imbalance.steps,
        "LowUtilization": 1 + low.steps if stages_told else 2 + low.windows,
        "MemoryGrowth": thresholds.memory_growth.steps,
    }


def _steps_of(finding: Finding, thresholds: Thresholds, *, stages_told: bool) -> int:
    """Return how many steps this kind of a reason's finding needs: a rise more than a level."""
    stage, evidence = finding.scope.stage, finding.evidence
    if finding.reason == "OOMRisk" and evidence.get("cause") == "rising":
        return thresholds.oom_risk.rising_steps + (1 if stage in ENGINE else 0)
    if finding.reason == "Imbalance" and stage == GEN and evidence.get("metric") == "utilization":
        return thresholds.imbalance.gen_steps
    return least_steps(thresholds, stages_told=stages_told).get(finding.reason, 0)


def coverage(history: History, thresholds: Thresholds | None = None) -> Coverage:
    """Return what there is to judge by at this moment."""
    limits = thresholds or Thresholds()
    stages: dict[str, int] = {}
    for gpu in history.gpus.values():
        for stage, past in gpu.past.items():
            stages[stage] = max(stages.get(stage, 0), len(past.steps))
    found = Coverage(seconds=history.listened, steps=history.step, stage_steps=stages, stages_told=history.stages_told)
    if not history.gpus:
        return found
    return msgspec.structs.replace(found, lacks=tuple(_lacks(history, limits, found)))


def _lacks(history: History, limits: Thresholds, covered: Coverage) -> Iterator[Lack]:
    untold = {reason: why for reason, (told, why) in _INPUTS.items() if not told(history)}
    if all(host_memory.limit_of(pod) is None for pod in history.pods.values()):
        untold.setdefault("HostMemoryRisk", "nobody tells a limit of the pods' host memory")
    kept = rollout_memory.unjudged(history)
    if not history.stages_told:
        untold["RolloutMemoryNotReleased"] = "nobody tells stages"
    elif kept is not None:
        untold["RolloutMemoryNotReleased"] = kept
    for reason, why in untold.items():
        yield Lack(reason=reason, message=why)
    if all(len(gpus) < 2 for gpus in history.pools().values()):
        untold["Imbalance"] = ""  # One GPU is nobody's peer: nothing is missed.
    for reason, need in least_steps(limits, stages_told=history.stages_told).items():
        if reason not in untold and history.step < need:
            needs = f"{need} step{'' if need == 1 else 's'}" if history.stages_told else duration(need * WINDOW_SECONDS)
            yield Lack(reason=reason, message=covered.short(need, history.step), needs=needs)
    if "Hang" not in untold:
        yield from _hang(history, limits, covered)


def _hang(history: History, limits: Thresholds, covered: Coverage) -> Iterator[Lack]:
    """A hang is longer than anything before: it takes a step, or a stretch of time, and then its patience."""
    if history.stages_told:
        if history.step == 0:
            yield Lack(reason="Hang", message=covered.short(1, 0), needs="1 step")
    elif history.listened < (least := WINDOW_SECONDS + limits.hang.untold_idle_seconds):
        yield Lack(reason="Hang", message=covered.too_short(least), needs=duration(least))


# What a rule looks at


def _any(told: Callable[[GpuHistory], bool]) -> Callable[[History], bool]:
    return lambda history: any(told(gpu) for gpu in history.gpus.values())


def _memory(gpu: GpuHistory) -> bool:
    return gpu.memory_t is not None and bool(gpu.total_bytes)


def _power_where_needed(history: History) -> bool:
    """Without stages only its power tells a GPU that worked and stopped from one that never worked."""
    if history.stages_told:
        return any(gpu.utilization_t is not None for gpu in history.gpus.values())
    return any(gpu.last is not None and gpu.last.power_watts is not None for gpu in history.gpus.values())


def _host(history: History) -> bool:
    return any(pod.last_host is not None and len(pod.host_buckets) > 0 for pod in history.pods.values())


_INPUTS: Final[Mapping[str, tuple[Callable[[History], bool], str]]] = {
    "OOMRisk": (_any(_memory), "nobody tells the GPUs' memory and its size"),
    "MemoryGrowth": (_any(_memory), "nobody tells the GPUs' memory and its size"),
    "Imbalance": (
        _any(lambda gpu: gpu.utilization_t is not None or _memory(gpu)),
        "nobody tells the GPUs' load or memory",
    ),
    "LowUtilization": (_any(lambda gpu: gpu.utilization_t is not None), "nobody tells the GPUs' load"),
    "Hang": (_power_where_needed, "nobody tells the GPUs' load and power"),
    "Throttled": (
        _any(lambda gpu: gpu.last is not None and gpu.last.throttled is not None),
        "nobody tells why clocks are held down",
    ),
    "ForeignProcess": (
        _any(lambda gpu: gpu.processes_t is not None),
        "nobody lists the processes on the GPUs",
    ),
    "HostMemoryRisk": (_host, "nobody tells the pods' host memory"),
    "SharedMemoryRisk": (
        lambda history: any(len(pod.shm_buckets) > 0 for pod in history.pods.values()),
        "nobody tells what lies in /dev/shm",
    ),
}
"""Reason -> whether the record has what its rule looks at, and what is to be said where it has not."""
