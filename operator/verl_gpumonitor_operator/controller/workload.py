# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One job, with the pods that count for it: its steps, its totals, what must outlive a restart. Pure.

A RayJob that is tried again has one RayCluster after another, which all count for it. One that runs in a RayCluster
made by somebody else (clusterSelector) borrows its pods, from its beginning to its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from verl_gpumonitor.model.report import RayJobInfo

from .jobs import JobKind, JobSeen
from .ledger import PodLedger, total_of
from .ledger_text import WrittenLedger
from .podgroup import PodGroup
from .podtrack import PodTrack
from .steps import PoolSteps, pace_of
from .totals import Totals, sum_of


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

    def steps_of(self, track: PodTrack) -> int:
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

    def _missed(self, track: PodTrack) -> int:
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
