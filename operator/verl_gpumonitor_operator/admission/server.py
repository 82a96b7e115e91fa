# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The webhook's server: it answers every review with "allowed", with a patch at best, and in time.

An answer that refuses, or one that the API server cannot use, would refuse the user's pod in spite of
`failurePolicy: Ignore`. So whatever goes wrong here ends in an answer without a patch, and is counted.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aiohttp import StreamReader, web

from verl_gpumonitor_operator.certificates import CertificateError, load_leaf, server_context
from verl_gpumonitor_operator.listening import Listener, Pages, ServerLimits
from verl_gpumonitor_operator.settings import Settings

from . import mutation, presence, refusals, review
from .kubeapi import KubeApi
from .metrics import Metrics
from .mutation import Outcome, Patch, Skip, SkipReason
from .preflight import Preflight, PreflightError
from .refusals import Refusals
from .review import Request

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 4 * 2**20
"""etcd takes objects of 1.5 MiB; in a review they come with defaults and managed fields."""
MAX_BODIES_BYTES: Final = 16 * 2**20
"""All bodies that are on their way together; more are answered at once, without a patch."""
REFUSED: Final = (
    "its controller asked for such pods again and again, and none is there with the sidecar: most likely another policy"
    " of the cluster refuses it; events of the pod's owner name the rule"
)
BODY_SECONDS: Final = 2.0
"""Time in which a body must arrive. The API server sends it in one go."""
ANSWER_SECONDS: Final = 2.0
"""An answer leaves by then; the API server waits three seconds."""
MAX_IN_FLIGHT: Final = 512
"""Requests beyond this are answered at once, without a patch."""
MAX_PREFLIGHTS: Final = 32
"""Pods whose facts are gathered at the same time; the others wait for their turn within their own deadline."""
DRAIN_SECONDS: Final = 3.0
"""After SIGTERM the server goes on this long, until no API server sends it anything more."""
SHUTDOWN_SECONDS: Final = 5.0
LIMITS: Final = ServerLimits(
    # Two of any size of API servers that are busy. Some 30 KiB each: others in the cluster may come here, too.
    connections=1024,
    connections_of_peer=512,
    first_request_seconds=10.0,
    # Longer than the API server keeps an idle connection, so that it is never us who closes one under a request.
    idle_seconds=300.0,
)


class Result(StrEnum):
    """What became of a request; label of the metric."""

    INJECTED = "injected"
    SKIPPED = "skipped"
    FAILED = "failed"
    """Answered without a patch because of a fault of ours, or of the request."""


class Failure(StrEnum):
    """Why a request failed; label of the metric."""

    BROKEN_REQUEST = "BrokenRequest"
    TOO_LARGE = "TooLarge"
    OVERLOADED = "Overloaded"
    TIMEOUT = "Timeout"
    EXCEPTION = "Exception"


