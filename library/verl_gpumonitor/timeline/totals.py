# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What adds up of a GPU in one stage."""

from typing import Final

import msgspec

from verl_gpumonitor.model.vocabulary import UNKNOWN

from .words import OTHER, Part

Key = tuple[str, str, str]
"""Job, stage, role."""
OVERFLOW: Final[Key] = ("", OTHER, UNKNOWN)
"""Where stages go for which there is no more room."""


class Totals:
    """What added up in one stage."""

    __slots__ = (
        *("busy_seconds", "energy_joules", "engine_floor_bytes", "engine_peak_bytes", "memory_floor_bytes"),
        *("memory_peak_bytes", "observed_seconds", "throttled_seconds"),
    )

    def __init__(self) -> None:
        self.observed_seconds = 0.0
        self.busy_seconds = 0.0
        self.energy_joules: float | None = None
        self.throttled_seconds: float | None = None
        self.memory_peak_bytes: int | None = None
        self.memory_floor_bytes: int | None = None
        self.engine_peak_bytes: int | None = None
        """Most and least that processes of a rollout engine held, as far as they were listed."""
        self.engine_floor_bytes: int | None = None

    def add(self, *, observed: float, busy: float, energy: float | None, throttled: float | None = None) -> None:
        """Add a share of a piece; None: it is not known."""
        self.observed_seconds += observed
        self.busy_seconds += busy
        if energy is not None:
            self.energy_joules = (self.energy_joules or 0.0) + energy
        if throttled is not None:
            self.throttled_seconds = (self.throttled_seconds or 0.0) + throttled

    def take(self, share: "Share") -> None:
        """Add what a GPU did in a part of the time."""
        self.add(
            observed=share.observed_seconds,
            busy=share.busy_seconds,
            energy=share.energy_joules,
            throttled=share.throttled_seconds,
        )
        for used in share.memory:
            self.see(used)
        self.list_engine(share.engine_bytes)

    def see(self, used: int) -> None:
        """Take in a reading of memory."""
        self.memory_peak_bytes = used if self.memory_peak_bytes is None else max(used, self.memory_peak_bytes)
        self.memory_floor_bytes = used if self.memory_floor_bytes is None else min(used, self.memory_floor_bytes)

    def list_engine(self, held: int | None) -> None:
        """Take in what an engine's processes were seen to hold; None: no list was read."""
        if held is not None:
            self.engine_peak_bytes = max(held, self.engine_peak_bytes or 0)
            self.engine_floor_bytes = held if self.engine_floor_bytes is None else min(held, self.engine_floor_bytes)

    def join(self, other: "Totals") -> None:
        """Add another's."""
        self.add(
            observed=other.observed_seconds,
            busy=other.busy_seconds,
            energy=other.energy_joules,
            throttled=other.throttled_seconds,
        )
        for used in (other.memory_peak_bytes, other.memory_floor_bytes):
            if used is not None:
                self.see(used)
        for held in (other.engine_peak_bytes, other.engine_floor_bytes):
            self.list_engine(held)


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU did in a part of the time, as it is counted now."""

    uuid: str
    part: Part
    observed_seconds: float
    busy_seconds: float
    energy_joules: float | None
    throttled_seconds: float | None = None
    memory: tuple[int, ...] = ()
    engine_bytes: int | None = None
    """What processes of a rollout engine held, if a list of processes was read in it."""
