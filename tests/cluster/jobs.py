# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs of the tests: pods as KubeRay and the training-operator make them, and whole jobs, as small as they can be."""

from typing import Any

from devcluster.versions import RAY

Object = dict[str, Any]

RAY_IMAGE = f"devcluster.local/ray:{RAY}"
BASE_IMAGE = "devcluster.local/base:1"
SLEEP = ["python3", "-c", "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"]
"""Ends at once on SIGTERM, as a well-behaved job does, so that the end of a pod measures us and not the job."""


def container(
    name: str = "main",
    *,
    image: str = BASE_IMAGE,
    command: list[str] | None = None,
    gpus: int = 1,
    requests: Object | None = None,
    limits: Object | None = None,
) -> Object:
    """A job's container. GPUs stand in its limits, as Kubernetes wants them."""
    held: Object = {**(limits or {})}
    if gpus:
        held["nvidia.com/gpu"] = str(gpus)
    resources: Object = {"limits": held} if held else {}
    if requests is not None:
        resources["requests"] = requests
    return {"name": name, "image": image, "command": command or SLEEP, "resources": resources}


def pod(
    name: str,
    *,
    labels: dict[str, str],
    containers: list[Object] | None = None,
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> Object:
    """A pod; `spec` takes further fields of its spec."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations or {}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 10,
            "containers": containers or [container()],
            **spec,
        },
    }


def ray_labels(cluster: str = "lone", node_type: str = "worker") -> dict[str, str]:
    """Labels that KubeRay gives its pods."""
    return {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster,
        "ray.io/node-type": node_type,
        "ray.io/group": "headgroup" if node_type == "head" else "gpu",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }


def torch_labels(job: str = "lone", replica_type: str = "worker") -> dict[str, str]:
    """Labels that the training-operator gives its pods."""
    return {
        "training.kubeflow.org/job-name": job,
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/replica-type": replica_type,
        "training.kubeflow.org/replica-index": "0",
    }


HOLD = """
import signal, sys, time
import simgpu
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
loads = [float(x) for x in sys.argv[2].split(",")]
used = [float(x) for x in sys.argv[3].split(",")]
gpus = [simgpu.Gpu(index) for index in range(len(simgpu.visible_gpus()))]
for gpu, load, gib in zip(gpus, loads, used):
    gpu.allocate(int(gib * 2**30))
    gpu.busy(load)
print("holding", len(gpus), "GPUs", flush=True)
time.sleep(float(sys.argv[1]))
"""
"""A program that holds GPUs: seconds, utilisation of each, GiB of each. SIGTERM ends it at once."""


CONTEXTS = """
import multiprocessing, signal, sys, time
import simgpu

def rank(own):
    gpus = [simgpu.Gpu(own), *([simgpu.Gpu(0)] if own else [])]
    gpus[0].allocate(20 * 2**30)
    if own:
        gpus[1].allocate(2**29)
    gpus[0].busy(0.7)
    time.sleep(float(sys.argv[1]))
    if own:
        gpus[1].close()
    time.sleep(3600)

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ranks = [multiprocessing.Process(target=rank, args=(own,), daemon=True) for own in range(len(simgpu.visible_gpus()))]
for one in ranks:
    one.start()
time.sleep(3600)
"""
"""A process for each GPU; all but the first have a context on GPU 0 as well, for so many seconds."""


def contexts(seconds: float) -> list[str]:
    """Command line of CONTEXTS."""
    return ["python3", "-c", CONTEXTS, str(seconds)]


def hold(seconds: float, *, utilization: list[float], used_gib: list[float]) -> list[str]:
    """Command line of HOLD."""
    joined = [",".join(map(str, values)) for values in (utilization, used_gib)]
    return ["python3", "-c", HOLD, str(seconds), *joined]


def pytorchjob(
    name: str,
    *,
    command: list[str],
    gpus: int = 4,
    workers: int = 0,
    runtime_class: str = "nvidia",
    shared_processes: bool = False,
    image: str = RAY_IMAGE,
) -> Object:
    """A PyTorchJob whose Master, and Workers where there are any, run one command."""

    def replica(count: int) -> Object:
        spec: Object = {
            "runtimeClassName": runtime_class,
            "shareProcessNamespace": shared_processes,
            "terminationGracePeriodSeconds": 10,
            "containers": [container("pytorch", image=image, command=command, gpus=gpus)],
        }
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": spec}}

    replicas = {"Master": replica(1)}
    if workers:
        replicas["Worker"] = replica(workers)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 0}, "pytorchReplicaSpecs": replicas},
    }
