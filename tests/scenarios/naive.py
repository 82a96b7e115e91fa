# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A monitor of thresholds, as alert rules for GPUs usually are: the measure beside which the diagnosis is shown.

It knows no stage, no pool and no step. It gives no advice, so that it is not asked for any.
"""

from collections.abc import Sequence
from typing import Any

from verl_gpumonitor.cli.traces import TraceReader
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.model.findings import Finding, Scope, TrackedFinding
from verl_gpumonitor.model.trace import GpuLine, Header, HostLine, NvmlLine, PodLine, Record, StepLine, XidLine

HOLD_SECONDS = 60.0


class Naive:
    """Alerts on thresholds that hold for a minute."""

    def __init__(self, header: Header) -> None:
        self.totals = {g.uuid: g.memory_total_bytes for pod in header.pods or () for g in pod.gpus or ()}
        self.since: dict[tuple[str, str], float] = {}
        self.found: dict[tuple[str, str], TrackedFinding] = {}
        self.load: dict[str, float] = {}
        self.step_t: float | None = None

    def feed(self, line: Record) -> None:
        """Take one line."""
        match line:
            case GpuLine():
                self._gpu(line)
            case HostLine():
                self._host(line)
            case XidLine(uuid=uuid, t=t):
                self._raise("GPUFault", uuid or "", t, gpus=(uuid,) if uuid else ())
            case NvmlLine(error=error, t=t, pod=pod) if error is not None:
                self._raise("TelemetryUnavailable", pod, t)
            case PodLine(reason="OOMKilled", t=t, pod=pod):
                self._raise("HostMemoryRisk", pod, t)
            case StepLine(t=t):
                self.step_t = t
            case _:
                pass
        if self.step_t is not None and line.t - self.step_t > 600:
            self._raise("Hang", "", line.t)

    def _gpu(self, line: GpuLine) -> None:
        total = self.totals.get(line.uuid)
        one = (line.uuid,)
        used = line.memory_used_bytes
        self._holds("OOMRisk", line.uuid, line.t, used is not None and bool(total) and used > 0.9 * (total or 1), one)
        slow = bool(set(line.throttled or ()) - {"gpu_idle", "applications_clocks_setting"})
        self._holds("Throttled", line.uuid, line.t, slow, one)
        self._holds("TelemetryPartial", line.uuid, line.t, line.utilization is None, one)
        if line.utilization is None:
            return
        self._holds("LowUtilization", line.uuid, line.t, line.utilization < 0.2, one, seconds=120)
        self.load[line.uuid] = line.utilization
        spread = max(self.load.values()) - min(self.load.values()) > 0.4
        self._holds("Imbalance", "", line.t, spread, one, metric="utilization")

    def _host(self, line: HostLine) -> None:
        if line.memory_used_bytes is not None and line.memory_limit_bytes:
            full = line.memory_used_bytes > 0.9 * line.memory_limit_bytes
            self._holds("HostMemoryRisk", line.pod, line.t, full)
        if line.shm_used_bytes is not None and line.shm_size_bytes:
            self._holds("SharedMemoryRisk", line.pod, line.t, line.shm_used_bytes > 0.8 * line.shm_size_bytes)

    def _holds(
        self,
        reason: str,
        key: str,
        t: float,
        holds: bool,
        gpus: Sequence[str] = (),
        *,
        seconds: float = HOLD_SECONDS,
        metric: str | None = None,
    ) -> None:
        if not holds:
            self.since.pop((reason, key), None)
        elif t - self.since.setdefault((reason, key), t) >= seconds:
            self._raise(reason, key, t, gpus=gpus, metric=metric)

    def _raise(self, reason: str, key: str, t: float, *, gpus: Sequence[str] = (), metric: str | None = None) -> None:
        if (reason, key) in self.found:
            return
        evidence: dict[str, Any] = {} if metric is None else {"metric": metric}
        finding = Finding(
            reason=reason,
            severity=REASONS[reason].severity,
            scope=Scope(gpus=tuple(gpus)),
            message="a threshold was passed",
            evidence=evidence,
        )
        self.found[reason, key] = TrackedFinding(finding=finding, first_seen=t, last_seen=t)


def naive(lines: Sequence[bytes]) -> list[TrackedFinding]:
    """Return what a monitor of thresholds finds in a record."""
    reader = TraceReader(lines)
    monitor = Naive(reader.header)
    for record in reader.records():
        monitor.feed(record)
    return list(monitor.found.values())
