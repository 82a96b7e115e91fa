# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The history of a workload that is known by reports, a line each quarter of a minute, and not by samples. Pure.

Between two such lines a GPU goes through several stages, so that lines alone would tell nothing of them. Whoever
reports has sampled and attributed himself: the stage that runs now is told as it is, and a finished step comes whole,
as pieces. Pods tell a step at different times; it is closed when all that tell steps have told it, or had the time.
Of a cluster many GPUs are followed at once: what is remembered of them lies in columns, a set for each pod.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from verl_gpumonitor.model.columns import PodColumns, Rows, rows_of
from verl_gpumonitor.model.history import Past, Piece
from verl_gpumonitor.model.trace import GpuLine, GpuProcess, Header, TraceGpu, TracePod
from verl_gpumonitor.model.vocabulary import UNKNOWN
from verl_gpumonitor.stages.releases import SLEEP

from .history import DEPTH, GAP_SECONDS, GpuHistory, History, PodHistory, alarms
from .work import GEN

GAP_INTERVALS: Final = 4
"""So many reports may be lost before silence is a gap."""
ENGINE_STEPS: Final = 4
"""Steps over which what an engine held is taken together: the most in `gen`, the least in any other stage."""
ENGINE_LISTS: Final = 2
"""Of these so many must tell of a stage but `gen`: one list may have been read before the engine slept."""
MAX_WAITING: Final = 16
"""Steps of one pod that wait for those of the others."""
WORK: Final = frozenset(("init", "old_log_prob", "ref", "values", "reward", "update_critic", "update_actor"))
"""Stages that training processes run, and servers never."""

StepPieces = Sequence[tuple[str, Piece]]
"""One step of one pod: UUID of a GPU, and what one stage did on it."""
StepEngines = Sequence[tuple[str, str, float]]
"""Of the same step: UUID of a GPU, stage, and what the rollout engine's own processes held, bytes."""


class ReportedGpu(GpuHistory):
    """One GPU, whose finished steps lie in its pod's columns."""

    __slots__ = ("_columns", "_past", "place")

    def __init__(self, gpu: TraceGpu, pod: PodHistory, columns: PodColumns) -> None:
        super().__init__(gpu, pod)
        self._columns = columns
        self.place = columns.place()
        self._past: Mapping[str, Past] | None = None

    @property
    def past(self) -> Mapping[str, Past]:
        """Stage -> its finished steps. It holds until the next step ends."""
        if self._past is None:
            self._past = self._columns.past(self.place)
        return self._past

    @property
    def usual_watts(self) -> Mapping[str, float]:
        """Stage -> median power of its finished steps in which the GPU worked."""
        known = ((stage, self.usual_in(stage)) for stage in self._columns.stages)
        return {stage: watts for stage, watts in known if watts is not None}

    def usual_in(self, stage: str) -> float | None:
        """Return the same of one stage; None where it is not known."""
        columns = self._columns.stages.get(stage)
        return None if columns is None else columns.usual_watts(self.place)

    def pack(self) -> None:
        """Let go of what rules unpacked."""
        self._past = None


