# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""When to ask somebody whose answers cost him time: a share of one core, averaged over a minute. Pure.

What an answer costs is taken from what it took on the clock. On a busy machine most of that is waiting (5 ms and 600 ms
were seen in one minute), so that the quickest of the last few is taken. Half of the minute's budget is kept for
questions that somebody hinted at.
"""

from collections import deque
from typing import Final

SHARE: Final = 0.01
WINDOW_SECONDS: Final = 60.0
LEAST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 600.0
"""Whatever an answer takes, the next question is due by then."""
RECENT: Final = 8
"""Answers of which the quickest tells the cost."""
FEW: Final = 3
FIRST_COST_SECONDS: Final = 0.05
"""So many answers may all have been slow by chance: no more than this is then taken for the cost."""


class Pace:
    """Counts the cost of past questions, and says when the next is due. Times are of a monotonic clock.

    With answers of 5 ms the next is due after 1 s; with answers of 0.3 s after 30 s, or at once after a hint while
    the minute's 0.6 s are not spent.
    """

    def __init__(self, now: float) -> None:
        self._budget = SHARE * WINDOW_SECONDS
        self._counted_at = now
        self._asked_at = now - LEAST_SECONDS
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._hinted = False

    def hint(self) -> None:
        """Say that something seems to have changed."""
        self._hinted = True

    def spend(self, begin: float, seconds: float) -> None:
        """Count a question that was asked at `begin` and took so long."""
        self._accrue(begin + seconds)
        self._asked_at = begin
        self._recent.append(seconds)
        self._budget = max(self._budget - self.cost_seconds, -SHARE * MOST_SECONDS)
        self._hinted = False

    def due_at(self) -> float:
        """Return when the next question is due."""
        full = SHARE * WINDOW_SECONDS
        needed = self.cost_seconds if self._hinted else full / 2 + self.cost_seconds
        wait = max(0.0, min(needed, full) - self._budget) / SHARE
        return max(self._asked_at + LEAST_SECONDS, self._counted_at + min(wait, MOST_SECONDS))

    @property
    def seconds(self) -> float:
        """Time between two questions, nobody hinting."""
        return min(MOST_SECONDS, max(LEAST_SECONDS, self.cost_seconds / SHARE))

    @property
    def cost_seconds(self) -> float:
        """What one answer costs, as far as it is known."""
        quickest = min(self._recent, default=0.0)
        return quickest if len(self._recent) > FEW else min(quickest, FIRST_COST_SECONDS)

    def _accrue(self, now: float) -> None:
        self._budget = min(SHARE * WINDOW_SECONDS, self._budget + max(0.0, now - self._counted_at) * SHARE)
        self._counted_at = max(self._counted_at, now)
