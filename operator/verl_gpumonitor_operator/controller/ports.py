# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the parts of the controller hand each other: values, and the Protocols by which they are joined.

Each part declares here what it needs from the others, and `main` hands it in; so none imports another. Everything is
called in the controller's one event loop (kopf's own thread hands its objects over before they reach any of these), so
that no implementation needs a lock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from verl_gpumonitor.model.report import PodStages, Report
from verl_gpumonitor.model.vocabulary import Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class PodIdentity:
    """Who sent a report, as the API server says after it reviewed the token. Never taken from a body."""

    namespace: str
    name: str
    uid: str
    node_name: str | None = None
    """Node of the pod; None before Kubernetes 1.32, whose tokens do not name it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The controlling ownerReference of an object."""

    api_version: str
    kind: str
    name: str
    uid: str


class ContainerPhase(StrEnum):
    """Which of its three states a container is in."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerState:
    """State of one container of a pod."""

    phase: ContainerPhase
    reason: str | None = None
    """Kubelet's word for waiting or terminated, such as `ImagePullBackOff` or `OOMKilled`."""
    message: str | None = None
    exit_code: int | None = None
    """Of a terminated one."""
    started_at: float | None = None
    """Unix seconds at which a running one was started."""
    restart_count: int = 0
    image_id: str | None = None
    """Digest reference of the image that runs or ran; None before it was pulled."""
    last_reason: str | None = None
    """Reason of the termination before this state."""
    last_exit_code: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRecord:
    """The few facts of a pod that the controller keeps. One object of at most 2 KB for each pod."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    """Only those that name its cluster, group, job or replica; see `pods.KEPT_LABELS`."""
    owner: Owner | None = None
    phase: str = "Unknown"
    """`status.phase` as the API server says it."""
    node_name: str | None = None
    pod_ip: str | None = None
    host_ip: str | None = None
    created_at: float | None = None
    """Unix seconds."""
    deleting: bool = False
    """A deletion timestamp is set: its containers are being ended."""
    gpus_requested: int = 0
    """Sum over its containers of the resources that count as GPUs."""
    gpu_containers: tuple[str, ...] = ()
    """Names of the containers that ask for them."""
    memory_limit_bytes: int | None = None
    """Sum of the memory limits of these; None where one of them has none."""
    injected: str | None = None
    """Version of the injected sidecar by its annotation; None: the pod has no sidecar of ours."""
    skip_reason: str | None = None
    """Annotation of the webhook, `Reason: sentence`."""
    images: tuple[str, ...] = ()
    """Images of `spec.containers`, in order; the first is the main one."""
    sidecar_image: str | None = None
    """Image of the injected container in the pod's spec."""
    native: bool = True
    """The injected container is a native sidecar. Else its pod waits for its end for ever."""
    own_command: bool = False
    """The injected container has the very command that this release gives it."""
    sidecar: ContainerState | None = None
    """State of the injected container; None before the kubelet has said anything."""
    main: ContainerState | None = None
    """State of the first of `spec.containers`."""

    @property
    def live(self) -> bool:
        """May still run: neither succeeded nor failed. A pod that is being deleted is live until it is gone."""
        return self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostUsage:
    """Host memory of a pod's GPU containers as the kubelet measures it, where no report tells it."""

    memory_used_bytes: int
    """Working set."""
    sampled_at: float
    """When it was measured, by the node's clock; tells one sample from the next."""
    taken_at: float
    """When it was read, by ours; Unix seconds."""


class PodDirectory(Protocol):
    """All pods that may belong to a workload, as the API server last said."""

    @property
    def synced(self) -> bool:
        """The first list is complete: a pod that is not here does not exist."""

    def find(self, namespace: str, name: str, uid: str) -> PodRecord | None:
        """Return the pod with just this uid; None if there is none, or another of the same name."""

    def records(self) -> Iterable[PodRecord]:
        """Return all pods; the caller does not hold on to it across an await."""


class PodObserver(Protocol):
    """Is told of each pod that is new, changed or gone."""

    def pod_seen(self, pod: PodRecord) -> None:
        """Look at a new or changed pod. Called for all pods after each list, too, so it must be level-based."""

    def pod_gone(self, pod: PodRecord) -> None:
        """Forget a pod that exists no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptResult:
    """What became of a report that was authentic."""

    accepted: int
    """Highest sequence counted of this start id."""
    replay: bool = False
    """The report's sequence was not above the last one's, so nothing of it was counted (answer 409)."""
    interval_seconds: float | None = None
    """Another report interval for this sidecar; None: as it is."""
    gpu_uuids: tuple[str, ...] | None = None
    """The pod's own GPUs as its Ray head names them; None while nobody does."""
    stages: PodStages | None = None
    """What its Ray head says of the pod's stages; None while nobody does."""


class ReportSink(Protocol):
    """Takes reports whose sender is proven, whose body names its sender, and whose pod is live and injected."""

    def accept(self, identity: PodIdentity, report: Report, received_at: float) -> AcceptResult:
        """Count a report that came at `received_at` (Unix seconds, our clock). Never raises for what it says."""


class Readiness(Protocol):
    """Whether reports can be taken now (else 503 with Retry-After)."""

    @property
    def ready(self) -> bool:
        """True once we lead and the picture of pods and workloads is complete."""


class CaBundle(Protocol):
    """The CA certificates that sidecars are to trust."""

    @property
    def pem(self) -> str | None:
        """The bundle, current CA first; None before certificates were made."""


class TokenReviewer(Protocol):
    """Asks the API server whose a token is."""

    async def review_token(self, token: str, audience: str) -> Mapping[str, object]:
        """Return `status` of a TokenReview as it came. Raises `kube.errors.KubeError`."""


class PodImagePatcher(Protocol):
    """Changes the image of the injected container, and can change nothing else."""

    async def patch_sidecar_image(self, pod: PodRecord, image: str) -> None:
        """Give init container `gpumonitor` of this very pod (by uid) another image. Raises `kube.errors.KubeError`."""


class StateStore(Protocol):
    """One small document of ours that outlives this process (the breaker's ConfigMap), owned by our Deployment."""

    async def load(self) -> str | None:
        """Return the document; None if there is none yet. Raises `kube.errors.KubeError`."""

    async def save(self, document: str) -> None:
        """Write it, creating the object where needed. Raises `kube.errors.KubeError`."""


class Incidents(Protocol):
    """Tells the owner of a pod's job what happened to that pod."""

    def report(self, pod: PodRecord, *, reason: str, message: str, severity: Severity) -> None:
        """Put an Event on the job that the pod belongs to and on its GPUMonitor.

        The same (job, reason) within a short time becomes one Event with a series. `reason` is CamelCase, `message`
        names the pod and the cause in one sentence.
        """
