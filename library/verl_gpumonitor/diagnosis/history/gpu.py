# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The history of one GPU: what it did in each stage, and what is known of it now."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from verl_gpumonitor.diagnosis.work import OTHER
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
from verl_gpumonitor.model.trace import GpuLine, TraceGpu
from verl_gpumonitor.model.vocabulary import UNKNOWN

if TYPE_CHECKING:
    from .pod import PodHistory

DEPTH: Final = 24
"""Steps that are remembered of each stage."""
MAX_CHANGES: Final = 64
SPIN_UTILIZATION: Final = 0.9
SPIN_OF_LIMIT: Final = 0.4
LOW_POWER_STAGES: Final = frozenset(("update_weights", "init", "save_checkpoint", OTHER))
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

    # fmt: off
    __slots__ = (
        "_own", "_usual_watts", "_working_lines", "before", "carried", "changes", "engine_bytes", "error", "error_t",
        "first_t", "held_by", "held_celsius", "highest_bytes", "index", "interval", "last", "memory_t", "model", "now",
        "pod", "power_limit_watts", "processes", "processes_t", "role", "stage", "stage_since", "tells_peaks",
        "throttled_seconds", "titles", "total_bytes", "used_before", "utilization_t", "uuid", "worked_t",
    )
    # fmt: on

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
        self.tells_peaks = False
        """Whether any of its lines told a peak of memory since the one before."""
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
