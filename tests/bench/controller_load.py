# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""RayJobs, their RayClusters and pods of a realistic size, without a node to run them; and the pods' reports."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from verl_gpumonitor.model.report import (
    REPORT_FORMAT,
    GpuReport,
    PodRef,
    Report,
    StageCount,
    StageNow,
    StageQuality,
    StepGpu,
    StepReport,
    StepStage,
)
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source
from verl_gpumonitor_operator.controller.ports import PodRecord
from verl_gpumonitor_operator.kube.client import KubeClient

NAMESPACE = "bench"
OPERATOR_NAMESPACE = "bench-operator"
"""Jobs in the operator's own namespace get no GPUMonitor."""
GPUS_PER_POD = 8
GIB = 2**30
CONCURRENT = 24


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much there is."""

    workloads: int
    pods_per_workload: int

    @property
    def pods(self) -> int:
        """Pods in all."""
        return self.workloads * self.pods_per_workload


async def create(client: KubeClient, load: Load, said: Callable[[str], None]) -> None:
    """Create all objects. Prints progress by `said`."""
    for namespace in (NAMESPACE, OPERATOR_NAMESPACE):
        await client.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        await _workload(client, number, load.pods_per_workload)
        done += 1
        if done % 100 == 0:
            said(f"{done} of {load.workloads} workloads made")

    await _each(range(load.workloads), one)


async def _each(numbers: Iterable[int], work: Callable[[int], Awaitable[None]]) -> None:
    queue: Iterator[int] = iter(numbers)

    async def worker() -> None:
        for number in queue:
            await work(number)

    await asyncio.gather(*(worker() for _ in range(CONCURRENT)))


async def _workload(client: KubeClient, number: int, pods: int) -> None:
    name = f"grpo-{number:04d}"
    rayjobs = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"
    clusters = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
    spec = _cluster_spec(pods)
    job = await _post(client, rayjobs, _object("RayJob", name, {"entrypoint": _entrypoint(), "rayClusterSpec": spec}))
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": name, "uid": job, "controller": True}
    cluster = await _post(client, clusters, _object("RayCluster", f"{name}-c", spec, owner=owner))
    status = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "rayClusterName": f"{name}-c"}
    await client.merge_patch(f"{rayjobs}/{name}/status", {"status": status})
    await client.merge_patch(f"{clusters}/{name}-c/status", {"status": {"state": "ready"}})
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": f"{name}-c", "uid": cluster, "controller": True}
    for index in range(pods):
        await _pod(client, f"{name}-c-worker-{index}", f"{name}-c", owner, number * pods + index)


async def _pod(client: KubeClient, name: str, cluster: str, owner: dict[str, Any], serial: int) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    await client.post(path, _pod_object(name, cluster, owner))
    await client.merge_patch(f"{path}/{name}/status", {"status": _pod_status(serial)})


async def _post(client: KubeClient, path: str, body: dict[str, Any]) -> str:
    answer = msgspec.json.decode(await client.post(path, body))
    return str(answer["metadata"]["uid"])


def _object(kind: str, name: str, spec: dict[str, Any], owner: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = {"name": name, "ownerReferences": [owner] if owner else []}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _entrypoint() -> str:
    return "python3 -m verl.trainer.main_ppo " + " ".join(f"actor_rollout_ref.some.setting_{n}={n}" for n in range(60))


def _cluster_spec(pods: int) -> dict[str, Any]:
    template = {"spec": {"containers": [_container("ray-worker", "user/verl:1")]}}
    group = {"groupName": "gpu", "replicas": pods, "rayStartParams": {}, "template": template}
    return {
        "rayVersion": "2.56.0",
        "headGroupSpec": {"template": {"spec": {"containers": []}}},
        "workerGroupSpecs": [group],
    }


def _container(name: str, image: str) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": str(GPUS_PER_POD), "cpu": "96", "memory": "1400Gi"}
    return {
        "name": name,
        "image": image,
        "env": [{"name": f"SETTING_{number}", "value": f"some value {number}"} for number in range(50)],
        "resources": {"requests": gpus, "limits": gpus},
    }


def _pod_object(name: str, cluster: str, owner: dict[str, Any]) -> dict[str, Any]:
    labels = {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster,
        "ray.io/node-type": "worker",
        "ray.io/group": "gpu",
    }
    sidecar = {"name": "gpumonitor", "image": "bench/sidecar:1", "restartPolicy": "Always"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {"gpumonitor.dev/injected": "1"},
            "ownerReferences": [owner],
        },
        "spec": {
            "containers": [_container("ray-worker", "user/verl:1")],
            "initContainers": [sidecar],
            # Nobody schedules it.
            "schedulerName": "bench",
        },
    }


def _pod_status(serial: int) -> dict[str, Any]:
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    ip = f"10.{100 + serial // 65536}.{serial // 256 % 256}.{serial % 256}"
    common = {"ready": True, "restartCount": 0, "image": "x", "imageID": "x@sha256:" + "0" * 64, "state": running}
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "hostIP": "10.0.0.1",
        "startTime": "2026-01-01T00:00:00Z",
        "conditions": [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "PodScheduled")],
        "containerStatuses": [{"name": "ray-worker", **common}],
        "initContainerStatuses": [{"name": "gpumonitor", **common}],
    }


STAGES: Final = (
    ("gen", "rollout", 0.38),
    ("reward", "reward", 0.02),
    ("old_log_prob", "actor", 0.08),
    ("ref", "ref", 0.08),
    ("values", "critic", 0.06),
    ("adv", "driver", 0.01),
    ("update_critic", "critic", 0.14),
    ("update_actor", "actor", 0.18),
    ("update_weights", "rollout", 0.03),
    ("other", "unknown", 0.02),
)
"""Stages of a usual step, with their share of it."""
STAGE_SECONDS: Final = 20.0
STEP_SECONDS: Final = 200.0


def stage_counts(age: float, used: int) -> list[StageCount]:
    """Return what a GPU has counted by stage."""
    return [
        StageCount(stage, role, age * share, age * share * 0.5, age * share * 450.0, used, 20 * GIB)
        for stage, role, share in STAGES
    ]


def step_report(number: int, end: float) -> StepReport:
    """Return a whole step of a pod with eight GPUs."""
    stages = [
        StepStage(
            stage=stage,
            role=role,
            begin=end - STEP_SECONDS,
            seconds=share * STEP_SECONDS,
            gpus=[
                StepGpu(
                    place, share * STEP_SECONDS, share * STEP_SECONDS * 0.6, 9000.0, (60 + place % 3) * GIB, 20 * GIB
                )
                for place in range(GPUS_PER_POD)
            ],
        )
        for stage, role, share in STAGES
    ]
    return StepReport(number=number, step=number, begin=end - STEP_SECONDS, end=end, stages=stages)


def steps_of(age: float, began: float) -> list[StepReport]:
    """Return the newest whole step. It is told again and again, and counts once."""
    number = int(age // STEP_SECONDS)
    return [step_report(number, began + number * STEP_SECONDS)] if number else []


def report_of(pod: PodRecord, *, sequence: int, now: float, began: float) -> Report:
    """Return a report of a busy pod with eight GPUs, whose load and memory move slowly."""
    age = now - began
    # Each pod and GPU has a phase of its own, so that statuses change as in life.
    phase = (hash(pod.uid) % 1000) / 1000.0
    owner = hash(pod.owner.uid) if pod.owner is not None else 0
    stage, role, _ = STAGES[int(age / STAGE_SECONDS + owner % 1000) % len(STAGES)]
    gpus = []
    for index in range(GPUS_PER_POD):
        wave = 0.5 + 0.4 * math.sin(age / 60.0 + 6.28 * phase + index * 0.05)
        used = int((40 + 30 * wave) * GIB)
        gpus.append(
            GpuReport(
                uuid=f"GPU-{pod.uid[:18]}-{index}",
                state=GpuState.OK,
                index=index,
                model="NVIDIA H100 80GB HBM3",
                utilization=wave,
                memory_used_bytes=used,
                memory_reserved_bytes=GIB // 2,
                memory_total_bytes=80 * GIB,
                memory_peak_bytes=72 * GIB,
                memory_recent_peak_bytes=used + GIB,
                power_watts=300.0 + 300.0 * wave,
                power_limit_watts=700.0,
                temperature_celsius=50.0 + 20.0 * wave,
                observed_seconds=age,
                busy_seconds=age * wave,
                energy_joules=age * 450.0,
                stages=stage_counts(age, used),
            )
        )
    return Report(
        format=REPORT_FORMAT,
        pod=PodRef(namespace=pod.namespace, name=pod.name, uid=pod.uid),
        start_id=f"start-{pod.uid[:18]}",
        sequence=sequence,
        sent_at=now,
        started_at=began,
        version="bench",
        source=Source.NVML,
        ownership=Ownership.WHOLE_NODE,
        gpus_requested=GPUS_PER_POD,
        gpus_visible=GPUS_PER_POD,
        gpus=gpus,
        stage=StageNow(stage=stage, role=role),
        stage_quality=StageQuality(
            source=StageSource.RAY_STATE, resolution_seconds=1.0, steps=int(age // STEP_SECONDS)
        ),
        steps=steps_of(age, began),
    )
