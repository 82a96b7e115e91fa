# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Intervals that a source tells again and again -> each begin and each end once. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from verl_gpumonitor.model.stages import StageInterval

_Key = tuple[str, str, int | None, float]


class Change(NamedTuple):
    """An interval began or ended."""

    interval: StageInterval
    state: str
    """`begin` or `end`."""
    at: float
    """Unix seconds."""


class Spans:
    """Remembers which begins and ends were told."""

    def __init__(self) -> None:
        """Nothing was told."""
        self._running: dict[_Key, StageInterval] = {}
        self._over: set[_Key] = set()

    def look(self, intervals: Iterable[StageInterval], now: float) -> list[Change]:
        """Return what is new. `now`: Unix time, the end of whatever is not told of any more."""
        told = {_key(interval): interval for interval in intervals}
        changes = [self._vanish(key, now) for key in self._running.keys() - told.keys()]
        self._over &= told.keys()
        for key, interval in told.items():
            if key in self._over:
                continue
            if key not in self._running:
                self._running[key] = interval
                changes.append(Change(interval, "begin", interval.begin))
            if interval.end is not None:
                # The rank as it was told at the begin, so that the two belong together.
                changes.append(Change(self._running.pop(key), "end", interval.end))
                self._over.add(key)
        return sorted(changes, key=lambda change: change.at)

    def _vanish(self, key: _Key, now: float) -> Change:
        return Change(self._running.pop(key), "end", now)


def _key(interval: StageInterval) -> _Key:
    return interval.stage, interval.role, interval.pid, interval.begin
