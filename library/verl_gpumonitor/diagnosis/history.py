# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The typed history that rules look at: it grows line by line, never looks ahead, and its memory is bounded. Pure.

A sample of a GPU speaks for the span since the one before. Of a span that saw several stages, each gets its seconds;
load and power, which NVML measures over the last moment, are the last stage's, and the memory peak belongs to one of
them: the one that is left when no other ever came near it (`straddled`); where several did, it is left out.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from verl_gpumonitor.model.history import (
    IDLE_UTILIZATION,
    LEARNT_STEPS,
    SPIN_OF_USUAL,
    USUAL_UTILIZATION,
    OwnPast,
    Past,
    Piece,
    usual_power,
)
from verl_gpumonitor.model.trace import (
    GpuLine,
    GpuProcess,
    Header,
    HostLine,
    JobLine,
    MarkLine,
    NvmlLine,
    PodLine,
    Record,
    StepLine,
    TaskLine,
    TitleLine,
    TraceGpu,
    TracePod,
    XidLine,
)
from verl_gpumonitor.model.vocabulary import UNKNOWN, held_down
from verl_gpumonitor.stages.tables import Kind

from .minutes import Minutes
from .work import GEN, OTHER, PodWork

ENDED: Final = frozenset(("Succeeded", "Failed", "Stopped"))
GAP_SECONDS: Final = 15.0
"""A longer silence is a gap: nothing is known of it, and nothing is added up for it."""
SETTLED_SECONDS: Final = 1.0
"""A stage that began less ago may find load and memory of the one before."""
SKEW_SECONDS: Final = 3.0
"""So far the clocks of whoever tells stages and whoever samples may be apart, and a sample more."""
DEPTH: Final = 24
"""Steps that are remembered of each stage."""
WINDOW_SECONDS: Final = 120.0
"""Where nobody tells steps (SFT by torchrun), so much time stands for one."""
ALARM_RATIOS: Final = (0.965, 0.985)
"""A stage that passes one of these within a step is looked at before the step ends."""
LISTED_FROM: Final = 0.25
"""Share of its limit from which on it tells something how much of a pod's memory its listed processes make up."""
MAX_EVENTS: Final = 256
MAX_CHANGES: Final = 64
SPIN_UTILIZATION: Final = 0.9
SPIN_OF_LIMIT: Final = 0.4
RESUME: Final = "update_weights"
"""In it trained and served weights share the GPU."""
TRAINED: Final = frozenset(("old_log_prob", "ref", "values", "update_critic", "update_actor", "reward"))
TRAINED_APART: Final = 0.03
"""What a training stage takes differs from step to step by so much of a GPU's memory, and is not surely another's."""
ENGINE_APART: Final = 0.015
"""The same of a stage that takes its memory beforehand."""
USUAL_RISE: Final = 0.15
"""No stage takes so much more from one step to the next that nothing else could have taken it."""
_USUAL_STEPS: Final = 5
LOW_POWER_STAGES: Final = frozenset(("update_weights", "init", "save_checkpoint", OTHER))
_PIPELINE: Final = re.compile(r"pipeline_model_parallel_size[=\s]+(\d+)")
_TRAINER_KINDS: Final = frozenset(("PyTorchJob", "TrainJob", "MPIJob"))
_NO_PAST: Final[Mapping[str, OwnPast]] = MappingProxyType({})
_NO_FIGURES: Final[Mapping[str, float]] = MappingProxyType({})
_NOBODY: Final[Mapping[int, float]] = MappingProxyType({})
_NO_TITLES: Final[Mapping[int, str]] = MappingProxyType({})
"""Shared by all GPUs of which there is nothing, for a cluster has many."""


class Before:
    """What lay on a GPU, and what it did, before the job's first process."""

    __slots__ = ("begin", "busiest", "end", "highest_bytes", "lines", "lowest_bytes", "newest_bytes")

    def __init__(self, begin: float) -> None:
        self.begin = self.end = begin
        self.lines = 0
        self.lowest_bytes, self.highest_bytes, self.newest_bytes = float("inf"), 0.0, 0.0
        self.busiest = 0.0

    def add(self, t: float, used_bytes: float, utilization: float) -> None:
        """Take one sample."""
        self.end, self.newest_bytes = t, used_bytes
        self.lines += 1
        self.lowest_bytes = min(self.lowest_bytes, used_bytes)
        self.highest_bytes = max(self.highest_bytes, used_bytes)
        self.busiest = max(self.busiest, utilization)


