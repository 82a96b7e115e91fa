# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From the present of a workload to its conditions, its HEALTH and what has just changed. Pure.

The rules are the library's, and so is the hysteresis that keeps findings from flapping. Here they get the window that
the controller has of each GPU, and what they say is put into the words of a GPUMonitor.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from verl_gpumonitor.diagnosis import (
    REASONS,
    DiagnosisLimits,
    DiagnosisState,
    GpuWindow,
    Judgement,
    TrackedFinding,
    health_text,
    highest,
    judge,
    resume,
)
from verl_gpumonitor.diagnosis.health import NOT_DETECTED, rank_of
from verl_gpumonitor.diagnosis.hysteresis import Alert, AlertPhase, Holds, advance
from verl_gpumonitor.model.findings import Advice, Finding, Scope
from verl_gpumonitor.model.kubernetes import unix_seconds
from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.settings import Diagnosis, SettingsError

from . import faults
from .clinic import NOT_SEEN, RESUMED, Found, Opinion
from .faults import APPLICATION_FAULT, GPU_FAULT, Fault, FaultState
from .status import Condition, GpuView, OpenFinding
from .telemetry import OPTED_OUT, PARTIAL, Availability

UNAVAILABLE: Final = "TelemetryUnavailable"
PARTLY: Final = "TelemetryPartial"
TELEMETRY_AVAILABLE: Final = "TelemetryAvailable"
JUDGED: Final[Mapping[str, tuple[str, ...]]] = {"OOMRisk": ("OOMRisk",), "Imbalanced": ("Imbalance",)}
"""Conditions that the present rules judge, with their reasons."""
SIMPLE: Final = frozenset(reason for reasons in JUDGED.values() for reason in reasons)
STAGED: Final = ("Hung", "HostMemoryRisk", "ForeignGPUMemory", "Throttled", "Underutilized")
"""Conditions that only the stage-aware diagnosis judges."""
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
    open: Sequence[Found] = ()
    """What is open by the rules, the simple ones and the stage-aware ones."""

    @property
    def open_reasons(self) -> frozenset[str]:
        """Their reasons."""
        return frozenset(one.reason for one in self.open)


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


def open_in(status: Mapping[str, Any], now: float) -> list[Found]:
    """Return what is open in a status, but for faults and telemetry. `now`: of what does not say since when.

    A finding stands behind a higher one of the same condition there. Advice belongs to the first of its reason.
    """
    listed = _items(status.get("findings"))
    shown = {
        str(item.get("reason")): {**item, "since": item.get("lastTransitionTime")}
        for item in _items(status.get("conditions"))
        if item.get("status") == "True"
    }
    reasons = {str(item.get("reason")) for item in listed}
    held = [*listed, *(item for reason, item in shown.items() if reason not in reasons)]
    other = (*FAULTS, UNAVAILABLE, PARTLY)
    advice = _advice_in(status)
    return [
        _held({**item, "message": item.get("message") or shown.get(reason, {}).get("message")}, now, advice)
        for item in held
        if (reason := str(item.get("reason"))) in REASONS and reason not in other
    ]


def _held(item: Mapping[str, Any], now: float, advice: dict[str, list[Advice]]) -> Found:
    """Return a finding of a status as what was found. Its advice is taken out of `advice`."""
    reason = str(item["reason"])
    finding = Finding(
        reason=reason,
        severity=Severity(item["severity"]) if item.get("severity") in list(Severity) else REASONS[reason].severity,
        scope=Scope(
            pods=_texts(item.get("pods")),
            gpus=_texts(item.get("gpus")),
            stage=_text(item.get("stage")),
            role=_text(item.get("role")),
        ),
        message=str(item.get("message") or ""),
        advice=tuple(advice.pop(reason, ())),
    )
    since = unix_seconds(item.get("since"))
    return Found(key=(reason, RESUMED + _subject(finding)), finding=finding, since=now if since is None else since)


def _advice_in(status: Mapping[str, Any]) -> dict[str, list[Advice]]:
    """Return the recommendations of a status by reason; not those that were cut short for want of room."""
    found: dict[str, list[Advice]] = {}
    for item in _items(status.get("recommendations")):
        if item.get("text"):
            advice = Advice(
                parameter=_text(item.get("parameter")),
                current=_text(item.get("current")),
                suggested=_text(item.get("suggested")),
                text=str(item["text"]),
                reason=_text(item.get("evidence")) or "",
                price=_text(item.get("price")) or "",
                confidence=_text(item.get("confidence")) or "medium",
            )
            found.setdefault(str(item.get("reason")), []).append(advice)
    return found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()


