# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Events (events.k8s.io/v1) on users' jobs and on GPUMonitors: one for each transition, a series for repeats.

The name of an Event follows from the object's uid, the reason and what it is about, so that a controller that was
restarted finds its own Event again instead of writing a second one. Its note cannot be changed; only its series can.
So another GPU with the same trouble gets an Event of its own, up to a few: a bad node shall not make a thousand.

What waits is written the gravest first, and where the queue is full the least grave goes. Repeats have a budget for
each object, after which they are counted and told together later, so that a finding that comes and goes all day is a
number that rises now and then. What fails waits beside the others and not before them. What the API server refuses (a
quota of Events, a namespace that is being deleted) is counted and dropped, and that namespace is left alone for a
while.
"""

import asyncio
import contextlib
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
from verl_gpumonitor_operator.kube.errors import (
    ConflictError,
    ForbiddenError,
    HeldBackError,
    KubeError,
    NotFoundError,
)

from .rates import KeyedBuckets, Rate, Refusals

logger = logging.getLogger(__name__)

CONTROLLER: Final = "gpumonitor.dev/controller"
API: Final = "events.k8s.io/v1"
MAX_NOTE: Final = 1024
MAX_REASON: Final = 128
MAX_QUEUE: Final = 4096
MAX_REMEMBERED: Final = 16_384
"""Events whose count is known: a dozen for each of a thousand jobs. Of others it is asked."""
MAX_TRIES: Final = 10
FIRST_DELAY_SECONDS: Final = 0.5
MAX_DELAY_SECONDS: Final = 30.0
"""Pauses between the tries of one Event: doubled up to this, two minutes in all."""
REPEATS: Final = Rate(burst=25, per_second=1 / 300)
"""Budget of one object for repeats, as Kubernetes' own client libraries have it."""
MIN_WAIT_SECONDS: Final = 1.0
"""A moment that a clock cannot tell apart would be no wait at all."""
MAX_BUDGETS: Final = 8192
REFUSALS: Final = 3
REFUSED_SECONDS: Final = 30.0
"""A namespace that refused so many new Events in a row is not asked for another one before this time."""
MAX_REFUSING: Final = 1024
SAY_SECONDS: Final = 30.0
"""What ails one Event mostly ails a thousand: it is logged once in this time, for each cause."""
MAX_NAME_STEM: Final = 200
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
        # Where the name is cut, no dot or dash may stand at the end of what is left.
        return f"{self.regarding.name[:MAX_NAME_STEM].rstrip('.-')}.{digest}"


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
    # A conflict that is not about the name is two writers at a time, of this Event or of the quota that it counts for.
    if error.transient:
        return Step.WAIT
    if isinstance(error, ConflictError):
        return Step.READ if step is Step.POST and error.reason != "Conflict" else Step.WAIT
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
    """The queue was full; the least grave that waited was dropped."""


class _Series(msgspec.Struct, frozen=True):
    count: int = 1


class _Event(msgspec.Struct, frozen=True, rename="camel"):
    event_time: str | None = None
    series: _Series | None = None


@dataclass(kw_only=True, slots=True)
class _Waiting:
    """An occurrence in the queue, with all of the same name that came since."""

    occurrence: Occurrence
    times: int = 1
    """Occurrences that no Event counts yet."""
    tries: int = 0
    not_before: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.occurrence.regarding.namespace}/{self.occurrence.name}"


