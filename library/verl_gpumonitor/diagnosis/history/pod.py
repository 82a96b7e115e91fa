# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The history of one pod: its GPUs, its host memory, its containers, and what runs in it."""

from typing import Final

from verl_gpumonitor.diagnosis.minutes import Minutes
from verl_gpumonitor.diagnosis.work import PodWork, Worker
from verl_gpumonitor.model.trace import HostLine, PodLine, TracePod

from .gpu import GpuHistory

RANKS_OF_ONE: Final = frozenset(("master", "worker"))
"""Kubeflow's replica types of a PyTorchJob, as its labels have them: the master is rank 0 of the same program, or the
head of a Ray cluster of which the others are nodes."""
LISTED_FROM: Final = 0.25
"""Share of its limit from which on it tells something how much of a pod's memory its listed processes make up."""


class PodHistory:
    """One pod."""

    def __init__(self, pod: TracePod, *, trains: bool) -> None:
        self.trains = trains
        """Whether its workload does nothing but train, and tells no stages."""
        self.name, self.node, self.node_role = pod.name, pod.node, pod.node_role
        self.pool = "" if trains and (pod.group or "").lower() in RANKS_OF_ONE else pod.group or ""
        """Its GPUs do the same work as those of other pods with this name."""
        self.gpus_requested = pod.gpus_requested or 0
        self.memory_limit_bytes = pod.memory_limit_bytes or None
        self.gpus: dict[str, GpuHistory] = {}
        self.work = PodWork()
        self.began_to_work = False
        """Whether a GPU was seen to begin to compute while nobody told of a process."""
        self.phase: str | None = None
        self.phase_t = 0.0
        self.ends: list[PodLine] = []
        """Containers of it that ended, the newest last."""
        self.restarts = 0
        self.library_error: str | None = None
        self.library_error_t = 0.0
        self.last_gpu_t: float | None = None
        self.last_host: HostLine | None = None
        self.first_host_t: float | None = None
        self.host_slope: float | None = None
        """Bytes a second, of the last few samples."""
        self.host_buckets = Minutes()
        """Highest memory in use."""
        self.shm_buckets = Minutes()
        self.rss: tuple[float, float] | None = None
        """Time and sum of the resident memory of the listed processes."""
        self.listed_ratio = 0.0
        """Most of the memory in use that these and /dev/shm ever made up: where they never did, the list is short."""

    def gpu_of(self, worker: Worker) -> GpuHistory | None:
        """Return the GPU of a worker: where it holds memory, else by its rank, where ranks are known for all GPUs."""
        work = self.work
        if worker.pid in work.homes:
            return self.gpus.get(work.homes[worker.pid])
        # Tasks tell the local rank; marks tell that of the whole job, and a pod has the ranks of one piece of it.
        rank, ranks = worker.rank, sorted(work.marking)
        if worker.pid is not None:
            rank, ranks = work.ranks.get(worker.pid), [*range(len(set(work.ranks.values())))]
        if rank not in ranks or len(ranks) != len(self.gpus):
            return None
        ordered = sorted(self.gpus.values(), key=lambda gpu: (gpu.index is None, gpu.index, gpu.uuid))
        return ordered[ranks.index(rank)]

    def rank_of(self, gpu: GpuHistory) -> int | None:
        """Return the rank that works on a GPU, a local one where tasks tell it; None if it is not known."""
        for pid, rank in self.work.ranks.items():
            if self.gpu_of(Worker(pid=pid)) is gpu:
                return rank
        return self.marking_rank_of(gpu)

    def marking_rank_of(self, gpu: GpuHistory) -> int | None:
        """Return the rank that marks what it does on a GPU; None if it is not known."""
        return next((rank for rank in self.work.marking if self.gpu_of(Worker(rank=rank)) is gpu), None)

    def take_host(self, line: HostLine) -> None:
        """Take a sample of the host's memory and the pod's."""
        before = self.last_host
        if before is not None and line.memory_used_bytes is not None and before.memory_used_bytes is not None:
            seconds = line.t - before.t
            slope = (line.memory_used_bytes - before.memory_used_bytes) / seconds if seconds > 0 else 0.0
            self.host_slope = slope if self.host_slope is None else 0.5 * (self.host_slope + slope)
        self.last_host = line
        self.first_host_t = line.t if self.first_host_t is None else self.first_host_t
        self.host_buckets.add(line.t, line.memory_used_bytes)
        self.shm_buckets.add(line.t, line.shm_used_bytes)
        if line.processes:
            known = [float(p.rss_bytes) for p in line.processes if p.rss_bytes]
            self.rss = (line.t, sum(known)) if known else self.rss
            limit = line.memory_limit_bytes or self.memory_limit_bytes or 0
            # Of a pod that is nearly empty as yet, one process is all.
            if known and line.memory_used_bytes and line.memory_used_bytes >= LISTED_FROM * limit:
                ratio = (sum(known) + float(line.shm_used_bytes or 0)) / line.memory_used_bytes
                self.listed_ratio = max(self.listed_ratio, min(1.0, ratio))

    @property
    def ended(self) -> bool:
        """Whether it will not run again."""
        return self.phase in ("Succeeded", "Failed")