class Admission:
    """Turns the bytes of a review into the bytes of its answer. Never raises, except when it is cancelled."""

    def __init__(self, settings: Settings, preflight: Preflight, metrics: Metrics) -> None:
        self._settings = settings
        self._preflight = preflight
        self._metrics = metrics
        self._refusals = Refusals()
        self._turns = asyncio.Semaphore(MAX_PREFLIGHTS)
        self._in_flight = 0

    async def answer(self, body: bytes) -> bytes:
        """Decide on one review."""
        started = time.monotonic()
        self._in_flight += 1
        try:
            return await self._answer(body)
        finally:
            self._in_flight -= 1
            self._metrics.seconds.observe(time.monotonic() - started)

    def failed(self, body: bytes, failure: Failure) -> bytes:
        """Answer without a patch, and count why. `body` may be a part of one."""
        self._metrics.requests.labels(Result.FAILED, failure).inc()
        return review.allowed(review.uid(body))

    async def _answer(self, body: bytes) -> bytes:
        if self._in_flight > MAX_IN_FLIGHT:
            return self.failed(body, Failure.OVERLOADED)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._decided(body)
        except TimeoutError:
            return self.failed(body, Failure.TIMEOUT)
        except Exception:
            # Whatever it is, the user's pod must start. The traceback says where; the body may hold secrets.
            log.exception("a request could not be decided on")
            return self.failed(body, Failure.EXCEPTION)

    async def _decided(self, body: bytes) -> bytes:
        try:
            request = review.decode(body)
            pod = request.pod() if request.creates_pod else None
        except (ValueError, RecursionError) as error:
            log.warning("a request could not be read", extra={"error": type(error).__name__, "bytes": len(body)})
            return self.failed(body, Failure.BROKEN_REQUEST)
        if pod is None:
            return self._counted(request, Skip(reason=SkipReason.NOT_A_JOB))
        outcome = await self._outcome(pod, request.namespace or "")
        is_first = isinstance(outcome, Patch) and presence.position(pod) is None
        if is_first and not request.dry_run:
            outcome = await self._unless_refused(pod, request.namespace or "", outcome)
        return self._counted(request, outcome)

    async def _unless_refused(self, pod: dict[str, object], namespace_name: str, outcome: Outcome) -> Outcome:
        """Leave a pod alone that was asked for several times, and never came to be with the sidecar."""
        kind = refusals.kind_of(pod, namespace_name)
        if kind is None:
            return outcome
        if self._refusals.ask(kind):
            there = await self._preflight.which_are_there(kind)
            if there is not None:
                self._refusals.look(kind, there)
        if not self._refusals.is_refused(kind):
            return outcome
        return mutation.annotated(pod, Skip(reason=SkipReason.REFUSED, message=REFUSED))

    async def _outcome(self, pod: dict[str, object], namespace_name: str) -> Outcome:
        skip = mutation.not_ours(pod, namespace_name, self._settings)
        if skip is not None:
            return mutation.annotated(pod, skip)
        try:
            async with self._turns:
                namespace, cluster = await self._preflight.gather(pod, namespace_name)
        except PreflightError as error:
            return mutation.without_facts(pod, self._settings, str(error))
        return mutation.mutate(pod, namespace=namespace, policy=self._settings, cluster=cluster)

    def _counted(self, request: Request, outcome: Outcome) -> bytes:
        skipped = isinstance(outcome, Skip)
        labels = (Result.SKIPPED, outcome.reason) if isinstance(outcome, Skip) else (Result.INJECTED, "")
        self._metrics.requests.labels(*labels).inc()
        if skipped and outcome.operations:
            log.info("not injected", extra={"namespace": request.namespace, "reason": labels[1]})
        return review.allowed(request.uid, outcome.operations)


