# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The decision on one pod: what is patched into it, or why nothing is. Pure: the same pod and facts, the same answer.

The law behind all of it: no pod may be refused, or be left without a node, that would have run without us. So every
patch is applied here to the pod it is for, and the result is checked; what does not pass is not sent.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator import settings as operator_settings

from . import constraints, jsonpatch, pods, presence, sidecar
from .facts import NATIVE_SIDECARS_SINCE, POD_LEVEL_RESOURCES_SINCE, Cluster, LimitRangeItem, Namespace
from .jsonpatch import Operation, pointer
from .pods import Family, Json
from .sidecar import Resources

MAX_POD_BYTES: Final = 1_000_000
"""etcd takes 1.5 MiB for one object; a pod this large gets nothing added."""
DROPPED: Final = "another webhook, which knows no native sidecars, took restartPolicy from the sidecar"
MAX_ANNOTATION_BYTES: Final = 256 * 1024
"""Kubernetes' own bound for all annotations of one object."""


class SkipReason(StrEnum):
    """Why a pod gets no sidecar. These words are public: annotation, metric label, status."""

    # The pod is none of ours; nothing is written.
    NOT_A_JOB = "NotAJob"
    """Of no known kind of job, or in a namespace that is always left alone."""
    NO_GPUS = "NoGpus"
    ALREADY_INJECTED = "AlreadyInjected"
    NOT_CHOSEN = "NotChosen"
    """Opt-in mode, and nobody opted in."""
    MALFORMED = "Malformed"
    """The JSON has not the form of a pod; the API server will say so itself."""
    # A person may miss the sidecar; the reason is written to the pod.
    OPTED_OUT = "OptedOut"
    INJECTION_PAUSED = "InjectionPaused"
    KUBERNETES_TOO_OLD = "KubernetesTooOld"
    PREFLIGHT_UNAVAILABLE = "PreflightUnavailable"
    NAME_TAKEN = "NameTaken"
    LIMIT_RANGE = "LimitRange"
    RESOURCE_QUOTA = "ResourceQuota"
    WOULD_NOT_FIT = "WouldNotFit"
    RUNTIME_CLASS = "RuntimeClass"
    QOS_CHANGE = "QosChange"
    POD_TOO_LARGE = "PodTooLarge"
    REFUSED = "Refused"
    """The API server does not take such pods with the sidecar."""


SILENT: Final = frozenset(
    (
        SkipReason.NOT_A_JOB,
        SkipReason.NO_GPUS,
        SkipReason.ALREADY_INJECTED,
        SkipReason.NOT_CHOSEN,
        SkipReason.MALFORMED,
    )
)


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """The sidecar is added by these operations, which are known to apply."""

    operations: tuple[Operation, ...]


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is added. `operations` may be empty, else annotate the pod with the reason.

    Where the sidecar is in the pod by now and cannot stay, they take it away too.
    """

    reason: SkipReason
    message: str = ""
    operations: tuple[Operation, ...] = ()


Outcome = Patch | Skip


def mutate(pod: Json, *, namespace: Namespace, policy: operator_settings.Settings, cluster: Cluster) -> Outcome:
    """Decide on one pod about to be created. Never raises for any JSON object, and never changes it."""
    outcome = _decide(pod, namespace=namespace, policy=policy, cluster=cluster)
    return annotated(pod, outcome) if isinstance(outcome, Skip) else outcome


def not_ours(pod: Json, namespace_name: str, policy: operator_settings.Settings) -> Skip | None:
    """Tell without any facts of the cluster that a pod is none of ours. None: it may be."""
    excluded = operator_settings.ALWAYS_EXCLUDED_NAMESPACES | {policy.namespace, *policy.injection.excluded_namespaces}
    if namespace_name in excluded or pods.family(pod) is None or pods.is_mirror(pod) or pods.is_windows(pod):
        return Skip(reason=SkipReason.NOT_A_JOB)
    if not _well_formed(pod):
        return Skip(reason=SkipReason.MALFORMED)
    if pods.is_bulky(pod):
        return Skip(
            reason=SkipReason.POD_TOO_LARGE, message="it has more containers, volumes or resources than any job"
        )
    if wiring.CONTAINER_NAME in _container_names(pod) and wiring.ANNOTATION_INJECTED in pods.annotations(pod):
        unsettled = presence.position(pod) is not None and not presence.is_settled(
            pod, policy.injection.sidecar_resources
        )
        return None if unsettled else Skip(reason=SkipReason.ALREADY_INJECTED)
    if pods.family(pod) is not Family.RAY_HEAD and not pods.gpus_requested(pod, policy.injection.gpu_resources):
        return Skip(reason=SkipReason.NO_GPUS)
    return None


def needs_ray_cluster(pod: Json, policy: operator_settings.Settings) -> bool:
    """Whether the decision depends on the groups of the pod's RayCluster: a head that asks for no GPU itself."""
    is_head = pods.family(pod) is Family.RAY_HEAD
    return is_head and not pods.gpus_requested(pod, policy.injection.gpu_resources)


