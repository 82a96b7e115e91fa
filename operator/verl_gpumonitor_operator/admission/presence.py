# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar in a pod that already has it: whether it still suits the pod, and how it changes or goes. Pure.

The API server asks a second time when another webhook changed the pod after us. That change may have given the pod
another QoS class, and resources that kept the first one may break the second.
"""

from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator import settings as operator_settings
from verl_gpumonitor_operator.quantities import Amounts

from . import jsonpatch, pods, sidecar
from .jsonpatch import Operation, pointer
from .pods import Json
from .sidecar import Resources


def position(pod: Json) -> int | None:
    """Index of our sidecar among the init containers. None where it is not there, or is not said to be ours."""
    if wiring.ANNOTATION_INJECTED not in pods.annotations(pod):
        return None
    names = [container.get("name") for container in pods.init_containers(pod)]
    return names.index(wiring.CONTAINER_NAME) if wiring.CONTAINER_NAME in names else None


def without(pod: Json) -> Json:
    """Return the pod as it would be had we left it alone."""
    bare: Json = jsonpatch.applied(pod, removal(pod))
    return bare


def removal(pod: Json) -> tuple[Operation, ...]:
    """Return what takes container, volume and annotation away. Empty where the sidecar is not in the pod."""
    index = position(pod)
    if index is None:
        return ()
    paths = [pointer("spec", "initContainers", str(index))]
    volumes = [volume.get("name") for volume in pods.volumes(pod)]
    if wiring.TOKEN_VOLUME in volumes and not _is_mounted_by_others(pod, index):
        paths.append(pointer("spec", "volumes", str(volumes.index(wiring.TOKEN_VOLUME))))
    paths.append(pointer("metadata", "annotations", wiring.ANNOTATION_INJECTED))
    return tuple(Operation(op="remove", path=path) for path in paths)


def resized(pod: Json, resources: Resources) -> tuple[Operation, ...]:
    """Return what gives the sidecar other resources. Empty where it is not in the pod."""
    index = position(pod)
    # `add` replaces a member that is there, and needs none.
    path = pointer("spec", "initContainers", str(index), "resources")
    return () if index is None else (Operation(op="add", path=path, value=resources),)


def off_the_host(pod: Json) -> tuple[Operation, ...]:
    """Return what takes the sidecar off the node's ports, where the pod is on the node's network by now.

    The API server makes each declared port one of the node's there, and a second such pod would find no node; and Ray
    on the node's loopback may be another pod's.
    """
    index = position(pod)
    if index is None or not declares_ports_of_the_host(pod):
        return ()
    held = pods.init_containers(pod)[index]
    root = ("spec", "initContainers", str(index))
    values = {wiring.ENV_METRICS_PORT: "0", wiring.ENV_RAY_METRICS_URL: "", wiring.ENV_RAY_DASHBOARD_URL: ""}
    operations = [Operation(op="remove", path=pointer(*root, "ports"))]
    for number, variable in enumerate(map(pods.mapping, pods.listing(held.get("env")))):
        name = pods.text(variable.get("name"))
        if name in values:
            entry = {"name": name, "value": values[name]}
            operations.append(Operation(op="replace", path=pointer(*root, "env", str(number)), value=entry))
    return tuple(operations)


def declares_ports_of_the_host(pod: Json) -> bool:
    """Whether our sidecar declares a port in a pod that is on the node's network."""
    index = position(pod)
    return index is not None and pods.uses_host_network(pod) and bool(pods.init_containers(pod)[index].get("ports"))


def holds_for_ever(pod: Json) -> bool:
    """Whether our sidecar is an ordinary init container by now, whose end the job would wait for in vain.

    A webhook that was built with types from before 1.28 writes a pod back without the fields that it does not know.
    """
    index = position(pod)
    return index is not None and not pods.is_native_sidecar(pods.init_containers(pod)[index])


def is_settled(pod: Json, sizes: operator_settings.SidecarResources) -> bool:
    """Whether the sidecar may stay as it is, beside the resources and in the network that the pod has by now.

    Where another webhook gave the sidecar resources that keep the class too, they are that webhook's business.
    """
    index = position(pod)
    if index is None or declares_ports_of_the_host(pod) or holds_for_ever(pod):
        return False
    bare = without(pod)
    if pods.qos_class(bare) is pods.qos_class(pod) and not pods.has_pod_level_resources(pod):
        return True
    held = _compute(pods.init_containers(pod)[index])
    return any(_compute({"resources": choice}) == held for choice in sidecar.resource_choices(bare, sizes))


def _compute(container: Json) -> list[Amounts]:
    """CPU and memory that a container requests and is limited to; a LimitRange may have added disk meanwhile."""
    both = pods.container_requests(container), pods.container_limits(container)
    return [{name: amount for name, amount in each.items() if name in ("cpu", "memory")} for each in both]


def _is_mounted_by_others(pod: Json, index: int) -> bool:
    """Whether the pod would be refused without the token's volume."""
    starting = pods.init_containers(pod)
    others = [*pods.containers(pod), *starting[:index], *starting[index + 1 :]]
    mounts = [pods.mapping(mount) for container in others for mount in pods.listing(container.get("volumeMounts"))]
    return any(mount.get("name") == wiring.TOKEN_VOLUME for mount in mounts)