class Server:
    """Two listeners: `/mutate` by TLS, and health and metrics in plain. `run` returns after `stop` was called."""

    def __init__(
        self,
        settings: Settings,
        api: KubeApi,
        *,
        port: int = 9443,
        health_port: int = 8081,
        host: str | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        limits: ServerLimits = LIMITS,
    ) -> None:
        """`host` None: all addresses. A port 0 takes a free one; see `addresses`."""
        self._metrics = Metrics()
        self._preflight = Preflight(api, settings, on_certificates=self._take_certificates)
        self._metrics.paused.set_function(lambda: float(self._preflight.paused is not None))
        self._admission = Admission(settings, self._preflight, self._metrics)
        self._tls = server_context()
        self._host = host
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics_page}
        self._health = Pages(pages, host=host, port=health_port)
        self._listener = Listener(
            self._mutate, context=self._tls, host=host, port=port, limits=limits, metrics=self._metrics
        )
        self._bodies_bytes = 0
        self._drain_seconds = drain_seconds
        self._served: Mapping[str, bytes] | None = None
        self._has_leaf = asyncio.Event()
        self._stopping = asyncio.Event()
        self._is_listening = False
        self.addresses: dict[str, tuple[str, int]] = {}
        """`mutate` and `health`: where each listens, once it does."""

    def stop(self) -> None:
        """Ask for an orderly end."""
        self._stopping.set()

    @property
    def is_ready(self) -> bool:
        """Whether requests should come here: a certificate is served, the cluster is known, no end was asked for."""
        return self._is_listening and self._preflight.is_ready and not self._stopping.is_set()

    async def run(self) -> None:
        """Serve until `stop`. Raises OSError where a port is taken."""
        facts = asyncio.create_task(self._preflight.run(), name="preflight")
        try:
            await self._health.start()
            self.addresses["health"] = (self._host or "", self._health.port)
            if await self._leaf_or_stop():
                # On a first install the controller took its Lease and made the leaf a moment ago: once this server is
                # ready, its first pod must not be told that there is no controller.
                await self._preflight.look_at_guards()
                await self._listener.start()
                self.addresses["mutate"] = (self._host or "", self._listener.port)
                _calm_garbage_collection()
                self._is_listening = True
                log.info("serving", extra={"port": self.addresses["mutate"][1]})
                await self._stopping.wait()
                log.info("draining")
                await asyncio.sleep(self._drain_seconds)
        finally:
            await self._listener.close(SHUTDOWN_SECONDS)
            await self._health.close(SHUTDOWN_SECONDS)
            facts.cancel()
            await asyncio.gather(facts, return_exceptions=True)

    async def _leaf_or_stop(self) -> bool:
        """Wait for the first certificate. False when the end comes before."""
        waits = [asyncio.create_task(event.wait()) for event in (self._has_leaf, self._stopping)]
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return not self._stopping.is_set()

    def _take_certificates(self, data: Mapping[str, bytes]) -> bool:
        """Serve what the Secret holds, if that is another than before. An unusable one leaves the old in place."""
        if data == self._served:
            return self._has_leaf.is_set()
        try:
            load_leaf(self._tls, data)
        except CertificateError as error:
            self._metrics.certificate_loads.labels("failed").inc()
            log.warning("certificate not usable", extra={"error": str(error)})
            return False
        self._metrics.certificate_loads.labels("loaded").inc()
        log.info("certificate loaded")
        self._served = dict(data)
        self._has_leaf.set()
        return True

    async def _mutate(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path.partition("?")[0] != "/mutate":
            return web.Response(status=404)
        if request.method != "POST":
            return web.Response(status=405)
        body = await self._body(request)
        if isinstance(body, bytes):
            answer = await self._admission.answer(body)
        else:
            answer = self._admission.failed(body.part, body.failure)
        response = web.Response(body=answer, content_type="application/json")
        if self._stopping.is_set() or not isinstance(body, bytes):
            # The API server then opens its next connection elsewhere.
            response.force_close()
        return response

    async def _body(self, request: web.BaseRequest) -> "bytes | _NoBody":
        """Read the body, within the bounds of time and memory."""
        if request.content.is_eof():
            # All of it is here, as it mostly is.
            return request.content.read_nowait()
        length = request.content_length if request.content_length is not None else MAX_BODY_BYTES
        reserved = min(length, MAX_BODY_BYTES)
        if self._bodies_bytes + reserved > MAX_BODIES_BYTES:
            return _NoBody(failure=Failure.OVERLOADED, part=request.content.read_nowait())
        self._bodies_bytes += reserved
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                is_whole = await _read(request.content, body)
        except TimeoutError:
            return _NoBody(failure=Failure.TIMEOUT, part=bytes(body))
        finally:
            self._bodies_bytes -= reserved
        return bytes(body) if is_whole else _NoBody(failure=Failure.TOO_LARGE, part=bytes(body))

    def _healthz(self) -> web.Response:
        return web.Response(text="ok\n")

    def _readyz(self) -> web.Response:
        return web.Response(text="ok\n") if self.is_ready else web.Response(status=503, text="not ready\n")

    def _metrics_page(self) -> web.Response:
        return web.Response(body=self._metrics.rendered(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _calm_garbage_collection() -> None:
    """Collect seldom, and not what was imported: a full collection holds every answer up for some 30 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@dataclass(frozen=True, kw_only=True, slots=True)
class _NoBody:
    """A body that is not there as a whole."""

    failure: Failure
    part: bytes
    """Its beginning, where the uid is that has to be echoed."""


async def _read(content: StreamReader, body: bytearray) -> bool:
    """Read up to the limit into `body`; False when there was more."""
    async for chunk in content.iter_any():
        if len(body) + len(chunk) > MAX_BODY_BYTES:
            return False
        body += chunk
    return True
