# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Asks Ray, in a thread of its own: the metrics agent of this pod, and on the head the dashboard for the nodes' GPUs.

Ray's servers belong to the job: they are asked seldom, briefly, and may be absent, broken or hostile at any time.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from verl_gpumonitor.model.report import RayNode
from verl_gpumonitor.model.samples import RayAgentSample
from verl_gpumonitor.model.stages import StageWord

from .journal import Journal

NEEDED_SECONDS: Final = 5.0
"""Pace while the agent is the source of GPU values, or may say whose the GPUs are; it renews them so often."""
HOST_SECONDS: Final = 15.0
"""Pace while only the host's memory is wanted: reading the page takes CPU from the job's own agent."""
FIRST_NODES_SECONDS: Final = 10.0
NODES_SECONDS: Final = 60.0
"""Pace of the nodes' list: the first after a change, doubled up to the second while it stays the same."""
KEPT_SECONDS: Final = 45.0
"""What the agent said is forgotten after so long without a further word."""


class AgentPage(msgspec.Struct, frozen=True, kw_only=True):
    """What one page of the agent says."""

    sample: RayAgentSample
    names: tuple[str, ...] = ()
    """Titles of processes, and names of tasks that run."""
    submitted: frozenset[bytes] = frozenset()
    """Names of tasks that processes of this pod have given away."""


class NamesToStages(Protocol):
    """What the watch needs of `sources.ray_agent.AgentStages`."""

    def observe(self, at: float, names: tuple[str, ...]) -> bool:
        """Take the names of a page; say whether anything began or ended."""

    def word(self, now_unix: float) -> StageWord:
        """Return the word on the pod."""


class RayView(msgspec.Struct, frozen=True, kw_only=True):
    """What Ray said last."""

    agent: RayAgentSample | None = None
    """None when the agent was never heard, or not for some time."""
    agent_at: float | None = None
    nodes: tuple[RayNode, ...] = ()
    """GPUs of the cluster's nodes, on the head alone."""
    stages: StageWord | None = None
    """What runs in this pod, by the agent. It tells itself up to when it holds."""


class RayWatch:
    """Keeps the newest word of Ray. `latest` never waits."""

    def __init__(
        self,
        *,
        read_agent: Callable[[], AgentPage] | None,
        read_nodes: Callable[[], tuple[RayNode, ...]] | None,
        stages: NamesToStages | None = None,
        changed: Callable[[], None] = lambda: None,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Start nothing yet. The two readers may block for some seconds and raise anything; None: not asked.

        `stages` None: what runs here is of no interest. `changed` is called when something else runs by the agent's
        page, here or for a driver that is here.
        """
        self._read_agent = read_agent
        self._read_nodes = read_nodes
        self._stages = stages
        self._changed = changed
        self._journal = journal
        self._clock = clock
        self._unix_clock = unix_clock
        self._view = RayView()
        self._submitted: frozenset[bytes] | None = None
        self._needed = True
        self._wake = threading.Event()
        self._agent_due = clock()
        self._nodes_due = clock()
        self._nodes_wait = FIRST_NODES_SECONDS

    def start(self) -> None:
        """Ask in a daemon thread until the process ends."""
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def latest(self) -> RayView:
        """Return what Ray said last; from any thread."""
        view = self._view
        if view.agent_at is not None and self._clock() - view.agent_at > KEPT_SECONDS:
            return RayView(nodes=view.nodes, stages=view.stages)
        return view

    def set_needed(self, needed: bool) -> None:
        """Say whether GPU values or names are wanted, or host memory alone; from any thread."""
        if needed and not self._needed:
            self._needed = True
            self._wake.set()
        self._needed = needed

    def _run(self) -> None:
        while True:
            self.turn()
            if self._wake.wait(max(0.0, self.due_at() - self._clock())):
                self._wake.clear()
                self._agent_due = min(self._agent_due, self._clock())

    def due_at(self) -> float:
        """Return when the next question is due."""
        due = [self._agent_due] if self._read_agent else []
        return min([*due, self._nodes_due] if self._read_nodes else due, default=self._clock() + NODES_SECONDS)

    def turn(self) -> None:
        """Ask whatever is due."""
        now = self._clock()
        if self._read_agent and now >= self._agent_due:
            self._ask_agent(self._read_agent)
            self._agent_due = self._clock() + (NEEDED_SECONDS if self._needed else HOST_SECONDS)
        if self._read_nodes and now >= self._nodes_due:
            self._ask_nodes(self._read_nodes)
            self._nodes_due = self._clock() + self._nodes_wait

    def _ask_agent(self, read: Callable[[], AgentPage]) -> None:
        try:
            page = read()
            stages = self._stage_word(page)
        except Exception as error:  # noqa: BLE001 - the agent is the job's; nothing that it says may end this thread
            self._journal.state("ray agent", "Ray's agent does not answer", kind=type(error).__name__, error=str(error))
            return
        sample = page.sample
        self._view = RayView(agent=sample, agent_at=self._clock(), nodes=self._view.nodes, stages=stages)
        self._journal.state("ray agent", "Ray's agent answers", gpus=len(sample.gpus) + len(sample.unnamed_gpus))

    def _stage_word(self, page: AgentPage) -> StageWord | None:
        now = self._unix_clock()
        changed = self._submitted is not None and page.submitted != self._submitted
        self._submitted = page.submitted
        if self._stages is not None:
            changed = self._stages.observe(now, page.names) or changed
        if changed:
            self._changed()
        return self._stages.word(now) if self._stages is not None else None

    def _ask_nodes(self, read: Callable[[], tuple[RayNode, ...]]) -> None:
        self._nodes_wait = min(NODES_SECONDS, self._nodes_wait * 2)
        try:
            nodes = read()
        except Exception as error:  # noqa: BLE001 - as above
            self._journal.state(
                "ray head", "Ray's dashboard does not answer", kind=type(error).__name__, error=str(error)
            )
            return
        if nodes != self._view.nodes:
            self._nodes_wait = FIRST_NODES_SECONDS
        self._view = msgspec.structs.replace(self._view, nodes=nodes)
        self._journal.state("ray head", "Ray's dashboard names nodes with GPUs", nodes=len(nodes))
