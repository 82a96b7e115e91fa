# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon log`: what nvidia-smi's query prints, periodically, as CSV or JSON lines, in files that do not run over."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click

from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.vocabulary import GpuState

from . import columns
from .gpus import UnknownGpuError, sampling, selected, unread
from .signals import stopped_by_signals
from .sink import KEPT_FILES, RotatingFile, Sink, StandardOutput

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def size(text: str) -> int:
    """Return the bytes of a text such as `100M` or `2GiB`. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write a number with K, M or G, such as 100M")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Take a text such as `100M`."""
        try:
            return size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    "log",
    short_help="Write load, memory, temperature of each GPU periodically.",
    epilog="Example: gpumon log --interval 5 --format csv -o gpu.csv",
)
@click.option(
    "-l",
    "--interval",
    type=click.FloatRange(0.1, 86400),
    default=5.0,
    show_default=True,
    help="Seconds between two rows of a GPU.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "jsonl"]),
    default="csv",
    show_default=True,
    help="Tables, or a JSON object a line in base units.",
)
@click.option(
    "-o",
    "-f",
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="File to append to; standard output if absent, or -.",
)
@click.option(
    "--fields",
    help="Columns by nvidia-smi's names, separated by commas; +NAME adds to the usual ones. `help` lists them.",
)
@click.option("-i", "--id", "wanted", help="GPUs by index or UUID, separated by commas; all if absent.")
@click.option("-c", "--count", type=click.IntRange(min=1), help="End after so many rows of each GPU.")
@click.option(
    "--max-size",
    type=_Size(),
    help="Begin another file when this one reaches so much, such as 100M; the old one becomes FILE.1.",
)
@click.option("--keep", type=click.IntRange(0, 1000), default=KEPT_FILES, show_default=True, help="Old files to keep.")
def command(
    *,
    interval: float,
    form: str,
    output: Path | None,
    fields: str | None,
    wanted: str | None,
    count: int | None,
    max_size: int | None,
    keep: int,
) -> None:
    """Write a row for each GPU every INTERVAL seconds: time, index, name, temperature, utilisation, memory.

    What cannot be read is an empty cell. A file that is there is continued if it has the same columns, and else kept
    as FILE.1. Ends at once, with whole lines, on Ctrl-C, SIGTERM or SIGHUP.
    """
    if fields == "help":
        click.echo("\n".join((columns.TIMESTAMP, *columns.COLUMNS)))
        return
    try:
        names = columns.chosen(fields)
        with sampling(interval) as sampler:
            node = sampler.latest()
            selected(node.gpus, wanted)
            if (untold := unread(node)) is not None:
                click.echo(f"gpumon: {untold}", err=True)
            sink = _sink(output, columns.head(names).encode() if form == "csv" else b"", max_size, keep)
            try:
                _run(
                    lambda: selected(sampler.latest().gpus, wanted),
                    sink,
                    names,
                    form=form,
                    interval=interval,
                    count=count,
                )
            finally:
                sink.close()
    except (columns.FieldsError, UnknownGpuError) as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:
        raise SystemExit(0) from None
    except OSError as error:
        raise click.ClickException(f"{output or 'standard output'}: {error.strerror or error}") from error


def _sink(output: Path | None, first: bytes, max_size: int | None, keep: int) -> Sink:
    if output is None or str(output) == "-":
        return StandardOutput(first)
    return RotatingFile(output, first=first, max_bytes=max_size, kept=keep)


def _run(
    look: Callable[[], Sequence[GpuSample]],
    sink: Sink,
    names: Sequence[str],
    *,
    form: str,
    interval: float,
    count: int | None,
) -> None:
    """Write rows until the count is reached or a signal comes."""
    with stopped_by_signals() as stop:
        due, rows = time.monotonic(), 0
        while not stop.is_set() and (count is None or rows < count):
            unix = time.time()
            for gpu in look():
                sink.write(row(gpu, names, form=form, unix=unix))
            rows += 1
            due = max(due + interval, time.monotonic() - interval)
            if count is None or rows < count:
                stop.wait(max(0.0, due - time.monotonic()))


def row(gpu: GpuSample, names: Sequence[str], *, form: str, unix: float) -> bytes:
    """Return one GPU's line. One that does not answer has its names and nothing else."""
    if form == "csv":
        return columns.csv_row(gpu, names, unix=unix).encode()
    if gpu.state is not GpuState.OK and "state" not in names:
        names = (*names, "state")
    return columns.json_row(gpu, names, unix=unix)
