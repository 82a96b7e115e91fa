# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From the present of a workload to its conditions, its HEALTH and what has just changed. Pure.

The rules are the library's, and so is the hysteresis that keeps findings from flapping. Here they get the window that
the controller has of each GPU, and what they say is put into the words of a GPUMonitor.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from verl_gpumonitor.diagnosis import (
    REASONS,
    DiagnosisLimits,
    DiagnosisState,
    GpuWindow,
    TrackedFinding,
    health_text,
    highest,
    judge,
    resume,
)
from verl_gpumonitor.diagnosis.health import NOT_DETECTED, rank_of
from verl_gpumonitor.diagnosis.hysteresis import Alert, AlertPhase, Holds, advance
from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.settings import Diagnosis, SettingsError

from . import faults
from .faults import APPLICATION_FAULT, GPU_FAULT, Fault, FaultState
from .status import Condition, GpuView
from .telemetry import OPTED_OUT, PARTIAL, Availability

UNAVAILABLE: Final = "TelemetryUnavailable"
PARTLY: Final = "TelemetryPartial"
TELEMETRY_AVAILABLE: Final = "TelemetryAvailable"
JUDGED: Final[Mapping[str, tuple[str, ...]]] = {"OOMRisk": ("OOMRisk",), "Imbalanced": ("Imbalance",)}
"""Conditions that the present rules judge, with their reasons."""
FAULTS: Final = (GPU_FAULT, APPLICATION_FAULT)
"""Reasons that are judged from Xids and NVML's errors; their conditions have the same names."""
TELEMETRY_HOLDS: Final = Holds(raise_seconds=30.0, clear_seconds=30.0)
"""Missing telemetry becomes an Event when it lasts: a sidecar needs a moment to learn which GPUs are its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingStates:
    """What must be remembered from one look to the next."""

    diagnosis: DiagnosisState = field(default_factory=DiagnosisState)
    unavailable: Alert = field(default_factory=Alert)
    partial: Alert = field(default_factory=Alert)
    faults: FaultState = field(default_factory=FaultState)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFinding:
    """A problem that is open."""

    reason: str
    severity: Severity
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """A problem that was just raised or has just ended; it makes an Event."""

    reason: str
    severity: Severity
    message: str
    subject: str = ""
    """What it is about, such as GPUs and stage: another subject is another Event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """What is thought of a workload now."""

    conditions: Sequence[Condition]
    """Empty at the end of a workload: those that it had then stay."""
    health: str
    findings: Sequence[OpenFinding]
    transitions: Sequence[Transition]
    gpu_notes: Mapping[str, str]
    """By UUID: reasons of the findings that name a GPU."""
    states: FindingStates


def limits_of(diagnosis: Diagnosis) -> DiagnosisLimits:
    """Return the rules' limits as the settings say. Raises SettingsError, whose text names the field."""
    given = {"oomRisk": diagnosis.oom_risk, "imbalance": diagnosis.imbalance}
    try:
        return msgspec.convert(given, DiagnosisLimits)
    except msgspec.ValidationError as error:
        raise SettingsError(f"diagnosis: {error}") from error


def states_of(conditions: object, now: float) -> FindingStates:
    """Go on from the conditions of a status, after a restart: what is True there is open already."""
    true: dict[str, str] = {}
    unavailable, partial, broken = Alert(), Alert(), False
    for item in conditions if isinstance(conditions, list) else ():
        if not isinstance(item, Mapping):
            continue
        kind, status, reason = (str(item.get(key)) for key in ("type", "status", "reason"))
        if kind == TELEMETRY_AVAILABLE:
            unavailable = _raised(now) if status == "False" else unavailable
            partial = _raised(now) if status == "True" and reason == PARTIAL else partial
        elif kind == GPU_FAULT and status == "True":
            broken = True
        elif status == "True" and reason not in FAULTS:
            # A fault that goes on is in the next report again.
            true[reason] = str(item.get("message") or "")
    # Where a GPU is broken, that it is not seen was most likely no finding.
    partial = Alert() if broken else partial
    return FindingStates(diagnosis=resume(true, t=now), unavailable=unavailable, partial=partial)


