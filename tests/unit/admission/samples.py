# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Pods as KubeRay and the training-operator create them and the API server hands them to a webhook; facts to go with.

Cut down to what matters for admission: labels, containers with all that could clash, volumes.
"""

import copy
from collections.abc import Mapping
from typing import Any

import msgspec

from verl_gpumonitor_operator import quantities
from verl_gpumonitor_operator.admission.facts import Cluster, LimitRangeItem, Namespace, Node, Quota, Version
from verl_gpumonitor_operator.settings import Images, Injection, Settings

Pod = dict[str, Any]

SETTINGS = Settings(
    release="gpumonitor",
    namespace="gpumonitor-system",
    images=Images(
        sidecar="registry.example/gpumonitor/sidecar@sha256:" + "5" * 64,
        operator="registry.example/gpumonitor/operator@sha256:" + "0" * 64,
    ),
)
CA_PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def amounts(**resources: str) -> dict[str, int]:
    """Resource list by keyword, with short words for the longer names."""
    names = {"gpu": "nvidia.com/gpu", "limits_cpu": "limits.cpu", "limits_memory": "limits.memory"}
    names |= {"disk": "ephemeral-storage", "requests_cpu": "requests.cpu", "requests_memory": "requests.memory"}
    return quantities.parse_all({names.get(name, name): value for name, value in resources.items()})


CLUSTER = Cluster(
    api_version=Version(1, 36),
    oldest_kubelet=Version(1, 35),
    oldest_node="gpu-node-1",
    nodes=(
        Node(name="gpu-node-1", capacity=amounts(cpu="95900m", memory="1000Gi", gpu="8", pods="110", disk="500Gi")),
    ),
    controller_address="10.96.7.7",
    ca_pem=CA_PEM,
)
NAMESPACE = Namespace(name="team-a", labels={"kubernetes.io/metadata.name": "team-a"})


def resources(*, cpu: str = "", memory: str = "", gpus: int = 0, limits: bool = True, requests: bool = True) -> Pod:
    held = {name: value for name, value in (("cpu", cpu), ("memory", memory)) if value}
    gpu = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    result: Pod = {}
    if limits and (held or gpu):
        result["limits"] = {**held, **gpu}
    if requests and (held or gpu):
        result["requests"] = {**held, **gpu}
    elif gpu:
        result["requests"] = dict(gpu)
    return result


def _ray_pod(*, role: str, group: str, container: Pod) -> Pod:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"grpo-8b-x7k2p-{group}-",
            "namespace": "team-a",
            "labels": {
                "app.kubernetes.io/created-by": "kuberay-operator",
                "app.kubernetes.io/name": "kuberay",
                "ray.io/cluster": "grpo-8b-x7k2p",
                "ray.io/group": group,
                "ray.io/identifier": f"grpo-8b-x7k2p-{role}",
                "ray.io/is-ray-node": "yes",
                "ray.io/node-type": role,
            },
            "annotations": {"ray.io/ft-enabled": "false"},
        },
        "spec": {
            "containers": [container],
            "volumes": [{"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}],
            "restartPolicy": "Always",
            "serviceAccountName": "default",
            "terminationGracePeriodSeconds": 30,
        },
    }


def ray_worker(*, gpus: int = 4, cpu: str = "8", memory: str = "64Gi") -> Pod:
    """Worker with GPUs; Guaranteed, unless cpu or memory is empty."""
    pod = _ray_pod(
        role="worker",
        group="gpu-workers",
        container={
            "name": "ray-worker",
            "image": "verlai/verl:vllm017.latest",
            "command": ["/bin/bash", "-lc", "--"],
            "args": ["ulimit -n 65536; ray start --address=grpo-8b-x7k2p-head-svc.team-a.svc:6379 --block"],
            "env": [{"name": "RAY_NODE_TYPE_NAME", "value": "gpu-workers"}],
            "ports": [{"name": "metrics", "containerPort": 8080, "protocol": "TCP"}],
            "resources": resources(cpu=cpu, memory=memory, gpus=gpus),
            "volumeMounts": [{"name": "shared-mem", "mountPath": "/dev/shm"}],
        },
    )
    pod["spec"]["initContainers"] = [
        {
            "name": "wait-gcs-ready",
            "image": "verlai/verl:vllm017.latest",
            "command": ["/bin/bash", "-c", "--"],
            "args": ["until ray health-check; do sleep 5; done"],
            "resources": resources(cpu="200m", memory="256Mi"),
        }
    ]
    return pod


def ray_head(*, gpus: int = 0, cpu: str = "2", memory: str = "8Gi") -> Pod:
    """Head; CPU-only, Guaranteed, unless told otherwise. It has no initContainers."""
    return _ray_pod(
        role="head",
        group="headgroup",
        container={
            "name": "ray-head",
            "image": "verlai/verl:vllm017.latest",
            "ports": [
                {"name": "gcs-server", "containerPort": 6379, "protocol": "TCP"},
                {"name": "dashboard", "containerPort": 8265, "protocol": "TCP"},
                {"name": "metrics", "containerPort": 8080, "protocol": "TCP"},
            ],
            "resources": resources(cpu=cpu, memory=memory, gpus=gpus),
            "volumeMounts": [{"name": "shared-mem", "mountPath": "/dev/shm"}],
        },
    )


def ray_submitter() -> Pod:
    """Pod of the Job that submits a RayJob: no Ray node, no cluster label."""
    pod = _ray_pod(role="head", group="headgroup", container={"name": "ray-job-submitter", "image": "rayproject/ray"})
    pod["metadata"]["labels"] = {
        "app.kubernetes.io/created-by": "kuberay-operator",
        "batch.kubernetes.io/job-name": "grpo-8b",
        "ray.io/originated-from-crd": "RayJob",
        "ray.io/originated-from-cr-name": "grpo-8b",
    }
    pod["spec"]["restartPolicy"] = "Never"
    return pod


def redis_cleanup() -> Pod:
    """Pod of KubeRay's clean-up Job: made from the head's template, GPUs and all, with a node type of its own."""
    pod = ray_head(gpus=1)
    pod["metadata"]["labels"]["ray.io/node-type"] = "redis-cleanup"
    pod["spec"]["restartPolicy"] = "Never"
    return pod


def pytorch_pod(*, role: str = "master", gpus: int = 4) -> Pod:
    """Pod of a PyTorchJob; Burstable: it has a memory limit alone."""
    labels = {
        "training.kubeflow.org/job-name": "verl-sft",
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/replica-index": "0",
        "training.kubeflow.org/replica-type": role,
    }
    if role == "master":
        labels["training.kubeflow.org/job-role"] = "master"
    spec: Pod = {
        "containers": [
            {
                "name": "pytorch",
                "image": "verlai/verl:vllm017.latest",
                "ports": [{"name": "pytorchjob-port", "containerPort": 23456, "protocol": "TCP"}],
                "resources": resources(memory="800Gi", gpus=gpus),
            }
        ],
        "restartPolicy": "OnFailure",
    }
    if role == "worker":
        spec["initContainers"] = [{"name": "init-pytorch", "image": "alpine:3.10"}]
    metadata = {"name": f"verl-sft-{role}-0", "namespace": "team-a", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def best_effort(pod: Pod) -> Pod:
    """The same pod with nothing but GPUs in its resources."""
    changed = copy.deepcopy(pod)
    for container in [*changed["spec"]["containers"], *changed["spec"].get("initContainers", [])]:
        held = container.get("resources", {})
        container["resources"] = {
            kind: {name: value for name, value in amount.items() if name not in ("cpu", "memory")}
            for kind, amount in held.items()
        }
    return changed


def with_spec(pod: Pod, **fields: Any) -> Pod:
    return {**pod, "spec": {**pod["spec"], **fields}}


def with_labels(pod: Pod, labels: Mapping[str, str]) -> Pod:
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "labels": {**metadata["labels"], **labels}}}


def with_labels_removed(pod: Pod, *names: str) -> Pod:
    kept = {name: value for name, value in pod["metadata"]["labels"].items() if name not in names}
    return {**pod, "metadata": {**pod["metadata"], "labels": kept}}


def with_annotations(pod: Pod, annotations: Mapping[str, str] | None) -> Pod:
    return {**pod, "metadata": {**pod["metadata"], "annotations": annotations}}


def with_container(pod: Pod, container: Pod, *, init: bool = False) -> Pod:
    key = "initContainers" if init else "containers"
    return with_spec(pod, **{key: [*pod["spec"].get(key, []), container]})


def namespace(
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    limits: tuple[LimitRangeItem, ...] = (),
    quotas: tuple[Quota, ...] = (),
) -> Namespace:
    return Namespace(name="team-a", labels=labels or {}, annotations=annotations or {}, limits=limits, quotas=quotas)


def cluster(**changes: Any) -> Cluster:
    return msgspec.structs.replace(CLUSTER, **changes)


def injection(**changes: Any) -> Settings:
    return msgspec.structs.replace(SETTINGS, injection=msgspec.structs.replace(Injection(), **changes))
