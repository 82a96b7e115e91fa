# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Findings of a GPUMonitor's status, as text and as JSON. Pure.

They are those of the operator, with its advice: nothing is judged again, since a status has no history to judge by.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from verl_gpumonitor.diagnosis.health import OK, UNKNOWN
from verl_gpumonitor.model.findings import Advice

from .findings import FINDINGS_FORMAT, advice_lines, wrapped
from .monitors import GPUMonitor, Recommendation, StatusFinding


def without(monitor: GPUMonitor, muted: Sequence[str]) -> GPUMonitor:
    """Return it without these reasons' findings and advice. HEALTH stays the operator's."""
    status = monitor.status
    return msgspec.structs.replace(
        monitor,
        status=msgspec.structs.replace(
            status,
            findings=[finding for finding in status.findings if finding.reason not in muted],
            recommendations=[one for one in status.recommendations if one.reason not in muted],
        ),
    )


def with_advice(monitor: GPUMonitor) -> Iterator[tuple[StatusFinding, list[Advice]]]:
    """Yield each finding with its advice. A status has advice by reason, so that only the first of one gets it."""
    given: set[str] = set()
    for finding in monitor.status.findings:
        yield finding, [] if finding.reason in given else advice_of(monitor, finding.reason)
        given.add(finding.reason)


def advice_of(monitor: GPUMonitor, reason: str | None) -> list[Advice]:
    """Return the advice on a finding; None: what is recommended beyond the findings."""
    open_now = {finding.reason for finding in monitor.status.findings}
    return [
        _advice(one)
        for one in monitor.status.recommendations
        if (one.reason == reason if reason is not None else one.reason not in open_now)
    ]


def _advice(one: Recommendation) -> Advice:
    return Advice(
        parameter=one.parameter,
        current=one.current,
        suggested=one.suggested,
        text=one.text,
        reason=one.evidence or "",
        price=one.price or "",
        confidence=one.confidence or "medium",
    )


def verdict_text(monitor: GPUMonitor) -> str:
    """Return HEALTH in words."""
    status = monitor.status
    if status.findings:
        return status.findings[0].message
    if status.health == OK:
        return "Nothing was found."
    seen = next((one for one in status.conditions if one.type == "TelemetryAvailable"), None)
    said = [status.data_quality.message, seen.message if seen is not None and seen.status != "True" else None]
    return next((text for text in said if text), "Nothing is known of its GPUs.")


def report(monitor: GPUMonitor) -> str:
    """Return the report for a terminal."""
    ref, meta, status = monitor.spec.workload_ref, monitor.metadata, monitor.status
    where = f" in {meta.namespace}" if meta.namespace else ""
    parts = [f"HEALTH {status.health or UNKNOWN}", status.phase or "phase not known"]
    parts += [f"{status.gpus.text} GPUs"] if status.gpus.text else []
    parts += [status.launch.verl] if status.launch.verl else []
    lines = [f"{ref.kind or 'Workload'} {ref.name or meta.name}{where}", ", ".join(parts), ""]
    for finding, advice in with_advice(monitor):
        lines += [*_block(finding, advice), ""]
    if not status.findings:
        lines += [*wrapped(verdict_text(monitor), ""), ""]
    rest = [line for one in advice_of(monitor, None) for line in advice_lines(one)]
    if rest:
        lines += ["Also recommended:", *rest, ""]
    for one in status.data_quality.diagnosis.not_judged:
        lines += wrapped(f"Not judged: {one.reason}{f' ({one.message})' if one.message else ''}.", "", then="  ")
    return "\n".join(lines)


def _block(finding: StatusFinding, advice: Sequence[Advice]) -> Iterator[str]:
    stage = f" in {finding.stage}" if finding.stage else ""
    since = f"  since {finding.since}" if finding.since else ""
    yield f"{finding.severity.upper()}  {finding.reason}{stage}{since}"
    yield from wrapped(finding.message, "  ")
    for one in advice:
        yield from advice_lines(one)


def findings_json(monitor: GPUMonitor) -> list[dict[str, Any]]:
    """Return the findings as documents have them: times in seconds of a record are null, `since` has the hour."""
    return [
        {
            "reason": finding.reason,
            "severity": finding.severity,
            "since": finding.since,
            "first_seen": None,
            "last_seen": None,
            "resolved": None,
            "scope": {"pods": finding.pods, "gpus": finding.gpus, "stage": finding.stage, "role": finding.role},
            "evidence": {},
            "message": finding.message,
            "advice": advice_of(monitor, finding.reason),
        }
        for finding in monitor.status.findings
    ]


def lacks_json(monitor: GPUMonitor) -> list[dict[str, Any]]:
    """Return what the operator could not judge."""
    return [{"reason": one.reason, "message": one.message} for one in monitor.status.data_quality.diagnosis.not_judged]


def as_json(monitor: GPUMonitor) -> bytes:
    """Return what `gpumon diagnose --json` prints."""
    document = {
        "format": FINDINGS_FORMAT,
        "health": monitor.status.health,
        "findings": findings_json(monitor),
        "not_judged": lacks_json(monitor),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
