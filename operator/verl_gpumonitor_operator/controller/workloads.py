# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which pods belong to which workload, and what they have reported. Pure: no I/O, and time is an argument.

A pod belongs to whoever its controlling ownerReference names by uid, never by label: Pod -> RayCluster -> RayJob, or
the RayCluster itself where nobody made it for a job; Pod -> PyTorchJob. A RayJob that is tried again has one
RayCluster after another, which all count for it. A RayJob that runs in a RayCluster made by somebody else
(clusterSelector) borrows its pods: they count for the cluster, and for the job from its beginning to its end.

An ownerReference names no namespace, since an owner is in the namespace of what it owns; whoever may make pods
elsewhere can write the uid of somebody's cluster into them. So a reference holds within its own namespace alone.

Objects may come in any order. Pods are kept in groups by namespace and owner's uid; a group is joined with its workload
as soon as both are known.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from verl_gpumonitor.model.kubernetes import RAY_GROUP, RAY_NODE_TYPE
from verl_gpumonitor.model.marks import EVERY_NODE
from verl_gpumonitor.model.report import ClusterStages, PodStages, RayJobInfo, RayStage, Report
from verl_gpumonitor.model.stages import StageSource

from .jobs import JobKind, JobSeen
from .ledger import PodLedger, total_of
from .ledger_text import WrittenLedger
from .ports import AcceptResult, PodIdentity, PodRecord
from .relay import ClusterRelay
from .steps import PodSteps, PoolSteps, pace_of
from .telemetry import Telemetry
from .totals import Totals, sum_of
from .xids import PodXids

WINDOW_SECONDS: Final = 60.0
"""Load is judged over this time, by differences of counters."""
LATE_SECONDS: Final = 120.0
"""A report that comes so much later than the job's end says nothing of the time before it."""
DRIVER_SECONDS: Final = 45.0
"""A driver that has marked nothing for longer leaves it to what the head says."""
GROUP_KINDS: Final = (JobKind.RAY_CLUSTER.value, JobKind.PYTORCH_JOB.value)
HEAD: Final = "head"


class Point(NamedTuple):
    """Counters of a pod's GPUs at one time: uuid -> (observed seconds, busy seconds)."""

    at: float
    gpus: Mapping[str, tuple[float, float]]


@dataclass(kw_only=True, slots=True)
class PodTrack:
    """One live pod of a group."""

    record: PodRecord
    ledger: PodLedger = field(default_factory=PodLedger)
    telemetry: Telemetry | None = None
    history: deque[Point] = field(default_factory=deque)
    """Oldest first; spans `WINDOW_SECONDS`, or less while the sidecar is young."""
    steps: PodSteps = field(default_factory=PodSteps)
    xids: PodXids = field(default_factory=PodXids)
    closed: bool = False
    """A report from after the job's end was counted: the next ones only tell stages that were not known before."""
    overrun_seconds: float = 0.0
    """GPU time in that report that came after the end."""

    @property
    def pool(self) -> str:
        """GPUs of one pool do the same work: Ray's group, or all pods of a PyTorchJob."""
        return self.record.labels.get(RAY_GROUP, "")

    @property
    def is_head(self) -> bool:
        """It is the head of a Ray cluster."""
        return self.record.labels.get(RAY_NODE_TYPE) == HEAD

    def take(self, report: Report, received_at: float) -> None:
        """Keep the gauges of a report that was counted."""
        point = Point(received_at, {gpu.uuid: (gpu.observed_seconds, gpu.busy_seconds) for gpu in report.gpus})
        if self.telemetry is None or self.telemetry.start_id != report.start_id:
            self._begin(report, received_at)
        self.history.append(point)
        while len(self.history) > 2 and point.at - self.history[1].at >= WINDOW_SECONDS:
            self.history.popleft()
        self.telemetry = Telemetry.of(report, received_at)
        self.steps.take(report)
        self.xids.take(report, received_at)

    def close(self, ended_at: float) -> None:
        """Take note that the job had ended before the newest report: what came after the end does not count."""
        if self.closed or self.telemetry is None or self.telemetry.received_at <= ended_at:
            return
        self.closed = True
        late = self.telemetry.received_at - ended_at
        self.overrun_seconds = late * len(self.telemetry.gpus) if late <= LATE_SECONDS else 0.0

    def reopen(self) -> None:
        """Take note that the job goes on after all."""
        self.closed, self.overrun_seconds = False, 0.0

    def totals(self, *, gone: bool) -> Totals:
        """Sum over all starts of its sidecar, up to the end of the job: a GPU is idle afterwards."""
        totals = self.ledger.totals(gone=gone)
        if not self.overrun_seconds:
            return totals
        return replace(totals, gpu_seconds=max(totals.busy_seconds, totals.gpu_seconds - self.overrun_seconds))

    def _begin(self, report: Report, received_at: float) -> None:
        """Start the window of a new start: its counters were zero when it began, if that was just now."""
        self.history.clear()
        age = report.sent_at - report.started_at
        if 0 < age <= WINDOW_SECONDS:
            self.history.append(Point(received_at - age, {}))

    def utilization(self, uuid: str) -> float | None:
        """Mean load of a GPU over the window; None while nothing was observed in it."""
        if len(self.history) < 2:
            return None
        observed_before, busy_before = self.history[0].gpus.get(uuid, (0.0, 0.0))
        observed_now, busy_now = self.history[-1].gpus.get(uuid, (0.0, 0.0))
        observed = observed_now - observed_before
        return min(1.0, max(0.0, busy_now - busy_before) / observed) if observed > 0 else None


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


