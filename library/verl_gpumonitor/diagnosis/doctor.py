# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The engine: lines of one workload in, findings with a life out. Pure; the lines' own times are its only clock.

A rule says what holds now. The engine keeps a problem from flapping (it must hold, and be away, for a while), opens
the same finding again when it comes back within the cool-down, and leaves out what another open finding explains.
"""

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import msgspec

from verl_gpumonitor.model.findings import Finding, TrackedFinding
from verl_gpumonitor.model.trace import Header, Record, XidLine

from .explanations import explained_by
from .history import History
from .hysteresis import Alert, AlertPhase, advance
from .rule import Cadence, Case, Rule, Unjudged
from .rulebook import RULES
from .thresholds import Thresholds

T = TypeVar("T")

JUDGE_SECONDS: Final = 1.0
"""Rules look at most so often."""
_LONG_SECONDS: Final = 7200.0
_LOOKS: Final = 660
"""Of a record that is longer than that they look as often as keeps its looks in bounds: after a day each two minutes,
and at once where a step ends or memory runs full."""
COOL_DOWN_SECONDS: Final = 900.0
"""A problem that comes back within this is the same finding."""
MAX_FINDINGS: Final = 256
"""Findings that are kept of one workload, open ones first."""


class Track(msgspec.Struct, kw_only=True):
    """One problem over its life."""

    reason: str
    key: str
    alert: Alert
    finding: Finding
    first_seen: float | None = None
    """When it was raised; None before."""
    last_seen: float = 0.0
    resolved: float | None = None
    explains: set[str] = set()

    def tracked(self) -> TrackedFinding:
        """Return it as others see it."""
        finding = self.finding
        if self.explains:
            evidence = {**finding.evidence, "explains": ", ".join(sorted(self.explains))}
            finding = msgspec.structs.replace(finding, evidence=evidence)
        return TrackedFinding(
            finding=finding,
            first_seen=self.last_seen if self.first_seen is None else self.first_seen,
            last_seen=self.last_seen,
            resolved=self.resolved,
        )


class Diagnosis:
    """The diagnosis of one workload as its record goes by."""

    def __init__(
        self,
        header: Header,
        thresholds: Thresholds | None = None,
        *,
        muted: Iterable[str] = (),
        rules: Iterable[Rule] = RULES,
        history: History | None = None,
    ) -> None:
        self.history = history if history is not None else History(header)
        self._thresholds = thresholds or Thresholds()
        self._rules = tuple(rule for rule in rules if rule.reason not in set(muted))
        self._tracks: dict[tuple[str, str], Track] = {}
        self._closed: list[Track] = []
        self._judged_t = float("-inf")
        self._judged_revision = (0, 0)

    def change(self, thresholds: Thresholds) -> None:
        """Judge by other thresholds from now on; what is open stays so until it is judged."""
        self._thresholds = thresholds
        # Rules that wait for a step look again at once.
        self._judged_revision = (-1, -1)

    def feed(self, record: Record) -> None:
        """Take one line, in order of time."""
        self.history.feed(record)
        urgent = isinstance(record, XidLine) or self._revision != self._judged_revision
        if urgent or record.t - self._judged_t >= max(JUDGE_SECONDS, (record.t - _LONG_SECONDS) / _LOOKS):
            self.judge(record.t)

    @property
    def findings(self) -> list[TrackedFinding]:
        """All that was ever raised, in the order in which it was."""
        raised = [*self._closed, *(track for track in self._tracks.values() if track.first_seen is not None)]
        found = [track.tracked() for track in raised]
        return sorted(found, key=lambda tracked: (tracked.first_seen, tracked.finding.reason))

    @property
    def open(self) -> list[TrackedFinding]:
        """What is open now."""
        return [tracked for tracked in self.findings if tracked.resolved is None]

    @property
    def open_by_key(self) -> dict[tuple[str, str], TrackedFinding]:
        """The same by reason and by what tells problems of one reason apart, which stays while it lasts."""
        return {
            key: track.tracked()
            for key, track in self._tracks.items()
            if track.first_seen is not None and track.resolved is None
        }

    def judge(self, t: float) -> None:
        """Ask the rules that have something new to see."""
        for _ in self.judging(t):
            pass

    def judging(self, t: float) -> Iterator[None]:
        """Do the same in parts, one rule each: in a large workload all of them take a second.

        What is fed between two parts is seen by the rules that are left, and by all others the next time.
        """
        new_steps = self._revision != self._judged_revision
        self._judged_t, self._judged_revision = t, self._revision
        for rule in self._rules:
            if rule.cadence is Cadence.STEP and not new_steps:
                continue
            if self.history.over and not rule.after_end:
                continue
            self._apply(rule, t)
            yield
        if new_steps:
            self.history.pack()

    @property
    def _revision(self) -> tuple[int, int]:
        return self.history.revision, self.history.alarms

    def _apply(self, rule: Rule, t: float) -> None:
        own = {key: track for key, track in self._tracks.items() if key[0] == rule.reason}
        open_now = {key[1]: track.finding.scope.stage for key, track in own.items() if track.alert.open}
        verdict = rule.judge(self.history, self._thresholds, open_now)
        if verdict is None:
            return
        held: dict[str, Case] = {}
        unjudged: set[str] = set()
        for case in verdict:
            if isinstance(case, Unjudged):
                unjudged.add(case.key)
                continue
            causes = explained_by(case.finding, self._open_tracks(), self.history)
            for cause in causes:
                cause.explains.add(rule.reason)
            if not causes:
                held[case.key] = case
        # A dictionary keeps the order, where a set would give one that changes with the seed of the hash.
        for key in dict.fromkeys((*held, *(key[1] for key in own))):
            holds = None if key in unjudged else key in held
            self._advance(rule, key, held.get(key), t, holds=holds)

    def _open_tracks(self) -> list[Track]:
        return [track for track in self._tracks.values() if track.alert.open and track.resolved is None]

    def _advance(self, rule: Rule, key: str, case: Case | None, t: float, *, holds: bool | None) -> None:
        track = self._tracks.get((rule.reason, key))
        if track is None:
            if case is None:
                return
            track = Track(reason=rule.reason, key=key, alert=Alert(since=t, seen=t), finding=case.finding)
            self._tracks[rule.reason, key] = track
        before = track.alert
        hold = rule.hold(self._thresholds)
        if case is not None and case.since is not None and not before.open:
            before = Alert(phase=AlertPhase.PENDING, since=case.since, seen=before.seen)
        track.alert = advance(before, t=t, holds=holds, hold=hold)
        if case is not None:
            self._seen(track, case, t)
        elif track.alert.phase is AlertPhase.CLEAR:
            self._gone(track, t)

    def _seen(self, track: Track, case: Case, t: float) -> None:
        if track.resolved is not None and not track.alert.open:
            # It is over, and what begins anew may not last.
            return
        track.last_seen = t
        track.finding = _merged(track.finding, case.finding) if track.first_seen is not None else case.finding
        if not track.alert.open:
            return
        if track.first_seen is not None and track.resolved is not None and t - track.resolved > COOL_DOWN_SECONDS:
            self._closed.append(msgspec.structs.replace(track))
            del self._closed[:-MAX_FINDINGS]
            track.first_seen, track.finding, track.explains = None, case.finding, set()
        track.first_seen = t if track.first_seen is None else track.first_seen
        track.resolved = None

    def _gone(self, track: Track, t: float) -> None:
        if track.first_seen is None:
            self._tracks.pop((track.reason, track.key), None)
        elif track.resolved is None:
            track.resolved = t


def _merged(old: Finding, new: Finding) -> Finding:
    """Return what is said now, of whom it was ever said: one who was odd once belongs to the problem."""
    scope = msgspec.structs.replace(
        new.scope,
        gpus=_union(new.scope.gpus, old.scope.gpus),
        pods=_union(new.scope.pods, old.scope.pods),
        ranks=_union(new.scope.ranks, old.scope.ranks),
    )
    return msgspec.structs.replace(new, scope=scope)


def _union(first: tuple[T, ...], second: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*first, *second)))[:16]