class ReportedHistory(History):
    """One workload, by its reports."""

    def __init__(self, header: Header, *, depth: int = DEPTH, interval_seconds: float = 15.0) -> None:
        self.interval_seconds = interval_seconds
        self._present: dict[str, tuple[str, str]] = {}
        """Pod -> stage and role that run in it."""
        self._waiting: dict[str, list[tuple[float, Rows]]] = {}
        """Pod that tells steps -> those that others have not told yet, with the time at which they came."""
        self._told: dict[str, Rows] = {}
        """Pod -> its part of the step that is closed now."""
        self._columns: dict[str, PodColumns] = {}
        self._engine_steps: dict[str, deque[Mapping[str, float]]] = {}
        """UUID -> stage -> what an engine held in it, of the last steps; of those GPUs on which one was listed."""
        super().__init__(header, depth=depth, gap_seconds=max(GAP_SECONDS, GAP_INTERVALS * interval_seconds))

    def launched(self, header: Header) -> None:
        """Take what has become known of the program; pods stay as they are."""
        fresh = History(Header(format=header.format, workload=header.workload, entrypoint=header.entrypoint))
        self.header, self.entrypoint = header, fresh.entrypoint
        self.pipeline_stages, self.trainer_only = fresh.pipeline_stages, fresh.trainer_only

    def ran(self, names: Iterable[str]) -> None:
        """Take names of what was seen to run, which tell verl's release, or that an engine is put to sleep."""
        self.names.update(names)
        self.sleeps += SLEEP in self.names

    def add_pod(self, pod: TracePod) -> None:
        """Take a pod that has joined; one that is known stays as it is, but for GPUs that are new."""
        known = self.pods.get(pod.name)
        if known is None:
            known = self.pods[pod.name] = PodHistory(pod, trains=self.trainer_only)
        for gpu in pod.gpus or ():
            if gpu.uuid not in known.gpus:
                self._gpu(known, gpu)

    def drop_pod(self, name: str) -> None:
        """Forget a pod that is gone."""
        pod = self.pods.pop(name, None)
        self._present.pop(name, None)
        self._waiting.pop(name, None)
        self._columns.pop(name, None)
        self.heard.pop(name, None)
        for uuid, gpu in pod.gpus.items() if pod is not None else ():
            if self.gpus.get(uuid) is gpu:
                del self.gpus[uuid]
                self._engine_steps.pop(uuid, None)
                self.standstill.forget(uuid)

    def present(self, name: str, stage: str, role: str, *, t: float) -> None:
        """Take the stage that runs in a pod at a time."""
        pod = self.pods.get(name)
        if pod is None or self.over:
            return
        # Steps are told; none is to be guessed from the order of stages.
        self.stages_told = self.explicit_steps = True
        self.told_t = t
        work = pod.work
        if work.first_seen is None:
            # What came before the first word of loading is from before the job; else nobody knows.
            work.first_seen, work.first_began = t, stage == "init"
        work.seen = True
        work.workers_seen |= stage in WORK
        if self._present.get(name) != (stage, role):
            work.last_change = t
            self._present[name] = stage, role
        self._restage(pod, t)

    def peak(self, uuid: str, stage: str, role: str, peak_bytes: float) -> None:
        """Take a new peak of a stage in the step that runs: some must be looked at before the step is over."""
        gpu = self.gpus.get(uuid)
        if gpu is None or self.over:
            return
        piece = gpu.now.setdefault(stage, Piece(stage=stage, role=role, step=self.step))
        before = piece.peak_bytes
        piece.add_memory(None, peak_bytes)
        self.alarms += alarms(gpu, before, piece)

    def holders(self, uuid: str, processes: Sequence[GpuProcess] | None, *, t: float) -> None:
        """Take who holds a GPU; None: it is not told, and what was known before holds no longer."""
        gpu = self.gpus.get(uuid)
        if gpu is None:
            return
        if processes is not None:
            self._listed(gpu, processes, t)
        elif gpu.processes_t is not None:
            gpu.processes_t = None
            gpu.processes, gpu.titles = {}, {}

    def take_step(self, name: str, pieces: StepPieces, *, t: float, engines: StepEngines = ()) -> None:
        """Take one whole step of one pod."""
        pod = self.pods.get(name)
        if pod is None or self.over:
            return
        self.stages_told = self.explicit_steps = True
        waiting = self._waiting.setdefault(name, [])
        waiting.append((t, self._packed(pod, pieces)))
        del waiting[:-MAX_WAITING]
        self._take_engines(pod, engines)
        self.settle(t)

    def _take_engines(self, pod: PodHistory, engines: StepEngines) -> None:
        """Take what engines held in a step. A step that tells nothing of them counts, for lists may have ended."""
        told: dict[str, dict[str, float]] = {}
        for uuid, stage, held in engines:
            known = told.setdefault(uuid, {})
            known[stage] = _engine_of(stage, (held, known.get(stage, held)))
        for uuid, gpu in pod.gpus.items():
            if uuid in told or uuid in self._engine_steps:
                steps = self._engine_steps.setdefault(uuid, deque(maxlen=ENGINE_STEPS))
                steps.append(told.get(uuid, {}))
                gpu.engine_bytes = _engine_over(steps)
                if not any(steps):
                    del self._engine_steps[uuid]

    def _packed(self, pod: PodHistory, pieces: StepPieces) -> Rows:
        """Pack a step at once: a pod that is not heard any more may keep others waiting."""
        whole: dict[tuple[int, str], Piece] = {}
        for uuid, piece in pieces:
            gpu = pod.gpus.get(uuid)
            if isinstance(gpu, ReportedGpu):
                gpu.throttled_seconds += piece.throttled_seconds
                key = gpu.place, piece.stage
                whole[key] = _plus(whole.get(key), piece)
        columns = self._columns.get(pod.name)
        return rows_of(((key[0], piece) for key, piece in whole.items()), 0 if columns is None else columns.width)

    def settle(self, t: float) -> None:
        """Close the steps that all pods have told, and those for which some have waited long enough."""
        while self._waiting and any(self._waiting.values()):
            oldest = min(waiting[0][0] for waiting in self._waiting.values() if waiting)
            complete = all(self._waiting.values())
            if not complete and t - oldest < GAP_INTERVALS * self.interval_seconds:
                return
            self._put_together()
            self._close_step(t)

    def _put_together(self) -> None:
        for name, waiting in self._waiting.items():
            rows = waiting.pop(0)[1] if waiting else {}
            # Reports tell of no calls; a colocated engine is put to sleep after each rollout unless its settings say
            # otherwise, which is for whoever judges by this to look at.
            self.sleeps += GEN in rows and bool(self.entrypoint)
            self._told[name] = rows

    def _finish(self) -> None:
        for name, columns in self._columns.items():
            gpus = [gpu for gpu in self.pods[name].gpus.values() if isinstance(gpu, ReportedGpu)]
            rows = self._told.get(name)
            if rows is None:
                # Of a pod that tells no steps there are its lines.
                seen = ((gpu.place, piece) for gpu in gpus for piece in gpu.now.values() if piece.seconds > 0)
                rows = rows_of(seen, columns.width)
            columns.append(self.step, rows)
            for gpu in gpus:
                gpu.pack()
                if gpu.now:
                    gpu.now = {}
        self._told.clear()

    # What lines alone would say otherwise

    def _engines(self, gpu: GpuHistory) -> None:
        """Leave it to steps: a list may be older than the stage that is told with it."""

    def _stage_of(self, pod: PodHistory, gpu: GpuHistory) -> tuple[str, str]:
        present = self._present.get(pod.name)
        return present if present is not None else super()._stage_of(pod, gpu)

    def _add(self, gpu: GpuHistory, line: GpuLine, *, begin: float) -> None:
        if gpu.pod.name not in self._present and gpu.pod.name not in self._waiting:
            super()._add(gpu, line, begin=begin)

    def _changed(self, gpu: GpuHistory, t: float) -> None:
        # Only lines are shared among stages; where the present stage is told, they are not.
        if gpu.pod.name in self._present:
            gpu.changes = None
        else:
            super()._changed(gpu, t)

    def _new(self, pod: PodHistory, gpu: TraceGpu) -> GpuHistory:
        columns = self._columns.get(pod.name)
        if columns is None:
            columns = self._columns[pod.name] = PodColumns(self.depth)
        known = ReportedGpu(gpu, pod, columns)
        known.interval = self.interval_seconds
        return known