def _raised(now: float) -> Alert:
    return Alert(phase=AlertPhase.RAISED, since=now, seen=now)


def ended(states: FindingStates) -> Assessment:
    """Return the assessment of a workload that has ended: nothing is judged any more."""
    return Assessment(conditions=(), health="", findings=(), transitions=(), gpu_notes={}, states=states)


def assess(
    gpus: Sequence[GpuView],
    available: Availability,
    *,
    states: FindingStates,
    now: float,
    limits: DiagnosisLimits,
    muted: frozenset[str],
) -> Assessment:
    """Judge a workload that has not ended. `now`: Unix seconds; `muted`: reasons that are not wanted."""
    windows = [_window(gpu) for gpu in gpus if gpu.reported]
    judgement = judge(states.diagnosis, windows, t=now, limits=limits)
    telemetry = _telemetry(states, available, now)
    seen = faults.look(states.faults, gpus, now=now)
    found = [tracked for tracked in judgement.state.open if tracked.finding.reason not in muted]
    broken = [fault for fault in seen.state.open if fault.key.reason not in muted]
    findings = [
        *(_open(tracked) for tracked in found),
        *_open_faults(broken),
        *(item for item in _open_telemetry(telemetry, available) if item.reason not in muted),
    ]
    transitions = (
        *(_raise(tracked) for tracked in judgement.raised),
        *(_resolve(tracked.finding.reason) for tracked in judgement.resolved),
        *(_raise_fault(fault) for fault in seen.raised),
        *(_resolve(reason) for reason in seen.resolved),
        *_telemetry_transitions(states, telemetry, available),
    )
    return Assessment(
        conditions=[
            *_conditions(found, windows, muted),
            *_fault_conditions(broken, gpus, muted),
            _available(available),
        ],
        health=health_text((item.reason for item in findings), telemetry=available.status == "True"),
        findings=findings,
        transitions=[item for item in transitions if item.reason.removesuffix(RESOLVED) not in muted],
        gpu_notes=_notes(found, broken),
        states=FindingStates(
            diagnosis=judgement.state,
            unavailable=telemetry.unavailable,
            partial=telemetry.partial,
            faults=seen.state,
        ),
    )


def _window(gpu: GpuView) -> GpuWindow:
    report = gpu.report
    return GpuWindow(
        pod=gpu.pod,
        uuid=report.uuid,
        index=report.index,
        pool=gpu.pool,
        utilization=gpu.utilization,
        memory_used_bytes=report.memory_used_bytes,
        memory_peak_bytes=report.memory_recent_peak_bytes,
        memory_total_bytes=report.memory_total_bytes,
    )


def _conditions(
    found: Sequence[TrackedFinding], windows: Sequence[GpuWindow], muted: frozenset[str]
) -> list[Condition]:
    return [_condition(kind, reasons, found, windows, muted) for kind, reasons in JUDGED.items()]


def _condition(
    kind: str,
    reasons: tuple[str, ...],
    found: Sequence[TrackedFinding],
    windows: Sequence[GpuWindow],
    muted: frozenset[str],
) -> Condition:
    own = {
        tracked.finding.reason: tracked.finding.message
        for tracked in found
        if REASONS[tracked.finding.reason].condition == kind
    }
    first = highest(own)
    if first is not None:
        return Condition(type=kind, status="True", reason=first, message=own[first])
    if set(reasons) <= muted:
        return Condition(type=kind, status="False", reason=NOT_DETECTED, message="Muted by spec.mutedReasons.")
    if not windows:
        message = "No values of GPUs are there to judge by."
        return Condition(type=kind, status="Unknown", reason="NoTelemetry", message=message)
    if max(Counter(window.pool for window in windows).values()) < 2:
        message = "A GPU is compared with others that do the same work, and there are none."
        return Condition(type=kind, status="Unknown", reason="NoPeers", message=message)
    return Condition(type=kind, status="False", reason=NOT_DETECTED, message="Nothing of this kind was found.")


