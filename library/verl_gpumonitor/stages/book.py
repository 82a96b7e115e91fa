# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Successive looks at what runs -> intervals of stages, and the span for which they are the whole word. Pure, bounded.

A look tells what runs at its moment. Begins are exact where the look brings them; an end is known to lie between the
last look that saw a thing and the first that did not. Where something else began in the same process meanwhile, that
is the end, for a process does one thing at a time; else the middle is taken.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

import msgspec

from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord

KEPT_SECONDS: Final = 180.0
"""What ended longer ago is forgotten; samples wait 60 s for their stage, and reports are late by less than the rest."""
MAX_ENDED: Final = 512
"""Of one place."""
MAX_RUNNING: Final = 256
"""At one place."""
MAX_PLACES: Final = 4096
MAX_OPEN: Final = 32_768
"""Running things at all places."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that runs at the moment of a look."""

    key: str
    """The same at each look while it is the same thing."""
    stage: str
    role: str
    place: str = ""
    """Node on which it runs; empty where there is but one."""
    begin: float | None = None
    """None: not told, thus between this look and the one before."""
    local_rank: int | None = None
    pid: int | None = None
    job: str = ""
    lane: str = ""
    """Things of one lane and place follow each other: the begin of one ends the other. What is in no lane (empty) is
    followed by whatever begins at its place."""


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How a source looks."""

    gap_seconds: float
    """Looks further apart may have missed whole stages: the word then begins anew."""
    lag_seconds: float = 0.0
    """How far what it sees is behind, on average; taken off begins and ends that are estimated."""
    settle_seconds: float = 0.0
    """Begins that it tells may be found so much later; the word ends so much before the last look."""


class _Open(msgspec.Struct, kw_only=True):
    thing: Running
    begin: float
    seen_at: float
    resolution: float


class Book:
    """Keeps the recent intervals of one source by place."""

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._known_from: float | None = None
        self._seen_at: float | None = None
        self._gap = manner.gap_seconds
        self._open: dict[tuple[str, str], _Open] = {}
        self._running: Counter[str] = Counter()
        """Number of the open ones by place."""
        self._ended: dict[str, deque[StageInterval]] = {}

    def look(self, at: float, running: Iterable[Running], *, whole: bool = True) -> bool:
        """Take what runs at `at`; says whether anything began or ended. A look that goes back in time is passed over.

        `whole`: false where there may be more than is told; then what is missing has not ended.
        """
        if self._seen_at is not None and at <= self._seen_at:
            if self._seen_at - at <= self._manner.gap_seconds:
                return False
            # The clock was set back; what was written down has no place in it.
            self.interrupt()
            self._ended.clear()
        before = self._chain(at)
        things = {(thing.place, thing.key): thing for thing in running}
        new = [(key, thing) for key, thing in things.items() if key not in self._open]
        gone = [key for key in self._open if key not in things] if whole else []
        began = self._begins(new, before, at)
        followers = _followers(began) if gone else {}
        for key in gone:
            self._running[key[0]] -= 1
            self._end(self._open.pop(key), followers, before, at)
        for (key, _), entry in zip(new, began, strict=True):
            self._admit(key, entry)
        for key in things.keys() & self._open.keys():
            entry = self._open[key]
            entry.seen_at, entry.resolution = at, self._gap
            if not entry.thing.job and things[key].job:
                # Whose work it is may be found later than that it runs.
                entry.thing = msgspec.structs.replace(entry.thing, job=things[key].job)
        self._forget(at)
        return bool(new or gone)

    def interrupt(self) -> None:
        """Say that the source is gone, or began anew: nothing is known until the next look."""
        if self._seen_at is not None:
            for entry in self._open.values():
                self._close(entry, entry.seen_at)
        self._open.clear()
        self._running.clear()
        self._known_from = self._seen_at = None

    @property
    def known(self) -> tuple[float, float] | None:
        """Span that is vouched for, at every place; None while there is none."""
        if self._known_from is None or self._seen_at is None:
            return None
        return self._known_from, max(self._known_from, self._seen_at - self._manner.settle_seconds)

    def places(self) -> list[str]:
        """Return where anything ran lately."""
        return list(dict.fromkeys([*self._ended, *(place for place, _ in self._open)]))

    def intervals(self, now: float, place: str = "") -> tuple[StageInterval, ...]:
        """Return what ran at a place and did not end before the span, by begin.

        What still runs has no end, but when the last look is too long ago.
        """
        first = self._known_from if self._known_from is not None else float("inf")
        ended = [interval for interval in self._ended.get(place, ()) if (interval.end or 0.0) >= first]
        stale = self._seen_at is None or now - self._seen_at > self._manner.gap_seconds
        running = [
            _interval(entry, entry.seen_at if stale else None)
            for (its_place, _), entry in self._open.items()
            if its_place == place
        ]
        return tuple(sorted(ended + running, key=lambda interval: interval.begin))

    def word(self, source: StageSource, now: float, place: str = "") -> StageWord:
        """Return the word on one place; its span is empty while nothing is vouched for."""
        known = self.known
        if known is None:
            return StageWord(source=source, known_from=now, known_until=now)
        return StageWord(source=source, known_from=known[0], known_until=known[1], intervals=self.intervals(now, place))

    def _chain(self, at: float) -> float | None:
        """Return when the look before was; None where it was too long ago, and the word begins here."""
        before, self._seen_at = self._seen_at, at
        if before is not None and at - before <= self._manner.gap_seconds:
            self._gap = at - before
            return before
        self._gap = self._manner.gap_seconds
        self._known_from = at
        return None

    def _begins(self, new: list[tuple[tuple[str, str], Running]], before: float | None, at: float) -> list[_Open]:
        estimate = at if before is None else self._between(before, at)
        return [
            _Open(
                thing=thing,
                begin=min(at, estimate if thing.begin is None else thing.begin),
                seen_at=at,
                resolution=self._gap,
            )
            for _, thing in new
        ]

    def _between(self, before: float, at: float) -> float:
        """Return when something happened that one look did not see and the next did. Not where the word had passed."""
        return max(before - self._manner.settle_seconds, (before + at) / 2 - self._manner.lag_seconds)

    def _admit(self, key: tuple[str, str], entry: _Open) -> None:
        if len(self._open) < MAX_OPEN and self._running[key[0]] < MAX_RUNNING:
            self._open[key] = entry
            self._running[key[0]] += 1

    def _end(
        self, entry: _Open, followers: dict[tuple[str, str | None], list[float]], before: float | None, at: float
    ) -> None:
        if before is None:
            # It ended in a time in which nobody looked.
            self._close(entry, entry.seen_at)
            return
        first = max(entry.begin, before - self._manner.settle_seconds)
        begins = followers.get((entry.thing.place, entry.thing.lane or None), ())
        next_begin = min((begin for begin in begins if first < begin <= at), default=None)
        self._close(entry, self._between(before, at) if next_begin is None else next_begin)

    def _close(self, entry: _Open, end: float) -> None:
        place = entry.thing.place
        if place not in self._ended and len(self._ended) >= MAX_PLACES:
            return
        ended = self._ended.setdefault(place, deque(maxlen=MAX_ENDED))
        ended.append(_interval(entry, max(entry.begin, end)))

    def _forget(self, at: float) -> None:
        for place in list(self._ended):
            ended = self._ended[place]
            while ended and (ended[0].end or 0.0) < at - KEPT_SECONDS:
                ended.popleft()
            if not ended:
                del self._ended[place]
        if len(self._running) > MAX_PLACES:
            self._running = +self._running


def _followers(began: Iterable[_Open]) -> dict[tuple[str, str | None], list[float]]:
    """Return the begins by place and lane, and by place alone, for what is in no lane."""
    found: dict[tuple[str, str | None], list[float]] = {}
    for entry in began:
        for lane in {entry.thing.lane or None, None}:
            found.setdefault((entry.thing.place, lane), []).append(entry.begin)
    return found


def _interval(entry: _Open, end: float | None) -> StageInterval:
    thing = entry.thing
    return StageInterval(
        stage=thing.stage,
        role=thing.role,
        begin=entry.begin,
        end=end,
        local_rank=thing.local_rank,
        pid=thing.pid,
        job=thing.job,
        resolution_seconds=round(entry.resolution, 3),
    )
