# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of /metrics and /healthz: one thread that polls, a bounded number of connections, time limits.

A client that is slow, silent or hostile costs one of the connections for some seconds and nothing else; when all are
taken the oldest makes room. A thread for each would cost memory, http.server 2 MiB by its import alone.
"""

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

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

Answer = tuple[int, str, bytes]
"""Status, content type, body."""

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
        """None until the request is whole; empty when all is sent."""

    @property
    def events(self) -> int:
        return select.POLLOUT if self.unsent else select.POLLIN


class Endpoint:
    """Answers GET for a fixed set of paths, each by a function that must not block."""

    def __init__(
        self,
        listener: socket.socket,
        routes: Mapping[str, Callable[[], Answer]],
        *,
        limit_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._routes = routes
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

    def _wait_milliseconds(self) -> int | None:
        if not self._connections:
            return None
        first = min(connection.deadline for connection in self._connections.values())
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

    def _serve_one(self, fd: int) -> None:
        connection = self._connections[fd]
        try:
            alive = self._send(connection) if connection.unsent else self._receive(connection)
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
            connection.unsent = self._response(connection.received)
        elif len(connection.received) > _MAX_REQUEST_BYTES:
            connection.unsent = _encode((431, PLAIN, b"request too large\n"), body=True)
        else:
            return bool(data)
        return self._send(connection)

    def _send(self, connection: _Connection) -> bool:
        sent = connection.peer.send(connection.unsent or b"")
        connection.unsent = (connection.unsent or b"")[sent:]
        if not connection.unsent:
            connection.peer.shutdown(socket.SHUT_WR)
        return True

    def _response(self, request: bytes) -> bytes:
        words = request.split(b"\n", 1)[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _encode((400, PLAIN, b"not a request\n"), body=True)
        method, target = words[0], words[1]
        if method not in {"GET", "HEAD"}:
            return _encode((405, PLAIN, b"GET alone\n"), body=True)
        route = self._routes.get(target.split("?", 1)[0])
        answer = route() if route else (404, PLAIN, ("there is " + ", ".join(self._routes) + "\n").encode())
        return _encode(answer, body=method == "GET")

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
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode("latin-1")
    return head + content if body else head
