# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pods of one owner, a RayCluster or a PyTorchJob, and what its head says of the others. Pure."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from verl_gpumonitor.model.marks import EVERY_NODE
from verl_gpumonitor.model.report import ClusterStages, PodStages, RayJobInfo, Report
from verl_gpumonitor.model.stages import StageSource

from .podtrack import PodTrack
from .ports import PodRecord
from .relay import ClusterRelay
from .totals import Totals, sum_of

DRIVER_SECONDS: Final = 45.0
"""A driver that has marked nothing for longer leaves it to what the head says."""


class GroupKey(NamedTuple):
    """Identity of a group: pods of another namespace that name the same owner are another one."""

    namespace: str
    uid: str
    """Of the owner."""


@dataclass(kw_only=True, slots=True)
class PodGroup:
    """The pods of one owner."""

    uid: str
    kind: str
    namespace: str
    name: str
    pods: dict[str, PodTrack] = field(default_factory=dict)
    """By uid."""
    folded: Totals = field(default_factory=Totals)
    """Sum over pods that are gone."""
    node_gpus: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """GPUs by node IP, as the head's dashboard lists them."""
    relay: ClusterRelay = field(default_factory=ClusterRelay)
    """Stages of the cluster's nodes, as the head says them."""
    driver: ClusterRelay = field(default_factory=ClusterRelay)
    """The same, as the driver marks it in a pod that is not the head."""
    same_addresses: bool = False
    """The head calls its nodes by the IPs that their pods have."""
    ray_jobs: tuple[RayJobInfo, ...] = ()
    """Ray's own list of jobs, as the head said it last."""
    workload: str | None = None
    """Uid of the workload that it counts for; None while that is not known."""
    borrowers: set[str] = field(default_factory=set)
    """Uids of RayJobs that run in this RayCluster without owning it."""
    leavers: set[str] = field(default_factory=set)
    """Uids of those that have ended, whose last stages and steps are still being told."""

    @property
    def key(self) -> GroupKey:
        """Its identity."""
        return GroupKey(self.namespace, self.uid)

    def totals(self) -> Totals:
        """Sum over all pods, gone and live."""
        return sum_of([self.folded, *(pod.totals(gone=False) for pod in self.pods.values())])

    def hear(self, report: Report, received_at: float) -> None:
        """Take what the head of the cluster says of its other pods."""
        if report.ray_nodes:
            self.node_gpus = {node.node_ip: tuple(node.gpu_uuids) for node in report.ray_nodes}
            self.relay.name(self.node_gpus)
        if report.cluster_stages is not None:
            self.relay.take(report.cluster_stages, received_at)
        if report.ray_jobs:
            self.ray_jobs = tuple(report.ray_jobs)

    def hear_driver(self, said: ClusterStages, received_at: float) -> None:
        """Take what the driver marks, from whichever pod it runs in."""
        if said.source is StageSource.MARKS:
            self.driver.take(said, received_at)

    def gpus_of(self, pod: PodRecord) -> tuple[str, ...] | None:
        """Return the pod's GPUs as the head names them.

        None while it does not, or where two pods share an IP (hostNetwork), since then it cannot tell them apart.
        """
        if pod.pod_ip is None or pod.pod_ip not in self.node_gpus:
            return None
        return self.node_gpus[pod.pod_ip] if self._alone_at(pod.pod_ip) else None

    def stages_of(self, pod: PodRecord, *, now: float) -> PodStages | None:
        """Return what the head says of a pod's stages.

        None while it says nothing, of pods that share an IP, and while it has called none of our pods by the IP that
        we know: its silence about one of them would then mean nothing.
        """
        marked = self._marked(pod, now=now)
        if marked is not None:
            return marked
        named = self.relay.named
        if pod.pod_ip is None or not named or not self._alone_at(pod.pod_ip):
            return None
        self.same_addresses = self.same_addresses or any(track.record.pod_ip in named for track in self.pods.values())
        means = self.same_addresses or EVERY_NODE in self.relay.nodes
        return self.relay.word_for(pod.pod_ip, now=now) if means else None

    def _marked(self, pod: PodRecord, *, now: float) -> PodStages | None:
        """Return what the driver says of every pod; None while it has been silent for a while."""
        if now - self.driver.heard_at > DRIVER_SECONDS or EVERY_NODE not in self.driver.nodes:
            return None
        return self.driver.word_for(pod.pod_ip or "", now=now)

    def _alone_at(self, ip: str) -> bool:
        return sum(1 for track in self.pods.values() if track.record.pod_ip == ip and track.record.live) == 1
