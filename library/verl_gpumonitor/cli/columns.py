# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The columns of a log, named as nvidia-smi's query names them, and the same values as JSON in base units. Pure.

A value that is unknown is an empty cell in CSV and no key in JSON.
"""

import csv
import io
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Final

import msgspec

from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.vocabulary import GpuState

Value = str | int | float | list[str] | None
MIB: Final = 2**20


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column. `shown` and `plain` get the GPU's sample; the time is put in by the row itself."""

    name: str
    """As `nvidia-smi --query-gpu=` takes it."""
    title: str
    """As nvidia-smi writes it into the head of its CSV, unit included."""
    key: str
    """Key in JSON: the unit is in the name, and it is a base unit."""
    shown: Callable[[GpuSample], Value]
    """Value for CSV, in the title's unit."""
    plain: Callable[[GpuSample], Value]
    """Value for JSON."""


def _percent(ratio: float | None) -> int | None:
    return None if ratio is None else round(100 * ratio)


def _mebibytes(size: int | None) -> int | None:
    return None if size is None else size // MIB


def _free(gpu: GpuSample) -> int | None:
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return None
    return max(0, gpu.memory_total_bytes - gpu.memory_used_bytes - (gpu.memory_reserved_bytes or 0))


def _ratio(name: str, key: str, value: Callable[[GpuSample], float | None]) -> Column:
    return Column(name=name, title=f"{name} [%]", key=key, shown=lambda gpu: _percent(value(gpu)), plain=value)


def _memory(name: str, key: str, value: Callable[[GpuSample], int | None]) -> Column:
    return Column(name=name, title=f"{name} [MiB]", key=key, shown=lambda gpu: _mebibytes(value(gpu)), plain=value)


def _watts(name: str, key: str, value: Callable[[GpuSample], float | None]) -> Column:
    def shown(gpu: GpuSample) -> float | None:
        watts = value(gpu)
        return None if watts is None else round(watts, 2)

    return Column(name=name, title=f"{name} [W]", key=key, shown=shown, plain=value)


def _same(name: str, key: str, value: Callable[[GpuSample], Value]) -> Column:
    return Column(name=name, title=name, key=key, shown=value, plain=value)


def _throttled(gpu: GpuSample) -> list[str] | None:
    return None if gpu.throttled is None else list(gpu.throttled)


TIMESTAMP: Final = "timestamp"
COLUMNS: Final[dict[str, Column]] = {
    column.name: column
    for column in (
        _same("index", "index", lambda gpu: gpu.index),
        _same("name", "name", lambda gpu: gpu.model),
        _same("uuid", "uuid", lambda gpu: gpu.uuid),
        _same("temperature.gpu", "temperature_celsius", lambda gpu: gpu.temperature_celsius),
        _same("temperature.memory", "memory_temperature_celsius", lambda gpu: gpu.memory_temperature_celsius),
        _ratio("utilization.gpu", "utilization", lambda gpu: gpu.utilization),
        _ratio("utilization.memory", "memory_bandwidth_utilization", lambda gpu: gpu.memory_bandwidth_utilization),
        _memory("memory.used", "memory_used_bytes", lambda gpu: gpu.memory_used_bytes),
        _memory("memory.free", "memory_free_bytes", _free),
        _memory("memory.reserved", "memory_reserved_bytes", lambda gpu: gpu.memory_reserved_bytes),
        _memory("memory.total", "memory_total_bytes", lambda gpu: gpu.memory_total_bytes),
        _watts("power.draw", "power_watts", lambda gpu: gpu.power_watts),
        _watts("power.limit", "power_limit_watts", lambda gpu: gpu.power_limit_watts),
        Column(
            name="clocks_event_reasons.active",
            title="clocks_event_reasons.active",
            key="throttled",
            shown=lambda gpu: None if gpu.throttled is None else " ".join(gpu.throttled),
            plain=_throttled,
        ),
        _same(
            "ecc.errors.uncorrected.volatile.total", "ecc_uncorrected_errors", lambda gpu: gpu.ecc_uncorrected_errors
        ),
        _same(
            "state", "state", lambda gpu: None if gpu.state is GpuState.OK else f"{gpu.state} {gpu.error or ''}".strip()
        ),
    )
}
"""All columns but the time, by name. `state` is our own: empty while the GPU answers, else what became of it."""

DEFAULT: Final = (
    TIMESTAMP,
    "index",
    "name",
    "temperature.gpu",
    "utilization.gpu",
    "utilization.memory",
    "memory.used",
    "memory.total",
)


class FieldsError(ValueError):
    """A column that is not known; the text lists those that are."""


def chosen(names: str | None) -> tuple[str, ...]:
    """Return the columns of a comma-separated list, in its order; the usual ones for None. Raises FieldsError.

    A name that begins with `+` is added to the usual ones: `+power.draw,+uuid`.
    """
    if names is None:
        return DEFAULT
    asked = [name.strip() for name in names.split(",") if name.strip()]
    added = [name.removeprefix("+") for name in asked]
    unknown = [name for name in added if name not in COLUMNS and name != TIMESTAMP]
    if unknown or not asked:
        known = ", ".join((TIMESTAMP, *COLUMNS))
        raise FieldsError(f"unknown field {unknown[0] if unknown else ''!r}; known are: {known}")
    if all(name.startswith("+") for name in asked):
        return (*DEFAULT, *(name for name in added if name not in DEFAULT))
    return tuple(dict.fromkeys(added))


def head(names: Sequence[str]) -> str:
    """Return the first line of a CSV file."""
    return _line([TIMESTAMP if name == TIMESTAMP else COLUMNS[name].title for name in names])


def csv_row(gpu: GpuSample, names: Sequence[str], *, unix: float) -> str:
    """Return one GPU as a line of CSV, line end included."""
    return _line([timestamp(unix) if name == TIMESTAMP else _cell(COLUMNS[name].shown(gpu)) for name in names])


def json_row(gpu: GpuSample, names: Sequence[str], *, unix: float) -> bytes:
    """Return one GPU as a line of JSON, line end included. Time is `t`, Unix seconds, beside the readable one."""
    values: dict[str, Value] = {}
    for name in names:
        if name == TIMESTAMP:
            values |= {"timestamp": timestamp(unix), "t": round(unix, 3)}
        elif (value := COLUMNS[name].plain(gpu)) is not None:
            values[COLUMNS[name].key] = value
    return msgspec.json.encode(values) + b"\n"


def timestamp(unix: float) -> str:
    """Return a time as nvidia-smi writes it, in UTC: `2026/01/31 23:59:59.123`."""
    return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
