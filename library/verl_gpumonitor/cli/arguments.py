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
monitor_name_option: Final = click.option("--name", help="Which one, of a list of GPUMonitors: NAME or NAMESPACE/NAME.")


def refuse(path: str, error: TraceError) -> NoReturn:
    """Say what is wrong with a file, and end."""
    click.echo(f"gpumon: {path}: {error}", err=True)
    sys.exit(EXIT_UNREADABLE)