def without_facts(pod: Json, policy: operator_settings.Settings, message: str) -> Skip:
    """Return the answer when the facts could not be read in time: what the pod says itself still counts."""
    nowhere = Namespace(name="")
    unread = Skip(reason=SkipReason.PREFLIGHT_UNAVAILABLE, message=message)
    return annotated(pod, _removed(pod, _not_wanted(pod, nowhere, policy.injection) or unread))


def annotated(pod: Json, skip: Skip) -> Skip:
    """Add the reason as an annotation, where a person should see it and the pod has room for one."""
    if skip.reason in SILENT:
        return skip
    note = f"{skip.reason}: {skip.message}" if skip.message else str(skip.reason)
    operations = (*skip.operations, *_annotations(pod, {wiring.ANNOTATION_SKIP_REASON: note}))
    try:
        patched = jsonpatch.applied(pod, operations)
    except jsonpatch.PatchError:
        return skip
    fits = _annotation_bytes(patched) <= MAX_ANNOTATION_BYTES
    return msgspec.structs.replace(skip, operations=operations) if fits else skip


def _decide(pod: Json, *, namespace: Namespace, policy: operator_settings.Settings, cluster: Cluster) -> Outcome:
    skip = not_ours(pod, namespace.name, policy)
    if skip is not None:
        return skip
    bare = presence.without(pod)
    skip = _not_wanted(bare, namespace, policy.injection) or _not_possible(bare, policy, cluster)
    if skip is None and presence.holds_for_ever(pod):
        # Written anew, it might be dropped again after us.
        skip = Skip(reason=SkipReason.KUBERNETES_TOO_OLD, message=DROPPED)
    if skip is not None:
        return _removed(pod, skip)
    build = _with_sidecar if presence.position(pod) is None else _with_other_resources
    refused: Skip | None = None
    for resources in sidecar.resource_choices(bare, policy.injection.sidecar_resources):
        outcome = build(pod, namespace=namespace, policy=policy, cluster=cluster, resources=resources)
        if isinstance(outcome, Patch):
            return outcome
        # The first choice is the usual one, so its reason is what a person can do something about.
        refused = refused or outcome
    return _removed(pod, refused or Skip(reason=SkipReason.MALFORMED))


def _removed(pod: Json, skip: Skip) -> Skip:
    """Take the sidecar out of a pod that got it at an earlier pass, and that it does not suit any more."""
    return msgspec.structs.replace(skip, operations=presence.removal(pod))


def _not_wanted(pod: Json, namespace: Namespace, injection: operator_settings.Injection) -> Skip | None:
    """Ask the pod first (label and annotation; `disabled` wins), then its namespace, then the mode."""
    own = (pods.labels(pod).get(wiring.INJECT), pods.annotations(pod).get(wiring.INJECT))
    for whose, words in (("the pod", own), ("its namespace", (namespace.labels.get(wiring.INJECT),))):
        if "disabled" in words:
            return Skip(reason=SkipReason.OPTED_OUT, message=f"{whose} has {wiring.INJECT}: disabled")
        if "enabled" in words:
            return None
    if injection.mode is operator_settings.InjectionMode.OPT_IN:
        return Skip(reason=SkipReason.NOT_CHOSEN)
    return None


