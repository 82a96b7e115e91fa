# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The controller's own metrics: one row for each workload, and how the controller itself fares.

GPUs have no series here: those go from the sidecars straight to Prometheus. What is not known has no series, either,
and a workload that is gone takes its series along, since all are made anew at each scrape.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .certificates import CertificateState
from .events import EventRecorder
from .lease import Lease
from .pods import PodStore
from .reconciler import Entry, Reconciler, phase_of
from .status import mean_utilization
from .sweep import SweepState
from .telemetry import Seen
from .watch import WatchState
from .workloads import Workload
from .writer import StatusWriter

KEY = ("namespace", "workload", "kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What is shown."""

    reconciler: Reconciler
    writer: StatusWriter
    recorder: EventRecorder
    pods: PodStore
    lease: Lease
    watch: WatchState
    sweep: SweepState
    certificates: CertificateState
    pod_failures: Callable[[], int]
    """Failures of the pod watches so far."""
    ready: Callable[[], bool]


class ControllerCollector(Collector):
    """Renders the present at each scrape."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def describe(self) -> Iterable[Metric]:
        """Return nothing: series depend on what is there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from _workloads(self._parts.reconciler)
        yield from self._own()
        yield from self._writes()
        yield from self._events()

    def _own(self) -> Iterator[Metric]:
        parts = self._parts
        yield _gauge("gpumonitor_controller_leading", "1 while this process holds the Lease.", parts.lease.leading)
        yield _gauge("gpumonitor_controller_ready", "1 while reports are taken.", parts.ready())
        yield _gauge("gpumonitor_controller_pods", "Pods that are followed.", len(parts.pods))
        yield _gauge(
            "gpumonitor_controller_tick_lag_seconds",
            "How late the last look at the workloads was.",
            parts.reconciler.times.lag_seconds,
        )
        yield _counter("gpumonitor_controller_looks", "Looks at one workload.", parts.reconciler.times.looks)
        yield _counter("gpumonitor_controller_watch_restarts", "Restarts of kopf.", parts.watch.restarts)
        yield _counter("gpumonitor_controller_pod_watch_failures", "Failed pod watches.", parts.pod_failures())
        yield _counter("gpumonitor_controller_sweeps", "Complete sweeps.", parts.sweep.sweeps)
        yield _counter("gpumonitor_controller_sweep_failures", "Failed sweeps.", parts.sweep.failures)
        yield _counter(
            "gpumonitor_controller_missed_deletions",
            "Deletions that a sweep found and no watch had told.",
            parts.sweep.corrected,
        )
        yield _counter(
            "gpumonitor_controller_certificate_failures",
            "Rounds in which certificates could not be kept.",
            parts.certificates.failures,
        )
        unwatched = GaugeMetricFamily(
            "gpumonitor_controller_kind_unavailable", "1 for kinds that cannot be followed.", labels=["kind", "reason"]
        )
        for kind in sorted(parts.sweep.absent):
            unwatched.add_metric([kind, "absent"], 1.0)
        for kind in sorted(parts.sweep.refused | {item.value for item in parts.watch.refused}):
            unwatched.add_metric([kind, "forbidden"], 1.0)
        yield unwatched

    def _writes(self) -> Iterator[Metric]:
        counts = self._parts.writer.counts
        writes = CounterMetricFamily(
            "gpumonitor_status_writes", "Writes of statuses, by how they ended.", labels=["outcome"]
        )
        for outcome, number in counts.outcomes.items():
            writes.add_metric([outcome.value], number)
        yield writes
        yield _gauge(
            "gpumonitor_status_writes_waiting", "Statuses that wait to be written.", self._parts.writer.waiting
        )
        yield _counter("gpumonitor_monitors_created", "GPUMonitors created.", counts.created)
        yield _counter("gpumonitor_monitors_deleted", "GPUMonitors deleted after their retention.", counts.deleted)
        pruned = GaugeMetricFamily(
            "gpumonitor_crd_pruned_field",
            "1 for each status field that the cluster's older CRD drops.",
            labels=["field"],
        )
        for name in sorted(counts.pruned_fields):
            pruned.add_metric([name], 1.0)
        yield pruned

    def _events(self) -> Iterator[Metric]:
        counts = self._parts.recorder.counts
        events = CounterMetricFamily("gpumonitor_events", "Events, by what became of them.", labels=["outcome"])
        for outcome, number in (
            ("posted", counts.posted),
            ("repeated", counts.repeated),
            ("refused", counts.refused),
            ("given_up", counts.given_up),
            ("overflowed", counts.overflowed),
        ):
            events.add_metric([outcome], number)
        yield events
        yield _gauge("gpumonitor_events_waiting", "Events that wait to be written.", self._parts.recorder.waiting)


def _workloads(reconciler: Reconciler) -> Iterator[Metric]:
    info = GaugeMetricFamily("gpumonitor_workload_info", "A workload and its phase.", labels=[*KEY, "phase"])
    requested = GaugeMetricFamily("gpumonitor_workload_gpus_requested", "GPUs that it asks for.", labels=KEY)
    reported = GaugeMetricFamily("gpumonitor_workload_gpus_reported", "GPUs with fresh values.", labels=KEY)
    load = GaugeMetricFamily(
        "gpumonitor_workload_utilization_ratio", "Mean load of its reported GPUs over the last minute.", labels=KEY
    )
    peak = GaugeMetricFamily(
        "gpumonitor_workload_memory_peak_ratio", "Recent memory peak of its GPU nearest to the limit.", labels=KEY
    )
    unseen = GaugeMetricFamily("gpumonitor_workload_pods_unmonitored", "Pods without telemetry.", labels=KEY)
    finding = GaugeMetricFamily("gpumonitor_workload_finding", "1 while open.", labels=[*KEY, "reason", "severity"])
    for workload, entry in reconciler.entries():
        key = [workload.job.namespace, workload.job.name, workload.job.kind.value]
        info.add_metric([*key, phase_of(workload).value], 1.0)
        _of_picture(workload, entry, key, (requested, reported, load, peak, unseen))
        for item in entry.assessment.findings if entry.assessment and not entry.finished else ():
            finding.add_metric([*key, item.reason, item.severity.value], 1.0)
    yield from (info, requested, reported, load, peak, unseen, finding)


def _of_picture(workload: Workload, entry: Entry, key: list[str], families: tuple[GaugeMetricFamily, ...]) -> None:
    requested, reported, load, peak, unseen = families
    picture = entry.picture
    if picture is None or picture.ended or workload.gone_at is not None:
        return
    requested.add_metric(key, picture.gpus_requested)
    reported.add_metric(key, sum(1 for gpu in picture.gpus if gpu.reported))
    unseen.add_metric(key, sum(1 for pod in picture.pods if pod.verdict.seen is Seen.UNMONITORED))
    mean = mean_utilization(picture)
    if mean is not None:
        load.add_metric(key, mean)
    peaks = [gpu.peak.ratio for gpu in picture.gpus if gpu.reported and gpu.peak is not None]
    if peaks:
        peak.add_metric(key, max(peaks))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))
