# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the head of one Ray cluster said of the stages of its nodes, kept for the answers to their own reports. Pure.

The head's sidecar sends what is new, and what still runs, since its last report that was accepted; here that becomes
one window of the recent past for each node. A node's sidecar gets its whole window with each answer, so that a lost
answer is made good by the next one, and so that a controller that was restarted has to wait for one report of the head.

What the driver's own marks say holds for every node, and is told to each beside what is said of it alone.

A window vouches for one stretch of time. Where two reports of a head do not meet (it was started anew, or its clock
was set), the older stretch is let go: the nodes were told of it before.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from verl_gpumonitor.model.marks import EVERY_NODE
from verl_gpumonitor.model.report import ClusterStages, PodStages, RayStage
from verl_gpumonitor.model.stages import StageSource

KEPT_SECONDS: Final = 120.0
"""The past that is kept, by the head's clock; a head that has been silent for longer is not quoted."""
TOLD_SECONDS: Final = 90.0
"""The past that is told to a node: its samples wait for their stage for at most 60 s."""
MAX_INTERVALS: Final = 20_000
"""Kept for one cluster: ten a minute for each of 1,000 GPUs. Past it, the window gets shorter."""
MAX_TOLD: Final = 1024
"""Told to one node, as `PodStages` bounds it."""
MAX_NAMED: Final = 4096
"""Addresses of nodes that are remembered."""


class _Key(NamedTuple):
    """What makes an interval the same one in the next report."""

    stage: str
    role: str
    begin: float
    local_rank: int | None
    job: str


Intervals = dict[_Key, RayStage]


@dataclass(kw_only=True, slots=True)
class ClusterRelay:
    """The window of one Ray cluster."""

    source: StageSource = StageSource.NONE
    known_from: float = 0.0
    """Unix seconds of the head's clock, like the next."""
    known_until: float = 0.0
    heard_at: float = -math.inf
    """When the head was heard last, by our clock."""
    nodes: dict[str, Intervals] = field(default_factory=dict)
    """By node IP."""
    named: dict[str, None] = field(default_factory=dict)
    """IPs that the head has named at any time, in the order it did so."""

    def take(self, said: ClusterStages, received_at: float) -> None:
        """Add what a report of the head says. `received_at`: Unix seconds of our clock."""
        if self._meets(said):
            self._end_what_is_not_said(said)
        else:
            self.nodes, self.known_from = {}, said.known_from
        for node in said.nodes:
            # One without work is as good as one that is not mentioned, and takes no room; that the driver speaks for
            # every node is news all the same.
            if node.intervals or node.node_ip == EVERY_NODE:
                held = self.nodes.setdefault(node.node_ip, {})
                held.update((_key(interval), interval) for interval in node.intervals)
        self.name(node.node_ip for node in said.nodes)
        self.source, self.known_until, self.heard_at = said.source, said.known_until, received_at
        self._forget_until(self.known_until - KEPT_SECONDS)
        self._shorten()

    def name(self, ips: Iterable[str]) -> None:
        """Remember that the head calls these its nodes."""
        for ip in ips:
            self.named[ip] = None
        while len(self.named) > MAX_NAMED:
            del self.named[next(iter(self.named))]

    def word_for(self, node_ip: str, *, now: float) -> PodStages | None:
        """Return what the head says of a node; None while it has said nothing for long.

        A node that it does not mention had no work. That is only told where the head calls its nodes by the same
        addresses as we do, which is for the caller to know.
        """
        if now - self.heard_at > KEPT_SECONDS or self.known_until <= self.known_from:
            return None
        since = max(self.known_from, self.known_until - TOLD_SECONDS)
        held = [*self.nodes.get(node_ip, {}).values(), *self.nodes.get(EVERY_NODE, {}).values()]
        intervals = [item for item in held if _end(item) > since]
        intervals.sort(key=lambda item: item.begin)
        for item in intervals[:-MAX_TOLD]:
            since = min(self.known_until, max(since, _end(item)))
        told = [item for item in intervals[-MAX_TOLD:] if _end(item) > since]
        return PodStages(source=self.source, known_from=since, known_until=self.known_until, intervals=told)

    def _meets(self, said: ClusterStages) -> bool:
        """Whether a report goes on where the window ends."""
        return said.source is self.source and said.known_from <= self.known_until <= said.known_until

    def _end_what_is_not_said(self, said: ClusterStages) -> None:
        """End what ran and is not mentioned any more: nobody vouches for more than its time up to now."""
        mentioned = {(node.node_ip, _key(interval)) for node in said.nodes for interval in node.intervals}
        for ip, held in self.nodes.items():
            for key, interval in held.items():
                if interval.end is None and (ip, key) not in mentioned:
                    held[key] = _ended(interval, max(interval.begin, self.known_until))

    def _forget_until(self, horizon: float) -> None:
        if horizon <= self.known_from:
            return
        self.known_from = min(horizon, self.known_until)
        kept = {
            ip: {key: item for key, item in held.items() if _end(item) > horizon} for ip, held in self.nodes.items()
        }
        self.nodes = {ip: held for ip, held in kept.items() if held}

    def _shorten(self) -> None:
        if not self._is_full():
            return
        ends = sorted((_end(item) for held in self.nodes.values() for item in held.values()), reverse=True)
        self._forget_until(ends[MAX_INTERVALS])
        if self._is_full():
            # The time of a head that adds to it may stand still, so that nothing of it is past.
            self.nodes, self.known_from = {}, self.known_until

    def _is_full(self) -> bool:
        return sum(len(held) for held in self.nodes.values()) > MAX_INTERVALS


def _key(interval: RayStage) -> _Key:
    return _Key(interval.stage, interval.role, interval.begin, interval.local_rank, interval.job)


def _end(interval: RayStage) -> float:
    return math.inf if interval.end is None else interval.end


def _ended(interval: RayStage, end: float) -> RayStage:
    return RayStage(
        stage=interval.stage,
        role=interval.role,
        begin=interval.begin,
        end=end,
        local_rank=interval.local_rank,
        step=interval.step,
        job=interval.job,
        resolution_seconds=interval.resolution_seconds,
    )
