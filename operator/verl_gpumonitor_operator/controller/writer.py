# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Writes GPUMonitors: made, status patched, deleted; slowly enough for the API server, what matters first.

The caller says what is to be written; this says when. A status that waits is replaced by a newer one of the same
object, so that nothing old is ever written. The answer of each write comes back to the caller as an `Outcome`. A
namespace that refuses, as under a quota of GPUMonitors, is left alone for a while, so that a thousand jobs there do not
take what all others need.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
)

from . import monitors
from .events import TokenBucket
from .monitors import MonitorSeen
from .rates import Refusals
from .status import Status, Urgency, merge_patch

logger = logging.getLogger(__name__)

WORKERS: Final = 4
CREATORS: Final = 4
"""So many wait for their turn to make a GPUMonitor beside the statuses, however many jobs have none."""
REFUSALS: Final = 3
REST_SECONDS: Final = 30.0
"""A namespace that refused so many writes in a row is left alone for this time."""
MAX_REFUSING: Final = 1024
SAY_SECONDS: Final = 30.0


class Outcome(StrEnum):
    """How a write ended; the value is the label of its metric."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    MISSING = "missing"
    """The object, its namespace or the CRD is gone."""
    REFUSED = "refused"
    """Forbidden, as in a namespace that is being deleted."""
    INVALID = "invalid"
    """The schema does not admit it, which is a fault of ours or an older CRD."""
    FAILED = "failed"
    """The server did not answer, or failed itself; the same may work later."""


def outcome_of(error: KubeError) -> Outcome:
    """Classify a failed write."""
    if isinstance(error, NotFoundError):
        return Outcome.MISSING
    if isinstance(error, ForbiddenError):
        return Outcome.REFUSED
    if isinstance(error, InvalidError):
        return Outcome.INVALID
    return Outcome.FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusWrite:
    """One status to write."""

    namespace: str
    name: str
    before: Mapping[str, Any]
    """What is there, as far as we know."""
    status: Status
    urgency: Urgency
    done: Callable[[Outcome, Status], None]
    """Told how it ended, in the same loop."""


@dataclass(kw_only=True, slots=True)
class WriteCounts:
    """For metrics."""

    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    created: int = 0
    deleted: int = 0
    pruned_fields: frozenset[str] = frozenset()
    """Fields of a status that the server did not keep: its CRD is older than this operator."""


class _Answer(msgspec.Struct, frozen=True):
    status: dict[str, Any] = {}


class StatusWriter:
    """Queue of status writes, and the two other verbs. Run `run` as a task."""

    def __init__(
        self,
        client: KubeClient,
        *,
        writes_per_second: float,
        clock: Callable[[], float],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = client
        self._may_write = may_write
        self._clock = clock
        self._bucket = TokenBucket(rate=writes_per_second, burst=max(1.0, writes_per_second))
        self._queues: dict[Urgency, OrderedDict[tuple[str, str], StatusWrite]] = {
            urgency: OrderedDict() for urgency in sorted(Urgency, reverse=True)
        }
        """The most urgent first."""
        self._ready = asyncio.Semaphore(0)
        self._creating = asyncio.Semaphore(CREATORS)
        self._statuses_refused, self._creations_refused = (
            Refusals(after=REFUSALS, rest_seconds=REST_SECONDS, capacity=MAX_REFUSING) for _ in range(2)
        )
        """By namespace."""
        self._said_at: dict[Outcome, float] = {}
        self.counts = WriteCounts()

    @property
    def waiting(self) -> int:
        """Number of statuses that wait."""
        return sum(len(queue) for queue in self._queues.values())

    def submit(self, write: StatusWrite) -> None:
        """Queue a status in place of an older one of the same object. It keeps its place in the line."""
        if not self.exchange(write):
            self._queues[write.urgency][(write.namespace, write.name)] = write
            self._ready.release()

    def exchange(self, write: StatusWrite) -> bool:
        """Put a status in place of one of the same object that waits; False where none does.

        It waits where the more urgent of the two belongs. The other's `done` is never called.
        """
        key = (write.namespace, write.name)
        waits = next((urgency for urgency, queue in self._queues.items() if key in queue), None)
        if waits is None:
            return False
        if write.urgency > waits:
            del self._queues[waits][key]
        self._queues[max(write.urgency, waits)][key] = write
        return True

    async def run(self) -> None:
        """Write for ever, a few at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._ready.acquire()
            refused = self._refused()
            if refused is not None:
                self._end(refused, Outcome.REFUSED)
                await asyncio.sleep(0)
                continue
            await asyncio.sleep(self._bucket.wait(self._clock()))
            write = self._next()
            if write is not None:
                self._end(write, await self._write(write))

    def _end(self, write: StatusWrite, outcome: Outcome) -> None:
        self.counts.outcomes[outcome] += 1
        write.done(outcome, write.status)

    def _next(self) -> StatusWrite | None:
        for queue in self._queues.values():
            if queue:
                return queue.popitem(last=False)[1]
        return None

    def _refused(self) -> StatusWrite | None:
        """Take out one whose namespace is left alone, so that it costs no turn; None: there is none."""
        if not self._statuses_refused:
            return None
        now = self._clock()
        for queue in self._queues.values():
            for key, write in queue.items():
                if self._statuses_refused.rests(write.namespace, now):
                    del queue[key]
                    return write
        return None

    async def _write(self, write: StatusWrite) -> Outcome:
        patch = merge_patch(write.before, write.status)
        if not patch:
            return Outcome.UNCHANGED
        if not self._may_write():
            return Outcome.FAILED
        path = object_path(monitors.API_VERSION, monitors.PLURAL, namespace=write.namespace, name=write.name)
        try:
            answer = await self._client.merge_patch(f"{path}/status", {"status": patch})
        except KubeError as error:
            self._say("status was not written", error, namespace=write.namespace, name=write.name)
            if isinstance(error, ForbiddenError):
                self._statuses_refused.refused(write.namespace, self._clock())
            return outcome_of(error)
        self._statuses_refused.taken(write.namespace)
        self._look_for_pruning(write.status, answer)
        return Outcome.WRITTEN

    def _say(self, message: str, error: KubeError, *, namespace: str, name: str) -> None:
        """Log a failure, but one of a kind in a while: what ails one write mostly ails a thousand."""
        outcome, now = outcome_of(error), self._clock()
        if now - self._said_at.get(outcome, -SAY_SECONDS) < SAY_SECONDS:
            return
        self._said_at[outcome] = now
        level = logging.ERROR if outcome is Outcome.INVALID else logging.WARNING
        target = {"kind": monitors.KIND, "namespace": namespace, "name": name}
        logger.log(level, message, extra={"object": target, "error": str(error)})

    def _look_for_pruning(self, status: Status, answer: bytes) -> None:
        """An older CRD drops fields that it does not know, silently. Say so once for each."""
        try:
            kept = msgspec.json.decode(answer, type=_Answer).status
        except msgspec.DecodeError:
            return
        pruned = frozenset(pruned_fields(status, kept)) - self.counts.pruned_fields
        if pruned:
            self.counts.pruned_fields |= pruned
            logger.error(
                "the cluster's CRD of GPUMonitor is older than this operator: apply crds/ of this release",
                extra={"reason": "CRDTooOld", "error": "fields dropped: " + ", ".join(sorted(pruned))},
            )

    async def create(self, body: Mapping[str, Any]) -> MonitorSeen | None:
        """Create a GPUMonitor; returns it, or the one of that name that is there. None: not now. Never raises."""
        namespace = body["metadata"]["namespace"]
        async with self._creating:
            if self._creations_refused.rests(namespace, self._clock()):
                self.counts.outcomes[Outcome.REFUSED] += 1
                return None
            await asyncio.sleep(self._bucket.wait(self._clock()))
            return await self._create(body, namespace) if self._may_write() else None

    async def _create(self, body: Mapping[str, Any], namespace: str) -> MonitorSeen | None:
        name = body["metadata"]["name"]
        path = object_path(monitors.API_VERSION, monitors.PLURAL, namespace=namespace)
        try:
            try:
                created = await self._client.post(path, body)
                self.counts.created += 1
            except ConflictError:
                created = await self._client.get(f"{path}/{name}")
        except KubeError as error:
            self.counts.outcomes[outcome_of(error)] += 1
            self._say("GPUMonitor was not created", error, namespace=namespace, name=name)
            if isinstance(error, ForbiddenError):
                self._creations_refused.refused(namespace, self._clock())
            return None
        self._creations_refused.taken(namespace)
        return monitors.from_object(msgspec.json.decode(created))

    async def delete(self, monitor: MonitorSeen) -> bool:
        """Delete just this GPUMonitor, which must be one of ours. True when it is gone. Never raises."""
        if not monitor.managed:
            return False
        await asyncio.sleep(self._bucket.wait(self._clock()))
        if not self._may_write():
            return False
        path = object_path(monitors.API_VERSION, monitors.PLURAL, namespace=monitor.namespace, name=monitor.name)
        try:
            await self._client.delete(path, uid=monitor.uid)
        except (NotFoundError, ConflictError):
            return True
        except KubeError as error:
            self._say("GPUMonitor was not deleted", error, namespace=monitor.namespace, name=monitor.name)
            return False
        self.counts.deleted += 1
        return True


def pruned_fields(sent: Mapping[str, Any], kept: Mapping[str, Any], prefix: str = "status") -> list[str]:
    """Paths of fields that were sent and are not there afterwards, within lists as well: `status.findings[].since`."""
    pruned: list[str] = []
    for key, value in sent.items():
        path = f"{prefix}.{key}"
        if key not in kept:
            pruned.append(path)
        elif isinstance(value, Mapping) and isinstance(kept[key], Mapping):
            pruned += pruned_fields(value, kept[key], path)
        elif isinstance(value, list) and isinstance(kept[key], list):
            for one, other in zip(value, kept[key], strict=False):
                if isinstance(one, Mapping) and isinstance(other, Mapping):
                    pruned += pruned_fields(one, other, f"{path}[]")
    return pruned
