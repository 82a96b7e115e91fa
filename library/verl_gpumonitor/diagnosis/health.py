# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which condition a reason belongs to, how urgent it is, and the HEALTH text. The table is public: a test pins it."""

from collections.abc import Iterable
from typing import Final

import msgspec

from verl_gpumonitor.model.vocabulary import Severity

OK: Final = "OK"
UNKNOWN: Final = "Unknown"
NOT_DETECTED: Final = "NotDetected"
"""Reason of a condition that is False because nothing was found."""


class ReasonInfo(msgspec.Struct, frozen=True):
    """What is known of a reason beforehand."""

    condition: str
    severity: Severity
    """The usual one; a finding may be more urgent."""
    rank: int
    """Place in HEALTH, 1 first."""


REASONS: Final[dict[str, ReasonInfo]] = {
    "Hang": ReasonInfo("Hung", Severity.CRITICAL, 1),
    "GPUFault": ReasonInfo("GPUFault", Severity.CRITICAL, 2),
    "HostMemoryRisk": ReasonInfo("HostMemoryRisk", Severity.WARNING, 3),
    "OOMRisk": ReasonInfo("OOMRisk", Severity.WARNING, 4),
    "SharedMemoryRisk": ReasonInfo("HostMemoryRisk", Severity.WARNING, 5),
    "ApplicationFault": ReasonInfo("ApplicationFault", Severity.WARNING, 6),
    "RolloutMemoryNotReleased": ReasonInfo("OOMRisk", Severity.WARNING, 7),
    "MemoryGrowth": ReasonInfo("OOMRisk", Severity.WARNING, 8),
    "LeftoverMemory": ReasonInfo("ForeignGPUMemory", Severity.WARNING, 9),
    "ForeignProcess": ReasonInfo("ForeignGPUMemory", Severity.WARNING, 10),
    "Imbalance": ReasonInfo("Imbalanced", Severity.WARNING, 11),
    "Throttled": ReasonInfo("Throttled", Severity.WARNING, 12),
    "LowUtilization": ReasonInfo("Underutilized", Severity.INFO, 13),
    "TelemetryUnavailable": ReasonInfo("TelemetryAvailable", Severity.INFO, 14),
    "TelemetryPartial": ReasonInfo("TelemetryAvailable", Severity.INFO, 15),
}

_UNRANKED: Final = 1000


def rank_of(reason: str) -> int:
    """Return a reason's place in HEALTH; one that is not in the table comes last."""
    info = REASONS.get(reason)
    return _UNRANKED if info is None else info.rank


def highest(reasons: Iterable[str]) -> str | None:
    """Return the reason that comes first, or None if there is none."""
    return min(reasons, key=lambda reason: (rank_of(reason), reason), default=None)


def health_text(reasons: Iterable[str], *, telemetry: bool) -> str:
    """Return the HEALTH column: the highest open reason and how many others, such as `OOMRisk+1`.

    A reason that is open twice counts once. `telemetry` False: nothing can be read, so nothing but an open finding is
    said.
    """
    distinct = set(reasons)
    first = highest(distinct)
    if first is None:
        return OK if telemetry else UNKNOWN
    return first if len(distinct) == 1 else f"{first}+{len(distinct) - 1}"
