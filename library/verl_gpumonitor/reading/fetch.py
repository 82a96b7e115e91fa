# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A GET to a server beside us, bounded in time and size, on a bare socket: http.client costs memory that is counted.

HTTP/1.0, so that the body ends with the connection and comes in no chunks of its own. What is read is handed on piece
by piece and never held as a whole.
"""

import socket
import time
from collections.abc import Callable
from typing import Final

_PIECE_BYTES: Final = 65536
_MAX_HEAD_BYTES: Final = 16384


class FetchError(Exception):
    """Nothing, or nothing whole, was read; the text says why."""


class FetchStatusError(FetchError):
    """The server answered, and refused."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        """As HTTP has it, such as 401."""


def fetch(
    url: str,
    sink: Callable[[bytes], object],
    *,
    limit_seconds: float,
    max_bytes: int,
    token: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read `http://host:port/path` into `sink`. Raises FetchError, also after some of it was handed on.

    FetchStatusError where the status is not 200; the cause is the OSError where nobody was reached.

    `limit_seconds` holds for the whole; `token`, if there is one, goes along as bearer.
    """
    host, port, path = _split(url)
    end = clock() + limit_seconds
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    # Ray 2.43's State API answers 500 to a request that names no agent; it looks there for browsers, to refuse them.
    fields = f"Host: {host}:{port}\r\nUser-Agent: gpumonitor\r\nAccept: */*\r\n{authorization}"
    request = f"GET {path} HTTP/1.0\r\n{fields}\r\n"
    try:
        with socket.create_connection((host, port), timeout=limit_seconds) as connection:
            connection.sendall(request.encode())
            _read(connection, sink, left=lambda: end - clock(), max_bytes=max_bytes)
    except OSError as error:
        raise FetchError(f"{host}:{port}: {error.strerror or error}") from error


def fetch_whole(url: str, *, limit_seconds: float, max_bytes: int, token: str | None = None) -> bytes:
    """Return the body. Raises FetchError."""
    body = bytearray()
    fetch(url, body.extend, limit_seconds=limit_seconds, max_bytes=max_bytes, token=token)
    return bytes(body)


def _split(url: str) -> tuple[str, int, str]:
    scheme, _, rest = url.partition("://")
    address, slash, path = rest.partition("/")
    host, _, port = address.rpartition(":")
    if scheme != "http" or not host or not port.isdecimal() or int(port) > 65535 or not (slash + path).isprintable():
        raise FetchError(f"{url!r} is no http://host:port/path")
    return host.strip("[]"), int(port), "/" + path


def _read(
    connection: socket.socket, sink: Callable[[bytes], object], *, left: Callable[[], float], max_bytes: int
) -> None:
    head = bytearray()
    while b"\r\n\r\n" not in head:
        piece = _piece(connection, left())
        if not piece or len(head) > _MAX_HEAD_BYTES:
            raise FetchError("the answer has no head")
        head += piece
    lines, _, piece = bytes(head).partition(b"\r\n\r\n")
    expected = _check_head(lines)
    got = 0
    while got != expected and (piece := piece or _piece(connection, left())):
        got += len(piece)
        if got > max_bytes:
            raise FetchError(f"the answer is larger than {max_bytes} bytes")
        sink(piece)
        piece = b""
    if expected is not None and got < expected:
        raise FetchError("the answer broke off")


def _check_head(head: bytes) -> int | None:
    """Return the length that is announced, if one is. Raises FetchError unless the status is 200."""
    status, *fields = head.decode("latin-1").split("\r\n")
    code = "".join(status.split(" ")[1:2])
    if code != "200":
        text = f"the answer is {status[:80]!r}"
        raise FetchStatusError(int(code), text) if code.isdecimal() and len(code) == 3 else FetchError(text)
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    if "chunked" in headers.get("transfer-encoding", ""):
        raise FetchError("the answer comes in chunks, in spite of HTTP/1.0")
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else None


def _piece(connection: socket.socket, seconds: float) -> bytes:
    if seconds <= 0:
        raise FetchError("the answer took too long")
    connection.settimeout(seconds)
    return connection.recv(_PIECE_BYTES)
