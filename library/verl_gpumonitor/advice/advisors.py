# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which advisor answers which finding."""

from collections.abc import Callable
from typing import Final

from verl_gpumonitor.model.findings import Advice, Finding

from . import faults, host, memory, pace
from .case import Case, Found
from .context import Context

MAX_ADVICE: Final = 4
"""A person tries one change after another; a list of ten is none."""

_TRAINERS: Final = frozenset({"PyTorchJob", "TrainJob", "MPIJob"})
_OF_RL: Final = (
    "actor_rollout_ref.",
    "critic.",
    "reward.",
    "reward_model.",
    "algorithm.",
    "rollout.",
    "async_training.",
)

_ADVISORS: Final[dict[str, Callable[[Case], Found]]] = {
    "OOMRisk": memory.oom_risk,
    "MemoryGrowth": memory.memory_growth,
    "RolloutMemoryNotReleased": memory.rollout_not_released,
    "LeftoverMemory": memory.leftover_memory,
    "ForeignProcess": memory.foreign_process,
    "HostMemoryRisk": host.host_memory_risk,
    "SharedMemoryRisk": host.shared_memory_risk,
    "Imbalance": pace.imbalance,
    "LowUtilization": pace.low_utilization,
    "Hang": faults.hang,
    "GPUFault": faults.gpu_fault,
    "ApplicationFault": faults.application_fault,
    "Throttled": faults.throttled,
    "TelemetryUnavailable": faults.telemetry_unavailable,
    "TelemetryPartial": faults.telemetry_partial,
}


def advise(finding: Finding, context: Context) -> tuple[Advice, ...]:
    """Return at most `MAX_ADVICE` pieces of advice, the best first, no parameter twice; empty for an unknown reason."""
    advisor = _ADVISORS.get(finding.reason)
    if advisor is None:
        return ()
    chosen: dict[str, Advice] = {}
    for advice in advisor(Case(finding=finding, context=context)):
        if advice is not None and not _foreign(advice, finding, context):
            chosen.setdefault(advice.parameter or advice.text, advice)
        if len(chosen) >= MAX_ADVICE:
            break
    return tuple(chosen.values())


def _foreign(advice: Advice, finding: Finding, context: Context) -> bool:
    """Say whether a key of verl's RL trainers is meant for a job that torchrun starts, and that tells no stages."""
    key = (advice.parameter or "").removeprefix("+")
    plain = context.kind in _TRAINERS and finding.scope.stage in (None, "other", "unknown")
    return plain and context.config.ppo is not True and key.startswith(_OF_RL)
