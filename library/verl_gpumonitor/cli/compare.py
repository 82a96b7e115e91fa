# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon compare`: two recorded runs beside each other, and whether the change helped."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from .arguments import interval_option, refuse
from .records import TraceError, open_run

if TYPE_CHECKING:
    from .reports.gather import Run


@click.command(
    "compare",
    short_help="Compare two recorded runs.",
    epilog="Example: gpumon compare before.jsonl.gz after.jsonl.gz -o compare.html",
)
@click.argument("before")
@click.argument("after")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write a page of HTML there.")
@click.option("--json", "json_", is_flag=True, help="Print the comparison as JSON.")
@interval_option
def command(*, before: str, after: str, output: Path | None, json_: bool, interval: float) -> None:
    """Put two runs beside each other: what was set otherwise, what became of it stage by stage, and whether it helped.

    BEFORE and AFTER are traces or logs of GPUs, as `gpumon report` takes them.
    """
    from .reports import comparison, comparison_page

    runs = [_run(path, interval) for path in (before, after)]
    for path, run in zip((before, after), runs, strict=True):
        for complaint in run.complaints:
            click.echo(f"gpumon: {path}: {complaint}", err=True)
    found = comparison.compare(*runs)
    if output is not None:
        try:
            output.write_text(comparison_page.html(found, *runs), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{output}: {error.strerror or error}") from error
    if json_:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        click.echo(comparison.text(found), nl=False)


def _run(path: str, interval: float) -> "Run":
    from .reports.gather import gather

    try:
        with open_run(path, interval_seconds=interval) as recorded:
            return gather(recorded.header, recorded.records, recorded.complaints)
    except TraceError as error:
        refuse(path, error)
