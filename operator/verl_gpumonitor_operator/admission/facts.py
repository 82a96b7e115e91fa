# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the admission knows of the cluster when it decides on a pod: plain values, gathered by `preflight`. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from verl_gpumonitor_operator.quantities import Amounts


class Version(NamedTuple):
    """Kubernetes version, as far as it matters."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


NATIVE_SIDECARS_SINCE: Final = Version(1, 29)
"""Older API servers and kubelets drop `restartPolicy` of an init container, and the job would wait for ever."""

POD_LEVEL_RESOURCES_SINCE: Final = Version(1, 34)
"""From here on `spec.resources` of a pod is kept unless a cluster switches that off; older ones drop it by default."""

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})")


def version(text: str) -> Version | None:
    """Read `v1.36.0-rc.1+abc`. None where it begins with no version."""
    match = _VERSION.match(text)
    return Version(int(match[1]), int(match[2])) if match else None


class LimitRangeItem(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a LimitRange; amounts by resource, empty where nothing is said."""

    type: str
    """`Container` or `Pod`; others do not concern pods."""
    min: Amounts = {}
    max: Amounts = {}
    default: Amounts = {}
    default_request: Amounts = {}
    max_ratio: Amounts = {}
    """Highest allowed limit / request; in billionths, as all amounts."""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """One condition under which a quota counts a pod."""

    name: str
    operator: str = "Exists"
    values: tuple[str, ...] = ()


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One ResourceQuota."""

    name: str
    hard: Amounts
    used: Amounts
    scopes: tuple[Scope, ...] = ()


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace with what limits its pods, read at the time of the request."""

    name: str
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    limits: tuple[LimitRangeItem, ...] = ()
    quotas: tuple[Quota, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has for pods."""

    name: str
    capacity: Amounts
    """Allocatable, less what stays there: DaemonSets, or, where the node's pods were read, those without GPUs."""
    allocatable: Amounts | None = None
    """All that its pods may take together; None where it does not matter."""
    free: Amounts | None = None
    """Allocatable, less what all its pods ask for at this moment; None where that was not read."""


class GpuLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes offer their GPUs; the same for many of them."""

    advertised: int
    """What the device plugins offer, over all resources that count as GPUs."""
    physical: int | None = None
    """What is in the machine; None where no label says so."""

    def may_show(self, gpus: int) -> bool:
        """Whether a pod could see just this many GPUs on such a node, and yet have to share them.

        Device plugins offer each GPU several times for time slicing and MPS, all of them as often. So 4 offered for 2
        that are there show 2 to whoever asks for 2 of the 4.
        """
        if self.advertised <= gpus:
            return False
        if self.physical is not None:
            return self.physical == gpus and self.advertised > self.physical
        return self.advertised % gpus == 0


class RuntimeClass(msgspec.Struct, frozen=True, kw_only=True):
    """What a RuntimeClass does to the pods that name it, beside the choice of the runtime."""

    node_selector: Mapping[str, str] = {}
    """Merged into the pod's; a contradiction refuses the pod."""
    tolerations: tuple[Mapping[str, Any], ...] = ()
    """Added to the pod's."""
    overhead: Amounts = {}
    """Requested for the pod on top of its containers; a pod that says otherwise is refused."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster as one request sees it."""

    api_version: Version
    oldest_kubelet: Version | None
    """None when a node's version cannot be understood, or there is no node."""
    oldest_node: str = ""
    """Name of the node with that version."""
    nodes: tuple[Node, ...] = ()
    """Nodes that take pods; only those that differ in what they have."""
    controller_address: str | None = None
    """ClusterIP of the controller's Service; None: the sidecar is told of no controller and serves metrics alone."""
    ca_pem: str | None = None
    paused: str | None = None
    """Why nothing is injected into pods of this namespace now: a circuit breaker, or no controller. None: nothing is
    against it."""
    ray_cluster_has_gpus: bool | None = None
    """For a Ray head without GPUs: whether its cluster has groups with GPUs; None when that could not be read."""
    gpu_layouts: frozenset[GpuLayout] = frozenset()
    """Of the nodes that take pods."""
    runtime_class: RuntimeClass | None = None
    """The RuntimeClass of the settings; None where it is not there, or is not to be set on this pod."""
