# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which findings are the consequence of another: one problem is one finding. Pure.

A hang keeps GPUs idle, a lost GPU lets the others wait, a hot GPU is slow, a stranger's memory makes a GPU fuller than
its peers. The consequence is left out while the cause is open, and the cause says that it explains it.
"""

from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from verl_gpumonitor.model.findings import Finding

from .history import History
from .xids import TEARDOWN


class Raised(Protocol):
    """An open problem."""

    finding: Finding
    explains: set[str]


class _Seen:
    """Of whom a finding speaks, widened from GPUs to pools."""

    def __init__(self, finding: Finding, history: History) -> None:
        self.finding = finding
        self.gpus = set(finding.scope.gpus)
        pools = {history.gpus[uuid].pool for uuid in self.gpus if uuid in history.gpus}
        self.pools = pools or {history.pods[name].pool for name in finding.scope.pods if name in history.pods}


R = TypeVar("R", bound=Raised)
Related = Callable[[_Seen, _Seen], bool]


def _workload(_: _Seen, __: _Seen) -> bool:
    return True


def _same_pool(cause: _Seen, effect: _Seen) -> bool:
    return not cause.pools.isdisjoint(effect.pools)


def _same_gpus(cause: _Seen, effect: _Seen) -> bool:
    return bool(effect.gpus) and effect.gpus <= cause.gpus


def _same_gpus_or_slower(cause: _Seen, effect: _Seen) -> bool:
    return effect.finding.evidence.get("metric") != "memory" and not cause.gpus.isdisjoint(effect.gpus)


def _memory_of_same(cause: _Seen, effect: _Seen) -> bool:
    return effect.finding.evidence.get("metric") == "memory" and not cause.gpus.isdisjoint(effect.gpus)


def _not_memory_in_pool(cause: _Seen, effect: _Seen) -> bool:
    return effect.finding.evidence.get("metric") != "memory" and _same_pool(cause, effect)


def _same_stage(cause: _Seen, effect: _Seen) -> bool:
    return cause.finding.scope.stage == effect.finding.scope.stage and not cause.gpus.isdisjoint(effect.gpus)


def _killed(cause: _Seen, _: _Seen) -> bool:
    return cause.finding.evidence.get("killed") == 1


def _killed_program(cause: _Seen, effect: _Seen) -> bool:
    return _killed(cause, effect) and effect.finding.evidence.get("xid") == TEARDOWN


def _load_of_same_pool(cause: _Seen, effect: _Seen) -> bool:
    return cause.finding.evidence.get("metric") == "utilization" and _same_pool(cause, effect)


EXPLAINS: Final[dict[tuple[str, str], Related]] = {
    ("GPUFault", "Hang"): _workload,
    ("GPUFault", "LowUtilization"): _workload,
    ("GPUFault", "Imbalance"): _not_memory_in_pool,
    ("GPUFault", "Throttled"): _same_gpus,
    ("GPUFault", "TelemetryPartial"): _same_pool,
    ("ApplicationFault", "Hang"): _workload,
    ("ApplicationFault", "LowUtilization"): _workload,
    ("ApplicationFault", "Imbalance"): _not_memory_in_pool,
    ("HostMemoryRisk", "ApplicationFault"): _killed_program,
    ("HostMemoryRisk", "Hang"): _killed,
    ("HostMemoryRisk", "LowUtilization"): _killed,
    ("HostMemoryRisk", "Imbalance"): _killed,
    ("HostMemoryRisk", "TelemetryPartial"): _killed,
    ("HostMemoryRisk", "TelemetryUnavailable"): _killed,
    ("Hang", "LowUtilization"): _workload,
    ("Hang", "Imbalance"): _not_memory_in_pool,
    ("Throttled", "Imbalance"): _same_gpus_or_slower,
    ("LeftoverMemory", "Imbalance"): _memory_of_same,
    ("ForeignProcess", "Imbalance"): _memory_of_same,
    ("OOMRisk", "MemoryGrowth"): _same_stage,
    ("Imbalance", "LowUtilization"): _load_of_same_pool,
}
"""Cause, consequence -> what they must have in common."""


def explained_by(finding: Finding, open_now: Iterable[R], history: History) -> list[R]:
    """Return the open problems of which this one is a consequence."""
    effect = _Seen(finding, history)
    causes = []
    for cause in open_now:
        related = EXPLAINS.get((cause.finding.reason, finding.reason))
        if related is not None and related(_Seen(cause.finding, history), effect):
            causes.append(cause)
    return causes
