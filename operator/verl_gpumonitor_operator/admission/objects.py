# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Kubernetes objects as the webhook reads them: the few fields it needs, and how they become facts. Pure.

Whatever the API server leaves out or sets to null has a default, because null is a legal way to write "nothing".
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator import quantities
from verl_gpumonitor_operator.quantities import Amounts

from . import pods
from .facts import GpuLayout, LimitRangeItem, Namespace, Quota, RuntimeClass, Scope
from .pods import Json


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    """Common form."""


class Meta(_Object, frozen=True):
    """`metadata`."""

    name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class NamespaceObject(_Object, frozen=True):
    """v1 Namespace."""

    metadata: Meta = Meta()


class LimitItem(_Object, frozen=True):
    """Entry of a LimitRange."""

    type: str = ""
    min: dict[str, Any] | None = None
    max: dict[str, Any] | None = None
    default: dict[str, Any] | None = None
    default_request: dict[str, Any] | None = None
    max_limit_request_ratio: dict[str, Any] | None = None


class LimitRangeSpec(_Object, frozen=True):
    """`spec` of a LimitRange."""

    limits: list[LimitItem] | None = None


class LimitRangeObject(_Object, frozen=True):
    """v1 LimitRange."""

    spec: LimitRangeSpec = LimitRangeSpec()


class ScopeRequirement(_Object, frozen=True):
    """Entry of `scopeSelector.matchExpressions`."""

    scope_name: str = ""
    operator: str = "Exists"
    values: list[str] | None = None


class ScopeSelector(_Object, frozen=True):
    """`scopeSelector` of a quota."""

    match_expressions: list[ScopeRequirement] | None = None


class QuotaSpec(_Object, frozen=True):
    """`spec` of a ResourceQuota."""

    hard: dict[str, Any] | None = None
    scopes: list[str] | None = None
    scope_selector: ScopeSelector | None = None


class QuotaStatus(_Object, frozen=True):
    """`status` of a ResourceQuota."""

    used: dict[str, Any] | None = None


class QuotaObject(_Object, frozen=True):
    """v1 ResourceQuota."""

    metadata: Meta = Meta()
    spec: QuotaSpec = QuotaSpec()
    status: QuotaStatus = QuotaStatus()


class NodeSpec(_Object, frozen=True):
    """`spec` of a node."""

    unschedulable: bool | None = None


class NodeInfo(_Object, frozen=True):
    """`status.nodeInfo`."""

    kubelet_version: str = ""
    operating_system: str = ""


class NodeStatus(_Object, frozen=True):
    """`status` of a node."""

    allocatable: dict[str, Any] | None = None
    node_info: NodeInfo = NodeInfo()


class NodeObject(_Object, frozen=True):
    """v1 Node."""

    metadata: Meta = Meta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def holds_our_pods(self) -> bool:
        """Whether it is a Linux node with a real kubelet; virtual ones have versions of their own."""
        virtual = (self.metadata.labels or {}).get("type") == "virtual-kubelet"
        return not virtual and self.status.node_info.operating_system.lower() != "windows"


_REPLICAS: Final = "nvidia.com/gpu.replicas"
_COUNT: Final = "nvidia.com/gpu.count"
"""Labels by NVIDIA's feature discovery: how often each GPU is offered, and how many there are."""


