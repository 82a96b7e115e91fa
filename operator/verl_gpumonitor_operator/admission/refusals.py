# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Pods that the API server refuses because of the sidecar, as repeated requests of their controllers show it. No I/O.

Another policy of the cluster (images of one registry alone, probes on each container) may refuse a pod for what was
added to it here, and nobody tells the webhook. But the pod's controller asks again, and no such pod with a sidecar is
there. Then it is left alone for some requests: where a pod comes of these, the sidecar was the reason, and pods of this
kind stay without; where none does, it was not (a quota is full), and they get it again.

Controllers ask again after milliseconds, and wait twice as long each time: a job held by such a policy starts some 5 s
late.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from verl_gpumonitor.model.kubernetes import JOB_NAME, RAY_CLUSTER, RAY_GROUP, RAY_NODE_TYPE, REPLICA_TYPE

from . import pods
from .pods import Json

LEAST_REQUESTS: Final = 3
"""So many requests at least, with the sidecar or without, before it is looked whether a pod came of any."""
LEAST_SECONDS: Final = 3.0
"""Least time from the first of them to that look: by then, a pod that was accepted is there for all to see."""
FORGET_SECONDS: Final = 600.0
"""After this time nothing follows from earlier requests."""
REST_SECONDS: Final = 3600.0
"""Pods of a kind that is refused with the sidecar get none for so long; then it is tried again."""
MAX_KINDS: Final = 4096

_KIND_LABELS: Final = (RAY_CLUSTER, RAY_NODE_TYPE, RAY_GROUP, JOB_NAME, REPLICA_TYPE)


class PodKind(NamedTuple):
    """Pods that are made from one template, of one owner: its workers of one group, or its head."""

    namespace: str
    owner: str
    """Uid of the object whose controller makes them."""
    labels: tuple[tuple[str, str], ...]

    @property
    def selector(self) -> str:
        """Label selector of its pods."""
        return ",".join(f"{name}={value}" for name, value in self.labels)


def kind_of(pod: Json, namespace: str) -> PodKind | None:
    """Tell of which kind a pod is. None where no controller would ask for it again."""
    owners = [pods.mapping(one) for one in pods.listing(pods.mapping(pod.get("metadata")).get("ownerReferences"))]
    owner = next((pods.text(one.get("uid")) for one in owners if one.get("controller") is True), "")
    held = pods.labels(pod)
    labels = tuple((name, value) for name in _KIND_LABELS if (value := pods.text(held.get(name))))
    return PodKind(namespace, owner, labels) if owner and labels else None


class There(StrEnum):
    """Which pods of a kind exist."""

    NONE = "none"
    BARE = "bare"
    """Some, and none of them has the sidecar."""
    INJECTED = "injected"
    """Some that have it, at least."""


class _Phase(StrEnum):
    ASKED = "asked"
    """They get the sidecar, and it is not known whether they are accepted."""
    ACCEPTED = "accepted"
    TRIED_BARE = "tried bare"
    """None was accepted with the sidecar; they get none, and it is not known whether that helps."""
    REFUSED = "refused"
    """They are accepted without the sidecar alone."""
    INNOCENT = "innocent"
    """They are not accepted without it either."""


_LASTS: Final = {
    _Phase.ASKED: FORGET_SECONDS,
    _Phase.ACCEPTED: REST_SECONDS,
    _Phase.TRIED_BARE: FORGET_SECONDS,
    _Phase.REFUSED: REST_SECONDS,
    _Phase.INNOCENT: FORGET_SECONDS,
}


class _Known(msgspec.Struct, kw_only=True):
    """What is known of one kind."""

    phase: _Phase
    since: float
    requests: int = 0
    """Of this phase."""


class Refusals:
    """Which kinds of pods are refused with the sidecar. Bounded: of more kinds, the oldest are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        self._kinds: dict[PodKind, _Known] = {}

    def ask(self, kind: PodKind) -> bool:
        """Count a request for a pod of this kind. True: it is time to look which of them are there."""
        now = self._clock()
        known = self._kinds.get(kind)
        if known is None or now - known.since > _LASTS[known.phase]:
            known = self._enter(kind, _Phase.ASKED)
        known.requests += 1
        is_open = known.phase in (_Phase.ASKED, _Phase.TRIED_BARE)
        return is_open and known.requests >= LEAST_REQUESTS and now - known.since >= LEAST_SECONDS

    def look(self, kind: PodKind, there: There) -> None:
        """Take in which pods of a kind are there."""
        known = self._kinds.get(kind)
        if known is None:
            return
        if there is There.INJECTED:
            self._enter(kind, _Phase.ACCEPTED)
        elif known.phase is _Phase.ASKED:
            self._enter(kind, _Phase.TRIED_BARE)
        elif known.phase is _Phase.TRIED_BARE:
            self._enter(kind, _Phase.REFUSED if there is There.BARE else _Phase.INNOCENT)

    def is_refused(self, kind: PodKind) -> bool:
        """Whether pods of this kind are to get no sidecar now."""
        known = self._kinds.get(kind)
        return known is not None and known.phase in (_Phase.TRIED_BARE, _Phase.REFUSED)

    def _enter(self, kind: PodKind, phase: _Phase) -> _Known:
        self._kinds.pop(kind, None)
        while len(self._kinds) >= MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        known = self._kinds[kind] = _Known(phase=phase, since=self._clock())
        return known
