# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Objects and values of the controller's tests, each with what a test wants to say of it."""

from typing import Any

from verl_gpumonitor.model.report import REPORT_FORMAT, CollectionReport, GpuReport, PodRef, RayNode, Report
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source, UnavailableReason
from verl_gpumonitor_operator.controller.jobs import GpuResources, JobKind, JobSeen
from verl_gpumonitor_operator.controller.ports import (
    ContainerPhase,
    ContainerState,
    Owner,
    PodIdentity,
    PodRecord,
)

GIB = 2**30
GPUS = GpuResources.of([r".*/gpu$"])


def metadata(name: str, *, uid: str | None = None, owner: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    reference = [{**owner, "controller": True}] if owner else []
    return {"namespace": "train", "name": name, "uid": uid or f"uid-{name}", "ownerReferences": reference, **more}


def gpu_template(gpus: int | None) -> dict[str, Any]:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    return {"template": {"spec": {"containers": [{"name": "main", "resources": resources}]}}}


def owner_of(kind: JobKind, name: str) -> Owner:
    return Owner(api_version="", kind=kind.value, name=name, uid=f"uid-{name}")


def job(kind: JobKind, name: str, **more: Any) -> JobSeen:
    values: dict[str, Any] = {"uid": f"uid-{name}", "created_at": 1000.0, **more}
    return JobSeen(kind=kind, namespace="train", name=name, **values)


def pod(name: str, owner: Owner | None, *, gpus: int = 4, injected: str | None = "1", **more: Any) -> PodRecord:
    values: dict[str, Any] = {
        "uid": f"uid-{name}",
        "labels": {},
        "phase": "Running",
        "node_name": "node-1",
        "pod_ip": "10.0.0.1",
        "images": ("user/verl:1",),
        "sidecar_image": "gpumonitor/sidecar:1" if injected else None,
        "sidecar": ContainerState(phase=ContainerPhase.RUNNING, started_at=1000.0) if injected else None,
        **more,
    }
    return PodRecord(namespace="train", name=name, owner=owner, gpus_requested=gpus, injected=injected, **values)


def gpu(uuid: str = "GPU-0", **more: Any) -> GpuReport:
    values: dict[str, Any] = {
        "state": GpuState.OK,
        "utilization": 0.5,
        "memory_used_bytes": 40 * GIB,
        "memory_total_bytes": 80 * GIB,
        **more,
    }
    return GpuReport(uuid=uuid, **values)


def report(
    name: str,
    *,
    sequence: int = 1,
    start_id: str = "start-001",
    gpus: list[GpuReport] | None = None,
    sent_at: float = 1015.0,
    started_at: float = 1000.0,
    unavailable: UnavailableReason | None = None,
    final: bool = False,
    ray_nodes: list[RayNode] | None = None,
    **more: Any,
) -> Report:
    values: dict[str, Any] = {"source": Source.NVML, "ownership": Ownership.WHOLE_NODE, **more}
    return Report(
        format=REPORT_FORMAT,
        pod=PodRef(namespace="train", name=name, uid=f"uid-{name}"),
        start_id=start_id,
        sequence=sequence,
        sent_at=sent_at,
        started_at=started_at,
        unavailable=unavailable,
        final=final,
        gpus=gpus if gpus is not None else [gpu()],
        ray_nodes=ray_nodes or [],
        collection=CollectionReport(),
        **values,
    )


def identity(name: str) -> PodIdentity:
    return PodIdentity(namespace="train", name=name, uid=f"uid-{name}")
