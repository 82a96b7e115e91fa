# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The small GET, against servers that behave in all ways."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from verl_gpumonitor.reading.fetch import FetchError, fetch_whole

Serve = Callable[[socket.socket], None]


@pytest.fixture
def served() -> Iterator[Callable[[Serve], str]]:
    """Start a server that answers one connection by the given function; returns its address."""
    listeners: list[socket.socket] = []

    def start(serve: Serve) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=answer_one, args=(listener, serve), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    yield start
    for listener in listeners:
        listener.close()


def answer_one(listener: socket.socket, serve: Serve) -> None:
    try:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            serve(connection)
    except OSError:
        return


def answering(*pieces: bytes) -> Serve:
    def serve(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.01)

    return serve


HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((HEAD + b"\r\nbody",), id="ended by the connection"),
        pytest.param((HEAD + b"Content-Length: 4\r\n\r\nbody",), id="ended by its length"),
        pytest.param((HEAD + b"\r\n", b"body"), id="after its head"),
        pytest.param((HEAD[:20], HEAD[20:] + b"\r", b"\nbo", b"dy"), id="in pieces"),
        pytest.param((b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: keep-alive\r\n\r\nbody",), id="HTTP/1.1"),
    ],
)
def test_a_body(pieces: tuple[bytes, ...], served: Callable[[Serve], str]) -> None:
    assert fetch_whole(served(answering(*pieces)), limit_seconds=2, max_bytes=100) == b"body"


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        pytest.param((), "no head", id="nothing"),
        pytest.param((b"x" * 40000,), "no head", id="no end of the head"),
        pytest.param((b"HTTP/1.0 401 Unauthorized\r\n\r\n",), "401", id="not let in"),
        pytest.param((HEAD + b"\r\n" + b"x" * 101,), "larger", id="too large"),
        pytest.param((HEAD + b"Content-Length: 10\r\n\r\nbody",), "broke off", id="cut short"),
        pytest.param(
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",), "chunks", id="chunks"
        ),
    ],
)
def test_no_whole_body(pieces: tuple[bytes, ...], why: str, served: Callable[[Serve], str]) -> None:
    with pytest.raises(FetchError, match=why):
        fetch_whole(served(answering(*pieces)), limit_seconds=2, max_bytes=100)


def test_a_server_that_is_silent_costs_the_limit(served: Callable[[Serve], str]) -> None:
    url = served(lambda _: time.sleep(3))
    began = time.monotonic()
    with pytest.raises(FetchError):
        fetch_whole(url, limit_seconds=0.3, max_bytes=100)
    assert time.monotonic() - began < 1.5


def test_a_server_that_drips_costs_the_limit(served: Callable[[Serve], str]) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"\r\n")
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.05)

    began = time.monotonic()
    with pytest.raises(FetchError):
        fetch_whole(served(drip), limit_seconds=0.4, max_bytes=1000)
    assert time.monotonic() - began < 1.5


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(FetchError):
        fetch_whole(f"http://127.0.0.1:{port}/", limit_seconds=1, max_bytes=100)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "https://127.0.0.1:80/", "http://host/", "http://h:99999/", "http://h:1/\r\nX: y"]
)
def test_no_address(url: str) -> None:
    with pytest.raises(FetchError):
        fetch_whole(url, limit_seconds=1, max_bytes=100)


def test_the_token_goes_along(served: Callable[[Serve], str]) -> None:
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def take() -> None:
        connection, _ = listener.accept()
        with connection:
            seen.append(connection.recv(4096))
            connection.sendall(HEAD + b"\r\nok")

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/nodes?view=summary"
        assert fetch_whole(url, limit_seconds=2, max_bytes=100, token="secret") == b"ok"
        thread.join(2)
    assert seen[0].startswith(b"GET /nodes?view=summary HTTP/1.0\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in seen[0]
