# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Logs of GPUs as a trace: `gpumon log`'s own, and what nvidia-smi prints for a query, in whatever columns and units.

A log knows one host and no stages. What a cell does not say is unknown, and a row that cannot be read is named by its
number and passed over.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import Final, NamedTuple

import msgspec

from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, NotATrace, TraceGpu, TracePod, Workload

POD: Final = "host"
"""Name of the one pod of such a trace."""
UNKNOWN_CELLS: Final = frozenset({"", "n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]", "err!"})
MIB: Final = 2**20
_GUIDE: Final = (
    "make one with `gpumon log -o gpu.csv`, or with `nvidia-smi --format=csv -l 5"
    " --query-gpu=timestamp,index,name,temperature.gpu,utilization.gpu,memory.used,memory.total`"
)
_TITLE: Final = re.compile(r"\s*([\w.]+)\s*(?:\[(.*)\])?\s*")
_NUMBER: Final = re.compile(r"\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([%\w]*)\s*")
_BYTES: Final = {"": MIB, "b": 1, "kib": 2**10, "mib": MIB, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE_IN_NAME: Final = re.compile(r"(\d{1,3}) ?GB\b", re.IGNORECASE)
_NAMES: Final = {
    "temperature": "temperature.gpu",
    "utilization": "utilization.gpu",
    "utilisation": "utilization.gpu",
    "memory": "memory.used",
    "gpu_name": "name",
    "gpu_uuid": "uuid",
}
"""Short names that people give the columns -> nvidia-smi's."""
WANTED: Final = ("utilization.gpu", "memory.used")
"""A log without any of these says nothing of GPUs at work."""


class Row(NamedTuple):
    """One GPU at one moment. `unix`: None where the log has no times."""

    unix: float | None
    gpu: str
    """UUID, or `GPU-<index>` where the log has none."""
    gpu_index: int | None
    model: str | None
    utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    power_watts: float | None
    throttled: list[str] | None


class Problems:
    """What could not be read, for a person: the first few rows, and how many in all."""

    def __init__(self) -> None:
        """Nothing so far."""
        self.rows = 0
        self.first: list[str] = []

    def add(self, line: int, text: str) -> None:
        """Note one row that was passed over."""
        self.rows += 1
        if len(self.first) < 5:
            self.first.append(f"line {line}: {text}")


def trace_of(
    lines: Iterable[bytes], *, interval_seconds: float, problems: Problems
) -> tuple[Header, Iterator[GpuLine]]:
    """Return a log as header and lines of a trace, read as they are asked for.

    `interval_seconds`: time between two rows of a GPU, used where the log has no times. Raises NotATrace, whose text
    says what is there and what would be read.
    """
    source = iter(lines)
    first = next(source, b"")
    rows = (
        _json_rows(chain([first], source), problems)
        if first.lstrip().startswith(b"{")
        else _csv(first, source, problems)
    )
    beginning = _first_round(rows)
    if not beginning:
        raise NotATrace(f"there is no row of a GPU in it{_said(problems)}; {_GUIDE}")
    return _header(beginning), _gpu_lines(chain(beginning, rows), interval_seconds)


def _said(problems: Problems) -> str:
    return f" ({'; '.join(problems.first)})" if problems.first else ""


def _first_round(rows: Iterator[Row]) -> list[Row]:
    """Take rows until one GPU comes again: by then all were met."""
    beginning: list[Row] = []
    met: set[str] = set()
    for row in rows:
        beginning.append(row)
        if row.gpu in met:
            break
        met.add(row.gpu)
    return beginning


def _header(beginning: Sequence[Row]) -> Header:
    gpus = {row.gpu: row for row in reversed(beginning)}
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
                        uuid=row.gpu,
                        index=row.gpu_index,
                        model=row.model,
                        memory_total_bytes=row.memory_total_bytes or _by_name(row.model),
                    )
                    for row in sorted(
                        gpus.values(), key=lambda row: (row.gpu_index is None, row.gpu_index or 0, row.gpu)
                    )
                ],
            )
        ],
    )


def _by_name(model: str | None) -> int | None:
    """Return the memory that a model's name says it has: `NVIDIA A100-SXM4-80GB` has 80 GiB."""
    found = _SIZE_IN_NAME.search(model or "")
    return int(found[1]) * 2**30 if found else None


def _gpu_lines(rows: Iterator[Row], interval_seconds: float) -> Iterator[GpuLine]:
    begin: float | None = None
    seen: dict[str, int] = {}
    for row in rows:
        seen[row.gpu] = seen.get(row.gpu, -1) + 1
        begin = row.unix if begin is None else begin
        counted = seen[row.gpu] * interval_seconds
        t = counted if row.unix is None or begin is None else max(0.0, row.unix - begin)
        yield GpuLine(
            t=t,
            pod=POD,
            uuid=row.gpu,
            utilization=row.utilization,
            memory_used_bytes=row.memory_used_bytes,
            power_watts=row.power_watts,
            temperature_celsius=row.temperature_celsius,
            throttled=row.throttled,
        )


# --- CSV ------------------------------------------------------------------------------------------------------------


