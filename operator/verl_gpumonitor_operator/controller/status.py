# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From what is known of a workload to `GPUMonitor.status`, and when a new one is worth a write. Pure.

A status is a summary: its lists are bounded, its texts are cut, and what is not known has no key. The bounds are those
of the CRD, of which a test holds this module to be within.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import nsmallest
from typing import Any, Final, NamedTuple

from verl_gpumonitor.diagnosis.health import rank_of
from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.findings import Advice, Scope
from verl_gpumonitor.model.report import GpuReport
from verl_gpumonitor.model.vocabulary import GpuState, Phase, Severity

from . import stages
from .jobs import JobSeen, timestamp
from .stages import NOTHING_SEEN, StageView
from .telemetry import PodSummary, Seen, Telemetry
from .totals import Peak as MemoryPeak
from .totals import Totals, higher
from .xids import NO_XIDS, XidSeen

MAX_WORST: Final = 16
MAX_UNMONITORED: Final = 16
MAX_FINDINGS: Final = 16
EVERYTHING: Final = Scope()
"""Of a finding that names nobody."""
MAX_NAMED: Final = 4
"""Pods and GPUs that one finding names in a status."""
MAX_RECOMMENDATIONS: Final = 8
REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
NO_WORD: Final = "Other"
"""Reason of a condition whose own is no word."""
UTILIZATION_STEP: Final = 0.05
MEMORY_STEP: Final = 0.02

Status = dict[str, Any]


class GpuView(NamedTuple):
    """One of the job's GPUs at this moment. A named tuple, since a large job has a thousand of them at each look."""

    pod: str
    node: str | None
    pool: str
    report: GpuReport
    utilization: float | None
    """Mean over the last minute; None while that cannot be said."""
    peak: MemoryPeak | None
    """Highest memory in use in the last minute, or the present one where the source knows no peaks."""
    reported: bool
    """It is well, and at least one value of it is fresh."""
    xids: Mapping[int, XidSeen] = NO_XIDS
    """By code."""

    @classmethod
    def of(
        cls,
        report: GpuReport,
        *,
        pod: str,
        node: str | None,
        pool: str,
        utilization: float | None,
        xids: Mapping[int, XidSeen] = NO_XIDS,
    ) -> "GpuView":
        """View a GPU as its pod reported it."""
        used, total = report.memory_recent_peak_bytes, report.memory_total_bytes
        if used is None:
            used = report.memory_used_bytes
        fresh = report.utilization is not None or report.memory_used_bytes is not None
        return cls(
            pod=pod,
            node=node,
            pool=pool,
            report=report,
            utilization=utilization,
            peak=MemoryPeak(used, total) if used is not None and total else None,
            reported=fresh and report.state is GpuState.OK,
            xids=xids,
        )

    @property
    def load(self) -> float | None:
        """Load over the last minute, or the newest sample's while there is no such time yet."""
        return self.utilization if self.utilization is not None else self.report.utilization


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One condition as it is judged now."""

    type: str
    status: str
    """`True`, `False` or `Unknown`."""
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFinding:
    """A problem that is open."""

    reason: str
    severity: Severity
    message: str
    since: float | None = None
    """Unix seconds."""
    scope: Scope = EVERYTHING
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """All that a status is made of."""

    job: JobSeen
    phase: Phase
    ended: bool
    completed_at: float | None
    gone_at: float | None
    """When its object was seen to be deleted."""
    gpus_requested: int
    most_reported: int
    """Most GPUs that were seen well at one time; what an ended job shows, whose pods end one after the other."""
    gpus: Sequence[GpuView]
    pods: Sequence[PodSummary]
    telemetry: Sequence[Telemetry]
    """Newest reports of the pods that asked for GPUs and are seen."""
    totals: Totals
    conditions: Sequence[Condition]
    health: str
    gpu_notes: Mapping[str, str]
    """By UUID: why a GPU needs a look."""
    generation: int | None
    host_memory: Collection[str] = ()
    """Who tells the host memory of its pods."""
    message: str | None = None
    """What is missing, in a sentence."""
    stages: StageView = NOTHING_SEEN
    findings: Sequence[OpenFinding] = ()
    """Problems that are open."""
    diagnosis: Mapping[str, Any] | None = None
    """How much of the workload the diagnosis follows; None while it has not begun."""
    launch: Mapping[str, Any] | None = None
    """`status.launch`; None where nobody says how the job was started."""


def render(picture: Picture, *, before: Mapping[str, Any], now: float) -> Status:
    """Return the status, but for the ledger.

    `before`: the last one, of which times of transitions and the run before are kept.
    """
    job = picture.job
    kept = before if keeps_what_was_seen(picture, before) else None
    notes = _notes(picture, before)
    table = _stages(picture, before)
    status: Status = {
        "observedGeneration": picture.generation,
        "phase": picture.phase.value,
        # Nothing runs any more in a job that has ended.
        "stage": None if picture.ended or picture.stages.stage is None else picture.stages.stage[:64],
        "role": None if picture.ended or picture.stages.role is None else picture.stages.role[:64],
        "step": _step(picture, before),
        "secondsPerStep": _seconds_per_step(picture, before),
        "health": picture.health[:128],
        "workload": {
            "uid": job.uid,
            "startTime": timestamp(job.started_at if job.started_at is not None else job.created_at),
            "completionTime": timestamp(picture.completed_at),
            "deletionTime": timestamp(picture.gone_at),
            "message": job.message[:1024] if job.message else None,
            "rayCluster": job.ray_cluster[:253] if job.ray_cluster else None,
        },
        "launch": picture.launch if picture.launch is not None else before.get("launch"),
        "gpus": _gpus(picture, before),
        "utilization": _utilization(picture),
        "memory": _memory(picture),
        "dataQuality": {**(kept.get("dataQuality", {}) if kept else _quality(picture)), **_losses(picture.totals)},
        "totals": _totals(picture.totals),
        "pools": [] if picture.ended else [stages.pool(item) for item in picture.stages.pools],
        "stageTable": stages.table(table),
        "stages": table,
        "worstGpus": kept.get("worstGpus") if kept else [_worst(gpu, notes) for gpu in worst(picture.gpus, notes)],
        "unmonitoredPods": kept.get("unmonitoredPods") if kept else _unmonitored(picture),
        "findings": before.get("findings") if picture.ended else findings(picture.findings),
        "recommendations": before.get("recommendations") if picture.ended else recommendations(picture.findings),
        "conditions": merged(before.get("conditions"), picture.conditions, picture.generation, now),
        "previousRun": before.get("previousRun"),
    }
    return {key: known for key, value in status.items() if (known := _known(value)) not in (None, {}, [])}


def _stages(picture: Picture, before: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the table's numbers. Seconds of a step are known of the newest steps alone, and stay after a restart."""
    if picture.ended and not picture.stages.rows:
        return list(before.get("stages") or ())
    known = {
        (item.get("stage"), item.get("role")): item.get("secondsPerStep")
        for item in before.get("stages") or ()
        if isinstance(item, Mapping)
    }
    found = [stages.numbers(row) for row in picture.stages.rows]
    return [
        item
        if item["secondsPerStep"] is not None
        else {**item, "secondsPerStep": known.get((item["stage"], item["role"]))}
        for item in found
    ]


