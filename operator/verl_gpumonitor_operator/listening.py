# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP, mostly by TLS, for a port that every pod of the cluster can reach: a bound on whatever a stranger can use up.

Connections, in all and by peer, are counted from the moment they are accepted, before any handshake; a handshake, a
first request, and a silent connection end at a time limit each. There is no access log, and what a stranger's broken
HTTP makes is counted, not logged. What is served is the caller's: this knows neither webhook nor reports.
"""

import asyncio
import logging
import resource
import socket
import ssl
from asyncio import sslproto
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

log = logging.getLogger(__name__)

TLS_BUFFER_BYTES: Final = 16 * 1024
"""A TLS record. asyncio gives each connection 256 KiB, which for 10,000 sidecars would be 2.5 GiB."""
READ_BUFFER_BYTES: Final = 16 * 1024
"""Of a body that nobody reads yet, so much is taken from its connection."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What connections may use up."""

    connections: int = 12_288
    """More than 10,000 sidecars, each of which keeps one."""
    connections_of_peer: int = 512
    """From one address, which may be a whole node behind address translation."""
    handshake_seconds: float = 5.0
    first_request_seconds: float = 15.0
    """A connection on which no head of a request has come in whole by then is closed."""
    idle_seconds: float = 75.0
    """A connection that sends no complete request head for this long after an answer is closed. Above any report
    interval in use."""
    head_bytes: int = 16 * 1024
    """Longest header line; a token has about 1,200 bytes."""
    backlog: int = 1024


class ConnectionMetrics(Protocol):
    """Who counts."""

    def open(self, number: int) -> None:
        """Take note how many connections are open now."""

    def refused(self, reason: str) -> None:
        """Count a connection that was closed unserved: `total`, `peer` or `handshake`."""

    def broken(self) -> None:
        """Count a request that was no HTTP, or whose sender went away in the middle."""


class _BrokenHttp(logging.Filter):
    """Counts requests that aiohttp could not handle, and keeps them, and what they carry, out of the log."""

    def __init__(self, broken: Callable[[], None]) -> None:
        super().__init__()
        self._broken = broken

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Error handling request"):
            self._broken()
            return False
        return record.levelno >= logging.WARNING


class Listener:
    """One port. `handler` is called for each request."""

    def __init__(
        self,
        handler: Handler,
        *,
        context: ssl.SSLContext | None,
        host: str | None,
        port: int,
        limits: ServerLimits,
        metrics: ConnectionMetrics,
    ) -> None:
        """`context` None: no TLS. `host` None: all addresses, of both families. `port` 0: a free one."""
        self._handler = handler
        self._context = context
        self._host, self._port = host, port
        self._limits = limits
        self._metrics = metrics
        self._socket: socket.socket | None = None
        self._http: _Http | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._peers: Tally[str] = Tally()
        self._open = 0

    @property
    def port(self) -> int:
        """The port that is listened on; useful where 0 was asked for."""
        return self._port

    async def start(self) -> None:
        """Listen. Raises OSError where the address is taken."""
        _allow_open_files(self._limits.connections)
        # There is no other place to say it: asyncio makes the protocol of each TLS connection by itself.
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        self._socket = listening(self._host, self._port, backlog=self._limits.backlog)
        self._port = int(self._socket.getsockname()[1])
        self._http = _Http(
            self._handler,
            first_request_seconds=self._limits.first_request_seconds,
            access_log=None,
            logger=_quiet_logger(self._metrics.broken),
            keepalive_timeout=self._limits.idle_seconds,
            max_line_size=self._limits.head_bytes,
            max_field_size=self._limits.head_bytes,
            max_headers=64,
            lingering_time=2.0,
            read_bufsize=READ_BUFFER_BYTES,
            # A compressed body would be as large as it likes.
            auto_decompress=False,
        )
        self._accepting = asyncio.create_task(self._accept(self._socket), name="listener")

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

    async def _accept(self, accepting: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(accepting)
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
        self._metrics.open(self._open)
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
        self._metrics.open(self._open)

    async def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        http = self._http
        assert http is not None  # noqa: S101 - set before anything is accepted
        protocol = http.connection(lambda: self._left(peer))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.handshake_seconds if self._context is not None else None,
                ssl_shutdown_timeout=2.0 if self._context is not None else None,
            )
        except (OSError, EOFError, TimeoutError):  # ssl.SSLError is an OSError
            self._metrics.refused("handshake")
            http.ended(protocol)
        except BaseException:
            http.ended(protocol)
            raise