def _csv(first: bytes, source: Iterator[bytes], problems: Problems) -> Iterator[Row]:
    titles = _split(first.decode("utf-8-sig", errors="replace"))
    places = _places(titles)
    if ("index" not in places and "uuid" not in places) or not any(name in places for name in WANTED):
        shown = ", ".join(title.strip() for title in titles)[:200] or "nothing"
        raise NotATrace(
            f"the first line is no head of a GPU log: it needs index or uuid, and utilization.gpu or memory.used,"
            f" and has {shown}; {_GUIDE}"
        )
    return _csv_rows(first, source, places, problems)


def _split(line: str) -> list[str]:
    """Return the cells of a line. Python 3.10 raises for a NUL, as a disk that was full leaves them."""
    return next(csv.reader([line.replace("\0", "")]), [])


def _places(titles: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return nvidia-smi's name of a column -> its place and the unit in its title."""
    places: dict[str, tuple[int, str]] = {}
    for place, title in enumerate(titles):
        match = _TITLE.fullmatch(title)
        if match:
            name = match[1].lower()
            places.setdefault(_NAMES.get(name, name), (place, (match[2] or "").lower()))
    return places


def _csv_rows(
    first: bytes, source: Iterator[bytes], places: dict[str, tuple[int, str]], problems: Problems
) -> Iterator[Row]:
    head = first.strip()
    width = 1 + max(place for place, _ in places.values())
    cell = _cells(places)
    times = _Times()
    for number, line in enumerate(source, start=2):
        if not line.strip() or line.strip() == head:
            continue
        cells = _split(line.decode("utf-8", errors="replace"))
        if len(cells) < width or (not line.endswith(b"\n") and len(cells) == width and not cells[-1].strip()):
            problems.add(number, f"has {len(cells)} of {width} columns")
            continue
        try:
            yield _row(cells, places, cell, times)
        except ValueError as error:
            problems.add(number, str(error))


Cell = Callable[[Sequence[str], str], str | None]


def _cells(places: dict[str, tuple[int, str]]) -> Cell:
    def cell(cells: Sequence[str], name: str) -> str | None:
        if name not in places:
            return None
        text = cells[places[name][0]].strip()
        return None if text.lower() in UNKNOWN_CELLS else text

    return cell


def _row(cells: Sequence[str], places: dict[str, tuple[int, str]], cell: Cell, times: "_Times") -> Row:
    index_text, uuid = cell(cells, "index"), cell(cells, "uuid")
    if index_text is None and uuid is None:
        raise ValueError("names no GPU")
    index = None if index_text is None else int(index_text)
    used, total = (_bytes(cell(cells, name), places.get(name)) for name in ("memory.used", "memory.total"))
    percent = _number(cell(cells, "utilization.gpu"))
    reasons = cell(cells, "clocks_event_reasons.active")
    time = cell(cells, "timestamp")
    return Row(
        None if time is None else times.read(time),
        uuid or f"GPU-{index}",
        index,
        cell(cells, "name"),
        None if percent is None else min(1.0, max(0.0, percent / 100)),
        used,
        total,
        _number(cell(cells, "temperature.gpu")),
        _number(cell(cells, "power.draw")),
        # nvidia-smi writes a number here, which says nothing without its table.
        None if reasons is None or reasons.startswith("0x") else reasons.split(),
    )


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no number")
    return float(match[1])


def _bytes(text: str | None, place: tuple[int, str] | None) -> int | None:
    """Return the bytes of a cell: by the unit in it, else in its title, else MiB as nvidia-smi's."""
    if text is None or place is None:
        return None
    match = _NUMBER.fullmatch(text)
    factor = None if match is None else _BYTES.get((match[2] or place[1]).lower())
    if match is None or factor is None:
        raise ValueError(f"{text[:40]!r} is no size of memory")
    return int(float(match[1]) * factor)


class _Times:
    """Reads times; all GPUs of one round have nearly the same, and parsing is most of the work."""

    def __init__(self) -> None:
        self._text = ""
        self._unix = 0.0

    def read(self, text: str) -> float:
        """Return Unix seconds. Times without a zone are taken as UTC: only their differences matter."""
        if text != self._text:
            self._text, self._unix = text, unix_of(text)
        return self._unix


def unix_of(text: str) -> float:
    """Return the Unix seconds of `2026/01/31 23:59:59.123`, of an ISO time or of a number. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no time") from None
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()


# --- JSON lines -----------------------------------------------------------------------------------------------------


class _JsonRow(msgspec.Struct):
    """A line of `gpumon log --format jsonl`. Keys that are not there are unknown."""

    t: float | None = None
    timestamp: str | None = None
    uuid: str | None = None
    index: int | None = None
    name: str | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    throttled: list[str] | None = None


def _json_rows(lines: Iterable[bytes], problems: Problems) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(_JsonRow)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
            if row.uuid is None and row.index is None:
                raise ValueError("names no GPU")
            unix = row.t if row.t is not None or row.timestamp is None else unix_of(row.timestamp)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            problems.add(number, str(error))
            continue
        yield Row(
            unix,
            row.uuid or f"GPU-{row.index}",
            row.index,
            row.name,
            row.utilization,
            row.memory_used_bytes,
            row.memory_total_bytes,
            row.temperature_celsius,
            row.power_watts,
            row.throttled,
        )