def _engine_of(stage: str, sizes: Iterable[float]) -> float:
    """Return what counts of an engine's sizes: what it had where it works, and what it kept elsewhere."""
    return max(sizes) if stage == GEN else min(sizes)


def _engine_over(steps: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
    sizes: dict[str, list[float]] = {}
    for step in steps:
        for stage, held in step.items():
            sizes.setdefault(stage, []).append(held)
    return {
        stage: _engine_of(stage, known) for stage, known in sizes.items() if stage == GEN or len(known) >= ENGINE_LISTS
    }


def piece_of(
    *,
    stage: str,
    role: str,
    seconds: float,
    observed_seconds: float,
    busy_seconds: float,
    energy_joules: float | None,
    peak_bytes: int | None,
    floor_bytes: int | None,
    throttled_seconds: float | None = None,
) -> Piece:
    """Make the piece of a stage that somebody else added up from samples of each second.

    `seconds`: how long it took; `observed_seconds`: for how much of that utilisation is known, none under MIG.
    """
    samples = max(1, round(seconds))
    return Piece(
        stage=stage,
        role=role or UNKNOWN,
        step=0,
        seconds=observed_seconds or seconds,
        known_seconds=observed_seconds,
        busy_seconds=min(busy_seconds, observed_seconds),
        powered_seconds=(observed_seconds or seconds) if energy_joules is not None else 0.0,
        energy_joules=energy_joules or 0.0,
        peak_bytes=peak_bytes,
        floor_bytes=floor_bytes,
        # Moments are not told apart from levels.
        level_bytes=peak_bytes,
        level_samples=samples,
        used_samples=samples,
        throttled_seconds=min(throttled_seconds or 0.0, observed_seconds),
        throttle_known_seconds=observed_seconds if throttled_seconds is not None else 0.0,
    )


_ADDED: Final = (
    *("seconds", "known_seconds", "busy_seconds", "powered_seconds", "energy_joules"),
    *("throttled_seconds", "throttle_known_seconds"),
)


def _plus(one: Piece | None, other: Piece) -> Piece:
    """Add what the same stage did in two roles."""
    if one is None:
        return other
    for name in _ADDED:
        setattr(other, name, getattr(one, name) + getattr(other, name))
    other.add_memory(None, one.peak_bytes)
    # A peak in one of the roles is no moment of the other's.
    other.level_bytes = other.peak_bytes
    known = [size for size in (one.floor_bytes, other.floor_bytes) if size is not None]
    other.floor_bytes = min(known, default=None)
    return other
