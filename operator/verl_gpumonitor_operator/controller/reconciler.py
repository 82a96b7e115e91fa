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
from dataclasses import dataclass, field, replace
from typing import Any, Final

from verl_gpumonitor.diagnosis import DiagnosisLimits
from verl_gpumonitor.diagnosis.health import UNKNOWN
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.vocabulary import Phase, Severity
from verl_gpumonitor_operator.settings import ALWAYS_EXCLUDED_NAMESPACES, InjectionMode, Settings, SettingsError

from . import ledger_text, monitors
from .assessment import UNAVAILABLE, Assessment, FindingStates, assess, open_in, states_of
from .assessment import ended as ended_assessment
from .clinic import NOT_SEEN, Clinic, Opinion, thresholds_of
from .events import EventRecorder, ObjectRef, Occurrence
from .jobs import KINDS, GpuResources, JobKind, JobSeen, timestamp
from .jobs import from_object as job_from_object
from .launch import Command, Launches, command_of
from .ledgers import Ledgers
from .monitors import MonitorSeen
from .namespaces import DISABLED, ENABLED, Namespaces
from .ports import PodRecord
from .stages import trains_alone, view
from .status import Condition, GpuView, Picture, Status, Urgency, previous_run, render, urgency
from .telemetry import Availability, Patience, PodSummary, Seen, Telemetry, availability, is_starting, judge
from .workloads import PodTrack, Workload, Workloads
from .writer import Outcome, StatusWrite, StatusWriter

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.5
LOOK_AGAIN_SECONDS: Final = 10.0
"""A workload that runs is looked at this often, because silence is news, too."""
GPUS_PER_SECOND: Final = 6000.0
RETENTION_CHECK_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 10.0
LATE_STEPS_SECONDS: Final = 90.0
"""So long after a job's end its pods may still tell of it: samples wait 60 s for their stage, and a last step is one
once nothing has followed it for half a minute."""
"""After a write that failed."""
REMEMBER_SECONDS: Final = 10.0
TERMINAL: Final = (Phase.SUCCEEDED.value, Phase.FAILED.value, Phase.STOPPED.value)
UNSUPPORTED: Final = (
    "TrainJobs are not supported yet: their pods get no sidecar. Use a PyTorchJob or a RayJob to have GPUs monitored."
)


