# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a pod with one more container would still be admitted and scheduled: LimitRange, ResourceQuota, nodes. Pure.

The API server checks all of these after the webhook, and refuses the pod in spite of `failurePolicy: Ignore`.
Every function returns None where nothing stands against it, else a sentence for the person who misses the sidecar.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from . import pods
from .facts import LimitRangeItem, Node, Quota, Scope
from .pods import Json, QosClass
from .quantities import UNIT, Amounts, shown

Container = dict[str, Any]

_MUST_BE_STATED: Final = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
"""Resources that each container has to state when a quota covers them, even if it states 0."""
_DEFAULTABLE: Final = frozenset(("cpu", "memory", "ephemeral-storage"))
_PACKED: Final = 8
"""Pods of one size that are assumed to be laid side by side on a node on purpose; more are coincidence."""
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


def default_refusal(container: Json, limits: Sequence[LimitRangeItem]) -> str | None:
    """Refuse where a LimitRange would give the sidecar what only a job should have, such as a GPU."""
    requests, _ = with_defaults(container, limits)
    foreign = sorted(set(requests) - _DEFAULTABLE)
    return f"a LimitRange gives each container {foreign[0]} by default" if foreign else None


def limit_range_refusal(pod: Json, container: Json, limits: Sequence[LimitRangeItem]) -> str | None:
    """Check the sidecar against the LimitRanges' Container items, and the pod that has it against their Pod items."""
    own = with_defaults(container, limits)
    for item in limits:
        if item.type == "Container":
            refusal = _outside(item, "each container", *own)
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


def fit_refusal(before: Amounts, after: Amounts, nodes: Sequence[Node]) -> str | None:
    """Check that no node that could hold the pod (which asks for `before`) holds fewer of its kind with the sidecar.

    Where pods are laid side by side to fill a node (two halves, eight eighths), a little more in each of them leaves
    no room for the last. A node's free room, where it was read, decides before its capacity: the pod must still fit
    where it fits now.
    """
    if all(after.get(resource, 0) <= before.get(resource, 0) for resource in after):
        return None
    for room, name in ((node.capacity, node.name) for node in nodes):
        if _fewer(before, after, room):
            return f"with it, fewer such pods would fit on nodes like {name}"
    now = [node.free for node in nodes if node.free is not None]
    if any(_fits(before, free) for free in now) and not any(_keeps(before, after, free) for free in now):
        return "with it, the pod would fit on no node that has room for it now"
    if not any(_fits(after, node.capacity) for node in nodes):
        return "with it, the pod would fit on no node"
    return None


def _fits(asked: Amounts, room: Amounts) -> bool:
    return all(amount <= room.get(resource, 0) for resource, amount in asked.items() if amount > 0)


def _keeps(before: Amounts, after: Amounts, room: Amounts) -> bool:
    return _fits(after, room) and not _fewer(before, after, room)


def _fewer(before: Amounts, after: Amounts, room: Amounts) -> bool:
    """Whether a node with this room holds fewer such pods afterwards; beyond a few side by side it does not matter."""
    together = min((room.get(name, 0) // amount for name, amount in before.items() if amount > 0), default=0)
    if not 1 <= together <= _PACKED:
        return together > _PACKED and not _fits(after, room)
    return any(together * amount > room.get(name, 0) for name, amount in after.items())
