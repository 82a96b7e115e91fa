# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a server beside us is sent, and how its refusal is told from its absence."""

import socket
import threading

import pytest

from verl_gpumonitor.reading.fetch import FetchError, FetchStatusError, fetch_whole


def served(answer: bytes, requests: list[bytes]) -> str:
    """Answer one request on a free port; returns the server's URL."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with server, connection:
            requests.append(connection.recv(65536))
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def get(url: str, token: str | None = None) -> bytes:
    return fetch_whole(f"{url}/api?a=b", limit_seconds=5, max_bytes=1000, token=token)


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_request_names_its_agent_and_no_browser(token: str | None) -> None:
    """Without one, Ray 2.43 answers 500."""
    requests: list[bytes] = []
    assert get(served(b"HTTP/1.0 200 OK\r\n\r\nbody", requests), token) == b"body"
    lines = requests[0].decode().split("\r\n")
    assert lines[0] == "GET /api?a=b HTTP/1.0"
    assert "User-Agent: gpumonitor" in lines
    assert ("Authorization: Bearer secret" in lines) is (token is not None)
    assert lines[-2:] == ["", ""]


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_refusal_tells_its_status(status: int) -> None:
    with pytest.raises(FetchStatusError) as raised:
        get(served(f"HTTP/1.1 {status} No\r\n\r\n".encode(), []))
    assert raised.value.status == status


def test_a_status_that_is_none() -> None:
    with pytest.raises(FetchError) as raised:
        get(served(b"HTTP/1.1 abc\r\n\r\n", []))
    assert not isinstance(raised.value, FetchStatusError)


def test_nobody_there_is_another_trouble() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(FetchError) as raised:
        get(f"http://127.0.0.1:{port}")
    assert isinstance(raised.value.__cause__, ConnectionRefusedError)
