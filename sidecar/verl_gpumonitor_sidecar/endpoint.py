# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of /metrics, /healthz and /trace: one thread that polls, a bounded number of connections, limits.

A client that is slow, silent or hostile costs one of the connections for some seconds and nothing else; when all are
taken the oldest makes room. A thread for each would cost memory, http.server 2 MiB by its import alone.

What is long is streamed, one answer at a time: a piece is made when the one before is sent, and not sooner than a pause
after it, so that a thread that samples GPUs in a small share of a core keeps its pace.
"""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

_MAX_CONNECTIONS: Final = 32
_MAX_REQUEST_BYTES: Final = 8192
_BACKLOG: Final = 128
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}

_PAUSE_SECONDS: Final = 0.05
"""Between two pieces of a stream, each of which is a millisecond's work: 2 % of a core while it lasts."""
_MAX_STREAM_SECONDS: Final = 60.0

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


class Stream(NamedTuple):
    """An answer whose body is made piece by piece. `pieces` makes a new one; each piece must be made at once."""

    content_type: str
    pieces: Callable[[], Iterator[bytes]]


PLAIN: Final = "text/plain; charset=utf-8"


def listen(port: int) -> socket.socket:
    """Listen on all addresses, IPv6 and IPv4 where the machine has both. Raises OSError when the port is taken."""
    try:
        return _listen(socket.AF_INET6, "::", port)
    except OSError:
        # No IPv6 here, or the port is taken; then this raises the same again.
        return _listen(socket.AF_INET, "0.0.0.0", port)  # noqa: S104 - Prometheus comes from outside the pod