def _fault_conditions(broken: Sequence[Fault], gpus: Sequence[GpuView], muted: frozenset[str]) -> list[Condition]:
    return [_fault_condition(reason, broken, gpus, muted) for reason in FAULTS]


def _fault_condition(reason: str, broken: Sequence[Fault], gpus: Sequence[GpuView], muted: frozenset[str]) -> Condition:
    if any(fault.key.reason == reason for fault in broken):
        return Condition(type=reason, status="True", reason=reason, message=faults.message(reason, broken))
    if reason in muted:
        return Condition(type=reason, status="False", reason=NOT_DETECTED, message="Muted by spec.mutedReasons.")
    if not gpus:
        message = "No values of GPUs are there to judge by."
        return Condition(type=reason, status="Unknown", reason="NoTelemetry", message=message)
    return Condition(type=reason, status="False", reason=NOT_DETECTED, message="Nothing of this kind was found.")


def _open_faults(broken: Sequence[Fault]) -> list[OpenFinding]:
    reasons = sorted({fault.key.reason for fault in broken}, key=rank_of)
    return [
        OpenFinding(reason=reason, severity=REASONS[reason].severity, message=faults.message(reason, broken))
        for reason in reasons
    ]


def _raise_fault(fault: Fault) -> Transition:
    reason = fault.key.reason
    return Transition(
        reason=reason,
        severity=REASONS[reason].severity,
        message=faults.message(reason, [fault]),
        subject=fault.key.uuid,
    )


def _open_telemetry(states: FindingStates, available: Availability) -> list[OpenFinding]:
    return [
        OpenFinding(reason=reason, severity=Severity.INFO, message=available.message)
        for reason, alert in ((UNAVAILABLE, states.unavailable), (PARTLY, states.partial))
        if alert.open
    ]


def _available(available: Availability) -> Condition:
    return Condition(
        type=TELEMETRY_AVAILABLE, status=available.status, reason=available.reason, message=available.message
    )


def _open(tracked: TrackedFinding) -> OpenFinding:
    finding = tracked.finding
    return OpenFinding(reason=finding.reason, severity=finding.severity, message=finding.message)


def _notes(found: Sequence[TrackedFinding], broken: Sequence[Fault]) -> Mapping[str, str]:
    notes: dict[str, set[str]] = {}
    for fault in broken:
        notes.setdefault(fault.key.uuid, set()).add(fault.key.reason)
    for tracked in found:
        for uuid in tracked.finding.scope.gpus:
            notes.setdefault(uuid, set()).add(tracked.finding.reason)
    return {uuid: ", ".join(sorted(reasons, key=rank_of)) for uuid, reasons in notes.items()}


RESOLVED: Final = "Resolved"


def _raise(tracked: TrackedFinding) -> Transition:
    finding = tracked.finding
    scope = finding.scope
    subject = "/".join((*sorted(scope.gpus), *sorted(scope.pods), scope.stage or ""))
    return Transition(reason=finding.reason, severity=finding.severity, message=finding.message, subject=subject)


def _resolve(reason: str) -> Transition:
    return Transition(reason=reason + RESOLVED, severity=Severity.INFO, message=f"{reason} no longer holds.")


def _telemetry(states: FindingStates, available: Availability, now: float) -> FindingStates:
    known = available.status != "Unknown"
    # Who opted out knows it.
    missed = available.status == "False" and available.reason != OPTED_OUT
    return FindingStates(
        unavailable=advance(states.unavailable, t=now, holds=missed if known else None, hold=TELEMETRY_HOLDS),
        partial=advance(states.partial, t=now, holds=available.partial if known else None, hold=TELEMETRY_HOLDS),
    )


def _telemetry_transitions(before: FindingStates, after: FindingStates, available: Availability) -> list[Transition]:
    found = []
    for reason, old, new in (
        (UNAVAILABLE, before.unavailable, after.unavailable),
        (PARTLY, before.partial, after.partial),
    ):
        if new.open and not old.open:
            found.append(Transition(reason=reason, severity=Severity.INFO, message=available.message))
        elif old.open and not new.open:
            found.append(_resolve(reason))
    return found
