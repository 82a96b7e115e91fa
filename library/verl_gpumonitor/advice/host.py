# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Advice about a pod's host memory and its /dev/shm: fields of the pod first, then what of verl fills it. Pure."""

import math
from typing import Final

from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.findings import Advice

from . import levers
from .case import GROWTH_STEPS, Case, Found, say
from .catalogue import MEGATRON

_TEMPLATES: Final = {
    "RayJob": "spec.rayClusterSpec.{group}.template.spec",
    "RayCluster": "spec.{group}.template.spec",
    "PyTorchJob": "spec.pytorchReplicaSpecs.*.template.spec",
    "TrainJob": "spec.podTemplateOverrides[].spec",
}
_LEAST_SHM: Final = 8 * GIB
"""Loader workers and NCCL within a node want gigabytes; the container runtime's default is 64 MiB."""


def pod_field(case: Case, field: str) -> str:
    """Return where a field of the pod's spec is in the job's object: `spec.rayClusterSpec.workerGroupSpecs[]…`."""
    pods = case.finding.scope.pods
    head = bool(pods) and all("-head-" in pod or pod.endswith("-head") for pod in pods)
    template = _TEMPLATES.get(case.context.kind or "", "spec")
    return f"{template.format(group='headGroupSpec' if head else 'workerGroupSpecs[]')}.{field}"


def host_memory_risk(case: Case) -> Found:
    """Yield what gives the pod host memory, or takes less of it. Never a change that only helps the GPU."""
    yield _larger_limit(case)
    if case.figure("gpus_requested") != 0:
        yield from _less_offload(case)
    yield _fewer_loaders(case)
    if case.stage == "save_checkpoint":
        yield say(
            "A checkpoint gathers the optimizer's state in the host memory of one rank: save it sharded, or less of"
            " it (the checkpoint's save_contents without optimizer)",
            reason="host memory is highest while a checkpoint is saved",
            price="a sharded checkpoint needs as many ranks to be read, or a merge",
        )
    yield say(
        "See which processes hold it (ps in the pod, rss): workers with offloaded states, the driver's batch, Ray's"
        " object store (a share of the pod's memory unless object_store_memory says otherwise), loader workers",
        reason=_used_text(case),
        confidence="low",
    )


def _less_offload(case: Case) -> Found:
    """What is offloaded lies on the hosts of the GPUs: a head without any holds none of it."""
    root = levers.offload_root(case, "actor")
    yield levers.keep_on_gpu(case, root, "optimizer")
    yield levers.keep_on_gpu(case, root, "param")
    if case.config.flavour == MEGATRON:
        yield levers.keep_on_gpu(case, root, "grad")


def _larger_limit(case: Case) -> Advice:
    used, limit = (
        case.figure("host_used_bytes", "used_bytes", "peak_bytes"),
        case.figure("host_limit_bytes", "limit_bytes"),
    )
    field = pod_field(case, "containers[].resources.limits.memory")
    if used is None:
        return say(
            f"Raise {field}, requests with it", parameter=field, reason=_used_text(case), price="a larger node share"
        )
    if limit is not None and case.figure("killed"):
        # It reached the limit, whatever the last sample before that saw.
        used = max(used, limit)
    growth = max(case.figure("growth_bytes_per_step", "host_growth_bytes_per_step") or 0.0, 0.0)
    wanted = max(used * 1.2 + GROWTH_STEPS * growth, (limit or 0.0) * 1.05)
    value = f"{math.ceil(wanted / GIB / 16) * 16}Gi"
    return Advice(
        parameter=field,
        current=f"{limit / GIB:.0f}Gi" if limit else None,
        suggested=value,
        text=f"Raise {field} to {value}, requests with it: what is in use, a fifth more, and some steps of growth",
        reason=_used_text(case),
        price="the pod needs a node with that much memory free",
        confidence="medium" if limit else "low",
    )


def _used_text(case: Case) -> str:
    used, limit = (
        case.figure("host_used_bytes", "used_bytes", "peak_bytes"),
        case.figure("host_limit_bytes", "limit_bytes"),
    )
    if used is None or limit is None:
        return "the pod's host memory comes near its limit"
    return f"{used / GIB:.0f} of {limit / GIB:.0f} GiB of host memory are in use"


def shared_memory_risk(case: Case) -> Found:
    """Yield how /dev/shm gets larger, and what takes less of it."""
    used, size = case.figure("shm_used_bytes", "used_bytes"), case.figure("shm_size_bytes", "size_bytes")
    field = pod_field(case, "volumes[].emptyDir.sizeLimit")
    wanted = max(_LEAST_SHM, 2.0 * max(used or 0.0, size or 0.0))
    value = f"{math.ceil(wanted / GIB)}Gi"
    known = f"{used / GIB:.2f} of {size / GIB:.2f} GiB of /dev/shm are in use" if used is not None and size else ""
    yield Advice(
        parameter=field,
        current=_size_text(size),
        suggested=value,
        text=(
            f"Mount an emptyDir with medium Memory and sizeLimit {value} at /dev/shm of the container; without one"
            " the container runtime gives 64 MiB, and a full /dev/shm ends processes with a bus error"
        ),
        reason=known,
        price="what is written there counts as the pod's memory: its limit must have room for it",
        confidence="high",
    )
    yield _fewer_loaders(case)


def _size_text(size: float | None) -> str | None:
    if not size or size < 2**20:
        return None
    return f"{size / GIB:.0f}Gi" if size >= GIB else f"{size / 2**20:.0f}Mi"


def _fewer_loaders(case: Case) -> Advice | None:
    key = "data.dataloader_num_workers"
    current = case.config.integer(key)
    if current is None or current < 2:
        return None
    value = current // 2
    text = f"Lower {key} from {current} to {value}: each loader worker is a process with batches and data of its own"
    return case.change(
        key, str(value), text=text, reason=f"{current} loader workers", price="loading may become the bottleneck"
    )
