# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which pods belong to which workload. Pure: no I/O, and time is an argument.

A pod belongs to whoever its controlling ownerReference names by uid, never by label: Pod -> RayCluster -> RayJob, or
the RayCluster itself where nobody made it for a job; Pod -> PyTorchJob. A RayJob that is tried again has one
RayCluster after another, which all count for it. A RayJob that runs in a RayCluster made by somebody else
(clusterSelector) borrows its pods: they count for the cluster, and for the job from its beginning to its end.

An ownerReference names no namespace, since an owner is in the namespace of what it owns; whoever may make pods
elsewhere can write the uid of somebody's cluster into them. So a reference holds within its own namespace alone.

Objects may come in any order. Pods are kept in groups by namespace and owner's uid; a group is joined with its workload
as soon as both are known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, Protocol

from verl_gpumonitor.model.report import PodStages, RayStage, Report
from verl_gpumonitor.model.stages import StageSource

from .jobs import JobKind, JobSeen
from .ledger import total_of
from .ledger_text import WrittenLedger
from .podgroup import GroupKey, PodGroup
from .podtrack import PodTrack
from .ports import AcceptResult, PodIdentity, PodRecord
from .totals import Totals
from .workload import Workload

GROUP_KINDS: Final = (JobKind.RAY_CLUSTER.value, JobKind.PYTORCH_JOB.value)


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
            self._leave(workload)
            self._dirty.add(uid)

    def told_all(self, workload: Workload) -> None:
        """Take note that nothing more is to be told of a workload by the cluster that it borrowed."""
        left = workload.left
        workload.forget_left()
        self._tidy(left)

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
        self._leave(workload)
        self.told_all(workload)
        for group in workload.groups.values():
            self._part(group)

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
        self._tidy(group)

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
        """Join a group with its workload, for as long as that is known: the RayCluster may go before its last pod."""
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

    def _part(self, group: PodGroup) -> None:
        """Part a group from its workload, which is forgotten. One that lives on may be another's by now.

        That is so with a RayCluster whose RayJob was deleted without it: it is nobody's then, and its own workload.
        """
        group.workload = None
        self._orphans.add(group.key)
        self._join(group)
        self._tidy(group)

    def _tidy(self, *groups: PodGroup | None) -> None:
        """Drop groups that have no pods and that nobody counts."""
        for group in groups:
            if group is None or group.pods or group.borrowers or group.leavers or self._workload_of(group) is not None:
                continue
            self._groups.pop(group.key, None)
            self._orphans.discard(group.key)

    def _touch_group(self, group: PodGroup) -> None:
        if group.workload in self._workloads:
            self._dirty.add(group.workload)
        self._dirty |= group.borrowers | group.leavers

    def _borrow(self, workload: Workload) -> None:
        """Join a RayJob with the RayCluster it borrows while it runs, and part them when it has ended."""
        job = workload.job
        if not job.borrows_cluster:
            return
        if job.ended or workload.gone_at is not None:
            self._leave(workload)
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
            self._leave(workload)
            workload.borrowed = group
            group.borrowers.add(job.uid)
            workload.base = workload.base if workload.base is not None else _base_of(group)
            if len(group.borrowers) > 1:
                self._note_sharing(group)

    def _leave(self, workload: Workload) -> None:
        groups = workload.borrowed, workload.left
        workload.leave_borrowed()
        self._tidy(*groups)

    def _note_sharing(self, group: PodGroup) -> None:
        for uid in group.borrowers:
            self._workloads[uid].shared = True


def _base_of(group: PodGroup) -> Totals:
    """What a cluster has counted so far. Of stages, those that have no job's name are enough: others are told by it."""
    totals = group.totals()
    return replace(totals, stages={key: value for key, value in totals.stages.items() if not key.job})
