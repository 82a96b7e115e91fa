# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The container and the volume that a pod gets: their exact form, and why each part has to be as it is. Pure."""

from typing import Any, Final

import verl_gpumonitor
from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator import settings as operator_settings
from verl_gpumonitor_operator.command import COMMAND

from . import pods
from .facts import Cluster, Namespace
from .pods import Family, Json, QosClass

OPENSHIFT_UID_RANGE: Final = "openshift.io/sa.scc.uid-range"
"""Where a namespace carries it, OpenShift picks the uid, and refuses a pod that names another."""

USER_ID: Final = 65532
"""Our images' own uid and gid; another than the job's, so that neither can signal or trace the other."""

MAX_CA_BYTES: Final = 65_536
"""Longest bundle in the environment. Linux starts no program with a variable of 128 KiB, and such a sidecar would hold
its pod; ours has some 2 KiB."""
REPORT_PORT: Final = 8443
RAY_METRICS_PORT: Final = 8080
RAY_DASHBOARD_PORT: Final = 8265

VERSION: Final = verl_gpumonitor.__version__

Resources = dict[str, dict[str, str]]


def resource_choices(pod: Json, sizes: operator_settings.SidecarResources) -> tuple[Resources, ...]:
    """Resources that keep the pod's QoS class, best first. An empty one means that none are to be set.

    A pod with resources of its own has its class from those alone, and its containers may not exceed them.
    """
    guaranteed = {"cpu": sizes.guaranteed.cpu, "memory": sizes.guaranteed.memory}
    equal: Resources = {"requests": guaranteed, "limits": guaranteed}
    qos = pods.qos_class(pod)
    if pods.has_pod_level_resources(pod) or qos is QosClass.BEST_EFFORT:
        return ({},)
    if qos is QosClass.GUARANTEED:
        return (equal,)
    limits = {"cpu": sizes.burstable_limits.cpu, "memory": sizes.burstable_limits.memory}
    # A request that is left out would become the limit.
    return ({"requests": {"cpu": "0", "memory": "0"}, "limits": limits}, equal)


def container(
    pod: Json,
    *,
    settings: operator_settings.Settings,
    namespace: Namespace,
    cluster: Cluster,
    resources: Resources,
) -> dict[str, Any]:
    """Return the sidecar. It has no probes: one that never gets ready would keep its job waiting for ever."""
    built: dict[str, Any] = {
        "name": wiring.CONTAINER_NAME,
        "image": settings.images.sidecar,
        "imagePullPolicy": str(settings.images.pull_policy),
        "command": list(COMMAND),
        "restartPolicy": "Always",
        "env": _environment(pod, settings=settings, cluster=cluster),
        "volumeMounts": _mounts(pod),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _security_context(pod, namespace),
    }
    if _own_port(pod):
        built["ports"] = [
            {"name": wiring.METRICS_PORT_NAME, "containerPort": wiring.METRICS_PORT, "protocol": "TCP"},
        ]
    if resources:
        built["resources"] = resources
    return built


def token_volume() -> dict[str, Any]:
    """Return the volume with the token for reports: bound to the pod, good for our audience alone."""
    token = {"audience": wiring.TOKEN_AUDIENCE, "expirationSeconds": 3600, "path": "token"}
    return {"name": wiring.TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}


def _own_port(pod: Json) -> bool:
    """Whether the usual port can be declared: not on the node's network, and nobody else in the pod has it."""
    taken = any(port.get("containerPort") == wiring.METRICS_PORT for port in pods.ports(pod))
    return not taken and not pods.uses_host_network(pod)


def _mounts(pod: Json) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": wiring.TOKEN_VOLUME, "mountPath": wiring.TOKEN_DIRECTORY, "readOnly": True},
    ]
    shm = pods.shm_volume(pod)
    if shm is not None:
        mounts.append({"name": shm, "mountPath": wiring.SHM_PATH, "readOnly": True})
    return mounts


def _security_context(pod: Json, namespace: Namespace) -> dict[str, Any]:
    """Return what the *restricted* Pod Security Standard wants, written out, whatever the pod as a whole says.

    A pod that runs as root as a whole would hand that down to a sidecar without uid, which may not be root and could
    then never be created. OpenShift lets such a pod in only where it lets any uid in.
    """
    context: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    is_root = pods.mapping(pods.spec(pod).get("securityContext")).get("runAsUser") == 0
    common = pods.common_user(pod)
    if common and pods.has_private_token(pod):
        # Another uid in the pod would take the job's own token from it.
        return context | {"runAsUser": common}
    if is_root or OPENSHIFT_UID_RANGE not in namespace.annotations:
        context |= {"runAsUser": USER_ID, "runAsGroup": USER_ID}
    return context


