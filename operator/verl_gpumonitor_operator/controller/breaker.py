# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker: while our own sidecar image fails, no further pod gets it.

`step` is pure: state and evidence in, state out. `BreakerKeeper` gathers the evidence from the pods and keeps the state
in one small document, which the webhook reads.

Closed, a failing pod opens it for a cool-down. Until that has passed, evidence counts for nothing. After that
(half-open) pods are injected again, and what is seen next decides: a pod that fails opens it for twice as long, a
sidecar that was started meanwhile closes it. It belongs to one image: another one in the settings closes it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, Counter, Gauge

from verl_gpumonitor_operator.kube.errors import KubeError
from verl_gpumonitor_operator.settings import BreakerSettings

from .ports import ContainerPhase, PodRecord, StateStore
from .rescue import failure_of

log = logging.getLogger(__name__)


class BreakerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of the breaker, in the form of its document. Times are Unix seconds."""

    open: bool = False
    image: str = ""
    """The image that fails; empty while closed."""
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
    return state if state.open else CLOSED


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods say about the image in the settings."""

    image: str
    failing: str | None = None
    """A sentence about one pod that this image holds now; None: there is none."""
    started_at: float | None = None
    """Latest start of a sidecar with this image that was seen running; None: none was."""


def step(state: BreakerState, evidence: Evidence, now: float, settings: BreakerSettings) -> BreakerState:
    """Return the next state; the same object when nothing changes. Example: 60, 120, 240 s for failures in a row."""
    if not state.open or state.image != evidence.image:
        if evidence.failing is not None:
            return _opened(evidence, now, settings.cool_down_seconds)
        return CLOSED if state.open else state
    if now < state.until:
        return state
    if evidence.failing is not None:
        longer = min(2 * max(state.cool_down_seconds, settings.cool_down_seconds), settings.max_cool_down_seconds)
        return _opened(evidence, now, longer)
    # A start from before says nothing: it was on a node where the image had been working all along.
    if evidence.started_at is not None and evidence.started_at >= state.until:
        return CLOSED
    return state


def _opened(evidence: Evidence, now: float, cool_down_seconds: float) -> BreakerState:
    reason = (evidence.failing or "")[:512]
    return BreakerState(open=True, image=evidence.image, since=now, until=now + cool_down_seconds, reason=reason)


class BreakerMetrics:
    """Whether injection stops, and how often it did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge(
            "gpumonitor_breaker_open", "1 while injection is stopped because our image fails.", registry=registry
        )
        self._openings = Counter(
            "gpumonitor_breaker_openings",
            "Times that injection was stopped because our image failed.",
            registry=registry,
        )
        self._failures = Counter(
            "gpumonitor_breaker_write_failures", "Failed attempts to keep the breaker's state.", registry=registry
        )

    def show(self, *, stops: bool) -> None:
        """Show whether injection is stopped."""
        self._open.set(1.0 if stops else 0.0)

    def opened(self) -> None:
        """Count an opening."""
        self._openings.inc()

    def failed(self) -> None:
        """Count a read or write of the document that failed."""
        self._failures.inc()


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
        clock: Callable[[], float] = time.time,
        interval_seconds: float = 1.0,
        retry_seconds: float = 5.0,
    ) -> None:
        self._image = image
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._retry_seconds = retry_seconds
        self._failing: dict[str, str] = {}
        # A pod may be freed, and have another image, before the next step looks: its failure counts all the same.
        self._failed_meanwhile: str | None = None
        self._look = asyncio.Event()
        self._started_at: float | None = None
        self._state: BreakerState | None = None
        self._written: BreakerState | None = None

    @property
    def state(self) -> BreakerState:
        """The state as it is meant to be; closed before the document was read."""
        return self._state or CLOSED

    def pod_seen(self, pod: PodRecord) -> None:
        """Take a pod as evidence, if it has the image in the settings."""
        self._failing.pop(pod.uid, None)
        if pod.sidecar_image != self._image or pod.sidecar is None:
            return
        if failure_of(pod) is not None:
            node = f" on node {pod.node_name}" if pod.node_name else ""
            sentence = f"pod {pod.namespace}/{pod.name}{node}: {pod.sidecar.reason}"
            self._failing[pod.uid] = self._failed_meanwhile = sentence
            self._look.set()
        elif pod.sidecar.phase is ContainerPhase.RUNNING and pod.sidecar.started_at is not None:
            self._started_at = max(self._started_at or 0.0, pod.sidecar.started_at)

    def pod_gone(self, pod: PodRecord) -> None:
        """Forget a pod."""
        self._failing.pop(pod.uid, None)

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
        failing = next(iter(self._failing.values()), self._failed_meanwhile)
        self._failed_meanwhile = None
        evidence = Evidence(image=self._image, failing=failing, started_at=self._started_at)
        self._state = after = step(before, evidence, now, self._settings)
        self._metrics.show(stops=after.stops(now))
        if after is before:
            return
        if after.open:
            self._metrics.opened()
            seconds = after.cool_down_seconds
            log.error("injection stops", extra={"image": after.image, "reason": after.reason, "seconds": seconds})
        else:
            log.warning("injection goes on", extra={"image": before.image})
