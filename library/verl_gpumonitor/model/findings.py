# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the diagnosis looks at, and what it finds."""

from typing import Final

import msgspec

from .vocabulary import Severity

MAX_SCOPE: Final = 16
"""Pods and GPUs that a finding names at most, the worst first."""

Evidence = dict[str, str | int | float | list[float]]


class GpuWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU over the last report interval. What is unknown is None, and no rule counts it."""

    pod: str
    uuid: str
    index: int | None = None
    """For display."""
    pool: str = ""
    """GPUs that do the same work, such as a Ray worker group: only they may be compared with each other."""
    utilization: float | None = None
    """Mean over the window, 0..1. Not the newest sample: pods report at different moments of a stage."""
    memory_used_bytes: int | None = None
    memory_peak_bytes: int | None = None
    """Highest in the recent past (60 s)."""
    memory_total_bytes: int | None = None

    @property
    def memory_ratio(self) -> float | None:
        """Peak, or else present memory, as a share of the GPU's own."""
        used = self.memory_used_bytes if self.memory_peak_bytes is None else self.memory_peak_bytes
        if used is None or not self.memory_total_bytes:
            return None
        return used / self.memory_total_bytes


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a finding is about: the odd ones, not all."""

    pods: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """UUIDs."""
    stage: str | None = None
    role: str | None = None
    ranks: tuple[int, ...] = ()
    """Ranks, where known: the local ones of a pod."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One change that a person could make about a finding."""

    parameter: str | None
    """Full dotted key of verl's configuration, as this version of verl calls it. None: no setting, something to do."""
    current: str | None = None
    """Present value, where the command line shows it or verl's default is known."""
    suggested: str | None = None
    """New value. None: it depends on what cannot be seen, and `text` says on what."""
    text: str
    """What to do and why, in a sentence or two."""
    reason: str = ""
    """What of the evidence leads to it."""
    price: str = ""
    """What it costs: time, memory elsewhere, or a change of what is learnt."""
    confidence: str = "medium"
    """`high`, `medium` or `low`."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, as seen now."""

    reason: str
    """`OOMRisk`, `Imbalance`, ...: the table in `diagnosis.health`."""
    severity: Severity
    scope: Scope
    message: str
    """One sentence a person can act on."""
    evidence: Evidence = {}
    advice: tuple[Advice, ...] = ()
    """The best first; empty until someone who knows the settings was asked."""


class TrackedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding over its life. Times are of whoever asks, in seconds."""

    finding: Finding
    """As it was last seen."""
    first_seen: float
    """When it was raised."""
    last_seen: float
    """When it last held."""
    resolved: float | None = None
    """When it ended; None while it is open."""
