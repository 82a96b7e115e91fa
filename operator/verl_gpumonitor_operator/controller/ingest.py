# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Reports of sidecars: who sends them, whether they are to be believed, and what is answered.

Everything here is hostile until proven otherwise. The order of the checks is by cost: a sender pays with nothing but
its connection until the API server has vouched for its token, and its body is read last. The pod's name comes from the
token, never from the body. `reportserver` speaks TLS and HTTP; this module knows neither.

How it is joined (all in the controller's event loop):

    metrics = IngestMetrics(registry)
    tokens = Tokens(reviewer, known_pod=claimed_by(pods), metrics=TokenMetrics(registry))
    service = ReportService(tokens=tokens, pods=pods, sink=workloads, readiness=lead, ca=bundle, metrics=metrics)
    server = ReportServer(service, certificate=LiveCertificate(), ...)        # see reportserver
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from verl_gpumonitor.model.kubernetes import RAY_NODE_TYPE
from verl_gpumonitor.model.report import (
    MAX_REPORT_BYTES,
    Report,
    ReportAnswer,
    ReportError,
    decode_report,
    encode,
)
from verl_gpumonitor.model.stages import StageSource

from .ports import AcceptResult, CaBundle, PodDirectory, PodIdentity, PodRecord, Readiness, ReportSink
from .rates import KeyedBuckets, Rate
from .tokens import IdentityError, ReviewFailedError, ReviewsThrottledError, Tokens

log = logging.getLogger(__name__)

CODES: Final = (200, 400, 401, 403, 404, 405, 408, 409, 413, 429, 500, 503)
"""All codes that are answered; each is a series from the start, so that rates have no holes."""


class IngestMetrics:
    """What became of the reports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reports = Counter(
            "gpumonitor_ingest_reports", "Reports by the HTTP code that was answered.", ["code"], registry=registry
        )
        self._bytes = Counter("gpumonitor_report_received_bytes", "Bytes of report bodies read.", registry=registry)
        self._seconds = Histogram(
            "gpumonitor_report_handling_seconds",
            "Time from the head of a request to its answer, the body's way and a token's review included.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
            registry=registry,
        )
        self._by_code = {code: self._reports.labels(str(code)) for code in CODES}

    def answered(self, status: int) -> None:
        """Count an answer."""
        (self._by_code.get(status) or self._by_code[500]).inc()

    def handled(self, seconds: float) -> None:
        """Record how long a report took."""
        self._seconds.observe(seconds)

    def received(self, size: int) -> None:
        """Count bytes of a body."""
        self._bytes.inc(size)


class IngestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sender, and all together, may ask of us."""

    each_pod: Rate = Rate(burst=10, per_second=1)
    pods: int = 50_000
    """Pods whose rate, and whose certificates, are remembered."""
    body_bytes: int = MAX_REPORT_BYTES
    body_seconds: float = 10.0
    """Time in which a body must arrive."""
    bodies_bytes: int = 32 * 1024 * 1024
    """All bodies that are on their way together."""
    retry_after_seconds: float = 2.0
    """What a sender is told to wait when we are not ready or have no room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What is answered: JSON."""

    status: int
    body: bytes
    retry_after_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A request for a report's acceptance whose body has not been read."""

    authorization: str | None
    """The header of that name."""
    length: int | None
    """Announced length of the body; None where it comes in pieces."""
    plain: bool
    """The body is neither compressed nor encoded otherwise."""
    read: Callable[[int], Awaitable[bytes]]
    """Reads the body. Raises BodyTooLargeError when there are more bytes than its argument."""
    at_hand: Callable[[], bytes | None] = lambda: None
    """Returns the body if all of it is here, as it mostly is; else None, and it has to be read."""


class BodyTooLargeError(Exception):
    """The body has more bytes than were asked for."""


class RefusedError(Exception):
    """A report is refused. The text is told to the sender."""

    def __init__(self, status: int, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


def refusal(status: int, message: str, *, retry_after_seconds: float | None = None) -> Reply:
    """Make the reply that carries an error."""
    body = msgspec.json.encode({"error": message[:512]})
    return Reply(status=status, body=body, retry_after_seconds=retry_after_seconds)


class CertificatesGiven:
    """Which sidecar was given which bundle, when: at its start, after each change, and now and then.

    Now and then, because an answer may be lost on its way; a sidecar that missed a new CA would be cut off for good.
    """

    def __init__(self, capacity: int, *, again_seconds: float = 3600.0) -> None:
        self._capacity = capacity
        self._again_seconds = again_seconds
        self._given: OrderedDict[str, tuple[str, str, float]] = OrderedDict()

    def due(self, uid: str, start_id: str, *, pem: str | None, now: float) -> str | None:
        """Return the bundle if this sidecar is to get it now, and remember that it did."""
        before = self._given.get(uid)
        if pem is None or (before is not None and before[:2] == (start_id, pem) and now < before[2]):
            return None
        self._given[uid] = (start_id, pem, now + self._again_seconds)
        self._given.move_to_end(uid)
        if len(self._given) > self._capacity:
            self._given.popitem(last=False)
        return pem


class ReportService:
    """Decides on each report and hands the good ones on."""

    def __init__(
        self,
        *,
        tokens: Tokens,
        pods: PodDirectory,
        sink: ReportSink,
        readiness: Readiness,
        ca: CaBundle,
        metrics: IngestMetrics,
        limits: IngestLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokens = tokens
        self._pods = pods
        self._sink = sink
        self._readiness = readiness
        self._ca = ca
        self._metrics = metrics
        self._limits = limits = limits or IngestLimits()
        self._clock = clock
        self._rates = KeyedBuckets(limits.each_pod, capacity=limits.pods)
        self._certificates = CertificatesGiven(limits.pods)
        self._bodies_bytes = 0

    @property
    def metrics(self) -> IngestMetrics:
        """Counters, for answers that are given before a report is seen."""
        return self._metrics

    @property
    def limits(self) -> IngestLimits:
        """The limits in use."""
        return self._limits

    async def answer(self, incoming: Incoming) -> Reply:
        """Decide on one report. Never raises, except when cancelled."""
        begun = time.perf_counter()
        try:
            reply = await self._take(incoming)
        except RefusedError as error:
            reply = refusal(error.status, str(error), retry_after_seconds=error.retry_after_seconds)
        except Exception:
            # One report must not end the server, nor make the sidecar drop what it has: it tries a 500 again.
            log.exception("report failed")
            reply = refusal(500, "internal error")
        self._metrics.answered(reply.status)
        self._metrics.handled(time.perf_counter() - begun)
        return reply

    async def _take(self, incoming: Incoming) -> Reply:
        if not self._readiness.ready or not self._pods.synced:
            raise self._later("not leading yet, or the picture of the pods is not complete")
        identity = await self._identify(incoming.authorization)
        wait = self._rates.take(identity.uid, self._clock())
        if wait > 0.0:
            raise RefusedError(429, "too many reports of this pod", retry_after_seconds=wait)
        self._live(identity)
        report = _decoded(await self._body(incoming))
        # The pod may have ended while the body was on its way.
        pod = self._live(identity)
        _check_claims(report, identity, pod)
        report = _without_hearsay(report, pod)
        return self._reply(identity, report, self._sink.accept(identity, report, self._clock()))

    async def _identify(self, authorization: str | None) -> PodIdentity:
        token = _bearer(authorization)
        if token is None:
            raise RefusedError(401, "a bearer token is needed")
        try:
            return await self._tokens.identify(token)
        except ReviewsThrottledError as error:
            raise RefusedError(429, str(error), retry_after_seconds=error.retry_after_seconds) from error
        except ReviewFailedError as error:
            raise RefusedError(503, str(error), retry_after_seconds=error.retry_after_seconds) from error
        except IdentityError as error:
            raise RefusedError(401, str(error)) from error

    def _live(self, identity: PodIdentity) -> PodRecord:
        pod = self._pods.find(identity.namespace, identity.name, identity.uid)
        if pod is None or not pod.live:
            raise RefusedError(403, "the token's pod is not there any more")
        if pod.injected is None:
            raise RefusedError(403, "the token's pod has no sidecar of ours")
        return pod

    async def _body(self, incoming: Incoming) -> bytes:
        limit = self._limits.body_bytes
        if not incoming.plain:
            raise RefusedError(400, "the body must not be compressed")
        if incoming.length is not None and incoming.length > limit:
            raise RefusedError(413, f"a report has at most {limit} bytes")
        body = incoming.at_hand()
        if body is None:
            body = await self._wait_for_body(incoming)
        if len(body) > limit:
            raise RefusedError(413, f"a report has at most {limit} bytes")
        self._metrics.received(len(body))
        return body

    async def _wait_for_body(self, incoming: Incoming) -> bytes:
        limit = self._limits.body_bytes
        reserved = limit if incoming.length is None else incoming.length
        if self._bodies_bytes + reserved > self._limits.bodies_bytes:
            raise self._later("too many reports are on their way")
        self._bodies_bytes += reserved
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await incoming.read(limit)
        except BodyTooLargeError as error:
            raise RefusedError(413, f"a report has at most {limit} bytes") from error
        except TimeoutError as error:
            raise RefusedError(408, "the body came too slowly") from error
        finally:
            self._bodies_bytes -= reserved

    def _later(self, message: str) -> RefusedError:
        return RefusedError(503, message, retry_after_seconds=self._limits.retry_after_seconds)

    def _reply(self, identity: PodIdentity, report: Report, result: AcceptResult) -> Reply:
        if result.replay:
            message = f"sequence {report.sequence} of this start was counted before"
            return Reply(status=409, body=msgspec.json.encode({"error": message, "accepted": result.accepted}))
        answer = ReportAnswer(
            accepted=result.accepted,
            interval_seconds=result.interval_seconds,
            ca_pem=self._certificates.due(identity.uid, report.start_id, pem=self._ca.pem, now=self._clock()),
            gpu_uuids=None if result.gpu_uuids is None else list(result.gpu_uuids),
            stages=result.stages,
        )
        return Reply(status=200, body=encode(answer))


def _bearer(authorization: str | None) -> str | None:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _decoded(body: bytes) -> Report:
    try:
        return decode_report(body)
    except ReportError as error:
        raise RefusedError(400, f"no valid report: {error}") from error


def _check_claims(report: Report, identity: PodIdentity, pod: PodRecord) -> None:
    """Refuse what this pod may not say: anything as another pod, and anything of others unless it is a Ray head."""
    if (report.pod.namespace, report.pod.name, report.pod.uid) != (identity.namespace, identity.name, identity.uid):
        raise RefusedError(403, "the report names another pod than the token")
    if (report.ray_nodes or report.ray_jobs) and not is_ray_head(pod):
        raise RefusedError(403, "only the head of a Ray cluster may speak of other nodes and of the cluster's jobs")


def _without_hearsay(report: Report, pod: PodRecord) -> Report:
    """Return the report without stages of other nodes that this pod cannot know; its own numbers count all the same.

    A head asks Ray. On any other pod of a RayCluster verl's driver may run, whose marks hold for every node.
    """
    told = report.cluster_stages
    if told is None or is_ray_head(pod) or (told.source is StageSource.MARKS and is_ray_node(pod)):
        return report
    return msgspec.structs.replace(report, cluster_stages=None)


def is_ray_node(pod: PodRecord) -> bool:
    """Whether a pod is a node of a RayCluster: made by one, not merely labelled so."""
    owner = pod.owner
    return owner is not None and owner.kind == "RayCluster" and owner.api_version.startswith("ray.io/")


def is_ray_head(pod: PodRecord) -> bool:
    """Whether a pod is the head of a RayCluster."""
    return is_ray_node(pod) and pod.labels.get(RAY_NODE_TYPE) == "head"
