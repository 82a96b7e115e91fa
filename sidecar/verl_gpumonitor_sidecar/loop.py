# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The main loop's one turn: look at what the sources left, join it, publish it, say what changed.

A turn does no I/O that could block, so that the loop turns, and SIGTERM is heard, whatever hangs elsewhere.
"""

import os
import time
from collections.abc import Callable
from typing import Protocol

from verl_gpumonitor.model.report import ReportAnswer
from verl_gpumonitor.model.samples import NodeSample
from verl_gpumonitor.model.vocabulary import Ownership, Source
from verl_gpumonitor.reading.host import host_sample

from .join import Inputs, Memory, Terms, join
from .journal import Journal
from .ray_watch import RayView
from .state import PodState
from .urgency import Known, look

HEALTHY_SECONDS = 30.0
"""A loop that has not turned for so long is stuck."""


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


class Loop:
    """Turned by the main thread alone; `state`, `healthy` and `take_answer` may be used by others."""

    def __init__(
        self,
        terms: Terms,
        *,
        node: NodeReading | None,
        ray: RayReading | None,
        shm_path: str = "",
        shared_processes: bool = False,
        journal: Journal,
        urgent: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`node` None: the pod asks for no GPU, so none is read. `ray` None: not a Ray pod."""
        self._terms = terms
        self._node = node
        self._ray = ray
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

    def take_answer(self, answer: ReportAnswer) -> None:
        """Take over what the controller says about this pod."""
        if answer.gpu_uuids is not None:
            self._relayed_uuids = tuple(answer.gpu_uuids)

    def _turn(self, now: float) -> None:
        view = self._ray.latest() if self._ray else RayView()
        node = self._node.latest() if self._node else NodeSample()
        inputs = Inputs(
            node=node,
            agent=view.agent,
            relayed_uuids=self._relayed_uuids,
            host=host_sample(ray=view.agent.host if view.agent else None, shm_path=self._shm_path),
            ray_nodes=view.nodes,
            processes_on=self._processes_on(node) if self._shared_processes else None,
        )
        self._memory, self.state = join(self._memory, inputs, terms=self._terms, now=now, now_unix=self._unix_clock())
        if self._ray:
            self._ray.set_needed(needs_ray(self.state))
        self._known, news = look(self._known, self.state, now)
        if news:
            self._urgent()
        self._say(self.state)

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


def needs_ray(state: PodState) -> bool:
    """Return whether Ray's agent is wanted for GPUs: to read them, or to say whose they are."""
    if state.ownership is Ownership.NONE_REQUESTED:
        return False
    return state.source is not Source.NVML or len(state.gpus) < state.gpus_requested
