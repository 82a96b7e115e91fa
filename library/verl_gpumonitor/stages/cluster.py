# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The running tasks of a Ray cluster -> what runs on which node, for which of its GPUs. Pure.

A worker's task is its own GPU's stage. A rollout server's task is the stage of all nodes that its replica spans. A CPU
helper that waits for a rollout or a reward says what the GPUs of its job are for meanwhile, wherever it runs; which of
these holds at a moment when they overlap is for `choice` to say.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from .book import Running
from .names import Classified, classify, place_of
from .tables import Kind

_REFERENCE: Final = Classified("ref", "ref", Kind.WORKER)
_REPLICA: Final = re.compile(r"(.{1,200}_[0-9]{1,9})_[0-9]{1,9}\Z")
"""Ray name of a server: replica, then which of the replica's nodes it is on, as in `vllm_server_3_1`."""


class RayTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that runs. Ids are Ray's, in hexadecimal; empty where they are not told."""

    task_id: str
    name: str
    node_id: str
    actor_id: str = ""
    job_id: str = ""
    pid: int | None = None
    begin: float | None = None
    """By the clock of its node."""


class RayActor(msgspec.Struct, frozen=True, kw_only=True):
    """An actor that lives."""

    actor_id: str
    class_name: str
    name: str
    node_id: str
    job_id: str = ""


class RayHost(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, which under KubeRay is a pod."""

    node_id: str
    ip: str
    has_gpus: bool


class ClusterMap:
    """Where the actors of a cluster are. Built anew whenever one of the lists is read again."""

    def __init__(
        self,
        hosts: Iterable[RayHost] = (),
        actors: Iterable[RayActor] = (),
        submissions: Mapping[str, str] | None = None,
    ) -> None:
        """`submissions`: Ray's job id -> submission id."""
        self.ips = {host.node_id: host.ip for host in hosts}
        self.actors = {actor.actor_id: actor for actor in actors}
        self.submissions = submissions or {}
        self._gpu_nodes = frozenset(host.node_id for host in hosts if host.has_gpus)
        self._worker_nodes: dict[str, set[str]] = {}
        self._servers: dict[tuple[str, str], set[str]] = {}
        self._replicas: dict[tuple[str, str], set[str]] = {}
        self._ranks = self._read()

    def local_rank(self, actor_id: str, task_name: str) -> int | None:
        """Return the rank of a worker on its node; None where it is not told, or two of a kind claim it."""
        if actor_id in self.actors:
            return self._ranks.get(actor_id)
        # The constructor runs before the actor is listed; Ray writes the actor's name before it.
        place = place_of(task_name.rpartition(":")[0])
        return None if place is None else place.local_rank

    def replica_nodes(self, actor_id: str, node_id: str) -> set[str]:
        """Return the nodes that a server's replica spans."""
        actor = self.actors.get(actor_id)
        return {node_id} if actor is None else self._replicas.get((actor.job_id, _replica(actor)), set()) | {node_id}

    def nodes_for(self, said: Classified, job_id: str) -> Iterable[str]:
        """Return the nodes whose GPUs a job uses for what a helper waits for: its servers', else its workers'."""
        workers = self._worker_nodes.get(job_id)
        servers = self._servers.get((job_id, said.role))
        if said.role == "reward":
            # Scores are computed on CPU, while all GPUs of the job wait; or by servers of a reward model.
            return servers or workers or self._servers.get((job_id, "rollout")) or self._gpu_nodes
        return servers or workers or self._gpu_nodes

    def _read(self) -> dict[str, int | None]:
        ranks: dict[str, int | None] = {}
        holders: dict[tuple[str, str, int], str] = {}
        for actor in self.actors.values():
            said = classify(f"{actor.class_name}.generate", actor_name=actor.name)
            if said is None:
                continue
            if said.kind is Kind.SERVER:
                role = said.role
                self._servers.setdefault((actor.job_id, role), set()).add(actor.node_id)
                self._replicas.setdefault((actor.job_id, _replica(actor)), set()).add(actor.node_id)
            elif said.kind is Kind.WORKER:
                self._worker_nodes.setdefault(actor.job_id, set()).add(actor.node_id)
                self._rank(actor, ranks, holders)
        return ranks

    @staticmethod
    def _rank(actor: RayActor, ranks: dict[str, int | None], holders: dict[tuple[str, str, int], str]) -> None:
        place = place_of(actor.name)
        if place is None:
            return
        claim = (actor.node_id, actor.class_name, place.local_rank)
        other = holders.setdefault(claim, actor.actor_id)
        ranks[actor.actor_id] = place.local_rank
        if other != actor.actor_id:
            # Two pools on one node: each counts its own bundles from 0.
            ranks[actor.actor_id] = ranks[other] = None


def running(tasks: Iterable[RayTask], cluster: ClusterMap, references: frozenset[str] = frozenset()) -> list[Running]:
    """Return what runs on the nodes that are known, by node IP. Idle actors, drivers and others' tasks are left out.

    `references`: ids of tasks that are the reference's, whatever their name says.
    """
    found: list[Running] = []
    shared: dict[tuple[str, str, str, str], float | None] = {}
    for task in tasks:
        actor = cluster.actors.get(task.actor_id)
        said = classify(task.name, actor_name="" if actor is None else actor.name)
        if said is None:
            continue
        if said.kind is Kind.WORKER and task.node_id in cluster.ips:
            found.append(_worker(task, _REFERENCE if task.task_id in references else said, cluster))
        for node_id in _nodes(task, said, cluster):
            if (ip := cluster.ips.get(node_id)) is not None:
                key = (ip, said.stage, said.role, cluster.submissions.get(task.job_id, ""))
                shared[key] = _earlier(shared[key], task.begin) if key in shared else task.begin
    return found + [
        Running(key=f"{stage}/{role}/{job}", place=ip, stage=stage, role=role, job=job, begin=begin)
        for (ip, stage, role, job), begin in shared.items()
    ]


def _worker(task: RayTask, said: Classified, cluster: ClusterMap) -> Running:
    return Running(
        key=task.task_id,
        stage=said.stage,
        role=said.role,
        place=cluster.ips[task.node_id],
        begin=task.begin,
        local_rank=cluster.local_rank(task.actor_id, task.name),
        pid=task.pid,
        job=cluster.submissions.get(task.job_id, ""),
        lane=task.actor_id or task.task_id,
    )


def _nodes(task: RayTask, said: Classified, cluster: ClusterMap) -> Iterable[str]:
    """Return the nodes whose GPUs are in a stage because this task runs, unless it is a worker's."""
    if said.kind is Kind.SERVER:
        return cluster.replica_nodes(task.actor_id, task.node_id)
    if said.kind is Kind.HELPER and (said.stage, said.role) in (("gen", "rollout"), ("reward", "reward")):
        return cluster.nodes_for(said, task.job_id)
    return ()


def _replica(actor: RayActor) -> str:
    found = _REPLICA.match(actor.name)
    return actor.actor_id if found is None else found[1]


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((time for time in (one, other) if time is not None), default=None)
