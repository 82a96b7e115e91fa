# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the report of one moment from the state. Pure.

The controller refuses a report as a whole when one value breaks its bound, so a value out of bounds is unknown here.
"""

import math
from typing import Final

import msgspec

from verl_gpumonitor.model.report import (
    MAX_BYTES,
    MAX_GPUS,
    REPORT_FORMAT,
    CollectionReport,
    GpuReport,
    HostReport,
    PodRef,
    RayNode,
    Report,
)
from verl_gpumonitor.model.samples import HostSample

from .state import OwnGpu, PodState, gauges, recent_peak

NODES_AGAIN_SECONDS: Final = 60.0
"""A controller that was restarted has forgotten the nodes; it hears them again after so long."""
_MAX_RAY_NODES: Final = 4096
_MAX_NODES_BYTES: Final = 160 * 1024
"""Part of a report that the nodes may take: some 400 of 8 GPUs. Those beyond are not named."""


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """Who reports: constant from the sidecar's start to its end."""

    pod: PodRef
    start_id: str
    started_unix: float
    version: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What is particular to one report."""

    sequence: int
    now: float
    """Monotonic, to tell what is too old to be sent."""
    now_unix: float
    final: bool = False
    dropped_reports: int = 0
    ray_nodes: tuple[RayNode, ...] = ()


class NodesDue:
    """Which reports of a Ray head carry the nodes' GPUs: when they changed, until that arrived, and then each 60 s."""

    def __init__(self) -> None:
        self._sent: tuple[RayNode, ...] = ()
        self._arrived: tuple[RayNode, ...] = ()
        self._arrived_at: float | None = None

    def take(self, nodes: tuple[RayNode, ...], now: float) -> tuple[RayNode, ...]:
        """Return what the next report carries."""
        current = self._arrived_at is not None and now - self._arrived_at < NODES_AGAIN_SECONDS
        self._sent = () if current and nodes == self._arrived else nodes
        return self._sent

    def arrived(self, now: float) -> None:
        """Note that the last report was accepted."""
        if self._sent:
            self._arrived, self._arrived_at = self._sent, now


def build(sender: Sender, state: PodState, turn: Turn) -> Report:
    """Return the report. Only the pod's own GPUs are in it."""
    return Report(
        format=REPORT_FORMAT,
        pod=sender.pod,
        start_id=sender.start_id,
        sequence=turn.sequence,
        sent_at=max(0.0, turn.now_unix),
        started_at=max(0.0, sender.started_unix),
        version=sender.version[:64],
        final=turn.final,
        source=state.source,
        unavailable=state.unavailable,
        message=state.message[:512] if state.message else None,
        gpus_requested=state.gpus_requested,
        gpus_visible=state.gpus_visible,
        ownership=state.ownership,
        gpus=[_gpu(gpu, state, turn.now) for gpu in state.gpus[:MAX_GPUS]],
        host=_host(state.host),
        collection=CollectionReport(
            collections=state.health.collections,
            failures=state.health.failures,
            timeouts=state.health.timeouts,
            dropped_reports=turn.dropped_reports,
        ),
        ray_nodes=_fitting(turn.ray_nodes),
    )


def _fitting(nodes: tuple[RayNode, ...]) -> list[RayNode]:
    """Return as many nodes as a report can take."""
    fitting, taken = [], 0
    for node in nodes[:_MAX_RAY_NODES]:
        taken += 48 + len(node.node_ip) + sum(len(uuid) + 3 for uuid in node.gpu_uuids)
        if taken > _MAX_NODES_BYTES:
            break
        fitting.append(node)
    return fitting


def _gpu(gpu: OwnGpu, state: PodState, now: float) -> GpuReport:
    sample, counters = gauges(gpu.sample, state, now), gpu.counters
    return GpuReport(
        uuid=sample.uuid,
        state=sample.state,
        error=sample.error[:128] if sample.error else None,
        index=_whole(sample.index, 1024),
        model=sample.model[:256] if sample.model else None,
        utilization=_within(sample.utilization, 0.0, 1.0),
        memory_used_bytes=_whole(sample.memory_used_bytes, MAX_BYTES),
        memory_reserved_bytes=_whole(sample.memory_reserved_bytes, MAX_BYTES),
        memory_total_bytes=_whole(sample.memory_total_bytes, MAX_BYTES),
        memory_peak_bytes=_whole(counters.memory_peak_bytes, MAX_BYTES),
        memory_recent_peak_bytes=_whole(recent_peak(gpu, sample), MAX_BYTES),
        power_watts=_within(sample.power_watts, 0.0, 5000.0),
        power_limit_watts=_within(sample.power_limit_watts, 0.0, 5000.0),
        temperature_celsius=_within(sample.temperature_celsius, -50.0, 250.0),
        observed_seconds=counters.observed_seconds,
        busy_seconds=counters.busy_seconds,
        energy_joules=_within(counters.energy_joules, 0.0, 1e15),
        xid_errors={str(code): count for code, count in counters.xid_errors.items() if 0 <= code <= 99_999},
    )


def _host(host: HostSample | None) -> HostReport | None:
    if host is None:
        return None
    return HostReport(
        memory_used_bytes=_whole(host.memory_used_bytes, MAX_BYTES),
        memory_limit_bytes=_whole(host.memory_limit_bytes, MAX_BYTES),
        shm_used_bytes=_whole(host.shm_used_bytes, MAX_BYTES),
        shm_size_bytes=_whole(host.shm_size_bytes, MAX_BYTES),
        source=host.source,
    )


def _within(value: float | None, lowest: float, highest: float) -> float | None:
    """Return the value if it is a number between the bounds, else None."""
    return value if value is not None and math.isfinite(value) and lowest <= value <= highest else None


def _whole(value: int | None, highest: int) -> int | None:
    return value if value is not None and 0 <= value <= highest else None
