# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Rates that callers may not exceed: token buckets, one alone or one for each key, and whom to leave alone for a while.

Pure; time is an argument.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rate:
    """At most `burst` at once and `per_second` in the long run. Both above zero."""

    burst: float
    per_second: float


class Bucket:
    """A token bucket. It starts full."""

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._level = rate.burst
        self._at = now

    def wait(self, now: float) -> float:
        """Return the seconds until there is a token; 0.0 if there is one at `now`. Nothing is taken."""
        # A clock that was set back gives nothing, and takes nothing away.
        self._level = min(self._rate.burst, self._level + max(0.0, now - self._at) * self._rate.per_second)
        self._at = now
        return max(0.0, (1.0 - self._level) / self._rate.per_second)

    def take(self, now: float) -> float:
        """Take one token at `now`.

        Returns 0.0 if there was one, else the seconds until there will be; nothing is taken then.
        """
        wait = self.wait(now)
        if wait == 0.0:
            self._level -= 1.0
        return wait


class KeyedBuckets:
    """One bucket for each key, for at most `capacity` keys; the key unused for longest is forgotten first."""

    def __init__(self, rate: Rate, *, capacity: int) -> None:
        self._rate = rate
        self._capacity = capacity
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now: float) -> float:
        """Take one token of this key; see `Bucket.take`."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(self._rate, now)
            if len(self._buckets) > self._capacity:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket.take(now)


class Refusals:
    """Keys, such as namespaces, that refused several times in a row and are left alone for a while then.

    One refusal may be about one object. After `after` of them with nothing taken in between, it is about the key; and
    when the rest is over, one more is enough.
    """

    def __init__(self, *, after: int, rest_seconds: float, capacity: int) -> None:
        self._after = after
        self._rest_seconds = rest_seconds
        self._capacity = capacity
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Refusals in a row, and the end of the rest."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._seen)

    def rests(self, key: str, now: float) -> bool:
        """Whether a key is to be left alone."""
        return self._seen.get(key, (0, now))[1] > now

    def refused(self, key: str, now: float) -> None:
        """Take note that a key refused."""
        count = self._seen.get(key, (0, now))[0] + 1
        self._seen[key] = (count, now + self._rest_seconds if count >= self._after else now)
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def taken(self, key: str) -> None:
        """Take note that a key did not refuse."""
        self._seen.pop(key, None)