class WorkloadKey(NamedTuple):
    """Identity of a workload; another run under the same name has another uid."""

    kind: JobKind
    namespace: str
    name: str
    uid: str


@dataclass(kw_only=True, slots=True)
class Workload:
    """One job, with what is known of it."""

    job: JobSeen
    groups: dict[str, PodGroup] = field(default_factory=dict)
    """Groups that count for it, by their owner's uid."""
    borrowed: PodGroup | None = None
    """The group of a RayCluster that is not its own."""
    folded: Totals = field(default_factory=Totals)
    """What a ledger before said of pods that are gone, and what a borrowed cluster did until it was left."""
    base: Totals | None = None
    """Counters of the borrowed cluster when this job began; None while it borrows nothing."""
    left: PodGroup | None = None
    """The borrowed cluster after the end: pods tell the last stages and steps of a job half a minute later."""
    left_base: Totals | None = None
    """Its counters at the end."""
    restored: dict[str, PodLedger] = field(default_factory=dict)
    """Ledgers from before a restart, by pod uid, whose pods were not seen yet."""
    gone_at: float | None = None
    """When its object was seen to be deleted."""
    ended_at: float | None = None
    """When it was first seen to have ended."""
    shared: bool = False
    """Other RayJobs ran in the borrowed cluster, too: work without the name of a job is anybody's."""
    steps_before: int = 0
    """Steps that were counted before a restart of the controller."""
    most_cycles: int = 0
    """Most steps that were counted in the present RayCluster."""
    ray_cluster: str | None = None
    """The RayCluster that a RayJob runs in, or ran in last: between two attempts its object names none."""
    steps_missed: dict[str, int] = field(default_factory=dict)
    """By pod uid: steps that the job had made when the pod was first heard."""
    highest_step: int | None = None
    """Verl's own number of the newest step; None where no source says it."""

    @property
    def end(self) -> float | None:
        """When it ended (Unix seconds); None while it runs."""
        if not self.job.ended and self.gone_at is None:
            return None
        return self.job.completed_at if self.job.completed_at is not None else self.ended_at

    def counts(self, ray_job: str) -> bool:
        """Whether work of this Ray job is this workload's. Empty: the source does not tell jobs apart."""
        if not self.job.borrows_cluster:
            return True
        return ray_job == self.job.ray_job_id if ray_job else not self.shared

    def steps_of(self, track: "PodTrack") -> int:
        """Whole steps of this workload that a pod has seen."""
        if not self.job.borrows_cluster:
            return track.ledger.steps
        told = sum(number for job, number in track.steps.counted.items() if self.counts(job))
        return self.steps_before + told

    def pools(self, *, ending: bool = False) -> list[PoolSteps]:
        """Return the steps of its pods by pool. `ending`: those of pods that are being ended, too.

        Pods that came late, as autoscaled or replaced workers, go on from where the job was, and are a pool of their
        own: they have no say against those that saw it from the beginning, and stand in for them when they are gone.
        """
        pools: dict[tuple[str, int], list[PodTrack]] = {}
        for track in self.telling_pods():
            if (
                track.record.gpus_requested > 0
                and track.telemetry is not None
                and (ending or not track.record.deleting)
            ):
                pools.setdefault((track.pool, self._missed(track)), []).append(track)
        return [
            PoolSteps(
                [missed + self.steps_of(track) for track in pool],
                [[step for step in track.steps.recent if self.counts(step.job)] for track in pool],
            )
            for (_, missed), pool in pools.items()
        ]

    def _missed(self, track: "PodTrack") -> int:
        """Return how many steps the job had made when a pod was first heard."""
        uid = track.record.uid
        if uid not in self.steps_missed:
            self.steps_missed[uid] = max(0, self.most_cycles - self.steps_of(track))
        return self.steps_missed[uid]

    def move(self, ray_cluster: str | None) -> None:
        """Take note of the RayCluster that a RayJob runs in. In another one it begins anew, or from a checkpoint."""
        if ray_cluster is None:
            return
        if self.ray_cluster not in (None, ray_cluster):
            self.most_cycles, self.highest_step = 0, None
            self.steps_missed.clear()
        self.ray_cluster = ray_cluster

    def _is_present(self, group: PodGroup) -> bool:
        """Whether a group of its own is that of its present attempt. One before may take a while to end."""
        return self.ray_cluster in (None, group.name) or group.kind != JobKind.RAY_CLUSTER

    def note_last_steps(self) -> None:
        """Take in what pods say in their last reports: soon after they are gone."""
        self.step(pace_of(self.pools(ending=True)).cycles)

    def step(self, cycles: int) -> int | None:
        """Return its newest step: verl's own number if a source says it, else how many there were. It never falls."""
        self.most_cycles = max(self.most_cycles, cycles)
        for track in self.telling_pods():
            for job, number in track.steps.highest.items():
                if self.counts(job):
                    self.highest_step = max(number, self.highest_step or 0)
        return self.highest_step if self.highest_step is not None else self.most_cycles or None

    @property
    def key(self) -> WorkloadKey:
        """Its identity."""
        return WorkloadKey(self.job.kind, self.job.namespace, self.job.name, self.job.uid)

    def pods(self) -> Iterator[PodTrack]:
        """All its live pods, its own and borrowed ones, but for those of an attempt before."""
        for group in self.groups.values():
            if self._is_present(group):
                yield from group.pods.values()
        if self.borrowed is not None:
            yield from self.borrowed.pods.values()

    def telling_pods(self) -> Iterator[PodTrack]:
        """All its live pods, and those of a borrowed cluster that still tell its last stages and steps."""
        yield from self.pods()
        if self.left is not None:
            yield from self.left.pods.values()

    def own_pods(self) -> Iterator[PodTrack]:
        """Its live pods, those of an attempt before, too, without borrowed ones."""
        for group in self.groups.values():
            yield from group.pods.values()

    def totals(self) -> Totals:
        """All that counts for it."""
        parts = [self.folded, total_of(self.restored.values(), gone=True)]
        parts += [group.totals() for group in self.groups.values()]
        if self.borrowed is not None and self.base is not None:
            parts.append(self._of_borrowed(self.borrowed.totals(), self.base))
        if self.left is not None and self.left_base is not None:
            parts.append(self._told_late(self.left.totals(), self.left_base))
        return sum_of(parts)

    def _of_borrowed(self, totals: Totals, base: Totals) -> Totals:
        """What a borrowed cluster has done for this job: all since its beginning, and of stages its own."""
        since = totals.minus(base)
        return replace(since, stages={key: value for key, value in since.stages.items() if self.counts(key.job)})

    def _told_late(self, totals: Totals, base: Totals) -> Totals:
        """What a cluster has told since the job's end of the time before it: stages that carry the job's name."""
        stages = totals.minus(base).stages
        return Totals(stages={key: value for key, value in stages.items() if key.job and self.counts(key.job)})

    def leave_borrowed(self) -> None:
        """Part from the borrowed cluster, and keep what it has done for this job. What it tells late still counts."""
        if self.borrowed is not None and self.base is not None:
            self.forget_left()
            group = self.left = self.borrowed
            group.borrowers.discard(self.job.uid)
            group.leavers.add(self.job.uid)
            self.left_base = group.totals()
            self.folded = self.folded.plus(self._of_borrowed(self.left_base, self.base))
        self.borrowed, self.base = None, None

    def forget_left(self) -> None:
        """Let go of the cluster that was borrowed: nothing more is to be told."""
        if self.left is not None and self.left_base is not None:
            self.left.leavers.discard(self.job.uid)
            self.folded = self.folded.plus(self._told_late(self.left.totals(), self.left_base))
        self.left, self.left_base = None, None

    def ray_jobs(self) -> tuple[RayJobInfo, ...]:
        """Ray's own list of jobs of the cluster that it runs in, as the head said it last."""
        borrowed = self.borrowed if self.borrowed is not None else self.left
        own = [group for group in self.groups.values() if self._is_present(group)]
        groups = [*own, *([borrowed] if borrowed is not None else [])]
        return next((group.ray_jobs for group in reversed(groups) if group.ray_jobs), ())

    def ledger(self) -> WrittenLedger:
        """What must be written down so that a restart loses nothing."""
        folded = self.folded
        pods: dict[str, PodLedger] = dict(self.restored)
        for group in self.groups.values():
            folded = folded.plus(group.folded)
            pods.update({uid: track.ledger for uid, track in group.pods.items() if track.ledger.starts})
        return WrittenLedger(folded=folded, base=self.base or Totals(), pods=pods)


