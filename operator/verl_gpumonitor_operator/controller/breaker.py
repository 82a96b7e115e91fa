# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker: where our own sidecar image fails, no further pod gets it.

`step` is pure: state and evidence in, state out. `BreakerKeeper` gathers the evidence from the pods and keeps the state
in one small document, which the webhook reads.

There is one breaker for each namespace, and one for all. A pod that fails opens its namespace's for a cool-down: what
is wrong may be that namespace's alone (no pull secret), or its owner's doing. Where several namespaces fail at once and
the image has started nowhere meanwhile, it is the image, and the one for all opens as well.

While a breaker cools down, evidence counts for nothing. After that (half-open) pods are injected again, and what is
seen next decides: a failure opens it for twice as long, a sidecar that was started meanwhile closes it. All belong to
one image: another one in the settings closes them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, Counter, Gauge

from verl_gpumonitor_operator.kube.errors import KubeError
from verl_gpumonitor_operator.settings import BreakerSettings

from .ports import ContainerPhase, PodRecord, StateStore
from .rescue import failure_of, waiting_cause_of

log = logging.getLogger(__name__)

SEVERAL_NAMESPACES: Final = 3
"""So many namespaces that fail at once speak against the image itself; two may well be one tenant's."""
MAX_NAMESPACES: Final = 256
"""Namespaces in the document; with more, those that rest longest stay. A ConfigMap holds ten times as much."""
UNKNOWN_SECONDS: Final = 30.0
"""So long a pod's failure waits for its workload to be known; after that it was nobody's."""
DOWN_SECONDS: Final = 30.0
"""So long a sidecar must wait at a stretch, in a pod that has begun, to be a failure of its image: it ended three times
in a row. Shorter than it takes until the pod gets another image, with which it says nothing any more."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One opening of a breaker. Times are Unix seconds."""

    since: Annotated[float, Meta(ge=0)] = 0.0
    """When it opened, the last time."""
    until: Annotated[float, Meta(ge=0)] = 0.0
    """End of the cool-down: from here on it is half-open, and pods are injected."""
    reason: Annotated[str, Meta(max_length=512)] = ""
    """One sentence: which pod failed, and how."""

    @property
    def cool_down_seconds(self) -> float:
        """Length of this cool-down."""
        return max(0.0, self.until - self.since)

    def stops(self, now: float) -> bool:
        """Whether injection stops at `now`."""
        return now < self.until


class BreakerState(Pause, frozen=True, kw_only=True, omit_defaults=True):
    """State of all breakers, in the form of their document. What it has of a `Pause` is of the one for all."""

    open: bool = False
    """Of the one for all namespaces."""
    image: str = ""
    """The image that fails; empty while all are closed."""
    namespaces: Annotated[dict[str, Pause], Meta(max_length=4 * MAX_NAMESPACES)] = {}
    """Breakers of single namespaces that are open or half-open."""

    def stops(self, now: float) -> bool:
        """Whether injection stops for all at `now`."""
        return self.open and now < self.until


CLOSED = BreakerState()

_decoder = msgspec.json.Decoder(BreakerState)


def encode(state: BreakerState) -> str:
    """JSON of the state. A closed one is written with `open`, so that a person sees it."""
    return msgspec.json.encode({"open": state.open} | msgspec.to_builtins(state)).decode()


