# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a RayJob, RayCluster, PyTorchJob or TrainJob says of itself, as one small typed value. Pure.

The objects are foreign: any field may be missing, of another type, or hold a word that a later version brings. Nothing
here raises for that; what cannot be understood is None or `Phase.UNKNOWN`.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from verl_gpumonitor.model.kubernetes import unix_seconds
from verl_gpumonitor.model.redaction import redact
from verl_gpumonitor.model.vocabulary import Phase

from .ports import Owner

JsonObject = Mapping[str, Any]


class JobKind(StrEnum):
    """Kinds of workload, by the `kind` of their object."""

    RAY_JOB = "RayJob"
    RAY_CLUSTER = "RayCluster"
    PYTORCH_JOB = "PyTorchJob"
    TRAIN_JOB = "TrainJob"


@dataclass(frozen=True, kw_only=True, slots=True)
class KindInfo:
    """Where the API server serves a kind."""

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """`group/version` as manifests write it."""
        return f"{self.group}/{self.version}"

    @property
    def path(self) -> str:
        """Path of the list over all namespaces."""
        return f"/apis/{self.group}/{self.version}/{self.plural}"


KINDS: Final[Mapping[JobKind, KindInfo]] = {
    JobKind.RAY_JOB: KindInfo(group="ray.io", version="v1", plural="rayjobs"),
    JobKind.RAY_CLUSTER: KindInfo(group="ray.io", version="v1", plural="rayclusters"),
    JobKind.PYTORCH_JOB: KindInfo(group="kubeflow.org", version="v1", plural="pytorchjobs"),
    JobKind.TRAIN_JOB: KindInfo(group="trainer.kubeflow.org", version="v1alpha1", plural="trainjobs"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSeen:
    """One workload object as it was last seen."""

    kind: JobKind
    namespace: str
    name: str
    uid: str
    owner: Owner | None = None
    phase: Phase = Phase.UNKNOWN
    message: str | None = None
    """What its own status says of its state, in its words."""
    created_at: float | None = None
    """Unix seconds, like the two below."""
    started_at: float | None = None
    completed_at: float | None = None
    ray_cluster: str | None = None
    """Name of the RayCluster that a RayJob runs in now."""
    borrows_cluster: bool = False
    """A RayJob with a clusterSelector: its RayCluster is not its own and may be shared."""
    gpus_requested: int | None = None
    """GPUs that its spec asks for in all; None where the spec does not say (a borrowed cluster)."""
    deleting: bool = False
    command: str | None = None
    """Command line that it was started with, without secrets; None where its spec does not say it."""
    ray_job_id: str | None = None
    """Ray's submission id of a RayJob, by which its work is told from others' in the same RayCluster."""

    @property
    def ended(self) -> bool:
        """Nothing will run for it any more."""
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuResources:
    """Which resource names count as GPUs."""

    patterns: tuple[re.Pattern[str], ...]
    _known: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, patterns: Iterable[str]) -> "GpuResources":
        """Compile `injection.gpuResources`; a name counts when one pattern matches all of it."""
        return cls(patterns=tuple(re.compile(pattern) for pattern in patterns))

    def counts(self, name: str) -> bool:
        """Whether a resource of this name is a GPU. Remembered, since a cluster has a handful of names."""
        known = self._known.get(name)
        if known is None:
            known = any(pattern.fullmatch(name) for pattern in self.patterns)
            if len(self._known) < 1024:
                self._known[name] = known
        return known

    def requested(self, resources: Iterable[tuple[Any, Any]]) -> int:
        """Sum GPUs over containers, each given as (requests, limits); requests decide where both are there."""
        return sum(self._of_container(requests, limits) for requests, limits in resources)

    def _of_container(self, requests: Any, limits: Any) -> int:
        merged: dict[str, Any] = {}
        for quantities in (limits, requests):
            if isinstance(quantities, Mapping):
                merged.update({name: value for name, value in quantities.items() if self.counts(str(name))})
        return sum(whole_number(value) for value in merged.values())


MAX_COUNT: Final = 100_000
"""Most devices of one container, and replicas or hosts of one group. Their schemas bound none of them, and a number of
400 digits in one job must not spoil what is served of all others."""


def whole_number(quantity: object) -> int:
    """Value of a quantity of devices. They are whole numbers; whatever else stands there counts as none."""
    try:
        value = int(str(quantity))
    except ValueError:
        return 0
    return value if 0 < value <= MAX_COUNT else 0


def from_object(kind: JobKind, body: JsonObject, gpus: GpuResources) -> JobSeen | None:
    """Read one object. None when it has no name, namespace or uid, so that it cannot be told from others."""
    metadata = _mapping(body, "metadata")
    namespace, name, uid = _text(metadata, "namespace"), _text(metadata, "name"), _text(metadata, "uid")
    if namespace is None or name is None or uid is None:
        return None
    common = _Common(
        namespace=namespace,
        name=name,
        uid=uid,
        owner=controlling_owner(metadata.get("ownerReferences")),
        created_at=unix_seconds(metadata.get("creationTimestamp")),
        deleting=metadata.get("deletionTimestamp") is not None,
    )
    return _READERS[kind](common, _mapping(body, "spec"), _mapping(body, "status"), gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Common:
    namespace: str
    name: str
    uid: str
    owner: Owner | None
    created_at: float | None
    deleting: bool

    def job(self, kind: JobKind, **values: Any) -> JobSeen:
        return JobSeen(
            kind=kind,
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
            owner=self.owner,
            created_at=self.created_at,
            deleting=self.deleting,
            **values,
        )


def _ray_job(common: _Common, spec: JsonObject, status: JsonObject, gpus: GpuResources) -> JobSeen:
    borrows = bool(_mapping(spec, "clusterSelector"))
    cluster_spec = _mapping(spec, "rayClusterSpec")
    return common.job(
        JobKind.RAY_JOB,
        phase=ray_job_phase(_text(status, "jobDeploymentStatus"), _text(status, "jobStatus")),
        message=_sentence(_text(status, "jobDeploymentStatus"), _text(status, "reason"), _text(status, "message")),
        started_at=unix_seconds(status.get("startTime")),
        completed_at=unix_seconds(status.get("endTime")),
        ray_cluster=_text(status, "rayClusterName"),
        borrows_cluster=borrows,
        gpus_requested=None if borrows else ray_cluster_gpus(cluster_spec, gpus),
        command=_command(_text(spec, "entrypoint")),
        ray_job_id=_identifier(_text(status, "jobId")),
    )


def ray_job_phase(deployment: str | None, job: str | None) -> Phase:
    """Phase of a RayJob from `status.jobDeploymentStatus` and `status.jobStatus`.

    The deployment status decides whether it has ended, since a FAILED job may be tried again; the job status decides
    how: `Complete` with STOPPED is no success.
    """
    match deployment:
        case None | "" | "Initializing" | "Waiting" | "Suspending" | "Suspended" | "Retrying":
            return Phase.PENDING
        case "Running":
            return Phase.PENDING if job in (None, "", "PENDING") else Phase.RUNNING
        case "Complete":
            return {"SUCCEEDED": Phase.SUCCEEDED, "FAILED": Phase.FAILED, "STOPPED": Phase.STOPPED}.get(
                job or "", Phase.UNKNOWN
            )
        case "Failed" | "ValidationFailed":
            return Phase.FAILED
        case _:
            return Phase.UNKNOWN


def _ray_cluster(common: _Common, spec: JsonObject, status: JsonObject, gpus: GpuResources) -> JobSeen:
    return common.job(
        JobKind.RAY_CLUSTER,
        phase=ray_cluster_phase(_text(status, "state"), suspended=spec.get("suspend") is True),
        message=_sentence(_text(status, "state"), _text(status, "reason")),
        started_at=common.created_at,
        ray_cluster=common.name,
        gpus_requested=ray_cluster_gpus(spec, gpus),
    )


def ray_cluster_phase(state: str | None, *, suspended: bool) -> Phase:
    """Phase of a RayCluster that is a workload of its own. It never ends by itself, so `failed` is not an end."""
    match state:
        case "ready":
            return Phase.RUNNING
        case None | "" | "suspended" | "failed":
            return Phase.PENDING
        case _:
            return Phase.PENDING if suspended else Phase.UNKNOWN


def ray_cluster_gpus(spec: JsonObject, gpus: GpuResources) -> int:
    """GPUs of a RayCluster's spec: the head's, and each group's replicas x hosts x those of its template."""
    total = _template_gpus(_mapping(spec, "headGroupSpec"), gpus)
    for group in _sequence(spec, "workerGroupSpecs"):
        if not isinstance(group, Mapping) or group.get("suspend") is True:
            continue
        replicas = _count(group, "replicas", _count(group, "minReplicas", 0))
        total += replicas * max(1, _count(group, "numOfHosts", 1)) * _template_gpus(group, gpus)
    return total


def _pytorch_job(common: _Common, spec: JsonObject, status: JsonObject, gpus: GpuResources) -> JobSeen:
    conditions = _sequence(status, "conditions")
    replicas = _mapping(spec, "pytorchReplicaSpecs")
    return common.job(
        JobKind.PYTORCH_JOB,
        phase=pytorch_job_phase(conditions),
        message=_condition_message(conditions),
        started_at=unix_seconds(status.get("startTime")),
        completed_at=unix_seconds(status.get("completionTime")) or _ended_at(conditions),
        gpus_requested=sum(
            _count(replica, "replicas", 1) * _template_gpus(replica, gpus)
            for replica in replicas.values()
            if isinstance(replica, Mapping)
        ),
        command=_command(_pod_command(_mapping(replicas, "Master")) or _pod_command(_mapping(replicas, "Worker"))),
    )


def pytorch_job_phase(conditions: Iterable[Any]) -> Phase:
    """Phase of a PyTorchJob from its conditions, of which the ending ones outrank `Running`."""
    true = _true_types(conditions)
    for condition, phase in (
        ("Succeeded", Phase.SUCCEEDED),
        ("Failed", Phase.FAILED),
        ("Suspended", Phase.PENDING),
        ("Restarting", Phase.PENDING),
        ("Running", Phase.RUNNING),
    ):
        if condition in true:
            return phase
    return Phase.PENDING


def _train_job(common: _Common, spec: JsonObject, status: JsonObject, gpus: GpuResources) -> JobSeen:
    conditions = _sequence(status, "conditions")
    return common.job(
        JobKind.TRAIN_JOB,
        phase=train_job_phase(conditions, _sequence(status, "jobsStatus")),
        message=_condition_message(conditions),
        started_at=common.created_at,
        completed_at=_ended_at(conditions),
        gpus_requested=_trainer_gpus(_mapping(spec, "trainer"), gpus),
    )


def train_job_phase(conditions: Iterable[Any], jobs: Iterable[Any]) -> Phase:
    """Phase of a TrainJob: `Complete` and `Failed` end it; it runs while one of its Jobs has active pods."""
    true = _true_types(conditions)
    if "Complete" in true:
        return Phase.SUCCEEDED
    if "Failed" in true:
        return Phase.FAILED
    active = any(_count(job, "active", 0) > 0 for job in jobs if isinstance(job, Mapping))
    return Phase.RUNNING if active and "Suspended" not in true else Phase.PENDING


def _trainer_gpus(trainer: JsonObject, gpus: GpuResources) -> int | None:
    resources = _mapping(trainer, "resourcesPerNode")
    if not resources:
        return None
    per_node = gpus.requested([(resources.get("requests"), resources.get("limits"))])
    return _count(trainer, "numNodes", 1) * per_node


_READERS = {
    JobKind.RAY_JOB: _ray_job,
    JobKind.RAY_CLUSTER: _ray_cluster,
    JobKind.PYTORCH_JOB: _pytorch_job,
    JobKind.TRAIN_JOB: _train_job,
}


def controlling_owner(references: object) -> Owner | None:
    """Return the ownerReference that has `controller: true`; None if nobody controls the object."""
    if not isinstance(references, list):
        return None
    for reference in references:
        if isinstance(reference, Mapping) and reference.get("controller") is True:
            return Owner(
                api_version=str(reference.get("apiVersion", "")),
                kind=str(reference.get("kind", "")),
                name=str(reference.get("name", "")),
                uid=str(reference.get("uid", "")),
            )
    return None


def timestamp(seconds: float | None) -> str | None:
    """Kubernetes timestamp (whole seconds, UTC) of Unix seconds; None stays None."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


MAX_COMMAND: Final = 16_384
"""Longest command line that is kept; longer ones are cut."""


def _command(text: str | None) -> str | None:
    """Command line without its secrets."""
    # Cut first: a secret that is cut in two is still found by its name.
    return redact(text[:MAX_COMMAND])[:MAX_COMMAND] if text else None


def _pod_command(replica: JsonObject) -> str | None:
    """Command line of the first container, which is the training's, as a shell would read it.

    None where the image's own is run. `command: [bash, -c], args: [a b]` gives `bash -c 'a b'`.
    """
    containers = _sequence(_mapping(_mapping(replica, "template"), "spec"), "containers")
    named = [item for item in containers if isinstance(item, Mapping)]
    main = next((item for item in named if item.get("name") == "pytorch"), named[0] if named else {})
    words = [word for key in ("command", "args") for word in _sequence(main, key) if isinstance(word, str)]
    return shlex.join(words) or None


def _identifier(text: str | None) -> str | None:
    return text if text is not None and len(text) <= 128 else None


def _template_gpus(group: JsonObject, gpus: GpuResources) -> int:
    containers = _sequence(_mapping(_mapping(group, "template"), "spec"), "containers")
    resources = [_mapping(container, "resources") for container in containers if isinstance(container, Mapping)]
    return gpus.requested((item.get("requests"), item.get("limits")) for item in resources)


def _true_types(conditions: Iterable[Any]) -> set[str]:
    return {
        str(condition.get("type"))
        for condition in conditions
        if isinstance(condition, Mapping) and str(condition.get("status")) == "True"
    }


def _condition_message(conditions: Iterable[Any]) -> str | None:
    """Sentence of the newest condition that is True; lists are in the order of their changes."""
    true = [item for item in conditions if isinstance(item, Mapping) and str(item.get("status")) == "True"]
    return _sentence(_text(true[-1], "type"), _text(true[-1], "message")) if true else None


def _ended_at(conditions: Iterable[Any]) -> float | None:
    for condition in conditions:
        if not isinstance(condition, Mapping) or str(condition.get("status")) != "True":
            continue
        if condition.get("type") in ("Succeeded", "Complete", "Failed"):
            return unix_seconds(condition.get("lastTransitionTime"))
    return None


def _sentence(*parts: str | None) -> str | None:
    known = [part for part in parts if part]
    return ": ".join(known)[:1024] or None


def _mapping(body: JsonObject, key: str) -> JsonObject:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}


def _sequence(body: JsonObject, key: str) -> list[Any]:
    value = body.get(key)
    return value if isinstance(value, list) else []


def _text(body: JsonObject, key: str) -> str | None:
    value = body.get(key)
    return value if isinstance(value, str) and value else None


def _count(body: JsonObject, key: str, otherwise: int) -> int:
    value = body.get(key)
    return min(max(0, value), MAX_COUNT) if isinstance(value, int) and not isinstance(value, bool) else otherwise
