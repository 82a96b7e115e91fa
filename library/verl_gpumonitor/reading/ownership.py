# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the GPUs that the sidecar sees are the pod's own. Pure.

A sidecar with `NVIDIA_VISIBLE_DEVICES=all` sees all GPUs of the node. Evidence is tried in a fixed order; whoever names
more GPUs than the pod asked for is not believed. What is settled stays settled for the container's life: a GPU that
disappears later is a lost GPU of this pod, not somebody else's.
"""

from collections.abc import Sequence

import msgspec

from verl_gpumonitor.model.vocabulary import Ownership


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at one moment. UUIDs; None: this witness was not asked or does not know; empty: it names none."""

    requested: int
    """GPUs that the pod's containers ask for together."""
    visible: Sequence[str] | None = None
    """What NVML shows this container."""
    ray_agent: Sequence[str] | None = None
    """What Ray's agent in this pod lists: exactly the GPUs of Ray's container."""
    ray_head: Sequence[str] | None = None
    """What the head's node detail lists for this pod, relayed by the controller."""
    marks: Sequence[str] | None = None
    """What the library in the training process names."""
    processes: Sequence[str] | None = None
    """GPUs on which processes of this pod run. Only with a shared process namespace: otherwise pids may be others'."""


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """The pod's own GPUs, and how it is known."""

    by: Ownership = Ownership.UNKNOWN
    uuids: tuple[str, ...] = ()

    def settled(self, requested: int) -> bool:
        """Say whether all GPUs that were asked for are known."""
        return self.by is not Ownership.UNKNOWN and len(self.uuids) >= requested


def own_gpus(evidence: Evidence, known: Owned = Owned()) -> Owned:  # noqa: B008 - frozen
    """Decide whose the GPUs are, given what was decided before in this container's life.

    Nothing requested, nothing owned, whatever is seen. All of them known: that stays. Otherwise the first witness that
    can be believed. The one who named some before adds to them, since ranks start one after another; a more trusted one
    replaces them if he names as many; a less trusted one must name them all too.
    """
    if evidence.requested <= 0:
        return Owned(by=Ownership.NONE_REQUESTED)
    if known.settled(evidence.requested):
        return known
    better = True
    for by, uuids in _testimony(evidence):
        same = by is known.by
        better = better and not same
        named = _distinct((*known.uuids, *uuids)) if same else _distinct(uuids)
        if same and named == known.uuids:
            continue  # He has nothing to add; another may.
        agrees = len(named) >= len(known.uuids) if better or same else set(named) >= set(known.uuids)
        if named and agrees and len(named) <= evidence.requested:
            return Owned(by=by, uuids=named)
    return known


def _testimony(evidence: Evidence) -> Sequence[tuple[Ownership, Sequence[str]]]:
    """Return who names which GPUs, the most trusted first."""
    visible = _distinct(evidence.visible or ())
    whole_node = visible if len(visible) == evidence.requested else ()
    return (
        (Ownership.RAY_AGENT, evidence.ray_agent or ()),
        (Ownership.RAY_HEAD, evidence.ray_head or ()),
        (Ownership.WHOLE_NODE, whole_node),
        (Ownership.MARKS, evidence.marks or ()),
        (Ownership.PROCESSES, evidence.processes or ()),
    )


def _distinct(uuids: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(uuids))