def _step(picture: Picture, before: Mapping[str, Any]) -> int | None:
    step, last = picture.stages.step, before.get("step")
    return step if step is not None or not picture.ended else last


def _seconds_per_step(picture: Picture, before: Mapping[str, Any]) -> float | None:
    seconds = picture.stages.seconds_per_step
    return round(seconds, 2) if seconds is not None else before.get("secondsPerStep")


def keeps_what_was_seen(picture: Picture, before: Mapping[str, Any]) -> bool:
    """Whether an ended job's pods and GPUs stay as they were seen last: by now fewer of them are there than then."""
    return picture.ended and (_reported(picture) == 0 or _reported(picture) < _known_gpus(before, "reported"))


def _reported(picture: Picture) -> int:
    return sum(1 for gpu in picture.gpus if gpu.reported)


def _known_gpus(before: Mapping[str, Any], key: str) -> int:
    gpus = before.get("gpus")
    known = gpus.get(key) if isinstance(gpus, Mapping) else None
    return known if isinstance(known, int) else 0


def _gpus(picture: Picture, before: Mapping[str, Any]) -> Mapping[str, Any]:
    reported, requested = _reported(picture), picture.gpus_requested
    if picture.ended:
        reported = max(picture.most_reported, _known_gpus(before, "reported"))
        # It may have held more, before it was scaled down.
        requested = max(requested, reported, _known_gpus(before, "requested"))
    return {"requested": requested, "reported": reported, "text": f"{reported}/{requested}"}


