# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the admission needs to know of a pod, read from JSON of any shape without ever raising. Pure.

The rules of Kubernetes that are repeated here (QoS class, sums of requests) are those of its own source, because the
API server, the scheduler and quota judge by them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from verl_gpumonitor.model.kubernetes import JOB_NAME, RAY_NODE, RAY_NODE_TYPE
from verl_gpumonitor_operator import quantities
from verl_gpumonitor_operator.quantities import UNIT, Amount, Amounts

Json = Mapping[str, Any]

KUBEFLOW_OPERATOR_LABEL: Final = "training.kubeflow.org/operator-name"
PYTORCHJOB_OPERATOR: Final = "pytorchjob-controller"
"""The only one of the training-operator's kinds of job that the controller knows how to show."""
OS_LABELS: Final = ("kubernetes.io/os", "beta.kubernetes.io/os")
MIRROR_ANNOTATIONS: Final = ("kubernetes.io/config.mirror", "kubernetes.io/config.source")

_QOS_RESOURCES: Final = ("cpu", "memory")

MAX_CONTAINERS: Final = 200
MAX_AMOUNTS: Final = 1000
"""Entries of requests and limits of all containers; a usual pod has some ten."""
MAX_PARTS: Final = 2000
"""Volumes, and ports of all containers."""


class QosClass(StrEnum):
    """Kubernetes' quality of service classes."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class Family(StrEnum):
    """Which kind of job a pod belongs to."""

    RAY_HEAD = "head"
    RAY_WORKER = "worker"
    KUBEFLOW = "kubeflow"
    """A PyTorchJob's."""


def mapping(value: object) -> Json:
    """Return the value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def listing(value: object) -> Sequence[Any]:
    """Return the value if it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else ()


def text(value: object) -> str:
    """Return the value if it is a string, else an empty one."""
    return value if isinstance(value, str) else ""


def spec(pod: Json) -> Json:
    """Return `spec`."""
    return mapping(pod.get("spec"))


def labels(pod: Json) -> Json:
    """Return `metadata.labels`."""
    return mapping(mapping(pod.get("metadata")).get("labels"))


def annotations(pod: Json) -> Json:
    """Return `metadata.annotations`."""
    return mapping(mapping(pod.get("metadata")).get("annotations"))


def containers(pod: Json) -> list[Json]:
    """Main containers, in order."""
    return [mapping(container) for container in listing(spec(pod).get("containers"))]


def init_containers(pod: Json) -> list[Json]:
    """Init containers and native sidecars, in order."""
    return [mapping(container) for container in listing(spec(pod).get("initContainers"))]


def volumes(pod: Json) -> list[Json]:
    """Return `spec.volumes`."""
    return [mapping(volume) for volume in listing(spec(pod).get("volumes"))]


def is_bulky(pod: Json) -> bool:
    """Whether it has more parts than any job, and to judge it would take seconds, in which all other pods wait.

    Before it asks us, the API server bounds an object by size alone: 3 MiB hold 4,000 containers or 80,000 resources.
    """
    held = spec(pod)
    counts = [len(listing(held.get(key))) for key in ("containers", "initContainers")]
    if sum(counts) > MAX_CONTAINERS or len(listing(held.get("volumes"))) > MAX_PARTS:
        return True
    each = [*containers(pod), *init_containers(pod)]
    lists = [mapping(one.get("resources")) for one in [*each, held]]
    amounts = sum(len(mapping(one.get(kind))) for one in lists for kind in ("limits", "requests"))
    overhead = len(mapping(held.get("overhead")))
    return amounts + overhead > MAX_AMOUNTS or sum(len(listing(one.get("ports"))) for one in each) > MAX_PARTS


def is_native_sidecar(container: Json) -> bool:
    """Whether an init container keeps running beside the main ones."""
    return container.get("restartPolicy") == "Always"


def ports(pod: Json) -> list[Json]:
    """Return the declared ports of all containers that run beside each other."""
    running = [*containers(pod), *filter(is_native_sidecar, init_containers(pod))]
    return [mapping(port) for container in running for port in listing(container.get("ports"))]