def _not_possible(pod: Json, policy: operator_settings.Settings, cluster: Cluster) -> Skip | None:
    if needs_ray_cluster(pod, policy) and cluster.ray_cluster_has_gpus is False:
        return Skip(reason=SkipReason.NO_GPUS)
    if cluster.paused is not None:
        return Skip(reason=SkipReason.INJECTION_PAUSED, message=cluster.paused)
    return _too_old(cluster) or _name_taken(pod) or _of_other_nodes(pod, policy, cluster)


def _too_old(cluster: Cluster) -> Skip | None:
    needed = f"native sidecars need {NATIVE_SIDECARS_SINCE}"
    if cluster.api_version < NATIVE_SIDECARS_SINCE:
        message = f"the API server is {cluster.api_version}, {needed}"
    elif cluster.oldest_kubelet is None:
        where = f"node {cluster.oldest_node}" if cluster.oldest_node else "no node"
        message = f"no kubelet version is known ({where}), {needed}"
    elif cluster.oldest_kubelet < NATIVE_SIDECARS_SINCE:
        message = f"node {cluster.oldest_node} runs {cluster.oldest_kubelet}, {needed}"
    else:
        return None
    return Skip(reason=SkipReason.KUBERNETES_TOO_OLD, message=message)


def takes_runtime_class(pod: Json, policy: operator_settings.Settings) -> bool:
    """Whether the pod is to get the RuntimeClass of the settings: it names none itself."""
    by_class = policy.injection.visibility is operator_settings.Visibility.RUNTIME_CLASS
    return by_class and not pods.spec(pod).get("runtimeClassName")


def _of_other_nodes(pod: Json, policy: operator_settings.Settings, cluster: Cluster) -> Skip | None:
    if cluster.runtime_class is None or not takes_runtime_class(pod, policy):
        return None
    conflict = constraints.runtime_class_refusal(pod, cluster.runtime_class)
    if conflict is None:
        return None
    message = f"the pod would get RuntimeClass {policy.injection.runtime_class_name}, but {conflict}"
    return Skip(reason=SkipReason.RUNTIME_CLASS, message=message)


def _name_taken(pod: Json) -> Skip | None:
    taken = {
        f"a container named {wiring.CONTAINER_NAME}": wiring.CONTAINER_NAME in _container_names(pod),
        f"a volume named {wiring.TOKEN_VOLUME}": wiring.TOKEN_VOLUME in _names(pods.volumes(pod)),
        f"a port named {wiring.METRICS_PORT_NAME}": wiring.METRICS_PORT_NAME in _names(pods.ports(pod)),
    }
    what = next((name for name, is_taken in taken.items() if is_taken), None)
    return Skip(reason=SkipReason.NAME_TAKEN, message=f"the pod already has {what}") if what else None


def _with_sidecar(
    pod: Json,
    *,
    namespace: Namespace,
    policy: operator_settings.Settings,
    cluster: Cluster,
    resources: Resources,
) -> Outcome:
    """Build the patch with these resources, apply it, and check what the API server and scheduler would check."""
    added = sidecar.container(pod, settings=policy, namespace=namespace, cluster=cluster, resources=resources)
    operations = tuple(_operations(pod, added, policy, cluster))
    try:
        patched = jsonpatch.applied(pod, operations)
    except jsonpatch.PatchError:
        return Skip(reason=SkipReason.MALFORMED)
    skip = (
        _damaged(pod, patched, cluster)
        or _refused(pod, patched, added, namespace=namespace, headroom=policy.injection.quota_headroom)
        or _unschedulable(pod, patched, added, namespace=namespace, cluster=cluster)
    )
    return skip or Patch(operations=operations)