class ReportObserver(Protocol):
    """Who wants to see each report that was counted."""

    def report(self, workload: Workload, track: PodTrack, report: Report, at: float) -> None:
        """Take a report that counts for a workload, its own or one that borrows the pod. `at`: Unix seconds."""


class Workloads:
    """All workloads and their pods. A `PodObserver` and a `ReportSink`; used from one event loop."""

    def __init__(self, observer: ReportObserver | None = None) -> None:
        self.observer = observer
        self._workloads: dict[str, Workload] = {}
        self._clusters: dict[str, JobSeen] = {}
        self._groups: dict[GroupKey, PodGroup] = {}
        self._pod_groups: dict[str, PodGroup] = {}
        self._by_name: dict[tuple[JobKind, str, str], str] = {}
        self._clusters_by_name: dict[tuple[str, str], str] = {}
        self._orphans: set[GroupKey] = set()
        """Groups whose workload is not known yet."""
        self._trainers: set[str] = set()
        """Workloads whose command line says that they do nothing but train."""
        self._borrowing: set[str] = set()
        """Workloads that want a RayCluster of somebody else."""
        self._dirty: set[str] = set()

    def __len__(self) -> int:
        return len(self._workloads)

    def all(self) -> Iterable[Workload]:
        """All workloads; the caller does not hold on to it across an await."""
        return self._workloads.values()

    def get(self, uid: str) -> Workload | None:
        """Return the workload whose object has this uid."""
        return self._workloads.get(uid)

    def named(self, kind: JobKind, namespace: str, name: str) -> Workload | None:
        """Return the newest run of this name."""
        uid = self._by_name.get((kind, namespace, name))
        return self._workloads.get(uid) if uid else None

    def take_dirty(self) -> set[str]:
        """Uids of workloads about which something was learnt since the last call."""
        dirty, self._dirty = self._dirty, set()
        return dirty

    def touch(self, uid: str) -> None:
        """Have a workload looked at again."""
        self._dirty.add(uid)

    # Jobs and clusters

    def job_seen(self, job: JobSeen, now: float) -> Workload | None:
        """Take a job or cluster as it is now. Returns its workload; None for a RayCluster that a RayJob made."""
        if job.kind is JobKind.RAY_CLUSTER:
            self._cluster_seen(job)
            if job.owner is not None and job.owner.kind == JobKind.RAY_JOB:
                return None
        workload = self._workloads.get(job.uid)
        if workload is None:
            workload = self._new(job, now)
        elif workload.job == job or workload.gone_at is not None:
            # A uid never comes back: what says so is a list from before the deletion.
            return workload
        workload.move(job.ray_cluster)
        workload.job = job
        self._note_end(workload, now)
        self._borrow(workload)
        self._dirty.add(job.uid)
        return workload

    def _note_end(self, workload: Workload, now: float) -> None:
        if not workload.job.ended:
            workload.ended_at = None
            for track in workload.own_pods():
                track.reopen()
            return
        if workload.ended_at is None:
            workload.ended_at = now
        if workload.end is not None:
            # It may be told late, so that reports from after the end were counted already.
            for track in workload.own_pods():
                track.close(workload.end)

    def _new(self, job: JobSeen, now: float) -> Workload:
        workload = Workload(job=job, ray_cluster=job.ray_cluster)
        before = self.named(job.kind, job.namespace, job.name)
        if before is not None and before.gone_at is None:
            self.job_gone(before.job.kind, before.job.uid, now)
        self._workloads[job.uid] = workload
        self._by_name[(job.kind, job.namespace, job.name)] = job.uid
        if job.borrows_cluster:
            self._borrowing.add(job.uid)
        for key in list(self._orphans):
            self._join(self._groups[key])
        return workload

    def job_gone(self, kind: JobKind, uid: str, now: float) -> None:
        """Take note that an object was deleted. Its workload stays until `forget`."""
        cluster = self._clusters.pop(uid, None) if kind is JobKind.RAY_CLUSTER else None
        if cluster is not None and self._clusters_by_name.get((cluster.namespace, cluster.name)) == uid:
            del self._clusters_by_name[(cluster.namespace, cluster.name)]
        workload = self._workloads.get(uid)
        if workload is not None and workload.gone_at is None:
            workload.gone_at = now
            workload.ended_at = workload.ended_at if workload.ended_at is not None else now
            workload.leave_borrowed()
            self._dirty.add(uid)

    def forget(self, uid: str) -> None:
        """Drop a workload whose object is gone and whose GPUMonitor has been dealt with."""
        workload = self._workloads.pop(uid, None)
        if workload is None:
            return
        key = (workload.job.kind, workload.job.namespace, workload.job.name)
        if self._by_name.get(key) == uid:
            del self._by_name[key]
        self._borrowing.discard(uid)
        self._trainers.discard(uid)
        workload.forget_left()
        for group in workload.groups.values():
            if not group.pods:
                self._groups.pop(group.key, None)

    def known(self, kind: JobKind) -> Iterator[str]:
        """Uids of the objects of this kind that are not known to be gone (for the comparison with a list)."""
        if kind is JobKind.RAY_CLUSTER:
            yield from self._clusters
            return
        for uid, workload in self._workloads.items():
            if workload.job.kind is kind and workload.gone_at is None:
                yield uid

    def cluster_of(self, workload: Workload) -> JobSeen | None:
        """Return the RayCluster that a RayJob runs in now."""
        if workload.job.kind is not JobKind.RAY_JOB or workload.job.ray_cluster is None:
            return None
        uid = self._clusters_by_name.get((workload.job.namespace, workload.job.ray_cluster))
        return self._clusters.get(uid) if uid else None

    def _cluster_seen(self, cluster: JobSeen) -> None:
        if self._clusters.get(cluster.uid) == cluster:
            return
        self._clusters[cluster.uid] = cluster
        self._clusters_by_name[(cluster.namespace, cluster.name)] = cluster.uid
        group = self._groups.get(GroupKey(cluster.namespace, cluster.uid))
        if group is not None:
            self._join(group)
        if cluster.owner is not None and cluster.owner.uid in self._workloads:
            self._dirty.add(cluster.owner.uid)
        for uid in self._borrowing:
            self._borrow(self._workloads[uid])

    # Pods

    def pod_seen(self, pod: PodRecord) -> None:
        """Take a pod that is new or changed."""
        if pod.owner is None or pod.owner.kind not in GROUP_KINDS:
            return
        group = self._groups.get(GroupKey(pod.namespace, pod.owner.uid))
        if group is None:
            group = PodGroup(uid=pod.owner.uid, kind=pod.owner.kind, namespace=pod.namespace, name=pod.owner.name)
            self._add(group)
        track = group.pods.get(pod.uid)
        if track is None:
            track = PodTrack(record=pod)
            group.pods[pod.uid] = track
            self._pod_groups[pod.uid] = group
            self._restore_pod(group, track)
        track.record = pod
        self._touch_group(group)

    def pod_gone(self, pod: PodRecord) -> None:
        """Fold what a deleted pod has counted; it can report no more."""
        group = self._pod_groups.pop(pod.uid, None)
        track = group.pods.pop(pod.uid, None) if group is not None else None
        if group is None or track is None:
            return
        group.folded = group.folded.plus(track.totals(gone=True))
        for workload in filter(
            None, map(self._workloads.get, {group.workload or "", *group.borrowers, *group.leavers})
        ):
            workload.steps_missed.pop(pod.uid, None)
        self._touch_group(group)
        if not group.pods and self._workload_of(group) is None and not group.borrowers | group.leavers:
            self._groups.pop(group.key, None)
            self._orphans.discard(group.key)

    def accept(self, identity: PodIdentity, report: Report, received_at: float) -> AcceptResult:
        """Count a report of a pod that the directory knows."""
        group = self._pod_groups.get(identity.uid)
        track = group.pods.get(identity.uid) if group is not None else None
        if group is None or track is None:
            # Authentic, but of a pod that nobody owns: there is nothing to count it for.
            return AcceptResult(accepted=report.sequence)
        counted = track.ledger.count(report, after_end=track.closed)
        if counted.replay:
            return AcceptResult(accepted=counted.accepted, replay=True)
        track.take(report, received_at)
        workload = self._workload_of(group)
        if workload is not None and report.final and workload.ray_cluster in (None, group.name):
            # Of a retry's former cluster it would be too many.
            workload.note_last_steps()
        if workload is not None and workload.end is not None:
            track.close(workload.end)
        leads = track.is_head and group.kind == JobKind.RAY_CLUSTER
        if leads:
            group.hear(report, received_at)
        elif report.cluster_stages is not None and group.kind == JobKind.RAY_CLUSTER:
            group.hear_driver(report.cluster_stages, received_at)
        self._touch_group(group)
        self._show(group, track, report, received_at)
        return AcceptResult(
            accepted=counted.accepted,
            gpu_uuids=group.gpus_of(track.record),
            # A head has asked itself, and knows it better.
            stages=None
            if leads
            else group.stages_of(track.record, now=received_at) or self._launched(workload, received_at),
        )

    def trains_alone(self, uid: str) -> None:
        """Take note that a workload's program does nothing but train, so that its sidecars are told so."""
        self._trainers.add(uid)

    def _launched(self, workload: Workload | None, received_at: float) -> PodStages | None:
        """Return what the command line says of a pod's stages: the same at all times; None where it says nothing."""
        if workload is None or workload.job.uid not in self._trainers:
            return None
        always = RayStage(stage="other", role="trainer", begin=0.0)
        return PodStages(source=StageSource.LAUNCH, known_from=0.0, known_until=received_at, intervals=[always])

    def _show(self, group: PodGroup, track: PodTrack, report: Report, at: float) -> None:
        if self.observer is None:
            return
        uids = {group.workload, *group.borrowers} if group.workload else group.borrowers
        for uid in uids:
            workload = self._workloads.get(uid) if uid else None
            if workload is not None:
                self.observer.report(workload, track, report, at)

    def workload_of_pod(self, pod: PodRecord) -> Workload | None:
        """Return the workload that a pod counts for; None while it is not known."""
        group = self._groups.get(GroupKey(pod.namespace, pod.owner.uid)) if pod.owner is not None else None
        return self._workload_of(group) if group is not None else None

    # After a restart

    def restore(self, uid: str, ledger: WrittenLedger, *, steps: int = 0, ray_cluster: str | None = None) -> None:
        """Take up the counters from before a restart. Called once, before pods report.

        `steps`, and the RayCluster in which they were made, as its status says; in another one they begin anew.
        """
        workload = self._workloads.get(uid)
        if workload is None:
            return
        if ray_cluster is not None and workload.ray_cluster not in (None, ray_cluster):
            steps = 0
        workload.ray_cluster = workload.ray_cluster or ray_cluster
        workload.most_cycles, workload.steps_before = steps, steps
        workload.folded = workload.folded.plus(ledger.folded)
        if workload.job.borrows_cluster:
            workload.base = ledger.base
        workload.restored = dict(ledger.pods)
        for group in workload.groups.values():
            for track in group.pods.values():
                self._restore_pod(group, track)

    def fold_restored(self) -> None:
        """Fold the ledgers whose pods are gone. Called once, after the first complete list of pods."""
        for workload in self._workloads.values():
            if workload.restored:
                workload.folded = workload.folded.plus(total_of(workload.restored.values(), gone=True))
                workload.restored = {}
                self._dirty.add(workload.job.uid)

    def _restore_pod(self, group: PodGroup, track: PodTrack) -> None:
        workload = self._workload_of(group)
        if workload is None or track.record.uid not in workload.restored:
            return
        if not track.ledger.starts:
            track.ledger = workload.restored.pop(track.record.uid)

    # Who owns what

    def _owner_of(self, group: PodGroup) -> str | None:
        """Uid of the workload that a group counts for; None while its RayCluster is not known."""
        if group.kind == JobKind.PYTORCH_JOB:
            return group.uid
        cluster = self._clusters.get(group.uid)
        if cluster is None or cluster.namespace != group.namespace:
            return None
        if cluster.owner is not None and cluster.owner.kind == JobKind.RAY_JOB:
            return cluster.owner.uid
        return cluster.uid

    def _workload_of(self, group: PodGroup) -> Workload | None:
        return self._workloads.get(group.workload) if group.workload else None

    def _add(self, group: PodGroup) -> None:
        self._groups[group.key] = group
        self._orphans.add(group.key)
        self._join(group)

    def _join(self, group: PodGroup) -> None:
        """Join a group with its workload, for good: the RayCluster may be gone before its last pod is."""
        owner = self._owner_of(group)
        workload = self._workloads.get(owner) if owner is not None else None
        if workload is None or group.workload is not None or workload.job.namespace != group.namespace:
            return
        group.workload = workload.job.uid
        self._orphans.discard(group.key)
        workload.groups[group.uid] = group
        for track in group.pods.values():
            self._restore_pod(group, track)
        self._touch_group(group)

    def _touch_group(self, group: PodGroup) -> None:
        if group.workload in self._workloads:
            self._dirty.add(group.workload)
        self._dirty |= group.borrowers | group.leavers

    def _borrow(self, workload: Workload) -> None:
        """Join a RayJob with the RayCluster it borrows while it runs, and part them when it has ended."""
        job = workload.job
        if not job.borrows_cluster:
            return
        if job.ended:
            workload.leave_borrowed()
            return
        cluster = self.cluster_of(workload)
        if cluster is None or job.ray_cluster is None:
            return
        group = self._groups.get(GroupKey(cluster.namespace, cluster.uid))
        if group is None:
            group = PodGroup(
                uid=cluster.uid, kind=JobKind.RAY_CLUSTER.value, namespace=cluster.namespace, name=cluster.name
            )
            self._add(group)
        if workload.borrowed is not group:
            workload.leave_borrowed()
            workload.borrowed = group
            group.borrowers.add(job.uid)
            workload.base = workload.base if workload.base is not None else _base_of(group)
            if len(group.borrowers) > 1:
                self._note_sharing(group)

    def _note_sharing(self, group: PodGroup) -> None:
        for uid in group.borrowers:
            self._workloads[uid].shared = True


def _base_of(group: PodGroup) -> Totals:
    """What a cluster has counted so far. Of stages, those that have no job's name are enough: others are told by it."""
    totals = group.totals()
    return replace(totals, stages={key: value for key, value in totals.stages.items() if not key.job})