def decode(document: str | None) -> BreakerState:
    """Read a document. Whatever cannot be read is a closed breaker: it opens again at the next failure."""
    try:
        state = _decoder.decode(document or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return CLOSED
    return state if state.open or state.namespaces else CLOSED


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods say about the image in the settings."""

    image: str
    failing: Mapping[str, str] = {}
    """By namespace, a sentence about one pod that this image holds, or held since the last step."""
    started: Mapping[str, float] = {}
    """By namespace, the latest start of a sidecar with this image; those without an open breaker may be left out."""
    latest_start: float | None = None
    """The same for all namespaces together; None: none was seen."""


def step(state: BreakerState, evidence: Evidence, now: float, settings: BreakerSettings) -> BreakerState:
    """Return the next state; the same object when nothing changes. Example: 60, 120, 240 s for failures in a row."""
    before = state if state.image == evidence.image else CLOSED
    namespaces = _namespaces(before.namespaces, evidence, now, settings)
    whole = _advanced(
        before if before.open else None,
        failing=_common(before, namespaces, evidence, now),
        started_at=evidence.latest_start,
        now=now,
        settings=settings,
    )
    after = _joined(whole, namespaces, evidence.image)
    return state if after == state else after


def _namespaces(
    before: Mapping[str, Pause], evidence: Evidence, now: float, settings: BreakerSettings
) -> dict[str, Pause]:
    after: dict[str, Pause] = {}
    for namespace in sorted({*before, *evidence.failing}):
        pause = _advanced(
            before.get(namespace),
            failing=evidence.failing.get(namespace),
            started_at=evidence.started.get(namespace),
            now=now,
            settings=settings,
        )
        if pause is not None:
            after[namespace] = pause
    if len(after) <= MAX_NAMESPACES:
        return after
    longest = sorted(after, key=lambda namespace: (after[namespace].until, namespace), reverse=True)
    return {namespace: after[namespace] for namespace in longest[:MAX_NAMESPACES]}


def _advanced(
    pause: Pause | None, *, failing: str | None, started_at: float | None, now: float, settings: BreakerSettings
) -> Pause | None:
    """One breaker's next state, None for a closed one."""
    if pause is None:
        return _opened(failing, now, settings.cool_down_seconds) if failing is not None else None
    if now < pause.until:
        return pause
    if failing is not None:
        longer = min(2 * max(pause.cool_down_seconds, settings.cool_down_seconds), settings.max_cool_down_seconds)
        return _opened(failing, now, longer)
    # A start from before says nothing: it was on a node where the image had been working all along.
    is_well = started_at is not None and started_at >= pause.until
    # Nobody has tried for so long that what was wrong says nothing about the next try.
    is_old = now >= pause.until + settings.max_cool_down_seconds
    return None if is_well or is_old else pause


def _common(state: BreakerState, namespaces: Mapping[str, Pause], evidence: Evidence, now: float) -> str | None:
    """Say that the image fails in several namespaces at once. None: it does not, or it has started since somewhere."""
    after = max(evidence.latest_start or 0.0, state.until if state.open else 0.0)
    failing = [pause for pause in namespaces.values() if pause.stops(now) and pause.since >= after]
    if len(failing) < SEVERAL_NAMESPACES:
        return None
    latest = max(failing, key=lambda pause: pause.since)
    return f"it fails in {len(failing)} namespaces; {latest.reason}"


def _opened(failing: str, now: float, cool_down_seconds: float) -> Pause:
    return Pause(since=now, until=now + cool_down_seconds, reason=failing[:512])


def _joined(whole: Pause | None, namespaces: dict[str, Pause], image: str) -> BreakerState:
    if whole is None:
        return BreakerState(image=image, namespaces=namespaces) if namespaces else CLOSED
    return BreakerState(
        open=True, image=image, since=whole.since, until=whole.until, reason=whole.reason, namespaces=namespaces
    )


class BreakerMetrics:
    """Whether injection stops, where, and how often it did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge(
            "gpumonitor_breaker_open",
            "1 while injection is stopped for all because our image fails.",
            registry=registry,
        )
        self._namespaces = Gauge(
            "gpumonitor_breaker_open_namespaces",
            "Namespaces in which injection is stopped because our image fails there.",
            registry=registry,
        )
        self._openings = Counter(
            "gpumonitor_breaker_openings",
            "Times that injection was stopped because our image failed, for all or in one namespace.",
            registry=registry,
        )
        self._failures = Counter(
            "gpumonitor_breaker_write_failures", "Failed attempts to keep the breaker's state.", registry=registry
        )

    def show(self, state: BreakerState, now: float) -> None:
        """Show where injection is stopped."""
        self._open.set(1.0 if state.stops(now) else 0.0)
        self._namespaces.set(sum(pause.stops(now) for pause in state.namespaces.values()))

    def opened(self, times: int) -> None:
        """Count openings."""
        self._openings.inc(times)

    def failed(self) -> None:
        """Count a read or write of the document that failed."""
        self._failures.inc()


class _News(NamedTuple):
    """A pod that failed or started, and when that was seen (Unix seconds)."""

    at: float
    pod: PodRecord


class BreakerKeeper:
    """Gathers evidence and keeps the state. Is a `PodObserver`; `run` does the work until it is cancelled.

    To be run by the holder of the Lease alone, which is the document's only writer.
    """

    def __init__(
        self,
        *,
        image: str,
        settings: BreakerSettings,
        store: StateStore,
        metrics: BreakerMetrics,
        belongs: Callable[[PodRecord], bool],
        clock: Callable[[], float] = time.time,
        interval_seconds: float = 1.0,
        retry_seconds: float = 5.0,
    ) -> None:
        """`belongs` says whether a pod is of a workload that is known; others are no evidence."""
        self._image = image
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._belongs = belongs
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._retry_seconds = retry_seconds
        self._held: dict[str, PodRecord] = {}
        self._down: dict[str, _News] = {}
        """Pods that have begun and whose sidecar waits since then without a break."""
        # A pod may be freed, and have another image, before the next step looks: its failure counts all the same. And
        # its job may be told of after the pod.
        self._failed: dict[str, _News] = {}
        self._began: dict[str, _News] = {}
        self._started: dict[str, float] = {}
        self._latest_start: float | None = None
        self._look = asyncio.Event()
        self._state: BreakerState | None = None
        self._written: BreakerState | None = None

    @property
    def state(self) -> BreakerState:
        """The state as it is meant to be; closed before the document was read."""
        return self._state or CLOSED

    def pod_seen(self, pod: PodRecord) -> None:
        """Take a pod as evidence, if it has the image in the settings, and the command that we give."""
        self._held.pop(pod.uid, None)
        down = self._down.pop(pod.uid, None)
        if pod.sidecar_image != self._image or pod.sidecar is None or not pod.own_command:
            return
        if failure_of(pod) is not None:
            self._held[pod.uid] = pod
            self._failed[pod.uid] = _News(self._clock(), pod)
            self._look.set()
        elif waiting_cause_of(pod) is not None:
            self._down[pod.uid] = _News(down.at if down is not None else self._clock(), pod)
        elif pod.sidecar.phase is ContainerPhase.RUNNING and pod.sidecar.started_at is not None:
            self._began[pod.uid] = _News(self._clock(), pod)

    def pod_gone(self, pod: PodRecord) -> None:
        """Forget a pod."""
        self._held.pop(pod.uid, None)
        self._down.pop(pod.uid, None)

    async def run(self) -> None:
        """Keep the state until cancelled."""
        while True:
            self._look.clear()
            if not await self.tick():
                await asyncio.sleep(self._retry_seconds)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_seconds):
                    await self._look.wait()

    async def tick(self) -> bool:
        """Make one step and write it if it is a change. False where the document could not be read or written."""
        try:
            if self._state is None:
                self._state = self._written = decode(await self._store.load())
            self._advance(self._state)
            if self._state != self._written:
                state = self._state
                await self._store.save(encode(state))
                self._written = state
        except KubeError as error:
            self._metrics.failed()
            log.warning("the breaker's state cannot be kept", extra={"error": str(error)})
            return False
        return True

    def _advance(self, before: BreakerState) -> None:
        now = self._clock()
        self._state = after = step(before, self._evidence(now), now, self._settings)
        self._started = {name: at for name, at in self._started.items() if name in after.namespaces}
        self._metrics.show(after, now)
        if after is not before:
            self._tell(before, after)

    def _evidence(self, now: float) -> Evidence:
        for pod in self._known(self._began, now):
            started_at = (pod.sidecar.started_at if pod.sidecar is not None else None) or 0.0
            self._started[pod.namespace] = max(self._started.get(pod.namespace, 0.0), started_at)
            self._latest_start = max(self._latest_start or 0.0, started_at)
        down = [pod for at, pod in self._down.values() if now - at >= DOWN_SECONDS]
        held = filter(self._belongs, [*down, *self._held.values()])
        failing = {pod.namespace: _sentence(pod) for pod in [*self._known(self._failed, now), *held]}
        return Evidence(image=self._image, failing=failing, started=self._started, latest_start=self._latest_start)

    def _known(self, news: dict[str, _News], now: float) -> Iterable[PodRecord]:
        """Take out the pods whose workload is known; those that stay unknown for long are dropped."""
        for uid, (at, pod) in list(news.items()):
            if self._belongs(pod):
                del news[uid]
                yield pod
            elif now - at > UNKNOWN_SECONDS:
                del news[uid]

    def _tell(self, before: BreakerState, after: BreakerState) -> None:
        """Log and count what opened and what closed."""
        was, now = _breakers(before), _breakers(after)
        opened = {whose: pause for whose, pause in now.items() if pause != was.get(whose)}
        self._metrics.opened(len(opened))
        for whose, pause in opened.items():
            keys = {"image": after.image, "reason": pause.reason, "seconds": pause.cool_down_seconds}
            log.error("injection stops", extra=keys | ({"namespace": whose} if whose else {}))
        for whose in was.keys() - now.keys():
            log.warning("injection goes on", extra={"image": before.image} | ({"namespace": whose} if whose else {}))


def _breakers(state: BreakerState) -> dict[str, Pause]:
    """All open breakers by namespace; the one for all has an empty name."""
    whole = {"": Pause(since=state.since, until=state.until, reason=state.reason)} if state.open else {}
    return {**state.namespaces, **whole}


def _sentence(pod: PodRecord) -> str:
    node = f" on node {pod.node_name}" if pod.node_name else ""
    reason = pod.sidecar.reason if pod.sidecar is not None else None
    return f"pod {pod.namespace}/{pod.name}{node}: {reason or failure_of(pod) or 'unknown'}"