def mean_utilization(picture: Picture) -> float | None:
    """Mean load of the reported GPUs; at the end, that of the whole life."""
    if picture.ended:
        return picture.totals.utilization
    loads = [gpu.load for gpu in picture.gpus if gpu.reported and gpu.load is not None]
    return sum(loads) / len(loads) if loads else None


def _utilization(picture: Picture) -> Mapping[str, Any] | None:
    mean = mean_utilization(picture)
    return None if mean is None else {"mean": round(mean, 4), "text": percent(mean)}


def _memory(picture: Picture) -> Mapping[str, Any] | None:
    peak = picture.totals.peak if picture.ended else None
    if not picture.ended:
        for gpu in picture.gpus:
            peak = higher(peak, gpu.peak if gpu.reported else None)
    if peak is None:
        return None
    return {
        "peakRatio": round(peak.ratio, 4),
        "peakBytes": peak.used_bytes,
        "totalBytes": peak.total_bytes,
        "text": percent(peak.ratio),
    }


WEAKEST_FIRST: Final = ("none", "ray-agent", "nvml")
BY_RAYS_AGENT: Final = (
    "Pods are read through Ray's own agent, each 5 s, because their sidecars cannot read NVML:"
    " load, memory, power and temperature are known, short peaks and errors are not."
)


def _quality(picture: Picture) -> Mapping[str, Any]:
    counted = [pod for pod in picture.pods if pod.gpus_requested > 0 and pod.verdict.seen is not Seen.DONE]
    sources = {item.source.value for item in picture.telemetry}
    ownerships = sorted({item.ownership.value for item in picture.telemetry})
    source = next((word for word in WEAKEST_FIRST if word in sources), None)
    message = picture.message or (BY_RAYS_AGENT if source == "ray-agent" else None)
    said = picture.stages.quality
    return {
        "stages": stages.quality(said) if said is not None else None,
        "diagnosis": picture.diagnosis,
        "source": source,
        "ownership": ", ".join(ownerships)[:64] or None,
        "hostMemory": ", ".join(sorted(picture.host_memory))[:64] or None,
        "podsMonitored": sum(1 for pod in counted if pod.verdict.seen is Seen.MONITORED),
        "podsUnmonitored": sum(1 for pod in picture.pods if pod.verdict.seen is Seen.UNMONITORED),
        "message": message[:1024] if message else None,
    }


def findings(found: Sequence[OpenFinding]) -> list[Status]:
    """Return `status.findings`, the highest first."""
    ordered = sorted(found, key=lambda one: (rank_of(one.reason), one.since or 0.0))
    return [
        {
            "reason": one.reason[:64],
            "severity": one.severity.value,
            "since": timestamp(one.since),
            "stage": one.scope.stage[:64] if one.scope.stage else None,
            "role": one.scope.role[:64] if one.scope.role else None,
            "pods": [pod[:253] for pod in one.scope.pods[:MAX_NAMED]],
            "gpus": [uuid[:96] for uuid in one.scope.gpus[:MAX_NAMED]],
            "message": one.message[:1024],
        }
        for one in ordered[:MAX_FINDINGS]
    ]


def recommendations(found: Sequence[OpenFinding]) -> list[Status]:
    """Return `status.recommendations`: the first advice of each finding, then the second; each setting once."""
    ordered = sorted(found, key=lambda one: (rank_of(one.reason), one.since or 0.0))
    ranked = sorted(
        ((place, number, one, advice) for number, one in enumerate(ordered) for place, advice in enumerate(one.advice)),
        key=lambda item: item[:2],
    )
    shown: dict[str, Status] = {}
    for _, _, one, advice in ranked:
        key = advice.parameter or advice.text
        if key not in shown and len(shown) < MAX_RECOMMENDATIONS:
            shown[key] = {
                "reason": one.reason[:64],
                "parameter": advice.parameter[:256] if advice.parameter else None,
                "current": advice.current[:256] if advice.current else None,
                "suggested": advice.suggested[:256] if advice.suggested else None,
                "text": advice.text[:1024],
                "evidence": (advice.reason or one.message)[:512],
                "price": advice.price[:512] or None,
                "confidence": advice.confidence[:32],
            }
    return list(shown.values())


def _losses(totals: Totals) -> Mapping[str, Any]:
    return {"gapsSeconds": round(totals.gaps_seconds, 1), "lostStarts": totals.lost_starts}