class GpuHistory:
    """One GPU."""

    __slots__ = (
        *("_own", "_usual_watts", "_working_lines", "before", "changes", "engine_bytes", "error", "error_t", "first_t"),
        *(
            "held_by",
            "held_celsius",
            "highest_bytes",
            "index",
            "interval",
            "last",
            "memory_t",
            "model",
            "now",
            "pod",
            "power_limit_watts",
        ),
        *("processes", "processes_t", "role", "stage", "stage_since", "throttled_seconds", "titles", "total_bytes"),
        *("carried", "used_before", "utilization_t", "uuid", "worked_t"),
    )

    def __init__(self, gpu: TraceGpu, pod: "PodHistory") -> None:
        self.uuid, self.pod, self.index, self.model = gpu.uuid, pod, gpu.index, gpu.model
        self.total_bytes = gpu.memory_total_bytes or None
        self.power_limit_watts = gpu.power_limit_watts or None
        self.last: GpuLine | None = None
        self.first_t: float | None = None
        self.interval = 2.0
        """Usual seconds between two lines."""
        self.utilization_t: float | None = None
        self.memory_t: float | None = None
        """When it was last known."""
        self.stage, self.role = (OTHER, "trainer") if pod.trains else (UNKNOWN, UNKNOWN)
        self.stage_since = 0.0
        self.changes: deque[tuple[float, str, str]] | None = None
        """The last times at which the stage became another; None before there is one."""
        self.now: dict[str, Piece] = {}
        """Stage -> what the running step has of it."""
        self._own = _NO_PAST
        self.processes = _NOBODY
        """Process -> bytes, as last listed."""
        self.titles = _NO_TITLES
        self.processes_t: float | None = None
        self.engine_bytes = _NO_FIGURES
        """Stage -> memory of rollout engine processes as last listed in it."""
        self.highest_bytes = 0.0
        """Of all its life."""
        self.throttled_seconds = 0.0
        """Of all its life, by heat or a power brake."""
        self.held_by: Sequence[str] = ()
        """What NVML said when clocks were last held down by heat or a power brake."""
        self.held_celsius: float | None = None
        """How hot it was then: a moment later, in a stage that does little, it says nothing."""
        self.error: str | None = None
        self.error_t = 0.0
        self._usual_watts = _NO_FIGURES
        self.worked_t: float | None = None
        """When it was last seen to work: neither still, nor spinning at a power that its stage never has."""
        self._working_lines = 0
        self.used_before: float | None = None
        """Memory in the sample before the last."""
        self.carried: tuple[Piece, float, float | None] | None = None
        """What the first sample of a stage found, in use and at most, until the next says whose it was."""
        self.before: Before | None = None

    @property
    def pool(self) -> str:
        """Those that do the same work."""
        return self.pod.pool

    @property
    def past(self) -> Mapping[str, Past]:
        """Stage -> its finished steps. It holds until the next step ends."""
        return self._own

    @property
    def usual_watts(self) -> Mapping[str, float]:
        """Stage -> median power of its finished steps in which the GPU worked."""
        return self._usual_watts

    def usual_in(self, stage: str) -> float | None:
        """Return the same of one stage; None where it is not known."""
        return self._usual_watts.get(stage)

    def pieces(self, stage: str, count: int = DEPTH) -> list[Piece]:
        """Return the last finished steps of a stage, oldest first."""
        past = self.past.get(stage)
        return [] if past is None else past.last(count)

    def spins(self, utilization: float | None, power_watts: float | None) -> bool:
        """Say whether kernels are resident all the time at a power that real work in this stage does not have.

        A collective that waits for a peer keeps its kernel resident and computes nothing: 100% at a quarter of the
        power. Where the stage was not seen before, or takes little power itself, the board's limit is the measure.
        """
        if utilization is None or utilization < SPIN_UTILIZATION:
            return False
        if power_watts is None:
            return self._computes_nothing()
        usual = self.usual_in(self.stage)
        below_limit = self.power_limit_watts is not None and power_watts < SPIN_OF_LIMIT * self.power_limit_watts
        if not self.pod.work.seen:
            # Nobody tells stages: evaluation may take less power than training, though not as little as waiting.
            return below_limit and (usual is None or power_watts < SPIN_OF_USUAL * usual)
        if usual is not None and self.stage not in LOW_POWER_STAGES:
            return power_watts < SPIN_OF_USUAL * usual
        return below_limit

    def _computes_nothing(self) -> bool:
        """Say the same where power is not known: hardly a multiprocessor is active, and no tensor core."""
        line = self.last
        if line is None or line.sm_active is None or line.tensor_active is None:
            return False
        return line.sm_active < 0.15 and line.tensor_active < 0.01

    def watch(self, line: GpuLine) -> None:
        """Note whether it works. One line alone may be a stray kernel, unless lines are far apart."""
        if line.utilization is None:
            working = True
        else:
            still = line.utilization < IDLE_UTILIZATION
            working = not still and not self.spins(line.utilization, line.power_watts)
        self._working_lines = self._working_lines + 1 if working else 0
        if self.worked_t is None or self._working_lines >= 2 or (working and self.interval >= 5.0):
            self.worked_t = line.t

    def finish(self, depth: int) -> None:
        """End the running step: what it has of each stage becomes the past, and is learnt from."""
        if self.carried is not None:
            # No sample of this step took it back.
            piece, used_bytes, peak_bytes = self.carried
            piece.add_memory(used_bytes, peak_bytes)
            self.carried = None
        for stage, piece in self.now.items():
            if piece.seconds <= 0:
                continue
            if stage not in self._own:
                self._own = {**self._own, stage: OwnPast(stage, depth)}
            self._own[stage].append(piece)
        self.now = {}
        self._learn()

    def _learn(self) -> None:
        usual = {**self._usual_watts}
        for stage, past in self._own.items():
            worked = (p for p in past.last(LEARNT_STEPS) if (p.utilization or 0.0) >= USUAL_UTILIZATION)
            power = usual_power((p.power_watts for p in worked if p.power_watts is not None), usual.get(stage))
            if power is not None:
                usual[stage] = power
        self._usual_watts = usual

    def changed(self, t: float, stage: str, role: str) -> None:
        """Remember that the stage became another."""
        if self.changes is None:
            self.changes = deque(maxlen=MAX_CHANGES)
        self.changes.append((t, stage, role))

    def pack(self) -> None:
        """Let go of what rules unpacked."""
        for past in self._own.values():
            past.pack()