def _with_other_resources(
    pod: Json,
    *,
    namespace: Namespace,
    policy: operator_settings.Settings,
    cluster: Cluster,
    resources: Resources,
) -> Outcome:
    """Give the sidecar that is there these resources, and check the pod as if it got the whole sidecar now."""
    operations = (*presence.resized(pod, resources), *presence.off_the_host(pod))
    bare, patched = presence.without(pod), jsonpatch.applied(pod, operations)
    added = dict(_own_container(patched))
    skip = (
        _of_another_class(bare, patched, cluster)
        or _refused(bare, patched, added, namespace=namespace, headroom=policy.injection.quota_headroom)
        or _unschedulable(bare, patched, added, namespace=namespace, cluster=cluster)
    )
    return skip or Patch(operations=operations)


def _operations(
    pod: Json, added: dict[str, Any], policy: operator_settings.Settings, cluster: Cluster
) -> Iterator[Operation]:
    spec = pods.spec(pod)
    yield _appended(spec, "initContainers", added)
    yield _appended(spec, "volumes", sidecar.token_volume())
    yield from _annotations(pod, {wiring.ANNOTATION_INJECTED: sidecar.VERSION})
    if wiring.ANNOTATION_SKIP_REASON in pods.annotations(pod):
        yield Operation(op="remove", path=pointer("metadata", "annotations", wiring.ANNOTATION_SKIP_REASON))
    if sidecar.will_share_processes(pod, policy.injection):
        yield Operation(op="add", path=pointer("spec", "shareProcessNamespace"), value=True)
    if cluster.runtime_class is not None and takes_runtime_class(pod, policy):
        value = policy.injection.runtime_class_name
        yield Operation(op="add", path=pointer("spec", "runtimeClassName"), value=value)


def _appended(spec: Json, key: str, value: dict[str, Any]) -> Operation:
    if spec.get(key) is None:
        return Operation(op="add", path=pointer("spec", key), value=[value])
    return Operation(op="add", path=pointer("spec", key, "-"), value=value)


def _annotations(pod: Json, values: dict[str, str]) -> Iterator[Operation]:
    held = pods.mapping(pod.get("metadata")).get("annotations")
    if held is None:
        yield Operation(op="add", path=pointer("metadata", "annotations"), value=values)
        return
    for name, value in values.items():
        yield Operation(op="add", path=pointer("metadata", "annotations", name), value=value)


def _damaged(pod: Json, patched: Json, cluster: Cluster) -> Skip | None:
    """Check that the patch only added: whatever the user wrote is still there, in its order, and no name is double."""
    before, after = pods.spec(pod), pods.spec(patched)
    appended = ("initContainers", "volumes")
    set_by_us = (*appended, "shareProcessNamespace", "runtimeClassName")
    kept = all(after.get(key) == value for key, value in before.items() if key not in set_by_us)
    grown = all(list(after[key][:-1]) == list(before.get(key) or ()) for key in appended)
    single = all(len(set(names)) == len(names) for names in (_container_names(patched), _names(pods.volumes(patched))))
    if not (kept and grown and single):
        return Skip(reason=SkipReason.MALFORMED)
    skip = _of_another_class(pod, patched, cluster)
    if skip is not None:
        return skip
    too_large = len(msgspec.json.encode(patched)) > MAX_POD_BYTES or _annotation_bytes(patched) > MAX_ANNOTATION_BYTES
    return Skip(reason=SkipReason.POD_TOO_LARGE, message="it has no room for more") if too_large else None


def _of_another_class(pod: Json, patched: Json, cluster: Cluster) -> Skip | None:
    if pods.qos_class(pod) is not pods.qos_class(patched):
        return Skip(reason=SkipReason.QOS_CHANGE, message="with it, the pod's QoS class would be another")
    if cluster.api_version >= POD_LEVEL_RESOURCES_SINCE:
        return None
    # An older API server may show us resources of the pod and drop them afterwards: its containers' then decide.
    if pods.qos_class(_without_own_resources(pod)) is not pods.qos_class(_without_own_resources(patched)):
        message = f"the API server is {cluster.api_version} and may drop the pod's own resources, which keep its class"
        return Skip(reason=SkipReason.QOS_CHANGE, message=message)
    return None


