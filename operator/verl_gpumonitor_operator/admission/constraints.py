# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a pod with one more container would still be admitted and scheduled: LimitRange, ResourceQuota, nodes. Pure.

The API server checks all of these after the webhook, and refuses the pod in spite of `failurePolicy: Ignore`.
Every function returns None where nothing stands against it, else a sentence for the person who misses the sidecar.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from verl_gpumonitor_operator.quantities import UNIT, Amounts, plus, shown

from . import pods
from .facts import LimitRangeItem, Node, Quota, RuntimeClass, Scope
from .pods import Json, QosClass

Container = dict[str, Any]

_MUST_BE_STATED: Final = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
"""Resources that each container has to state when a quota covers them, even if it states 0."""
_DEFAULTABLE: Final = frozenset(("cpu", "memory", "ephemeral-storage"))
_PACKED: Final = 8
"""Pods of one size that may share a node's devices on purpose; where more fit, it is coincidence."""
_UNSEEN: Final[Amounts] = {"cpu": UNIT, "memory": 2**30 * UNIT}
"""1 CPU and 1 GiB: what static pods and other services may take of a node whose pods were not read."""
_GANG: Final = 16
"""Further pods of one size that are assumed to fill a quota on purpose; where more would fit, it is a roomy one."""


def with_defaults(container: Json, limits: Sequence[LimitRangeItem]) -> tuple[dict[str, int], dict[str, int]]:
    """Requests and limits of a container after the LimitRanges filled in what it does not state."""
    requests = dict(pods.container_requests(container))
    bounds = dict(pods.container_limits(container))
    for item in limits:
        if item.type == "Container":
            bounds = {**item.default, **bounds}
            requests = {**item.default_request, **requests}
    return {**bounds, **requests}, bounds


def default_refusal(pod: Json, container: Json, limits: Sequence[LimitRangeItem]) -> str | None:
    """Refuse where a LimitRange would give the sidecar what only a job should have, or what its pod has not for it."""
    requests, _ = with_defaults(container, limits)
    foreign = sorted(set(requests) - _DEFAULTABLE)
    if foreign:
        return f"a LimitRange gives each container {foreign[0]} by default"
    if requests and pods.has_pod_level_resources(pod):
        return "a LimitRange gives each container resources by default, and the pod's own may not cover them"
    return None


def limit_range_refusal(pod: Json, container: Json, limits: Sequence[LimitRangeItem]) -> str | None:
    """Check the sidecar against the LimitRanges' Container items, and the pod that has it against their Pod items."""
    for item in limits:
        if item.type == "Container":
            refusal = _outside(
                item, "each container", pods.container_requests(container), pods.container_limits(container)
            )
        elif item.type == "Pod":
            refusal = _outside(item, "each pod", pods.total_requests(pod), pods.total_limits(pod))
        else:
            continue
        if refusal is not None:
            return refusal
    return None


def _outside(item: LimitRangeItem, whom: str, requests: Amounts, limits: Amounts) -> str | None:
    for resource, least in item.min.items():
        if requests.get(resource, -1) < least or limits.get(resource, least) < least:
            return f"a LimitRange wants at least {shown(resource, least)} {resource} of {whom}"
    for resource, most in item.max.items():
        if resource not in limits or limits[resource] > most or requests.get(resource, 0) > most:
            return f"a LimitRange allows at most {shown(resource, most)} {resource} to {whom}"
    for resource, ratio in item.max_ratio.items():
        request, limit = requests.get(resource, 0), limits.get(resource, 0)
        if request <= 0 or limit <= 0 or limit * UNIT > ratio * request:
            return f"a LimitRange bounds the ratio of {resource} limit to request for {whom}"
    return None


def quota_refusal(
    pod: Json,
    container: Json,
    *,
    quotas: Sequence[Quota],
    limits: Sequence[LimitRangeItem],
    headroom: int,
) -> str | None:
    """Check that each quota that counts the pod (without the sidecar) has ample room for what the sidecar adds.

    Room is wanted for `headroom` sidecars beside this pod, because `used` lags behind a burst of pods. And where only
    a few more pods of this size fit, sidecars in all of them must not lower their number: the last pod of a gang that
    fills its quota exactly would otherwise be refused for the sake of the sidecars of those before.
    """
    added = _quota_amounts(*with_defaults(container, limits))
    asked = _quota_amounts(pods.total_requests(pod), pods.total_limits(pod))
    covered_by_pod = _quota_amounts(*_pod_level(pod))
    for quota in quotas:
        if not all(_in_scope(pod, scope) for scope in quota.scopes):
            continue
        for resource, hard in quota.hard.items():
            if resource in _MUST_BE_STATED and resource not in added and resource not in covered_by_pod:
                return f"ResourceQuota {quota.name} wants {resource} stated by each container"
            extra = 0 if resource in covered_by_pod else added.get(resource, 0)
            room = hard - quota.used.get(resource, 0) - asked.get(resource, 0)
            if extra > 0 and not _ample(room, asked.get(resource, 0), extra=extra, headroom=headroom):
                return f"ResourceQuota {quota.name} has too little room left in {resource}"
    return None