def _totals(totals: Totals) -> Mapping[str, Any] | None:
    if totals.gpu_seconds <= 0 and totals.energy_joules is None:
        return None
    return {
        "gpuSeconds": round(totals.gpu_seconds, 1),
        "busySeconds": round(totals.busy_seconds, 1),
        "energyJoules": None if totals.energy_joules is None else round(totals.energy_joules, 1),
    }


def _notes(picture: Picture, before: Mapping[str, Any]) -> Mapping[str, str]:
    """Return why GPUs need a look. Nothing is judged at the end: what was open then stays, as its findings do."""
    if not picture.ended:
        return picture.gpu_notes
    known = {
        str(item.get("uuid")): str(item["note"])
        for item in before.get("worstGpus") or ()
        if isinstance(item, Mapping) and item.get("note")
    }
    return {**known, **picture.gpu_notes}


def worst(gpus: Sequence[GpuView], notes: Mapping[str, str]) -> list[GpuView]:
    """GPUs that need a look first: faulty ones, those of open findings, then those nearest to their memory's limit."""

    def rank(gpu: GpuView) -> tuple[bool, bool, float, str]:
        peak = gpu.peak
        noted = gpu.report.uuid in notes
        return (gpu.report.state is GpuState.OK, not noted, -(peak.ratio if peak else 0.0), gpu.report.uuid)

    return nsmallest(MAX_WORST, gpus, key=rank)


def _worst(gpu: GpuView, notes: Mapping[str, str]) -> Mapping[str, Any]:
    report, peak = gpu.report, gpu.peak
    note = notes.get(report.uuid) or report.error
    return {
        "pod": gpu.pod[:253],
        "node": gpu.node,
        "uuid": report.uuid,
        "index": report.index,
        "model": report.model,
        "state": report.state.value,
        "utilization": None if gpu.load is None else round(gpu.load, 4),
        "memoryUsedBytes": report.memory_used_bytes,
        "memoryPeakBytes": peak.used_bytes if peak else None,
        "memoryTotalBytes": report.memory_total_bytes,
        "temperatureCelsius": report.temperature_celsius,
        "powerWatts": report.power_watts,
        "note": note[:512] if note else None,
    }


def _unmonitored(picture: Picture) -> list[Mapping[str, Any]]:
    pods = [pod for pod in picture.pods if pod.verdict.seen is Seen.UNMONITORED]
    return [
        {
            "name": pod.name[:253],
            "reason": (pod.verdict.reason or "Unknown")[:128],
            "message": (pod.verdict.message or "")[:1024] or None,
        }
        for pod in sorted(pods, key=lambda pod: pod.name)[:MAX_UNMONITORED]
    ]


def merged(before: object, conditions: Sequence[Condition], generation: int | None, now: float) -> list[Status]:
    """Return conditions with the time of their last change of status; types that are not judged now stay."""
    old = {
        item["type"]: item
        for item in (before if isinstance(before, list) else [])
        if isinstance(item, Mapping) and isinstance(item.get("type"), str)
    }
    new: dict[str, Status] = {}
    for condition in conditions:
        previous = old.get(condition.type, {})
        same = previous.get("status") == condition.status and previous.get("lastTransitionTime")
        new[condition.type] = {
            "type": condition.type,
            "status": condition.status,
            "reason": word(condition.reason),
            "message": condition.message[:4096],
            "lastTransitionTime": previous["lastTransitionTime"] if same else timestamp(now),
            "observedGeneration": generation,
        }
    kept = [dict(item) for name, item in old.items() if name not in new]
    return sorted([*kept, *new.values()], key=lambda item: str(item["type"]))[:32]


def word(reason: str) -> str:
    """Return a reason in the form that Kubernetes demands of a condition's.

    It may come from a pod's annotation or from the kubelet. One that is none would have the whole status refused.
    """
    return reason[:128] if REASON.fullmatch(reason[:128]) else NO_WORD


