# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a pod can be seen, and if not, why: one verdict a pod, and one condition for the whole workload. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from msgspec.structs import replace

from verl_gpumonitor.diagnosis.xids import LOST
from verl_gpumonitor.model import figures
from verl_gpumonitor.model.kubernetes import RAY_CLUSTER
from verl_gpumonitor.model.report import GpuReport, Report, StageNow, StageQuality
from verl_gpumonitor.model.vocabulary import UNKNOWN, GpuState, Ownership, Source, UnavailableReason
from verl_gpumonitor_operator.settings import Images

from .injected import RESCUED, StandIn, cause_of, stand_in_of
from .ports import ContainerPhase, PodRecord

NO_STAGES: Final = StageQuality()
HOST_SOURCES: Final = ("ray-agent", "marks")
"""Who tells a sidecar the job's host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """What the newest report of a pod said, without what was counted already."""

    start_id: str
    received_at: float
    """Unix seconds of the controller's clock."""
    source: Source
    ownership: Ownership
    unavailable: UnavailableReason | None
    message: str | None
    gpus: tuple[GpuReport, ...]
    gpus_visible: int | None
    final: bool
    host_memory: str | None = None
    """Who told the host memory of the job in this pod; None where nobody did."""
    stage: StageNow | None = None
    """The stage that runs in the pod."""
    other_stages: tuple[StageNow, ...] = ()
    """What other Ray jobs do in it at the same time."""
    stage_quality: StageQuality = NO_STAGES

    @classmethod
    def of(cls, report: Report, received_at: float) -> "Telemetry":
        """Keep the gauges of a report. What was counted by stage would be most of it, and is the ledger's."""
        return cls(
            start_id=report.start_id,
            received_at=received_at,
            source=report.source,
            ownership=report.ownership,
            unavailable=report.unavailable,
            message=report.message,
            gpus=tuple(replace(gpu, stages=[]) if gpu.stages else gpu for gpu in report.gpus),
            gpus_visible=report.gpus_visible,
            final=report.final,
            host_memory=_who_told_memory(report),
            stage=report.stage,
            other_stages=tuple(report.other_stages),
            stage_quality=report.stage_quality,
        )


def _who_told_memory(report: Report) -> str | None:
    host = report.host
    if host is None or host.memory_used_bytes is None:
        return None
    return host.source if host.source in HOST_SOURCES else UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long silence means nothing yet."""

    fresh_seconds: float
    """Age up to which the gauges of a report are the present."""
    silence_seconds: float
    """Age from which a pod counts as not reporting."""


class Seen(StrEnum):
    """How well a pod is seen."""

    MONITORED = "monitored"
    WAITING = "waiting"
    """It has not had the time to report yet."""
    UNMONITORED = "unmonitored"
    DONE = "done"
    """It ended, or is being ended; nothing more is expected of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How well a pod is seen, and why not better."""

    seen: Seen
    reason: str | None = None
    """CamelCase, with UNMONITORED alone."""
    message: str | None = None
    """What is waited for or missing, in a sentence; None where there is nothing to say."""


MONITORED: Final = Verdict(seen=Seen.MONITORED)
WAITING: Final = Verdict(seen=Seen.WAITING)
AWAITING_CONTAINER: Final = Verdict(
    seen=Seen.WAITING, message="The job's own container has not started, so that nobody can say which GPUs are its."
)
AWAITING_RAY: Final = Verdict(
    seen=Seen.WAITING, message="Ray has not started yet, which says which GPUs are the pod's, or shows them itself."
)
DONE: Final = Verdict(seen=Seen.DONE)

NOT_INJECTED_MESSAGE: Final = (
    "The pod has no sidecar: the webhook did not answer when it was created. It runs as it would without GPUMonitor; "
    "only a new pod can be monitored."
)
OPTED_OUT: Final = "OptedOut"
RAY_SECONDS: Final = 180.0
"""So long after its container's start Ray may take to name a pod's GPUs: verl's images need up to a minute until Ray's
agent and the head's dashboard answer, and a slow disk some more."""
RAY_PENDING_SECONDS: Final = 600.0
"""The same while the job does not run: a container that installs packages first starts its Ray late."""
BY_RAY: Final = (
    UnavailableReason.OWNERSHIP_UNKNOWN,
    UnavailableReason.NO_LIBRARY,
    UnavailableReason.NO_DEVICE_ACCESS,
    UnavailableReason.DRIVER_NOT_LOADED,
)
"""What Ray ends once it answers: it names a pod's GPUs, and shows them where the sidecar has no driver."""
WITHOUT_DRIVER: Final = (UnavailableReason.NO_LIBRARY, UnavailableReason.NO_DEVICE_ACCESS)
"""What the sidecar says where no GPU runtime has given it the driver, as with our operator image it never does."""
STANDS_IN: Final = {
    StandIn.OPERATOR: (
        "The sidecar's container could not be started or kept ending with its own image, so that it was given our "
        "operator image, to let the job run. That one gets no driver from the node's runtime, and GPUs are then seen "
        "through Ray alone."
    ),
    StandIn.MAIN: (
        "The sidecar's image could not be pulled, or its container could not be started or kept ending, so that it was "
        "given the pod's own image and sleeps, to let the job run. Nothing is measured in this pod."
    ),
}
LOOK_AT_THE_EVENT: Final = "The job's Event SidecarRescued says what failed. A new pod is tried with the sidecar's own."


