# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The report server: HTTP around `ingest.ReportService`, on a listener that bounds what a stranger can use up.

Certificates are exchanged in the live context, without a restart and without a refused handshake.

How it is wired: make one `LiveCertificate`, call its `load` whenever the Secret's leaf changed (it need not be there
at the start: handshakes fail until then), `await server.start()`, and `await server.close()` at the end.
"""

import math
from collections.abc import Mapping
from typing import Final

from aiohttp import StreamReader, hdrs, web
from prometheus_client import CollectorRegistry, Counter, Gauge

from verl_gpumonitor_operator.certificates import LEAF, LEAF_KEY, load_leaf, server_context
from verl_gpumonitor_operator.listening import Listener, ServerLimits

from .ingest import BodyTooLargeError, Incoming, IngestMetrics, Reply, ReportService, refusal

REPORT_PATH: Final = "/v1/report"


class LiveCertificate:
    """A TLS context whose certificate can be exchanged while connections come in."""

    def __init__(self) -> None:
        self.context: Final = server_context()
        self.context.set_alpn_protocols(["http/1.1"])
        # Sidecars keep their connection; tickets would be made at each handshake for nobody.
        self.context.num_tickets = 0
        self._loaded: tuple[bytes, bytes] | None = None

    @property
    def loaded(self) -> bool:
        """Whether there is a certificate to serve."""
        return self._loaded is not None

    def load(self, data: Mapping[str, bytes]) -> bool:
        """Serve the leaf of our Secret from the next handshake on. False if it is served already.

        Raises `certificates.CertificateError`, and serves what it served before, when it cannot be used.
        """
        leaf = (data.get(LEAF, b""), data.get(LEAF_KEY, b""))
        if self._loaded == leaf:
            return False
        load_leaf(self.context, data)
        self._loaded = leaf
        return True


class ServerMetrics:
    """State of the connections."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge("gpumonitor_report_connections", "Connections that are open now.", registry=registry)
        self._refused = Counter(
            "gpumonitor_report_connections_refused",
            "Connections that were closed at once, by the limit that was reached, or in their TLS handshake.",
            ["reason"],
            registry=registry,
        )
        for reason in ("total", "peer", "handshake"):
            self._refused.labels(reason)

    def refused(self, reason: str) -> None:
        """Count a connection that was not served."""
        self._refused.labels(reason).inc()


class _Connections:
    """Counts connections, and broken HTTP as reports that were answered with 400. A `ConnectionMetrics`."""

    def __init__(self, metrics: ServerMetrics, reports: IngestMetrics) -> None:
        self._metrics = metrics
        self._reports = reports

    def open(self, number: int) -> None:
        self._metrics.connections.set(number)

    def refused(self, reason: str) -> None:
        self._metrics.refused(reason)

    def broken(self) -> None:
        self._reports.answered(400)


class ReportServer:
    """Serves `POST /v1/report`."""

    def __init__(
        self,
        service: ReportService,
        *,
        certificate: LiveCertificate,
        metrics: ServerMetrics,
        host: str | None = None,
        port: int = 8443,
        limits: ServerLimits | None = None,
    ) -> None:
        """`host` None: all addresses."""
        self._service = service
        self._listener = Listener(
            self._handle,
            context=certificate.context,
            host=host,
            port=port,
            limits=limits or ServerLimits(),
            metrics=_Connections(metrics, service.metrics),
        )

    @property
    def port(self) -> int:
        """The port that is listened on; useful where 0 was asked for."""
        return self._listener.port

    async def start(self) -> None:
        """Listen. Raises OSError where the address is taken."""
        await self._listener.start()

    async def close(self, seconds: float = 2.0) -> None:
        """Stop listening, answer what is being answered, close the rest."""
        await self._listener.close(seconds)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path != REPORT_PATH:
            return self._elsewhere(404, "there is nothing here")
        if request.method != "POST":
            return self._elsewhere(405, "reports are posted")
        body = _Body(request.content)
        incoming = Incoming(
            authorization=request.headers.get(hdrs.AUTHORIZATION),
            length=request.content_length,
            plain=request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() == "identity",
            read=body.read,
            at_hand=body.at_hand,
        )
        return _response(await self._service.answer(incoming))

    def _elsewhere(self, status: int, message: str) -> web.Response:
        self._service.metrics.answered(status)
        return _response(refusal(status, message))


class _Body:
    """A body of bounded size."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content

    def at_hand(self) -> bytes | None:
        """Return it if it has come to its end; None while it has not."""
        return self._content.read_nowait() if self._content.is_eof() else None

    async def read(self, limit: int) -> bytes:
        """Read it all. Raises BodyTooLargeError."""
        body = bytearray()
        while chunk := await self._content.readany():
            body += chunk
            if len(body) > limit:
                raise BodyTooLargeError
        return bytes(body)


def _response(reply: Reply) -> web.Response:
    headers = {hdrs.CONTENT_TYPE: "application/json"}
    if reply.retry_after_seconds is not None:
        # Whole seconds by RFC 9110, and never 0, which would be an invitation.
        headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(reply.retry_after_seconds)))
    if reply.status == 401:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    response = web.Response(status=reply.status, body=reply.body, headers=headers)
    if reply.status in (408, 413):
        # The rest of the body is not waited for.
        response.force_close()
    return response