def previous_run(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Summarise the status of a run that is over; None if it says of no run."""
    workload = status.get("workload")
    if not isinstance(workload, Mapping) or not workload.get("uid"):
        return None
    totals, memory = status.get("totals"), status.get("memory")
    utilization = status.get("utilization")
    mean = utilization.get("mean") if isinstance(utilization, Mapping) else None
    if isinstance(totals, Mapping) and totals.get("gpuSeconds"):
        mean = round(min(1.0, float(totals.get("busySeconds", 0.0)) / float(totals["gpuSeconds"])), 4)
    summary = {
        "uid": workload.get("uid"),
        "phase": status.get("phase"),
        "startTime": workload.get("startTime"),
        "completionTime": workload.get("completionTime"),
        "utilization": mean,
        "memoryPeakRatio": memory.get("peakRatio") if isinstance(memory, Mapping) else None,
        "health": status.get("health"),
    }
    return {key: value for key, value in summary.items() if value is not None}


def _known(value: Any) -> Any:
    """Leave out what is None or an empty object, at all depths; empty lists too, since absence says the same."""
    # Types, not ABCs: a status has a thousand values, and looking them up costs as much as making the whole of it.
    if type(value) is dict:
        known = {key: _known(item) for key, item in value.items()}
        return {key: item for key, item in known.items() if item is not None and item != {} and item != []}
    if type(value) is list:
        return [_known(item) for item in value]
    return value


class Urgency(IntEnum):
    """How much a new status matters beside the one that was written."""

    NONE = 0
    """Nothing differs."""
    DRIFT = 1
    """Numbers moved a little."""
    PROGRESS = 2
    """Another stage or step. That is news, too, but comes often, and keeps nothing else back."""
    CHANGE = 3
    """A person would see a difference."""
    PHASE = 4
    """The job began or ended: news that is not to wait at all."""


def urgency(before: Mapping[str, Any], after: Mapping[str, Any]) -> Urgency:
    """Compare the status that was written with the new one, without the ledger, which follows the totals."""
    before = {key: value for key, value in before.items() if key != "ledger"}
    if before == after:
        return Urgency.NONE
    if before.get("phase") != after.get("phase"):
        return Urgency.PHASE
    if _fixed(before) != _fixed(after):
        return Urgency.CHANGE
    if _moved(before, after, ("utilization", "mean"), UTILIZATION_STEP):
        return Urgency.CHANGE
    if _moved(before, after, ("memory", "peakRatio"), MEMORY_STEP):
        return Urgency.CHANGE
    if any(before.get(key) != after.get(key) for key in PROGRESSING):
        return Urgency.PROGRESS
    return Urgency.DRIFT


PROGRESSING: Final = ("stage", "role", "step", "pools")
DRIFTING: Final = ("utilization", "memory", "totals", "worstGpus", "secondsPerStep", "stages", "stageTable")


def _fixed(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Part of a status that does not drift."""
    fixed = {key: value for key, value in status.items() if key not in (*DRIFTING, *PROGRESSING)}
    quality = fixed.get("dataQuality")
    if isinstance(quality, Mapping):
        fixed["dataQuality"] = {
            key: value for key, value in quality.items() if key not in ("gapsSeconds", "message", "stages", "diagnosis")
        }
        said = quality.get("stages")
        fixed["stageSource"] = (said.get("source"), said.get("reason")) if isinstance(said, Mapping) else None
    # Texts of the kubelet change by themselves, such as the time that it backs off.
    fixed["unmonitoredPods"] = [
        (item.get("name"), item.get("reason"))
        for item in status.get("unmonitoredPods") or ()
        if isinstance(item, Mapping)
    ]
    fixed["conditions"] = [
        {key: item.get(key) for key in ("type", "status", "reason")}
        for item in status.get("conditions") or ()
        if isinstance(item, Mapping)
    ]
    # Numbers in their words move with each look.
    fixed["findings"] = _pick(status, "findings", ("reason", "severity", "stage", "since"))
    fixed["recommendations"] = _pick(status, "recommendations", ("reason", "parameter", "suggested"))
    worst_gpus = [item for item in status.get("worstGpus") or () if isinstance(item, Mapping)]
    fixed["faulty"] = sorted(str(item.get("uuid")) for item in worst_gpus if item.get("state") != "ok")
    return fixed


def _pick(status: Mapping[str, Any], key: str, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return some fields of each item of a list."""
    return [tuple(item.get(name) for name in names) for item in status.get(key) or () if isinstance(item, Mapping)]


def _moved(before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, str], step: float) -> bool:
    one, other = (_number(status, path) for status in (before, after))
    if one is None or other is None:
        return one is not other
    return abs(one - other) >= step


def _number(status: Mapping[str, Any], path: tuple[str, str]) -> float | None:
    section = status.get(path[0])
    value = section.get(path[1]) if isinstance(section, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Status:
    """Return the merge patch (RFC 7386) from one object to another: null removes a key, lists are replaced whole."""
    patch: Status = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            inner = merge_patch(old, value)
            if inner:
                patch[key] = inner
        elif key not in before or old != value:
            patch[key] = value
    return patch
