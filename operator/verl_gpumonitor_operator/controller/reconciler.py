# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Brings what is known of each workload into its GPUMonitor, its conditions and its Events.

Level-based: whatever arrives only marks a workload as worth a look; a tick then looks at the whole of it, computes what
its GPUMonitor should say, and writes the difference. All state is in `Workloads` and in one `Entry` for each; after a
restart both are made again from the API server, the old status above all.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from verl_gpumonitor.diagnosis import DiagnosisLimits
from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.settings import Settings

from . import ledger_text, monitors
from .assessment import open_in, states_of
from .clinic import Clinic
from .entry import Entry
from .events import EventRecorder, ObjectRef, Occurrence
from .examination import Examiner
from .jobs import KINDS, GpuResources, JobKind, JobSeen
from .jobs import from_object as job_from_object
from .known_monitors import KnownMonitors
from .ledgers import Ledgers
from .monitors import MonitorSeen
from .namespaces import Choice, Namespaces
from .ports import PodRecord
from .retirement import Retirement
from .status import Status, Urgency, render, urgency
from .submission import RETRY_SECONDS, Submission
from .workload import Workload
from .workloads import Workloads
from .writer import StatusWriter

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.5
LOOK_AGAIN_SECONDS: Final = 10.0
"""A workload that runs is looked at this often, because silence is news, too."""
GPUS_PER_SECOND: Final = 6000.0
RETENTION_CHECK_SECONDS: Final = 5.0
LATE_STEPS_SECONDS: Final = 90.0
"""So long after a job's end its pods may still tell of it: samples wait 60 s for their stage, and a last step is one
once nothing has followed it for half a minute."""


@dataclass(kw_only=True, slots=True)
class ReconcileTimes:
    """For metrics."""

    looks: int = 0
    lag_seconds: float = 0.0
    """How late the last tick was."""


