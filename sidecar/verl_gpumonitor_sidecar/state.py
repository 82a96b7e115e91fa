# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the sidecar knows of its pod at one moment: the loop makes it, exporter and reporter render it. Pure.

Times named `…_at` are of the monotonic clock, those named `…_unix` are Unix seconds.
"""

from collections.abc import Mapping

import msgspec

from verl_gpumonitor.model.report import RayJobInfo, RayNode, StageCount, StageNow, StageQuality
from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample, ReadingHealth
from verl_gpumonitor.model.stages import StageInterval, StageWord
from verl_gpumonitor.model.vocabulary import UNKNOWN, GpuState, Ownership, Source, UnavailableReason
from verl_gpumonitor.timeline.steps import Step
from verl_gpumonitor.timeline.totals import Key
from verl_gpumonitor.timeline.words import Part

FRESH_INTERVALS = 3
"""A value older than so many intervals of its source is no longer shown."""
PRESENT_SECONDS = 5.0
"""A stage that was found longer ago is not the present one."""


class OwnGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that is the pod's own."""

    sample: GpuSample
    counters: GpuCounters
    xid_last_unix: dict[int, float] = {}
    """Xid code -> time of the last one."""


class StagePicture(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the pod's stages. Counters are those that are settled; the last minute may be missing."""

    now: StageNow | None = None
    """What runs; None when nobody can tell."""
    others_now: tuple[StageNow, ...] = ()
    """What other Ray jobs do in the pod at the same time."""
    now_unix: float = 0.0
    """When that was found."""
    roles: Mapping[str, str] = {}
    """UUID -> role that the GPU is in now. One that is not here is in none that is known."""
    quality: StageQuality = StageQuality()
    counts: Mapping[str, tuple[StageCount, ...]] = {}
    """UUID -> counters by stage, in the order in which the stages were first seen."""
    pod_seconds: Mapping[Key, float] = {}
    """Wall time of the pod by (job, stage, role), in that order too."""
    steps: tuple[Step, ...] = ()
    """Whole steps that were not heard of by the controller, oldest first."""
    decided: tuple[Part, ...] = ()
    """What the pod was in, as far as this turn decided it, in order."""


class ClusterStagesSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What this pod knows of the stages of all pods of its Ray cluster: a head, or a pod in which the driver marks."""

    marks: StageWord | None = None
    """The driver's, good for all nodes."""
    known_from: float = 0.0
    known_until: float = 0.0
    """Span of Ray's State API; empty where it is not asked."""
    nodes: Mapping[str, tuple[StageInterval, ...]] = {}
    """By node IP, as the State API says."""
    ahead: Mapping[str, float] = {}
    """Node IP -> how far its clock is before ours, where it is."""
    changes: int = 0
    """Rises when another stage runs anywhere."""
    jobs: tuple[RayJobInfo, ...] = ()


class PodState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture. Before the first pass it says nothing but the number of GPUs that were asked for."""

    gpus_requested: int
    source: Source = Source.NONE
    ownership: Ownership = Ownership.UNKNOWN
    unavailable: UnavailableReason | None = None
    """None while GPU values are there, none were asked for, or nothing was tried yet."""
    message: str | None = None
    gpus: tuple[OwnGpu, ...] = ()
    gpus_visible: int | None = None
    driver_version: str | None = None
    interval_seconds: float = 1.0
    """Time between two samples of the present source."""
    host: HostSample | None = None
    health: ReadingHealth = ReadingHealth()
    last_success_unix: float | None = None
    """When GPU values were last read, from whatever source."""
    success: bool | None = None
    """Whether the newest attempt to read GPU values succeeded; None before the first, or when none are asked for."""
    ray_nodes: tuple[RayNode, ...] = ()
    stages: StagePicture = StagePicture()
    cluster: ClusterStagesSeen = ClusterStagesSeen()
    programs: Mapping[int, str] | None = None
    """Pid -> program of the processes on GPUs, empty for one that is not known; None: whose they are cannot be told,
    so that their lists say nothing."""

    @property
    def started(self) -> bool:
        """Whether anything was tried: before that, silence means nothing."""
        return self.success is not None or self.ownership is Ownership.NONE_REQUESTED


def is_fresh(taken_at: float | None, state: PodState, now: float) -> bool:
    """Return whether a reading taken then may still be shown as the present value."""
    return taken_at is not None and now - taken_at <= FRESH_INTERVALS * state.interval_seconds


def gauges(sample: GpuSample, state: PodState, now: float) -> GpuSample:
    """Return the sample with whatever is too old made unknown. Memory and load are read at paces of their own."""
    load = sample.state is GpuState.OK and is_fresh(sample.taken_at, state, now)
    memory_taken_at = sample.taken_at if sample.memory_taken_at is None else sample.memory_taken_at
    memory = sample.state is GpuState.OK and is_fresh(memory_taken_at, state, now)
    if load and memory:
        return sample  # Nothing is too old: the usual case.
    kept = {field: getattr(sample, field) for field in _IDENTITY}
    if load:
        kept |= {field: getattr(sample, field) for field in _LOAD}
    if memory:
        kept |= {field: getattr(sample, field) for field in _MEMORY}
    return GpuSample(**kept)


def is_present(state: PodState, now_unix: float) -> bool:
    """Return whether what was found to run may still be shown as the present."""
    return abs(now_unix - state.stages.now_unix) <= PRESENT_SECONDS


def role_now(uuid: str, state: PodState, now_unix: float) -> str:
    """Return the role that a GPU is in at the moment; `unknown` where that is not known."""
    return state.stages.roles.get(uuid, UNKNOWN) if is_present(state, now_unix) else UNKNOWN


def recent_peak(gpu: OwnGpu, present: GpuSample) -> int | None:
    """Return the recent peak of memory while memory is being read; `present` is what `gauges` returned."""
    return None if present.memory_used_bytes is None else gpu.counters.memory_recent_peak_bytes


_IDENTITY = ("uuid", "state", "error", "index", "model", "taken_at", "memory_taken_at")
_MEMORY = ("memory_used_bytes", "memory_reserved_bytes", "memory_total_bytes")
_LOAD = tuple(field for field in GpuSample.__struct_fields__ if field not in _IDENTITY and field not in _MEMORY)
