# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Logs of GPUs as a trace: `gpumon log`'s own, ResourceMonitor's, and what nvidia-smi prints for a query.

A log knows one host and no stages. What a cell does not say is unknown. What its rows look like is `logrows`' matter;
here they are put in order of time and joined.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, NotATrace, TraceGpu, TracePod, Workload

from .logrows import GUIDE, LoggedGpu, Problems, Row, rows_of

POD: Final = "host"
"""Name of the one pod of such a trace."""
_SIZE_IN_NAME: Final = re.compile(r"(\d{1,3}) ?GB\b", re.IGNORECASE)
LOOK_AHEAD: Final = 20_000
"""Rows in which all GPUs are met, and which may come in any order of GPUs, such as one GPU's after the other's."""
SET_BACK_SECONDS: Final = 1.0
"""A GPU's row that is earlier than its last one by more than this: the clock was set back, or two logs were joined."""
WINDOW_SECONDS: Final = 5.0
LONG_SECONDS: Final = 3600.0
LONG_WINDOW_SECONDS: Final = 12.0
"""Rows of a GPU are joined to one line for so many seconds, after the first hour for more: a log has no stages, so that
nothing is to be seen in a single second but a peak of memory, which is kept."""

LEAST_UNIX: Final = 1e8
"""In seconds, the year 1973. A time before that counts from somewhere else, such as the log's own beginning."""

TimedRow = tuple[float, Row]
"""Seconds, and what was logged then."""


def trace_of(
    lines: Iterable[bytes], *, interval_seconds: float, problems: Problems
) -> tuple[Header, Iterator[GpuLine], float | None]:
    """Return a log as header and lines of a trace, read as they are asked for, and the Unix time at which it begins.

    A time without a zone is taken for UTC; None: the log has no times, or such as count from its own beginning.

    `interval_seconds`: time between two rows of a GPU, used where the log has no times. Raises NotATrace, whose text
    says what is there and what would be read.
    """
    rows = rows_of(lines, problems)
    beginning = list(islice(rows, LOOK_AHEAD))
    if not beginning:
        raise NotATrace(f"there is no row of a GPU in it{_said(problems)}; {GUIDE}")
    gpus = _known_gpus(beginning)
    header = _header(list(gpus.values()))
    timed = _timed(chain(beginning, rows), gpus, interval_seconds, problems)
    first = sorted(islice(timed, len(beginning)), key=_time)
    begin = first[0][0]
    return header, _gpu_lines(chain(first, timed), begin, problems), begin if begin > LEAST_UNIX else None


def _said(problems: Problems) -> str:
    found = [*problems.notes, *problems.first]
    return f" ({'; '.join(found)})" if found else ""


def _time(row: TimedRow) -> float:
    return row[0]


def _known_gpus(beginning: Sequence[Row]) -> dict[str, LoggedGpu]:
    """Return the name in each row -> the GPU: one whose UUID is sometimes unknown is the one of its index."""
    found: dict[str, LoggedGpu] = {}
    for _, gpu, *_ in beginning:
        old = found.get(gpu.uuid)
        if old is None or (old.memory_total_bytes or old.model or "") == "":
            found[gpu.uuid] = gpu
    for name in [name for name, gpu in found.items() if name == f"GPU-{gpu.number}"]:
        same = [gpu for gpu in found.values() if gpu.number == found[name].number and gpu.uuid != name]
        if len(same) == 1:
            found[name] = same[0]
    return found


def _header(found: Sequence[LoggedGpu]) -> Header:
    gpus = {gpu.uuid: gpu for gpu in found}
    return Header(
        format=TRACE_FORMAT,
        workload=Workload(kind="Host", name=POD),
        pods=[
            TracePod(
                name=POD,
                node=POD,
                node_role="worker",
                gpus_requested=len(gpus),
                gpus=[
                    TraceGpu(
                        uuid=gpu.uuid,
                        index=gpu.number,
                        model=gpu.model,
                        memory_total_bytes=gpu.memory_total_bytes or _by_name(gpu.model),
                    )
                    for gpu in sorted(gpus.values(), key=lambda gpu: (gpu.number is None, gpu.number or 0, gpu.uuid))
                ],
            )
        ],
    )


