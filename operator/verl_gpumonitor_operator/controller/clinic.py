# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The stage-aware diagnosis of all running workloads: who is followed how far, and what is thought of each. Pure.

Room is bounded: finished pieces of steps are what takes memory, so that they have a budget over all workloads, which is
enough for 17,000 GPUs. Beyond it, and of a very large workload, two GPUs of each pod are followed, or none, which
is said; the simple rules look at those all the same.
Advice takes milliseconds, and is asked for when a problem is new or its evidence has changed notably.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from verl_gpumonitor.advice import advise
from verl_gpumonitor.advice.present import context_at
from verl_gpumonitor.diagnosis.rules import rollout_memory
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.figures import counted
from verl_gpumonitor.model.findings import Advice, Finding
from verl_gpumonitor.model.report import Report
from verl_gpumonitor_operator.settings import SettingsError

from .holders import unlisted
from .launch import Command
from .patient import SOME, Follows, Patient
from .podtrack import PodTrack
from .workload import Workload

BUDGET_PIECES: Final = 2_500_000
"""Pieces of finished steps that are kept of all workloads: 17,000 GPUs have room, in 100 MiB. 80,000 would
take half of the controller's memory, and their pods' connections and reports take the other."""
MOST_GPUS: Final = 1040
"""Of one workload no more are followed: a look at them all, when a step has ended, takes a second of CPU."""
DIVIDED_GPUS: Final = 100
"""From so many on it is taken in parts, so that it does not hold up others."""
STAGES: Final = 8
"""Stages of a usual step."""
DEEP: Final = 24
SHALLOW: Final = 16
"""Steps that are remembered: rules look at eight, and for a slow leak at twice as many. Thresholds may ask for more."""
DEEP_SHARE, ALL_SHARE = 0.1, 0.95
"""Parts of the room up to which workloads are followed by so many steps, and by all their GPUs."""
SETTLED_STEPS: Final = 3
"""Until then the simple rules, which see the present alone, are asked as well."""
JUDGE_SECONDS: Final = 5.0
GPUS_PER_JUDGE_SECOND: Final = 100.0
"""A job of 1,000 GPUs is judged each 10 s."""
REPEAT_SECONDS: Final = 1800.0
"""While a problem lasts, its Event is counted again so often: Events are kept for an hour."""
ADVICE_SECONDS: Final = 10.0
"""Advice costs 2 ms, and is thought over no more often; steps may be as short as some such times."""
NOTABLE: Final = 0.1
"""Evidence that changed by a tenth may lead to other values."""
RESUMED: Final = "*"
"""Begins the second part of the key of a problem that was not judged here yet."""
RESUMED_STEPS: Final = 10
RESUMED_SECONDS: Final = 3600.0
PROMPT_SECONDS: Final = 600.0
"""After a restart, problems that are seen at once are waited for so long, others for ten steps, or an hour."""
PROMPT: Final = frozenset(("Hang", "HostMemoryRisk", "SharedMemoryRisk", "ForeignProcess", "LeftoverMemory"))
FAULTS: Final = frozenset(("GPUFault", "ApplicationFault"))
"""Judged from the reports of all GPUs, and in the engine only to explain others."""
UNKNOWN_WHY: Final[Mapping[str, tuple[str, str]]] = {
    "early": ("TooEarly", "No whole step, or two minutes where no steps are told, has been seen yet."),
    "none": ("NotFollowed", "There is no room to follow the steps of this job; its GPUs are judged as they are now."),
    "throttled": ("NotMeasured", "The driver does not say why clocks are held down."),
    "host": ("NoHostMemory", "Nobody tells the host memory of the job's pods."),
    "limit": ("NoMemoryLimit", "No container of the job has a memory limit that it could reach."),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A problem that is open."""

    key: tuple[str, str]
    """Reason, and what tells problems of one reason apart."""
    finding: Finding
    """With its advice."""
    since: float
    """Unix seconds."""

    @property
    def reason(self) -> str:
        """Its reason."""
        return self.finding.reason

    @property
    def gpus(self) -> frozenset[str]:
        """UUIDs; empty where it is about no certain ones."""
        return frozenset(self.finding.scope.gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opinion:
    """What the diagnosis thinks of a workload now."""

    staged: bool = False
    """Whole steps with their stages are known, so that the simple rules have nothing to add."""
    open: Sequence[Found] = ()
    raised: Sequence[Found] = ()
    """New since the last look."""
    repeated: Sequence[Found] = ()
    """Long open; to be counted once more."""
    unknown: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Type of condition -> reason and message, where nothing can be said as long as nothing is found."""
    unjudged: Mapping[str, str] = field(default_factory=dict)
    """Reason of a finding -> why it cannot be told, though its condition is judged by other reasons."""
    coverage: Mapping[str, object] | None = None
    """`status.dataQuality.diagnosis`."""


NOT_SEEN: Final = Opinion()


@dataclass(kw_only=True, slots=True)
class Advised:
    """Advice that was given, and on what."""

    finding: Finding
    at: float
    advice: tuple[Advice, ...]


@dataclass(kw_only=True, slots=True)
class Case:
    """One workload and what was told of it."""

    patient: Patient
    thresholds: Thresholds
    resumed: tuple[Found, ...]
    """Problems that others had found, or found before a restart, and that were not judged here yet."""
    told: dict[tuple[str, str], float] = field(default_factory=dict)
    """Open problems -> when they were told last."""
    advised: dict[tuple[str, str], Advised] = field(default_factory=dict)
    judgements: int = 0
    """Those that the opinion is of."""
    opinion: Opinion = NOT_SEEN


def thresholds_of(given: Mapping[str, object], base: Thresholds | None = None) -> Thresholds:
    """Return thresholds with those that are given. Raises SettingsError, whose text names the field and the bound."""
    merged = msgspec.to_builtins(base or Thresholds())
    for group, values in given.items():
        known = merged.get(group)
        merged[group] = {**known, **values} if isinstance(known, dict) and isinstance(values, Mapping) else values
    try:
        return msgspec.convert(merged, Thresholds)
    except msgspec.ValidationError as error:
        raise SettingsError(f"thresholds: {error}") from error


class Clinic:
    """All workloads under diagnosis. A `ReportObserver`; used from one event loop."""

    def __init__(
        self,
        *,
        interval_seconds: float,
        thresholds: Thresholds | None = None,
        budget_pieces: int = BUDGET_PIECES,
    ) -> None:
        self._interval = interval_seconds
        self.thresholds = thresholds or Thresholds()
        self._budget = budget_pieces
        self._taken = 0
        self._cases: dict[str, Case] = {}
        self._resumed: dict[str, tuple[Found, ...]] = {}

    # Who is followed

    @property
    def pieces(self) -> int:
        """Room that is taken."""
        return self._taken

    def __len__(self) -> int:
        return len(self._cases)

    def _admit(self, workload: Workload) -> tuple[Follows, int]:
        """Say how a workload is followed: deeply while there is room, by two GPUs of a pod when there is little."""
        sizes = [track.record.gpus_requested for track in workload.pods() if track.record.gpus_requested > 0]
        gpus, pods = max(sum(sizes), workload.job.gpus_requested or 0), max(1, len(sizes))
        for follows, depth, wanted, share in (
            (Follows.ALL, DEEP, gpus, DEEP_SHARE),
            (Follows.ALL, SHALLOW, gpus, ALL_SHARE),
            (Follows.SOME, SHALLOW, SOME * pods, 1.0),
        ):
            if wanted <= MOST_GPUS and self._taken + wanted * STAGES * depth <= share * self._budget:
                return follows, depth
        return Follows.NONE, SHALLOW

    def report(self, workload: Workload, track: PodTrack, report: Report, at: float) -> None:
        """Take a report that was counted for a workload. A `ReportObserver`."""
        if workload.job.ended or workload.gone_at is not None:
            return
        uid = workload.job.uid
        case = self._cases.get(uid)
        if case is None:
            if track.record.gpus_requested == 0 and not report.gpus:
                return
            case = self._cases[uid] = self._new(workload, at)
        patient = case.patient
        before = _room_of(patient)
        room = (self._budget - self._taken) // (STAGES * patient.depth)
        patient.take(workload, track, report, at, room=room)
        self._taken += _room_of(patient) - before

    def _new(self, workload: Workload, at: float) -> Case:
        follows, depth = self._admit(workload)
        patient = Patient(
            workload,
            follows=follows,
            depth=depth,
            interval_seconds=self._interval,
            thresholds=self.thresholds,
            began=at,
        )
        return Case(patient=patient, thresholds=self.thresholds, resumed=self._resumed.pop(workload.job.uid, ()))

    def resume(self, uid: str, known: Iterable[Found]) -> None:
        """Go on with problems that are open already. They are not told again."""
        own = [
            replace(one, key=(one.reason, RESUMED + one.key[1].removeprefix(RESUMED)))
            for one in known
            if one.reason not in FAULTS
        ]
        case = self._cases.get(uid)
        if case is None:
            self._resumed[uid] = tuple(own)
            return
        judged = {key[0] for key in case.told} | {one.reason for one in case.resumed}
        case.resumed += tuple(one for one in own if one.reason not in judged)

    def forget(self, uid: str) -> None:
        """Forget a workload."""
        case = self._cases.pop(uid, None)
        self._taken -= _room_of(case.patient) if case is not None else 0
        self._resumed.pop(uid, None)

    # What is thought of them

    def judging(
        self, workload: Workload, *, command: Command | None, thresholds: Thresholds | None, phase: str, now: float
    ) -> Iterator[None]:
        """Judge a workload that runs, if it is time: in parts, between which others may have their turn.

        `thresholds`: its own, where somebody set them. What came of it is `opinion`.
        """
        case = self._cases.get(workload.job.uid)
        if case is None:
            return
        patient = case.patient
        self._set(case, thresholds or self.thresholds)
        patient.launched(command)
        tracks = {track.record.name: track.record for track in workload.pods()}
        before = _room_of(patient)
        patient.keep(set(tracks))
        self._taken += _room_of(patient) - before
        for record in tracks.values():
            patient.container(record, now)
        every = max(JUDGE_SECONDS, patient.gpus / GPUS_PER_JUDGE_SECOND)
        for _ in patient.judging(now, phase=phase, every_seconds=every):
            if patient.gpus >= DIVIDED_GPUS:
                yield

    def opinion(self, uid: str, *, again: bool = False) -> Opinion:
        """Return what is thought of a workload since it was judged. `again`: what was just resumed is to be in it."""
        case = self._cases.get(uid)
        if case is None:
            return NOT_SEEN
        if again:
            own = (one for one in case.opinion.open if not one.key[1].startswith(RESUMED))
            open_now = (*own, *case.resumed)
            return replace(case.opinion, open=open_now)
        if case.judgements == case.patient.judgements and case.opinion is not NOT_SEEN:
            case.opinion = replace(case.opinion, raised=(), repeated=())
            return case.opinion
        case.judgements = case.patient.judgements
        case.opinion = self._opinion(case)
        case.patient.history.pack()
        return case.opinion

    def look(
        self,
        workload: Workload,
        *,
        command: Command | None,
        thresholds: Thresholds | None,
        phase: str,
        now: float,
    ) -> Opinion:
        """Judge at one go, and return the opinion."""
        for _ in self.judging(workload, command=command, thresholds=thresholds, phase=phase, now=now):
            pass
        return self.opinion(workload.job.uid)

    def _set(self, case: Case, thresholds: Thresholds) -> None:
        if thresholds != case.thresholds:
            case.thresholds = thresholds
            case.patient.diagnosis.change(thresholds)

    def _opinion(self, case: Case) -> Opinion:
        patient = case.patient
        t = patient.history.t
        unjudged = _unjudged(patient)
        tracked = {key: one for key, one in patient.diagnosis.open_by_key.items() if key[0] not in FAULTS}
        resumed = {one.reason for one in case.resumed}
        reasons = {key[0] for key in tracked} | resumed
        found = [
            Found(
                key=key,
                finding=self._with_advice(case, key, one.finding, reasons),
                since=patient.began + one.first_seen,
            )
            for key, one in tracked.items()
        ]
        raised = [one for one in found if one.key not in case.told and one.reason not in resumed]
        repeated = [one for one in found if t - case.told.get(one.key, t) >= REPEAT_SECONDS]
        self._note(case, found, {one.key for one in (*raised, *repeated)}, t)
        return Opinion(
            staged=patient.history.stages_told and patient.history.step >= SETTLED_STEPS,
            open=(*found, *case.resumed),
            raised=raised,
            repeated=repeated,
            unknown=_unknown(patient),
            unjudged=unjudged,
            coverage={**_coverage(patient), "notJudged": _listed(unjudged)},
        )

    def _note(self, case: Case, found: Iterable[Found], told: set[tuple[str, str]], t: float) -> None:
        keys = {one.key for one in found}
        case.told = {key: t if key in told else case.told.get(key, t) for key in keys}
        case.advised = {key: value for key, value in case.advised.items() if key in keys}
        now = {key[0] for key in keys}
        case.resumed = tuple(
            one for one in case.resumed if one.reason not in now and not _would_be_seen(case.patient, one.reason, t)
        )

    def _with_advice(self, case: Case, key: tuple[str, str], finding: Finding, reasons: set[str]) -> Finding:
        known, t = case.advised.get(key), case.patient.history.t
        if known is None or _notable(known, finding, t):
            advice = advise(finding, context_at(case.patient.diagnosis, reasons))
            known = case.advised[key] = Advised(finding=finding, at=t, advice=advice)
        return msgspec.structs.replace(finding, advice=known.advice)


def _room_of(patient: Patient) -> int:
    return patient.gpus * STAGES * patient.depth


def _would_be_seen(patient: Patient, reason: str, t: float) -> bool:
    """Say whether a problem from before a restart would have been found again by now."""
    if reason in PROMPT:
        return t >= PROMPT_SECONDS
    return patient.history.step >= RESUMED_STEPS or t >= RESUMED_SECONDS


def _notable(known: Advised, finding: Finding, t: float) -> bool:
    before = known.finding
    if (before.severity, before.scope.stage) != (finding.severity, finding.scope.stage):
        return True
    return t - known.at >= ADVICE_SECONDS and _changed(before.evidence, finding.evidence)


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    if before.keys() != after.keys():
        return True
    for name, value in after.items():
        old = before[name]
        if isinstance(value, int | float) and isinstance(old, int | float):
            if abs(value - old) > NOTABLE * max(abs(old), 1e-9) and not name.endswith(("_seconds", "seconds_left")):
                return True
        elif isinstance(value, str) and value != old:
            return True
    return False


def _unknown(patient: Patient) -> Mapping[str, tuple[str, str]]:
    history = patient.history
    if patient.follows is Follows.NONE:
        kinds = ("Hung", "Underutilized", "Throttled", "HostMemoryRisk", "ForeignGPUMemory")
        return dict.fromkeys(kinds, UNKNOWN_WHY["none"])
    said: dict[str, tuple[str, str]] = {}
    missing = unlisted(history)
    if missing is not None:
        said["ForeignGPUMemory"] = missing
    if not any(gpu.last is not None and gpu.last.throttled is not None for gpu in history.gpus.values()):
        said["Throttled"] = UNKNOWN_WHY["throttled"]
    lines = [pod.last_host for pod in history.pods.values() if pod.last_host is not None]
    told = [line for line in lines if line.memory_used_bytes is not None]
    if not any(line.memory_limit_bytes for line in told):
        said["HostMemoryRisk"] = UNKNOWN_WHY["limit" if told else "host"]
    if history.step == 0:
        said.update(dict.fromkeys(("Hung", "Underutilized"), UNKNOWN_WHY["early"]))
    return said


def _listed(unjudged: Mapping[str, str]) -> list[Mapping[str, str]] | None:
    return [{"reason": reason, "message": why} for reason, why in unjudged.items()] or None


def _unjudged(patient: Patient) -> Mapping[str, str]:
    """Return what cannot be told of a job that is followed."""
    why = rollout_memory.unjudged(patient.history) if patient.follows is not Follows.NONE else None
    return {} if why is None else {rollout_memory.REASON: why}


def _coverage(patient: Patient) -> Mapping[str, object]:
    message = None
    if patient.follows is Follows.NONE:
        message = UNKNOWN_WHY["none"][1]
    elif patient.follows is Follows.SOME:
        message = "Of each pod the diagnosis follows the fullest and the idlest GPU, for there is no room for all."
    elif patient.unfollowed:
        message = f"{counted(len(patient.unfollowed), 'pod')} not followed, for there is no room."
    return {"gpus": patient.gpus, "steps": patient.history.step, "message": message}