class Reconciler:
    """The controller's core loop. Everything is called in one event loop."""

    def __init__(
        self,
        *,
        workloads: Workloads,
        namespaces: Namespaces,
        writer: StatusWriter,
        recorder: EventRecorder,
        settings: Settings,
        limits: DiagnosisLimits,
        ledgers: Ledgers,
        clock: Callable[[], float],
        clinic: Clinic | None = None,
    ) -> None:
        self._workloads = workloads
        self._clinic = clinic
        """The stage-aware diagnosis, which is shown the reports by `workloads`; None: the simple rules alone."""
        self._choice = Choice(namespaces, settings)
        self._writer = writer
        self._recorder = recorder
        self._ledgers = ledgers
        self._settings = settings
        self._clock = clock
        self._gpus = GpuResources.of(settings.injection.gpu_resources)
        self._entries: dict[str, Entry] = {}
        self._known = KnownMonitors()
        self._examiner = Examiner(
            workloads=workloads,
            choice=self._choice,
            settings=settings,
            limits=limits,
            clinic=clinic,
            listening_since=clock(),
        )
        self._submission = Submission(
            writer=writer,
            ledgers=ledgers,
            settings=settings.controller,
            clock=clock,
            entries=self._entries.values,
            missing=self._monitor_missing,
            touch=workloads.touch,
        )
        self._retirement = Retirement(
            known=self._known,
            workloads=workloads,
            writer=writer,
            retention_seconds=settings.controller.retention_seconds,
            gone=self._monitor_missing,
        )
        self._retention_checked = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[str] = set()
        self._settle_seconds = 2 * settings.report.interval_seconds + 5
        self._late_seconds = max(self._settle_seconds, LATE_STEPS_SECONDS)
        self.times = ReconcileTimes()

    # What arrives

    def job_seen(self, kind: JobKind, body: Mapping[str, Any]) -> None:
        """Take a job as it was listed or watched."""
        job = job_from_object(kind, body, self._gpus)
        if job is not None:
            self._workloads.job_seen(job, self._clock())

    def job_gone(self, kind: JobKind, uid: str) -> None:
        """Take note that a job was deleted."""
        self._workloads.job_gone(kind, uid, self._clock())

    def known_jobs(self, kind: JobKind) -> set[str]:
        """Uids of the jobs that are believed to exist."""
        return set(self._workloads.known(kind))

    def monitor_seen(self, body: Mapping[str, Any]) -> None:
        """Take a GPUMonitor as it was listed or watched."""
        monitor = monitors.from_object(body)
        if monitor is not None:
            self._keep(monitor)

    def monitor_gone(self, namespace: str, name: str, uid: str) -> None:
        """Take note that a GPUMonitor was deleted; a workload that still runs gets a new one."""
        monitor = self._known.gone(namespace, name, uid)
        if monitor is not None:
            self._touch_workload_of(monitor)

    def known_monitors(self) -> set[tuple[str, str, str]]:
        """(namespace, name, uid) of the GPUMonitors that are believed to exist."""
        return {(monitor.namespace, monitor.name, monitor.uid) for monitor in self._known}

    def kind_listed(self, kind: JobKind) -> None:
        """Take note that a complete list of a kind was seen, so that a job that is not known does not exist."""
        self._retirement.listed_kinds.add(kind)

    def _keep(self, monitor: MonitorSeen) -> None:
        if self._known.keep(monitor):
            self._touch_workload_of(monitor)

    def _monitor_missing(self, monitor: MonitorSeen) -> None:
        self.monitor_gone(monitor.namespace, monitor.name, monitor.uid)

    def _touch_workload_of(self, monitor: MonitorSeen) -> None:
        workload = self._workloads.named(monitor.kind, monitor.namespace, monitor.workload_name)
        if workload is not None:
            self._workloads.touch(workload.job.uid)

    # After the first lists

    def restore(self) -> None:
        """Take up the state from before a restart. Called once, when jobs and monitors are known."""
        now = self._clock()
        for workload in list(self._workloads.all()):
            entry = self._entry(workload)
            monitor = self._known.of(workload.job)
            if monitor is None or monitor.workload_uid != workload.job.uid:
                entry.ended_unseen = workload.job.ended
                continue
            entry.adopt(monitor)
            entry.states = states_of(monitor.status, now)
            if self._clinic is not None and not workload.job.ended:
                self._clinic.resume(workload.job.uid, open_in(monitor.status, now))
            # One in the status is of a version before, or of a controller that may not keep them elsewhere.
            kept = self._ledgers.get(workload.job.uid) or monitor.status.get("ledger", "")
            written = ledger_text.read(str(kept))
            if written is not None:
                self._workloads.restore(
                    workload.job.uid,
                    written,
                    steps=_whole(monitor.status.get("step")),
                    ray_cluster=_ran_in(monitor.status),
                )
            same_phase = monitor.status.get("phase") == workload.job.phase.value
            entry.finished = workload.job.ended and same_phase
            entry.restored = not workload.job.ended
        self._ledgers.keep(monitor.workload_uid or "" for monitor in self._known)

    def listening(self) -> None:
        """Take note that reports are taken from now on, and all pods are known. Called once."""
        self._examiner.listening_since = self._clock()
        self._workloads.fold_restored()

    # Incidents

    def report(self, pod: PodRecord, *, reason: str, message: str, severity: Severity) -> None:
        """Put an Event on the job that a pod belongs to, and on its GPUMonitor. An `Incidents`."""
        workload = self._workloads.workload_of_pod(pod)
        if workload is not None:
            self._tell(workload, self._entry(workload), reason=reason, message=message, severity=severity)

    def _tell(
        self,
        workload: Workload,
        entry: Entry,
        *,
        reason: str,
        message: str,
        severity: Severity,
        subject: str = "",
    ) -> None:
        regarding = [_job_ref(workload.job)] if workload.gone_at is None else []
        if entry.monitor is not None:
            regarding.append(_monitor_ref(entry.monitor))
        for reference in regarding:
            self._recorder.record(
                Occurrence(
                    regarding=reference,
                    reason=reason,
                    note=message,
                    severity=severity,
                    at=self._clock(),
                    subject=subject,
                )
            )

    # The loop

    async def run(self) -> None:
        """Tick for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(loop.time(), due + TICK_SECONDS)
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.times.lag_seconds = max(0.0, loop.time() - due)
            await self.tick()

    async def tick(self) -> None:
        """Look at all that is worth a look now."""
        now = self._clock()
        pace = self._pace()
        self._later |= self._workloads.take_dirty()
        self._later |= {uid for uid, entry in self._entries.items() if self._look_is_due(entry, now)}
        for number, uid in enumerate(list(self._later)):
            workload = self._workloads.get(uid)
            if workload is None:
                self._later.discard(uid)
                self._entries.pop(uid, None)
                continue
            entry = self._entry(workload)
            if now - entry.looked_at < pace:
                continue
            self._later.discard(uid)
            await self._look_safely(workload, entry, now)
            if number % 20 == 19:
                await asyncio.sleep(0)
        if now - self._retention_checked >= RETENTION_CHECK_SECONDS:
            self._retention_checked = now
            await self._retirement.look(now)

    def _pace(self) -> float:
        """Shortest time between two looks at one workload: a second for a few GPUs, 13 s for 80,000 of jobs that run.

        So a sixth of a core is enough for all: one look takes some 25 us a GPU.
        """
        looked_at = (entry.picture for entry in self._entries.values() if not entry.finished)
        gpus = sum(len(picture.gpus) for picture in looked_at if picture is not None)
        return max(1.0, gpus / GPUS_PER_SECOND)

    def _look_is_due(self, entry: Entry, now: float) -> bool:
        return not entry.finished and not entry.writing and now - entry.looked_at >= LOOK_AGAIN_SECONDS

    async def _look_safely(self, workload: Workload, entry: Entry, now: float) -> None:
        try:
            for _ in self._examiner.consult(workload, entry, now):
                await asyncio.sleep(0)
            self._look(workload, entry, now)
        except Exception:
            # A fault in what is said about one job must not end the monitoring of all others.
            target = {"kind": workload.job.kind, "namespace": workload.job.namespace, "name": workload.job.name}
            logger.exception("workload cannot be judged", extra={"object": target})

    def _look(self, workload: Workload, entry: Entry, now: float) -> None:
        entry.looked_at = now
        self.times.looks += 1
        job = workload.job
        if self._workloads.named(job.kind, job.namespace, job.name) is not workload:
            # A newer run of this name has the GPUMonitor now.
            self._forget(workload)
            return
        monitor = self._known.of(workload.job)
        if monitor is None:
            self._without_monitor(workload, entry)
            return
        if entry.monitor is None or entry.monitor.uid != monitor.uid:
            entry.adopt(monitor)
        entry.monitor = monitor
        if (entry.finished and workload.job.ended) or self._waits_for_pods(workload, entry, now):
            self._forget_if_gone(workload, entry)
            return
        entry.finished = False
        picture, assessment = self._examiner.examine(workload, entry, now)
        entry.picture, entry.assessment, entry.states = picture, assessment, assessment.states
        for transition in assessment.transitions:
            self._tell(
                workload,
                entry,
                reason=transition.reason,
                message=transition.message,
                severity=transition.severity,
                subject=transition.subject,
            )
        status = render(picture, before=entry.base(workload.job.uid), now=now)
        self._submission.submit(workload, entry, status, now)
        self._finish(workload, entry, status, now)

    def _waits_for_pods(self, workload: Workload, entry: Entry, now: float) -> bool:
        """After a restart, a status is left as it is until each pod has had the time to report again."""
        if not entry.restored or workload.job.ended or workload.gone_at is not None:
            return False
        silent = any(
            track.telemetry is None and track.record.injected is not None and track.record.live
            for track in workload.pods()
        )
        entry.restored = silent and now - self._examiner.listening_since < self._settle_seconds
        return entry.restored

    # GPUMonitors

    def _without_monitor(self, workload: Workload, entry: Entry) -> None:
        entry.monitor = None
        if workload.gone_at is not None:
            self._forget(workload)
            return
        if entry.ended_unseen or entry.creating or not self._wanted(workload):
            return
        if self._clock() < entry.not_before:
            return
        entry.creating = True
        self._start(self._create(workload.job, entry))

    def _wanted(self, workload: Workload) -> bool:
        """Whether a workload gets a GPUMonitor without anybody's making one: it has GPUs, and is to be monitored."""
        namespace = workload.job.namespace
        if self._choice.excludes(namespace):
            return False
        tracks = list(workload.pods())
        if self._choice.waits_for_word(namespace):
            # Somebody chose this job, or the webhook had a reason not to follow that choice.
            return any(track.record.injected is not None or track.record.skip_reason for track in tracks)
        return bool(workload.job.gpus_requested) or any(track.record.gpus_requested > 0 for track in tracks)

    async def _create(self, job: JobSeen, entry: Entry) -> None:
        name = monitors.name_for(kind=job.kind, name=job.name, taken=self._known.in_namespace(job.namespace))
        body = monitors.new_object(kind=job.kind, namespace=job.namespace, name=name, workload_name=job.name)
        created = await self._writer.create(body)
        entry.creating = False
        if created is not None:
            self._keep(created)
        if created is None or not created.shows(job.kind, job.name):
            # The name is another's, or that of one that is being deleted, for as long as somebody's finalizer is there.
            entry.not_before = self._clock() + RETRY_SECONDS
        self._workloads.touch(job.uid)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The end

    def _finish(self, workload: Workload, entry: Entry, status: Status, now: float) -> None:
        """Stop counting a while after the end: a RayCluster that is kept afterwards does nothing for the job."""
        ended = workload.job.ended or workload.gone_at is not None
        if not ended or entry.writing or urgency(entry.written, status) is not Urgency.NONE:
            return
        since = workload.ended_at if workload.ended_at is not None else now
        if now - since >= self._late_seconds or not any(True for _ in workload.telling_pods()):
            entry.finished = True
            self._workloads.told_all(workload)
            entry.restored = False
            if self._clinic is not None:
                self._clinic.forget(workload.job.uid)
            self._ledgers.drop(workload.job.uid)
            self._forget_if_gone(workload, entry)

    def _forget_if_gone(self, workload: Workload, entry: Entry) -> None:
        if entry.finished and workload.gone_at is not None:
            if entry.monitor is not None:
                self._known.written(entry.monitor, entry.written)
            self._forget(workload)

    def _forget(self, workload: Workload) -> None:
        uid = workload.job.uid
        self._retirement.forgotten(uid, self._clock())
        self._workloads.forget(uid)
        self._examiner.forget(uid)
        self._ledgers.drop(uid)
        self._entries.pop(uid, None)

    # For metrics

    def entries(self) -> Iterable[tuple[Workload, Entry]]:
        """All workloads with what was last thought of them."""
        for uid, entry in self._entries.items():
            workload = self._workloads.get(uid)
            if workload is not None:
                yield workload, entry

    def _entry(self, workload: Workload) -> Entry:
        entry = self._entries.get(workload.job.uid)
        if entry is None:
            entry = Entry()
            self._entries[workload.job.uid] = entry
        return entry


def _ran_in(status: Mapping[str, Any]) -> str | None:
    """Return the RayCluster that a status names; None where it names none."""
    workload = status.get("workload")
    found = workload.get("rayCluster") if isinstance(workload, Mapping) else None
    return found if isinstance(found, str) and found else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _job_ref(job: JobSeen) -> ObjectRef:
    return ObjectRef(
        api_version=KINDS[job.kind].api_version,
        kind=job.kind.value,
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
    )


def _monitor_ref(monitor: MonitorSeen) -> ObjectRef:
    return ObjectRef(
        api_version=monitors.API_VERSION,
        kind=monitors.KIND,
        namespace=monitor.namespace,
        name=monitor.name,
        uid=monitor.uid,
    )
