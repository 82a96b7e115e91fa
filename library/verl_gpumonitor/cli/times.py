# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Lengths of time as people write them on a command line."""

import re
from typing import Final

import click

_UNITS: Final = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_CLOCK: Final = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2}(?:\.\d+)?)")


def seconds(text: str) -> float:
    """Return the seconds of `90`, `10m`, `1h30m` or `1:02:03`. Raises ValueError."""
    stripped = text.strip().lower()
    found = _CLOCK.fullmatch(stripped) or _UNITS.fullmatch(stripped)
    if found is None or not any(found.groups()):
        raise ValueError(f"{text!r} is no time: write seconds, or such as 10m, 1h30m, 1:02:03")
    hours, minutes, rest = (float(part or 0.0) for part in found.groups())
    return 3600.0 * hours + 60.0 * minutes + rest


def clock(seconds: float) -> str:
    """Return a time of the record as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Seconds(click.ParamType[float]):
    """A length of time."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Take a text such as `10m`."""
        try:
            return seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
