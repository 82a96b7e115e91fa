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
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Final, NamedTuple, TypeVar

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
_IN_MINUTE: Final = re.compile(r"[0-5]\d(?:\.\d+)?")
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


WINDOW_SECONDS: Final = 5.0
LONG_SECONDS: Final = 3600.0
LONG_WINDOW_SECONDS: Final = 12.0
"""Rows of a GPU are joined to one line for so many seconds, after the first hour for more: a log has no stages, so that
nothing is to be seen in a single second but a peak of memory, which is kept."""


class LoggedGpu(NamedTuple):
    """A GPU as each of its rows names it."""

    uuid: str
    """`GPU-<index>` where the log has none."""
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
        uuid = row[1].uuid
        if uuid in met:
            break
        met.add(uuid)
    return beginning


def _header(beginning: Sequence[Row]) -> Header:
    gpus = {gpu.uuid: gpu for _, gpu, *_ in reversed(beginning)}
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


class _Window:
    """Rows of one GPU that become one line: means of load and power, the newest memory and its peak."""

    __slots__ = ("heat", "load", "peak", "t", "throttled", "used", "watts")

    def __init__(self) -> None:
        self.t = 0.0
        self.load: list[float] = []
        self.watts: list[float] = []
        self.used: int | None = None
        self.peak: int | None = None
        self.heat: float | None = None
        self.throttled: dict[str, None] | None = None

    def add(self, t: float, row: Row) -> None:
        _, _, load, used, heat, watts, throttled = row
        self.t = t
        if load is not None:
            self.load.append(load)
        if watts is not None:
            self.watts.append(watts)
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
            utilization=sum(self.load) / len(self.load) if self.load else None,
            memory_used_bytes=self.used,
            memory_peak_bytes=self.peak,
            power_watts=sum(self.watts) / len(self.watts) if self.watts else None,
            temperature_celsius=self.heat,
            throttled=None if self.throttled is None else list(self.throttled),
        )


def _gpu_lines(rows: Iterator[Row], interval_seconds: float) -> Iterator[GpuLine]:
    """Yield a line for each GPU and window, in order of time."""
    begin: float | None = None
    seen: dict[str, int] = {}
    windows: dict[str, _Window] = {}
    current = 0
    unix, t = None, 0.0
    for row in rows:
        at, gpu = row[0], row[1][0]
        if at is None:
            seen[gpu] = seen.get(gpu, -1) + 1
            t = seen[gpu] * interval_seconds
        elif at != unix:
            unix = at
            begin = unix if begin is None else begin
            t = max(0.0, unix - begin)
        number = int(t / WINDOW_SECONDS if t < LONG_SECONDS else LONG_SECONDS + t / LONG_WINDOW_SECONDS)
        if number != current:
            yield from _closed(windows)
            windows, current = {}, number
        window = windows.get(gpu)
        if window is None:
            window = windows[gpu] = _Window()
        window.add(t, row)
    yield from _closed(windows)


def _closed(windows: dict[str, _Window]) -> list[GpuLine]:
    return [window.line(gpu) for gpu, window in sorted(windows.items(), key=lambda item: item[1].t)]


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
    return _csv_rows([title.strip() for title in titles], source, places, problems)


def _split(line: str) -> list[str]:
    """Return the cells of a line. Python 3.10 raises for a NUL, as a disk that was full leaves them."""
    return next(csv.reader([line.replace("\0", "").replace('"', "")]), [])


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
    titles: Sequence[str], source: Iterator[bytes], places: dict[str, tuple[int, str]], problems: Problems
) -> Iterator[Row]:
    """Yield the rows. A day of eight GPUs has 700,000 of them, so that this is written for speed."""
    width = 1 + max(place for place, _ in places.values())
    table = csv.reader(map(_text, source))
    read = _row_reader(places)
    for cells in table:
        if len(cells) < width:
            if cells and any(map(str.strip, cells)):
                problems.add(table.line_num + 1, f"has {len(cells)} of {width} columns")
            continue
        try:
            yield read(cells)
        except ValueError as error:
            if [cell.strip() for cell in cells[: len(titles)]] != titles:  # two logs that were joined
                problems.add(table.line_num + 1, str(error))


def _text(line: bytes) -> str:
    """Return a line for the reader of tables.

    It must see no NUL, and no quote: one that is never closed would swallow the rest of the file.
    """
    if b'"' in line or b"\0" in line:
        line = line.replace(b"\0", b"").replace(b'"', b"")
    return line.decode("utf-8", errors="replace")