def _listen(family: int, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class _Connection:
    """One client. It is read until its request is whole, then written to, then drained until it closes."""

    def __init__(self, peer: socket.socket, deadline: float) -> None:
        self.peer = peer
        self.deadline = deadline
        self.received = b""
        self.unsent: bytes | None = None
        """None until the request is whole; empty when all is sent, or the next piece is awaited."""
        self.pieces: Iterator[bytes] | None = None
        """What is still to be made; None: nothing."""
        self.due = 0.0
        """When the next piece may be made."""
        self.last = deadline
        """Latest end of a stream, however steadily its client reads."""

    @property
    def events(self) -> int:
        if self.unsent:
            return select.POLLOUT
        return select.POLLIN if self.pieces is None else 0  # What a client says in a stream's pauses is not read.


class Endpoint:
    """Answers GET for a fixed set of paths, each by a function that must not block."""

    def __init__(
        self,
        listener: socket.socket,
        routes: Mapping[str, Callable[[], Answer]],
        streams: Mapping[str, Stream] | None = None,
        *,
        limit_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._routes = routes
        self._streams = streams or {}
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._connections: dict[int, _Connection] = {}

    def start(self) -> None:
        """Serve in a daemon thread until the process ends."""
        threading.Thread(target=self._serve, name="endpoint", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                self.turn()
            except Exception:  # noqa: BLE001 - one strange client must not end the service
                self._close_all()
                time.sleep(0.1)

    def turn(self) -> None:
        """Wait for something to do, and do it."""
        poll = select.poll()
        poll.register(self._listener.fileno(), select.POLLIN)
        for fd, connection in self._connections.items():
            poll.register(fd, connection.events)
        for fd, _ in poll.poll(self._wait_milliseconds()):
            if fd in self._connections:
                self._serve_one(fd)
            elif fd == self._listener.fileno():
                self._accept()
        self._expire()
        self._go_on()

    def _wait_milliseconds(self) -> int | None:
        if not self._connections:
            return None
        waiting = (c.due for c in self._connections.values() if c.pieces is not None and not c.unsent)
        first = min([*waiting, *(connection.deadline for connection in self._connections.values())])
        return max(0, int((first - self._clock()) * 1000) + 1)

    def _accept(self) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._close(min(self._connections, key=lambda fd: self._connections[fd].deadline))
        try:
            peer, _ = self._listener.accept()
        except OSError:
            time.sleep(0.02)  # It went away again, or descriptors are short: then the poll would not wait.
            return
        peer.setblocking(False)
        self._connections[peer.fileno()] = _Connection(peer, self._clock() + self._limit_seconds)

    def _serve_one(self, fd: int, *, writes: bool = False) -> None:
        connection = self._connections[fd]
        try:
            alive = self._send(connection) if connection.unsent or writes else self._receive(connection)
        except BlockingIOError:
            return
        except OSError:
            alive = False
        if not alive:
            self._close(fd)

    def _receive(self, connection: _Connection) -> bool:
        data = connection.peer.recv(4096)
        if connection.unsent is not None:  # All is sent: only the client's end of the connection is awaited.
            return bool(data)
        connection.received += data
        if b"\r\n\r\n" in connection.received or b"\n\n" in connection.received:
            connection.unsent = self._response(connection)
        elif len(connection.received) > _MAX_REQUEST_BYTES:
            connection.unsent = _encode((431, PLAIN, b"request too large\n"), body=True)
        else:
            return bool(data)
        return self._send(connection)

    def _send(self, connection: _Connection) -> bool:
        sent = connection.peer.send(connection.unsent or b"")
        connection.unsent = (connection.unsent or b"")[sent:]
        if connection.pieces is not None:
            connection.deadline = min(connection.last, self._clock() + self._limit_seconds)
        elif not connection.unsent:
            connection.peer.shutdown(socket.SHUT_WR)
        return True

    def _go_on(self) -> None:
        """Make the next piece of a stream whose client has taken the one before."""
        now = self._clock()
        for fd, connection in list(self._connections.items()):
            if connection.pieces is None or connection.unsent or connection.due > now:
                continue
            connection.due = now + _PAUSE_SECONDS
            try:
                connection.unsent = next(connection.pieces, None) or b""
            except Exception:  # noqa: BLE001 - a fault in what is streamed must not end what others ask for
                self._close(fd)
                continue
            if not connection.unsent:
                connection.pieces = None
            self._serve_one(fd, writes=True)

    def _response(self, connection: _Connection) -> bytes:
        words = connection.received.split(b"\n", 1)[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _encode((400, PLAIN, b"not a request\n"), body=True)
        method, target = words[0], words[1]
        if method not in {"GET", "HEAD"}:
            return _encode((405, PLAIN, b"GET alone\n"), body=True)
        path = target.split("?", 1)[0]
        if path in self._streams:
            return self._begin(connection, self._streams[path], body=method == "GET")
        route = self._routes.get(path)
        there = ", ".join([*self._routes, *self._streams])
        answer = route() if route else (404, PLAIN, f"there is {there}\n".encode())
        return _encode(answer, body=method == "GET")

    def _begin(self, connection: _Connection, stream: Stream, *, body: bool) -> bytes:
        """Return the head of a stream, whose end is the end of the connection."""
        if any(other.pieces is not None for other in self._connections.values()):
            return _encode((503, PLAIN, b"another one is being read: try again\n"), body=body)
        if body:
            connection.pieces = stream.pieces()
            connection.last = self._clock() + _MAX_STREAM_SECONDS
        return _head(200, stream.content_type)

    def _expire(self) -> None:
        now = self._clock()
        for fd in [fd for fd, connection in self._connections.items() if connection.deadline <= now]:
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._connections.pop(fd).peer.close()

    def _close_all(self) -> None:
        for fd in list(self._connections):
            self._close(fd)


def _encode(answer: Answer, *, body: bool) -> bytes:
    status, content_type, content = answer
    head = _head(status, content_type, f"Content-Length: {len(content)}\r\n")
    return head + content if body else head


def _head(status: int, content_type: str, more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n{more}Connection: close\r\n\r\n"
    ).encode("latin-1")
