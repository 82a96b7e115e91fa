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

from verl_gpumonitor.model.vocabulary import ROLES, STAGES, UNKNOWN

from .certificates import CertificateState
from .entry import Entry
from .events import EventRecorder
from .examination import phase_of
from .lease import Lease
from .pods import PodStore
from .reconciler import Reconciler
from .stages import by_pair
from .status import Picture, mean_utilization
from .steps import Pair
from .sweep import SweepState
from .telemetry import Seen
from .totals import OTHER, StageSum, StageSums
from .watch import WatchState
from .workload import Workload
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
        yield _pods(self._parts.reconciler)
        yield from _stages(self._parts.reconciler)
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
        found = entry.assessment.findings if entry.assessment and not entry.finished else ()
        for reason, severity in sorted({(item.reason, item.severity.value) for item in found}):
            finding.add_metric([*key, reason, severity], 1.0)
    yield from (info, requested, reported, load, peak, unseen, finding)


def _pods(reconciler: Reconciler) -> Metric:
    """Return whose each pod is: series of sidecars know their pod alone.

    Pods of a borrowed cluster have one series for the cluster and one for each RayJob that runs in it.
    """
    info = GaugeMetricFamily(
        "gpumonitor_workload_pod_info", "1 for each pod of a running workload.", labels=[*KEY, "pod"]
    )
    for workload, _ in reconciler.entries():
        if workload.job.ended or workload.gone_at is not None:
            continue
        key = [workload.job.namespace, workload.job.name, workload.job.kind.value]
        # By name, since a pod that follows one of its own name may be seen before the end of that.
        for name in sorted({track.record.name for track in workload.pods() if track.record.live}):
            info.add_metric([*key, name], 1.0)
    return info


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


def _stages(reconciler: Reconciler) -> Iterator[Metric]:
    labels = (*KEY, "stage", "role")
    seconds = CounterMetricFamily(
        "gpumonitor_workload_stage_seconds", "GPU time of the workload in each stage.", labels=labels
    )
    busy = CounterMetricFamily(
        "gpumonitor_workload_stage_busy_seconds", "Part of it in which the GPUs were busy.", labels=labels
    )
    energy = CounterMetricFamily("gpumonitor_workload_stage_energy_joules", "Energy taken in it.", labels=labels)
    peak = GaugeMetricFamily(
        "gpumonitor_workload_stage_memory_peak_ratio", "Peak in it of the GPU nearest to its limit.", labels=labels
    )
    now = GaugeMetricFamily("gpumonitor_workload_stage_info", "1 for the stage that runs now.", labels=labels)
    step = GaugeMetricFamily("gpumonitor_workload_step", "Newest training step.", labels=KEY)
    pace = GaugeMetricFamily("gpumonitor_workload_step_seconds", "Mean length of the newest steps.", labels=KEY)
    for workload, entry in reconciler.entries():
        picture = entry.picture
        if picture is None:
            continue
        key = [workload.job.namespace, workload.job.name, workload.job.kind.value]
        for pair, sums in known_pairs(picture.totals.stages).items():
            seconds.add_metric([*key, *pair], sums.observed_seconds)
            busy.add_metric([*key, *pair], sums.busy_seconds)
            if sums.energy_joules is not None:
                energy.add_metric([*key, *pair], sums.energy_joules)
            if sums.peak is not None:
                peak.add_metric([*key, *pair], sums.peak.ratio)
        _progress(picture, key, (now, step, pace))
    yield from (seconds, busy, energy, peak, now, step, pace)


def _progress(picture: Picture, key: list[str], families: tuple[GaugeMetricFamily, ...]) -> None:
    now, step, pace = families
    view = picture.stages
    if view.step is not None:
        step.add_metric(key, view.step)
    if picture.ended:
        return
    if view.stage is not None and view.role is not None:
        now.add_metric([*key, *_known((view.stage, view.role))], 1.0)
    if view.seconds_per_step is not None:
        pace.add_metric(key, view.seconds_per_step)


def known_pairs(sums: StageSums) -> dict[Pair, StageSum]:
    """Sum by stage and role, of the words that are known to all: a program's own would be series without end.

    They count as `other`. So a workload has at most some 20 series in each family.
    """
    pairs: dict[Pair, StageSum] = {}
    for pair, value in by_pair(sums).items():
        known = _known(pair)
        pairs[known] = pairs[known].plus(value) if known in pairs else value
    return pairs


def _known(pair: Pair) -> Pair:
    stage, role = pair
    return (stage if stage in STAGES else OTHER, role if role in ROLES else UNKNOWN)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))