def judge(
    pod: PodRecord,
    telemetry: Telemetry | None,
    *,
    now: float,
    listening_since: float,
    patience: Patience,
    images: Images,
    not_asked: str | None = None,
    pending: bool = False,
) -> Verdict:
    """Say how well a pod is seen. `images`: ours, by which a rescued pod is known. `pending`: its job does not run yet.

    `now` and `listening_since` are Unix seconds; the latter is when this controller began to take reports, because
    silence before that is its own. `not_asked`: why pods of the namespace get no sidecar, whatever the webhook does.
    """
    heard = telemetry is not None and now - telemetry.received_at <= patience.silence_seconds
    if pod.deleting and pod.live and heard and telemetry is not None and telemetry.unavailable is None:
        # Its last report counts, and is for a short job the only one; what is missing by now is no news.
        return MONITORED
    if not pod.live or pod.deleting:
        return DONE
    if pod.injected is None:
        return not_injected(pod.skip_reason, not_asked=not_asked)
    if heard and telemetry is not None:
        return _of_report(pod, telemetry, images, now=now, pending=pending)
    if stand_in_of(pod, images) is StandIn.MAIN and cause_of(pod) is None and _started(pod):
        return _rescued(StandIn.MAIN)
    return _silent(pod, telemetry, silent_for=_silence(pod, telemetry, now, listening_since), patience=patience)


def not_injected(skip_reason: str | None, *, not_asked: str | None = None) -> Verdict:
    """Verdict on a pod without sidecar. `skip_reason`: the webhook's annotation, `Reason: sentence`."""
    if not skip_reason and not_asked is not None:
        return Verdict(seen=Seen.UNMONITORED, reason=OPTED_OUT, message=not_asked)
    if not skip_reason:
        return Verdict(seen=Seen.UNMONITORED, reason=UnavailableReason.NOT_INJECTED.value, message=NOT_INJECTED_MESSAGE)
    reason, _, sentence = skip_reason.partition(":")
    if not (reason.isalnum() and reason.isascii() and sentence.strip()):
        return Verdict(seen=Seen.UNMONITORED, reason=UnavailableReason.NOT_INJECTED.value, message=skip_reason[:1024])
    return Verdict(seen=Seen.UNMONITORED, reason=reason[:128], message=sentence.strip()[:1024])


def _rescued(stand_in: StandIn) -> Verdict:
    return Verdict(seen=Seen.UNMONITORED, reason=RESCUED, message=f"{STANDS_IN[stand_in]} {LOOK_AT_THE_EVENT}")


