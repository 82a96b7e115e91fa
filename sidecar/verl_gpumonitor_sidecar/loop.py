# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The main loop's one turn: look at what the sources left, join it, publish it, say what changed.

A turn does no I/O that could block, so that the loop turns, and SIGTERM is heard, whatever hangs elsewhere.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from verl_gpumonitor.model.report import ReportAnswer, StageQuality
from verl_gpumonitor.model.samples import HostSample, NodeSample
from verl_gpumonitor.model.stages import StageSource, StageWord
from verl_gpumonitor.model.vocabulary import UNKNOWN, Ownership, Source
from verl_gpumonitor.reading.host import host_sample
from verl_gpumonitor.timeline.words import OTHER

from .join import Inputs, Memory, Terms, join
from .journal import Journal
from .ray_watch import NEEDED_SECONDS, RayView
from .stage_watch import StageView
from .staging import Context, Heard, Staging, word_of
from .state import ClusterStagesSeen, PodState, StagePicture
from .urgency import Known, look

HEALTHY_SECONDS = 30.0
"""A loop that has not turned for so long is stuck."""
FRESH_SECONDS = 5.0
AHEAD_SECONDS = 2.0
"""A word that reaches further into the future is by another clock than ours."""
LASTING_SECONDS = 30.0
"""Marks or titles that tell the stages for so long without a gap let poorer sources rest."""


class NodeReading(Protocol):
    """What the loop needs of `reading.sampler.Sampler`."""

    def latest(self) -> NodeSample:
        """Return the newest picture of all GPUs, at once."""


class RayReading(Protocol):
    """What the loop needs of `ray_watch.RayWatch`."""

    def latest(self) -> RayView:
        """Return what Ray said last, at once."""

    def set_needed(self, needed: bool) -> None:
        """Say whether GPU values or names are wanted from Ray, or its host memory alone."""


class StageReading(Protocol):
    """What the loop needs of `stage_watch.StageWatch`."""

    def latest(self) -> StageView:
        """Return what Ray's State API and the titles said last, at once."""

    def set_titles_needed(self, needed: bool) -> None:
        """Say whether titles are wanted."""


class MarkReading(Protocol):
    """What the loop needs of `sources.marks.MarkReceiver`. The loop's thread alone uses it."""

    problem: str | None

    def words(self, now_unix: float) -> tuple[StageWord, ...]:
        """Take in what has arrived, and return what is known of this pod, at once."""

    def cluster_word(self, now_unix: float) -> StageWord:
        """Return what the driver says of all nodes."""

    def own_uuids(self, now_unix: float) -> tuple[str, ...]:
        """Return the GPUs that training processes name."""

    def host_sample(self, now_unix: float) -> HostSample | None:
        """Return the host memory that the program measured."""


class ProcessReading(Protocol):
    """What the loop needs of `process_watch.ProcessWatch`."""

    def latest(self) -> Mapping[int, str] | None:
        """Return pid -> program, at once; None while lists of processes cannot be had or believed."""

    def start(self) -> None:
        """Begin to read; the loop does not call it."""


