# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a log of GPUs, in whatever table or lines they are: nvidia-smi's CSV, `gpumon log`'s and ResourceMonitor's.

Columns come in any order, with units in the title, in the cell or nowhere, between commas, semicolons or tabs. A row
that cannot be read is named by its number and passed over.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from verl_gpumonitor.model.trace import NotATrace
from verl_gpumonitor.reading import plausible

from . import logcells
from .traces import BrokenOff

GUIDE: Final = (
    "make one with `gpumon log -o gpu.csv`, or with `nvidia-smi --format=csv -l 5"
    " --query-gpu=timestamp,index,name,temperature.gpu,utilization.gpu,memory.used,memory.total`"
)
_BEFORE_HEAD: Final = 20
"""Lines that may stand before the head of a table: warnings, comments, an empty line."""
_LONGEST_LINE: Final = 64 * 1024
_TITLE: Final = re.compile(r"\s*([\w.]+)\s*(?:\[(.*)\])?\s*")
_NAMES: Final = {
    "temperature": "temperature.gpu",
    "utilization": "utilization.gpu",
    "utilisation": "utilization.gpu",
    "memory": "memory.used",
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "power.draw.average": "power.draw",
    "power.draw.instant": "power.draw",
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
}
"""Short, older and newer names of columns -> nvidia-smi's usual one."""
_RESOURCES: Final = {
    "timestamp": ("timestamp", ""),
    "gpu_index": ("index", ""),
    "gpu_uuid": ("uuid", ""),
    "gpu_name": ("name", ""),
    "gpu_utilization": ("utilization.gpu", "ratio"),
    "gpu_memory_used_bytes": ("memory.used", "b"),
    "gpu_memory_total_bytes": ("memory.total", "b"),
    "gpu_power_watts": ("power.draw", ""),
    "gpu_temperature_celsius": ("temperature.gpu", ""),
}
"""ResourceMonitor's columns of GPUs -> nvidia-smi's name, and the unit; its other columns are of the host."""
_WANTED: Final = ("utilization.gpu", "memory.used")
"""A log without any of these says nothing of GPUs at work."""
_NAMED_BY: Final = ("index", "uuid", "pci.bus_id")
_NAMING: Final = (*_NAMED_BY, "name", "memory.total")
_VALUES: Final = (
    *("timestamp", "utilization.gpu", "memory.used"),
    *("temperature.gpu", "power.draw", "clocks_event_reasons.active"),
)
Places = dict[str, tuple[int, str]]
"""nvidia-smi's name of a column -> its place and the unit in its title."""


class LoggedGpu(NamedTuple):
    """A GPU as each of its rows names it."""

    uuid: str
    """`GPU-<index>` where the log has none, or else its place on the bus."""
    number: int | None
    """Its index."""
    model: str | None
    memory_total_bytes: int | None


Row = tuple[float | None, LoggedGpu, float | None, int | None, float | None, float | None, list[str] | None]
"""One GPU at one moment: Unix seconds (None where the log has no times), who it is, utilisation (0..1), bytes in use,
degrees Celsius, watts, reasons of throttling. A bare tuple: a day of eight GPUs has 700,000 of them."""


class Problems:
    """What could not be read, for a person: the first few rows, and how many in all."""

    def __init__(self) -> None:
        """Nothing so far."""
        self.rows = 0
        self.first: list[str] = []
        self.notes: list[str] = []
        """Of the log as a whole."""

    def add(self, line: int, text: str) -> None:
        """Note one row that was passed over; `line` 0: nobody knows which."""
        self.rows += 1
        if len(self.first) < 5:
            self.first.append(f"line {line}: {text}" if line else text)

    def note(self, text: str) -> None:
        """Note something of the log as a whole."""
        if len(self.notes) < 5:
            self.notes.append(text)