def _of_report(pod: PodRecord, telemetry: Telemetry, images: Images, *, now: float, pending: bool) -> Verdict:
    if telemetry.unavailable is None or pod.gpus_requested == 0:
        return MONITORED
    if telemetry.unavailable in WITHOUT_DRIVER and stand_in_of(pod, images) is StandIn.OPERATOR:
        return _rescued(StandIn.OPERATOR)
    awaited = _awaited(pod, telemetry.unavailable, now=now, pending=pending)
    if awaited is not None:
        return awaited
    message = telemetry.message or f"The sidecar says {telemetry.unavailable.value}."
    return Verdict(seen=Seen.UNMONITORED, reason=telemetry.unavailable.value, message=message)


def _awaited(pod: PodRecord, unavailable: UnavailableReason, *, now: float, pending: bool) -> Verdict | None:
    """Return what a pod waits for that would end what is missing; None where it is time to say that it is missing.

    The sidecar starts before the job's own container, whose image may take minutes to be pulled.
    """
    ray = RAY_CLUSTER in pod.labels
    if unavailable not in BY_RAY or not (ray or unavailable is UnavailableReason.OWNERSHIP_UNKNOWN):
        return None
    main = pod.main
    if main is not None and main.phase is ContainerPhase.WAITING:
        return AWAITING_CONTAINER
    started = main.started_at if main is not None else None
    patience = RAY_PENDING_SECONDS if pending else RAY_SECONDS
    return AWAITING_RAY if ray and started is not None and now - started <= patience else None


def _started(pod: PodRecord) -> bool:
    return pod.sidecar is not None and pod.sidecar.phase is not ContainerPhase.WAITING


def _silence(pod: PodRecord, telemetry: Telemetry | None, now: float, listening_since: float) -> float | None:
    """Seconds without report since one could have come; None while the sidecar has not started at all."""
    if telemetry is not None:
        return now - max(telemetry.received_at, listening_since)
    if pod.sidecar is None or not _started(pod):
        return None
    started = pod.sidecar.started_at
    return now - max(started if started is not None else listening_since, listening_since)


def _silent(pod: PodRecord, telemetry: Telemetry | None, *, silent_for: float | None, patience: Patience) -> Verdict:
    sidecar = pod.sidecar
    if sidecar is not None and cause_of(pod) is not None:
        detail = f": {sidecar.message}" if sidecar.message else ""
        return Verdict(seen=Seen.UNMONITORED, reason=sidecar.reason, message=f"The sidecar cannot start{detail}"[:1024])
    if silent_for is None or silent_for <= patience.silence_seconds:
        return WAITING
    return Verdict(
        seen=Seen.UNMONITORED,
        reason=UnavailableReason.NOT_REPORTING.value,
        message=_why_silent(pod, telemetry),
    )