def _environment(pod: Json, *, settings: operator_settings.Settings, cluster: Cluster) -> list[dict[str, Any]]:
    from_pod = {
        wiring.ENV_POD_NAMESPACE: "metadata.namespace",
        wiring.ENV_POD_NAME: "metadata.name",
        wiring.ENV_POD_UID: "metadata.uid",
        wiring.ENV_POD_IP: "status.podIP",
        wiring.ENV_NODE_NAME: "spec.nodeName",
    }
    gpus = pods.gpus_requested(pod, settings.injection.gpu_resources)
    shared_gpus = pods.asks_for_shared_gpus(pod, settings.injection.gpu_resources) or (
        gpus > 0 and any(layout.may_show(gpus) for layout in cluster.gpu_layouts)
    )
    shares = pods.shares_processes(pod) or will_share_processes(pod, settings.injection)
    values = {
        wiring.ENV_GPUS_REQUESTED: str(gpus),
        **({wiring.ENV_GPUS_SHARED: "1"} if shared_gpus else {}),
        wiring.ENV_RAY_NODE_TYPE: "" if pods.family(pod) in (Family.KUBEFLOW, None) else str(pods.family(pod)),
        wiring.ENV_SHARED_PROCESSES: "1" if shares else "0",
        wiring.ENV_SHM_PATH: wiring.SHM_PATH if pods.shm_volume(pod) else "",
        **_report_address(settings, cluster),
        wiring.ENV_REPORT_INTERVAL: _number(settings.report.interval_seconds),
        wiring.ENV_SAMPLE_INTERVAL: _number(settings.report.sample_interval_seconds),
        wiring.ENV_METRICS_PORT: str(wiring.METRICS_PORT) if _own_port(pod) else "0",
        **_ray_addresses(pod),
    }
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in from_pod.items()]
    return [*fields, *({"name": name, "value": value} for name, value in values.items())]


def _report_address(settings: operator_settings.Settings, cluster: Cluster) -> dict[str, str]:
    """Return the controller by address and not by name, so that no DNS is needed; its certificate has the name."""
    if cluster.controller_address is None or cluster.ca_pem is None or len(cluster.ca_pem) > MAX_CA_BYTES:
        return {wiring.ENV_REPORT_URL: ""}
    address = cluster.controller_address
    host = f"[{address}]" if ":" in address else address
    return {
        wiring.ENV_REPORT_URL: f"https://{host}:{REPORT_PORT}/v1/report",
        wiring.ENV_REPORT_SERVER_NAME: settings.controller_server_name,
        wiring.ENV_REPORT_CA: cluster.ca_pem,
    }


def _ray_addresses(pod: Json) -> dict[str, str]:
    """Where Ray answers in this pod. On the node's network it may be another pod's Ray that answers: it is not asked.

    The dashboard is on the head alone.
    """
    kind = pods.family(pod)
    if kind in (Family.KUBEFLOW, None) or pods.uses_host_network(pod):
        return {wiring.ENV_RAY_METRICS_URL: "", wiring.ENV_RAY_DASHBOARD_URL: ""}
    metrics = pods.port_number(pod, "metrics", RAY_METRICS_PORT)
    dashboard = pods.port_number(pod, "dashboard", RAY_DASHBOARD_PORT)
    return {
        wiring.ENV_RAY_METRICS_URL: f"http://127.0.0.1:{metrics}/metrics",
        wiring.ENV_RAY_DASHBOARD_URL: f"http://127.0.0.1:{dashboard}" if kind is Family.RAY_HEAD else "",
    }


def will_share_processes(pod: Json, injection: operator_settings.Injection) -> bool:
    """Whether the process namespace is to be shared: when that is switched on, and the pod says nothing about it."""
    silent = pods.spec(pod).get("shareProcessNamespace") is None
    return injection.share_process_namespace and silent and not pods.uses_host_pid(pod)


def _number(value: float) -> str:
    return f"{value:g}"
