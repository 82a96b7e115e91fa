# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pods that may belong to a workload: two lists by label, decoded into `PodRecord`, merged into one directory.

Of an object of 26 KB some 40 fields are decoded; the rest is skipped unread. Ten thousand pods take about 2.5 s.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.kubernetes import (
    JOB_NAME,
    RAY_CLUSTER,
    RAY_GROUP,
    RAY_NODE,
    RAY_NODE_TYPE,
    REPLICA_INDEX,
    REPLICA_TYPE,
    unix_seconds,
)
from verl_gpumonitor_operator.command import COMMAND
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.reflector import Decoded, Reflector
from verl_gpumonitor_operator.quantities import UNIT, parse

from .jobs import GpuResources
from .ports import ContainerPhase, ContainerState, Owner, PodObserver, PodRecord

logger = logging.getLogger(__name__)

KEPT_LABELS: Final = (
    RAY_CLUSTER,
    RAY_NODE_TYPE,
    RAY_GROUP,
    JOB_NAME,
    REPLICA_TYPE,
    REPLICA_INDEX,
)
MAX_TEXT: Final = 1024
MAX_NAME: Final = 253
MAX_IMAGE: Final = 1024
"""Of what a pod says as it likes, so much is kept: the API server bounds the whole of it by 3 MiB alone, and thousands
of such pods must not take the controller's memory. No longer image can be pulled."""
MAX_IMAGES: Final = 16
MAX_MEMORY: Final = 2**60
"""No host has so much: a limit beyond it is none."""
SELECTORS: Final = (f"{RAY_NODE}=yes", JOB_NAME)
"""The pods that the webhook looks at, too."""


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    namespace: str
    name: str
    uid: str
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list["_OwnerReference"] | None = None


class _OwnerReference(msgspec.Struct, frozen=True, rename="camel"):
    kind: str
    name: str
    uid: str
    api_version: str = ""
    controller: bool | None = None


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, str | int | float] | None = None
    limits: dict[str, str | int | float] | None = None