class Loop:
    """Turned by the main thread alone; `state`, `healthy` and `take_answer` may be used by others."""

    def __init__(
        self,
        terms: Terms,
        *,
        node: NodeReading | None,
        ray: RayReading | None,
        stages: StageReading | None = None,
        marks: MarkReading | None = None,
        processes: ProcessReading | None = None,
        context: Context | None = None,
        shm_path: str = "",
        shared_processes: bool = False,
        journal: Journal,
        urgent: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`node` None: the pod asks for no GPU, so none is read. `ray` None: not a Ray pod.

        `context` None: there are no GPUs whose stages would be of interest.
        """
        self._terms = terms
        self._node = node
        self._ray = ray
        self._stages = stages
        self._marks = marks
        self._processes = processes
        self._context = context
        self._staging = None if context is None else Staging(context)
        self._shm_path = shm_path
        self._shared_processes = shared_processes
        self._journal = journal
        self._urgent = urgent
        self._clock = clock
        self._unix_clock = unix_clock
        self._memory = Memory()
        self._known = Known()
        self._said: object = None
        self._relayed_uuids: tuple[str, ...] | None = None
        self._relayed: StageWord | None = None
        self._steps_arrived = 0
        self._told = (OTHER, UNKNOWN)
        self._cluster_changes = 0
        self._ending = False
        self._turned_at = clock()
        self.state = PodState(gpus_requested=terms.gpus_requested)
        """The newest picture; replaced as a whole at each turn."""

    def turn(self) -> None:
        """Make a new picture. A fault of ours is said, and the picture before ages away."""
        try:
            self._turn(self._clock())
        except Exception as error:  # noqa: BLE001 - the loop must turn on: it hears SIGTERM, and the next may succeed
            self._journal.state(
                "loop", "a turn failed for a fault of ours", kind=type(error).__name__, error=repr(error)
            )
        self._turned_at = self._clock()

    def healthy(self) -> bool:
        """Return whether the loop turns. A hanging driver or controller does not make it unhealthy."""
        return self._clock() - self._turned_at < HEALTHY_SECONDS

    def take_answer(self, answer: ReportAnswer, *, ahead: float = 0.0) -> None:
        """Take over what the controller says about this pod. `ahead`: how far its clock is before ours."""
        if answer.gpu_uuids is not None:
            self._relayed_uuids = tuple(answer.gpu_uuids)
        if answer.stages is not None:
            self._relayed = self._believed(word_of(answer.stages, ahead=ahead))

    def _believed(self, word: StageWord) -> StageWord | None:
        """Return what the head says; None where it speaks of what is yet to come: its clock and ours are too far apart.

        Each stage would go to other seconds than those in which it ran.
        """
        if word.source is StageSource.LAUNCH or word.known_until <= self._unix_clock() + AHEAD_SECONDS:
            return word
        self._journal.state("relayed", "the head's word on stages is not used: this node's clock is far behind its own")
        return None

    def end(self) -> None:
        """Make the last turn, which counts all that waited for its stage."""
        self._ending = True
        self.turn()

    def take_steps(self, number: int) -> None:
        """Note that the controller has the steps up to this one; from any thread."""
        self._steps_arrived = max(self._steps_arrived, number)

    def _turn(self, now: float) -> None:
        now_unix = self._unix_clock()
        view = self._ray.latest() if self._ray else RayView()
        node = self._node.latest() if self._node else NodeSample()
        marked = self._marked(now_unix)
        inputs = Inputs(
            node=node,
            agent=view.agent,
            relayed_uuids=self._relayed_uuids,
            marked_uuids=self._marks.own_uuids(now_unix) if self._marks else None,
            host=host_sample(ray=self._host(view, now_unix), shm_path=self._shm_path),
            ray_nodes=view.nodes,
            processes_on=self._processes_on(node) if self._shared_processes else None,
        )
        self._memory, state = join(self._memory, inputs, terms=self._terms, now=now, now_unix=now_unix)
        if self._processes:
            state = msgspec.structs.replace(state, programs=self._processes.latest())
        self.state = self._with_stages(state, view, marked, now=now, now_unix=now_unix)
        self._say_needs(marked, now_unix)
        self._known, news = look(self._known, self.state, now)
        if self._stage_news() or news:
            self._urgent()
        self._say(self.state)

    def _with_stages(
        self, state: PodState, view: RayView, marked: tuple[StageWord, ...], *, now: float, now_unix: float
    ) -> PodState:
        """Add what is known of stages to the picture. A fault here costs no GPU values."""
        try:
            seen = self._stages.latest() if self._stages else StageView()
            cluster = self._cluster(seen, now_unix)
            if self._staging is None:
                picture = StagePicture(now_unix=now_unix, quality=asked_quality(seen))
                return msgspec.structs.replace(state, stages=picture, cluster=cluster)
            self._staging.forget_steps(self._steps_arrived)
            heard = Heard(
                marks=marked,
                titles=seen.titles,
                own=seen.own,
                relayed=self._relayed,
                agent=view.stages,
                reason=seen.trouble.reason if seen.trouble else None,
                message=seen.trouble.message if seen.trouble else None,
                ask_seconds=seen.ask_seconds,
            )
            picture = self._staging.turn(state, heard, now=now, now_unix=now_unix, final=self._ending)
            return msgspec.structs.replace(state, stages=picture, cluster=cluster)
        except Exception as error:  # noqa: BLE001 - as for a turn
            self._journal.state(
                "staging", "stages are not told, for a fault of ours", kind=type(error).__name__, error=repr(error)
            )
            return msgspec.structs.replace(state, stages=self.state.stages)

    def _cluster(self, seen: StageView, now_unix: float) -> ClusterStagesSeen:
        marks = self._marks.cluster_word(now_unix) if self._marks else None
        word = seen.cluster
        return ClusterStagesSeen(
            marks=marks if marks is not None and marks.known_until > marks.known_from else None,
            known_from=word.known_from if word else 0.0,
            known_until=word.known_until if word else 0.0,
            nodes=word.nodes if word else {},
            ahead=word.ahead if word else {},
            changes=seen.cluster_changes,
            jobs=seen.jobs,
        )

    def _marked(self, now_unix: float) -> tuple[StageWord, ...]:
        """Take marks in. A port that another has is said once, and tried again."""
        if self._marks is None:
            return ()
        words = self._marks.words(now_unix)
        if self._marks.problem is not None:
            self._journal.state("marks", "marks cannot be received", error=self._marks.problem)
        elif words:
            self._journal.state("marks", "the program marks its stages")
        return words

    def _needs_hints(self) -> bool:
        """Say whether the State API is asked so seldom that the agent's page must say when it is time."""
        seconds = self._stages.latest().ask_seconds if self._stages else None
        return seconds is not None and seconds > NEEDED_SECONDS

    def _host(self, view: RayView, now_unix: float) -> HostSample | None:
        """Return the job's host memory by Ray's agent, else by the program itself."""
        if view.agent is not None and view.agent.host is not None:
            return view.agent.host
        return self._marks.host_sample(now_unix) if self._marks else None

    def _say_needs(self, words: tuple[StageWord, ...], now_unix: float) -> None:
        """Let poorer sources rest while the pod's own processes tell all: they cost the job's servers, and us."""
        marked = any(_vouches(word, now_unix) for word in words)
        titles = self._stages.latest().titles if self._stages else None
        told = marked or (titles is not None and _vouches(titles, now_unix))
        if self._ray:
            wanted = self._context is not None and not told
            self._ray.set_needed(needs_ray(self.state) or wanted or self._needs_hints())
        if self._stages:
            self._stages.set_titles_needed(not marked)

    def _stage_news(self) -> bool:
        """Say whether another stage runs: in this pod, or, as a head knows, anywhere in its cluster."""
        changes, before = self.state.cluster.changes, self._cluster_changes
        self._cluster_changes = changes
        now = self.state.stages.now
        shown = self._told if now is None or now.stage in (OTHER, UNKNOWN) else (now.stage, now.role)
        told, self._told = self._told, shown
        return changes != before or shown != told

    def _processes_on(self, node: NodeSample) -> tuple[str, ...] | None:
        """Return the GPUs with processes of the pod. A pid that is not in our /proc is another namespace's."""
        if self.state.ownership is not Ownership.UNKNOWN and len(self.state.gpus) >= self.state.gpus_requested:
            return None
        return tuple(
            gpu.uuid
            for gpu in node.gpus
            if any(os.path.exists(f"/proc/{process.pid}") for process in gpu.processes or ())  # noqa: PTH110 - memory
        )

    def _say(self, state: PodState) -> None:
        """Say on stderr how things stand, when they changed."""
        stands = (
            state.source,
            state.ownership,
            state.unavailable,
            tuple((gpu.sample.uuid, gpu.sample.state) for gpu in state.gpus),
        )
        if not state.started or stands == self._said:
            return
        self._said = stands
        self._journal.state(
            "telemetry",
            "source of GPU values",
            source=state.source,
            ownership=state.ownership,
            reason=state.unavailable,
            gpus=len(state.gpus),
            error=state.message,
        )
        for gpu in state.gpus:
            sample = gpu.sample
            self._journal.state(
                "gpu " + sample.uuid, "state of a GPU", gpu=sample.uuid, state=sample.state, error=sample.error
            )


def asked_quality(seen: StageView) -> StageQuality:
    """Return what a head without GPUs of its own says: how it fares with the State API, whose word others wait for."""
    trouble = seen.trouble
    return StageQuality(
        reason=trouble.reason[:64] if trouble else None,
        message=trouble.message[:512] if trouble else None,
        ask_seconds=None if seen.ask_seconds is None else min(3600.0, seen.ask_seconds),
    )


def _vouches(word: StageWord, now_unix: float) -> bool:
    """Return whether a word tells all of the present, and has for a while: not of single stages, with gaps between."""
    return now_unix - word.known_until <= FRESH_SECONDS and word.known_until - word.known_from >= LASTING_SECONDS


def needs_ray(state: PodState) -> bool:
    """Return whether Ray's agent is wanted for GPUs: to read them, or to say whose they are."""
    if state.ownership is Ownership.NONE_REQUESTED:
        return False
    return state.source is not Source.NVML or len(state.gpus) < state.gpus_requested
