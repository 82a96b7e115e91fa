# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a head tells the controller of the stages of its cluster's nodes: each time the new and the still running. Pure.

The driver's marks, where there are any, hold for every node and go before Ray's State API, which knows each node apart.
What was not accepted is told again, as far back as the samples of the nodes wait for it.

Clocks: what the State API says ran on a node is by that node's clock, and stays so. All other times, which the nodes
are to understand, go over the wire by the controller's clock, which each sidecar knows by its answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.model.marks import EVERY_NODE
from verl_gpumonitor.model.report import MAX_NODE_INTERVALS, ClusterStages, NodeStages, RayStage
from verl_gpumonitor.model.stages import StageInterval, StageSource

from .state import ClusterStagesSeen

TOLD_SECONDS: Final = 90.0
"""Oldest past that is told: samples wait 60 s."""
AGAIN_SECONDS: Final = 10.0
"""Ends that lie so long before what was accepted are told again: an end is found after it came."""
MARKS_SECONDS: Final = 20.0
"""Marks of a driver that has been silent for longer leave it to the State API."""
MAX_BYTES: Final = 240 * 1024
"""Part of a report that the cluster may take. Past it the ranks of a node are told as one."""
MAX_NODES: Final = 4096
MAX_NAMED: Final = 64
"""Up to so many nodes are named one by one where the driver speaks for all."""
TOGETHER_SECONDS: Final = 1.0
"""Ranks that begin the same stage within this time are told as one, where all of them would be too many."""
_STAGE_BYTES: Final = 60
_NODE_BYTES: Final = 48


class ClusterDue:
    """What the next report says of the cluster."""

    def __init__(self) -> None:
        self._arrived: dict[StageSource, tuple[float, float]] = {}
        """Source -> up to when the controller knows what it said, by our clock and as it was told."""
        self._until = 0.0
        """End of what was told last, by our clock."""

    def take(
        self, seen: ClusterStagesSeen, gpu_ips: Sequence[str], now_unix: float, *, ahead: float = 0.0
    ) -> ClusterStages | None:
        """Return what is new; None when nothing is, or when it is too much.

        `gpu_ips`: nodes that have GPUs. `ahead`: how far the controller's clock is before ours.
        """
        marks = seen.marks
        if marks is not None and now_unix - marks.known_until <= MARKS_SECONDS:
            ips = gpu_ips if 0 < len(gpu_ips) <= MAX_NAMED else (EVERY_NODE,)
            nodes = dict.fromkeys(ips, tuple(later(each, ahead) for each in marks.intervals))
            clocks = dict.fromkeys(ips, ahead)
            return self._told(StageSource.MARKS, marks.known_from, marks.known_until, nodes, clocks, ahead)
        return self._told(StageSource.RAY_STATE, seen.known_from, seen.known_until, seen.nodes, seen.ahead, ahead)

    def arrived(self, told: ClusterStages | None) -> None:
        """Note that this was accepted."""
        if told is not None:
            self._arrived = {told.source: (self._until, told.known_until)}

    def _told(
        self,
        source: StageSource,
        known_from: float,
        known_until: float,
        nodes: Mapping[str, Sequence[StageInterval]],
        clocks: Mapping[str, float],
        ahead: float,
    ) -> ClusterStages | None:
        """Return what is new of a source. `clocks`: how far those of the intervals of a node are before ours."""
        since = max(0.0, known_from, known_until - TOLD_SECONDS)
        arrived, heard_until = self._arrived.get(source, (since, since + ahead))
        since = max(since, arrived) if arrived <= known_until else since
        if known_until <= since:
            return None
        # It goes on where the last one ended, if the difference of the clocks is known a little better by now.
        begin = min(since + ahead, heard_until) if since == arrived else since + ahead
        self._until = known_until
        found = {ip: _since(ran, since - AGAIN_SECONDS + clocks.get(ip, 0.0)) for ip, ran in nodes.items()}
        told = [NodeStages(node_ip=ip[:64], intervals=stages) for ip, stages in _fitting(found).items() if stages]
        if len(told) > MAX_NODES or _bytes(told) > MAX_BYTES:
            return None
        return ClusterStages(
            source=source, known_from=max(0.0, begin), known_until=max(0.0, known_until + ahead), nodes=told
        )


def later(interval: StageInterval, seconds: float) -> StageInterval:
    """Return an interval by a clock that is so far ahead."""
    if not seconds:
        return interval
    end = None if interval.end is None else interval.end + seconds
    return msgspec.structs.replace(interval, begin=interval.begin + seconds, end=end)


def _since(intervals: Iterable[StageInterval], since: float) -> list[RayStage]:
    return [ray_stage(each) for each in intervals if each.end is None or each.end > since][-MAX_NODE_INTERVALS:]


def ray_stage(interval: StageInterval) -> RayStage:
    """Return an interval as it goes over the wire."""
    begin = max(0.0, interval.begin)
    rank = interval.local_rank
    return RayStage(
        interval.stage[:64] or "other",
        interval.role[:64] or "unknown",
        begin,
        None if interval.end is None else max(begin, interval.end),
        rank if rank is not None and 0 <= rank <= 1024 else None,
        interval.step if interval.step is not None and interval.step >= 0 else None,
        interval.job[:128],
        min(3600.0, max(0.0, interval.resolution_seconds)),
    )


def _fitting(nodes: dict[str, list[RayStage]]) -> dict[str, list[RayStage]]:
    """Return the nodes as they are, or with their ranks as one where they would be too much."""
    told = [NodeStages(node_ip=ip[:64], intervals=stages) for ip, stages in nodes.items()]
    return nodes if _bytes(told) <= MAX_BYTES else {ip: together(stages) for ip, stages in nodes.items()}


def together(stages: Iterable[RayStage]) -> list[RayStage]:
    """Return the ranks of a node as one: from the first that begins a stage to the last that ends it."""
    found: list[RayStage] = []
    for each in sorted(stages, key=lambda stage: stage.begin):
        place = next((place for place, other in enumerate(found) if _is_like(each, other)), None)
        if place is None:
            found.append(_joined(each, each))
        else:
            found[place] = _joined(found[place], each)
    return found


def _is_like(one: RayStage, other: RayStage) -> bool:
    same = (one.stage, one.role, one.job, one.step) == (other.stage, other.role, other.job, other.step)
    return same and abs(one.begin - other.begin) <= TOGETHER_SECONDS


def _joined(first: RayStage, other: RayStage) -> RayStage:
    end = None if first.end is None or other.end is None else max(first.end, other.end)
    resolution = max(first.resolution_seconds, other.resolution_seconds)
    return RayStage(first.stage, first.role, first.begin, end, None, first.step, first.job, resolution)


def _bytes(nodes: Iterable[NodeStages]) -> int:
    """Estimate what the nodes take in a report."""
    return sum(
        _NODE_BYTES
        + sum(_STAGE_BYTES + len(stage.stage) + len(stage.role) + len(stage.job) for stage in node.intervals)
        for node in nodes
    )
