# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the cells of a log of GPUs mean: times, numbers with and without units, sizes, reasons of throttling. Pure.

What a cell does not know is None. What nobody can mean is refused and never made to fit: 500% is no share of time.
"""

import math
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Final, TypeVar

from verl_gpumonitor.reading import plausible

MIB: Final = 2**20
MAX_UNIX_SECONDS: Final = 1e11
"""Beyond the year 5000 a number is no count of seconds, but of thousandths or less."""
_UNKNOWN: Final = frozenset({"", "n/a", "na", "nan", "none", "null", "-", "not supported", "unknown", "err!"})
_MOST_WATTS: Final = plausible.MAX_POWER_MILLIWATTS / 1000
_NUMBER: Final = re.compile(r"\s*(-?\d+(?:[.,]\d+)?(?:[eE][+-]?\d+)?)\s*([%\w]*)\s*")
_DAY_FIRST: Final = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})\b")
_BYTES: Final = {"": MIB, "b": 1, "kib": 2**10, "mib": MIB, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_REMEMBERED: Final = 4096
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Memo(dict[_Key, _Value]):
    """What cells mean. They repeat: names and sizes in each row, load and temperature in most."""

    def __init__(self, read: Callable[[_Key], _Value]) -> None:
        """`read`: says what a cell means; it may raise ValueError."""
        super().__init__()
        self._read = read

    def __missing__(self, key: _Key) -> _Value:
        """Read a cell that was not met lately."""
        if len(self) >= _REMEMBERED:
            self.clear()
        value = self[key] = self._read(key)
        return value


def known(cell: str) -> str | None:
    """Return a cell's text; None where it says that nothing is known: `[N/A]`, `[GPU requires reset]`, `nan`."""
    text = cell.strip()
    return None if text.startswith("[") or text.lower() in _UNKNOWN else text


def number(cell: str) -> float | None:
    """Return a number, with or without a unit after it; None for an unknown one. Raises ValueError."""
    return _with_unit(cell)[0]


def percent(cell: str) -> float | None:
    """Return `85 %` as 0.85; None for an unknown one. Raises ValueError, also beyond 0..100."""
    return _within(cell, number(cell), plausible.percent, "share of time")


def ratio(cell: str) -> float | None:
    """Return a share that is written as 0..1. Raises ValueError."""
    value = number(cell)
    return _within(cell, None if value is None else 100 * value, plausible.percent, "share from 0 to 1")


def celsius(cell: str) -> float | None:
    """Return degrees; None for unknown ones. Raises ValueError, also for what silicon does not survive."""
    return _within(cell, number(cell), plausible.temperature, "temperature")


def watts(cell: str) -> float | None:
    """Return watts; None for unknown ones. Raises ValueError."""
    try:
        plain = float(cell.strip().removesuffix(" W"))  # the one value that differs in every row
    except ValueError:
        plain = math.nan
    if 0 <= plain <= _MOST_WATTS:
        return plain
    value = number(cell)
    return _within(cell, None if value is None else 1000 * value, plausible.power_watts, "power")


def size(cell: str, unit: str) -> int | None:
    """Return the bytes of a cell: by the unit in it, else in its title, else MiB as nvidia-smi's. Raises ValueError."""
    value, own = _with_unit(cell)
    if value is None:
        return None
    factor = _BYTES.get(own or unit)
    if factor is None or not 0 <= value * factor <= plausible.MAX_MEMORY_BYTES:
        raise ValueError(f"{cell.strip()[:40]!r} is no size of memory")
    return int(value * factor)


def _within(cell: str, value: float | None, check: Callable[[float], float | None], what: str) -> float | None:
    if value is None:
        return None
    found = check(value)
    if found is None:
        raise ValueError(f"{cell.strip()[:40]!r} is no {what}")
    return found


def _with_unit(cell: str) -> tuple[float | None, str]:
    """Return a number and its unit: `79872 MiB`, `85%`, `85,5` where that is how one writes it. Raises ValueError."""
    written, _, unit = cell.strip().partition(" ")
    try:
        value = float(written)  # nearly all cells are so, and there are millions of them
    except ValueError:
        value = math.nan
    if math.isfinite(value) and (unit in ("", "%") or unit.isalnum()):
        return value, unit.lower()
    text = known(cell)
    if text is None:
        return None, ""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no number")
    return float(match[1].replace(",", ".")), match[2].lower()


def reasons(cell: str) -> list[str] | None:
    """Return why clocks are held down: words as `gpumon log` writes them, or nvidia-smi's hexadecimal number.

    None for unknown ones. Raises ValueError.
    """
    text = known(cell)
    if text is None or not text.lower().startswith("0x"):
        return None if text is None else text.split()
    from verl_gpumonitor.reading.nvml.questions import reason_names  # It loads the binding, which few logs need.

    names = reason_names(int(text, 16))
    return None if names is None else list(names)


def clock() -> Callable[[str], float | None]:
    """Return a function that reads a cell with a time: Unix seconds, None for an unknown one. It may raise ValueError.

    Reading a date takes long, and has to be done once a minute.
    """
    minutes: Memo[str, float] = Memo(lambda head: unix_of(f"{head}00"))

    def read(cell: str) -> float | None:
        text = cell.strip()
        if text[16:17] == ":":
            try:
                seconds = float(text[17:])
            except ValueError:  # a zone follows
                return unix_of(text)
            if 0 <= seconds < 60:
                return minutes[text[:17]] + seconds
        return None if known(text) is None else unix_of(text)

    return read


def unix_of(text: str) -> float:
    """Return the Unix seconds of `2026/01/31 23:59:59.123`, `31.01.2026 23:59:59`, an ISO time or a number.

    Without a zone it is UTC: only differences matter. A number may be of milliseconds or less. Raises ValueError.
    """
    try:
        found = float(text)
    except ValueError:
        return date_of(text, zone=timezone.utc)
    return seconds_of(found)


def seconds_of(unix: float) -> float:
    """Return Unix seconds from seconds, milliseconds, micro- or nanoseconds: 1.8e12 are 1.8e9. Raises ValueError."""
    for factor in (1, 10**3, 10**6, 10**9):
        if 0 <= unix / factor < MAX_UNIX_SECONDS:
            return unix / factor
    raise ValueError(f"{unix:g} is no time")


def date_of(text: str, *, zone: timezone | None) -> float:
    """Return the Unix seconds of a date, with a time or without. Raises ValueError.

    `zone`: of one that names none; None is this machine's.
    """
    iso = _DAY_FIRST.sub(r"\3-\2-\1", text.strip()).replace("/", "-")
    iso = f"{iso[:-1]}+00:00" if iso.endswith("Z") else iso  # Python 3.10 knows no Z
    try:
        found = datetime.fromisoformat(iso)
        return (found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError, OSError):  # the last two: a year that this machine cannot count from
        raise ValueError(f"{text[:40]!r} is no time such as 2026/01/31 23:59:59") from None
