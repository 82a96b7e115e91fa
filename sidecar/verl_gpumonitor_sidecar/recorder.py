# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the last half hour of the pod, so that somebody can ask for it when a job was in trouble.

What is kept: samples of the own GPUs, what the pod was in, steps, host memory, Xids, errors of the driver. Nothing that
a process was started with, so no secrets. All of it is bounded: 8 GPUs take some 250 KiB, and 64 GPUs 640 KiB, which
are ten minutes of them. The loop's thread adds, the endpoint's reads.
"""

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from verl_gpumonitor.model.report import MAX_GPUS
from verl_gpumonitor.model.samples import GpuSample, HostSample
from verl_gpumonitor.model.vocabulary import GpuState, Source
from verl_gpumonitor.timeline.steps import Step
from verl_gpumonitor.timeline.words import Part

from .ring import MAX_REASONS, SLOT_BYTES, GpuRing, Kept
from .state import OwnGpu, PodState, StagePicture

SAMPLES: Final = 900
"""Of each GPU: half an hour, with one sample kept of two that are a second apart."""
MAX_RING_BYTES: Final = 640 * 1024
"""Of all GPUs together."""
MAX_STAGES: Final = 1024
MAX_STEPS: Final = 256
MAX_HOST: Final = 360
MAX_EVENTS: Final = 256
HOST_SECONDS: Final = 5.0
MAX_XIDS: Final = 16
"""Of one code at one look; a GPU may tell of hundreds at once."""
_SAME_SECONDS: Final = 0.05
_SET_SECONDS: Final = 1.0
"""A Unix clock that goes on by so much more or less than the monotonic one between two looks was set."""
_NAMES: Final = {"CALL_TIMED_OUT": "TIMEOUT"}


class Stay(NamedTuple):
    """A time in one stage."""

    begin: float
    end: float
    stage: str
    role: str
    step: int | None


class HostKept(NamedTuple):
    """The pod's host memory at one moment."""

    at: float
    memory_used_bytes: int | None
    memory_limit_bytes: int | None
    shm_used_bytes: int | None
    shm_size_bytes: int | None


class Xid(NamedTuple):
    """The driver told of an error."""

    at: float
    uuid: str
    code: int


class Failure(NamedTuple):
    """The driver's answer changed."""

    at: float
    uuid: str | None
    """None: the library itself."""
    error: str | None
    """None: it is well again."""


class _Gpu:
    """What is kept of one GPU, and what was seen of it last."""

    __slots__ = ("busy", "due_at", "observed", "peak", "read_at", "ring", "taken_at", "xids")

    def __init__(self, capacity: int) -> None:
        self.ring = GpuRing(capacity)
        self.taken_at = self.due_at = self.read_at = float("-inf")
        self.observed = self.busy = 0.0
        self.peak: int | None = None
        self.xids: dict[int, int] = {}

    def see(self, readings: Iterable[tuple[float, int]]) -> None:
        """Take the readings of memory that are new into the peak."""
        for at, used in readings:
            if at > self.read_at:
                self.read_at = at
                self.peak = used if self.peak is None else max(used, self.peak)


class Snapshot(NamedTuple):
    """All that is kept, but for the samples."""

    state: PodState
    """The newest picture."""
    stays: tuple[Stay, ...]
    """What the pod was in: in order, as far as it is decided."""
    steps: tuple[tuple[float, int | None], ...]
    """End of each step, and verl's own number."""
    host: tuple[HostKept, ...]
    events: tuple[Xid | Failure, ...]


