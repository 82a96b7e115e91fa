# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pods of a GPUMonitor's job: which they are, whether their sidecars can be asked, what became of them. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec

from verl_gpumonitor.cli.monitors import GPUMonitor
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.kubernetes import (
    JOB_NAME,
    RAY_CLUSTER,
    RAY_GROUP,
    RAY_NODE,
    RAY_NODE_TYPE,
    REPLICA_TYPE,
    unix_seconds,
)
from verl_gpumonitor.model.trace import TracePod

_ROLE_LABELS: Final = (RAY_NODE_TYPE, REPLICA_TYPE)
_ROLES: Final = ("head", "worker", "master")
_FREE_PORT: Final = (
    f"its sidecar took a free port, since the pod is on the node's network or has {wiring.METRICS_PORT} for itself:"
    " which one is not known from outside"
)
_ENDED: Final = ("Succeeded", "Failed")


class _Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class _Metadata(_Struct, frozen=True, kw_only=True):
    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Port(_Struct, frozen=True, kw_only=True):
    name: str = ""
    container_port: int = 0


class _Variable(_Struct, frozen=True, kw_only=True):
    name: str = ""
    value: str = ""


class _Resources(_Struct, frozen=True, kw_only=True):
    limits: dict[str, Any] = {}


class _Container(_Struct, frozen=True, kw_only=True):
    name: str = ""
    image: str = ""
    ports: list[_Port] = []
    env: list[_Variable] = []
    resources: _Resources = _Resources()


class _Spec(_Struct, frozen=True, kw_only=True):
    node_name: str | None = None
    containers: list[_Container] = []
    init_containers: list[_Container] = []


class Terminated(_Struct, frozen=True, kw_only=True):
    """How a container ended."""

    reason: str | None = None
    exit_code: int | None = None
    finished_at: str | None = None


class _State(_Struct, frozen=True, kw_only=True):
    terminated: Terminated | None = None


class _ContainerStatus(_Struct, frozen=True, kw_only=True):
    name: str = ""
    restart_count: int = 0
    state: _State = _State()
    last_state: _State = _State()


class _Status(_Struct, frozen=True, kw_only=True):
    phase: str = "Unknown"
    container_statuses: list[_ContainerStatus] = []


class _Pod(_Struct, frozen=True, kw_only=True):
    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _PodList(_Struct, frozen=True, kw_only=True):
    items: list[_Pod] = []


class End(msgspec.Struct, frozen=True, kw_only=True):
    """A container of the job ended."""

    container: str
    reason: str | None
    exit_code: int | None
    at_unix: float | None
    restarts: int


class JobPod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of the job."""

    name: str
    phase: str
    node: str | None
    node_role: str | None
    group: str | None
    gpus_requested: int
    port: int | None
    """Of its sidecar; None: it cannot be asked, and `why` says why."""
    why: str = ""
    ends: tuple[End, ...] = ()

    def header(self) -> TracePod:
        """Return it as a trace's header has it, without what only its sidecar knows."""
        return TracePod(
            name=self.name,
            node=self.node,
            node_role=self.node_role,
            group=self.group,
            gpus_requested=self.gpus_requested,
        )


class NoPods(Exception):  # noqa: N818
    """The job has none, and the text says why."""


def list_path(namespace: str, monitor: GPUMonitor) -> str:
    """Return where the API server lists the job's pods. Raises NoPods."""
    ref = monitor.spec.workload_ref
    if ref.kind == "PyTorchJob":
        selector = f"{JOB_NAME}={ref.name}"
    elif ref.kind in ("RayJob", "RayCluster"):
        cluster = ref.name if ref.kind == "RayCluster" else monitor.status.workload.ray_cluster
        if not cluster:
            raise NoPods("no RayCluster of it is known yet")
        selector = f"{RAY_CLUSTER}={cluster},{RAY_NODE}=yes"
    else:
        raise NoPods(f"pods of a {ref.kind or 'job without a kind'} are not monitored")
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods?labelSelector={quote(selector, safe='')}"


def trace_path(namespace: str, pod: JobPod) -> str:
    """Return where the API server hands on what the pod's sidecar keeps."""
    where = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod.name, safe='')}:{pod.port}"
    return f"{where}/proxy{wiring.TRACE_PATH}"


def read(document: bytes) -> list[JobPod]:
    """Return the pods of a list, by name. Raises ValueError for what is no list of pods."""
    found = msgspec.json.decode(document, type=_PodList)
    return sorted((_job_pod(pod) for pod in found.items), key=lambda pod: pod.name)


def _job_pod(pod: _Pod) -> JobPod:
    sidecar = next((c for c in pod.spec.init_containers if c.name == wiring.CONTAINER_NAME), None)
    labels = pod.metadata.labels
    role = next((labels[label].lower() for label in _ROLE_LABELS if label in labels), None)
    port, why = _port(pod, sidecar)
    return JobPod(
        name=pod.metadata.name,
        phase=pod.status.phase,
        node=pod.spec.node_name,
        node_role=role if role in _ROLES else None,
        group=labels.get(RAY_GROUP),
        gpus_requested=_gpus(pod.spec.containers, sidecar),
        port=port,
        why=why,
        ends=tuple(_ends(pod.status.container_statuses)),
    )


def _port(pod: _Pod, sidecar: _Container | None) -> tuple[int | None, str]:
    """Return the port of the pod's sidecar, or None and why it cannot be asked."""
    if sidecar is None:
        reason = pod.metadata.annotations.get(wiring.ANNOTATION_SKIP_REASON, "")
        return None, f"it has no sidecar{f' ({reason[:300]})' if reason else ''}"
    if pod.status.phase != "Running":
        ended = pod.status.phase in _ENDED
        what = "what its sidecar kept is gone with it" if ended else "its sidecar has not begun"
        return None, f"it is {pod.status.phase}, and {what}"
    if any(container.image == sidecar.image for container in pod.spec.containers):
        return None, "its sidecar was replaced, since it could not start: it runs without (docs/runbook/sidecar.md)"
    port = next((p.container_port for p in sidecar.ports if p.name == wiring.METRICS_PORT_NAME), 0)
    if not port:
        return None, _FREE_PORT
    return port, ""


def _gpus(containers: Iterable[_Container], sidecar: _Container | None) -> int:
    """Return how many GPUs it asks for: as the admission counted them, else by the usual resource names."""
    told = {variable.name: variable.value for variable in sidecar.env} if sidecar else {}
    counted = told.get(wiring.ENV_GPUS_REQUESTED, "")
    if counted.isdigit():
        return int(counted)
    limits: Iterator[Mapping[str, Any]] = (container.resources.limits for container in containers)
    amounts = [str(amount) for found in limits for name, amount in found.items() if name.endswith("/gpu")]
    return sum(int(amount) for amount in amounts if amount.isdigit())


def _ends(statuses: Iterable[_ContainerStatus]) -> Iterator[End]:
    for status in statuses:
        for state in (status.last_state, status.state):
            if state.terminated is not None:
                ended = state.terminated
                yield End(
                    container=status.name,
                    reason=ended.reason,
                    exit_code=ended.exit_code,
                    at_unix=unix_seconds(ended.finished_at),
                    restarts=status.restart_count,
                )
