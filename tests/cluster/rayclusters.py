# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Small Ray clusters for the tests of stages, jobs on them, and what the jobs' own clocks say."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from devcluster.versions import RAY
from tests.cluster.kubectl import Kubectl, eventually

Object = dict[str, Any]

GCS_PORT = 6379
AGENT_PORT = 52365
GUARDED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-of-the-tests-alone"}
"""Environment of a cluster whose dashboard wants a token, as KubeRay's `authOptions` sets it from version 1.5.1 on."""
PROGRAM = "verl.trainer.main_ppo"
_WORKLOAD: Object = {"name": "workload", "configMap": {"name": "verl-stand-in"}}
_SHM: Object = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}


def _group(name: str, *, gpus: int, shared_processes: bool, environment: Mapping[str, str]) -> Object:
    """One pod template of a Ray node; the stand-in program is where Python finds it."""
    held = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    container: Object = {
        "name": name,
        "image": f"devcluster.local/ray:{RAY}",
        "workingDir": "/workload",
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {
            "requests": {"cpu": "100m", "memory": "1Gi", **held},
            "limits": {"cpu": "2", "memory": "2560Mi", **held},
        },
        "volumeMounts": [
            {"name": "workload", "mountPath": "/workload/verl/trainer"},
            {"name": "dshm", "mountPath": "/dev/shm"},
        ],
    }
    spec: Object = {
        "shareProcessNamespace": shared_processes,
        "containers": [container],
        "volumes": [_WORKLOAD, _SHM],
        **({"runtimeClassName": "nvidia"} if gpus else {}),
    }
    return {"spec": spec}


def _probes(port: int) -> Object:
    """Probes that ask nobody. KubeRay's own ask the dashboard: where there is none, a head would never be ready."""
    probe: Object = {"tcpSocket": {"port": port}, "periodSeconds": 2, "failureThreshold": 60}
    return {"readinessProbe": probe, "livenessProbe": probe}


def cluster_spec(
    *,
    workers: int = 1,
    gpus: int = 4,
    dashboard: bool = True,
    shared_processes: bool = False,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> Object:
    """Spec of a RayCluster: a CPU-only head and so many workers. `more` takes further fields, such as authOptions."""
    given = environment or {}
    head_params = {"num-cpus": "0", "num-gpus": "0", "object-store-memory": "100000000"}
    head_params["dashboard-host"] = "0.0.0.0"  # noqa: S104 - inside the pod's own network
    head = _group("ray-head", gpus=0, shared_processes=shared_processes, environment=given)
    if not dashboard:
        head_params["include-dashboard"] = "false"
    if not dashboard or "RAY_AUTH_MODE" in given:
        head["spec"]["containers"][0].update(_probes(GCS_PORT))
    worker = _group("ray-worker", gpus=gpus, shared_processes=shared_processes, environment=given)
    if "RAY_AUTH_MODE" in given:
        worker["spec"]["containers"][0].update(_probes(AGENT_PORT))
    return {
        "rayVersion": RAY,
        "headGroupSpec": {"rayStartParams": head_params, "template": head},
        "workerGroupSpecs": [
            {
                "groupName": "gpu-workers",
                "replicas": workers,
                "minReplicas": workers,
                "maxReplicas": workers,
                "rayStartParams": {"num-cpus": "16", "object-store-memory": "100000000"},
                "template": worker,
            }
        ],
        **more,
    }


def raycluster(name: str, **options: Any) -> Object:
    """A RayCluster; the options are those of `cluster_spec`."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name},
        "spec": cluster_spec(**options),
    }


def entrypoint(*, steps: int, nodes: int = 1, gpus: int = 4, more: Sequence[str] = ()) -> str:
    """verl's command line for the stand-in."""
    sizes = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}", f"trainer.total_training_steps={steps}"]
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    return " ".join(["python3", "-m", PROGRAM, *settings, *sizes, *more])


def rayjob(name: str, *, command: str, selector: Mapping[str, str] | None = None, **options: Any) -> Object:
    """A RayJob on a cluster of its own, or by `selector` on one that is there."""
    where: Object = {"clusterSelector": dict(selector)} if selector else {"rayClusterSpec": cluster_spec(**options)}
    submitter: Object = {
        "restartPolicy": "Never",
        "containers": [{"name": "ray-job-submitter", "image": f"devcluster.local/ray:{RAY}"}],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "submissionMode": "K8sJobMode",
            "backoffLimit": 0,
            "entrypoint": command,
            "shutdownAfterJobFinishes": not selector,
            "submitterPodTemplate": {"spec": submitter},
            **where,
        },
    }


def add_program(kubectl: Kubectl, namespace: str) -> None:
    """Put the stand-in program into the namespace."""
    kubectl.run("apply", "-n", namespace, "-k", "examples/workloads")


def pods(kubectl: Kubectl, cluster: str, namespace: str, node_type: str) -> list[Object]:
    """Living pods of a Ray cluster by type."""
    found = kubectl.list("pod", namespace, selector=f"ray.io/cluster={cluster},ray.io/node-type={node_type}")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def head(kubectl: Kubectl, cluster: str, namespace: str, within: float = 180) -> str:
    """Wait until the head takes drivers and all workers joined it; returns the head's name."""

    def ready() -> str | None:
        status = (kubectl.get("raycluster", cluster, namespace) or {}).get("status", {})
        heads = pods(kubectl, cluster, namespace, "head")
        return str(heads[0]["metadata"]["name"]) if status.get("state") == "ready" and heads else None

    return eventually(ready, within=within, what=f"RayCluster {cluster} ready", every=1)


def drive(kubectl: Kubectl, pod: str, namespace: str, command: str) -> subprocess.Popen[str]:
    """Start a driver on the head, as one does by hand. The caller waits for it or ends it."""
    return kubectl.popen("exec", pod, "-n", namespace, "-c", "ray-head", "--", "bash", "-c", command)


def finish(driver: subprocess.Popen[str], within: float = 240) -> str:
    """Wait for a driver; returns what it printed. Fails when the driver failed."""
    output, _ = driver.communicate(timeout=within)
    assert driver.returncode == 0, output[-3000:]
    return output


_LINE = re.compile(r"step:(\d+) - (timing_s/.*)")
_TIMING = re.compile(r"timing_s/([a-z_]+):([0-9.]+)")


def timings(console: str) -> list[dict[str, float]]:
    """verl's own clock: seconds by timer, one dictionary a step, from its console lines."""
    lines = [match for match in map(_LINE.search, console.splitlines()) if match]
    return [{name: float(seconds) for name, seconds in _TIMING.findall(line.group(2))} for line in lines]


def mean_timings(console: str) -> dict[str, float]:
    """Seconds a step by timer, the first step left out: a monitor may have come late to it."""
    steps = timings(console)[1:]
    assert steps, f"no console line of a step in:\n{console[-2000:]}"
    return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in steps[0]}
