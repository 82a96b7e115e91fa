# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""ForeignProcess: contexts on a GPU of processes that belong on another, or to nobody in the job.

A rank that touches `cuda` before it chose its device leaves a context of 300 to 900 MiB on GPU 0; seven of them take 6
GiB, and GPU 0 is the first to run out (pytorch/pytorch#49481). The same process is then listed on two GPUs, with most
of its memory on its own, and the other GPU is another rank's own. A rank that also loads its checkpoint there leaves
more; one such process may be meant to be there, several on one GPU are not. A process with much memory on three GPUs
and more works on them, however unevenly, and so does one on GPUs that are nobody else's: a program of one process that
drives eight GPUs is nobody's guest. A process whose title is none of the job's (no `ray::`, no engine, not the
entrypoint's program) is a stranger. What has one cause in a pod is one finding, which names its GPUs. Without process
lists the rule is silent.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from verl_gpumonitor.diagnosis.history import GpuHistory, History, PodHistory
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, finding, subject
from verl_gpumonitor.diagnosis.thresholds import Foreign, Thresholds
from verl_gpumonitor.model.figures import gib

REASON = "ForeignProcess"
MOST_PLACES: Final = 2
"""GPUs on which a guest may have more than a context: its own, and one on which it also loaded something."""
_OF_THE_JOB = ("ray::", "VLLM::", "sglang::", "vllm", "sglang", "trtllm", "verl", "torchrun", "multiprocessing", "ray/")

Held = Mapping[str, Sequence[int]]
"""UUID -> processes that are foreign there."""


def foreign_process(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report, for each pod, the GPUs on which somebody sits who belongs elsewhere."""
    cases = []
    for pod in history.pods.values():
        guests = _guests(pod, thresholds.foreign)
        strangers = {
            gpu.uuid: found for gpu in pod.gpus.values() if (found := _strangers(history, gpu, thresholds.foreign))
        }
        if guests:
            cases.append(_case(pod, guests, "guests", *_visitors(guests)))
        if strangers:
            cases.append(_case(pod, strangers, "strangers", *_unknown(pod, strangers)))
    return cases


def _guests(pod: PodHistory, limits: Foreign) -> Held:
    """Return processes on GPUs that are another's, while they are at home on another GPU of the pod."""
    places: dict[int, dict[str, float]] = {}
    for gpu in pod.gpus.values():
        for pid, size in gpu.processes.items():
            places.setdefault(pid, {})[gpu.uuid] = size
    homes = {pid: max(sizes, key=lambda uuid: sizes[uuid]) for pid, sizes in places.items()}
    inhabited = {uuid for pid, uuid in homes.items() if places[pid][uuid] >= limits.least_bytes}
    found: dict[str, list[int]] = {}
    for pid, sizes in places.items():
        for uuid in _visited(sizes, sizes[homes[pid]], limits):
            if uuid in inhabited:
                found.setdefault(uuid, []).append(pid)
    # One alone with more than a context may well be meant to be there; who loads there by mistake is not alone.
    kept = {
        uuid: pids if len(pids) > 1 else [pid for pid in pids if places[pid][uuid] <= limits.context_bytes]
        for uuid, pids in found.items()
    }
    return {uuid: pids for uuid, pids in kept.items() if pids}


def _visited(sizes: Mapping[str, float], at_home: float, limits: Foreign) -> Sequence[str]:
    """Return GPUs on which a process has so little beside its home that it is no place of its work."""
    if len(sizes) < 2 or sum(size > limits.context_bytes for size in sizes.values()) > MOST_PLACES:
        return ()
    return [uuid for uuid, size in sizes.items() if size >= limits.least_bytes and at_home >= limits.home_factor * size]


def _strangers(history: History, gpu: GpuHistory, limits: Foreign) -> Sequence[int]:
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


def _visitors(guests: Held) -> tuple[str, str]:
    """Return who holds and what to do."""
    number = len({pid for pids in guests.values() for pid in pids})
    who = "A process of another rank holds" if number == 1 else f"{number} processes of other ranks hold"
    return who, "have each rank choose its device (torch.cuda.set_device) before it touches CUDA"


def _unknown(pod: PodHistory, strangers: Held) -> tuple[str, str]:
    """Return who holds, by the title of the largest, and what to do."""
    sizes = {(pid, uuid): pod.gpus[uuid].processes[pid] for uuid, pids in strangers.items() for pid in pids}
    pid, uuid = max(sizes, key=lambda place: sizes[place])
    title = f"{pod.gpus[uuid].titles[pid][:80]!r}"
    others = len({pid for pid, _ in sizes}) - 1
    if not others:
        return f"{title}, which is none of the job's processes, holds", "end it, or keep it off this node's GPUs"
    return f"{title} and {others} more, which are none of the job's, hold", "end them, or keep them off these GPUs"


def _case(pod: PodHistory, held: Held, kind: str, who: str, what: str) -> Case:
    """Return one case of all GPUs of a pod, that with most of it first."""
    sizes = {uuid: sum(pod.gpus[uuid].processes[pid] for pid in pids) for uuid, pids in held.items()}
    gpus = [pod.gpus[uuid] for uuid in sorted(sizes, key=lambda uuid: (-sizes[uuid], uuid))]
    size, most = sizes[gpus[0].uuid], "up to " if len(gpus) > 1 else ""
    return Case(
        key=f"{pod.name}/{kind}",
        finding=finding(
            REASON,
            f"{who} {most}{gib(size)} on {subject(gpus)}: {what}",
            gpus=gpus,
            evidence={
                "processes": len({pid for pids in held.values() for pid in pids}),
                "gpus": len(gpus),
                "held_bytes": round(size),
                "memory_total_bytes": gpus[0].total_bytes or 0,
            },
        ),
    )


RULE = Rule(reason=REASON, judge=foreign_process, hold=lambda thresholds: thresholds.foreign.hold)