def family(pod: Json) -> Family | None:
    """Tell whose pod it is. None for all that is not ours.

    That is submitters, redis-cleanup Jobs (a node type of their own) and MPIJobs, TFJobs and the like.
    """
    held = labels(pod)
    if held.get(RAY_NODE) == "yes":
        return {"head": Family.RAY_HEAD, "worker": Family.RAY_WORKER}.get(text(held.get(RAY_NODE_TYPE)))
    is_pytorch = held.get(KUBEFLOW_OPERATOR_LABEL, PYTORCHJOB_OPERATOR) == PYTORCHJOB_OPERATOR
    return Family.KUBEFLOW if JOB_NAME in held and is_pytorch else None


def is_mirror(pod: Json) -> bool:
    """Whether it stands for a static pod of a kubelet, which no admission can change."""
    return any(name in annotations(pod) for name in MIRROR_ANNOTATIONS)


def is_windows(pod: Json) -> bool:
    """Whether it asks for a Windows node, in any of the ways in which a pod can."""
    selector, affinity = (mapping(spec(pod).get(key)) for key in ("nodeSelector", "affinity"))
    wanted = [mapping(spec(pod).get("os")).get("name"), *(selector.get(label) for label in OS_LABELS)]
    required = mapping(affinity.get("nodeAffinity")).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = listing(mapping(required).get("nodeSelectorTerms"))
    for expression in (one for term in terms for one in listing(mapping(term).get("matchExpressions"))):
        held = mapping(expression)
        if held.get("key") in OS_LABELS and held.get("operator") == "In":
            wanted += listing(held.get("values"))
    return "windows" in wanted


def uses_host_network(pod: Json) -> bool:
    """Whether it lives in the node's network namespace."""
    return spec(pod).get("hostNetwork") is True


def uses_host_pid(pod: Json) -> bool:
    """Whether it lives in the node's process namespace."""
    return spec(pod).get("hostPID") is True


def shares_processes(pod: Json) -> bool:
    """Whether its containers see each other's processes, and no others."""
    return spec(pod).get("shareProcessNamespace") is True and not uses_host_pid(pod)


def _limits_and_requests(resources: object) -> tuple[Amounts, Amounts]:
    """Limits and requests; a limit without request is its own request, as the API server sets it."""
    held = mapping(resources)
    limits = quantities.parse_all(held.get("limits"))
    return limits, {**limits, **quantities.parse_all(held.get("requests"))}


def container_limits(container: Json) -> Amounts:
    """Return what one container may use at most."""
    return _limits_and_requests(container.get("resources"))[0]


def container_requests(container: Json) -> Amounts:
    """Return what is reserved for one container."""
    return _limits_and_requests(container.get("resources"))[1]


def has_pod_level_resources(pod: Json) -> bool:
    """Whether the pod as a whole has resources of its own (Kubernetes 1.34 and newer), which then decide its class."""
    return isinstance(spec(pod).get("resources"), dict)


