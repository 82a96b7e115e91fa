# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon report`: a recorded run as one page that one can send to others."""

from pathlib import Path
from typing import Final

import click

from .arguments import from_option, interval_option, monitor_name_option, refuse, refuse_part, to_option
from .monitors import parse
from .part import open_part
from .records import MonitorGiven, TraceError

_FORMS: Final = {".md": "markdown", ".markdown": "markdown", ".json": "json"}
"""Ending of a file's name -> form."""


@click.command(
    "report", short_help="Make a page of a recorded run.", epilog="Example: gpumon report gpu.csv -o report.html"
)
@click.argument("run")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; standard output if absent."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "markdown", "json"]),
    help="By the file's name (.md: Markdown, .json), else html.",
)
@click.option("--json", "json_", is_flag=True, help="The same as --format json (gpumonitor-report/1).")
@from_option
@to_option
@interval_option
@monitor_name_option
def command(
    *,
    run: str,
    output: Path | None,
    form: str | None,
    json_: bool,
    begin: str | None,
    end: str | None,
    interval: float,
    name: str | None,
) -> None:
    """Make a report of RUN: a trace, `gpumon log`'s CSV or JSON lines, or nvidia-smi's CSV; `-` is standard input.

    Or of a GPUMonitor, as `kubectl get gpumonitor NAME -o yaml` prints it: a summary, without values over time.

    One file without scripts, which loads nothing: verdict, findings with advice, stages, balance, each GPU over time.
    """
    if json_ and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form}: only one of them can be had")
    form = "json" if json_ else form or _FORMS.get("" if output is None else output.suffix, "html")
    text = _text(run, form=form, begin=begin, end=end, interval=interval, name=name)
    if output is None:
        click.echo(text.encode(), nl=False)  # bytes: a page says that it is UTF-8, whatever the terminal is
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror or error}") from error


def _text(path: str, *, form: str, begin: str | None, end: str | None, interval: float, name: str | None) -> str:
    from .reports.document import document
    from .reports.gather import gather
    from .reports.page import html
    from .reports.ticket import markdown

    try:
        with open_part(path, begin=begin, end=end, interval_seconds=interval) as (recorded, part):
            run = gather(recorded.header, recorded.records, recorded.complaints, part)
    except MonitorGiven as given:
        refuse_part(begin, end)
        return _text_of_monitor(path, given.document, form=form, name=name)
    except TraceError as error:
        refuse(path, error)
    if form == "json":
        return document(run).decode()
    return html(run) if form == "html" else markdown(run)


def _text_of_monitor(path: str, document: bytes, *, form: str, name: str | None) -> str:
    from .reports import monitor_page
    from .reports.document import document_of_monitor

    try:
        monitor = parse(document, name=name)
    except TraceError as error:
        refuse(path, error)
    if form == "json":
        return document_of_monitor(monitor).decode()
    return monitor_page.html(monitor) if form == "html" else monitor_page.markdown(monitor)
