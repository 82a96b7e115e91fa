# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""LeftoverMemory: GPU memory was held before the job's own processes began.

The holder is often not to be seen from the pod: a container of a job before that did not die, a process on the host.
What is known is the order: memory lies there, flat, on a GPU that computes nothing, and only then a first process of
the job begins. A record that starts in the middle of a run shows memory too; so either the first word of a process
must be its *begin*, or the list of processes must be there and empty, or other GPUs of the same pod must be free at
that time. Source: ovg-project/kvcached#29.
"""

from collections.abc import Sequence

from verl_gpumonitor.diagnosis.history import GpuHistory, History, PodHistory
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, finding, subject
from verl_gpumonitor.diagnosis.thresholds import Leftover, Thresholds
from verl_gpumonitor.model.figures import gib
from verl_gpumonitor.model.history import IDLE_UTILIZATION

REASON = "LeftoverMemory"


def leftover_memory(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report, for each pod, the GPUs that were not free when it began."""
    cases = []
    for pod in history.pods.values():
        held = [(gpu, size) for gpu in pod.gpus.values() if (size := _held(gpu, thresholds.leftover))]
        if held and _before_the_job(history, pod, [gpu for gpu, _ in held], thresholds.leftover):
            held.sort(key=lambda pair: (-pair[1], pair[0].uuid))
            cases.append(_case(pod, [gpu for gpu, _ in held], held[0][1]))
    return cases


def _held(gpu: GpuHistory, limits: Leftover) -> float | None:
    """Return what lay on a GPU while the job had not begun; None if it was free, or if that cannot be said."""
    before = gpu.before
    if before is None or before.lines < 2 or before.end - before.begin < limits.seconds or not gpu.total_bytes:
        return None
    flat = before.highest_bytes - before.lowest_bytes <= limits.flat_ratio * gpu.total_bytes
    quiet = before.busiest < IDLE_UTILIZATION
    least = max(limits.least_bytes, limits.least_ratio * gpu.total_bytes)
    return before.lowest_bytes if flat and quiet and before.lowest_bytes >= least else None


def _before_the_job(history: History, pod: PodHistory, held: Sequence[GpuHistory], limits: Leftover) -> bool:
    work = pod.work
    if work.first_seen is not None:
        return work.first_began
    if all(gpu.processes_t is not None and not gpu.processes for gpu in held):
        return True
    if pod.trains and history.began_here and history.running_t is not None:
        # The record covers the job's begin, and nothing of it had begun to load for so long.
        flat_until = max((gpu.before.end for gpu in held if gpu.before is not None), default=0.0)
        if flat_until - history.running_t >= limits.seconds:
            return True
    free = [gpu for gpu in pod.gpus.values() if gpu.before and gpu.before.newest_bytes < limits.least_bytes]
    return bool(free) and len(held) < len(pod.gpus)


def _case(pod: PodHistory, gpus: Sequence[GpuHistory], size: float) -> Case:
    message = (
        f"{subject(gpus)} held {gib(size)} before the job's first process began: something else has not let go of it."
        f" Look on node {pod.node or 'of the pod'} for processes of earlier jobs (nvidia-smi), end them and start anew"
    )
    evidence = {"held_bytes": round(size), "memory_total_bytes": gpus[0].total_bytes or 0, "gpus": len(gpus)}
    return Case(key=pod.name, finding=finding(REASON, message, gpus=gpus, evidence={**evidence}))


RULE = Rule(reason=REASON, judge=leftover_memory)