@dataclass(kw_only=True, slots=True)
class Entry:
    """What is remembered of one workload between two looks."""

    monitor: MonitorSeen | None = None
    written: Mapping[str, Any] = field(default_factory=dict)
    """Status that the API server holds, as far as we know."""
    written_at: float | None = None
    writing: bool = False
    """A write of it waits or is on its way."""
    urgency: Urgency = Urgency.NONE
    """How urgent that write is."""
    creating: bool = False
    not_before: float = 0.0
    """No write before this time: the last one failed."""
    states: FindingStates = field(default_factory=FindingStates)
    looked_at: float = 0.0
    restored: bool = False
    """Its status is from before a restart, and not every pod has reported since."""
    finished: bool = False
    """It has ended, and its last status is written."""
    most_reported: int = 0
    """Most GPUs that were seen well at one time."""
    ledger_cut: bool = False
    """Its ledger has no room for all of its pods."""
    ended_unseen: bool = False
    """It had ended before it was first seen, so that there is nothing to say of it."""
    thresholds: tuple[int, Thresholds | None, str] | None = None
    """Generation of the spec, the thresholds that it sets, or None where they cannot be, and what is said of them."""
    assessment: Assessment | None = None
    picture: Picture | None = None


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
        self.clinic = clinic
        """The stage-aware diagnosis, which is shown the reports by `workloads`; None: the simple rules alone."""
        self._ledgers = ledgers
        self._namespaces = namespaces
        self._writer = writer
        self._recorder = recorder
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._gpus = GpuResources.of(settings.injection.gpu_resources)
        self._excluded_namespaces = {
            *ALWAYS_EXCLUDED_NAMESPACES,
            settings.namespace,
            *settings.injection.excluded_namespaces,
        }
        self._entries: dict[str, Entry] = {}
        self._monitors: dict[str, dict[str, MonitorSeen]] = {}
        """By namespace and name."""
        self._made_by_hand: dict[str, set[str]] = {}
        """Names of those that are not ours, by namespace."""
        self._launches = Launches()
        self._listening_since = clock()
        self._retention_checked = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[str] = set()
        self._forgotten: dict[str, float] = {}
        """Runs that were seen to their end, with the time: their last status may still be on its way back to us."""
        self.listed_kinds: set[JobKind] = set()
        """Kinds of which a complete list was seen, so that a job that is not known does not exist."""
        interval = settings.report.interval_seconds
        self._patience = Patience(
            fresh_seconds=max(3 * interval, 10.0),
            silence_seconds=max(settings.controller.not_reporting_seconds, 2 * interval),
        )
        self._settle_seconds = 2 * interval + 5
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
        monitor = self._monitors.get(namespace, {}).get(name)
        if monitor is not None and monitor.uid == uid:
            del self._monitors[namespace][name]
            self._made_by_hand.get(namespace, set()).discard(name)
            self._touch_workload_of(monitor)

    def known_monitors(self) -> set[tuple[str, str, str]]:
        """(namespace, name, uid) of the GPUMonitors that are believed to exist."""
        return {
            (namespace, name, monitor.uid)
            for namespace, held in self._monitors.items()
            for name, monitor in held.items()
        }

    def _keep(self, monitor: MonitorSeen) -> None:
        held = self._monitors.setdefault(monitor.namespace, {})
        before = held.get(monitor.name)
        if before is not None and before.uid == monitor.uid and before.generation > monitor.generation:
            return
        held[monitor.name] = monitor
        by_hand = self._made_by_hand.setdefault(monitor.namespace, set())
        by_hand.discard(monitor.name) if monitor.managed else by_hand.add(monitor.name)
        spec_same = before is not None and (before.uid, before.generation) == (monitor.uid, monitor.generation)
        if not spec_same or monitor.deleting:
            self._touch_workload_of(monitor)

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
            monitor = self._monitor_of(workload)
            if monitor is None or monitor.workload_uid != workload.job.uid:
                entry.ended_unseen = workload.job.ended
                continue
            self._adopt(entry, monitor)
            entry.states = states_of(monitor.status, now)
            if self.clinic is not None and not workload.job.ended:
                self.clinic.resume(workload.job.uid, open_in(monitor.status))
            # One in the status is of a version before, or of a controller that may not keep them elsewhere.
            kept = self._ledgers.get(workload.job.uid) or monitor.status.get("ledger", "")
            written = ledger_text.read(str(kept))
            if written is not None:
                self._workloads.restore(workload.job.uid, written, steps=_whole(monitor.status.get("step")))
            same_phase = monitor.status.get("phase") == workload.job.phase.value
            entry.finished = workload.job.ended and same_phase
            entry.restored = not workload.job.ended
        self._ledgers.keep(monitor.workload_uid or "" for held in self._monitors.values() for monitor in held.values())

    def listening(self) -> None:
        """Take note that reports are taken from now on, and all pods are known. Called once."""
        self._listening_since = self._clock()
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
            self._look_safely(workload, entry, now)
            if number % 20 == 19:
                await asyncio.sleep(0)
        if now - self._retention_checked >= RETENTION_CHECK_SECONDS:
            self._retention_checked = now
            await self._retire(now)

    def _pace(self) -> float:
        """Shortest time between two looks at one workload: a second for a few GPUs, 13 s for 80,000.

        So a sixth of a core is enough for all: one look takes some 25 us a GPU.
        """
        gpus = sum(len(entry.picture.gpus) for entry in self._entries.values() if entry.picture is not None)
        return max(1.0, gpus / GPUS_PER_SECOND)

    def _look_is_due(self, entry: Entry, now: float) -> bool:
        return not entry.finished and not entry.writing and now - entry.looked_at >= LOOK_AGAIN_SECONDS

    def _look_safely(self, workload: Workload, entry: Entry, now: float) -> None:
        try:
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
        monitor = self._monitor_of(workload)
        if monitor is None:
            self._without_monitor(workload, entry)
            return
        if entry.monitor is None or entry.monitor.uid != monitor.uid:
            self._adopt(entry, monitor)
        entry.monitor = monitor
        if (entry.finished and workload.job.ended) or self._waits_for_pods(workload, entry, now):
            self._forget_if_gone(workload, entry)
            return
        entry.finished = False
        picture, assessment = self._judge(workload, entry, now)
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
        status = render(picture, before=self._base(workload, entry), now=now)
        self._submit(workload, entry, status, now)
        self._finish(workload, entry, status, now)

    def _waits_for_pods(self, workload: Workload, entry: Entry, now: float) -> bool:
        """After a restart, a status is left as it is until each pod has had the time to report again."""
        if not entry.restored or workload.job.ended or workload.gone_at is not None:
            return False
        silent = any(
            track.telemetry is None and track.record.injected is not None and track.record.live
            for track in workload.pods()
        )
        entry.restored = silent and now - self._listening_since < self._settle_seconds
        return entry.restored

    # GPUMonitors

    def _monitor_of(self, workload: Workload) -> MonitorSeen | None:
        """Return the one that shows a workload. Ours are found by their two names, others by looking at each."""
        job = workload.job
        held = self._monitors.get(job.namespace, {})
        names = {job.name, monitors.second_name(kind=job.kind, name=job.name)}
        names |= self._made_by_hand.get(job.namespace, set())
        return monitors.chosen((held[name] for name in names if name in held), kind=job.kind, name=job.name)

    def _adopt(self, entry: Entry, monitor: MonitorSeen) -> None:
        entry.monitor = monitor
        entry.written = monitor.status
        entry.written_at = None
        entry.finished = False

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
        if namespace in self._excluded_namespaces:
            return False
        tracks = list(workload.pods())
        if self._settings.injection.mode is InjectionMode.OPT_IN and self._namespaces.inject(namespace) != ENABLED:
            # Somebody chose this job, or the webhook had a reason not to follow that choice.
            return any(track.record.injected is not None or track.record.skip_reason for track in tracks)
        return bool(workload.job.gpus_requested) or any(track.record.gpus_requested > 0 for track in tracks)

    async def _create(self, job: JobSeen, entry: Entry) -> None:
        name = monitors.name_for(kind=job.kind, name=job.name, taken=self._monitors.get(job.namespace, {}))
        body = monitors.new_object(kind=job.kind, namespace=job.namespace, name=name, workload_name=job.name)
        created = await self._writer.create(body)
        entry.creating = False
        if created is None:
            entry.not_before = self._clock() + RETRY_SECONDS
        else:
            self._keep(created)
        self._workloads.touch(job.uid)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Judging

    def _judge(self, workload: Workload, entry: Entry, now: float) -> tuple[Picture, Assessment]:
        tracks = list(workload.pods())
        gpus, summaries, telemetry = self._views(tracks, now)
        ended = workload.job.ended or workload.gone_at is not None
        available = self._availability(workload, summaries)
        muted = entry.monitor.muted_reasons if entry.monitor else frozenset[str]()
        kept_health = self._base(workload, entry).get("health") if ended else None
        # A job may be so short that its first report is its last, and comes after its end.
        judging = not ended or (kept_health in (None, UNKNOWN, UNAVAILABLE) and available.status == "True")
        command = command_of(workload.job, workload.ray_jobs())
        opinion = self._opinion(workload, entry, command, now) if judging and not ended else NOT_SEEN
        if opinion.staged and entry.states.diagnosis.tracks and self.clinic is not None:
            # What the simple rules had found is the other diagnosis's from now on.
            simple = {one.finding.reason: one.finding.message for one in entry.states.diagnosis.open}
            self.clinic.resume(workload.job.uid, simple)
            opinion = self._opinion(workload, entry, command, now, again=True)
        assessment = (
            assess(gpus, available, states=entry.states, now=now, limits=self._limits, muted=muted, opinion=opinion)
            if judging
            else ended_assessment(entry.states)
        )
        entry.most_reported = max(entry.most_reported, sum(1 for gpu in gpus if gpu.reported))
        totals = workload.totals()
        launch = self._launches.of(workload.job.uid, command)
        trainer_alone = trains_alone(workload.job, launch.get("program") if launch is not None else None)
        if trainer_alone:
            self._workloads.trains_alone(workload.job.uid)
        stages = view(
            workload,
            [track for track in tracks if self._is_fresh(track, now)],
            totals.stages,
            trainer_alone=trainer_alone,
        )
        picture = Picture(
            job=workload.job,
            phase=phase_of(workload),
            ended=ended,
            completed_at=self._completed_at(workload, entry) if ended else None,
            gone_at=workload.gone_at,
            gpus_requested=self._gpus_requested(workload, tracks),
            most_reported=entry.most_reported,
            gpus=gpus,
            pods=summaries,
            telemetry=telemetry,
            totals=totals,
            stages=stages,
            launch=launch,
            conditions=[*assessment.conditions, *_spec_accepted(entry)],
            health=assessment.health or kept_health or UNKNOWN,
            gpu_notes=assessment.gpu_notes,
            findings=assessment.findings,
            diagnosis=opinion.coverage,
            generation=entry.monitor.generation if entry.monitor else None,
            message=_what_is_missing(workload, available),
        )
        return picture, assessment

    def _opinion(
        self, workload: Workload, entry: Entry, command: Command | None, now: float, *, again: bool = False
    ) -> Opinion:
        if self.clinic is None:
            return NOT_SEEN
        return self.clinic.look(
            workload,
            command=command,
            thresholds=self._own_thresholds(entry),
            phase=phase_of(workload).value,
            now=now,
            again=again,
        )

    def _own_thresholds(self, entry: Entry) -> Thresholds | None:
        """Return the thresholds that the GPUMonitor sets; None where it sets none, or some that cannot be."""
        monitor = entry.monitor
        if monitor is None or not monitor.thresholds or self.clinic is None:
            entry.thresholds = None
            return None
        if entry.thresholds is None or entry.thresholds[0] != monitor.generation:
            try:
                given: Thresholds | None = thresholds_of(monitor.thresholds, self.clinic.thresholds)
                message = "The thresholds of spec.thresholds are in use."
            except SettingsError as error:
                given, message = None, f"spec.{error}. The operator's own are in use instead."
            entry.thresholds = (monitor.generation, given, message)
        return entry.thresholds[1]

    def _views(self, tracks: Iterable[PodTrack], now: float) -> tuple[list[GpuView], list[PodSummary], list[Telemetry]]:
        gpus: list[GpuView] = []
        summaries: list[PodSummary] = []
        seen: list[Telemetry] = []
        tracks = list(tracks)
        any_gpus = any(track.record.gpus_requested > 0 for track in tracks)
        for track in tracks:
            own = self._gpus_of(track, now)
            gpus += own
            summary = self._summary(track, own, now)
            if track.record.gpus_requested > 0 or (track.is_head and any_gpus):
                summaries.append(summary)
            if (
                track.telemetry is not None
                and summary.verdict.seen is not Seen.DONE
                and track.record.gpus_requested > 0
            ):
                seen.append(track.telemetry)
        return gpus, summaries, seen

    def _is_fresh(self, track: PodTrack, now: float) -> bool:
        """Whether a pod with GPUs says what is now."""
        telemetry = track.telemetry
        return (
            telemetry is not None
            and track.record.gpus_requested > 0
            and track.record.live
            and now - telemetry.received_at <= self._patience.fresh_seconds
        )

    def _gpus_of(self, track: PodTrack, now: float) -> list[GpuView]:
        telemetry = track.telemetry
        if telemetry is None or not track.record.live or now - telemetry.received_at > self._patience.fresh_seconds:
            return []
        record, pool = track.record, track.pool
        return [
            GpuView.of(
                report,
                pod=record.name,
                node=record.node_name,
                pool=pool,
                utilization=track.utilization(report.uuid),
                xids=track.xids.of(report.uuid),
            )
            for report in telemetry.gpus
        ]

    def _summary(self, track: PodTrack, own: list[GpuView], now: float) -> PodSummary:
        verdict = judge(
            track.record,
            track.telemetry,
            now=now,
            listening_since=self._listening_since,
            patience=self._patience,
            images=self._settings.images,
            opted_out=self._namespaces.inject(track.record.namespace) == DISABLED,
        )
        return PodSummary(
            name=track.record.name,
            gpus_requested=track.record.gpus_requested,
            gpus_reported=sum(1 for gpu in own if gpu.reported),
            faulty=tuple(gpu.report for gpu in own if gpu.report.state.value != "ok"),
            verdict=verdict,
            starting=is_starting(track.record, now),
        )

    def _availability(self, workload: Workload, summaries: list[PodSummary]) -> Availability:
        if workload.job.kind is JobKind.TRAIN_JOB:
            return Availability(status="False", reason="NotInjected", message=UNSUPPORTED)
        return availability(summaries)

    def _gpus_requested(self, workload: Workload, tracks: list[PodTrack]) -> int:
        cluster = self._workloads.cluster_of(workload)
        spec = cluster.gpus_requested if cluster is not None else workload.job.gpus_requested
        live = sum(track.record.gpus_requested for track in tracks if track.record.live and not track.record.deleting)
        return max(spec or 0, live)

    def _completed_at(self, workload: Workload, entry: Entry) -> float | None:
        if workload.job.completed_at is not None:
            return workload.job.completed_at
        if entry.monitor is not None and entry.monitor.workload_uid == workload.job.uid:
            known = entry.monitor.completed_at
            if known is not None:
                return known
        return workload.ended_at

    def _base(self, workload: Workload, entry: Entry) -> Mapping[str, Any]:
        """Status to go on from: the last one of this run, or the summary of the run before."""
        said_of = entry.written.get("workload")
        uid = said_of.get("uid") if isinstance(said_of, Mapping) else None
        if uid in (None, workload.job.uid):
            return entry.written
        return {"previousRun": previous_run(entry.written)}

    # Writing

    def _submit(self, workload: Workload, entry: Entry, status: Status, now: float) -> None:
        matters = urgency(entry.written, status)
        if matters is Urgency.NONE or entry.monitor is None or now < entry.not_before:
            return
        if entry.writing and matters <= entry.urgency:
            return
        ended = workload.job.ended or workload.gone_at is not None
        if entry.written_at is not None and now - entry.written_at < self._wait_seconds(matters, ended=ended):
            return
        uid = workload.job.uid

        def done(outcome: Outcome, written: Status) -> None:
            self._written(uid, entry, outcome, written)

        write = StatusWrite(
            namespace=entry.monitor.namespace,
            name=entry.monitor.name,
            before=entry.written,
            status=self._with_ledger(workload, entry, status),
            urgency=matters,
            done=done,
        )
        if not entry.writing:
            self._writer.submit(write)
        elif not self._writer.exchange(write):
            # It is on its way already. What it does not say is looked at again when it has arrived.
            return
        entry.writing, entry.urgency = True, matters

    def _wait_seconds(self, matters: Urgency, *, ended: bool) -> float:
        """Shortest time since the last write of the same object."""
        if matters is Urgency.PHASE:
            return 0.0
        if matters is Urgency.DRIFT and not ended:
            return self._drift_seconds()
        return self._settings.controller.status_min_interval_seconds

    def _with_ledger(self, workload: Workload, entry: Entry, status: Status) -> Status:
        """Have the ledger kept, and leave it in the status where it is not kept elsewhere, or not yet."""
        uid, text = workload.job.uid, self._ledger(workload, entry)
        kept = self._ledgers.put(uid, text)
        if kept and ("ledger" not in entry.written or self._ledgers.stored(uid)):
            return status
        return {**status, "ledger": text}

    def _ledger(self, workload: Workload, entry: Entry) -> str:
        """Return the ledger as text, and say once where there is no room for all of it."""
        written = ledger_text.write(workload.ledger())
        if written.left_out and not entry.ledger_cut:
            job = workload.job
            logger.warning(
                "too many pods for the ledger: of some, what they count from now until a restart of the controller is "
                "known only if they report again after it",
                extra={
                    "object": {"kind": job.kind, "namespace": job.namespace, "name": job.name, "uid": job.uid},
                    "reason": "LedgerFull",
                    "pods": written.left_out,
                },
            )
        entry.ledger_cut = bool(written.left_out)
        return written.text

    def _drift_seconds(self) -> float:
        """Drift is written each 30 s, or slower, so that it takes at most half of the writes."""
        running = sum(1 for entry in self._entries.values() if not entry.finished)
        return max(30.0, running / (0.5 * self._settings.controller.status_writes_per_second))

    def _written(self, uid: str, entry: Entry, outcome: Outcome, status: Status) -> None:
        now = self._clock()
        entry.writing, entry.urgency = False, Urgency.NONE
        if outcome in (Outcome.WRITTEN, Outcome.UNCHANGED):
            entry.written, entry.written_at = status, now
        elif outcome is Outcome.MISSING:
            self._missing(entry)
            entry.not_before = now + 1.0
        else:
            entry.not_before = now + (6 * RETRY_SECONDS if outcome is Outcome.INVALID else RETRY_SECONDS)
        self._workloads.touch(uid)

    def _missing(self, entry: Entry) -> None:
        monitor = entry.monitor
        if monitor is not None:
            self.monitor_gone(monitor.namespace, monitor.name, monitor.uid)
            entry.monitor = None

    # The end

    def _finish(self, workload: Workload, entry: Entry, status: Status, now: float) -> None:
        """Stop counting a while after the end: a RayCluster that is kept afterwards does nothing for the job."""
        ended = workload.job.ended or workload.gone_at is not None
        if not ended or entry.writing or urgency(entry.written, status) is not Urgency.NONE:
            return
        since = workload.ended_at if workload.ended_at is not None else now
        if now - since >= self._late_seconds or not any(True for _ in workload.telling_pods()):
            entry.finished = True
            workload.forget_left()
            entry.restored = False
            if self.clinic is not None:
                self.clinic.forget(workload.job.uid)
            self._ledgers.drop(workload.job.uid)
            self._forget_if_gone(workload, entry)

    def _forget_if_gone(self, workload: Workload, entry: Entry) -> None:
        if entry.finished and workload.gone_at is not None:
            monitor = entry.monitor
            if monitor is not None and self._monitors.get(monitor.namespace, {}).get(monitor.name) is not None:
                self._monitors[monitor.namespace][monitor.name] = replace(monitor, status=entry.written)
            self._forget(workload)

    def _forget(self, workload: Workload) -> None:
        self._forgotten[workload.job.uid] = self._clock()
        self._workloads.forget(workload.job.uid)
        self._launches.forget(workload.job.uid)
        if self.clinic is not None:
            self.clinic.forget(workload.job.uid)
        self._ledgers.drop(workload.job.uid)
        self._entries.pop(workload.job.uid, None)

    async def _retire(self, now: float) -> None:
        """End the statuses of runs that went while nobody looked, and delete what was kept long enough."""
        self._forgotten = {uid: at for uid, at in self._forgotten.items() if now - at < REMEMBER_SECONDS}
        for held in list(self._monitors.values()):
            for monitor in list(held.values()):
                workload = self._workloads.named(monitor.kind, monitor.namespace, monitor.workload_name)
                if workload is not None:
                    await self._drop_double(workload, monitor)
                    continue
                if monitor.kind in self.listed_kinds and monitor.workload_uid not in self._forgotten:
                    await self._retire_one(monitor, now)

    async def _drop_double(self, workload: Workload, monitor: MonitorSeen) -> None:
        """Delete one of ours where a hand-made one shows the same workload."""
        best = self._monitor_of(workload)
        if best is not None and best.uid != monitor.uid and monitor.managed and not best.managed:
            await self._delete(monitor)

    async def _retire_one(self, monitor: MonitorSeen, now: float) -> None:
        """Note that the job of a GPUMonitor is gone, and delete it when it was kept long enough since then."""
        if monitor.status.get("phase") is not None and None in (monitor.completed_at, monitor.deleted_at):
            self._end_unseen(monitor, now)
            return
        kept = monitor.retention_seconds
        retention = kept if kept is not None else self._settings.controller.retention_seconds
        ends = [at for at in (monitor.completed_at, monitor.deleted_at) if at is not None]
        since = max(ends, default=monitor.created_at)
        if monitor.managed and since is not None and now - since > retention:
            await self._delete(monitor)

    def _end_unseen(self, monitor: MonitorSeen, now: float) -> None:
        """Write the end of a job that is gone: only when it went, or, where nobody saw it end, that it ended, too."""
        status = dict(monitor.status)
        phase = status.get("phase")
        workload = {"completionTime": timestamp(now), **(status.get("workload") or {}), "deletionTime": timestamp(now)}
        if phase not in TERMINAL:
            phase = Phase.UNKNOWN.value
            workload["message"] = "The job was deleted while the controller did not run; how it ended was not seen."
        ended = {**status, "phase": phase, "workload": workload}

        def done(outcome: Outcome, _: Status) -> None:
            if outcome is Outcome.MISSING:
                self.monitor_gone(monitor.namespace, monitor.name, monitor.uid)

        self._writer.submit(
            StatusWrite(
                namespace=monitor.namespace,
                name=monitor.name,
                before=status,
                status=ended,
                urgency=Urgency.CHANGE,
                done=done,
            )
        )
        self._monitors[monitor.namespace][monitor.name] = replace(monitor, status=ended)

    async def _delete(self, monitor: MonitorSeen) -> None:
        if await self._writer.delete(monitor):
            self.monitor_gone(monitor.namespace, monitor.name, monitor.uid)

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


def phase_of(workload: Workload) -> Phase:
    """Phase of a workload: what its object says, or `Stopped` where that was deleted before an end."""
    if workload.gone_at is not None and not workload.job.ended:
        return Phase.STOPPED
    return workload.job.phase


def _what_is_missing(workload: Workload, available: Availability) -> str | None:
    parts = []
    if available.status == "False" or available.partial:
        parts.append(available.message)
    if workload.borrowed is not None and len(workload.borrowed.borrowers) > 1:
        parts.append(
            f"RayCluster {workload.borrowed.name} is shared by {len(workload.borrowed.borrowers)} RayJobs; each shows "
            "all of its GPUs."
        )
    return " ".join(parts) or None


def _spec_accepted(entry: Entry) -> list[Condition]:
    """Say whether the spec's thresholds can be used, where there are any."""
    if entry.thresholds is None:
        return []
    _, given, message = entry.thresholds
    status, reason = ("True", "Accepted") if given is not None else ("False", "InvalidThresholds")
    return [Condition(type="SpecAccepted", status=status, reason=reason, message=message)]


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
