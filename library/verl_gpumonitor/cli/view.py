# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What `gpumon top` and `gpumon replay` show: GPUs, their last moments, their processes, at 80 columns and more."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.samples import GpuProcess, GpuSample, NodeSample
from verl_gpumonitor.model.vocabulary import GpuState
from verl_gpumonitor.stages.names import classify

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
    """Return the whole view of `top`. `titles`: of the processes that can be seen."""
    unread = (
        "" if node.visible is None or node.visible <= len(node.gpus) else f" of {node.visible} that the driver counts"
    )
    head = Text(
        f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}{unread}  driver {node.driver_version or 'unknown'}",
        style="bold",
    )
    stages = {
        gpu.uuid: stage_of([titles[process.pid] for process in gpu.processes or () if process.pid in titles])
        for gpu in gpus
    }
    return Group(head, gpu_table(gpus, history, stages, width=width), *process_table(gpus, titles))


def gpu_table(
    gpus: Sequence[GpuSample],
    history: History,
    stages: Mapping[str, str],
    *,
    width: int,
    names: Mapping[str, str] | None = None,
    unit: str = "s",
) -> Table:
    """Return a row for each GPU. `stages`: UUID -> what it does.

    `names`: UUID -> what it is called, where its index alone does not tell; `unit`: what one bar stands for.
    """
    table = _table()
    table.add_column("GPU", justify="right", no_wrap=True, overflow="ellipsis")
    for name in ("UTIL", "MEMORY GiB", "", "C", "W"):
        table.add_column(name, justify="right", no_wrap=True)
    longest = max((len(name) for name in (names or {}).values()), default=0)
    bars = max(8, min(HISTORY, width - 64 - max(0, longest - 3)))
    table.add_column(f"last {bars} {unit}".strip(), no_wrap=True)
    table.add_column("STAGE", no_wrap=True, overflow="ellipsis", ratio=1)
    for gpu in gpus:
        called = plain((names or {}).get(gpu.uuid) or _index(gpu))
        if gpu.state is not GpuState.OK:
            table.add_row(called, *[""] * 6, Text(f"{gpu.state} {gpu.error or ''}", style="bold red"))
            continue
        table.add_row(
            called,
            _percent(gpu.utilization),
            _memory(gpu),
            _percent(_ratio(gpu), alarm=FULL),
            _whole(gpu.temperature_celsius, alarm=WARM),
            _whole(gpu.power_watts),
            Text(sparkline(history.of(gpu.uuid), bars), style="cyan"),
            plain(stages.get(gpu.uuid, "")),
        )
    return table


def process_table(gpus: Sequence[GpuSample], titles: Mapping[int, str], *, most: int = 32) -> list[RenderableType]:
    """Return the processes, those with most memory first; nothing where none can be seen."""
    found = [(gpu, process) for gpu in gpus for process in gpu.processes or ()]
    if not found:
        return []
    table = _table()
    for name in ("GPU", "PID", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("PROCESS", no_wrap=True, overflow="ellipsis", ratio=1)
    found.sort(key=lambda pair: (-(pair[1].memory_used_bytes or 0), pair[1].pid))
    for gpu, process in found[:most]:
        table.add_row(_index(gpu), str(process.pid), _gib(process), plain(titles.get(process.pid, "")))
    return [Text(), table]


def _table() -> Table:
    """Return an empty table over the whole width. A column with a `ratio` takes what the others leave.

    Without one, a text that is too long would be paid for by all columns alike, and those of numbers vanish first.
    """
    return Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="bold", expand=True)


def plain(text: str) -> Text:
    """Return what somebody else wrote as it is: no markup in it counts, and nothing in it moves the cursor."""
    return Text("".join(sign if sign.isprintable() else "?" for sign in text))


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