class _Container(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    image: str = ""
    command: list[str] | None = None
    restart_policy: str | None = None
    resources: _Resources | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    containers: list[_Container] = []
    init_containers: list[_Container] | None = None
    node_name: str | None = None


class _Waiting(msgspec.Struct, frozen=True):
    reason: str | None = None
    message: str | None = None


class _Running(msgspec.Struct, frozen=True, rename="camel"):
    started_at: str | None = None


class _Terminated(msgspec.Struct, frozen=True, rename="camel"):
    exit_code: int | None = None
    reason: str | None = None
    message: str | None = None


class _State(msgspec.Struct, frozen=True):
    waiting: _Waiting | None = None
    running: _Running | None = None
    terminated: _Terminated | None = None


class _ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    state: _State | None = None
    last_state: _State | None = None
    restart_count: int = 0
    image_id: str = msgspec.field(default="", name="imageID")


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Unknown"
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    host_ip: str | None = msgspec.field(default=None, name="hostIP")
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _PodStatus = _PodStatus()


_decoder = msgspec.json.Decoder(_Pod)


def decode(raw: msgspec.Raw | bytes, gpus: GpuResources) -> Decoded[PodRecord]:
    """Read a pod. Raises msgspec.DecodeError for what no API server sends."""
    pod = _decoder.decode(raw)
    return Decoded(uid=pod.metadata.uid, resource_version=pod.metadata.resource_version, item=_record(pod, gpus))


def _record(pod: _Pod, gpus: GpuResources) -> PodRecord:
    meta, spec, status = pod.metadata, pod.spec, pod.status
    annotations = meta.annotations or {}
    injected = annotations.get(wiring.ANNOTATION_INJECTED)
    sidecar = next((item for item in spec.init_containers or () if item.name == wiring.CONTAINER_NAME), None)
    first = spec.containers[0].name if spec.containers else ""
    with_gpus = [one for one in spec.containers if _gpus([one], gpus)]
    return PodRecord(
        namespace=sys.intern(meta.namespace),
        name=meta.name,
        uid=meta.uid,
        labels=_kept(meta.labels),
        owner=_owner(meta.owner_references),
        phase=sys.intern(status.phase),
        node_name=sys.intern(spec.node_name) if spec.node_name else None,
        pod_ip=status.pod_ip,
        host_ip=sys.intern(status.host_ip) if status.host_ip else None,
        created_at=unix_seconds(meta.creation_timestamp),
        deleting=meta.deletion_timestamp is not None,
        gpus_requested=_gpus(with_gpus, gpus),
        gpu_containers=tuple(sys.intern(one.name[:MAX_NAME]) for one in with_gpus[:MAX_IMAGES]),
        memory_limit_bytes=_memory_limit(with_gpus),
        injected=sys.intern(injected[:MAX_NAME]) if injected is not None and sidecar is not None else None,
        skip_reason=_short(annotations.get(wiring.ANNOTATION_SKIP_REASON)),
        images=tuple(sys.intern(one.image) for one in spec.containers[:MAX_IMAGES] if len(one.image) <= MAX_IMAGE),
        sidecar_image=sys.intern(sidecar.image[:MAX_IMAGE]) if sidecar else None,
        native=sidecar is None or sidecar.restart_policy == "Always",
        own_command=sidecar is not None and tuple(sidecar.command or ()) == COMMAND,
        sidecar=_state(status.init_container_statuses, wiring.CONTAINER_NAME) if sidecar else None,
        main=_state(status.container_statuses, first),
    )


def _kept(labels: Mapping[str, str] | None) -> Mapping[str, str]:
    return {key: sys.intern(labels[key]) for key in KEPT_LABELS if key in labels} if labels else {}


def _owner(references: list[_OwnerReference] | None) -> Owner | None:
    for reference in references or ():
        if reference.controller and max(map(len, (reference.kind, reference.name, reference.uid))) <= MAX_NAME:
            return Owner(
                api_version=sys.intern(reference.api_version[:MAX_NAME]),
                kind=sys.intern(reference.kind),
                name=sys.intern(reference.name),
                uid=sys.intern(reference.uid),
            )
    return None


def _gpus(containers: Iterable[_Container], gpus: GpuResources) -> int:
    resources = (container.resources for container in containers if container.resources)
    return gpus.requested((item.requests, item.limits) for item in resources)


def _memory_limit(containers: Iterable[_Container]) -> int | None:
    """Return the sum of the containers' memory limits; None where one has none, or there are no containers."""
    limits = [parse((one.resources.limits or {}).get("memory")) if one.resources else None for one in containers]
    known = [limit // UNIT for limit in limits if limit is not None and 0 < limit // UNIT <= MAX_MEMORY]
    return sum(known) if known and len(known) == len(limits) else None


def _state(statuses: list[_ContainerStatus] | None, name: str) -> ContainerState | None:
    status = next((item for item in statuses or () if item.name == name), None)
    if status is None or status.state is None:
        return None
    state, last = status.state, status.last_state.terminated if status.last_state else None
    ended, waiting = state.terminated, state.waiting
    return ContainerState(
        phase=_phase(state),
        reason=_short((ended or waiting or _Waiting()).reason),
        message=_short((ended or waiting or _Waiting()).message),
        exit_code=ended.exit_code if ended else None,
        started_at=unix_seconds(state.running.started_at) if state.running else None,
        restart_count=status.restart_count,
        image_id=status.image_id[:MAX_IMAGE] or None,
        last_reason=_short(last.reason) if last else None,
        last_exit_code=last.exit_code if last else None,
    )


def _short(text: str | None) -> str | None:
    return text[:MAX_TEXT] if text else text


def _phase(state: _State) -> ContainerPhase:
    if state.running:
        return ContainerPhase.RUNNING
    return ContainerPhase.TERMINATED if state.terminated else ContainerPhase.WAITING


def _tell(observer: Callable[[PodRecord], None], pod: PodRecord) -> None:
    try:
        observer(pod)
    except Exception:
        # A fault of ours in what is shown of a pod must not keep it from the rescue, which hears of it next.
        target = {"kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
        logger.exception("pod cannot be taken", extra={"object": target})


class PodStore:
    """All known pods by name. A `PodDirectory`; tells its observers of each change."""

    def __init__(self, synced: Callable[[], bool]) -> None:
        self._synced = synced
        self._pods: dict[tuple[str, str], PodRecord] = {}
        self._observers: list[PodObserver] = []

    def watch(self, observer: PodObserver) -> None:
        """Tell this observer of all changes from now on, and of all pods that are known already."""
        self._observers.append(observer)
        for pod in list(self._pods.values()):
            _tell(observer.pod_seen, pod)

    @property
    def synced(self) -> bool:
        """Every list has come in whole once."""
        return self._synced()

    def find(self, namespace: str, name: str, uid: str) -> PodRecord | None:
        """Return the pod with just this uid; None if there is none, or another of the same name."""
        pod = self._pods.get((namespace, name))
        return pod if pod is not None and pod.uid == uid else None

    def records(self) -> Iterable[PodRecord]:
        """Return all pods."""
        return self._pods.values()

    def __len__(self) -> int:
        return len(self._pods)

    def seen(self, item: PodRecord) -> None:
        """Take a pod from a list or a watch. Another one of the same name is gone, told or not."""
        key = (item.namespace, item.name)
        before = self._pods.get(key)
        if before is not None and before.uid != item.uid:
            self.gone(before)
        self._pods[key] = item
        if before != item:
            for observer in self._observers:
                _tell(observer.pod_seen, item)

    def gone(self, item: PodRecord) -> None:
        """Forget a pod."""
        if self.find(item.namespace, item.name, item.uid) is None:
            return
        pod = self._pods.pop((item.namespace, item.name))
        for observer in self._observers:
            _tell(observer.pod_gone, pod)


def reflectors(client: KubeClient, gpus: GpuResources) -> tuple[PodStore, list[Reflector[PodRecord]]]:
    """Make the directory and the reflectors that fill it; each is to be run as a task."""
    running: list[Reflector[PodRecord]] = []
    store = PodStore(lambda: all(reflector.state.synced for reflector in running))
    running.extend(
        Reflector(
            client=client,
            path="/api/v1/pods",
            query={"labelSelector": selector},
            decode=lambda raw: decode(raw, gpus),
            mirror=store,
        )
        for selector in SELECTORS
    )
    return store, running
