# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A state machine against flapping: raised when a thing has held for a while, cleared when it has been away for one.

CLEAR --holds--> PENDING --held long enough--> RAISED --gone--> CLEARING --away long enough--> CLEAR
| gone: back to CLEAR                          | holds again: back to RAISED
"""

import msgspec

from verl_gpumonitor.model.enums import StrEnum


class AlertPhase(StrEnum):
    """Where an alert is."""

    CLEAR = "clear"
    PENDING = "pending"
    RAISED = "raised"
    CLEARING = "clearing"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """State of one alert."""

    phase: AlertPhase = AlertPhase.CLEAR
    since: float = 0.0
    """When this phase began."""
    seen: float = 0.0
    """When it was last judged."""

    @property
    def open(self) -> bool:
        """Whether it is shown."""
        return self.phase in (AlertPhase.RAISED, AlertPhase.CLEARING)


class Holds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How long a thing must hold, and be away."""

    raise_seconds: float
    clear_seconds: float
    unknown_seconds: float = 300.0
    """An open alert that nobody could judge for so long is cleared."""


def advance(alert: Alert, *, t: float, holds: bool | None, hold: Holds) -> Alert:
    """Take one judgement. `holds` None: it cannot be judged now, and time stands still. A `t` before the last is last.

    A pending alert that cannot be judged for `unknown_seconds` is dropped as well.
    """
    t = max(t, alert.seen)
    if holds is None:
        gone = alert.phase is not AlertPhase.CLEAR and t - alert.seen >= hold.unknown_seconds
        return Alert(phase=AlertPhase.CLEAR, since=t, seen=t) if gone else alert
    if holds:
        return _holding(alert, t, hold)
    return _away(alert, t, hold)


def _holding(alert: Alert, t: float, hold: Holds) -> Alert:
    if alert.open:
        since = alert.since if alert.phase is AlertPhase.RAISED else t
        return Alert(phase=AlertPhase.RAISED, since=since, seen=t)
    since = alert.since if alert.phase is AlertPhase.PENDING else t
    if t - since >= hold.raise_seconds:
        return Alert(phase=AlertPhase.RAISED, since=t, seen=t)
    return Alert(phase=AlertPhase.PENDING, since=since, seen=t)


def _away(alert: Alert, t: float, hold: Holds) -> Alert:
    if not alert.open:
        since = alert.since if alert.phase is AlertPhase.CLEAR else t
        return Alert(phase=AlertPhase.CLEAR, since=since, seen=t)
    since = alert.since if alert.phase is AlertPhase.CLEARING else t
    if t - since >= hold.clear_seconds:
        return Alert(phase=AlertPhase.CLEAR, since=t, seen=t)
    return Alert(phase=AlertPhase.CLEARING, since=since, seen=t)
