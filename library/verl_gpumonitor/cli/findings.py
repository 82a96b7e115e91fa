# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Findings for others: as JSON (`gpumonitor-findings/1`, public) and as a report that a person reads."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from verl_gpumonitor.diagnosis.coverage import Lack
from verl_gpumonitor.diagnosis.health import rank_of
from verl_gpumonitor.model.findings import Advice, TrackedFinding
from verl_gpumonitor.model.trace import Header
from verl_gpumonitor.model.vocabulary import UNKNOWN, Severity

from .times import clock

FINDINGS_FORMAT: Final = "gpumonitor-findings/1"
WIDTH: Final = 100
_SEVERITIES: Final = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)


def as_json(findings: Iterable[TrackedFinding], lacks: Iterable[Lack] = ()) -> bytes:
    """Return the document that `gpumon diagnose --json` prints. `lacks`: what could not be judged."""
    document = {
        "format": FINDINGS_FORMAT,
        "findings": [finding_json(tracked) for tracked in findings],
        "not_judged": lacks_json(lacks),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def lacks_json(lacks: Iterable[Lack]) -> list[dict[str, Any]]:
    """Return what could not be judged: the reason of the finding, and why."""
    return [{"reason": lack.reason, "message": lack.message} for lack in lacks]


def finding_json(tracked: TrackedFinding) -> dict[str, Any]:
    """Return a finding as the documents have it."""
    finding = tracked.finding
    return {
        "reason": finding.reason,
        "severity": finding.severity,
        "first_seen": round(tracked.first_seen, 3),
        "last_seen": round(tracked.last_seen, 3),
        "resolved": None if tracked.resolved is None else round(tracked.resolved, 3),
        "scope": finding.scope,
        "evidence": finding.evidence,
        "message": finding.message,
        "advice": finding.advice,
    }


def report(
    header: Header,
    findings: Sequence[TrackedFinding],
    *,
    end: float,
    silence: str = "Nothing was found.",
    notes: Sequence[str] = (),
) -> str:
    """Return the report: what the record is of, then each finding, the gravest first.

    `end`: the last line's time. `silence`: what is said where there are none. `notes`: sentences about what could not
    be judged, which come last.
    """
    lines = [_title(header), _extent(header, end), ""]
    for tracked in ordered(findings):
        lines += [*_block(tracked), ""]
    if not findings:
        lines += [*wrapped(silence, ""), ""]
    for note in notes:
        lines += wrapped(note, "", then="  ")
    return plain("\n".join(lines).rstrip("\n")) + "\n"


def plain(text: str) -> str:
    """Return lines without what would move a terminal's cursor: names come from the job."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


def _title(header: Header) -> str:
    workload = header.workload
    if workload is None or workload.name is None:
        return "A workload without a name"
    where = f" in {workload.namespace}" if workload.namespace else ""
    return f"{workload.kind or 'Workload'} {workload.name}{where}"


def _extent(header: Header, end: float) -> str:
    pods = header.pods or []
    gpus = sum(len(pod.gpus or ()) for pod in pods)
    verl = header.frameworks.verl if header.frameworks else None
    parts = [f"{counted(gpus, 'GPU')} in {counted(len(pods), 'pod')}", f"{clock(end)} recorded"]
    return ", ".join([*parts, f"verl {verl}"] if verl else parts)


def counted(number: int, what: str) -> str:
    """Return `1 GPU` or `4 GPUs`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def stage_text(stage: str | None) -> str:
    """Return ` in update_actor`; nothing where the stage is not known."""
    return "" if stage in (None, "", UNKNOWN) else f" in {stage}"


def ordered(findings: Iterable[TrackedFinding]) -> list[TrackedFinding]:
    """Return the findings as one reads them: open ones first, the gravest first."""
    return sorted(findings, key=_gravity)


def _gravity(tracked: TrackedFinding) -> tuple[bool, int, int, float]:
    finding = tracked.finding
    return (
        tracked.resolved is not None,
        _SEVERITIES.index(finding.severity),
        rank_of(finding.reason),
        tracked.first_seen,
    )


def _block(tracked: TrackedFinding) -> Iterator[str]:
    finding = tracked.finding
    yield f"{finding.severity.upper()}  {finding.reason}{stage_text(finding.scope.stage)}  {_life(tracked)}"
    yield from wrapped(finding.message, "  ")
    explains = finding.evidence.get("explains")
    if explains:
        yield from wrapped(f"It also explains: {explains}.", "  ")
    for advice in finding.advice:
        yield from advice_lines(advice)


def _life(tracked: TrackedFinding) -> str:
    since = f"since {clock(tracked.first_seen)}"
    return since if tracked.resolved is None else f"{clock(tracked.first_seen)} to {clock(tracked.resolved)}, over"


def advice_lines(advice: Advice) -> Iterator[str]:
    """Yield one piece of advice: the change, why, and what it costs."""
    if advice.parameter is not None:
        current = "its default" if advice.current is None else advice.current
        change = f"{current} -> {advice.suggested}" if advice.suggested is not None else f"now {current}"
        yield f"  -> {advice.parameter}: {change}"
        yield from wrapped(advice.text, "     ")
    else:
        yield from wrapped(f"-> {advice.text}", "  ", then="     ")
    if advice.price:
        yield from wrapped(f"Price: {advice.price}", "     ")


def wrapped(text: str, indent: str, *, then: str | None = None) -> list[str]:
    """Return a text as lines of the report; `then`: indent of all but the first."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )
