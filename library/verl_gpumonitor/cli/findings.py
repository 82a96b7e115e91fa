# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Findings for others: as JSON (`gpumonitor-findings/1`, public) and as a report that a person reads."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from verl_gpumonitor.diagnosis.coverage import Lack
from verl_gpumonitor.diagnosis.health import rank_of
from verl_gpumonitor.model.figures import counted
from verl_gpumonitor.model.findings import Advice, TrackedFinding
from verl_gpumonitor.model.trace import Header
from verl_gpumonitor.model.vocabulary import UNKNOWN, Severity

from .times import clock, extent, tells_begin

FINDINGS_FORMAT: Final = "gpumonitor-findings/1"
WIDTH: Final = 100
MAX_ALSO: Final = 8
"""Messages of a group beside the first."""
_FIGURES: Final = re.compile(r"GPU-[\w-]+|MIG-[\w-]+|\d+(?:\.\d+)?")
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
    begin: float | None = None,
    silence: str = "Nothing was found.",
    notes: Sequence[str] = (),
) -> str:
    """Return the report: what the record is of, then each finding, the gravest first.

    `end`: the last line's time; `begin`: of the part that is shown, None for all. `silence`: what is said where there
    are none. `notes`: sentences about what is shown and what could not be judged, which come last.
    """
    lines = [_title(header), _extent(header, extent(end, begin=begin)), ""]
    for group in grouped(findings):
        lines += [*_block(group), ""]
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


def _extent(header: Header, time: str) -> str:
    pods = header.pods or []
    gpus = sum(len(pod.gpus or ()) for pod in pods)
    verl = header.frameworks.verl if header.frameworks else None
    parts = [f"{counted(gpus, 'GPU')} in {counted(len(pods), 'pod')}", time]
    parts += filter(tells_begin, header.notes or ())
    return ", ".join([*parts, f"verl {verl}"] if verl else parts)


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


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that differ only in whom they name."""

    first: TrackedFinding
    """With advice that no group before it has."""
    also: tuple[str, ...] = ()
    """Messages of the others; of many, how many more there are."""


def grouped(findings: Iterable[TrackedFinding]) -> list[Group]:
    """Return the findings in the order in which one reads them, those that differ only in their GPU as one.

    Each piece of advice is given once: where it fits a later finding too, that says so in a line.
    """
    alike: dict[tuple[object, ...], list[TrackedFinding]] = {}
    for tracked in ordered(findings):
        alike.setdefault(_kind(tracked), []).append(tracked)
    given: set[Advice] = set()
    return [
        Group(first=_said_once(first, given), also=_also([tracked.finding.message for tracked in others]))
        for first, *others in alike.values()
    ]


def _kind(tracked: TrackedFinding) -> tuple[object, ...]:
    """Return all of a finding but whom it names and its figures."""
    finding = tracked.finding
    message = finding.message
    for pod in sorted(finding.scope.pods, key=len, reverse=True):
        message = message.replace(pod, "")
    is_open = tracked.resolved is None
    return is_open, finding.severity, finding.reason, finding.scope.stage, _FIGURES.sub("", message)


def _also(messages: Sequence[str]) -> tuple[str, ...]:
    if len(messages) <= MAX_ALSO:
        return tuple(messages)
    return (*messages[: MAX_ALSO - 1], f"... and {len(messages) - MAX_ALSO + 1} more like these")


def _said_once(tracked: TrackedFinding, given: set[Advice]) -> TrackedFinding:
    """Return a finding with what was advised before as one line. `given` grows by what is new."""
    finding = tracked.finding
    kept = [advice for advice in finding.advice if _words(advice) not in given]
    again = [advice.parameter or shorten(advice.text, 60) for advice in finding.advice if advice not in kept]
    given.update(_words(advice) for advice in kept)
    if again:
        kept.append(Advice(parameter=None, text=f"As said above: {', '.join(again)}"))
    return msgspec.structs.replace(tracked, finding=msgspec.structs.replace(finding, advice=tuple(kept)))


def _words(advice: Advice) -> Advice:
    """Return it as it is read: why it is given, and how sure it is, may differ."""
    return msgspec.structs.replace(advice, reason="", confidence="")


def shorten(text: str, width: int) -> str:
    """Return the first words of a text."""
    return textwrap.shorten(text, width, placeholder=" ...")


def _block(group: Group) -> Iterator[str]:
    tracked = group.first
    finding = tracked.finding
    yield f"{finding.severity.upper()}  {finding.reason}{stage_text(finding.scope.stage)}  {_life(tracked)}"
    yield from wrapped(finding.message, "  ")
    for message in group.also:
        yield from wrapped(f"Also: {message}" if not message.startswith("...") else message, "  ")
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
        yield f"  -> {advice.parameter}{_change(advice)}"
        yield from wrapped(advice.text, "     ")
    else:
        yield from wrapped(f"-> {advice.text}", "  ", then="     ")
    if advice.price:
        yield from wrapped(f"Price: {advice.price}", "     ")


def _change(advice: Advice) -> str:
    """Return what is set now, and what to set; a present value that is not known is no default."""
    if advice.suggested is None:
        return "" if advice.current is None else f": now {advice.current}"
    return f"={advice.suggested}" if advice.current is None else f": {advice.current} -> {advice.suggested}"


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