def _why_silent(pod: PodRecord, telemetry: Telemetry | None) -> str:
    if pod.sidecar is not None and pod.sidecar.phase is ContainerPhase.TERMINATED:
        return f"The sidecar ended with exit code {pod.sidecar.exit_code} and has not come back."
    # No number of minutes: a text that changes by itself would make each status new.
    last = "its last report" if telemetry is not None else "the sidecar's start"
    return (
        f"No report has arrived since {last}. Look whether a NetworkPolicy keeps the pod from the controller's port "
        f"8443, and at the log of container gpumonitor."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSummary:
    """A pod's part in the workload's telemetry."""

    name: str
    gpus_requested: int
    gpus_reported: int
    """GPUs of its own with a fresh value."""
    faulty: tuple[GpuReport, ...]
    """GPUs of its own that are lost, hang or fail."""
    verdict: Verdict
    starting: bool = False
    """Its sidecar is so young that what is missing may come yet."""

    @property
    def broken(self) -> int:
        """GPUs of its own of which it is known that they are broken."""
        return sum(1 for gpu in self.faulty if is_hardware(gpu))


def is_hardware(gpu: GpuReport) -> bool:
    """Whether what a GPU answers means that it is broken, and not merely that it cannot be read."""
    if gpu.state in (GpuState.LOST, GpuState.NOT_RESPONDING):
        return True
    return gpu.state is GpuState.ERROR and gpu.error in LOST


START_SECONDS: Final = 30.0
"""A sidecar needs so long to learn which GPUs are its own: Ray's agent, which names them, starts after it."""


def is_starting(pod: PodRecord, now: float) -> bool:
    """Whether a pod's sidecar has started a moment ago."""
    started = pod.sidecar.started_at if pod.sidecar is not None else None
    return started is not None and now - started < START_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """Condition TelemetryAvailable."""

    status: str
    """`True`, `False` or `Unknown`."""
    reason: str
    message: str
    broken_alone: bool = False
    """All that is missing are GPUs that are broken."""

    @property
    def partial(self) -> bool:
        """Something is seen, and something is not that could be: a broken GPU is another finding."""
        return self.reason == PARTIAL and not self.broken_alone


ALL_SEEN: Final = "AllReporting"
PARTIAL: Final = "Partial"
NOTHING_YET: Final = "NoReportYet"


def availability(pods: Sequence[PodSummary]) -> Availability:
    """Judge the whole workload by its pods that ask for GPUs. Pods that are done do not count."""
    counted = [pod for pod in pods if pod.gpus_requested > 0 and pod.verdict.seen is not Seen.DONE]
    bad = [pod for pod in counted if pod.verdict.seen is Seen.UNMONITORED]
    good = [pod for pod in counted if pod.verdict.seen is Seen.MONITORED]
    faulty = [(pod, gpu) for pod in good for gpu in pod.faulty]
    if not good and not bad:
        said = (pod.verdict.message for pod in counted if pod.verdict.message)
        message = next(said, "No pod with GPUs has reported yet.")
        return Availability(status="Unknown", reason=NOTHING_YET, message=message)
    if not good:
        reason, message = _common_cause(bad)
        return Availability(status="False", reason=reason, message=message)
    # While others are seen, a pod that has just started is waited for.
    bad = [pod for pod in bad if not pod.starting]
    missing = [pod for pod in good if pod.gpus_reported < pod.gpus_requested and (pod.faulty or not pod.starting)]
    if bad or faulty or missing:
        message = _what_is_missing(counted, bad, faulty, missing)
        rest = [pod for pod in missing if pod.gpus_reported + pod.broken < pod.gpus_requested]
        broken = bool(faulty) and not bad and not rest and all(is_hardware(gpu) for _, gpu in faulty)
        return Availability(status="True", reason=PARTIAL, message=message, broken_alone=broken)
    gpus = sum(pod.gpus_reported for pod in good)
    message = f"{figures.counted(gpus, 'GPU')} reported by {figures.counted(len(good), 'pod')}."
    return Availability(status="True", reason=ALL_SEEN, message=message)


def _common_cause(bad: Sequence[PodSummary]) -> tuple[str, str]:
    """Reason that most pods share (of equal ones the first), and its sentence."""
    reasons = Counter(pod.verdict.reason or "" for pod in bad)
    reason, number = reasons.most_common(1)[0]
    example = next(pod for pod in bad if pod.verdict.reason == reason)
    return reason, f"{number} of {len(bad)} pods, such as {example.name}: {example.verdict.message}"[:1024]


def _what_is_missing(
    counted: Sequence[PodSummary],
    bad: Sequence[PodSummary],
    faulty: Sequence[tuple[PodSummary, GpuReport]],
    missing: Sequence[PodSummary],
) -> str:
    parts = []
    if bad:
        reason, message = _common_cause(bad)
        parts.append(f"{len(bad)} of {len(counted)} pods are not monitored ({reason}): {message}")
    parts += [_fault(pod, gpu) for pod, gpu in faulty[:4]]
    silent = [pod for pod in missing if not pod.faulty]
    if silent:
        pod = silent[0]
        parts.append(
            f"Fewer GPUs than requested are reported by {figures.counted(len(silent), 'pod')}, such as {pod.name}: "
            f"{pod.gpus_reported} of {pod.gpus_requested}."
        )
    return " ".join(parts)[:1024]


_FAULTS: Final = {
    GpuState.LOST: "is lost",
    GpuState.NOT_RESPONDING: "does not answer",
    GpuState.ERROR: "answers with an error",
}


def _fault(pod: PodSummary, gpu: GpuReport) -> str:
    error = f" ({gpu.error})" if gpu.error else ""
    return f"GPU {gpu.uuid} of pod {pod.name} {_FAULTS.get(gpu.state, 'is not well')}{error}."
