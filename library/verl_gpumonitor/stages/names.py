# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Names of Ray tasks and titles of processes -> stage and role. Pure; the knowledge is in `tables`.

By rule and table, never by substring: `actor_rollout_ref_update_actor` has `ref` and `rollout` in it, and is neither.
Names come from the job and may be anything of any length; what nobody knows is stage `other`, role `unknown`.
"""

import re
from functools import lru_cache
from typing import Final

import msgspec

from verl_gpumonitor.model.vocabulary import UNKNOWN

from .tables import (
    CLASSES,
    ENGINE_TITLES,
    IDLE_TITLES,
    OTHER,
    PLAIN_TASKS,
    PREFIXES,
    SERVER_PURPOSES,
    UNIVERSAL_METHODS,
    ClassRule,
    Kind,
    PlainTask,
    StageByRole,
)

MAX_NAME: Final = 1024
"""Longer names are not looked at; Linux shows less of a title."""

_RAY: Final = "ray::"
_PLACE: Final = re.compile(r"_([0-9]{1,6}):([0-9]{1,4})\Z")
_PURPOSE: Final = re.compile(r"(?:server|rollout)_(reward|teacher)_")


class Classified(msgspec.Struct, frozen=True):
    """What a name says."""

    stage: str
    role: str
    kind: Kind

    @property
    def tells_pod(self) -> bool:
        """Whether it tells the stage of GPUs in the pod in which it runs.

        A helper on CPU may run in another pod than the GPUs it waits for; but a stage of it is better than none, and
        whatever runs on a GPU is chosen before it.
        """
        return self.kind in (Kind.WORKER, Kind.SERVER) or (self.kind is Kind.HELPER and self.stage in ("gen", "reward"))


class Place(msgspec.Struct, frozen=True):
    """Where verl put a worker, as its actor's name tells."""

    node_index: int
    """Which of the pool's nodes, in verl's own count."""
    local_rank: int
    """GPU bundle of the pool's placement group on that node."""


_NOBODY_KNOWS: Final = Classified(OTHER, UNKNOWN, Kind.OTHER)


def classify(name: str, *, actor_name: str = "") -> Classified | None:
    """Return what runs under the name of a Ray task or the title of a process; None if that is nothing.

    None: an idle worker, an actor between two calls, an empty title. `actor_name`: as Ray has it, if it is known; it
    alone tells a server of a reward model from one of the policy.

    `ray::WorkerDict.actor_rollout_ref_update_actor` gives update_actor, actor; `ray::WorkerDict` gives None.
    """
    if len(name) > MAX_NAME:
        return _NOBODY_KNOWS
    said = _classify(name)
    return said if said is None or not actor_name else _for_purpose(said, actor_name[:MAX_NAME])


def place_of(actor_name: str) -> Place | None:
    """Return the place in an actor's name; None where it has none. `klmIFKWorkerDict_0:5` gives node 0, rank 5."""
    found = _PLACE.search(actor_name[-64:])
    return None if found is None else Place(int(found[1]), int(found[2]))


# As many as a job has names at a time, a few dozen, would do; the bound is for names that carry numbers.
@lru_cache(maxsize=512)
def _classify(name: str) -> Classified | None:
    text = name.rstrip("\0 \t\r\n")
    if text.startswith(ENGINE_TITLES):
        return Classified(OTHER, "rollout", Kind.ENGINE)
    text = text.removeprefix(_RAY).removesuffix("()")
    if not text or text in IDLE_TITLES:
        return None
    owner, dot, method = text.rpartition(".")
    if _rule(_bare(method)) is not None:
        return None
    if not dot:
        return _plain(PLAIN_TASKS.get(text))
    rule = _rule(_bare(owner))
    return _method(rule, method)


def _bare(owner: str) -> str:
    """Return the class alone: Ray writes a constructor as `<actor name>:<class>`, and a local class by its path."""
    return owner.rpartition(":")[2].rpartition(".")[2]


def _rule(class_name: str) -> ClassRule | None:
    return next((rule for rule in CLASSES if rule.fits(class_name)), None)


def _plain(task: PlainTask | None) -> Classified:
    return _NOBODY_KNOWS if task is None else Classified(task.stage, task.role, task.kind)


def _method(rule: ClassRule | None, method: str) -> Classified:
    role, kind = (UNKNOWN, Kind.OTHER) if rule is None else (rule.role, rule.kind)
    if method in UNIVERSAL_METHODS:
        return Classified(UNIVERSAL_METHODS[method], role, kind)
    if rule is None:
        return _NOBODY_KNOWS
    if rule.prefixed:
        role, method = _off_prefix(role, method)
    stage = rule.stages.get(method, OTHER)
    if isinstance(stage, StageByRole):
        stage = stage.under(role)
    return Classified(stage, rule.roles.get(method, role), kind)


def _off_prefix(role: str, method: str) -> tuple[str, str]:
    for prefix, its_role in PREFIXES:
        if method.startswith(prefix):
            return its_role, method.removeprefix(prefix)
    return role, method


def _for_purpose(said: Classified, actor_name: str) -> Classified:
    found = _PURPOSE.search(actor_name)
    if found is None or said.role != "rollout":
        return said
    role, stages = SERVER_PURPOSES[found[1]]
    return Classified(stages.get(said.stage, said.stage), role, said.kind)