class _Queue:
    """What waits, by severity and, within one, in the order in which it came."""

    def __init__(self) -> None:
        self._by_severity: dict[Severity, OrderedDict[str, _Waiting]] = {
            severity: OrderedDict() for severity in (Severity.CRITICAL, Severity.WARNING, Severity.INFO)
        }
        """The gravest first."""

    def __len__(self) -> int:
        return sum(map(len, self._by_severity.values()))

    def add(self, item: _Waiting) -> bool:
        """Put an item in; one of the same name that waits goes on, with the newer words. False: one was dropped."""
        queue = self._by_severity[item.occurrence.severity]
        held = self._pop(item.key)
        if held is not None:
            item.times += held.times
            item.tries, item.not_before = max(item.tries, held.tries), max(item.not_before, held.not_before)
            if held.occurrence.at > item.occurrence.at:
                item.occurrence = held.occurrence
                queue = self._by_severity[item.occurrence.severity]
        dropped = held is None and len(self) >= MAX_QUEUE
        queue[item.key] = item
        if dropped:
            least = next(waiting for waiting in reversed(self._by_severity.values()) if waiting)
            least.popitem()
        return not dropped

    def take(self, now: float) -> _Waiting | None:
        """Take out what is to be written next; None: nothing is due."""
        for queue in self._by_severity.values():
            for key, item in queue.items():
                if item.not_before <= now:
                    del queue[key]
                    return item
        return None

    def due_at(self) -> float | None:
        """When the next one is due; None: nothing waits."""
        times = [item.not_before for queue in self._by_severity.values() for item in queue.values()]
        return min(times, default=None)

    def _pop(self, key: str) -> _Waiting | None:
        for queue in self._by_severity.values():
            if key in queue:
                return queue.pop(key)
        return None


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
        self._budgets = KeyedBuckets(REPEATS, capacity=MAX_BUDGETS)
        self._clock = clock
        self._queue = _Queue()
        self._written: OrderedDict[str, int] = OrderedDict()
        """Count of each Event, as far as it is known."""
        self._refusals = Refusals(after=REFUSALS, rest_seconds=REFUSED_SECONDS, capacity=MAX_REFUSING)
        """Of new Events, by namespace."""
        self._said_at: dict[str, float] = {}
        self._wake = asyncio.Event()
        self.counts = EventCounts()

    def record(self, occurrence: Occurrence) -> None:
        """Queue an occurrence. With those of the same object and reason that still wait it makes one."""
        if not self._queue.add(_Waiting(occurrence=occurrence)):
            self.counts.overflowed += 1
        self._wake.set()

    @property
    def waiting(self) -> int:
        """Length of the queue."""
        return len(self._queue)

    async def run(self) -> None:
        """Write what is queued, for ever."""
        while True:
            await self._something_due()
            while not self._may_write():  # noqa: ASYNC110 - set by whoever renews the Lease, each few seconds
                await asyncio.sleep(0.5)
            item = self._queue.take(self._clock())
            if item is not None and self._may_be_written(item):
                await self._write(item)
            else:
                # Dropping a thousand that nobody takes must not hold the loop up.
                await asyncio.sleep(0)

    async def _something_due(self) -> None:
        while True:
            self._wake.clear()
            due_at, now = self._queue.due_at(), self._clock()
            if due_at is not None and due_at <= now:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if due_at is None else due_at - now):
                    await self._wake.wait()

    def _may_be_written(self, item: _Waiting) -> bool:
        """Whether it is to be written now. Else it is dropped, or waits for its object's budget."""
        now, regarding = self._clock(), item.occurrence.regarding
        if item.key not in self._written:
            if self._refusals.rests(regarding.namespace, now):
                self.counts.refused += 1
                return False
            # The first of its name is news, of which there can be no flood: names are few.
            self._budgets.take(regarding.uid, now)
            return True
        wait = self._budgets.take(regarding.uid, now) if item.tries == 0 else 0.0
        if wait > 0.0:
            item.not_before = now + max(MIN_WAIT_SECONDS, wait)
            self._put_back(item)
        return wait == 0.0

    def _put_back(self, item: _Waiting) -> None:
        if not self._queue.add(item):
            self.counts.overflowed += 1

    async def _write(self, item: _Waiting) -> None:
        step = first_step(remembered=item.key in self._written)
        while step is not Step.DONE:
            await asyncio.sleep(self._bucket.wait(self._clock()))
            try:
                step = await self._do(step, item)
            except (KubeError, msgspec.DecodeError) as error:
                following = self._failed(step, item, error)
                if following is None:
                    return
                step = following

    def _failed(self, step: Step, item: _Waiting, error: KubeError | msgspec.DecodeError) -> Step | None:
        """Return the step that follows at once; None: none does."""
        following = after_failure(step, error) if isinstance(error, KubeError) else Step.DROP
        item.tries += not isinstance(error, HeldBackError)
        if following is not Step.DROP and item.tries >= MAX_TRIES:
            self.counts.given_up += 1
            self._say(logging.WARNING, "event was given up", item, error)
            return None
        if following is Step.WAIT:
            asked = (error.retry_after_seconds if isinstance(error, KubeError) else None) or 0.0
            delay = FIRST_DELAY_SECONDS * 2 ** max(0, item.tries - 1)
            item.not_before = self._clock() + min(MAX_DELAY_SECONDS, max(delay, asked))
            self._put_back(item)
            return None
        if following is Step.DROP:
            self.counts.refused += 1
            self._say(logging.INFO, "event was refused", item, error)
            if step is Step.POST and isinstance(error, ForbiddenError):
                self._refusals.refused(item.occurrence.regarding.namespace, self._clock())
            return None
        return following

    async def _do(self, step: Step, item: _Waiting) -> Step:
        occurrence, namespace = item.occurrence, item.occurrence.regarding.namespace
        path = object_path(API, "events", namespace=namespace, name=occurrence.name)
        if step is Step.POST:
            await self._client.post(
                object_path(API, "events", namespace=namespace), body(occurrence, instance=self._instance)
            )
            self._refusals.taken(namespace)
            self._remember(item.key, 1)
            self.counts.posted += 1
            item.times -= 1
            return Step.PATCH if item.times else Step.DONE
        if step is Step.READ:
            found = msgspec.json.decode(await self._client.get(path), type=_Event)
            self._remember(item.key, found.series.count if found.series else 1)
            if found.series is None and found.event_time == micro_time(occurrence.at):
                # Our own, whose answer was lost.
                item.times -= 1
            return Step.PATCH if item.times else Step.DONE
        count = self._written.get(item.key, 1) + item.times
        await self._client.merge_patch(path, series(count, occurrence.at))
        self._remember(item.key, count)
        self.counts.repeated += item.times
        return Step.DONE

    def _remember(self, key: str, count: int) -> None:
        self._written[key] = count
        self._written.move_to_end(key)
        while len(self._written) > MAX_REMEMBERED:
            self._written.popitem(last=False)

    def _say(self, level: int, message: str, item: _Waiting, error: Exception) -> None:
        """Log a failure, but one of a kind in a while."""
        now, cause = self._clock(), f"{message}: {type(error).__name__}"
        if now - self._said_at.get(cause, -SAY_SECONDS) >= SAY_SECONDS:
            self._said_at[cause] = now
            logger.log(level, message, extra=_about(item.occurrence, error))


def _about(occurrence: Occurrence, error: Exception) -> dict[str, Any]:
    regarding = occurrence.regarding
    return {
        "object": {"kind": regarding.kind, "namespace": regarding.namespace, "name": regarding.name},
        "reason": occurrence.reason,
        "error": str(error),
    }
