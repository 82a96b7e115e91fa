# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Events (events.k8s.io/v1) on users' jobs and on GPUMonitors: one for each transition, a series for repeats.

The name of an Event follows from the object's uid, the reason and what it is about, so that a controller that was
restarted finds its own Event again instead of writing a second one. Its note cannot be changed; only its series can.
So another GPU with the same trouble gets an Event of its own, up to a few: a bad node shall not make a thousand.
What the API server refuses (a namespace that is being deleted, above all) is counted and dropped, since it would be
refused for ever.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import ConflictError, KubeError, NotFoundError

logger = logging.getLogger(__name__)

CONTROLLER: Final = "gpumonitor.dev/controller"
API: Final = "events.k8s.io/v1"
MAX_NOTE: Final = 1024
MAX_REASON: Final = 128
MAX_QUEUE: Final = 1000
MAX_REMEMBERED: Final = 4096
MAX_TRIES: Final = 6
SUBJECTS: Final = 8
"""Events of one object and reason, for different subjects. Two that share one are counted in it, and one is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectRef:
    """The object that an Event is about. Without uid, `kubectl describe` would not show it."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Occurrence:
    """Something happened to an object."""

    regarding: ObjectRef
    reason: str
    note: str
    severity: Severity
    action: str = "Diagnose"
    at: float
    """Unix seconds."""
    subject: str = ""
    """What it is about, such as a GPU; empty where that is the object as a whole."""

    @property
    def event_type(self) -> str:
        """Severity `info` makes a Normal Event, the others Warning."""
        return "Normal" if self.severity is Severity.INFO else "Warning"

    @property
    def name(self) -> str:
        """Name of its Event."""
        place = f"/{_digest(self.subject) % SUBJECTS}" if self.subject else ""
        digest = f"{_digest(f'{self.regarding.uid}/{self.reason}{place}'):064x}"[:16]
        return f"{self.regarding.name[:200]}.{digest}"


def _digest(text: str) -> int:
    """A number that is the same after a restart, as `hash` is not."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


class Step(StrEnum):
    """Next request for an occurrence."""

    POST = "post"
    """Create the Event."""
    READ = "read"
    """It exists already: ask how often it has happened."""
    PATCH = "patch"
    """Count one more in its series."""
    DONE = "done"
    DROP = "drop"
    """The server will not have it."""
    WAIT = "wait"
    """The same again, later."""


def first_step(*, remembered: bool) -> Step:
    """Begin with a patch where this process has written the Event before."""
    return Step.PATCH if remembered else Step.POST


def after_failure(step: Step, error: KubeError) -> Step:
    """Say what follows a request that failed."""
    if error.transient:
        return Step.WAIT
    if step is Step.POST and isinstance(error, ConflictError):
        return Step.READ
    if step in (Step.READ, Step.PATCH) and isinstance(error, NotFoundError):
        # It has expired (an hour, by default), so that it is new again.
        return Step.POST
    return Step.DROP


def body(occurrence: Occurrence, *, instance: str) -> dict[str, Any]:
    """Return the Event to create. `instance`: name of the reporting pod."""
    regarding = occurrence.regarding
    return {
        "apiVersion": API,
        "kind": "Event",
        "metadata": {"name": occurrence.name, "namespace": regarding.namespace},
        "eventTime": micro_time(occurrence.at),
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
        "action": occurrence.action[:MAX_REASON],
        "reason": occurrence.reason[:MAX_REASON],
        "regarding": {
            "apiVersion": regarding.api_version,
            "kind": regarding.kind,
            "namespace": regarding.namespace,
            "name": regarding.name,
            "uid": regarding.uid,
        },
        "note": shortened(occurrence.note),
        "type": occurrence.event_type,
    }


def series(count: int, at: float) -> dict[str, Any]:
    """Return the patch that makes an Event have happened `count` times (at least 2), last at `at`."""
    return {"series": {"count": count, "lastObservedTime": micro_time(at)}}


def shortened(note: str) -> str:
    """Note of at most 1,024 bytes."""
    encoded = note.encode()
    return note if len(encoded) <= MAX_NOTE else encoded[: MAX_NOTE - 3].decode(errors="ignore") + "…"


def micro_time(seconds: float) -> str:
    """Kubernetes MicroTime of Unix seconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(kw_only=True, slots=True)
