# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Lines put in order of time before they are written. Pure.

What Ray tells of a task is known a moment after the task began, and a sample of a GPU is looked at a moment after it
was taken: lines wait for each other. One that comes later than that gets the time of the line before it.
"""

import heapq
from typing import Final

import msgspec

from verl_gpumonitor.model.trace import Record

HOLD_SECONDS: Final = 3.0
"""So long lines wait. Ray's State API, asked each second, is behind by some 1.5 s."""


class InOrder:
    """Takes lines in any order, and gives them back by time."""

    def __init__(self, hold_seconds: float = HOLD_SECONDS) -> None:
        """Nothing waits."""
        self._hold = hold_seconds
        self._waiting: list[tuple[float, int, Record]] = []
        self._count = 0
        self._last = 0.0

    def add(self, record: Record) -> None:
        """Take a line."""
        self._count += 1
        heapq.heappush(self._waiting, (record.t, self._count, record))

    def due(self, now: float) -> list[Record]:
        """Return the lines that have waited long enough, oldest first. `now`: in the trace's own time."""
        return self._until(now - self._hold)

    def rest(self) -> list[Record]:
        """Return all that still wait."""
        return self._until(float("inf"))

    def _until(self, t: float) -> list[Record]:
        found: list[Record] = []
        while self._waiting and self._waiting[0][0] <= t:
            record = heapq.heappop(self._waiting)[2]
            if record.t < self._last:
                record = msgspec.structs.replace(record, t=self._last)
            self._last = record.t
            found.append(record)
        return found