def _by_name(model: str | None) -> int | None:
    """Return the memory that a model's name says it has: `NVIDIA A100-SXM4-80GB` has 80 GiB."""
    found = _SIZE_IN_NAME.search(model or "")
    return int(found[1]) * 2**30 if found else None


# --- time -----------------------------------------------------------------------------------------------------------


def _timed(
    rows: Iterable[Row], gpus: dict[str, LoggedGpu], interval_seconds: float, problems: Problems
) -> Iterator[TimedRow]:
    """Yield each row with its time, which never goes back for any one GPU.

    nvidia-smi writes local time, which has an hour twice in autumn; clocks are set; logs are joined. What comes after
    that is counted on from there.
    """
    last: dict[str, float] = {}
    step: dict[str, float] = {}
    shift = 0.0
    for row in rows:
        unix, gpu, *_ = row
        known = gpus.get(gpu.uuid)
        if known is None:
            gpus[gpu.uuid] = known = gpu
            problems.note(f"{gpu.uuid} is not among the first {LOOK_AHEAD} rows: of its memory's size nothing is known")
        name = known.uuid
        before = last.get(name)
        if unix is None:
            t = 0.0 if before is None else before + interval_seconds
        else:
            t = unix + shift
            if before is not None:
                if t < before - SET_BACK_SECONDS:
                    back = before - t
                    shift += back + step.get(name, interval_seconds)
                    t = unix + shift
                    problems.note(
                        f"its clock goes back by {back:.0f} s, as in autumn or where logs are joined: what follows is"
                        " counted on from there"
                    )
                elif t > before:
                    step[name] = t - before
        last[name] = t
        yield t, row if known is gpu or known.uuid == gpu.uuid else (unix, known, *row[2:])


class _Window:
    """Rows of one GPU that become one line: means of load and power, the newest memory and its peak."""

    __slots__ = ("heat", "load", "loads", "peak", "powers", "t", "throttled", "used", "watts")

    def __init__(self) -> None:
        self.t = 0.0
        self.load = self.watts = 0.0
        self.loads = self.powers = 0
        self.used: int | None = None
        self.peak: int | None = None
        self.heat: float | None = None
        self.throttled: dict[str, None] | None = None

    def add(self, t: float, row: Row) -> None:
        _, _, load, used, heat, watts, throttled = row
        if t > self.t:
            self.t = t
        if load is not None:
            self.load += load
            self.loads += 1
        if watts is not None:
            self.watts += watts
            self.powers += 1
        if used is not None:
            self.used = used
            if self.peak is None or used > self.peak:
                self.peak = used
        if heat is not None and (self.heat is None or heat > self.heat):
            self.heat = heat
        if throttled is not None:
            self.throttled = {**(self.throttled or {}), **dict.fromkeys(throttled)}

    def line(self, gpu: str) -> GpuLine:
        return GpuLine(
            t=self.t,
            pod=POD,
            uuid=gpu,
            utilization=self.load / self.loads if self.loads else None,
            memory_used_bytes=self.used,
            memory_peak_bytes=self.peak,
            power_watts=self.watts / self.powers if self.powers else None,
            temperature_celsius=self.heat,
            throttled=None if self.throttled is None else list(self.throttled),
        )


def _gpu_lines(rows: Iterable[TimedRow], start: float, problems: Problems) -> Iterator[GpuLine]:
    """Yield a line for each GPU and window, in order of time. `start`: the log's first moment."""
    windows: dict[str, _Window] = {}
    current, begin = 0, 0.0
    for at, row in rows:
        t = at - start
        number = int(t / WINDOW_SECONDS if t < LONG_SECONDS else LONG_SECONDS + t / LONG_WINDOW_SECONDS)
        if number > current:
            yield from _closed(windows)
            windows, current, begin = {}, number, t
        elif t < begin - SET_BACK_SECONDS:
            problems.add(0, f"a row of {row[1].uuid} is {begin - t:.0f} s too late: put the log in order of time")
            continue
        gpu = row[1].uuid
        window = windows.get(gpu)
        if window is None:
            window = windows[gpu] = _Window()
        window.add(t, row)
    yield from _closed(windows)


def _closed(windows: dict[str, _Window]) -> list[GpuLine]:
    return [window.line(gpu) for gpu, window in sorted(windows.items(), key=lambda item: item[1].t)]
