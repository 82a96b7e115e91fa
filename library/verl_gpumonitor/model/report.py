# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a sidecar tells the controller, and what it hears back. The wire format is JSON.

Counters are cumulative since the start of the sidecar, so a lost report loses nothing. A report's key is
(pod uid, start id, sequence): a new start id begins new counters, a sequence that does not rise is a replay.
Whatever could not be read is None and leaves no key in the JSON; it is never zero or the last good value.
Bounds are part of the types: a report that breaks one is refused as a whole. Unknown fields are skipped, so that the
format can grow.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from .stages import StageSource
from .vocabulary import GpuState, Ownership, Source, UnavailableReason

REPORT_FORMAT: Final = "gpumonitor-report/1"
"""Value of `Report.format`; a controller refuses any other with a message that names both."""

MAX_REPORT_BYTES: Final = 512 * 1024
"""A report of 64 GPUs in ten stages takes about 150 KB; whatever is larger than this is refused unread."""

MAX_GPUS: Final = 64
MAX_BYTES: Final = 2**50
MAX_STAGES: Final = 32
"""Pairs of stage and role that one GPU is counted by; what comes past them counts as `other`."""
MAX_PROCESSES: Final = 16
"""Processes of one GPU that are named, the largest; the others are counted."""
MAX_NODE_INTERVALS: Final = 256
MAX_ENTRYPOINT: Final = 16_384
MAX_RAY_NAMES: Final = 64