def _ample(room: int, size: int, *, extra: int, headroom: int) -> bool:
    if room < headroom * extra:
        return False
    if size <= 0:
        return True
    further, slack = divmod(room, size)
    return further > _GANG or slack >= extra * (further + 1)


def _quota_amounts(requests: Amounts, limits: Amounts) -> dict[str, int]:
    """Amounts under the names that quotas use: `cpu` and `requests.cpu` are the same, `limits.cpu` is another."""
    return {
        **requests,
        **{"requests." + name: amount for name, amount in requests.items()},
        **{"limits." + name: amount for name, amount in limits.items()},
    }


def _pod_level(pod: Json) -> tuple[Amounts, Amounts]:
    whole: Mapping[str, Any] = {"resources": pods.spec(pod).get("resources")}
    return pods.container_requests(whole), pods.container_limits(whole)


def _in_scope(pod: Json, scope: Scope) -> bool:
    """Whether the scope may count this pod. One that is not known here is taken to count it."""
    matches = {
        "Terminating": pods.spec(pod).get("activeDeadlineSeconds") is not None,
        "NotTerminating": pods.spec(pod).get("activeDeadlineSeconds") is None,
        "BestEffort": pods.qos_class(pod) is QosClass.BEST_EFFORT,
        "NotBestEffort": pods.qos_class(pod) is not QosClass.BEST_EFFORT,
    }
    if scope.name == "PriorityClass":
        return _has_priority(pods.text(pods.spec(pod).get("priorityClassName")), scope)
    return matches.get(scope.name, True)


def _has_priority(name: str, scope: Scope) -> bool:
    answers = {
        "In": name in scope.values,
        "NotIn": name not in scope.values,
        "Exists": bool(name),
        "DoesNotExist": not name,
    }
    return answers.get(scope.operator, True)


def runtime_class_refusal(pod: Json, runtime_class: RuntimeClass) -> str | None:
    """Refuse a RuntimeClass that would send the pod elsewhere, or count it for more.

    The API server asks us after its RuntimeClass plugin, and then runs that one again: it merges the class's node
    selector and tolerations into the pod, sets its overhead, and refuses a pod that contradicts them.
    """
    selected = pods.mapping(pods.spec(pod).get("nodeSelector"))
    other = next((key for key, value in runtime_class.node_selector.items() if selected.get(key) != value), None)
    if other is not None:
        return f"it selects nodes by {other}, and the pod does not"
    tolerated = [_toleration(one) for one in pods.listing(pods.spec(pod).get("tolerations"))]
    if any(_toleration(one) not in tolerated for one in runtime_class.tolerations):
        return "it adds a toleration to the pod"
    if runtime_class.overhead:
        return "it adds an overhead to the pod"
    return None


def _toleration(value: object) -> dict[str, Any]:
    held = {name: part for name, part in pods.mapping(value).items() if part not in (None, "")}
    return {"operator": "Equal", **held}


def fit_refusal(before: Amounts, after: Amounts, nodes: Sequence[Node]) -> str | None:
    """Check that the pod (which asks for `before`) still fits wherever it fits now, and so do its likes beside it.

    A node's free room decides where it was read, else its capacity, of which some is left for pods nobody saw. Where
    the pod fits nowhere at the moment, it waits for room, and the capacities decide. Where it would fit on no node at
    all, nobody can tell what will be there.
    """
    if all(after.get(resource, 0) <= before.get(resource, 0) for resource in after):
        return None
    now = [(node, node.capacity if node.free is None else node.free) for node in nodes]
    rooms = [(node, room) for node, room in now if _fits(before, room)]
    if not rooms:
        rooms = [(node, node.capacity) for node in nodes if _fits(before, node.capacity)]
    if not rooms:
        return "with it, the pod would fit on no node that is known"
    for node, room in rooms:
        unseen = _UNSEEN if node.free is None else {}
        if not _fits(plus(after, unseen), room):
            return f"with it, the pod would not fit on node {node.name}{' with room to spare' if unseen else ''}"
        if not _keeps_slices(before, after, room, unseen):
            return f"with it, fewer such pods would fit on node {node.name}"
    return None


def _fits(asked: Amounts, room: Amounts) -> bool:
    return all(amount <= room.get(resource, 0) for resource, amount in asked.items() if amount > 0)


def _keeps_slices(before: Amounts, after: Amounts, room: Amounts, unseen: Amounts) -> bool:
    """Whether a node that pods of this size share by its devices can still be shared by as many.

    Two pods that ask for half of the GPUs and half of the CPUs each fill a node on purpose: a little more in both
    leaves no room for the second. Where CPU or memory already ends before the devices do, nobody meant to fill it.
    """
    slices = min((room.get(name, 0) // amount for name, amount in before.items() if "/" in name and amount), default=0)
    if slices > _PACKED or not _fits({name: slices * amount for name, amount in before.items()}, room):
        return True
    return _fits(plus({name: slices * amount for name, amount in after.items()}, unseen), room)
