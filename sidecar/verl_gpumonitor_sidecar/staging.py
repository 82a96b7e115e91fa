# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Joins what the sources of stages say with the pod's samples: one turn of the timeline. No I/O, no clock.

Sources, best first: marks of the pod's own processes, titles of its processes, what the head says of it (by marks of
the driver or by Ray's State API; a head knows itself, others hear it from the controller), Ray's agent in the pod.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from verl_gpumonitor.model.report import PodStages, StageCount, StageNow, StageQuality
from verl_gpumonitor.model.samples import GpuProcess
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.model.vocabulary import UNKNOWN
from verl_gpumonitor.stages.tables import ENGINE_TITLES
from verl_gpumonitor.timeline.job_steps import JobSteps
from verl_gpumonitor.timeline.stages import StageTimeline
from verl_gpumonitor.timeline.totals import Key
from verl_gpumonitor.timeline.words import OTHER, POD, Own, Part, Present, Voice, clean, present, speaker

from .state import OwnGpu, PodState, StagePicture

FIRST_WORD_SECONDS: Final = 60.0
"""So long after the start the head's silence is no news yet."""
SETTLE_SECONDS: Final = 5.0
"""Time between two counts of what is decided: several seconds at once cost little more than one."""
MAX_LOOKS: Final = 64
"""Turns that wait for the next count; more come only where samples are taken many times a second."""
LATELY_SECONDS: Final = 10.0
"""A job that did something so long ago is between two of its stages."""
_RESOLUTION: Final = {
    StageSource.MARKS: 0.0,
    StageSource.TITLES: 1.0,
    StageSource.RAY_STATE: 1.0,
    StageSource.RAY_AGENT: 5.0,
    StageSource.LAUNCH: 0.0,
}
_LAST_INTERVALS: Final = 8
"""So many of a source's newest intervals tell its resolution."""


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What the sources said last; None and empty: they said nothing."""

    marks: tuple[StageWord, ...] = ()
    """Of this pod's own processes, best first."""
    titles: StageWord | None = None
    own: StageWord | None = None
    """On a head: Ray's State API of its own pod."""
    relayed: StageWord | None = None
    """What the controller passed on from the head."""
    agent: StageWord | None = None
    reason: str | None = None
    """Why the State API is not in use, or is of less use than it could be; on a head alone."""
    message: str | None = None
    ask_seconds: float | None = None


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the sidecar lives."""

    ray_node_type: str = ""
    """`head`, `worker`, or empty for a pod that is no Ray node."""
    started_unix: float = 0.0
    whole_host: bool = False
    """All GPUs of a host are looked at, which need not all be a job's: not so one without a process, while others have
    some."""


class _Look(NamedTuple):
    """What a turn saw, until it is counted with others."""

    gpus: tuple[OwnGpu, ...]
    owns: Mapping[str, Own]
    engines: Mapping[str, int]
    """UUID -> what processes of a rollout engine hold on it, where their list is new."""
    now: float
    now_unix: float


class Staging:
    """Counters by stage and steps of one pod. One thread uses it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._timeline = StageTimeline()
        self._steps = JobSteps()
        self._looks: list[_Look] = []
        """Those since the last count."""
        self._turned_at: float | None = None
        self._settle_at = float("-inf")
        """When what is decided is counted next, monotonic."""
        self._counts: Mapping[str, tuple[StageCount, ...]] = {}
        self._pod_seconds: Mapping[Key, float] = {}
        self._ranks: list[tuple[StageWord, set[int]]] = []
        """Words of the last turn, and the ranks that they name."""
        self._pids: dict[str, frozenset[int]] = {}
        """UUID -> processes on it, where they are visible."""
        self._owns: dict[str, Own] = {}
        self._owns_of: object = None
        """What they follow from."""
        self._lists: dict[str, object] = {}
        """UUID -> newest list of processes that was looked at."""
        self._read_at: dict[str, float] = {}
        """UUID -> time of the newest sample that was taken in, with the readings of memory up to it; monotonic."""

    def forget_steps(self, number: int) -> None:
        """Let go of the steps up to this one: the controller has them."""
        self._steps.forget(number)

    def turn(self, state: PodState, heard: Heard, *, now: float, now_unix: float, final: bool = False) -> StagePicture:
        """Take in the newest samples, count what is decided, and return the picture. `now` is monotonic.

        `final`: count all that waits, for nothing comes after.
        """
        voices = clean(_voices(heard, now_unix), now_unix)
        owns = self._find_owns(state, voices)
        self._looks.append(_Look(state.gpus, owns, self._engines(state), now, now_unix))
        decided: tuple[Part, ...] = ()
        if final or now >= self._settle_at or len(self._looks) >= MAX_LOOKS:
            self._settle_at = now + SETTLE_SECONDS
            looks, self._looks = self._looks, []  # Let go of first: a fault must not let them pile up.
            for look in looks:
                self._observe(look, last=final and look is looks[-1])
            decided = self._settle(voices, now_unix, final=final)
        found = present(voices, now_unix)
        running = self._running_now(found) if found is not None else ()
        return StagePicture(
            now=running[0] if running else None,
            others_now=running[1:],
            now_unix=now_unix,
            roles=_roles(found, owns) if found is not None else {},
            quality=self._quality(voices, heard, now_unix),
            counts=self._counts,
            pod_seconds=self._pod_seconds,
            steps=self._steps.kept,
            decided=decided,
        )

    def _settle(self, voices: list[Voice], now_unix: float, *, final: bool) -> tuple[Part, ...]:
        """Count what is decided, and return the pod's part of it.

        Most turns of a worker decide nothing: its head speaks each 15 s.
        """
        if final:
            settled = self._timeline.finish(voices, now=now_unix)
        else:
            patient = bool(self._context.ray_node_type)
            settled = self._timeline.settle(voices, now=now_unix, patient=patient)
        self._steps.take(settled)
        if final:
            self._steps.finish()
        if settled.shares:
            changed = {share.uuid for share in settled.shares}
            self._counts = {**self._counts, **{uuid: self._timeline.gpu_counts(uuid) for uuid in changed}}
        if settled.pod:
            self._pod_seconds = self._timeline.pod_seconds()
        return settled.pod

    def _observe(self, look: _Look, *, last: bool) -> None:
        """Take in what a look saw. `last`: nothing comes after, so that no reading waits for its sample."""
        if self._turned_at is not None:
            self._timeline.elapse(look.now_unix, look.now - self._turned_at)
        self._turned_at = look.now
        behind = look.now_unix - look.now
        for gpu in look.gpus:
            uuid, counters, taken_at = gpu.sample.uuid, gpu.counters, gpu.sample.taken_at
            if taken_at is not None:
                since, until = self._read_at.get(uuid, float("-inf")), float("inf") if last else taken_at
                self._read_at[uuid] = max(since, taken_at)
                memory = [(behind + at, used) for at, used in counters.memory_readings if since < at <= until]
                self._timeline.observe(
                    uuid,
                    counters,
                    at=behind + taken_at,
                    memory=memory,
                    engine_bytes=look.engines.get(uuid),
                    own=look.owns[uuid],
                )

    def _engines(self, state: PodState) -> dict[str, int]:
        """Return what engines hold by the lists that are new since the last turn; they come each fifth sample."""
        found: dict[str, int] = {}
        for gpu in state.gpus if state.programs is not None else ():
            uuid, listed = gpu.sample.uuid, gpu.sample.processes
            if listed is not None and listed is not self._lists.get(uuid):
                self._lists[uuid] = listed
                held = engine_bytes(listed, state.programs or {})
                if held is not None:
                    found[uuid] = held
        return found

    def _find_owns(self, state: PodState, voices: Iterable[Voice]) -> dict[str, Own]:
        """Return which intervals are each GPU's own.

        Ranks are believed to be the GPUs in their order only when they are as many, from 0 on: two pools on one node
        both count from 0.
        """
        ranks = self._ranks_of(voices)
        ranked = bool(ranks) and ranks == set(range(len(state.gpus)))
        found = ranked, [(gpu.sample.uuid, gpu.sample.processes) for gpu in state.gpus]
        if found != self._owns_of:
            self._owns_of = found
            self._owns = self._make_owns(state, ranked=ranked)
        return self._owns

    def _make_owns(self, state: PodState, *, ranked: bool) -> dict[str, Own]:
        for gpu in state.gpus:
            if gpu.sample.processes is not None:
                self._pids[gpu.sample.uuid] = frozenset(process.pid for process in gpu.sample.processes)
        if not ranked and not self._pids:
            return {gpu.sample.uuid: POD for gpu in state.gpus}
        found: dict[str, Own] = {}
        alike: dict[Own, Own] = {}
        for place, gpu in enumerate(state.gpus):
            own = self._own(gpu.sample.uuid, place if ranked else None)
            found[gpu.sample.uuid] = alike.setdefault(own, own)  # What runs is looked up once for GPUs alike.
        return found

    def _ranks_of(self, voices: Iterable[Voice]) -> set[int]:
        """Return the ranks that are named: of jobs that work, for the next one may have fewer on other GPUs.

        Most words are the ones of the last turn.
        """
        known = [(word, ranks) for word, ranks in self._ranks if any(voice.word is word for voice in voices)]
        for voice in voices:
            if not any(word is voice.word for word, _ in known):
                ran, jobs = voice.word.intervals, _lately(voice.word)
                of_jobs = (each for each in ran if not jobs or each.job in jobs)
                ranks = {each.local_rank for each in of_jobs if each.local_rank is not None}
                known.append((voice.word, ranks))
        self._ranks = known
        return set().union(*(ranks for _, ranks in known))

    def _own(self, uuid: str, rank: int | None) -> Own:
        others = frozenset[int]().union(*(pids for other, pids in self._pids.items() if other != uuid))
        pids = self._pids.get(uuid)
        unused = self._context.whole_host and pids is not None and not pids and bool(others)
        return Own(local_rank=rank, pids=pids, other_pids=others, unused=unused)

    def _running_now(self, found: Present) -> tuple[StageNow, ...]:
        """Return what runs: the pod's stage first, then what else its other Ray jobs do."""
        interval = found.of(POD)
        jobs = _lately(found.word)
        first = interval.job if interval is not None else jobs[0] if len(jobs) == 1 else ""
        apart = [job for job in jobs if job != first] if len(jobs) > 1 else []
        return (
            self._running(interval, first),
            *(self._running(found.of(Own(job=job)), job) for job in apart),
        )

    def _running(self, interval: StageInterval | None, job: str) -> StageNow:
        step = self._steps.running(job) if job else self._steps.running()
        if interval is None:
            return StageNow(stage=OTHER, role=UNKNOWN, step=step, job=job[:128])
        return StageNow(
            stage=interval.stage[:64] or OTHER,
            role=interval.role[:64] or UNKNOWN,
            since=interval.begin if interval.begin > 0.0 else None,
            step=step if interval.step is None else max(0, interval.step),
            job=interval.job[:128],
        )

    def _quality(self, voices: list[Voice], heard: Heard, now_unix: float) -> StageQuality:
        word = speaker(voices, now_unix)
        source = StageSource.NONE if word is None else word.source
        reason, message = heard.reason, heard.message
        if reason is None and source in (StageSource.NONE, StageSource.LAUNCH, StageSource.RAY_AGENT):
            reason, message = self._why(source, now_unix)
        return StageQuality(
            source=source,
            resolution_seconds=None if word is None else _resolution(word),
            reason=reason[:64] if reason else None,
            message=message[:512] if message else None,
            ask_seconds=None if heard.ask_seconds is None else min(3600.0, heard.ask_seconds),
            steps=self._steps.ended,
        )

    def _why(self, source: StageSource, now_unix: float) -> tuple[str | None, str | None]:
        """Say why nobody better tells the stages of this pod; None while it may be about to be told."""
        if self._context.ray_node_type == "":
            return "NoSource", _NO_SOURCE
        if self._context.ray_node_type == "head" or now_unix - self._context.started_unix < FIRST_WORD_SECONDS:
            return None, None
        return "HeadSilent", _HEAD_SILENT if source is StageSource.RAY_AGENT else _ALL_SILENT