Name = Annotated[str, Meta(max_length=256)]
Uuid = Annotated[str, Meta(min_length=1, max_length=96)]
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e10)]
Joules = Annotated[float, Meta(ge=0.0, le=1e15)]
Watts = Annotated[float, Meta(ge=0.0, le=5000.0)]
Celsius = Annotated[float, Meta(ge=-50.0, le=250.0)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Word = Annotated[str, Meta(min_length=1, max_length=64)]
Step = Annotated[int, Meta(ge=0, le=2**53)]
UnixSeconds = Annotated[float, Meta(ge=0.0, le=1e11)]


class StageCount(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What has added up for one GPU in one stage since the sidecar's start. An array on the wire, by place."""

    stage: Word
    role: Word
    observed_seconds: Seconds
    """Time covered by utilisation samples. The sum over all stages is the GPU's `observed_seconds` but for what
    still waits for its stage."""
    busy_seconds: Seconds
    energy_joules: Joules | None = None
    memory_peak_bytes: Bytes | None = None
    memory_floor_bytes: Bytes | None = None
    """Lowest memory in use that was seen in it."""
    job: Annotated[str, Meta(max_length=128)] = ""
    """Ray's submission id, where several jobs may share the pod and the source tells them apart."""


class StageNow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stage that runs now in the pod, or in most of it. Absent when it is not known within 5 s."""

    stage: Word
    role: Word
    since: UnixSeconds | None = None
    step: Step | None = None
    """Number of the training step that runs, or of the last one that ended."""
    job: Annotated[str, Meta(max_length=128)] = ""


class StepGpu(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One GPU in one stage of one step. An array on the wire, by place."""

    gpu: Annotated[int, Meta(ge=0, le=MAX_GPUS)]
    """Place in `Report.gpus`."""
    observed_seconds: Seconds
    busy_seconds: Seconds
    energy_joules: Joules | None = None
    memory_peak_bytes: Bytes | None = None
    memory_floor_bytes: Bytes | None = None
    throttled_seconds: Seconds | None = None
    """Of the observed time, in which heat or a power brake held the clocks down; None: not known."""


class StepEngine(msgspec.Struct, frozen=True, array_like=True):
    """What the rollout engine's own processes held on one GPU in one stage of a step. An array on the wire."""

    gpu: Annotated[int, Meta(ge=0, le=MAX_GPUS)]
    """Place in `Report.gpus`."""
    memory_used_bytes: Bytes
    """As process lists showed it: the most in `gen`, the least in any other stage."""


class StepStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage of one step in this pod. A stage that ran in several pieces is one."""

    stage: Word
    role: Word
    begin: UnixSeconds
    seconds: Seconds
    """Wall time, the longest of the pod's GPUs."""
    gpus: Annotated[list[StepGpu], Meta(max_length=MAX_GPUS)] = []
    engines: Annotated[list[StepEngine], Meta(max_length=MAX_GPUS)] = []
    """GPUs on which an engine's processes were listed."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One whole step as this pod saw it, sent once."""

    number: Count
    """Counts the steps of this start of the sidecar, from 1: the key against sending twice."""
    step: Step | None = None
    """verl's own number, where a source says it."""
    begin: UnixSeconds
    end: UnixSeconds
    stages: Annotated[list[StepStage], Meta(max_length=MAX_STAGES)] = []
    job: Annotated[str, Meta(max_length=128)] = ""


class StageQuality(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who tells the stages of this pod, and how finely."""

    source: StageSource = StageSource.NONE
    resolution_seconds: Annotated[float, Meta(ge=0.0, le=3600.0)] | None = None
    reason: Annotated[str, Meta(max_length=64)] | None = None
    """Why a better source is not in use, in one word, such as `DashboardGuarded` or `DashboardUnreachable`."""
    message: Annotated[str, Meta(max_length=512)] | None = None
    ask_seconds: Annotated[float, Meta(ge=0.0, le=3600.0)] | None = None
    """On the head: present pace of the questions to the State API."""
    steps: Count = 0
    """Whole steps since the sidecar's start."""


class GpuReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU that is the pod's own.

    The gauges are the newest sample's, and absent when it is older than three intervals. The counters run since the
    start of the sidecar.
    """

    uuid: Uuid
    """Identity of the GPU, such as `GPU-…`."""
    state: GpuState = GpuState.OK
    error: Annotated[str, Meta(max_length=128)] | None = None
    """NVML's name of the error, without its prefix, when `state` is not `ok`."""
    index: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """Index as the reader saw it; for display alone."""
    model: Name | None = None
    utilization: Ratio | None = None
    """Share of the last sample period in which a kernel was resident."""
    memory_used_bytes: Bytes | None = None
    """Memory held by processes; the driver's reserved part is apart."""
    memory_reserved_bytes: Bytes | None = None
    memory_total_bytes: Bytes | None = None
    memory_peak_bytes: Bytes | None = None
    """Highest `memory_used_bytes` since the start of the sidecar."""
    memory_recent_peak_bytes: Bytes | None = None
    """Highest `memory_used_bytes` in the last 60 s."""
    power_watts: Watts | None = None
    power_limit_watts: Watts | None = None
    temperature_celsius: Celsius | None = None
    throttled: Annotated[list[Word], Meta(max_length=16)] | None = None
    """NVML's clocks-event reasons at the moment, in snake case; None: not offered."""
    observed_seconds: Seconds = 0.0
    """Time covered by utilisation samples."""
    busy_seconds: Seconds = 0.0
    """Integral of utilisation over the observed time."""
    energy_joules: Joules | None = None
    """Energy since the start of the sidecar; None where the GPU offers neither energy nor power."""
    xid_errors: dict[Annotated[str, Meta(pattern=r"^\d{1,5}$")], Count] = {}
    """Xid code -> number seen since the start of the sidecar."""
    stages: Annotated[list[StageCount], Meta(max_length=MAX_STAGES)] = []
    """Counters by stage and role, settled ones alone."""


class ProcessReport(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A process with a context on a GPU. An array on the wire, by place."""

    pid: Annotated[int, Meta(ge=1, le=2**22)]
    """Of the pod's own namespace."""
    memory_used_bytes: Bytes | None = None
    program: Annotated[str, Meta(max_length=64)] = ""
    """A program's name, or Ray's or an engine's title up to the class, and never an argument; empty: not known."""


class GpuProcesses(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Who of the pod holds one GPU. An array on the wire, by place."""

    gpu: Annotated[int, Meta(ge=0, le=MAX_GPUS)]
    """Place in `Report.gpus`."""
    processes: Annotated[list[ProcessReport], Meta(max_length=MAX_PROCESSES)] = []
    """The largest first; empty: nobody of the pod."""
    more: Count = 0
    """Processes that are not named for their number."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the sidecar truly knows of the job's host memory; all None where nobody can tell."""

    memory_used_bytes: Bytes | None = None
    memory_limit_bytes: Bytes | None = None
    shm_used_bytes: Bytes | None = None
    shm_size_bytes: Bytes | None = None
    source: Annotated[str, Meta(max_length=32)] | None = None
    """Who said so: `ray-agent`, `marks` or None."""


class CollectionReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Health of the reading itself, so that a gap is seen as a gap."""

    collections: Count = 0
    failures: Count = 0
    timeouts: Count = 0
    """Calls into NVML that hung, each of which cost a sampler thread."""
    dropped_reports: Count = 0
    """Reports that the bounded buffer let go; counters lose nothing by it."""


class RayNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GPUs of one Ray node as the head's dashboard lists them; sent by the head's sidecar alone."""

    node_ip: Annotated[str, Meta(max_length=64)]
    gpu_uuids: Annotated[list[Uuid], Meta(max_length=MAX_GPUS)]


class RayStage(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One `StageInterval` of a Ray node. An array on the wire, by place."""

    stage: Word
    role: Word
    begin: UnixSeconds
    end: UnixSeconds | None = None
    local_rank: Annotated[int, Meta(ge=0, le=1024)] | None = None
    step: Step | None = None
    job: Annotated[str, Meta(max_length=128)] = ""
    resolution_seconds: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0


class NodeStages(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the head says of one Ray node."""

    node_ip: Annotated[str, Meta(max_length=64)]
    intervals: Annotated[list[RayStage], Meta(max_length=MAX_NODE_INTERVALS)] = []


class ClusterStages(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the head's sidecar learnt of all nodes of its Ray cluster: the new and the still running.

    Nodes that had no work between the two times are left out: that is said by their absence.
    """

    source: StageSource
    known_from: UnixSeconds
    known_until: UnixSeconds
    nodes: Annotated[list[NodeStages], Meta(max_length=4096)] = []


class PodStages(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The controller's word to one worker, from its head: a `StageWord` on the wire."""

    source: StageSource
    known_from: UnixSeconds
    known_until: UnixSeconds
    intervals: Annotated[list[RayStage], Meta(max_length=1024)] = []


class RayJobInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job of Ray's jobs list, from the head. Secrets are taken out before it is sent."""

    submission_id: Annotated[str, Meta(max_length=128)]
    """Empty for a driver that was started by hand."""
    status: Annotated[str, Meta(max_length=32)] = ""
    entrypoint: Annotated[str, Meta(max_length=MAX_ENTRYPOINT)] = ""
    """Command line with Hydra's overrides."""
    verl_version: Annotated[str, Meta(max_length=32)] | None = None
    """Of the driver's own installation, where it can be known."""
    started_at: UnixSeconds | None = None
    ray_names: Annotated[list[Word], Meta(max_length=MAX_RAY_NAMES)] = []
    """Names of classes and methods of verl that were seen to run and tell its release, or that an engine is put to
    sleep; from a fixed list, so that nothing of the user's is in it."""


class PodRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose report it is. It must equal what the token says; the token decides."""

    namespace: Annotated[str, Meta(min_length=1, max_length=253)]
    name: Annotated[str, Meta(min_length=1, max_length=253)]
    uid: Annotated[str, Meta(min_length=1, max_length=64)]


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One report of one sidecar about its own pod."""

    format: Annotated[str, Meta(max_length=64)]
    pod: PodRef
    start_id: Annotated[str, Meta(min_length=8, max_length=64)]
    """New at each start of the sidecar; its counters belong to it."""
    sequence: Annotated[int, Meta(ge=1, le=2**53)]
    """Rises by one with each report that was made."""
    sent_at: UnixSeconds
    started_at: UnixSeconds
    version: Annotated[str, Meta(max_length=64)] = ""
    """Version of the sidecar."""
    final: bool = False
    """Sent on SIGTERM: the counters of this start are complete."""
    source: Source = Source.NONE
    unavailable: UnavailableReason | None = None
    """Why nothing can be read or attributed; None while GPU values are there, or none were asked for."""
    message: Annotated[str, Meta(max_length=512)] | None = None
    """One sentence to `unavailable` that a person can act on."""
    gpus_requested: Annotated[int, Meta(ge=0, le=1024)] = 0
    gpus_visible: Annotated[int, Meta(ge=0, le=1024)] | None = None
    ownership: Ownership = Ownership.UNKNOWN
    gpus: Annotated[list[GpuReport], Meta(max_length=MAX_GPUS)] = []
    gpu_processes: Annotated[list[GpuProcesses], Meta(max_length=MAX_GPUS)] = []
    """Of the GPUs whose list of processes can be had and shows all of the pod's; of others nothing is known."""
    host: HostReport | None = None
    collection: CollectionReport = CollectionReport()
    ray_nodes: Annotated[list[RayNode], Meta(max_length=4096)] = []
    stage: StageNow | None = None
    other_stages: Annotated[list[StageNow], Meta(max_length=8)] = []
    """What other Ray jobs do in the pod at the same time, each by its own `job`."""
    stage_quality: StageQuality = StageQuality()
    steps: Annotated[list[StepReport], Meta(max_length=16)] = []
    """Steps that ended since the last accepted report, oldest first."""
    cluster_stages: ClusterStages | None = None
    """From a Ray head alone."""
    ray_jobs: Annotated[list[RayJobInfo], Meta(max_length=16)] = []
    """From a Ray head alone: the newest."""


class ReportAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the controller says to an accepted report."""

    accepted: Count
    """Sequence of the report that is now counted."""
    interval_seconds: Annotated[float, Meta(ge=1.0, le=600.0)] | None = None
    """Time until the next one, if another than before."""
    ca_pem: Annotated[str, Meta(max_length=65536)] | None = None
    """CA certificates (PEM) to trust from now on, when they changed."""
    gpu_uuids: Annotated[list[Uuid], Meta(max_length=MAX_GPUS)] | None = None
    """The pod's own GPUs as its Ray head names them; None while nobody does."""
    stages: PodStages | None = None
    """What the pod's Ray head says of its stages; None while nobody does."""


class ReportError(ValueError):
    """The bytes are no valid report; the text names the field and the bound."""


_decoder = msgspec.json.Decoder(Report)
_answer_decoder = msgspec.json.Decoder(ReportAnswer)
_encoder = msgspec.json.Encoder()


def encode(value: Report | ReportAnswer) -> bytes:
    """JSON of a report or an answer. Fields that hold their default are left out."""
    return _encoder.encode(value)


def decode_report(body: bytes) -> Report:
    """Decode and check a report. Raises ReportError for broken JSON, a bound that is broken or another format."""
    try:
        report = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(str(error)) from error
    if report.format != REPORT_FORMAT:
        raise ReportError(f"format is {report.format!r}, this controller reads {REPORT_FORMAT!r}")
    return report


def decode_answer(body: bytes) -> ReportAnswer:
    """Decode an answer. Raises ReportError."""
    try:
        return _answer_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(str(error)) from error
