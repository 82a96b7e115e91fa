# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The few reads that the webhook does at the API server, by aiohttp alone: small, with a time limit each.

No discovery, no caches, no writes. Every failure is an `ApiError`.
"""

import ssl
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
from yarl import URL

T = TypeVar("T")

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS: Final = 60.0
"""The kubelet renews the token in its file; it is read anew after this time."""
PAGE_SIZE: Final = 250


class ApiError(Exception):
    """A read failed. `status` is the HTTP status, None when there was no answer in time."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API server is, and how we say who we are: by a token's file, or by a client certificate."""

    url: str
    ca_file: Path | None = None
    token_file: Path | None = None
    client_certificate: tuple[Path, Path] | None = None
    """Certificate and key (PEM)."""


def in_cluster(environment: Mapping[str, str], directory: Path = SERVICE_ACCOUNT) -> Address:
    """Return the API server of the cluster that this pod runs in. Raises ApiError outside of one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ApiError("KUBERNETES_SERVICE_HOST is not set: this is no pod of a cluster")
    name = f"[{host}]" if ":" in host else host
    return Address(url=f"https://{name}:{port}", ca_file=directory / "ca.crt", token_file=directory / "token")


class _Continue(msgspec.Struct, frozen=True, rename={"token": "continue"}):
    token: str = ""


class _Page(msgspec.Struct, frozen=True):
    items: list[msgspec.Raw] | None = None
    metadata: _Continue = _Continue()


class KubeApi:
    """Reads objects and decodes them into the caller's own small types. Use it as an async context manager."""

    def __init__(self, address: Address, *, timeout_seconds: float = 10.0) -> None:
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._token: tuple[float, str] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Bounded, so that a burst of pods never opens hundreds of connections to the API server.
        connector = aiohttp.TCPConnector(ssl=self._tls(), limit=32, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=self._timeout_seconds)
        # Cookies are none of an API server's, and looking for them costs time with each read.
        jar = aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def _tls(self) -> ssl.SSLContext | bool:
        if not self._address.url.startswith("https:"):
            return True
        context = ssl.create_default_context(cafile=self._address.ca_file)
        if self._address.client_certificate is not None:
            context.load_cert_chain(*self._address.client_certificate)
        return context

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._address.token_file is not None:
            headers["Authorization"] = f"Bearer {self._read_token(self._address.token_file)}"
        return headers

    def _read_token(self, file: Path) -> str:
        now = time.monotonic()
        if self._token is None or now - self._token[0] > TOKEN_SECONDS:
            try:
                self._token = (now, file.read_text().strip())
            except OSError as error:
                raise ApiError(f"{file}: {error.strerror}") from error
        return self._token[1]

    async def get_bytes(self, path: str, *, query: Mapping[str, str] | None = None) -> bytes:
        """Read one path. Raises ApiError: with the status of a refusal, without one where no answer came in time."""
        if self._session is None:
            raise ApiError("the client is not open")
        question = f"?{urlencode(query)}" if query else ""
        url = URL(self._address.url + path + question, encoded=True)
        try:
            async with self._session.get(url, headers=self._headers()) as response:
                body = await response.read()
                if response.status != 200:
                    raise ApiError(f"GET {path}: {response.status} {response.reason}", status=response.status)
                return body
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(f"GET {path}: {type(error).__name__} {error}".rstrip()) from error

    async def get(self, path: str, kind: type[T], *, query: Mapping[str, str] | None = None) -> T:
        """Read one object. Raises ApiError, also where it has not the form of `kind`."""
        return _decoded(await self.get_bytes(path, query=query), kind, path)

    async def get_or_none(self, path: str, kind: type[T]) -> T | None:
        """Read one object; None where it does not exist. Raises ApiError."""
        try:
            return await self.get(path, kind)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def pages(
        self, path: str, kind: type[T], *, query: Mapping[str, str] | None = None
    ) -> AsyncIterator[list[T]]:
        """List objects page by page, so that a large list is never whole in memory. Raises ApiError."""
        token = ""
        while True:
            paging = {**(query or {}), "limit": str(PAGE_SIZE), **({"continue": token} if token else {})}
            page = await self.get(path, _Page, query=paging)
            yield [_decoded(bytes(item), kind, path) for item in page.items or ()]
            token = page.metadata.token
            if not token:
                return

    async def listed(self, path: str, kind: type[T], *, query: Mapping[str, str] | None = None) -> list[T]:
        """List objects that are few. Raises ApiError."""
        return [item async for page in self.pages(path, kind, query=query) for item in page]


def _decoded(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"GET {path}: {error}") from error
