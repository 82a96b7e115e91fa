# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One live pod, and what its sidecar has reported. Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from verl_gpumonitor.model.kubernetes import RAY_GROUP, RAY_NODE_TYPE
from verl_gpumonitor.model.report import Report

from .ledger import PodLedger
from .ports import HostUsage, PodRecord
from .steps import PodSteps
from .telemetry import Telemetry
from .totals import Totals
from .xids import PodXids

WINDOW_SECONDS: Final = 60.0
"""Load is judged over this time, by differences of counters."""
LATE_SECONDS: Final = 120.0
"""A report that comes so much later than the job's end says nothing of the time before it."""
USAGE_SECONDS: Final = 120.0
"""Host memory that was read longer ago is not known any more."""
HEAD: Final = "head"


class Point(NamedTuple):
    """Counters of a pod's GPUs at one time: uuid -> (observed seconds, busy seconds)."""

    at: float
    gpus: Mapping[str, tuple[float, float]]


@dataclass(kw_only=True, slots=True)
class PodTrack:
    """One live pod of a group."""

    record: PodRecord
    ledger: PodLedger = field(default_factory=PodLedger)
    telemetry: Telemetry | None = None
    usage: HostUsage | None = None
    """Host memory as metrics.k8s.io said it last, where reports bring none."""
    history: deque[Point] = field(default_factory=deque)
    """Oldest first; spans `WINDOW_SECONDS`, or less while the sidecar is young."""
    steps: PodSteps = field(default_factory=PodSteps)
    xids: PodXids = field(default_factory=PodXids)
    closed: bool = False
    """A report from after the job's end was counted: the next ones only tell stages that were not known before."""
    overrun_seconds: float = 0.0
    """GPU time in that report that came after the end."""

    @property
    def pool(self) -> str:
        """GPUs of one pool do the same work: Ray's group, or all pods of a PyTorchJob."""
        return self.record.labels.get(RAY_GROUP, "")

    @property
    def is_head(self) -> bool:
        """It is the head of a Ray cluster."""
        return self.record.labels.get(RAY_NODE_TYPE) == HEAD

    def usage_at(self, now: float) -> HostUsage | None:
        """Return the host memory from metrics.k8s.io; None where it is not known, or was for too long."""
        usage = self.usage
        return usage if usage is not None and now - usage.taken_at <= USAGE_SECONDS else None

    def host_source(self, now: float) -> str | None:
        """Return who tells the pod's host memory; None where nobody does."""
        if self.telemetry is not None and self.telemetry.host_memory is not None:
            return self.telemetry.host_memory
        return "metrics.k8s.io" if self.usage_at(now) is not None else None

    def take(self, report: Report, received_at: float) -> None:
        """Keep the gauges of a report that was counted."""
        point = Point(received_at, {gpu.uuid: (gpu.observed_seconds, gpu.busy_seconds) for gpu in report.gpus})
        if self.telemetry is None or self.telemetry.start_id != report.start_id:
            self._begin(report, received_at)
        self.history.append(point)
        while len(self.history) > 2 and point.at - self.history[1].at >= WINDOW_SECONDS:
            self.history.popleft()
        self.telemetry = Telemetry.of(report, received_at)
        self.steps.take(report)
        self.xids.take(report, received_at)

    def close(self, ended_at: float) -> None:
        """Take note that the job had ended before the newest report: what came after the end does not count."""
        if self.closed or self.telemetry is None or self.telemetry.received_at <= ended_at:
            return
        self.closed = True
        late = self.telemetry.received_at - ended_at
        self.overrun_seconds = late * len(self.telemetry.gpus) if late <= LATE_SECONDS else 0.0

    def reopen(self) -> None:
        """Take note that the job goes on after all."""
        self.closed, self.overrun_seconds = False, 0.0

    def totals(self, *, gone: bool) -> Totals:
        """Sum over all starts of its sidecar, up to the end of the job: a GPU is idle afterwards."""
        totals = self.ledger.totals(gone=gone)
        if not self.overrun_seconds:
            return totals
        return replace(totals, gpu_seconds=max(totals.busy_seconds, totals.gpu_seconds - self.overrun_seconds))

    def _begin(self, report: Report, received_at: float) -> None:
        """Start the window of a new start: its counters were zero when it began, if that was just now."""
        self.history.clear()
        age = report.sent_at - report.started_at
        if 0 < age <= WINDOW_SECONDS:
            self.history.append(Point(received_at - age, {}))

    def utilization(self, uuid: str) -> float | None:
        """Mean load of a GPU over the window; None while nothing was observed in it."""
        if len(self.history) < 2:
            return None
        observed_before, busy_before = self.history[0].gpus.get(uuid, (0.0, 0.0))
        observed_now, busy_now = self.history[-1].gpus.get(uuid, (0.0, 0.0))
        observed = observed_now - observed_before
        return min(1.0, max(0.0, busy_now - busy_before) / observed) if observed > 0 else None
