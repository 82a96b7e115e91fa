# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The report server: TLS and HTTP around `ingest.ReportService`, with a bound on whatever a stranger can use up.

Connections, in all and by peer, are counted from the moment they are accepted, before any handshake; a handshake, a
body, and a silent connection end at a time limit each. Certificates are exchanged in the live context, without a
restart and without a refused handshake. There is no access log, and what a stranger's broken HTTP makes is counted,
not logged.

How it is wired: make one `LiveCertificate`, call its `load` whenever the Secret's leaf changed (it need not be there
at the start: handshakes fail until then), `await server.start()`, and `await server.close()` at the end.
"""

import asyncio
import logging
import math
import resource
import socket
from asyncio import sslproto
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import StreamReader, hdrs, web
from prometheus_client import CollectorRegistry, Counter, Gauge

from verl_gpumonitor_operator.certificates import LEAF, LEAF_KEY, load_leaf, server_context

from .ingest import BodyTooLargeError, Incoming, IngestMetrics, Reply, ReportService, refusal

log = logging.getLogger(__name__)

REPORT_PATH: Final = "/v1/report"
TLS_BUFFER_BYTES: Final = 16 * 1024
"""A TLS record. asyncio gives each connection 256 KiB, which for 10,000 sidecars would be 2.5 GiB."""


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


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What connections may use up."""

    connections: int = 12_288
    """More than 10,000 sidecars, each of which keeps one."""
    connections_of_peer: int = 512
    """From one address, which may be a whole node behind address translation."""
    handshake_seconds: float = 5.0
    idle_seconds: float = 75.0
    """A connection that sends no complete request head for this long is closed. Above any report interval in use."""
    head_bytes: int = 16 * 1024
    """Longest header line; a token has about 1,200 bytes."""
    backlog: int = 1024


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


class _BrokenHttp(logging.Filter):
    """Counts requests that aiohttp could not parse, and keeps them, and what they carry, out of the log."""

    def __init__(self, metrics: IngestMetrics) -> None:
        super().__init__()
        self._metrics = metrics

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Error handling request"):
            self._metrics.answered(400)
            return False
        return record.levelno >= logging.WARNING


class ReportServer:
    """Serves `POST /v1/report`."""

    def __init__(
        self,
        service: ReportService,
        *,
        certificate: LiveCertificate,
        metrics: ServerMetrics,
        host: str = "0.0.0.0",  # noqa: S104 - a server in a pod, behind a Service
        port: int = 8443,
        limits: ServerLimits | None = None,
    ) -> None:
        self._service = service
        self._certificate = certificate
        self._metrics = metrics
        self._address = (host, port)
        self._limits = limits or ServerLimits()
        self._socket: socket.socket | None = None
        self._http: _Http | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._peers: Tally[str] = Tally()
        self._open = 0

    @property
    def port(self) -> int:
        """The port that is listened on; useful where 0 was asked for."""
        return self._address[1]

    async def start(self) -> None:
        """Listen. Raises OSError where the address is taken."""
        _allow_open_files(self._limits.connections)
        # There is no other place to say it: asyncio makes the protocol of each TLS connection by itself.
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        self._socket = _listen(self._address, self._limits.backlog)
        self._address = (self._address[0], int(self._socket.getsockname()[1]))
        self._http = _Http(
            self._handle,
            access_log=None,
            logger=_quiet_logger(self._service.metrics),
            keepalive_timeout=self._limits.idle_seconds,
            max_line_size=self._limits.head_bytes,
            max_field_size=self._limits.head_bytes,
            max_headers=64,
            lingering_time=2.0,
            read_bufsize=16 * 1024,
            # A compressed body would be as large as it likes.
            auto_decompress=False,
        )
        self._accepting = asyncio.create_task(self._accept(self._socket), name="report-server")

    async def close(self, seconds: float = 2.0) -> None:
        """Stop listening, answer what is being answered, close the rest."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for task in list(self._handshakes):
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        if self._http is not None:
            await self._http.shutdown(seconds)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:
                # Out of descriptors, or reset before it was taken: neither is a reason to stop listening.
                log.warning("connection not accepted", extra={"error": str(error)})
                await asyncio.sleep(0.1)
                continue
            self._take(connection, str(address[0]))

    def _take(self, connection: socket.socket, peer: str) -> None:
        reason = self._full(peer)
        if reason is not None:
            self._metrics.refused(reason)
            connection.close()
            return
        self._open += 1
        self._peers[peer] += 1
        self._metrics.connections.set(self._open)
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection, peer))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _full(self, peer: str) -> str | None:
        if self._open >= self._limits.connections:
            return "total"
        return "peer" if self._peers[peer] >= self._limits.connections_of_peer else None

    def _left(self, peer: str) -> None:
        self._open -= 1
        self._peers[peer] -= 1
        if self._peers[peer] <= 0:
            del self._peers[peer]
        self._metrics.connections.set(self._open)

    async def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        http = self._http
        assert http is not None  # noqa: S101 - set before anything is accepted
        protocol = http.connection(lambda: self._left(peer))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._certificate.context,
                ssl_handshake_timeout=self._limits.handshake_seconds,
                ssl_shutdown_timeout=2.0,
            )
        except (OSError, EOFError, TimeoutError):  # ssl.SSLError is an OSError
            self._metrics.refused("handshake")
            http.ended(protocol)
        except BaseException:
            http.ended(protocol)
            raise

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


class _Http(web.Server):
    """aiohttp's server, which also tells when a connection is over."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **options: Any) -> None:
        super().__init__(handler, **options)
        self._ends: dict[web.RequestHandler, Callable[[], None]] = {}

    def connection(self, on_end: Callable[[], None]) -> web.RequestHandler:
        """Return the protocol of a new connection, at whose end `on_end` is called once."""
        protocol = self()
        self._ends[protocol] = on_end
        return protocol

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.ended(handler)

    def ended(self, protocol: web.RequestHandler) -> None:
        """Take a connection as over; harmless when it was before."""
        on_end = self._ends.pop(protocol, None)
        if on_end is not None:
            on_end()


def _listen(address: tuple[str, int], backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(backlog)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _quiet_logger(metrics: IngestMetrics) -> logging.Logger:
    # A logger of this server's own, outside the tree of names: its filter is not to pile up on a shared one.
    logger = logging.Logger(f"{__name__}.http", level=logging.DEBUG)
    logger.parent = logging.getLogger(__name__)
    logger.addFilter(_BrokenHttp(metrics))
    return logger


def _allow_open_files(connections: int) -> None:
    """Raise the soft limit of open files to what the connections need, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