_NO_SOURCE: Final = (
    "nothing tells the stages of a pod that is no Ray node: install verl-gpumonitor in its image and mark them, "
    "by gpumonitor's ResourceMonitor or verl's own plugin hook"
)
_HEAD_SILENT: Final = (
    "stages come from this pod's own Ray agent, each 5 s: no word comes from the Ray head, whose sidecar would ask the "
    "State API"
)
_ALL_SILENT: Final = "neither this pod's Ray agent nor the sidecar of the Ray head tells stages"


def engine_bytes(listed: Iterable[GpuProcess], programs: Mapping[int, str]) -> int | None:
    """Return what the processes of a rollout engine hold together; None where there are none, or one does not tell."""
    sizes = [each.memory_used_bytes for each in listed if programs.get(each.pid, "").startswith(ENGINE_TITLES)]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def word_of(said: PodStages, *, ahead: float = 0.0) -> StageWord:
    """Return what the controller passed on as a word of the timeline. `ahead`: how far its clock is before ours.

    By its clock is the span, and what holds for all nodes: marks of the driver. What Ray said ran on this node is by
    our own.
    """
    behind = -ahead if said.source is StageSource.MARKS else 0.0
    return StageWord(
        source=said.source,
        known_from=said.known_from - ahead,
        known_until=said.known_until - ahead,
        intervals=tuple(
            StageInterval(
                stage=each.stage,
                role=each.role,
                begin=each.begin + behind,
                end=None if each.end is None else each.end + behind,
                local_rank=each.local_rank,
                step=each.step,
                job=each.job,
                resolution_seconds=each.resolution_seconds,
            )
            for each in said.intervals
        ),
    )