def gpu_layout(node: NodeObject, patterns: tuple[str, ...]) -> GpuLayout | None:
    """Return how a node offers its GPUs; None where it offers none."""
    advertised = pods.gpus_in(quantities.parse_all(node.status.allocatable), patterns)
    if advertised <= 0:
        return None
    labels = node.metadata.labels or {}
    replicas, count = _number(labels.get(_REPLICAS)), _number(labels.get(_COUNT))
    if replicas is not None and replicas > 1:
        return GpuLayout(advertised=advertised, physical=advertised // replicas)
    # Without the first label sharing shows in more than there are; with it, there is none.
    return GpuLayout(advertised=advertised, physical=advertised if replicas is not None else count)


def _number(label: str | None) -> int | None:
    return int(label) if label is not None and label.isascii() and label.isdigit() and len(label) <= 4 else None


class PodTemplate(_Object, frozen=True):
    """`spec.template` of a workload."""

    spec: dict[str, Any] | None = None


class DaemonSetSpec(_Object, frozen=True):
    """`spec` of a DaemonSet."""

    template: PodTemplate = PodTemplate()


class DaemonSetStatus(_Object, frozen=True):
    """`status` of a DaemonSet."""

    desired_number_scheduled: int | None = None


class DaemonSetObject(_Object, frozen=True):
    """apps/v1 DaemonSet."""

    spec: DaemonSetSpec = DaemonSetSpec()
    status: DaemonSetStatus = DaemonSetStatus()

    def runs_on(self, node: NodeObject) -> bool:
        """Whether its pods may be on this node, judged by the node selector alone: when in doubt, yes."""
        selector = pods.mapping((self.spec.template.spec or {}).get("nodeSelector"))
        labels = node.metadata.labels or {}
        return bool(self.status.desired_number_scheduled) and all(
            labels.get(key) == value for key, value in selector.items()
        )

    def requests(self) -> Amounts:
        """What each of its pods asks for."""
        return pods.scheduled_requests({"spec": self.spec.template.spec or {}})


class Resources(_Object, frozen=True):
    """`resources` of a container or pod."""

    requests: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None


class ContainerObject(_Object, frozen=True, omit_defaults=True):
    """Container, as far as it takes room."""

    resources: Resources | None = None
    restart_policy: str | None = None


class PodSpec(_Object, frozen=True, omit_defaults=True):
    """`spec` of a pod, as far as it takes room: of some 10 KB, some 200 bytes."""

    containers: list[ContainerObject] | None = None
    init_containers: list[ContainerObject] | None = None
    resources: Resources | None = None
    overhead: dict[str, Any] | None = None


class PodObject(_Object, frozen=True):
    """v1 Pod on a node, as far as it takes room there."""

    spec: PodSpec = PodSpec()

    def json(self) -> Json:
        """Return the pod in the form in which one is judged that is to be created."""
        return {"spec": msgspec.to_builtins(self.spec)}

    def gpus_requested(self, patterns: tuple[str, ...]) -> int:
        """GPUs that it has."""
        return pods.gpus_requested(self.json(), patterns)


class PodMetaObject(_Object, frozen=True):
    """v1 Pod, as far as it says whether it has the sidecar."""

    metadata: Meta = Meta()

    @property
    def is_injected(self) -> bool:
        """Whether the webhook's patch is in it."""
        return wiring.ANNOTATION_INJECTED in (self.metadata.annotations or {})


class ServiceSpec(_Object, frozen=True):
    """`spec` of a Service."""

    cluster_ip: str | None = msgspec.field(name="clusterIP", default=None)


class ServiceObject(_Object, frozen=True):
    """v1 Service."""

    spec: ServiceSpec = ServiceSpec()


class SecretObject(_Object, frozen=True):
    """v1 Secret."""

    data: dict[str, str] | None = None

    def decoded(self) -> dict[str, bytes]:
        """Return its data; an entry that is no base64 is left out."""
        result: dict[str, bytes] = {}
        for key, value in (self.data or {}).items():
            try:
                result[key] = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                continue
        return result


class ConfigMapObject(_Object, frozen=True):
    """v1 ConfigMap."""

    data: dict[str, str] | None = None


class LeaseSpec(_Object, frozen=True):
    """`spec` of a Lease."""

    renew_time: str | None = None


class LeaseObject(_Object, frozen=True):
    """coordination.k8s.io/v1 Lease."""

    spec: LeaseSpec = LeaseSpec()


class Scheduling(_Object, frozen=True):
    """`scheduling` of a RuntimeClass."""

    node_selector: dict[str, str] | None = None
    tolerations: list[dict[str, Any]] | None = None


class Overhead(_Object, frozen=True):
    """`overhead` of a RuntimeClass."""

    pod_fixed: dict[str, Any] | None = None


class RuntimeClassObject(_Object, frozen=True):
    """node.k8s.io/v1 RuntimeClass."""

    scheduling: Scheduling | None = None
    overhead: Overhead | None = None

    def facts(self) -> RuntimeClass:
        """Return what it does to a pod."""
        scheduling = self.scheduling or Scheduling()
        return RuntimeClass(
            node_selector=scheduling.node_selector or {},
            tolerations=tuple(scheduling.tolerations or ()),
            overhead=quantities.parse_all(self.overhead.pod_fixed if self.overhead is not None else None),
        )


class VersionObject(_Object, frozen=True):
    """Answer of `/version`."""

    git_version: str = ""


class GroupSpec(_Object, frozen=True):
    """Group of Ray nodes in a RayCluster."""

    template: PodTemplate = PodTemplate()
    ray_start_params: dict[str, Any] | None = None
    resources: dict[str, Any] | None = None


class RayClusterSpec(_Object, frozen=True):
    """`spec` of a RayCluster."""

    head_group_spec: GroupSpec = GroupSpec()
    worker_group_specs: list[GroupSpec] | None = None


class RayClusterObject(_Object, frozen=True):
    """ray.io/v1 RayCluster."""

    spec: RayClusterSpec = RayClusterSpec()

    def has_gpus(self, patterns: tuple[str, ...]) -> bool:
        """Whether any of its groups asks for GPUs, however many replicas that group has at the moment."""
        groups = [self.spec.head_group_spec, *(self.spec.worker_group_specs or ())]
        return any(_has_gpus(group, patterns) for group in groups)


def _has_gpus(group: GroupSpec, patterns: tuple[str, ...]) -> bool:
    pod: Json = {"spec": group.template.spec or {}}
    stated = ((group.ray_start_params or {}).get("num-gpus"), (group.resources or {}).get("GPU"))
    return pods.gpus_requested(pod, patterns) > 0 or any((quantities.parse(value) or 0) > 0 for value in stated)


def namespace_facts(
    namespace: NamespaceObject, limit_ranges: list[LimitRangeObject], quotas: list[QuotaObject]
) -> Namespace:
    """Join what was read of one namespace."""
    return Namespace(
        name=namespace.metadata.name,
        labels=namespace.metadata.labels or {},
        annotations=namespace.metadata.annotations or {},
        limits=tuple(_limit(item) for limits in limit_ranges for item in limits.spec.limits or ()),
        quotas=tuple(map(_quota, quotas)),
    )


def _limit(item: LimitItem) -> LimitRangeItem:
    return LimitRangeItem(
        type=item.type,
        min=quantities.parse_all(item.min),
        max=quantities.parse_all(item.max),
        default=quantities.parse_all(item.default),
        default_request=quantities.parse_all(item.default_request),
        max_ratio=quantities.parse_all(item.max_limit_request_ratio),
    )


def _quota(quota: QuotaObject) -> Quota:
    selector = quota.spec.scope_selector or ScopeSelector()
    chosen = (
        Scope(name=one.scope_name, operator=one.operator, values=tuple(one.values or ()))
        for one in selector.match_expressions or ()
    )
    return Quota(
        name=quota.metadata.name,
        hard=quantities.parse_all(quota.spec.hard),
        used=quantities.parse_all(quota.status.used),
        scopes=(*map(_plain_scope, quota.spec.scopes or ()), *chosen),
    )


def _plain_scope(name: str) -> Scope:
    return Scope(name=name)


def taken_on_node(running: list[PodObject]) -> Amounts:
    """Sum of what pods ask for."""
    return quantities.total(pods.scheduled_requests(pod.json()) for pod in running)


def less(room: Amounts, taken: Mapping[str, int]) -> dict[str, int]:
    """Room that is left, by resource; never below 0."""
    return {name: max(amount - taken.get(name, 0), 0) for name, amount in room.items()}
