# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTPS channel against servers that misbehave; well-behaved ones are in the contract tests."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.sidecar.controller import SERVER_NAME, Authority
from verl_gpumonitor_sidecar.channel import (
    Channel,
    ChannelError,
    ChannelTimeoutError,
    ChannelTlsError,
    Limits,
    Response,
    parse_date,
)
from verl_gpumonitor_sidecar.settings import Address

Talk = Callable[[ssl.SSLSocket], None]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Server:
    """Accepts connections, one after another, and talks as told."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.talk: Talk = lambda peer: peer.sendall(OK)
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=(plain,), daemon=True).start()

    def _talk(self, plain: socket.socket) -> None:
        try:
            with self._context.wrap_socket(plain, server_side=True) as peer:
                peer.recv(65536)
                self.talk(peer)
        except OSError:
            return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[Server]:
    running = Server(authority.server_context(tmp_path))
    yield running
    running.close()


@pytest.fixture
def channel(server: Server, authority: Authority) -> Iterator[Channel]:
    made = Channel(
        Address(host="127.0.0.1", port=server.port, path="/"),
        server_name=SERVER_NAME,
        limits=Limits(connect_seconds=0.5, total_seconds=0.5),
    )
    made.trust(authority.pem)
    yield made
    made.close()


def says(*pieces: bytes, wait_seconds: float = 0.0) -> Talk:
    def talk(peer: ssl.SSLSocket) -> None:
        for piece in pieces:
            peer.sendall(piece)
            time.sleep(wait_seconds)

    return talk


def test_an_answer_in_pieces_is_put_together(server: Server, channel: Channel) -> None:
    server.talk = says(
        b"HTTP/1.1 20", b"0 OK\r\nRetry-After: 7\r\nContent-Le", b"ngth: 4\r\n\r\nab", b"cd", wait_seconds=0.02
    )
    assert channel.post(b"{}", token="t") == Response(status=200, body=b"abcd", retry_after_seconds=7.0)


@pytest.mark.parametrize(
    ("talk", "error"),
    [
        pytest.param(says(b"", wait_seconds=3), ChannelTimeoutError, id="silence"),
        pytest.param(says(*[b"H"] * 20, wait_seconds=0.1), ChannelTimeoutError, id="a letter now and then"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\n"), ChannelError, id="a head without end"),
        pytest.param(says(b"x" * 40_000), ChannelError, id="a head that is too large"),
        pytest.param(says(b"SSH-2.0\r\n\r\n"), ChannelError, id="no HTTP"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"), ChannelError, id="a huge body"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), ChannelError, id="a negative length"),
        pytest.param(
            says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
            ChannelError,
            id="a body that is not counted",
        ),
        pytest.param(says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"), ChannelError, id="half a body"),
    ],
)
def test_what_is_no_answer_raises_in_time(
    server: Server, channel: Channel, talk: Talk, error: type[ChannelError]
) -> None:
    server.talk = talk
    began = time.monotonic()
    with pytest.raises(error):
        channel.post(b"{}", token="t")
    assert time.monotonic() - began < 1.5


def test_after_a_failure_the_next_post_takes_a_fresh_connection(server: Server, channel: Channel) -> None:
    server.talk = says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")
    with pytest.raises(ChannelError):
        channel.post(b"{}", token="t")
    server.talk = says(OK)
    assert channel.post(b"{}", token="t").body == b"hi"
    assert server.connections == 2


def test_a_kept_connection_that_was_closed_is_replaced_unnoticed(server: Server, channel: Channel) -> None:
    assert channel.post(b"{}", token="t").status == 200
    time.sleep(0.05)
    assert channel.post(b"{}", token="t").status == 200
    assert server.connections == 2


def test_nothing_is_sent_without_trust(server: Server, authority: Authority) -> None:
    channel = Channel(Address(host="127.0.0.1", port=server.port, path="/"), server_name=SERVER_NAME)
    with pytest.raises(ChannelTlsError):
        channel.post(b"{}", token="t")
    with pytest.raises(ChannelTlsError):
        channel.trust("no certificate")
    assert server.connections == 0


def test_another_name_is_refused(server: Server, authority: Authority) -> None:
    channel = Channel(Address(host="127.0.0.1", port=server.port, path="/"), server_name="another.svc")
    channel.trust(authority.pem)
    with pytest.raises(ChannelTlsError, match="Hostname mismatch"):
        channel.post(b"{}", token="t")


@given(st.integers(0, 4102444799))
def test_a_date_is_read_as_others_read_it(second: int) -> None:
    assert parse_date(formatdate(second, usegmt=True)) == second


@pytest.mark.parametrize(
    "text",
    ["", "now", "Sun, 06 Nov 1994 08:49:37 PST", "Sun, 06 Nvm 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49 GMT"],
)
def test_what_is_no_date_is_none(text: str) -> None:
    assert parse_date(text) is None