class PodHistory:
    """One pod."""

    def __init__(self, pod: TracePod, *, trains: bool) -> None:
        self.trains = trains
        """Whether its workload does nothing but train, and tells no stages."""
        self.name, self.node, self.node_role = pod.name, pod.node, pod.node_role
        self.pool = pod.group or ""
        self.gpus_requested = pod.gpus_requested or 0
        self.memory_limit_bytes = pod.memory_limit_bytes or None
        self.gpus: dict[str, GpuHistory] = {}
        self.work = PodWork()
        self.phase: str | None = None
        self.phase_t = 0.0
        self.ends: list[PodLine] = []
        """Containers of it that ended, the newest last."""
        self.restarts = 0
        self.library_error: str | None = None
        self.library_error_t = 0.0
        self.last_gpu_t: float | None = None
        self.last_host: HostLine | None = None
        self.first_host_t: float | None = None
        self.host_slope: float | None = None
        """Bytes a second, of the last few samples."""
        self.host_buckets = Minutes()
        """Highest memory in use."""
        self.shm_buckets = Minutes()
        self.rss: tuple[float, float] | None = None
        """Time and sum of the resident memory of the listed processes."""
        self.listed_ratio = 0.0
        """Most of the memory in use that these and /dev/shm ever made up: where they never did, the list is short."""

    def gpu_of(self, pid: int) -> GpuHistory | None:
        """Return the GPU of a worker process: where it holds memory, else by its rank, where all ranks are known."""
        if pid in self.work.homes:
            return self.gpus.get(self.work.homes[pid])
        rank = self.work.ranks.get(pid)
        ordered = sorted(self.gpus.values(), key=lambda gpu: (gpu.index is None, gpu.index, gpu.uuid))
        known = rank is not None and len(set(self.work.ranks.values())) == len(ordered)
        return ordered[rank] if known and rank is not None and rank < len(ordered) else None

    def rank_of(self, gpu: GpuHistory) -> int | None:
        """Return the local rank that works on a GPU; None if it is not known."""
        for pid, rank in self.work.ranks.items():
            if self.gpu_of(pid) is gpu:
                return rank
        return None

    @property
    def ended(self) -> bool:
        """Whether it will not run again."""
        return self.phase in ("Succeeded", "Failed")


