# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The newest samples of one GPU, packed: 33 bytes each where objects would take 600. Pure.

One thread adds, another may read at the same time: each slot is packed and unpacked by one call, and what was
overwritten meanwhile is noticed and passed over.
"""

import math
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

_SLOT: Final = struct.Struct("<dBhHfqq")
SLOT_BYTES: Final = _SLOT.size
# What stands for unknown inside of a slot alone: a packed number has no None.
_NO_RATIO: Final = 255
_NO_TEMPERATURE: Final = -32768
_NO_REASONS: Final = 0xFFFF
_NO_BYTES: Final = -1
RATIO_STEPS: Final = 200
"""Load is kept in steps of half a percent: the driver tells it in whole ones, and a kept value is the mean of two."""
MAX_REASONS: Final = 15
"""Bits for reasons of throttling."""


class Kept(msgspec.Struct, frozen=True):
    """One sample as it is kept."""

    at: float
    """Of the monotonic clock."""
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_peak_bytes: int | None = None
    """Highest since the sample before."""
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttled: int | None = None
    """Bits of the reasons."""


class GpuRing:
    """So many samples; a new one takes the place of the oldest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots = bytearray(capacity * SLOT_BYTES)
        self.count = 0
        """Samples that were ever added."""

    @property
    def first(self) -> int:
        """Number of the oldest sample that may be read: the one before it is being overwritten, perhaps."""
        return max(0, self.count - self._capacity + 1)

    def add(self, kept: Kept) -> None:
        """Keep a sample."""
        load, heat, watts = kept.utilization, kept.temperature_celsius, kept.power_watts
        _SLOT.pack_into(
            self._slots,
            self.count % self._capacity * SLOT_BYTES,
            kept.at,
            _NO_RATIO if load is None else round(min(1.0, max(0.0, load)) * RATIO_STEPS),
            _NO_TEMPERATURE if heat is None else round(min(1000.0, max(-1000.0, heat))),
            _NO_REASONS if kept.throttled is None else kept.throttled,
            math.nan if watts is None else watts,
            _NO_BYTES if kept.memory_used_bytes is None else kept.memory_used_bytes,
            _NO_BYTES if kept.memory_peak_bytes is None else kept.memory_peak_bytes,
        )
        self.count += 1

    def oldest_at(self) -> float | None:
        """Return the time of the oldest sample; None while there is none."""
        return next((kept.at for kept in self.samples()), None)

    def samples(self) -> Iterator[Kept]:
        """Yield the samples that are there now, oldest first, without those that go while they are read."""
        number, end = self.first, self.count
        while number < end:
            slot = _SLOT.unpack_from(self._slots, number % self._capacity * SLOT_BYTES)
            if number < self.first:
                number = self.first
                continue
            yield _kept(slot)
            number += 1


def _kept(slot: tuple[float, int, int, int, float, int, int]) -> Kept:
    at, load, heat, reasons, watts, used, peak = slot
    return Kept(
        at,
        None if load == _NO_RATIO else load / RATIO_STEPS,
        None if used == _NO_BYTES else used,
        None if peak == _NO_BYTES else peak,
        None if math.isnan(watts) else round(watts, 1),
        None if heat == _NO_TEMPERATURE else float(heat),
        None if reasons == _NO_REASONS else reasons,
    )
