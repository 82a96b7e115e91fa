# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""ForeignProcess: contexts on a GPU of processes that belong on another, or to nobody in the job.

A rank that touches `cuda` before it chose its device leaves a context of 300 to 900 MiB on GPU 0; seven of them take 6
GiB, and GPU 0 is the first to run out (pytorch/pytorch#49481). The same process is then listed on two GPUs, with most
of its memory on its own. A process that spreads about evenly over several GPUs is meant to. A process whose title is
none of the job's (no `ray::`, no engine, not the entrypoint's program) is a stranger. Without process lists the rule
is silent.
"""

from collections.abc import Sequence

from verl_gpumonitor.diagnosis.history import GpuHistory, History, PodHistory
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, finding, gpu_name
from verl_gpumonitor.diagnosis.thresholds import Foreign, Thresholds
from verl_gpumonitor.model.figures import gib

REASON = "ForeignProcess"
_OF_THE_JOB = ("ray::", "VLLM::", "sglang::", "vllm", "sglang", "trtllm", "verl", "torchrun", "multiprocessing", "ray/")


def foreign_process(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report each GPU on which somebody sits who belongs elsewhere."""
    cases = []
    for pod in history.pods.values():
        for gpu in pod.gpus.values():
            guests = _guests(pod, gpu, thresholds.foreign)
            strangers = _strangers(history, gpu, thresholds.foreign)
            if guests or strangers:
                cases.append(_case(gpu, guests, strangers))
    return cases


def _guests(pod: PodHistory, gpu: GpuHistory, limits: Foreign) -> list[int]:
    """Return processes that are at home on another GPU of the pod."""
    return [
        pid
        for pid, size in gpu.processes.items()
        if size >= limits.least_bytes
        and any(
            other.processes.get(pid, 0.0) >= limits.home_factor * size
            for other in pod.gpus.values()
            if other is not gpu
        )
    ]


def _strangers(history: History, gpu: GpuHistory, limits: Foreign) -> list[int]:
    """Return processes whose title is none of a job's, beside others whose is; all or nobody tells nothing."""
    own = [pid for pid in gpu.processes if _of_the_job(history, gpu.titles.get(pid))]
    if not own:
        return []
    return [
        pid
        for pid, size in gpu.processes.items()
        if pid not in own and gpu.titles.get(pid) and size >= limits.least_bytes
    ]


def _of_the_job(history: History, title: str | None) -> bool:
    if title is None:
        return False
    words = [word for word in title.split() if word.endswith(".py") or "." in word]
    return any(mark in title for mark in _OF_THE_JOB) or any(word in history.entrypoint for word in words)


def _case(gpu: GpuHistory, guests: Sequence[int], strangers: Sequence[int]) -> Case:
    size = sum(gpu.processes[pid] for pid in (*guests, *strangers))
    if guests:
        who = f"{len(guests)} processes of other ranks" if len(guests) > 1 else "a process of another rank"
        what = "have each rank choose its device (torch.cuda.set_device) before it touches CUDA"
    else:
        who = f"{gpu.titles[strangers[0]][:80]!r}, which is none of the job's processes,"
        what = "end it, or keep it off this node's GPUs"
    holds = "hold" if len(guests) > 1 else "holds"
    message = f"{who} {holds} {gib(size)} on {gpu_name(gpu)}: {what}"
    return Case(
        key=gpu.uuid,
        finding=finding(
            REASON,
            message[0].upper() + message[1:],
            gpus=(gpu,),
            evidence={
                "processes": len(guests) + len(strangers),
                "held_bytes": round(size),
                "memory_total_bytes": gpu.total_bytes or 0,
            },
        ),
    )


RULE = Rule(reason=REASON, judge=foreign_process, hold=lambda thresholds: thresholds.foreign.hold)