def _voices(heard: Heard, now_unix: float) -> list[Voice]:
    """Return the sources, best first. What this pod's own processes mark and show is known at once.

    What the job was started with holds at all times, and is told once.
    """
    relayed = [heard.own] if heard.own is not None and heard.own.known_until > heard.own.known_from else [heard.relayed]
    marked = [word for word in relayed if word is not None and word.source is StageSource.MARKS]
    asked = [word for word in relayed if word is not None and word.source is not StageSource.MARKS]
    launch = [word for word in relayed if word is not None and word.source is StageSource.LAUNCH]
    late = [*marked, heard.titles, *(word for word in asked if word not in launch), heard.agent]
    return [
        *(Voice(word, late=False) for word in heard.marks),
        *(Voice(word) for word in late if word is not None),
        *(Voice(msgspec.structs.replace(word, known_until=now_unix), late=False) for word in launch),
    ]


def _roles(found: Present, owns: Mapping[str, Own]) -> dict[str, str]:
    """Return the role that each GPU is in now."""
    by_own: dict[int, str] = {}
    for own in owns.values():
        if id(own) not in by_own:  # Most pods have one for all their GPUs, and its hash is that of many pids.
            interval = found.of(own)
            by_own[id(own)] = UNKNOWN if interval is None else interval.role[:64]
    return {uuid: by_own[id(own)] for uuid, own in owns.items()}


def _lately(word: StageWord) -> list[str]:
    """Return the jobs that worked in the last seconds of a word, newest work last."""
    since = word.known_until - LATELY_SECONDS
    return list(dict.fromkeys(each.job for each in word.intervals if each.end is None or each.end > since))


def _resolution(word: StageWord) -> float:
    newest = [each.resolution_seconds for each in word.intervals[-_LAST_INTERVALS:]]
    return min(3600.0, max(newest, default=_RESOLUTION.get(word.source, 0.0)))