def _without_own_resources(pod: Json) -> Json:
    return {**pod, "spec": {name: value for name, value in pods.spec(pod).items() if name != "resources"}}


def _refused(pod: Json, patched: Json, added: dict[str, Any], *, namespace: Namespace, headroom: int) -> Skip | None:
    """Check LimitRanges and quotas, as the API server does after us."""
    conflict = _limit_range_conflict(pod, patched, added, namespace.limits)
    if conflict is not None:
        return Skip(reason=SkipReason.LIMIT_RANGE, message=conflict)
    conflict = constraints.quota_refusal(
        pod, added, quotas=namespace.quotas, limits=namespace.limits, headroom=headroom
    )
    return Skip(reason=SkipReason.RESOURCE_QUOTA, message=conflict) if conflict is not None else None


def _limit_range_conflict(
    pod: Json, patched: Json, added: dict[str, Any], limits: Sequence[LimitRangeItem]
) -> str | None:
    """Check the pod as we leave it, and as it is once the LimitRanges' defaults are filled in.

    Both have to pass: when the API server asks us a second time, because another webhook changed the pod, and only then
    gets a patch, it fills in no defaults any more.
    """
    filled = _defaulted(patched, added, limits)
    refusal = constraints.default_refusal(pod, added, limits)
    for variant in (patched, filled):
        refusal = refusal or constraints.limit_range_refusal(variant, _own_container(variant), limits)
    if refusal is None and pods.qos_class(pod) is not pods.qos_class(filled):
        refusal = "a LimitRange's defaults would change the pod's QoS class"
    return refusal


def _defaulted(patched: Json, added: dict[str, Any], limits: Sequence[LimitRangeItem]) -> dict[str, Any]:
    """Return the patched pod with the sidecar as the LimitRanges would leave it."""
    requests, bounds = constraints.with_defaults(added, limits)
    amounts = {"requests": _written(requests), "limits": _written(bounds)}
    spec = pods.spec(patched)
    as_filled = {**added, "resources": amounts}
    # By name: another webhook may have put init containers behind ours meanwhile.
    filled = [as_filled if _is_own(container) else container for container in spec["initContainers"]]
    return {**patched, "spec": {**spec, "initContainers": filled}}


def _own_container(pod: Json) -> Json:
    return next(filter(_is_own, pods.init_containers(pod)))


def _is_own(container: object) -> bool:
    return pods.mapping(container).get("name") == wiring.CONTAINER_NAME


def _written(amounts: dict[str, int]) -> dict[str, str]:
    return {name: f"{amount}n" for name, amount in amounts.items()}


def _unschedulable(
    pod: Json, patched: Json, added: dict[str, Any], *, namespace: Namespace, cluster: Cluster
) -> Skip | None:
    after = pods.scheduled_requests(_defaulted(patched, added, namespace.limits))
    conflict = constraints.fit_refusal(pods.scheduled_requests(pod), after, cluster.nodes)
    return Skip(reason=SkipReason.WOULD_NOT_FIT, message=conflict) if conflict is not None else None


def _well_formed(pod: Json) -> bool:
    """Whether the parts that a patch touches have the form that Kubernetes gives them."""
    metadata, spec = pod.get("metadata"), pod.get("spec")
    if not isinstance(metadata, dict) or not isinstance(spec, dict) or not pods.containers(pod):
        return False
    lists = all(isinstance(spec.get(key), list | None) for key in ("initContainers", "volumes"))
    annotations = metadata.get("annotations")
    words = annotations is None or (isinstance(annotations, dict) and all(map(_is_text, annotations.values())))
    return lists and words


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _names(parts: Sequence[Json]) -> list[str]:
    return [pods.text(part.get("name")) for part in parts if part.get("name")]


def _container_names(pod: Json) -> list[str]:
    return _names([*pods.containers(pod), *pods.init_containers(pod)])


def _annotation_bytes(pod: Json) -> int:
    return sum(len(str(name).encode()) + len(str(value).encode()) for name, value in pods.annotations(pod).items())
