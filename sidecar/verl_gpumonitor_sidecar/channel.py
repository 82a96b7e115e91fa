# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One HTTPS connection to the controller, kept alive: bytes out, status and bytes back, or an error.

Written on `ssl` alone: http.client costs 2 MiB of memory, and all that is spoken here is one POST at a time with a
counted body. The connection goes to an IP address while the certificate is checked for the controller's DNS name, so
a broken DNS keeps no report away.
"""

import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

import msgspec

from .settings import Address

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
MAX_HEAD_BYTES: Final = 16 * 1024
MAX_BODY_BYTES: Final = 256 * 1024
"""An answer carries at most 64 KiB of certificates and 64 UUIDs."""


class ChannelError(Exception):
    """The exchange failed; no answer. `code` is a short constant word for counting."""

    code = "error"


class ChannelTimeoutError(ChannelError):
    """The time limit ran out."""

    code = "timeout"


class ChannelTlsError(ChannelError):
    """The certificate or the handshake is not what was expected; the text says what."""

    code = "tls"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What came back."""

    status: int
    body: bytes
    retry_after_seconds: float | None = None
    date_unix: float | None = None
    """The whole second that the other side's clock showed; None where it does not say."""
    keep_alive: bool = True


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of one exchange."""

    connect_seconds: float = 5.0
    total_seconds: float = 10.0


class Channel:
    """Used by one thread. Every method keeps the time limits."""

    def __init__(
        self,
        address: Address,
        *,
        server_name: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._server_name = server_name
        self._limits = limits
        self._clock = clock
        self._context: ssl.SSLContext | None = None
        self._connection: ssl.SSLSocket | None = None
        self._deadline = 0.0

    def trust(self, ca_pem: str) -> None:
        """Trust these CA certificates at the next connection. Raises ChannelTlsError; then the former stay trusted."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(cadata=ca_pem)
        except (ssl.SSLError, ValueError) as error:
            raise ChannelTlsError(f"CA certificates cannot be read: {error}") from error
        self._context = context

    def post(self, body: bytes, *, token: str) -> Response:
        """Send one report and return what came back. Raises ChannelError.

        A kept connection that the other side has closed meanwhile is replaced once, unnoticed.
        """
        self._deadline = self._clock() + self._limits.total_seconds
        request = self._request(body, token)
        reused = self._connection is not None
        try:
            return self._exchange(request)
        except ChannelTimeoutError:
            raise
        except ChannelError:
            if not reused:
                raise
        return self._exchange(request)

    def close(self) -> None:
        """Drop the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _request(self, body: bytes, token: str) -> bytes:
        head = (
            f"POST {self._address.path} HTTP/1.1\r\nHost: {self._server_name}\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nUser-Agent: gpumon-sidecar\r\n\r\n"
        )
        return head.encode("latin-1") + body

    def _exchange(self, request: bytes) -> Response:
        try:
            connection = self._connection or self._connect()
            self._send(connection, request)
            response = self._read(connection)
        except TimeoutError as error:
            self.close()
            raise ChannelTimeoutError("no answer in time") from error
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise ChannelTlsError(str(error)) from error
            raise ChannelError(str(error) or type(error).__name__) from error
        except ChannelError:
            self.close()
            raise
        if not response.keep_alive:
            self.close()
        return response

    def _connect(self) -> ssl.SSLSocket:
        if self._context is None:
            raise ChannelTlsError("no CA certificate to trust")
        limit = min(self._limits.connect_seconds, self._left())
        plain = socket.create_connection((self._address.host, self._address.port), timeout=limit)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(min(limit, self._left()))
            self._connection = self._context.wrap_socket(plain, server_hostname=self._server_name)
        except BaseException:
            plain.close()
            raise
        return self._connection

    def _send(self, connection: ssl.SSLSocket, request: bytes) -> None:
        """Send all of it. `sendall` would grant the time limit anew to each piece."""
        rest = memoryview(request)
        while rest:
            connection.settimeout(self._left())
            rest = rest[connection.send(rest) :]

    def _left(self) -> float:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return left

    def _read(self, connection: ssl.SSLSocket) -> Response:
        received = b""
        while b"\r\n\r\n" not in received:
            if len(received) > MAX_HEAD_BYTES:
                raise ChannelError("the answer's head is too large")
            received += self._receive(connection)
        head, _, body = received.partition(b"\r\n\r\n")
        status, headers = parse_head(head)
        length = _content_length(headers)
        while len(body) < length:
            body += self._receive(connection)
        return Response(
            status=status,
            body=body[:length],
            retry_after_seconds=_retry_after(headers),
            date_unix=parse_date(headers.get("date", "")),
            keep_alive=headers.get("connection", "").lower() != "close" and len(body) == length,
        )

    def _receive(self, connection: ssl.SSLSocket) -> bytes:
        connection.settimeout(self._left())
        data = connection.recv(16384)
        if not data:
            raise ChannelError("the connection was closed before the answer was whole")
        return data


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return status and headers (names in lower case). Raises ChannelError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isascii() or not words[1].isdigit():
        raise ChannelError("the answer is no HTTP")
    pairs = (line.partition(":") for line in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def parse_date(text: str) -> float | None:
    """Return the Unix time of a `Date`, such as `Sun, 06 Nov 1994 08:49:37 GMT`; None for anything else.

    By hand: email.utils and time.strptime cost memory that is counted.
    """
    words = text.split()
    clock = words[4].split(":") if len(words) == 6 else []
    numbers = [*words[1:4:2], *clock]
    if len(clock) != 3 or words[5] != "GMT" or words[2] not in _MONTHS:
        return None
    if not all(number.isascii() and number.isdigit() and len(number) <= 4 for number in numbers):
        return None
    day, year, hour, minute, second = map(int, numbers)
    month = _MONTHS.index(words[2]) + 1
    # The year begins in March here, so that a leap day is its last.
    years, shifted = (year - 1, month + 9) if month <= 2 else (year, month - 3)
    days = 365 * years + years // 4 - years // 100 + years // 400 + (153 * shifted + 2) // 5 + day - 1 - 719468
    return 86400.0 * days + 3600 * hour + 60 * minute + second


def _content_length(headers: dict[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise ChannelError("the answer's body is not counted")
    text = headers.get("content-length", "0")
    if not text.isascii() or not text.isdigit() or int(text) > MAX_BODY_BYTES:
        raise ChannelError("the answer's body is too large")
    return int(text)


def _retry_after(headers: dict[str, str]) -> float | None:
    """Return seconds; None where there are none, or a date, which the sidecar's clock may not share."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