@lru_cache(maxsize=64)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def gpus_in(amounts: Amounts, patterns: tuple[str, ...]) -> int:
    """Sum of the resources whose whole name matches one of the patterns."""
    name_of_gpus = _any_of(patterns)
    return sum(max(amount, 0) // UNIT for name, amount in amounts.items() if name_of_gpus.fullmatch(name))


def gpus_requested(pod: Json, patterns: tuple[str, ...]) -> int:
    """GPUs that the device plugins hand to the pod. Those of resource claims (DRA) are not counted."""
    running = [*containers(pod), *filter(is_native_sidecar, init_containers(pod))]
    return sum(gpus_in(container_requests(container), patterns) for container in running)


def asks_for_shared_gpus(pod: Json, patterns: tuple[str, ...]) -> bool:
    """Whether a resource by which it gets GPUs is one that NVIDIA's device plugin offers several times for each."""
    running = [*containers(pod), *filter(is_native_sidecar, init_containers(pod))]
    return any(
        name.endswith(".shared") and gpus_in({name: amount}, patterns) > 0
        for container in running
        for name, amount in container_requests(container).items()
    )


def qos_class(pod: Json) -> QosClass:
    """Class that Kubernetes gives the pod: by its own resources if it has some, else by all its containers'."""
    whole: list[Json] = [{"resources": spec(pod).get("resources")}]
    judged = whole if has_pod_level_resources(pod) else [*containers(pod), *init_containers(pod)]
    stated = [_limits_and_requests(container.get("resources")) for container in judged]
    bounds = [_counted(limits) for limits, _ in stated]
    requests, limits = quantities.total(_counted(requests) for _, requests in stated), quantities.total(bounds)
    if not requests and not limits:
        return QosClass.BEST_EFFORT
    bounded = all(len(each) == len(_QOS_RESOURCES) for each in bounds)
    return QosClass.GUARANTEED if bounded and requests == limits else QosClass.BURSTABLE


def _counted(amounts: Amounts) -> dict[str, Amount]:
    return {name: amount for name in _QOS_RESOURCES if (amount := amounts.get(name, 0)) > 0}


def _aggregate(pod: Json, kind: int) -> dict[str, Amount]:
    """Sum of main containers and native sidecars, or the highest init phase, whichever is more (kind: see above)."""

    def amounts(container: Json) -> Amounts:
        return _limits_and_requests(container.get("resources"))[kind]

    running = quantities.total(map(amounts, containers(pod)))
    sidecars: dict[str, Amount] = {}
    starting: dict[str, Amount] = {}
    for container in init_containers(pod):
        phase = quantities.plus(sidecars, amounts(container))
        if is_native_sidecar(container):
            running, sidecars = quantities.plus(running, amounts(container)), phase
        starting = quantities.highest(starting, phase)
    own = _limits_and_requests(spec(pod).get("resources"))[kind]
    return {**quantities.highest(running, starting), **own}


def total_limits(pod: Json) -> dict[str, Amount]:
    """Limits of the whole pod, as LimitRange and ResourceQuota count them."""
    return _aggregate(pod, 0)


def total_requests(pod: Json) -> dict[str, Amount]:
    """Requests of the whole pod, as LimitRange and ResourceQuota count them."""
    return _aggregate(pod, 1)


def scheduled_requests(pod: Json) -> dict[str, Amount]:
    """Requests of the whole pod with its runtime's overhead, as the scheduler counts them."""
    return quantities.plus(total_requests(pod), quantities.parse_all(spec(pod).get("overhead")))


def common_user(pod: Json) -> int | None:
    """The uid that all containers are told to run as; None where one is told none, or they differ."""
    whole = mapping(spec(pod).get("securityContext")).get("runAsUser")
    users = {
        mapping(container.get("securityContext")).get("runAsUser", whole)
        for container in [*containers(pod), *init_containers(pod)]
    }
    user = users.pop() if len(users) == 1 else None
    return user if isinstance(user, int) and not isinstance(user, bool) else None


def has_private_token(pod: Json) -> bool:
    """Whether a volume holds a token that only its owner may read.

    The kubelet gives such a file to the uid that all containers of the pod have in common, and to root where they have
    none. A group of the pod (`fsGroup`) may always read it.
    """
    if mapping(spec(pod).get("securityContext")).get("fsGroup") is not None:
        return False
    return any(_is_private_token(mapping(volume.get("projected"))) for volume in volumes(pod))


def _is_private_token(projected: Json) -> bool:
    mode = projected.get("defaultMode", 0o644)
    sources = [mapping(source) for source in listing(projected.get("sources"))]
    has_token = any("serviceAccountToken" in source or "podCertificate" in source for source in sources)
    return has_token and isinstance(mode, int) and not mode & 0o004


def shm_volume(pod: Json) -> str | None:
    """Name of the volume in memory that the first container has at /dev/shm. None if it has none."""
    mounts: Iterable[Json] = (
        mapping(mount)
        for container in containers(pod)[:1]
        for mount in listing(container.get("volumeMounts"))
        if mapping(mount).get("mountPath") in ("/dev/shm", "/dev/shm/")  # noqa: S108 - the name of a mount
    )
    names = [text(mount.get("name")) for mount in mounts if not (mount.get("subPath") or mount.get("subPathExpr"))]
    in_memory = [
        text(volume.get("name")) for volume in volumes(pod) if mapping(volume.get("emptyDir")).get("medium") == "Memory"
    ]
    return next((name for name in names if name and name in in_memory), None)


def port_number(pod: Json, name: str, default: int) -> int:
    """Port of this name in the first container (Ray's, for KubeRay); the default where it has none."""
    for port in (mapping(port) for container in containers(pod)[:1] for port in listing(container.get("ports"))):
        number = port.get("containerPort")
        if port.get("name") == name and isinstance(number, int):
            return number
    return default
