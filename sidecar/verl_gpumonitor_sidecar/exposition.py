# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Prometheus's text format, as far as gauges and counters need it. Pure.

prometheus_client is not used here: it takes six times as long for the same page, and 2 MiB of memory. Its parser, and
promtool, hold this module to the format in the tests.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "gpumonitor_"

Number = float | int | None
Row = tuple[str, Number]
"""Labels of a series as `labels` returns them, and its value; None where that is not known."""


def labels(**named: str) -> str:
    """Return labels as they stand between a series' braces. More may be put behind them, after a comma."""
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in named.items()])


def gauge(name: str, text: str, rows: Iterable[Row]) -> str:
    """Return a family of values that may fall. What is unknown or not finite has no series.

    `name`: what follows our prefix; `text`: one line that tells what it is.
    """
    series = [
        f"{PREFIX}{name}{{{where}}} {number!r}\n" for where, number in rows if number is not None and isfinite(number)
    ]
    return _family(name, "gauge", text, series)


def counter(name: str, text: str, rows: Iterable[Row]) -> str:
    """Return a family of values that only rise; `name` is without its `_total`."""
    name += "_total"
    series = [
        f"{PREFIX}{name}{{{where}}} {number!r}\n"
        for where, number in rows
        if number is not None and number >= 0 and isfinite(number)
    ]
    return _family(name, "counter", text, series)


def _family(name: str, kind: str, text: str, series: list[str]) -> str:
    """Return the whole family; empty where it has no series."""
    if not series:
        return ""
    return f"# HELP {PREFIX}{name} {text}\n# TYPE {PREFIX}{name} {kind}\n{''.join(series)}"


def _escaped(value: str) -> str:
    text = str(value)  # Of an enumeration's member too: the word alone.
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return text
