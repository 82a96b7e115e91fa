# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Looks at the whole of one workload: what its pods told becomes the picture that its GPUMonitor shows."""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Final

from verl_gpumonitor.diagnosis import DiagnosisLimits
from verl_gpumonitor.diagnosis.health import UNKNOWN
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.vocabulary import Phase
from verl_gpumonitor_operator.settings import Settings, SettingsError

from .assessment import UNAVAILABLE, Assessment, assess
from .assessment import ended as ended_assessment
from .clinic import NOT_SEEN, Clinic, Opinion, thresholds_of
from .entry import Entry
from .jobs import JobKind
from .launch import Launches, command_of
from .namespaces import Choice
from .podtrack import PodTrack
from .stages import StageView, trains_alone, view
from .status import Condition, GpuView, Picture
from .telemetry import Availability, Patience, PodSummary, Seen, Telemetry, availability, is_starting, judge
from .totals import Totals
from .workload import Workload
from .workloads import Workloads

UNSUPPORTED: Final = (
    "TrainJobs are not supported yet: their pods get no sidecar. Use a PyTorchJob or a RayJob to have GPUs monitored."
)


class Examiner:
    """Knows how long to wait for reports, what may be said of silence, and whom to ask for a diagnosis."""

    def __init__(
        self,
        *,
        workloads: Workloads,
        choice: Choice,
        settings: Settings,
        limits: DiagnosisLimits,
        clinic: Clinic | None,
        listening_since: float,
    ) -> None:
        self._workloads = workloads
        self._choice = choice
        self._settings = settings
        self._limits = limits
        self._clinic = clinic
        """The stage-aware diagnosis; None: the simple rules alone."""
        self._launches = Launches()
        self.listening_since = listening_since
        """Reports are taken since then; Unix seconds."""
        interval = settings.report.interval_seconds
        self._patience = Patience(
            fresh_seconds=max(3 * interval, 10.0),
            silence_seconds=max(settings.controller.not_reporting_seconds, 2 * interval),
        )

    def forget(self, uid: str) -> None:
        """Drop what was remembered of one workload."""
        self._launches.forget(uid)
        if self._clinic is not None:
            self._clinic.forget(uid)

    def consult(self, workload: Workload, entry: Entry, now: float) -> Iterator[None]:
        """Have the diagnosis judge a workload, in parts between which others may have their turn."""
        if self._clinic is None or _is_over(workload):
            return
        yield from self._clinic.judging(
            workload,
            command=command_of(workload.job, workload.ray_jobs()),
            thresholds=self._own_thresholds(entry),
            phase=phase_of(workload).value,
            now=now,
        )

    def examine(self, workload: Workload, entry: Entry, now: float) -> tuple[Picture, Assessment]:
        """Return what is to be shown of a workload, and what is thought of it, beside what was thought before.

        What the diagnosis thinks is as of when it was consulted last.
        """
        tracks = list(workload.pods())
        gpus, summaries, telemetry = self._views(tracks, now, pending=phase_of(workload) is Phase.PENDING)
        ended = _is_over(workload)
        available = self._availability(workload, summaries)
        kept_health = entry.base(workload.job.uid).get("health") if ended else None
        command = command_of(workload.job, workload.ray_jobs())
        # A job may be so short that its first report is its last, and comes after its end.
        judging = not ended or (kept_health in (None, UNKNOWN, UNAVAILABLE) and available.status == "True")
        opinion = self._opinion(workload, entry) if not ended else NOT_SEEN
        if judging:
            muted = entry.monitor.muted_reasons if entry.monitor else frozenset[str]()
            assessment = assess(
                gpus, available, states=entry.states, now=now, limits=self._limits, muted=muted, opinion=opinion
            )
        else:
            assessment = ended_assessment(entry.states)
        entry.most_reported = max(entry.most_reported, sum(1 for gpu in gpus if gpu.reported))
        totals = workload.totals()
        launch = self._launches.of(workload.job.uid, command)
        picture = Picture(
            job=workload.job,
            phase=phase_of(workload),
            ended=ended,
            completed_at=_completed_at(workload, entry) if ended else None,
            gone_at=workload.gone_at,
            gpus_requested=self._gpus_requested(workload, tracks, {gpu.pod for gpu in gpus if gpu.reported}),
            most_reported=entry.most_reported,
            gpus=gpus,
            pods=summaries,
            telemetry=telemetry,
            totals=totals,
            stages=self._stages(workload, tracks, totals, launch, now),
            launch=launch,
            conditions=[*assessment.conditions, *_spec_accepted(entry)],
            health=assessment.health or kept_health or UNKNOWN,
            gpu_notes=assessment.gpu_notes,
            findings=assessment.findings,
            diagnosis=opinion.coverage,
            generation=entry.monitor.generation if entry.monitor else None,
            host_memory={who for track in tracks if (who := self._who_tells_memory(track, now)) is not None},
            message=_what_is_missing(workload, available),
        )
        return picture, assessment

    def _stages(
        self,
        workload: Workload,
        tracks: Iterable[PodTrack],
        totals: Totals,
        launch: Mapping[str, Any] | None,
        now: float,
    ) -> StageView:
        """Return the stages of a workload; one that only trains is told to its pods, too."""
        trainer_alone = trains_alone(workload.job, launch.get("program") if launch is not None else None)
        if trainer_alone:
            self._workloads.trains_alone(workload.job.uid)
        fresh = [track for track in tracks if self._is_fresh(track, now)]
        return view(workload, fresh, totals.stages, trainer_alone=trainer_alone)

    def _opinion(self, workload: Workload, entry: Entry) -> Opinion:
        """Return what the stage-aware diagnosis thinks. From its first word on, what the simple rules found is its."""
        if self._clinic is None:
            return NOT_SEEN
        uid = workload.job.uid
        opinion = self._clinic.opinion(uid)
        if opinion.staged and entry.states.diagnosis.tracks:
            simple = {one.finding.reason for one in entry.states.diagnosis.open}
            self._clinic.resume(uid, [one for one in entry.states.open if one.reason in simple])
            return self._clinic.opinion(uid, again=True)
        return opinion

    def _own_thresholds(self, entry: Entry) -> Thresholds | None:
        """Return the thresholds that the GPUMonitor sets; None where it sets none, or some that cannot be."""
        monitor = entry.monitor
        if monitor is None or not monitor.thresholds or self._clinic is None:
            entry.thresholds = None
            return None
        if entry.thresholds is None or entry.thresholds[0] != monitor.generation:
            try:
                given: Thresholds | None = thresholds_of(monitor.thresholds, self._clinic.thresholds)
                message = "The thresholds of spec.thresholds are in use."
            except SettingsError as error:
                given, message = None, f"spec.{error}. The operator's own are in use instead."
            entry.thresholds = (monitor.generation, given, message)
        return entry.thresholds[1]

    def _views(
        self, tracks: Iterable[PodTrack], now: float, *, pending: bool
    ) -> tuple[list[GpuView], list[PodSummary], list[Telemetry]]:
        gpus: list[GpuView] = []
        summaries: list[PodSummary] = []
        seen: list[Telemetry] = []
        tracks = list(tracks)
        any_gpus = any(track.record.gpus_requested > 0 for track in tracks)
        for track in tracks:
            own = self._gpus_of(track, now)
            gpus += own
            summary = self._summary(track, own, now, pending=pending)
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

    def _who_tells_memory(self, track: PodTrack, now: float) -> str | None:
        return track.host_source(now) if self._is_fresh(track, now) else None

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

    def _summary(self, track: PodTrack, own: list[GpuView], now: float, *, pending: bool) -> PodSummary:
        verdict = judge(
            track.record,
            track.telemetry,
            now=now,
            listening_since=self.listening_since,
            patience=self._patience,
            images=self._settings.images,
            not_asked=self._choice.why_not(track.record.namespace),
            pending=pending,
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

    def _gpus_requested(self, workload: Workload, tracks: list[PodTrack], reporting: Set[str]) -> int:
        """Return what it asks for, or holds: a pod that is being ended holds its GPUs while it still reports them."""
        cluster = self._workloads.cluster_of(workload)
        spec = cluster.gpus_requested if cluster is not None else workload.job.gpus_requested
        live = sum(
            track.record.gpus_requested
            for track in tracks
            if track.record.live and (not track.record.deleting or track.record.name in reporting)
        )
        return max(spec or 0, live)


def _is_over(workload: Workload) -> bool:
    return workload.job.ended or workload.gone_at is not None


def phase_of(workload: Workload) -> Phase:
    """Phase of a workload: what its object says, or `Stopped` where that was deleted before an end."""
    if workload.gone_at is not None and not workload.job.ended:
        return Phase.STOPPED
    return workload.job.phase


def _completed_at(workload: Workload, entry: Entry) -> float | None:
    if workload.job.completed_at is not None:
        return workload.job.completed_at
    if entry.monitor is not None and entry.monitor.workload_uid == workload.job.uid:
        known = entry.monitor.completed_at
        if known is not None:
            return known
    return workload.ended_at


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