def _items(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def states_of(status: Mapping[str, Any], now: float) -> FindingStates:
    """Go on from a status, after a restart: what is True, or listed, there is open already."""
    unavailable, partial, broken = Alert(), Alert(), False
    for item in _items(status.get("conditions")):
        kind, value, reason = (str(item.get(key)) for key in ("type", "status", "reason"))
        if kind == TELEMETRY_AVAILABLE:
            unavailable = _raised(now) if value == "False" else unavailable
            partial = _raised(now) if value == "True" and reason == PARTIAL else partial
        elif kind == GPU_FAULT and value == "True":
            # A fault that goes on is in the next report again.
            broken = True
    # Where a GPU is broken, that it is not seen was most likely no finding.
    partial = Alert() if broken else partial
    known = open_in(status, now)
    simple = {one.reason: one.finding.message for one in reversed(known) if one.reason in SIMPLE}
    return FindingStates(diagnosis=resume(simple, t=now), unavailable=unavailable, partial=partial, open=known)


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
    opinion: Opinion = NOT_SEEN,
) -> Assessment:
    """Judge a workload that has not ended. `now`: Unix seconds; `muted`: reasons that are not wanted.

    `opinion`: what the stage-aware diagnosis thinks. Where it knows stages, the simple rules have nothing to add.
    """
    windows = [_window(gpu) for gpu in gpus if gpu.reported]
    judgement = (
        Judgement(state=DiagnosisState()) if opinion.staged else judge(states.diagnosis, windows, t=now, limits=limits)
    )
    telemetry = _telemetry(states, available, now)
    seen = faults.look(states.faults, gpus, now=now)
    known = {one.reason for one in opinion.open}
    simple = [tracked for tracked in judgement.state.open if tracked.finding.reason not in known]
    whole = _going_on([*opinion.open, *(_found(tracked) for tracked in simple)], states.open)
    found = [one for one in whole if one.reason not in muted]
    open_reasons = frozenset(one.reason for one in whole)
    broken = [fault for fault in seen.state.open if fault.key.reason not in muted]
    findings = [
        *(_open(one) for one in found),
        *_open_faults(broken),
        *(item for item in _open_telemetry(telemetry, available) if item.reason not in muted),
    ]
    transitions = (
        *_raises(judgement.raised, opinion, states.open_reasons),
        *(_resolve(reason) for reason in sorted(states.open_reasons - open_reasons)),
        *(_raise_fault(fault) for fault in seen.raised),
        *(_resolve(reason) for reason in seen.resolved),
        *_telemetry_transitions(states, telemetry, available),
    )
    return Assessment(
        conditions=[
            *_conditions(found, windows, muted, opinion),
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
            open=whole,
        ),
    )


def _found(tracked: TrackedFinding) -> Found:
    finding = tracked.finding
    return Found(key=(finding.reason, _subject(finding)), finding=finding, since=tracked.first_seen)


def _going_on(found: Sequence[Found], before: Sequence[Found]) -> list[Found]:
    """Let problems last since they were first seen, whoever found them then: the other rules, or before a restart."""
    same = {one.key: one.since for one in before}
    keys = {one.key for one in found}
    gone = [one for one in before if one.key not in keys]
    return [replace(one, since=min(one.since, same.get(one.key, one.since), *_since_of(one, gone))) for one in found]


def _since_of(found: Found, others: Sequence[Found]) -> list[float]:
    """Return since when others are there that were this problem under another key."""
    return [
        other.since
        for other in others
        if other.reason == found.reason and (not other.gpus or not found.gpus or other.gpus & found.gpus)
    ]