_NAMING: Final = ("index", "uuid", "name", "memory.total")
_VALUES: Final = (
    *("timestamp", "utilization.gpu", "memory.used"),
    *("temperature.gpu", "power.draw", "clocks_event_reasons.active"),
)
_REMEMBERED: Final = 4096
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Memo(dict[_Key, _Value]):
    """What cells mean. They repeat: names and sizes in each row, load and temperature in most."""

    def __init__(self, read: Callable[[_Key], _Value]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, key: _Key) -> _Value:
        if len(self) >= _REMEMBERED:
            self.clear()
        value = self[key] = self._read(key)
        return value


def _row_reader(places: dict[str, tuple[int, str]]) -> Callable[[list[str]], Row]:
    """Return a function that reads one row. It raises ValueError for one that cannot be read."""
    # A column that is not there is the cell behind the last one, which is put there empty.
    who, what = (itemgetter(*(places[n][0] if n in places else -1 for n in names)) for names in (_NAMING, _VALUES))
    used_unit, total_unit = (places.get(name, (0, ""))[1] for name in ("memory.used", "memory.total"))
    gpus = _Memo(partial(_gpu, unit=total_unit))
    times, shares, numbers, reasons = _Memo(_clock()), _Memo(_share), _Memo(_number), _Memo(_reasons)
    sizes = _Memo(partial(_bytes, unit=used_unit))

    def read(cells: list[str]) -> Row:
        cells.append("")
        time, percent, used, heat, power, reason = what(cells)
        return (
            times[time],
            gpus[who(cells)],
            shares[percent],
            sizes[used],
            numbers[heat],
            numbers[power],
            reasons[reason],
        )

    return read


def _known(cell: str) -> str | None:
    text = cell.strip()
    return None if text.lower() in UNKNOWN_CELLS else text


def _gpu(cells: tuple[str, str, str, str], *, unit: str) -> LoggedGpu:
    """Return the GPU of the cells that name it; `unit`: in the title of its memory's size."""
    index_text, uuid, model = map(_known, cells[:3])
    if index_text is None and uuid is None:
        raise ValueError("names no GPU")
    index = None if index_text is None else int(index_text)
    return LoggedGpu(uuid or f"GPU-{index}", index, model, _bytes(cells[3], unit))


def _share(cell: str) -> float | None:
    percent = _number(cell)
    return None if percent is None else min(1.0, max(0.0, percent / 100))


def _reasons(cell: str) -> list[str] | None:
    """nvidia-smi writes a number here, which says nothing without its table."""
    text = _known(cell)
    return None if text is None or text.startswith("0x") else text.split()


def _number(cell: str) -> float | None:
    """Return a number, with or without a unit after it; None for an unknown one. Raises ValueError."""
    if not cell:
        return None
    try:
        return float(cell)
    except ValueError:
        return _with_unit(cell)[0]


def _with_unit(cell: str) -> tuple[float | None, str]:
    """Return a number and its unit: `79872 MiB`, `85%`. Raises ValueError."""
    text = _known(cell)
    if text is None:
        return None, ""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no number")
    return float(match[1]), match[2].lower()


def _bytes(cell: str, unit: str) -> int | None:
    """Return the bytes of a cell: by the unit in it, else in its title, else MiB as nvidia-smi's. Raises ValueError."""
    if not cell:
        return None
    value: float | None
    try:
        value, own = float(cell), ""
    except ValueError:
        value, own = _with_unit(cell)
    if value is None:
        return None
    factor = _BYTES.get(own or unit)
    if factor is None:
        raise ValueError(f"{cell.strip()[:40]!r} is no size of memory")
    return int(value * factor)


def _clock() -> Callable[[str], float | None]:
    """Return a function that reads a cell with a time: Unix seconds, None for an unknown one. It may raise ValueError.

    Reading a date takes long, and has to be done once a minute.
    """
    minutes: _Memo[str, float] = _Memo(lambda head: unix_of(f"{head}00"))

    def read(cell: str) -> float | None:
        text = _known(cell)
        if text is None:
            return None
        in_minute = _IN_MINUTE.fullmatch(text, 17) if text[16:17] == ":" else None
        return unix_of(text) if in_minute is None else minutes[text[:17]] + float(in_minute[0])

    return read


def unix_of(text: str) -> float:
    """Return the Unix seconds of `2026/01/31 23:59:59.123`, of an ISO time or of a number. Raises ValueError.

    Without a zone it is UTC: only differences matter.
    """
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
        yield (
            unix,
            LoggedGpu(row.uuid or f"GPU-{row.index}", row.index, row.name, row.memory_total_bytes),
            row.utilization,
            row.memory_used_bytes,
            row.temperature_celsius,
            row.power_watts,
            row.throttled,
        )