class History:
    """One workload."""

    def __init__(self, header: Header, *, depth: int = DEPTH, gap_seconds: float = GAP_SECONDS) -> None:
        self.header = header
        self.gap_seconds = gap_seconds
        """A longer silence is a gap: lines that come each quarter of a minute want more than those of each second."""
        self.depth = depth
        """Steps that are remembered of each stage on each GPU."""
        self.entrypoint = header.entrypoint or ""
        found = _PIPELINE.findall(self.entrypoint)
        self.pipeline_stages = max((int(n) for n in found), default=1)
        kind = header.workload.kind if header.workload else None
        self.trainer_only = kind in _TRAINER_KINDS or "sft_trainer" in self.entrypoint
        self.pods = {pod.name: PodHistory(pod, trains=self.trainer_only) for pod in header.pods or ()}
        self.gpus: dict[str, GpuHistory] = {}
        for pod in header.pods or ():
            for gpu in pod.gpus or ():
                self._gpu(self.pods[pod.name], gpu)
        self.t = 0.0
        self.listened = 0.0
        """Seconds for which lines came; a gap in the trace does not count."""
        self.heard: dict[str, float] = {}
        """Pod -> `listened` at its last GPU line."""
        self.phase: str | None = None
        self.phase_t = 0.0
        self.began_here = False
        """Whether the job was still pending in this record, so that it covers the begin."""
        self.told_t: float | None = None
        """When somebody last told what runs."""
        self.running_t: float | None = None
        self.step = 0
        self.step_begin: float | None = None
        self.step_ends: deque[float] = deque(maxlen=DEPTH)
        self.step_seconds: deque[float] = deque(maxlen=DEPTH)
        self.explicit_steps = False
        self.stages_told = False
        """Whether anybody tells stages of this workload."""
        self.updated = False
        """Whether this step had an update already."""
        self.revision = 0
        """Counts finished steps and windows: rules that look at these alone need not look again before."""
        self.alarms = 0
        """Counts the times at which a stage's memory came near the end within a step."""
        self.names: set[str] = set()
        """Names of tasks that were seen, which tell verl's version."""
        self.xids: deque[XidLine] = deque(maxlen=MAX_EVENTS)
        self.helping = 0
        self.sleeps = 0
        """Calls to the rollout engine to give its memory back."""
        self.window_begin: float | None = None
        self.standstill: dict[tuple[str, str], float] = {}
        """Pool and stage -> seconds of this step in which none of the pool's GPUs did anything."""
        self.standstills: dict[tuple[str, str, int], float] = {}
        """Pool, stage and step -> the same of finished steps."""
        self.longest_still: dict[tuple[str, str], float] = {}
        """Pool and stage -> longest time in which a whole pool stood still and then went on."""
        self._still_since: dict[str, tuple[float, str]] = {}
        self._busy: dict[str, set[str]] = {}
        self._looked_t: dict[str, float] = {}
        self.rank_times: deque[dict[tuple[str, str], dict[tuple[str, int], float]]] = deque(maxlen=8)
        """Of each finished step: pool and stage -> pod and process -> seconds that its worker took."""

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.phase in ENDED

    def pools(self) -> dict[str, list[GpuHistory]]:
        """Return the GPUs by pool."""
        pools: dict[str, list[GpuHistory]] = {}
        for gpu in self.gpus.values():
            pools.setdefault(gpu.pool, []).append(gpu)
        return pools

    def usual_step_seconds(self) -> float | None:
        """Return the median length of a step but the first; None before there is one."""
        known = sorted(list(self.step_seconds)[1:] or self.step_seconds)
        return known[len(known) // 2] if known else None

    def host_headroom_bytes(self) -> int | None:
        """Return what the fullest pod with GPUs can still take of host memory; None if it is not known."""
        left = []
        for pod in self.pods.values():
            line = pod.last_host
            limit = None if line is None else line.memory_limit_bytes or pod.memory_limit_bytes
            highest = max((value for _, value in pod.host_buckets), default=None)
            if pod.gpus_requested and limit is not None and highest is not None:
                left.append(round(limit - highest))
        return max(0, min(left)) if left else None

    def gpu_headroom_bytes(self) -> int | None:
        """Return what was never used of the fullest GPU; None if it is not known."""
        left = []
        for gpu in self.gpus.values():
            before = (peak for past in gpu.past.values() for peak in past.peaks)
            peaks = [peak for peak in (*before, *(p.peak_bytes for p in gpu.now.values())) if peak]
            if gpu.total_bytes and peaks:
                left.append(round(gpu.total_bytes - max(peaks)))
        return max(0, min(left)) if left else None

    def pack(self) -> None:
        """Let go of what rules unpacked."""
        for gpu in self.gpus.values():
            gpu.pack()

    def feed(self, record: Record) -> None:
        """Take one line. Lines come in order of time."""
        if record.t > self.t:
            self.listened += min(record.t - self.t, self.gap_seconds)
            self.t = record.t
        match record:
            case GpuLine():
                self._sample(record)
            case TaskLine() | TitleLine() | MarkLine():
                self._work(record)
            case HostLine():
                self._host(record)
            case StepLine():
                self._step(record)
            case XidLine():
                self.xids.append(record)
            case NvmlLine():
                self._nvml(record)
            case PodLine():
                self._pod(record)
            case JobLine():
                self._job(record)
        self._window(record.t)

    # What runs

    def _work(self, line: TaskLine | TitleLine | MarkLine) -> None:
        pod = self.pods.get(line.pod)
        if pod is None or self.over:
            return
        self.stages_told = True
        self.told_t = line.t
        if len(self.names) < MAX_EVENTS:
            self.names.update((line.name,) if isinstance(line, TaskLine) else ())
        helping = pod.work.generating(Kind.HELPER)
        if isinstance(line, TaskLine):
            changed = pod.work.task(line)
            if line.state == "begin" and line.name.endswith(".sleep"):
                self.sleeps += 1
        elif isinstance(line, TitleLine):
            changed = pod.work.title(line)
        else:
            changed = pod.work.mark(line)
        now_helping = pod.work.generating(Kind.HELPER)
        if helping != now_helping:
            self.helping += 1 if now_helping else -1
            self._restage_all(line.t)
        elif changed:
            self._restage(pod, line.t)

    def _restage_all(self, t: float) -> None:
        for pod in self.pods.values():
            self._restage(pod, t)

    def _restage(self, pod: PodHistory, t: float) -> None:
        for gpu in pod.gpus.values():
            stage, role = self._stage_of(pod, gpu)
            if (stage, role) == (gpu.stage, gpu.role):
                continue
            if stage.startswith("update_") and stage != "update_weights":
                self.updated = True
            if stage == GEN and self.updated and not self.explicit_steps:
                self._close_step(t)
            if stage != gpu.stage:
                gpu.stage_since = t
            gpu.stage, gpu.role = stage, role
            self._changed(gpu, t)

    def _changed(self, gpu: GpuHistory, t: float) -> None:
        gpu.changed(t, gpu.stage, gpu.role)

    def _stage_of(self, pod: PodHistory, gpu: GpuHistory) -> tuple[str, str]:
        own = pod.work.stage(gpu.uuid)
        if own is not None:
            return own.stage, own.role
        if self.helping > 0 and (pod.work.workers_seen or not pod.work.servers_seen) and self._serves(pod):
            return GEN, "rollout"
        if pod.work.seen:
            return OTHER, UNKNOWN
        return (OTHER, "trainer") if pod.trains else (UNKNOWN, UNKNOWN)

    def _serves(self, pod: PodHistory) -> bool:
        """Say whether a pod that runs nothing itself may work for a rollout: its pool has servers, or none is known.

        Engines that sleep while those of other pods are awake are a trainer's own, which the rollout does without.
        """
        with_servers = [p for p in self.pods.values() if p.work.servers_seen]
        if pod.work.servers_asleep and any(not p.work.servers_asleep for p in with_servers):
            return False
        return not with_servers or any(p.pool == pod.pool for p in with_servers)

    # Samples

    def _gpu(self, pod: PodHistory, gpu: TraceGpu) -> GpuHistory:
        known = self._new(pod, gpu)
        self.gpus[gpu.uuid] = known
        pod.gpus[gpu.uuid] = known
        return known

    def _new(self, pod: PodHistory, gpu: TraceGpu) -> GpuHistory:
        return GpuHistory(gpu, pod)

    def _sample(self, line: GpuLine) -> None:
        pod = self.pods.get(line.pod)
        if pod is None:
            return
        gpu = pod.gpus.get(line.uuid) or self._gpu(pod, TraceGpu(uuid=line.uuid))
        last_t = None if gpu.last is None else gpu.last.t
        if last_t is not None and line.t <= last_t:
            return
        pod.last_gpu_t = line.t
        self.heard[pod.name] = self.listened
        gpu.first_t = line.t if gpu.first_t is None else gpu.first_t
        if line.utilization is not None:
            gpu.utilization_t = line.t
        if line.memory_used_bytes is not None:
            gpu.memory_t = line.t
        if line.processes is not None:
            self._listed(gpu, line.processes, line.t)
        seconds = 0.0 if last_t is None else line.t - last_t
        if 0 < seconds <= self.gap_seconds:
            gpu.interval += 0.2 * (seconds - gpu.interval)
        if gpu.error is not None and line.t > gpu.error_t and line.memory_used_bytes is not None:
            gpu.error = None if gpu.error in ("GPU_IS_LOST", "UNKNOWN", "TIMEOUT") else gpu.error
        gpu.used_before = None if gpu.last is None else gpu.last.memory_used_bytes
        gpu.last = line
        gpu.watch(line)
        gpu.highest_bytes = max(gpu.highest_bytes, line.memory_used_bytes or 0.0)
        gpu.throttled_seconds += seconds_throttled(line, seconds)
        if held_down(line.throttled or ()):
            gpu.held_by = line.throttled or ()
            gpu.held_celsius = line.temperature_celsius
        gap = seconds > self.gap_seconds
        self._stand(gpu, line)
        self._before(gpu, line)
        if not self.over:
            self._add(gpu, line, begin=line.t if gap or last_t is None else last_t)

    def _add(self, gpu: GpuHistory, line: GpuLine, *, begin: float) -> None:
        """Share the span since the last line among the stages it saw."""
        spans = list(_spans(gpu, begin, line.t))
        whole = len(spans) == 1
        for since, until, stage, role in spans:
            piece = gpu.now.get(stage)
            if piece is None:
                piece = Piece(stage=stage, role=role, step=self.step)
                gpu.now[stage] = piece
            elif piece.role == UNKNOWN:
                piece.role = role
            piece.seconds += until - since
        if whole or line.t - gpu.stage_since >= SETTLED_SECONDS:
            piece = gpu.now[spans[-1][2]]
            _add_load(piece, line, spans[-1][1] - spans[-1][0])
            self._add_memory(gpu, line, piece, peak_bytes=line.memory_peak_bytes if whole else None)
        if not whole and line.memory_peak_bytes is not None:
            stages = frozenset(span[2] for span in spans)
            whose = straddled(gpu, stages, line.memory_peak_bytes, last=spans[-1][2])
            if whose is not None:
                piece = gpu.now[whose]
                before = piece.peak_bytes
                piece.peak_bytes = max(line.memory_peak_bytes, before or 0.0)
                self._alarm(gpu, before, piece)

    def _add_memory(self, gpu: GpuHistory, line: GpuLine, piece: Piece, *, peak_bytes: float | None) -> None:
        """Give a stage the memory of a sample; that of its first one only when the next does not take it back.

        Whoever tells stages and whoever samples may have clocks that are a second or two apart. A training stage that
        begins with what the engine held, and has lost it a sample later, never had it.
        """
        used, before, waits = line.memory_used_bytes, piece.peak_bytes, gpu.carried
        if used is not None and _carries(gpu, line, piece):
            if waits is not None and waits[0] is piece:
                used, peak_bytes = max(used, waits[1]), max(peak_bytes or 0.0, waits[2] or 0.0) or None
            gpu.carried = piece, used, peak_bytes
            return
        if waits is not None:
            gpu.carried = None
            if used is None or waits[1] - used <= USUAL_RISE * (gpu.total_bytes or 0.0):
                waits[0].add_memory(waits[1], waits[2])
            else:
                # It was let go of since, so that the peak of this span is as much the stage before's.
                peak_bytes = None
        piece.add_memory(used, peak_bytes)
        self._alarm(gpu, before, piece)

    def _alarm(self, gpu: GpuHistory, before: float | None, piece: Piece) -> None:
        """Count it where a stage's peak came near the end."""
        total, now = gpu.total_bytes or 0.0, piece.peak_bytes or 0.0
        self.alarms += any((before or 0.0) < ratio * total <= now for ratio in ALARM_RATIOS)

    def _stand(self, gpu: GpuHistory, line: GpuLine) -> None:
        """Add up the time in which a whole pool stands still."""
        pool = gpu.pool
        busy = self._busy.setdefault(pool, set())
        since = line.t - self._looked_t.get(pool, line.t)
        if busy:
            self._still_since.pop(pool, None)
        elif 0 < since <= self.gap_seconds:
            self._still_since.setdefault(pool, (line.t, gpu.stage))
            self.standstill[pool, gpu.stage] = self.standstill.get((pool, gpu.stage), 0.0) + since
        self._looked_t[pool] = line.t
        if line.utilization is None or line.utilization >= IDLE_UTILIZATION:
            stood = self._still_since.pop(pool, None)
            if stood is not None:
                key = pool, stood[1]
                self.longest_still[key] = max(line.t - stood[0], self.longest_still.get(key, 0.0))
            busy.add(gpu.uuid)
        else:
            busy.discard(gpu.uuid)

    def _listed(self, gpu: GpuHistory, processes: Sequence[GpuProcess], t: float) -> None:
        """Take who holds a GPU."""
        gpu.processes_t = t
        sizes: dict[int, float] = {}
        for process in processes:
            # In a container the driver may list one process twice.
            size = float(process.memory_used_bytes or 0)
            sizes[process.pid] = max(size, sizes.get(process.pid, 0.0))
        if self.trainer_only and not self.stages_told and sizes:
            gpu.pod.work.listed(t, began=gpu.before is not None)
        gpu.processes = sizes
        gpu.titles = {p.pid: p.title for p in processes if p.title is not None}
        homes = gpu.pod.work.homes
        for pid, size in sizes.items():
            home = gpu.pod.gpus.get(homes.get(pid, gpu.uuid))
            if home is None or home is gpu or home.processes.get(pid, 0.0) < size:
                homes[pid] = gpu.uuid
        if len(homes) > 1024:
            homes.clear()
        self._engines(gpu)

    def _engines(self, gpu: GpuHistory) -> None:
        """Note what a rollout engine's processes hold in the stage that runs."""
        sizes = gpu.processes
        engines = [sizes[pid] for pid, title in gpu.titles.items() if title.startswith(("VLLM::", "sglang::"))]
        if engines:
            gpu.engine_bytes = {**gpu.engine_bytes, gpu.stage: sum(engines)}

    def _before(self, gpu: GpuHistory, line: GpuLine) -> None:
        """Remember what is held while no process of the job is there."""
        if gpu.pod.work.first_seen is not None or line.memory_used_bytes is None:
            return
        if gpu.before is None:
            gpu.before = Before(line.t)
        gpu.before.add(line.t, line.memory_used_bytes, line.utilization or 0.0)

    # Steps

    def _step(self, line: StepLine) -> None:
        if self.step_ends and line.t - self.step_ends[-1] < 0.5:
            return
        self.explicit_steps = True
        self._close_step(line.t)

    def _close_step(self, t: float) -> None:
        if self.over:
            return
        if self.step_ends:
            self.step_seconds.append(t - self.step_ends[-1])
            dropped = [pod.work.drop_older(self.step_ends[-1]) for pod in self.pods.values()]
            if True in dropped:
                self.helping = sum(pod.work.generating(Kind.HELPER) for pod in self.pods.values())
                self._restage_all(t)
        elif self.running_t is not None:
            self.step_seconds.append(t - self.running_t)
        self.step_ends.append(t)
        self.updated = False
        self._close_pieces(t)

    def _window(self, t: float) -> None:
        """Where nobody tells steps, a stretch of time stands for one."""
        if self.step_ends or self.stages_told or self.over:
            return
        if self.window_begin is None:
            self.window_begin = t
        elif t - self.window_begin >= WINDOW_SECONDS:
            self.window_begin = t
            self._close_pieces(t)

    def _close_pieces(self, t: float) -> None:
        self._finish()
        self._rank_times()
        self.standstills.update({(*key, self.step): seconds for key, seconds in self.standstill.items()})
        self.standstills = {key: value for key, value in self.standstills.items() if key[2] > self.step - DEPTH}
        self.standstill = {}
        self.step += 1
        self.revision += 1
        self.step_begin = t

    def _finish(self) -> None:
        for gpu in self.gpus.values():
            gpu.finish(self.depth)

    def _rank_times(self) -> None:
        times: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
        for pod in self.pods.values():
            for (stage, pid), seconds in pod.work.times.items():
                times.setdefault((pod.pool, stage), {})[pod.name, pid] = seconds
            pod.work.times.clear()
        self.rank_times.append(times)

    # The rest

    def _host(self, line: HostLine) -> None:
        pod = self.pods.get(line.pod)
        if pod is None:
            return
        before = pod.last_host
        if before is not None and line.memory_used_bytes is not None and before.memory_used_bytes is not None:
            seconds = line.t - before.t
            slope = (line.memory_used_bytes - before.memory_used_bytes) / seconds if seconds > 0 else 0.0
            pod.host_slope = slope if pod.host_slope is None else 0.5 * (pod.host_slope + slope)
        pod.last_host = line
        pod.first_host_t = line.t if pod.first_host_t is None else pod.first_host_t
        pod.host_buckets.add(line.t, line.memory_used_bytes)
        pod.shm_buckets.add(line.t, line.shm_used_bytes)
        if line.processes:
            known = [float(p.rss_bytes) for p in line.processes if p.rss_bytes]
            pod.rss = (line.t, sum(known)) if known else pod.rss
            limit = line.memory_limit_bytes or pod.memory_limit_bytes or 0
            # Of a pod that is nearly empty as yet, one process is all.
            if known and line.memory_used_bytes and line.memory_used_bytes >= LISTED_FROM * limit:
                ratio = (sum(known) + float(line.shm_used_bytes or 0)) / line.memory_used_bytes
                pod.listed_ratio = max(pod.listed_ratio, min(1.0, ratio))

    def _nvml(self, line: NvmlLine) -> None:
        pod = self.pods.get(line.pod)
        if pod is None:
            return
        if line.uuid is None:
            pod.library_error, pod.library_error_t = line.error, line.t
            return
        gpu = pod.gpus.get(line.uuid) or self._gpu(pod, TraceGpu(uuid=line.uuid))
        gpu.error, gpu.error_t = line.error, line.t

    def _pod(self, line: PodLine) -> None:
        pod = self.pods.get(line.pod)
        if pod is None:
            return
        if line.phase is not None and line.phase != pod.phase:
            pod.phase, pod.phase_t = line.phase, line.t
        if line.exit_code is not None or line.reason in ("OOMKilled", "Error", "Evicted"):
            pod.ends = [*pod.ends[-7:], line]
        if line.restart_count is not None and line.restart_count > pod.restarts:
            pod.restarts = line.restart_count
            self._begun_anew(pod, line.t)

    def _begun_anew(self, pod: PodHistory, t: float) -> None:
        """A container began again: what ran is gone, and memory may be another's."""
        pod.work.clear()
        pod.host_buckets.clear()
        pod.rss, pod.listed_ratio = None, 0.0
        pod.shm_buckets.clear()
        self.helping = sum(p.work.generating(Kind.HELPER) for p in self.pods.values())
        for gpu in pod.gpus.values():
            gpu.before = None
            gpu.now = {}
        self._restage(pod, t)

    def _job(self, line: JobLine) -> None:
        self.began_here |= line.phase == "Pending"
        if line.phase != self.phase:
            self.phase, self.phase_t = line.phase, line.t
        if line.phase == "Running" and self.running_t is None:
            self.running_t = line.t


def _spans(gpu: GpuHistory, begin: float, end: float) -> Iterator[tuple[float, float, str, str]]:
    """Cut a span by the stages that the GPU was in: since, until, stage, role.

    A change at the very end of it was told before the sample, and belongs to the next.
    """
    changes: Sequence[tuple[float, str, str]] = () if gpu.changes is None else gpu.changes
    inside = [change for change in changes if begin < change[0] < end]
    stage, role = gpu.stage, gpu.role
    if inside or (changes and begin < changes[-1][0]):
        earlier = [change for change in changes if change[0] <= begin]
        stage, role = earlier[-1][1:] if earlier else (UNKNOWN, UNKNOWN)
    since = begin
    for t, next_stage, next_role in inside:
        if next_stage == stage:
            continue
        yield since, t, stage, role
        since, stage, role = t, next_stage, next_role
    yield since, end, stage, role


def straddled(gpu: GpuHistory, stages: frozenset[str], peak_bytes: float, *, last: str) -> str | None:
    """Return whose peak it is that fell into a span of several stages; None where that cannot be told.

    The window in which the rollout resumes is short, and begins with its peak, the highest of a step: mostly that lies
    in such a span. It is the hand-over's where each other stage is known and stays well below; else that of the one
    training stage which alone comes as high. Example: of 78 GiB between `ref`, never above 40, and `update_actor`,
    which reaches 70, the latter's. Releases that hand over inside generation (up to 0.7.0) tell no window, and the
    begin of generation stands for it: `last` says which stage the span ends in.
    """
    total = gpu.total_bytes
    if not total:
        return None
    highest = {stage: _highest(gpu, stage) for stage in stages}
    resumes = GEN if last == GEN and RESUME not in stages and _resumes_inside(gpu) else RESUME
    if resumes in stages and highest[resumes] is not None and _below(highest, resumes, peak_bytes, total):
        return resumes
    trained = {stage: known for stage in sorted(stages) if stage in TRAINED and (known := highest[stage]) is not None}
    if not trained:
        return None
    most = max(trained, key=lambda stage: trained[stage])
    # One peak that was put down wrongly must not draw the others of its kind after it.
    alone = stages <= TRAINED or peak_bytes <= _usual(gpu, most, trained[most]) + USUAL_RISE * total
    return most if alone and _below(highest, most, peak_bytes, total) else None


def _resumes_inside(gpu: GpuHistory) -> bool:
    """Say whether weights are handed over inside generation: no window was ever told, and the GPU generates itself."""
    return RESUME not in gpu.past and any((p.utilization or 0.0) >= IDLE_UTILIZATION for p in gpu.pieces(GEN, 3))


def _highest(gpu: GpuHistory, stage: str) -> float | None:
    """Return the highest known peak of a stage; None before one of its steps is over."""
    past, now = gpu.past.get(stage), gpu.now.get(stage)
    if past is None:
        return None
    known = [peak for peak in past.peaks if peak is not None]
    return max([*known, (now.peak_bytes if now is not None else None) or 0.0])


def _usual(gpu: GpuHistory, stage: str, highest: float) -> float:
    """Return the median of a stage's last peaks."""
    past = gpu.past.get(stage)
    known = sorted(peak for peak in (past.peaks if past is not None else ())[-_USUAL_STEPS:] if peak is not None)
    return known[len(known) // 2] if known else highest


def _below(highest: Mapping[str, float | None], one: str, peak_bytes: float, total: float) -> bool:
    """Say whether all stages but one stay so far below a peak that it cannot be theirs."""
    for stage, known in highest.items():
        # What runs between stages takes no memory of its own, but for a hand-over that nobody tells.
        if stage in (one, OTHER, UNKNOWN):
            continue
        apart = TRAINED_APART if stage in TRAINED else ENGINE_APART
        if known is None or peak_bytes < known + apart * total:
            return False
    return True


def _carries(gpu: GpuHistory, line: GpuLine, piece: Piece) -> bool:
    """Say whether a training stage has only begun, and finds the memory that was in use before."""
    used, before, total = line.memory_used_bytes, gpu.used_before, gpu.total_bytes
    if used is None or before is None or not total or piece.stage not in TRAINED:
        return False
    return line.t - gpu.stage_since <= SKEW_SECONDS and abs(used - before) <= TRAINED_APART * total


def _add_load(piece: Piece, line: GpuLine, seconds: float) -> None:
    if line.utilization is not None:
        piece.known_seconds += seconds
        piece.busy_seconds += seconds * line.utilization
        piece.idle_seconds += seconds if line.utilization < IDLE_UTILIZATION else 0.0
    if line.power_watts is not None:
        piece.powered_seconds += seconds
        piece.energy_joules += seconds * line.power_watts
    if line.throttled is not None:
        piece.throttle_known_seconds += seconds
        piece.throttled_seconds += seconds_throttled(line, seconds)


def seconds_throttled(line: GpuLine, seconds: float) -> float:
    """Return the seconds of a sample if heat or a power brake held the clocks down in it, else 0."""
    return seconds if held_down(line.throttled or ()) else 0.0
