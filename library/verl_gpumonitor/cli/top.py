# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon top`: GPUs, their last minute, their processes and the stage these are in, live, at 80 columns and more."""

import contextlib
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verl_gpumonitor.model.samples import GpuProcess, GpuSample, NodeSample
from verl_gpumonitor.model.vocabulary import GpuState
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings
from verl_gpumonitor.stages.names import classify

from .gpus import EXIT_NO_GPU, NoGpuError, UnknownGpuError, await_first, selected

GIB: Final = 2**30
BARS: Final = "▁▂▃▄▅▆▇█"
GAP: Final = "·"
"""A moment that could not be read: no bar, for the lowest one would say 0."""
HISTORY: Final = 60
FULL, WARM = 0.92, 85.0
"""Share of memory, and degrees Celsius, from which a value is shown as one to look at."""
_PROC: Final = Path("/proc")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the newest ratios as bars, right-aligned. [0.0, 0.5, None, 1.0] at width 5 gives ` ▁▅·█`."""
    bars = "".join(
        GAP if value is None else BARS[min(len(BARS) - 1, int(value * len(BARS)))] for value in values[-width:]
    )
    return bars.rjust(width)


class History:
    """Load of each GPU over the last minute."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._values: dict[str, deque[float | None]] = {}

    def add(self, gpus: Sequence[GpuSample]) -> None:
        """Take one look at all GPUs."""
        for gpu in gpus:
            self._values.setdefault(gpu.uuid, deque(maxlen=HISTORY)).append(gpu.utilization)

    def of(self, uuid: str) -> Sequence[float | None]:
        """Return what is known of one GPU, oldest first."""
        return tuple(self._values.get(uuid, ()))


def title_of(pid: int, proc: Path = _PROC) -> str | None:
    """Return a process's title or command line; None if it cannot be seen (it is gone, or in another container)."""
    try:
        return (
            (proc / str(pid) / "cmdline")
            .read_bytes()[:4096]
            .rstrip(b"\0 ")
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    except OSError:
        return None


def stage_of(titles: Sequence[str]) -> str:
    """Return what the processes of one GPU are doing: `update_actor (actor)`; empty if their titles do not say."""
    said = [found for found in map(classify, titles) if found is not None and found.stage != "other"]
    if not said:
        return ""
    return f"{said[0].stage} ({said[0].role})"


def frame(
    node: NodeSample, gpus: Sequence[GpuSample], history: History, titles: Mapping[int, str], *, width: int
) -> RenderableType:
    """Return the whole view. `titles`: of the processes that can be seen."""
    unread = (
        "" if node.visible is None or node.visible <= len(node.gpus) else f" of {node.visible} that the driver counts"
    )
    head = Text(f"{len(gpus)} GPUs{unread}  driver {node.driver_version or 'unknown'}", style="bold")
    return Group(head, _gpu_table(gpus, history, titles, width=width), *_process_table(gpus, titles))


def _gpu_table(gpus: Sequence[GpuSample], history: History, titles: Mapping[int, str], *, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name, justify in (
        ("GPU", "right"),
        ("UTIL", "right"),
        ("MEMORY GiB", "right"),
        ("", "right"),
        ("C", "right"),
        ("W", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    bars = max(8, min(HISTORY, width - 64))
    table.add_column(f"last {bars} s", no_wrap=True)
    table.add_column("STAGE", no_wrap=True, overflow="ellipsis")
    for gpu in gpus:
        if gpu.state is not GpuState.OK:
            table.add_row(_index(gpu), *[""] * 6, Text(f"{gpu.state} {gpu.error or ''}", style="bold red"))
            continue
        own = [titles[process.pid] for process in gpu.processes or () if process.pid in titles]
        table.add_row(
            _index(gpu),
            _percent(gpu.utilization),
            _memory(gpu),
            _percent(_ratio(gpu), alarm=FULL),
            _whole(gpu.temperature_celsius, alarm=WARM),
            _whole(gpu.power_watts),
            Text(sparkline(history.of(gpu.uuid), bars), style="cyan"),
            stage_of(own),
        )
    return table


def _process_table(gpus: Sequence[GpuSample], titles: Mapping[int, str]) -> list[RenderableType]:
    """Return the processes, those with most memory first; nothing where none can be seen."""
    found = [(gpu, process) for gpu in gpus for process in gpu.processes or ()]
    if not found:
        return []
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name in ("GPU", "PID", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("PROCESS", no_wrap=True, overflow="ellipsis")
    found.sort(key=lambda pair: (-(pair[1].memory_used_bytes or 0), pair[1].pid))
    for gpu, process in found[:32]:
        table.add_row(_index(gpu), str(process.pid), _gib(process), titles.get(process.pid, ""))
    return [Text(), table]


def _index(gpu: GpuSample) -> str:
    return "?" if gpu.index is None else str(gpu.index)


def _ratio(gpu: GpuSample) -> float | None:
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    return gpu.memory_used_bytes / gpu.memory_total_bytes


def _memory(gpu: GpuSample) -> str:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return f"{'?' if used is None else f'{used / GIB:.1f}'}/{'?' if total is None else f'{total / GIB:.1f}'}"


def _gib(process: GpuProcess) -> str:
    return "?" if process.memory_used_bytes is None else f"{process.memory_used_bytes / GIB:.1f}"


def _percent(ratio: float | None, *, alarm: float = 2.0) -> Text:
    if ratio is None:
        return Text("?")
    return Text(f"{100 * ratio:.0f}%", style="bold yellow" if ratio >= alarm else "")


def _whole(value: float | None, *, alarm: float = 1e9) -> Text:
    return Text("?") if value is None else Text(f"{value:.0f}", style="bold yellow" if value >= alarm else "")


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Let single keys through while the view is there, and put the terminal back afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _quit_within(seconds: float) -> bool:
    """Wait that long; return whether `q` was pressed."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q")


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
    except NoGpuError as error:
        click.echo(f"gpumon: {error}", err=True)
        raise SystemExit(EXIT_NO_GPU) from error
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
    with _keys(), Live(view(), console=console, screen=True, auto_refresh=False) as live:
        while not _quit_within(interval):
            live.update(view(), refresh=True)