PAGES_LIMITS: Final = ServerLimits(
    # Kubelet and Prometheus come often and go soon; whoever else comes must not keep the kubelet out.
    connections=2048,
    connections_of_peer=128,
    first_request_seconds=5.0,
    idle_seconds=15.0,
)


class Pages:
    """A few pages in plain HTTP, for kubelet and Prometheus."""

    def __init__(
        self,
        pages: Mapping[str, Callable[[], web.Response]],
        *,
        host: str | None,
        port: int,
        limits: ServerLimits = PAGES_LIMITS,
    ) -> None:
        """`pages`: by path, what makes one; it must not block. `host`, `port`: as of `Listener`."""
        self._pages = pages
        self._listener = Listener(self._handle, context=None, host=host, port=port, limits=limits, metrics=_Uncounted())

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._listener.port

    async def start(self) -> None:
        """Listen. Raises OSError where the address is taken."""
        await self._listener.start()

    async def close(self, seconds: float = 2.0) -> None:
        """Stop listening."""
        await self._listener.close(seconds)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        page = self._pages.get(request.raw_path.partition("?")[0])
        if page is None:
            return web.Response(status=404)
        return page() if request.method in ("GET", "HEAD") else web.Response(status=405)


class _Uncounted:
    """A `ConnectionMetrics` that keeps nothing."""

    def open(self, number: int) -> None:
        pass

    def refused(self, reason: str) -> None:
        pass

    def broken(self) -> None:
        pass


class _Http(web.Server):
    """aiohttp's server, which also tells when a connection is over, and ends one that asks for nothing."""

    def __init__(self, handler: Handler, *, first_request_seconds: float, **options: Any) -> None:
        super().__init__(self._handled, **options)
        self._answer = handler
        self._first_request_seconds = first_request_seconds
        self._ends: dict[web.RequestHandler, Callable[[], None]] = {}
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections without a request so far."""

    async def _handled(self, request: web.BaseRequest) -> web.StreamResponse:
        self._speaks(request.protocol)
        return await self._answer(request)

    def connection(self, on_end: Callable[[], None]) -> web.RequestHandler:
        """Return the protocol of a new connection, at whose end `on_end` is called once."""
        protocol = self()
        self._ends[protocol] = on_end
        return protocol

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        loop = asyncio.get_running_loop()
        self._silent[handler] = loop.call_later(self._first_request_seconds, handler.force_close)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.ended(handler)

    def ended(self, protocol: web.RequestHandler) -> None:
        """Take a connection as over; harmless when it was before."""
        self._speaks(protocol)
        on_end = self._ends.pop(protocol, None)
        if on_end is not None:
            on_end()

    def _speaks(self, protocol: web.RequestHandler) -> None:
        timer = self._silent.pop(protocol, None)
        if timer is not None:
            timer.cancel()


def listening(host: str | None, port: int, *, backlog: int = 128) -> socket.socket:
    """Return a socket that listens; `host` None: on all addresses of both families. Raises OSError."""
    if host is not None:
        made = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
        )
    else:
        made = _on_all_addresses(port, backlog)
    made.setblocking(False)
    return made


def _on_all_addresses(port: int, backlog: int) -> socket.socket:
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    except (OSError, ValueError):
        # No IPv6 here, or switched off in this network namespace; or the port is taken, and this raises the same again.
        return socket.create_server(("", port), backlog=backlog)


def _quiet_logger(broken: Callable[[], None]) -> logging.Logger:
    # A logger of this server's own, outside the tree of names: its filter is not to pile up on a shared one.
    logger = logging.Logger(f"{__name__}.http", level=logging.DEBUG)
    logger.parent = logging.getLogger(__name__)
    logger.addFilter(_BrokenHttp(broken))
    return logger


def _allow_open_files(connections: int) -> None:
    """Raise the soft limit of open files to what the connections need, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