class Recorder:
    """Takes each picture that the loop makes.

    All times in it are monotonic, those of stages too, so that a clock that is set tears nothing apart.
    """

    def __init__(self, *, gpus_requested: int, sample_interval_seconds: float = 1.0) -> None:
        self._interval = 2 * sample_interval_seconds
        self._capacity = min(SAMPLES, MAX_RING_BYTES // SLOT_BYTES // max(1, gpus_requested))
        self._gpus: dict[str, _Gpu] = {}
        self._reasons: list[str] = []
        self._lock = threading.Lock()
        """Guards what follows: the endpoint's thread takes copies of it."""
        self._state = PodState(gpus_requested=gpus_requested)
        self._stays: deque[Stay] = deque(maxlen=MAX_STAGES)
        self._steps: deque[tuple[float, int | None]] = deque(maxlen=MAX_STEPS)
        self._host: deque[HostKept] = deque(maxlen=MAX_HOST)
        self._events: deque[Xid | Failure] = deque(maxlen=MAX_EVENTS)
        self._step_number = 0
        self._behind: float | None = None
        """What the Unix clock is before the monotonic one."""
        self._behind_before: float | None = None
        """The same before it was set last: what is decided late may be told by it."""
        self._errors: dict[str | None, str | None] = {}

    def look(self, state: PodState, *, now: float, now_unix: float) -> None:
        """Keep what is new in the loop's picture; `now` is monotonic, and of the same moment as `now_unix`."""
        behind = self._note_clock(now_unix - now)
        for gpu in state.gpus[:MAX_GPUS]:
            self._sample(gpu)
        with self._lock:
            self._state = state
            self._take_stages(state.stages, now)
            self._take_steps(state.stages.steps, now)
            self._take_host(state.host, now)
            self._take_xids(state.gpus[:MAX_GPUS], now, behind)
            self._take_errors(state, now)

    def snapshot(self) -> Snapshot:
        """Return what is kept, at once; from any thread."""
        with self._lock:
            return Snapshot(self._state, tuple(self._stays), tuple(self._steps), tuple(self._host), tuple(self._events))

    def rings(self) -> dict[str, GpuRing]:
        """Return the samples by UUID; from any thread."""
        return {uuid: gpu.ring for uuid, gpu in dict(self._gpus).items()}

    def reasons(self, bits: int) -> list[str]:
        """Return the reasons of throttling that these bits stand for."""
        return [reason for place, reason in enumerate(self._reasons) if bits >> place & 1]

    def _sample(self, own: OwnGpu) -> None:
        sample, counters = own.sample, own.counters
        gpu = self._gpus.get(sample.uuid)
        if gpu is None:
            if len(self._gpus) >= MAX_GPUS:
                return
            gpu = self._gpus[sample.uuid] = _Gpu(self._capacity)
        gpu.see(counters.memory_readings)
        at = sample.taken_at
        if sample.state is not GpuState.OK or at is None or at <= gpu.taken_at:
            return
        if at < gpu.due_at - self._interval / 4:  # Half a sample's time: samples come a little early or late.
            return
        in_step = gpu.due_at + self._interval  # Not so for the first one, and after a stall.
        gpu.due_at = in_step if in_step > at + self._interval / 2 else at + self._interval
        gpu.taken_at = at
        used_now, peak = sample.memory_used_bytes, gpu.peak
        gpu.peak = None
        if used_now is not None:
            peak = used_now if peak is None else max(used_now, peak)
        observed, busy = counters.observed_seconds - gpu.observed, counters.busy_seconds - gpu.busy
        gpu.observed, gpu.busy = counters.observed_seconds, counters.busy_seconds
        gpu.ring.add(
            Kept(
                at,
                # Of all samples since the last that was kept.
                sample.utilization if sample.utilization is None or observed <= 0.0 else busy / observed,
                used_now,
                peak,
                sample.power_watts,
                sample.temperature_celsius,
                None if sample.throttled is None else self._bits(sample.throttled),
            )
        )

    def _bits(self, reasons: Iterable[str]) -> int:
        bits = 0
        for reason in reasons:
            if reason not in self._reasons and len(self._reasons) < MAX_REASONS:
                self._reasons.append(reason)
            if reason in self._reasons:
                bits |= 1 << self._reasons.index(reason)
        return bits

    def _note_clock(self, behind: float) -> float:
        if self._behind is not None and abs(behind - self._behind) > _SET_SECONDS:
            self._behind_before = self._behind
        self._behind = behind
        return behind

    def _offset(self, unix: float, since: float, now: float) -> float:
        """Return by what a Unix time becomes one between the two others, which is what it is."""
        present = self._behind or 0.0
        known = (present, present if self._behind_before is None else self._behind_before)
        fitting = (behind for behind in known if since < unix - behind <= now + _SAME_SECONDS)
        return next(fitting, present)

    def _take_stages(self, stages: StagePicture, now: float) -> None:
        for part in stages.decided:
            last = self._stays[-1] if self._stays else None
            behind = self._offset(part.end, float("-inf") if last is None else last.end + _SAME_SECONDS, now)
            begin, end = part.begin - behind, part.end - behind
            if last is not None and end <= last.end + _SAME_SECONDS:
                continue  # It was taken already: a turn that failed leaves the picture before.
            if last is not None and _goes_on(last, part) and begin - last.end <= _SAME_SECONDS:
                self._stays[-1] = last._replace(end=end)
                continue
            # The same few words come again and again, each time as another object.
            stage, role = sys.intern(part.stage), sys.intern(part.role)
            self._stays.append(Stay(begin if last is None else max(begin, last.end), end, stage, role, part.step))

    def _take_steps(self, steps: Iterable[Step], now: float) -> None:
        for step in steps:
            if step.number > self._step_number:
                self._step_number = step.number
                since = self._steps[-1][0] if self._steps else float("-inf")
                self._steps.append((step.end - self._offset(step.end, since, now), step.step))

    def _take_host(self, host: HostSample | None, now: float) -> None:
        if host is None:
            return
        # /dev/shm is measured at this moment; the rest when its source said it.
        at = now if host.taken_at is None else host.taken_at
        if self._host and at - self._host[-1].at < HOST_SECONDS - 1.0:
            return
        self._host.append(
            HostKept(at, host.memory_used_bytes, host.memory_limit_bytes, host.shm_used_bytes, host.shm_size_bytes)
        )

    def _take_xids(self, gpus: Iterable[OwnGpu], now: float, behind: float) -> None:
        for own in gpus:
            gpu = self._gpus.get(own.sample.uuid)
            if gpu is None or own.counters.xid_errors == gpu.xids:
                continue
            for code, count in own.counters.xid_errors.items():
                at = own.xid_last_unix.get(code, now + behind) - behind
                new = min(MAX_XIDS, count - gpu.xids.get(code, 0))
                self._events.extend(Xid(at, own.sample.uuid, code) for _ in range(new))
            gpu.xids = own.counters.xid_errors

    def _take_errors(self, state: PodState, now: float) -> None:
        for uuid, error in _errors(state):
            if error != self._errors.get(uuid):
                self._errors[uuid] = error
                self._events.append(Failure(now, uuid, error))


def _goes_on(last: Stay, part: Part) -> bool:
    return (last.stage, last.role, last.step) == (part.stage, part.role, part.step)


def _errors(state: PodState) -> Iterator[tuple[str | None, str | None]]:
    """Yield what is wrong with the library (None) and with each GPU; while the library is away, that is one problem."""
    away = state.source is Source.NONE and state.unavailable is not None and state.gpus_requested > 0
    said = next((gpu.sample.error for gpu in state.gpus if gpu.sample.error), None)
    yield None, _nvml(said or str(state.unavailable)) if away else None
    if not away:
        for gpu in state.gpus[:MAX_GPUS]:
            sample = gpu.sample
            yield sample.uuid, None if sample.state is GpuState.OK else _name(sample)


def _name(sample: GpuSample) -> str:
    """Return NVML's name of what is wrong with a GPU."""
    return _nvml(sample.error or ("GPU_IS_LOST" if sample.state is GpuState.LOST else "UNKNOWN"))


def _nvml(error: str) -> str:
    """Return NVML's name, where we have a word of our own for the same."""
    return _NAMES.get(error, error)
