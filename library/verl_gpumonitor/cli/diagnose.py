# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon diagnose`: what was wrong in a recorded workload, since when, where, and what to change."""

import sys
from collections.abc import Iterable, Sequence
from typing import Final

import click
import msgspec

from verl_gpumonitor.advice import advise
from verl_gpumonitor.advice.present import context_at
from verl_gpumonitor.diagnosis.coverage import coverage
from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.model.findings import TrackedFinding
from verl_gpumonitor.model.trace import Header, Record, TraceError
from verl_gpumonitor.model.vocabulary import Severity

from . import monitor_findings, not_judged
from .arguments import from_option, interval_option, monitor_name_option, refuse, refuse_part, to_option
from .findings import as_json, report
from .first_look import first_look, only_looked, silence, unjudged
from .monitors import parse
from .part import open_part
from .records import MonitorGiven
from .times import tells_begin

FOUND: Final = 1
"""Exit status where `--fail-on` was given and something as grave was found."""
_ORDER: Final = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)


def diagnose(
    header: Header, records: Iterable[Record], *, muted: Iterable[str] = ()
) -> tuple[Diagnosis, list[TrackedFinding]]:
    """Read a run to its end and return the diagnosis with its findings, each with advice."""
    diagnosis = Diagnosis(header, muted=muted)
    for record in records:
        diagnosis.feed(record)
    return diagnosis, advised(diagnosis)


def advised(diagnosis: Diagnosis, more: Iterable[TrackedFinding] = ()) -> list[TrackedFinding]:
    """Return the findings, each with what could be changed about it. `more`: others of the same job."""
    found = [*diagnosis.findings, *more]
    context = context_at(diagnosis, {tracked.finding.reason for tracked in found if tracked.resolved is None})
    return [
        msgspec.structs.replace(
            tracked,
            finding=msgspec.structs.replace(tracked.finding, advice=advise(tracked.finding, context)),
        )
        for tracked in found
    ]


@click.command(
    "diagnose",
    short_help="Say what was wrong in a recorded run.",
    epilog="Example: gpumon diagnose run.jsonl.gz --json",
)
@click.argument("trace")
@click.option("--json", "json_", is_flag=True, help="Print the findings as JSON (gpumonitor-findings/1).")
@click.option("--mute", multiple=True, metavar="REASON", help="Leave a reason out; may be given several times.")
@click.option(
    "--fail-on",
    type=click.Choice([severity.value for severity in _ORDER]),
    help=f"End with status {FOUND} if something as grave was found.",
)
@from_option
@to_option
@interval_option
@monitor_name_option
def command(
    *,
    trace: str,
    json_: bool,
    mute: tuple[str, ...],
    fail_on: str | None,
    begin: str | None,
    end: str | None,
    interval: float,
    name: str | None,
) -> None:
    """Say what was wrong in TRACE, a file of gpumonitor-trace/1, plain or gzip; `-` reads standard input.

    A log of GPUs (`gpumon log`, nvidia-smi's CSV) is read as well. It tells no stages, so less can be judged. Of a
    GPUMonitor (`kubectl get gpumonitor NAME -o yaml`) it prints what the operator found; nothing is judged again.
    """
    unknown = [reason for reason in mute if reason not in REASONS]
    if unknown:
        raise click.BadParameter(
            f"no reason is called {unknown[0]!r}; there are: {', '.join(REASONS)}", param_hint="--mute"
        )
    try:
        with open_part(trace, begin=begin, end=end, interval_seconds=interval) as (recorded, part):
            diagnosis, _ = diagnose(recorded.header, recorded.records, muted=mute)
    except MonitorGiven as given:
        refuse_part(begin, end)
        _tell(given.document, trace=trace, name=name, muted=mute, json_=json_, fail_on=fail_on)
        return
    except TraceError as error:
        refuse(trace, error)
    looked = [tracked for tracked in first_look(diagnosis) if tracked.finding.reason not in mute]
    findings = advised(diagnosis, looked)
    if part is not None:
        findings = list(filter(part.holds, findings))
    for note in recorded.header.notes or ():
        if not tells_begin(note):  # the report has it at its head
            click.echo(f"gpumon: {trace}: noted in it: {note}", err=True)
    for complaint in recorded.complaints:
        click.echo(f"gpumon: {trace}: {complaint}", err=True)
    history, covered = diagnosis.history, coverage(diagnosis.history)
    looked_only, shown = only_looked(history), None if part is None else part.sentence(history.t)
    if json_:
        for told in (shown, looked_only, unjudged(history)):
            if told is not None:
                click.echo(f"gpumon: {trace}: {told}", err=True)
        click.echo(as_json(findings, covered.lacks), nl=False)
    else:
        notes = [text for text in (shown, looked_only and f"{looked_only}.") if text]
        notes += not_judged.sentences(covered, {*mute, *(tracked.finding.reason for tracked in findings)})
        begin_of_part = None if part is None else part.begin
        said = report(
            recorded.header, findings, end=history.t, begin=begin_of_part, silence=silence(history), notes=notes
        )
        click.echo(said, nl=False)
    _fail((tracked.finding.severity for tracked in findings), fail_on)


def _tell(
    document: bytes, *, trace: str, name: str | None, muted: Sequence[str], json_: bool, fail_on: str | None
) -> None:
    """Print what the operator found."""
    try:
        monitor = monitor_findings.without(parse(document, name=name), muted)
    except TraceError as error:
        refuse(trace, error)
    click.echo(monitor_findings.as_json(monitor) if json_ else monitor_findings.report(monitor), nl=False)
    _fail((finding.severity for finding in monitor.status.findings), fail_on)


def _fail(severities: Iterable[Severity], fail_on: str | None) -> None:
    """End with a status that says so, where something as grave was found."""
    least = len(_ORDER) if fail_on is None else _ORDER.index(Severity(fail_on))
    if any(_ORDER.index(severity) >= least for severity in severities):
        sys.exit(FOUND)
