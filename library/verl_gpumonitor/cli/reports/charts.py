# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG: a GPU over time on its stages, the stages of a step, all GPUs at a glance. Pure; text out.

Drawn here and not by a library of plots: those bring megabytes of script or of Python for lines and rectangles, and
none knows stages. Colours are classes that the page defines, so that light, dark and print are one drawing. Sizes are
those of a phone's width, so that text stays readable there; wider screens put charts beside each other.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from verl_gpumonitor.cli.times import clock
from verl_gpumonitor.model.vocabulary import STAGES, UNKNOWN

from .gather import GpuRun, StageRow
from .tracks import Bucket

WIDTH: Final = 460
LEFT, RIGHT, TOP, BOTTOM = 34, 6, 6, 20
PLOT_HEIGHT: Final = 92
CLEAR_SHARE: Final = 0.6
"""A stretch gets a stage's colour as its background when the stage takes so much of it."""
_JOINED: Final = 2.5
"""Points that are so many stretches apart, or less, are joined: one sample may have come late."""


def stage_class(stage: str) -> str:
    """Return the class of a stage's colour."""
    return f"stage-{stage if stage in STAGES else UNKNOWN}"


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _x(t: float, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (t / seconds if seconds > 0 else 0.0)


def _y(ratio: float) -> float:
    return TOP + PLOT_HEIGHT * (1.0 - min(1.0, max(0.0, ratio)))


def time_ticks(seconds: float, count: int = 4, *, begin: float = 0.0) -> list[float]:
    """Return times at which an axis is marked: round ones, at most `count` and the first. `begin`: of the axis."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
    step = next((step for step in steps if seconds / step <= count), steps[-1])
    while seconds / step > count:
        step *= 2
    first = math.ceil(begin / step) * step
    return [float(t) for t in range(first, int(begin + seconds) + 1, step)]


def _tick(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="tick" x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}">{text}</text>'


def _frame(seconds: float, begin: float) -> Iterable[str]:
    for ratio in (0.0, 0.5, 1.0):
        y = _number(_y(ratio))
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{LEFT - 4}" y="{y}" dy="0.35em" text-anchor="end">{100 * ratio:.0f}%</text>'
    yield from _time_axis(seconds, begin, TOP + PLOT_HEIGHT + 14)


def _time_axis(seconds: float, begin: float, y: float) -> Iterable[str]:
    """Yield the marks of time below a drawing that begins at a time of the record."""
    for t in time_ticks(seconds, begin=begin):
        x = _x(t - begin, seconds)
        yield _tick(x, y, clock(t), "middle" if x < WIDTH - 30 else "end")


def stage_runs(points: Sequence[tuple[float, Bucket]], width_seconds: float) -> list[tuple[float, float, str]]:
    """Return begin, end and stage of the stretches in which one stage clearly ruled, neighbours joined."""
    runs: list[tuple[float, float, str]] = []
    for t, bucket in points:
        stage = bucket.stage
        if stage is None or bucket.seconds <= 0 or bucket.stages[stage] < CLEAR_SHARE * bucket.seconds:
            continue
        if runs and runs[-1][2] == stage and abs(runs[-1][1] - t) < width_seconds / 2:
            runs[-1] = (runs[-1][0], t + width_seconds, stage)
        else:
            runs.append((t, t + width_seconds, stage))
    return runs


def _backgrounds(gpu: GpuRun, seconds: float, width_seconds: float, begin: float) -> Iterable[str]:
    for first, last, stage in stage_runs(gpu.points, width_seconds):
        x, right = _x(first, seconds), _x(min(last, seconds), seconds)
        when = f"{clock(begin + first)} to {clock(begin + last)}"
        yield (
            f'<rect class="band {stage_class(stage)}" x="{_number(x)}" y="{TOP}" width="{_number(max(0.4, right - x))}"'
            f' height="{PLOT_HEIGHT}"><title>{escape(stage)} {when}</title></rect>'
        )


def _pieces(
    points: Sequence[tuple[float, Bucket]], value: Callable[[Bucket], float | None], width_seconds: float
) -> list[list[tuple[float, float]]]:
    """Return the connected pieces of a line: what is unknown is a gap."""
    pieces: list[list[tuple[float, float]]] = []
    last: float | None = None
    for t, bucket in points:
        found = value(bucket)
        if found is None:
            last = None
            continue
        if last is None or t - last > _JOINED * width_seconds:
            pieces.append([])
        pieces[-1].append((t + width_seconds / 2, found))
        last = t
    return pieces


def _line(pieces: Sequence[Sequence[tuple[float, float]]], seconds: float, kind: str) -> Iterable[str]:
    for piece in pieces:
        path = " ".join(f"{_number(_x(min(t, seconds), seconds))},{_number(_y(value))}" for t, value in piece)
        if len(piece) == 1:
            x, y = path.split(",")
            yield f'<circle class="{kind} dot" cx="{x}" cy="{y}" r="1.4"/>'
        else:
            yield f'<polyline class="{kind}" points="{path}"/>'


def gpu_chart(gpu: GpuRun, *, seconds: float, width_seconds: float, begin: float = 0.0) -> str:
    """Draw load and memory of a GPU, both in percent, with its stages behind. `begin`: of the axis, in the record."""
    total = gpu.memory_total_bytes

    def memory(bucket: Bucket) -> float | None:
        return None if bucket.memory_high_bytes is None or not total else bucket.memory_high_bytes / total

    parts = [
        *_backgrounds(gpu, seconds, width_seconds, begin),
        *_frame(seconds, begin),
        *_line(_pieces(gpu.points, lambda bucket: bucket.utilization, width_seconds), seconds, "load"),
        *_line(_pieces(gpu.points, memory, width_seconds), seconds, "memory"),
    ]
    label = f"Load and memory of {gpu.name} of {gpu.pod} over time"
    return _svg(parts, label, TOP + PLOT_HEIGHT + BOTTOM)


def budget_bar(rows: Sequence[StageRow]) -> str:
    """Draw the shares of GPU time as one bar, the idle part of each stage hatched."""
    parts: list[str] = []
    x = 0.0
    for row in rows:
        width = WIDTH * row.share
        if width < 0.3:
            continue
        busy = row.utilization
        text = f"{row.stage} {100 * row.share:.0f}% of GPU time" + ("" if busy is None else f", {100 * busy:.0f}% busy")
        parts.append(
            f'<rect class="{stage_class(row.stage)}" x="{_number(x)}" y="0" width="{_number(width)}" height="34">'
            f"<title>{escape(text)}</title></rect>"
        )
        if busy is not None:
            pale = _number(34 * (1 - busy))
            parts.append(f'<rect class="idle" x="{_number(x)}" y="0" width="{_number(width)}" height="{pale}"/>')
        if width > 7 * len(row.stage) + 6:
            parts.append(f'<text class="onbar" x="{_number(x + 4)}" y="29">{escape(row.stage)}</text>')
        x += width
    return _svg(parts, "Shares of GPU time by stage; the pale upper part of each is idle", 34)


def heat_map(
    gpus: Sequence[GpuRun],
    value: Callable[[GpuRun, Bucket], float | None],
    *,
    seconds: float,
    width_seconds: float,
    label: str,
    begin: float = 0.0,
    cells: int = 60,
) -> str:
    """Draw one value of all GPUs over time, a row each; what is unknown stays empty."""
    row = 10 if len(gpus) <= 24 else 5
    parts: list[str] = []
    cell_seconds = max(width_seconds, seconds / cells if seconds else 1.0)
    for number, gpu in enumerate(gpus):
        for cell, ratio in _cells(gpu, value, cell_seconds):
            x, right = _x(cell * cell_seconds, seconds), _x(min(seconds, (cell + 1) * cell_seconds), seconds)
            level = min(9, int(ratio * 10))
            parts.append(
                f'<rect class="heat-{level}" x="{_number(x)}" y="{number * row}" width="{_number(max(0.3, right - x))}"'
                f' height="{row - 1}"/>'
            )
        if row >= 10:
            text = str(number if gpu.index is None else gpu.index)
            parts.append(_tick(LEFT - 4, number * row + row * 0.8, text, "end"))
    height = len(gpus) * row
    parts += _time_axis(seconds, begin, height + 12)
    return _svg(parts, label, height + 16)


def _cells(
    gpu: GpuRun, value: Callable[[GpuRun, Bucket], float | None], cell_seconds: float
) -> Iterable[tuple[int, float]]:
    joined: dict[int, Bucket] = {}
    for t, bucket in gpu.points:
        cell = int(t / cell_seconds)
        joined[cell] = joined[cell].join(bucket) if cell in joined else bucket
    for cell, bucket in joined.items():
        ratio = value(gpu, bucket)
        if ratio is not None:
            yield cell, min(1.0, max(0.0, ratio))


def bar(ratio: float | None, label: str) -> str:
    """Draw a ratio as a small bar, for a cell of a table."""
    if ratio is None:
        return ""
    width = _number(100 * min(1.0, max(0.0, ratio)))
    return (
        f'<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label={quoteattr(label)}>'
        f'<rect class="track" width="100" height="8"/><rect class="fill" width="{width}" height="8"/></svg>'
    )


def _svg(parts: Iterable[str], label: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {_number(height)}" role="img" aria-label={quoteattr(label)}>{"".join(parts)}</svg>'
    )
