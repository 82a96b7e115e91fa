# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The history of one workload, of which the rules see all they see: fed line by line, it never looks ahead."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Final

from verl_gpumonitor.diagnosis.work import GEN, OTHER, Worker
from verl_gpumonitor.model.history import IDLE_UTILIZATION
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
    XidLine,
)
from verl_gpumonitor.model.vocabulary import UNKNOWN, held_down
from verl_gpumonitor.stages.tables import Kind

from .attribution import attribute, seconds_throttled
from .gpu import DEPTH, Before, GpuHistory
from .pod import PodHistory
from .standstill import Standstill

ENDED: Final = frozenset(("Succeeded", "Failed", "Stopped"))
GAP_SECONDS: Final = 15.0
"""A longer silence is a gap: nothing is known of it, and nothing is added up for it."""
WINDOW_SECONDS: Final = 120.0
"""Where nobody tells steps (SFT by torchrun), so much time stands for one."""
MAX_EVENTS: Final = 256
_PIPELINE: Final = re.compile(r"pipeline_model_parallel_size[=\s]+(\d+)")
_TRAINER_KINDS: Final = frozenset(("PyTorchJob", "TrainJob", "MPIJob"))


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
        self.standstill = Standstill()
        self.rank_times: deque[dict[tuple[str, str], dict[tuple[str, Worker], float]]] = deque(maxlen=8)
        """Of each finished step: pool and stage -> pod and worker -> seconds that it took."""

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
        own = pod.work.stage(gpu.uuid, rank=pod.marking_rank_of(gpu))
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
        self.standstill.take(gpu, line, gap_seconds=self.gap_seconds)
        self._before(gpu, line)
        if not self.over:
            self._add(gpu, line, begin=line.t if gap or last_t is None else last_t)

    def _add(self, gpu: GpuHistory, line: GpuLine, *, begin: float) -> None:
        self.alarms += attribute(gpu, line, begin=begin, step=self.step)

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
        """Remember what is held before the job: no process of it is there, or none is told and no GPU works yet."""
        pod, utilization = gpu.pod, line.utilization or 0.0
        if pod.work.first_seen is not None or pod.began_to_work or line.memory_used_bytes is None:
            return
        if gpu.before is None:
            gpu.before = Before(line.t)
        elif gpu.before.busiest < IDLE_UTILIZATION <= utilization:
            pod.began_to_work = True
            return
        gpu.before.add(line.t, line.memory_used_bytes, utilization)

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
        self.standstill.finish(self.step)
        self.step += 1
        self.revision += 1
        self.step_begin = t

    def _finish(self) -> None:
        for gpu in self.gpus.values():
            gpu.finish(self.depth)

    def _rank_times(self) -> None:
        times: dict[tuple[str, str], dict[tuple[str, Worker], float]] = {}
        for pod in self.pods.values():
            for (stage, worker), seconds in pod.work.times.items():
                times.setdefault((pod.pool, stage), {})[pod.name, worker] = seconds
            pod.work.times.clear()
        self.rank_times.append(times)

    # The rest

    def _host(self, line: HostLine) -> None:
        pod = self.pods.get(line.pod)
        if pod is not None:
            pod.take_host(line)

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
        pod.began_to_work = False
        self._restage(pod, t)

    def _job(self, line: JobLine) -> None:
        self.began_here |= line.phase == "Pending"
        if line.phase != self.phase:
            self.phase, self.phase_t = line.phase, line.t
        if line.phase == "Running" and self.running_t is None:
            self.running_t = line.t
