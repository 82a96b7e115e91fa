# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Times of a record: as people write them on a command line, as they are shown, and the hour at which one began."""

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Final

import click

_BEGAN: Final = "0:00 of it is "
_HOUR: Final = "%Y-%m-%dT%H:%M:%SZ"
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


def extent(end: float, *, begin: float | None = None) -> str:
    """Return how long a record is, or, with a begin, which part of it is meant."""
    return f"{clock(end)} recorded" if begin is None else f"{clock(begin)} to {clock(end)} of the record"


def began_note(unix: float) -> str:
    """Return the note by which a record tells the hour at which it began, as Kubernetes writes times."""
    return f"{_BEGAN}{datetime.fromtimestamp(unix, timezone.utc).strftime(_HOUR)}"


def tells_begin(note: str) -> bool:
    """Say whether a note is such a one. It is no shortcoming of the record, as the others are."""
    return note.startswith(_BEGAN)


def began_unix(notes: Iterable[str]) -> float | None:
    """Return the Unix seconds that such a note tells; None where there is none."""
    for note in notes:
        if tells_begin(note):
            try:
                began = datetime.strptime(note.removeprefix(_BEGAN), _HOUR)  # noqa: DTZ007 - the zone comes next
                return began.replace(tzinfo=timezone.utc).timestamp()
            except ValueError:
                return None
    return None


class Seconds(click.ParamType[float]):
    """A length of time."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Take a text such as `10m`."""
        try:
            return seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
