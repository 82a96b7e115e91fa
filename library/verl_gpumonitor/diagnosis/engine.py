# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Windows of a workload's GPUs in, findings with a life out. State and time are arguments; nothing is kept here."""

from collections.abc import Mapping, Sequence

import msgspec

from verl_gpumonitor.model.findings import Finding, GpuWindow, Scope, TrackedFinding

from .health import REASONS
from .hysteresis import Alert, AlertPhase, Holds, advance
from .imbalance import REASON as IMBALANCE
from .imbalance import imbalance
from .limits import DiagnosisLimits
from .oom import oom_risk
from .pools import Verdict

Key = tuple[str, str, str]
"""Reason, pool, metric: one problem."""
_RESUMED = ("*", "*")
"""Pool and metric of a finding that is known from before a restart, by its reason alone."""


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One problem that is, or may soon be, open."""

    alert: Alert
    finding: Finding
    first_seen: float
    last_seen: float

    def tracked(self, resolved: float | None = None) -> TrackedFinding:
        """Return it as others see it."""
        return TrackedFinding(
            finding=self.finding, first_seen=self.first_seen, last_seen=self.last_seen, resolved=resolved
        )


class DiagnosisState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a workload's problems so far."""

    tracks: dict[Key, Track] = {}

    @property
    def open(self) -> list[TrackedFinding]:
        """Findings that are open, in the order in which they were raised."""
        found = [track.tracked() for track in self.tracks.values() if track.alert.open]
        return sorted(found, key=lambda tracked: (tracked.first_seen, tracked.finding.reason))


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What one look brought."""

    state: DiagnosisState
    raised: Sequence[TrackedFinding] = ()
    """Opened by this look."""
    resolved: Sequence[TrackedFinding] = ()
    """Ended by this look."""


def verdicts(gpus: Sequence[GpuWindow], limits: DiagnosisLimits) -> list[Verdict]:
    """Ask all rules."""
    return [*oom_risk(gpus, limits.oom_risk), *imbalance(gpus, limits.imbalance)]


def diagnose(gpus: Sequence[GpuWindow], limits: DiagnosisLimits) -> list[Finding]:
    """Return what the rules find in this window alone, without regard to how long it has held."""
    return [verdict.finding for verdict in verdicts(gpus, limits) if verdict.finding is not None]


def judge(before: DiagnosisState, gpus: Sequence[GpuWindow], *, t: float, limits: DiagnosisLimits) -> Judgement:
    """Take one look at a workload. `t` in seconds of any clock that does not run back."""
    said = {(v.reason, v.pool, v.metric): v for v in verdicts(gpus, limits)}
    tracks: dict[Key, Track] = {}
    raised: list[TrackedFinding] = []
    resolved: list[TrackedFinding] = []
    for key in [*before.tracks, *(key for key in said if key not in before.tracks)]:
        old = _known(before, key, said.get(key))
        new = _advanced(old, key, said, t=t, limits=limits)
        if new is not None and new.alert.phase is not AlertPhase.CLEAR:
            tracks[key] = new
        was_open = old is not None and old.alert.open
        if new is not None and new.alert.open and not was_open:
            raised.append(new.tracked())
        elif old is not None and was_open and key not in tracks and not _taken_over(key, said):
            resolved.append(old.tracked(resolved=t))
    return Judgement(state=DiagnosisState(tracks=tracks), raised=raised, resolved=resolved)


def resume(reasons: Mapping[str, str], *, t: float) -> DiagnosisState:
    """Begin with findings that were open before a restart: reason -> message. Unknown reasons are passed over.

    They stay open until they are judged: what still holds goes on without being raised again, the rest is resolved
    after the usual time.
    """
    tracks = {
        (reason, *_RESUMED): Track(
            alert=Alert(phase=AlertPhase.RAISED, since=t, seen=t),
            finding=Finding(reason=reason, severity=REASONS[reason].severity, scope=Scope(), message=message),
            first_seen=t,
            last_seen=t,
        )
        for reason, message in reasons.items()
        if reason in REASONS
    }
    return DiagnosisState(tracks=tracks)


def _known(before: DiagnosisState, key: Key, verdict: Verdict | None) -> Track | None:
    """Return the track of this problem; for one that begins to hold, that of its reason from before a restart."""
    own = before.tracks.get(key)
    if own is None and verdict is not None and verdict.finding is not None:
        return before.tracks.get((key[0], *_RESUMED))
    return own


def _taken_over(key: Key, said: Mapping[Key, Verdict]) -> bool:
    """Say whether a problem known by its reason alone is now known in full."""
    return key[1:] == _RESUMED and any(v.reason == key[0] and v.finding is not None for v in said.values())


def _advanced(
    old: Track | None, key: Key, said: Mapping[Key, Verdict], *, t: float, limits: DiagnosisLimits
) -> Track | None:
    """Return the problem after this look; None where there is none."""
    if _taken_over(key, said):
        return None
    verdict = said.get(key)
    finding = None if verdict is None else verdict.finding
    if old is None and finding is None:
        return None
    alert = advance(
        Alert(since=t, seen=t) if old is None else old.alert,
        t=t,
        holds=_holds(key, said),
        hold=_hold_of(key[0], limits),
    )
    kept = finding or (None if old is None else old.finding)
    if kept is None:
        return None
    newly = alert.open and (old is None or not old.alert.open)
    return Track(
        alert=alert,
        finding=kept,
        first_seen=t if old is None or newly else old.first_seen,
        last_seen=t if finding is not None or old is None else old.last_seen,
    )


def _holds(key: Key, said: Mapping[Key, Verdict]) -> bool | None:
    """Say whether the problem holds; None where no rule could judge it."""
    if key[1:] == _RESUMED:
        return False if any(v.reason == key[0] for v in said.values()) else None
    verdict = said.get(key)
    return None if verdict is None else verdict.finding is not None


def _hold_of(reason: str, limits: DiagnosisLimits) -> Holds:
    return limits.imbalance.hold if reason == IMBALANCE else limits.oom_risk.hold
