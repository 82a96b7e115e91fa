# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Streams of the sidecar's HTTP server: whole, one at a time, and no client of theirs costs anybody else anything."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from verl_gpumonitor_sidecar.endpoint import PLAIN, Endpoint, Stream

PIECE = b"x" * 2**20


class Server:
    """An endpoint on localhost with /metrics and one stream."""

    def __init__(self) -> None:
        self.made = 0
        self.pieces: Callable[[], Iterator[bytes]] = lambda: iter((b"one\n", b"two\n"))
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        streams = {"/trace": Stream("application/x-ndjson", lambda: self.pieces())}
        Endpoint(listener, {"/metrics": lambda: (200, PLAIN, b"fine\n")}, streams, limit_seconds=0.5).start()

    def endless(self) -> Iterator[bytes]:
        """More than any buffer of the kernel takes."""
        while True:
            self.made += 1
            yield PIECE

    def ask(self, path: str, method: str = "GET") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=5.0)
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return client

    def get(self, path: str, method: str = "GET") -> tuple[str, bytes]:
        """Head and body of an answer."""
        with self.ask(path, method) as client:
            return split(client)


def split(client: socket.socket) -> tuple[str, bytes]:
    data = b""
    while piece := client.recv(1 << 20):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return head.decode(), body


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_stream_is_whole_and_ends_with_the_connection(server: Server) -> None:
    head, body = server.get("/trace?x=1")
    assert head.startswith("HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson")
    assert "Content-Length" not in head
    assert body == b"one\ntwo\n"
    assert server.get("/trace") == (head, body)


def test_only_get_makes_a_stream(server: Server) -> None:
    server.pieces = server.endless
    head, body = server.get("/trace", "HEAD")
    assert head.startswith("HTTP/1.1 200")
    assert body == b""
    assert server.get("/trace", "POST")[0].startswith("HTTP/1.1 405")
    assert server.made == 0


def test_a_second_stream_is_told_to_come_again(server: Server) -> None:
    server.pieces = server.endless
    with server.ask("/trace") as first:
        first.recv(10)
        head, _ = server.get("/trace")
        assert head.startswith("HTTP/1.1 503")
    server.pieces = lambda: iter((b"one\n",))
    for _ in range(100):
        head, body = server.get("/trace")
        if head.startswith("HTTP/1.1 200"):
            break
        time.sleep(0.02)
    assert body == b"one\n"


def test_who_does_not_read_blocks_nobody_and_is_let_go(server: Server) -> None:
    server.pieces = server.endless
    with server.ask("/trace") as client:
        began = time.monotonic()
        for _ in range(20):
            assert server.get("/metrics")[1] == b"fine\n"
        assert time.monotonic() - began < 2.0
        time.sleep(2.0)
        made = server.made
        time.sleep(0.3)
        assert server.made == made
        server.pieces = lambda: iter((b"one\n",))
        assert server.get("/trace")[1] == b"one\n"
        client.close()


def test_pieces_are_made_at_a_pace_and_not_ahead_of_the_client(server: Server) -> None:
    server.pieces = server.endless
    with server.ask("/trace") as client:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            client.recv(1 << 22)
    assert 3 <= server.made <= 14


def test_a_fault_in_what_is_streamed_ends_that_stream_alone(server: Server) -> None:
    def broken() -> Iterator[bytes]:
        yield b"one\n"
        raise ValueError

    server.pieces = broken
    with server.ask("/metrics") as other:
        assert server.get("/trace")[1] == b"one\n"
        assert split(other)[1] == b"fine\n"
    assert server.get("/metrics")[1] == b"fine\n"


def test_what_is_not_there_is_said(server: Server) -> None:
    assert server.get("/other")[1] == b"there is /metrics, /trace\n"