def _raises(simple: Sequence[TrackedFinding], opinion: Opinion, before: frozenset[str]) -> Sequence[Transition]:
    """Say what is told: whatever the one kind of rules had found already is no news from the other."""
    engine = {one.reason for one in opinion.open}
    own = {one.reason for one in opinion.open if one not in opinion.raised}
    return (
        *(_raise(_found(one)) for one in simple if one.finding.reason not in engine),
        *(_raise(one) for one in opinion.raised if one.reason not in before or one.reason in own),
        *(_raise(one) for one in opinion.repeated),
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
    found: Sequence[Found], windows: Sequence[GpuWindow], muted: frozenset[str], opinion: Opinion
) -> list[Condition]:
    return [_condition(kind, found, windows, muted, opinion) for kind in (*JUDGED, *STAGED)]


def _condition(
    kind: str,
    found: Sequence[Found],
    windows: Sequence[GpuWindow],
    muted: frozenset[str],
    opinion: Opinion,
) -> Condition:
    own = {one.reason: one.finding.message for one in reversed(found) if REASONS[one.reason].condition == kind}
    first = highest(own)
    if first is not None:
        return Condition(type=kind, status="True", reason=first, message=own[first])
    if {reason for reason, info in REASONS.items() if info.condition == kind} <= muted:
        return Condition(type=kind, status="False", reason=NOT_DETECTED, message="Muted by spec.mutedReasons.")
    if not windows:
        message = "No values of GPUs are there to judge by."
        return Condition(type=kind, status="Unknown", reason="NoTelemetry", message=message)
    if kind in STAGED and opinion.coverage is None:
        return Condition(type=kind, status="Unknown", reason="TooEarly", message="The diagnosis has just begun.")
    if kind in opinion.unknown:
        reason, message = opinion.unknown[kind]
        return Condition(type=kind, status="Unknown", reason=reason, message=message)
    alone = max(Counter(window.pool for window in windows).values()) < 2
    if alone and (kind == "Imbalanced" or (kind == "OOMRisk" and not opinion.staged)):
        message = "A GPU is compared with others that do the same work, and there are none."
        return Condition(type=kind, status="Unknown", reason="NoPeers", message=message)
    return Condition(type=kind, status="False", reason=NOT_DETECTED, message=_nothing(kind, muted, opinion))


def _nothing(kind: str, muted: frozenset[str], opinion: Opinion) -> str:
    """Say that nothing was found, and of what that is not said."""
    why = [
        f"{reason}: {text}"
        for reason, text in opinion.unjudged.items()
        if REASONS[reason].condition == kind and reason not in muted
    ]
    return " ".join(("Nothing of this kind was found.", *(["Not judged is", *why] if why else [])))


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
    """Return what is missing now. What has come back is over at once; that it stays there makes the Event, later."""
    return [
        OpenFinding(reason=reason, severity=Severity.INFO, message=available.message)
        for reason, alert in ((UNAVAILABLE, states.unavailable), (PARTLY, states.partial))
        if alert.phase is AlertPhase.RAISED
    ]


def _available(available: Availability) -> Condition:
    return Condition(
        type=TELEMETRY_AVAILABLE, status=available.status, reason=available.reason, message=available.message
    )


def _open(found: Found) -> OpenFinding:
    finding = found.finding
    return OpenFinding(
        reason=finding.reason,
        severity=finding.severity,
        message=finding.message,
        since=found.since,
        scope=finding.scope,
        advice=finding.advice,
    )


def _notes(found: Sequence[Found], broken: Sequence[Fault]) -> Mapping[str, str]:
    notes: dict[str, set[str]] = {}
    for fault in broken:
        notes.setdefault(fault.key.uuid, set()).add(fault.key.reason)
    for one in found:
        for uuid in one.finding.scope.gpus:
            notes.setdefault(uuid, set()).add(one.reason)
    return {uuid: ", ".join(sorted(reasons, key=rank_of)) for uuid, reasons in notes.items()}


RESOLVED: Final = "Resolved"


def _subject(finding: Finding) -> str:
    scope = finding.scope
    return "/".join((*sorted(scope.gpus), *sorted(scope.pods), scope.stage or ""))


def _raise(found: Found) -> Transition:
    finding = found.finding
    return Transition(
        reason=finding.reason, severity=finding.severity, message=with_advice(finding), subject=found.key[1]
    )


def with_advice(finding: Finding) -> str:
    """Return what was found, and the first thing to do about it, for an Event."""
    if not finding.advice:
        return finding.message
    return f"{finding.message.rstrip('.')}. {finding.advice[0].text.rstrip('.')}."


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
