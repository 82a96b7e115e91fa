# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A run over time in a fixed number of buckets, however long it is, filled as the record goes by. Pure.

Nobody knows beforehand how long a record is. Buckets begin with a second and are joined in pairs whenever they become
too many, so that a day of samples takes no more memory than an hour; and at the end once more until they are as wide as
samples are apart, so that none is empty only because the next sample was yet to come.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

MAX_BUCKETS: Final = 240
MAX_GAP_SECONDS: Final = 900.0
"""A sample speaks for the time since the one before, but not for more than this."""
_LATE: Final = 1.2
"""Samples may come so much later than they usually do."""
_USUAL_SHARE: Final = 0.9
"""Of all samples, so many are as far apart as they usually are, or less."""


class Bucket(msgspec.Struct, kw_only=True):
    """One GPU in one stretch of time. None: never known in it."""

    seconds: float = 0.0
    """Time that samples speak for."""
    known_seconds: float = 0.0
    """Of these, with known utilisation."""
    busy_seconds: float = 0.0
    memory_low_bytes: float | None = None
    memory_high_bytes: float | None = None
    powered_seconds: float = 0.0
    energy_joules: float = 0.0
    temperature_celsius: float | None = None
    """Highest."""
    stages: dict[str, float] = {}
    """Stage -> seconds of it."""

    @property
    def utilization(self) -> float | None:
        """Mean, 0..1."""
        return self.busy_seconds / self.known_seconds if self.known_seconds > 0 else None

    @property
    def stage(self) -> str | None:
        """The stage that takes most of it."""
        return max(self.stages, key=lambda stage: self.stages[stage], default=None)

    def join(self, other: "Bucket") -> "Bucket":
        """Return both as one."""
        stages = dict(self.stages)
        for stage, seconds in other.stages.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
        return Bucket(
            seconds=self.seconds + other.seconds,
            known_seconds=self.known_seconds + other.known_seconds,
            busy_seconds=self.busy_seconds + other.busy_seconds,
            memory_low_bytes=_of(min, self.memory_low_bytes, other.memory_low_bytes),
            memory_high_bytes=_of(max, self.memory_high_bytes, other.memory_high_bytes),
            powered_seconds=self.powered_seconds + other.powered_seconds,
            energy_joules=self.energy_joules + other.energy_joules,
            temperature_celsius=_of(max, self.temperature_celsius, other.temperature_celsius),
            stages=stages,
        )


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample says, and the stage it was in."""

    seconds: float
    """Time since the sample before."""
    stage: str
    utilization: float | None = None
    memory_used_bytes: float | None = None
    memory_peak_bytes: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None


class Axis:
    """The buckets' width, shared by all tracks of a run."""

    def __init__(self, *, max_buckets: int = MAX_BUCKETS) -> None:
        """Begin with a second."""
        self.width = 1.0
        self.end = 0.0
        self._max = max_buckets
        self._tracks: list[Track] = []
        self._apart: Counter[int] = Counter()
        """Widths as powers of two -> samples that need them."""

    def track(self) -> "Track":
        """Return a new track on this axis."""
        track = Track(self)
        self._tracks.append(track)
        return track

    def reach(self, t: float) -> int:
        """Return the bucket of a time, after making room for it."""
        self.end = max(self.end, t)
        while t >= self.width * self._max:
            self._widen()
        return int(t / self.width)

    def note(self, seconds: float) -> None:
        """Note how far a sample is from the one before."""
        if 0 < seconds <= MAX_GAP_SECONDS:
            self._apart[max(0, math.ceil(math.log2(_LATE * seconds)))] += 1

    def settle(self) -> None:
        """Make buckets at least as wide as samples are usually apart. Call it after the last sample."""
        count = self._apart.total()
        seen = 0
        for power in sorted(self._apart):
            seen += self._apart[power]
            if seen >= _USUAL_SHARE * count:
                while self.width < min(2.0**power, self.end):
                    self._widen()
                return

    def _widen(self) -> None:
        self.width *= 2
        for track in self._tracks:
            track.halve()


class Track:
    """One GPU's buckets."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._buckets: dict[int, Bucket] = {}

    def add(self, t: float, seen: Seen) -> None:
        """Take one sample."""
        number = self._axis.reach(t)
        self._axis.note(seen.seconds)
        bucket = self._buckets.setdefault(number, Bucket(stages={}))
        seconds = min(max(0.0, seen.seconds), MAX_GAP_SECONDS)
        bucket.seconds += seconds
        if seen.utilization is not None:
            bucket.known_seconds += seconds
            bucket.busy_seconds += seconds * seen.utilization
        if seen.power_watts is not None:
            bucket.powered_seconds += seconds
            bucket.energy_joules += seconds * seen.power_watts
        bucket.stages[seen.stage] = bucket.stages.get(seen.stage, 0.0) + seconds
        bucket.memory_low_bytes = _of(min, bucket.memory_low_bytes, seen.memory_used_bytes)
        for memory in (seen.memory_used_bytes, seen.memory_peak_bytes):
            bucket.memory_high_bytes = _of(max, bucket.memory_high_bytes, memory)
        bucket.temperature_celsius = _of(max, bucket.temperature_celsius, seen.temperature_celsius)

    def halve(self) -> None:
        """Join buckets in pairs."""
        joined: dict[int, Bucket] = {}
        for number, bucket in self._buckets.items():
            half = number // 2
            joined[half] = joined[half].join(bucket) if half in joined else bucket
        self._buckets = joined

    def __iter__(self) -> Iterator[tuple[float, Bucket]]:
        """Yield begin and bucket, oldest first; stretches without a sample are left out."""
        for number in sorted(self._buckets):
            yield number * self._axis.width, self._buckets[number]

    def total(self) -> Bucket:
        """Return the whole time as one bucket."""
        whole = Bucket(stages={})
        for bucket in self._buckets.values():
            whole = whole.join(bucket)
        return whole


def _of(which: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return which(one, other)