def rows_of(lines: Iterable[bytes], problems: Problems) -> Iterator[Row]:
    """Return the rows of a log, read as they are asked for. Raises NotATrace if it is none."""
    source = _numbered(lines, problems)
    passed: list[str] = []
    for number, line in source:
        if line.startswith(b"{"):
            return _json_rows(number, line, source, problems)
        text = _text(line, ",")
        found = _head(text)
        if found is not None:
            return _csv_rows(found, source, problems)
        passed += [text.strip()] if text.strip() else []
        if number >= _BEFORE_HEAD:
            break
    if not passed:
        raise NotATrace(f"it is empty; {GUIDE}")
    raise NotATrace(
        "the first line is no head of a GPU log: it needs index, uuid or pci.bus_id, and utilization.gpu or"
        f" memory.used, and has {_shown(passed)}; {GUIDE}"
    )


def _shown(passed: Sequence[str]) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in passed[0][:200])


def _numbered(lines: Iterable[bytes], problems: Problems) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers, from 1, as far as they can be read."""
    try:
        yield from enumerate(lines, start=1)
    except BrokenOff as error:
        problems.note(f"it ends too early: {error.reason}")


# --- CSV ------------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """The first line of a table."""

    titles: list[str]
    places: Places
    delimiter: str


def _head(line: str) -> _Head | None:
    """Return the head that a line is; None if it is none."""
    for delimiter in (",", ";", "\t"):
        titles = [title.strip() for title in line.strip("\r\n").split(delimiter)]
        places = _places(titles)
        if any(name in places for name in _NAMED_BY) and any(name in places for name in _WANTED):
            return _Head(titles, places, delimiter)
    return None


def _places(titles: Sequence[str]) -> Places:
    places: Places = {}
    ours = "gpu_utilization" in titles and "gpu_memory_used_bytes" in titles
    for place, title in enumerate(titles):
        match = _TITLE.fullmatch(title)
        if match is None:
            continue
        name = match[1].lower()
        if not ours:
            places.setdefault(_NAMES.get(name, name), (place, (match[2] or "").lower()))
        elif name in _RESOURCES:
            places[_RESOURCES[name][0]] = (place, _RESOURCES[name][1])
    return places


def _csv_rows(head: _Head, source: Iterator[tuple[int, bytes]], problems: Problems) -> Iterator[Row]:
    """Yield the rows. A day of eight GPUs has 700,000 of them, so that this is written for speed."""
    titles, places, delimiter = head
    width, all_of_them = 1 + max(place for place, _ in places.values()), len(titles)
    read = _row_reader(places)
    for number, line in source:
        odd = b'"' in line or b"\0" in line or len(line) > _LONGEST_LINE
        cells = (_text(line, delimiter) if odd else line.decode("utf-8", "replace")).split(delimiter)
        if not width <= len(cells) <= all_of_them:
            if any(cell.strip() for cell in (cells[all_of_them:] or cells)):
                problems.add(number, f"has {len(cells)} of {max(width, all_of_them)} columns")
                continue
            if len(cells) < width:
                continue
        try:
            row = read(cells)
        except ValueError as error:
            if [cell.strip() for cell in cells[:all_of_them]] != titles:  # the head again: two logs that were joined
                problems.add(number, str(error))
            continue
        if row is not None:
            yield row


def _text(line: bytes, delimiter: str) -> str:
    """Return a line whose delimiters are columns' ends.

    It has no NUL, as a disk that was full leaves them, and no quote: one that is never closed would swallow the rest of
    the file. A line of a size that no row has is cut.
    """
    if len(line) > _LONGEST_LINE or b"\0" in line:
        line = line[:_LONGEST_LINE].replace(b"\0", b"")
    text = line.decode("utf-8", errors="replace")
    if '"' not in text:
        return text
    if text.count('"') % 2:
        return text.replace('"', "")
    cells = next(csv.reader([text.replace("\r", "").replace("\n", "")], delimiter=delimiter, skipinitialspace=True), [])
    return delimiter.join(cell.replace(delimiter, "." if _is_decimal(cell) else " ") for cell in cells)


def _is_decimal(cell: str) -> bool:
    """Whether it is `85,5`, as spreadsheets of some countries write it between quotes."""
    whole, _, rest = cell.partition(",")
    return whole.strip("- ").isdigit() and rest[:1].isdigit()


def _row_reader(places: Places) -> Callable[[list[str]], Row | None]:
    """Return a function that reads one row; None for one that is of no GPU. It raises ValueError for a broken one."""
    # A column that is not there is the cell behind the last one, which is put there empty.
    who, what = (itemgetter(*(places[n][0] if n in places else -1 for n in names)) for names in (_NAMING, _VALUES))
    used_unit, total_unit = (places.get(name, (0, ""))[1] for name in ("memory.used", "memory.total"))
    ours = places.get("utilization.gpu", (0, ""))[1] == "ratio"
    gpus = logcells.Memo(partial(_gpu, unit=total_unit, may_be_nobody=ours))
    times, reasons = logcells.Memo(logcells.clock()), logcells.Memo(logcells.reasons)
    shares = logcells.Memo(logcells.ratio if ours else logcells.percent)
    heats, powers = logcells.Memo(logcells.celsius), logcells.Memo(logcells.watts)
    sizes = logcells.Memo(partial(logcells.size, unit=used_unit))

    def read(cells: list[str]) -> Row | None:
        cells.append("")
        time, percent, used, heat, power, reason = what(cells)
        gpu = gpus[who(cells)]
        if gpu is None:
            return None
        return times[time], gpu, shares[percent], sizes[used], heats[heat], powers[power], reasons[reason]

    return read


def _gpu(cells: tuple[str, str, str, str, str], *, unit: str, may_be_nobody: bool) -> LoggedGpu | None:
    """Return the GPU of the cells that name it; `unit`: in the title of its memory's size.

    `may_be_nobody`: a row without a GPU is the host's own, and no fault.
    """
    index_text, uuid, bus, model = map(logcells.known, cells[:4])
    name = uuid or (None if index_text is None else f"GPU-{index_text}") or bus
    if name is None:
        if may_be_nobody:
            return None
        raise ValueError("names no GPU")
    index = None if index_text is None else int(index_text)
    return LoggedGpu(name, index, model, logcells.size(cells[4], unit))


# --- JSON lines -----------------------------------------------------------------------------------------------------

_Bytes = Annotated[int, Meta(ge=0, le=plausible.MAX_MEMORY_BYTES)]


class _JsonGpu(msgspec.Struct):
    """A GPU of a line. Keys that are not there are unknown."""

    uuid: str | None = None
    index: int | None = None
    name: str | None = None
    model: str | None = None
    utilization: Annotated[float, Meta(ge=0, le=1)] | None = None
    memory_used_bytes: _Bytes | None = None
    memory_total_bytes: _Bytes | None = None
    temperature_celsius: Annotated[float, Meta(ge=-40, le=200)] | None = None
    power_watts: Annotated[float, Meta(ge=0, le=plausible.MAX_POWER_MILLIWATTS / 1000)] | None = None
    throttled: list[str] | None = None

    def row(self, unix: float | None) -> Row:
        """Return it at a moment. Raises ValueError."""
        if self.uuid is None and self.index is None:
            raise ValueError("names no GPU")
        gpu = LoggedGpu(
            self.uuid or f"GPU-{self.index}", self.index, self.name or self.model, self.memory_total_bytes or None
        )
        values = (self.utilization, self.memory_used_bytes, self.temperature_celsius, self.power_watts, self.throttled)
        return unix, gpu, *values


class _JsonLine(msgspec.Struct):
    """When a line was, and its GPUs where it is ResourceMonitor's, whose other keys are of the host."""

    t: float | None = None
    timestamp: str | None = None
    gpus: list[_JsonGpu] | None = None

    def unix(self) -> float | None:
        """Return its time. Raises ValueError."""
        if self.t is not None:
            return logcells.seconds_of(self.t)
        return None if self.timestamp is None else logcells.unix_of(self.timestamp)


def _json_rows(number: int, first: bytes, source: Iterator[tuple[int, bytes]], problems: Problems) -> Iterator[Row]:
    lines, gpus = msgspec.json.Decoder(_JsonLine), msgspec.json.Decoder(_JsonGpu)
    for place, line in _chained(number, first, source):
        if not line.strip():
            continue
        try:
            told = lines.decode(line)
            unix = told.unix()
            found = [gpus.decode(line)] if told.gpus is None else told.gpus
            rows = [gpu.row(unix) for gpu in found]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            problems.add(place, str(error))
            continue
        yield from rows


def _chained(number: int, first: bytes, source: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    yield number, first
    yield from source
