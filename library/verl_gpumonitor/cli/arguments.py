# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the commands that read a recorded run share: their options, and how a file is refused."""

import sys
from typing import Final, NoReturn

import click

from verl_gpumonitor.model.trace import TraceError

from .records import DEFAULT_INTERVAL_SECONDS

EXIT_UNREADABLE: Final = 2
"""Exit code of every command that was given a file it cannot read: like a command line that is wrong."""

interval_option: Final = click.option(
    "--interval",
    type=click.FloatRange(0.01, 86400),
    default=DEFAULT_INTERVAL_SECONDS,
    show_default=True,
    help="Seconds between two rows of a GPU, for a log without times.",
)
from_option: Final = click.option(
    "--from",
    "begin",
    metavar="WHEN",
    help="Show the record from here: +2h30m, -30m from its end, 2:30:00 as pages show it, or 2026-12-31T14:30.",
)
to_option: Final = click.option("--to", "end", metavar="WHEN", help="Show the record up to here, told likewise.")
monitor_name_option: Final = click.option("--name", help="Which one, of a list of GPUMonitors: NAME or NAMESPACE/NAME.")


def refuse_part(begin: str | None, end: str | None) -> None:
    """End where a part is asked for of what has no values over time. Raises UsageError."""
    if begin is not None or end is not None:
        raise click.UsageError("a GPUMonitor has no values over time: --from and --to are for records and logs")


def refuse(path: str, error: TraceError) -> NoReturn:
    """Say what is wrong with a file, and end."""
    click.echo(f"gpumon: {path}: {error}", err=True)
    sys.exit(EXIT_UNREADABLE)
