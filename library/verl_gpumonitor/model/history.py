# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a GPU: what one stage of one step did on it, and the last minutes in samples. Pure.

These are the rules' food. Whoever has samples (a trace) adds them up here; whoever has finished steps (a controller,
from reports) makes the pieces at once.
"""

from typing import Final

import msgspec

IDLE_UTILIZATION: Final = 0.05
"""Below this nobody computes: a stray kernel of a health check or of the collector itself is less."""


class Piece(msgspec.Struct, kw_only=True, gc=False):
    """One stage of one step on one GPU. What could not be read is None. It grows until the step ends."""

    stage: str
    role: str
    step: int
    """Counted from 0 by whoever watches, not verl's number."""
    begin: float
    end: float
    seconds: float = 0.0
    """Time for which the GPU was seen in it."""
    known_seconds: float = 0.0
    """Of these, those whose utilisation is known."""
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Time with utilisation below IDLE_UTILIZATION."""
    powered_seconds: float = 0.0
    """Time for which power is known."""
    energy_joules: float = 0.0
    peak_bytes: float | None = None
    """Highest memory in use; only of spans that lay wholly in this stage."""
    floor_bytes: float | None = None
    throttled_seconds: float = 0.0
    """Time in which heat or power brakes held the clocks down."""
    throttle_known_seconds: float = 0.0

    @property
    def utilization(self) -> float | None:
        """Mean, 0..1; None where it was never known."""
        return self.busy_seconds / self.known_seconds if self.known_seconds > 0 else None

    @property
    def power_watts(self) -> float | None:
        """Mean power; None where it was never known."""
        return self.energy_joules / self.powered_seconds if self.powered_seconds > 0 else None

    @property
    def idle_ratio(self) -> float | None:
        """Share of the time in which the GPU did nothing."""
        return self.idle_seconds / self.known_seconds if self.known_seconds > 0 else None

    @property
    def throttled_ratio(self) -> float | None:
        """Share of the time in which clocks were held down by heat or a power brake."""
        return self.throttled_seconds / self.throttle_known_seconds if self.throttle_known_seconds > 0 else None


class Sample(msgspec.Struct, frozen=True, gc=False):
    """What one line said of one GPU, and the stage it was in at that moment."""

    t: float
    seconds: float
    """Since the line before; 0 after a gap."""
    stage: str
    utilization: float | None
    power_watts: float | None
    memory_used_bytes: float | None
    tensor_active: float | None
    sm_active: float | None
