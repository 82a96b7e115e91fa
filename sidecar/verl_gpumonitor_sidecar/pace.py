# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""When the next report is due. Pure: time and chance are arguments."""

from collections.abc import Callable
from typing import Final

import msgspec

JITTER: Final = 0.1
"""Share by which an interval is lengthened or shortened, so that ten thousand sidecars do not fall into step."""
FIRST: Final = 0.2
"""Share of an interval in which the first report goes out: within 3 s, so that a job is soon seen."""
URGENT_SECONDS: Final = 5.0
"""Shortest time between a report and an urgent one."""
NOTHING_YET_SECONDS: Final = 1.0
BACK_OFF_SECONDS: Final = 1.0
MAX_BACK_OFF_SECONDS: Final = 60.0
MAX_RETRY_AFTER_SECONDS: Final = 600.0

Chance = Callable[[], float]
"""A number from 0 up to 1, 1 left out."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """State of the schedule."""

    interval_seconds: float
    due_at: float
    attempted_at: float | None = None
    """When the last attempt ended, whatever came of it."""
    failures: int = 0
    """Attempts in a row to which no useful answer came."""


def begin(interval_seconds: float, *, now: float, chance: Chance) -> Pace:
    """Schedule the first report."""
    return Pace(interval_seconds=interval_seconds, due_at=now + FIRST * interval_seconds * chance())


def answered(pace: Pace, *, now: float, chance: Chance, interval_seconds: float | None = None) -> Pace:
    """Schedule the next report after an answer that settled the last one, be it accepted or refused for good.

    `interval_seconds`: what the answer asks for; None keeps the present interval.
    """
    interval = interval_seconds or pace.interval_seconds
    due_at = now + interval * (1 - JITTER + 2 * JITTER * chance())
    return Pace(interval_seconds=interval, due_at=due_at, attempted_at=now)


def nothing_yet(pace: Pace, *, now: float) -> Pace:
    """Look again in a second, since there is nothing to report yet."""
    return msgspec.structs.replace(pace, due_at=now + NOTHING_YET_SECONDS)


def failed(pace: Pace, *, now: float, chance: Chance, retry_after_seconds: float | None = None) -> Pace:
    """Schedule the retry: exponential back-off with full jitter, and never before the controller asks for it.

    Example: after the third failure in a row it is due somewhere in the next 4 s.
    """
    limit = min(MAX_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2.0 ** min(pace.failures, 16))
    wait = max(BACK_OFF_SECONDS / 4, limit * chance())
    if retry_after_seconds is not None:
        wait += min(retry_after_seconds, MAX_RETRY_AFTER_SECONDS)
    return msgspec.structs.replace(pace, due_at=now + wait, attempted_at=now, failures=pace.failures + 1)


def urgent(pace: Pace, *, now: float) -> Pace:
    """Bring the next report forward, since something happened that must not wait.

    A back-off is kept: a controller in trouble gets no more reports for it.
    """
    if pace.failures:
        return pace
    earliest = now if pace.attempted_at is None else max(now, pace.attempted_at + URGENT_SECONDS)
    return msgspec.structs.replace(pace, due_at=min(pace.due_at, earliest))