class TokenBucket:
    """Lets `rate` things a second pass, and `burst` at once. Time is an argument."""

    rate: float
    burst: float
    _tokens: float = field(init=False)
    _at: float | None = None

    def __post_init__(self) -> None:
        self._tokens = self.burst

    def wait(self, now: float) -> float:
        """Take one token; returns the seconds to wait before using it."""
        if self._at is not None:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self.rate)


@dataclass(kw_only=True, slots=True)
class EventCounts:
    """For metrics: what became of occurrences."""

    posted: int = 0
    repeated: int = 0
    refused: int = 0
    """The API server will not have them."""
    given_up: int = 0
    """Tried `MAX_TRIES` times."""
    overflowed: int = 0
    """The queue was full."""


class _Series(msgspec.Struct, frozen=True):
    count: int = 1


class _Event(msgspec.Struct, frozen=True):
    series: _Series | None = None


class EventRecorder:
    """Takes occurrences at once and writes them as it may. One task runs `run`."""

    def __init__(
        self,
        client: KubeClient,
        *,
        instance: str,
        rate: float,
        burst: int,
        clock: Callable[[], float],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = client
        self._may_write = may_write
        self._instance = instance
        self._bucket = TokenBucket(rate=rate, burst=burst)
        self._clock = clock
        self._queue: OrderedDict[str, Occurrence] = OrderedDict()
        self._written: OrderedDict[str, int] = OrderedDict()
        self._wake = asyncio.Event()
        self.counts = EventCounts()

    def record(self, occurrence: Occurrence) -> None:
        """Queue an occurrence. One of the same object and reason that still waits is replaced."""
        key = f"{occurrence.regarding.namespace}/{occurrence.name}"
        if key not in self._queue and len(self._queue) >= MAX_QUEUE:
            self.counts.overflowed += 1
            return
        self._queue[key] = occurrence
        self._wake.set()

    @property
    def waiting(self) -> int:
        """Length of the queue."""
        return len(self._queue)

    async def run(self) -> None:
        """Write what is queued, for ever."""
        while True:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(self._bucket.wait(self._clock()))
            while not self._may_write():  # noqa: ASYNC110 - set by whoever renews the Lease, each few seconds
                await asyncio.sleep(0.5)
            key, occurrence = self._queue.popitem(last=False)
            await self._write(key, occurrence)

    async def _write(self, key: str, occurrence: Occurrence) -> None:
        step = first_step(remembered=key in self._written)
        tries, delay = 0, 0.5
        while step not in (Step.DONE, Step.DROP):
            try:
                step = await self._do(step, key, occurrence)
            except (KubeError, msgspec.DecodeError) as error:
                following = after_failure(step, error) if isinstance(error, KubeError) else Step.DROP
                tries += 1
                if tries >= MAX_TRIES:
                    self.counts.given_up += 1
                    logger.warning("event was given up", extra=_about(occurrence, error))
                    return
                if following is Step.WAIT:
                    await asyncio.sleep(delay)
                    delay = min(30.0, delay * 2)
                    continue
                step = following
                if step is Step.DROP:
                    self.counts.refused += 1
                    logger.info("event was refused", extra=_about(occurrence, error))

    async def _do(self, step: Step, key: str, occurrence: Occurrence) -> Step:
        namespace = occurrence.regarding.namespace
        path = object_path(API, "events", namespace=namespace, name=occurrence.name)
        if step is Step.POST:
            await self._client.post(
                object_path(API, "events", namespace=namespace), body(occurrence, instance=self._instance)
            )
            self._remember(key, 1)
            self.counts.posted += 1
            return Step.DONE
        if step is Step.READ:
            found = msgspec.json.decode(await self._client.get(path), type=_Event)
            self._remember(key, found.series.count if found.series else 1)
            return Step.PATCH
        count = self._written.get(key, 1) + 1
        await self._client.merge_patch(path, series(count, occurrence.at))
        self._remember(key, count)
        self.counts.repeated += 1
        return Step.DONE

    def _remember(self, key: str, count: int) -> None:
        self._written[key] = count
        self._written.move_to_end(key)
        while len(self._written) > MAX_REMEMBERED:
            self._written.popitem(last=False)


def _about(occurrence: Occurrence, error: Exception) -> dict[str, Any]:
    regarding = occurrence.regarding
    return {
        "object": {"kind": regarding.kind, "namespace": regarding.namespace, "name": regarding.name},
        "reason": occurrence.reason,
        "error": str(error),
    }
