# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon top`: GPUs, their last minute, their processes and the stage these are in, live, at 80 columns and more."""

import sys
import time

import click
from rich.console import Console, RenderableType
from rich.live import Live

from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings

from .gpus import UnknownGpuError, await_first, selected
from .keyboard import keys, on_screen, pressed
from .signals import leaving_on_signals
from .view import History, frame, title_of


@click.command("top", short_help="Watch GPUs, processes and stages live.", epilog="Example: gpumon top --interval 2")
@click.option(
    "-l",
    "--interval",
    type=click.FloatRange(0.2, 60),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("-i", "--id", "wanted", help="GPUs by index or UUID, separated by commas; all if absent.")
@click.option("--once", is_flag=True, help="Print one view and end, as is done where there is no terminal.")
def command(*, interval: float, wanted: str | None, once: bool) -> None:
    """Watch this host's GPUs: load, memory, temperature, power, the last minute, and which stage runs. `q` ends it.

    Stages come from the titles of processes that can be seen from here, such as Ray's workers of verl.
    """
    settings = SamplerSettings(interval_seconds=interval, processes_interval_seconds=max(1.0, interval))
    sampler = Sampler(settings=settings)
    sampler.start()
    try:
        selected(await_first(sampler).gpus, wanted)
        _show(sampler, wanted, interval=interval, once=once or not sys.stdout.isatty())
    except UnknownGpuError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        pass
    finally:
        sampler.stop()


def _show(sampler: Sampler, wanted: str | None, *, interval: float, once: bool) -> None:
    console, history = Console(), History()

    def view() -> RenderableType:
        node = sampler.latest()
        gpus = selected(node.gpus, wanted)
        history.add(gpus)
        pids = {process.pid for gpu in gpus for process in gpu.processes or ()}
        titles = {pid: title for pid in pids if (title := title_of(pid)) is not None}
        return frame(node, gpus, history, titles, width=console.width)

    if once:
        console.print(view())
        return
    with (
        leaving_on_signals(),
        keys(),
        on_screen(Live(view(), console=console, screen=True, auto_refresh=False)) as live,
    ):
        due = time.monotonic() + interval
        while "q" not in pressed(max(0.0, due - time.monotonic())):
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                live.update(view(), refresh=True)
