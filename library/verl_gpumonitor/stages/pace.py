# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""When to ask somebody whose answers cost him time: a share of one core, averaged over a minute. Pure.

What an answer took on the clock is taken for its cost; it is more than that only where he computes in parallel.
Half of the minute's budget is kept for questions that somebody hinted at.
"""

from typing import Final

SHARE: Final = 0.01
WINDOW_SECONDS: Final = 60.0
LEAST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 600.0
"""Whatever an answer takes, the next question is due by then."""


class Pace:
    """Counts the cost of past questions, and says when the next is due. Times are of a monotonic clock.

    With answers of 5 ms the next is due after 1 s; with answers of 0.3 s after 30 s, or at once after a hint while
    the minute's 0.6 s are not spent.
    """

    def __init__(self, now: float) -> None:
        self._budget = SHARE * WINDOW_SECONDS
        self._counted_at = now
        self._asked_at = now - LEAST_SECONDS
        self._cost = 0.0
        self._hinted = False

    def hint(self) -> None:
        """Say that something seems to have changed."""
        self._hinted = True

    def spend(self, begin: float, seconds: float) -> None:
        """Count a question that was asked at `begin` and took so long."""
        self._accrue(begin + seconds)
        self._asked_at = begin
        self._cost = seconds
        self._budget = max(self._budget - seconds, -SHARE * MOST_SECONDS)
        self._hinted = False

    def due_at(self) -> float:
        """Return when the next question is due."""
        full = SHARE * WINDOW_SECONDS
        needed = self._cost if self._hinted else min(full, full / 2 + self._cost)
        wait = max(0.0, min(needed, full) - self._budget) / SHARE
        return max(self._asked_at + LEAST_SECONDS, self._counted_at + min(wait, MOST_SECONDS))

    @property
    def seconds(self) -> float:
        """Time between two questions, nobody hinting."""
        return min(MOST_SECONDS, max(LEAST_SECONDS, self._cost / SHARE))

    def _accrue(self, now: float) -> None:
        self._budget = min(SHARE * WINDOW_SECONDS, self._budget + max(0.0, now - self._counted_at) * SHARE)
        self._counted_at = max(self._counted_at, now)
