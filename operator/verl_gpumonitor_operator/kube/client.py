# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to the API server, raw bytes in and out.

`kubernetes.aio` does what is hard to get right (kubeconfig, service-account tokens that are renewed, TLS, proxies);
its generated models are not used, since a validated object of each pod costs thirty times the memory of the few fields
that are needed. Every request has a time limit, and every answer that is not 2xx becomes one of `errors`.
"""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import load_incluster_config
from kubernetes.aio.config.kube_config import load_kube_config

from .errors import HeldBackError, KubeError, UnreachableError, classify

REQUEST_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 10.0

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"

Query = Mapping[str, str | int | bool]


class _Status(msgspec.Struct, frozen=True):
    """The API server's answer to a request that failed."""

    message: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Address and credentials of the API server, for a client that is not ours (kopf's)."""

    server: str
    ca_file: str | None
    certificate_file: str | None
    key_file: str | None
    token: str | None
    """Without its scheme; None with a client certificate."""
    insecure: bool
    in_cluster: bool


class KubeClient:
    """One connection pool to one API server. Safe for many tasks of one event loop."""

    def __init__(self, api: ApiClient, *, in_cluster: bool, may_write: Callable[[], bool] = lambda: True) -> None:
        self._api = api
        self._in_cluster = in_cluster
        self._may_write = may_write

    @classmethod
    async def connect(cls, kubeconfig: Path | None) -> "KubeClient":
        """Use this kubeconfig, or the pod's own service account. Raises KubeError if that says too little.

        A KUBECONFIG that happens to be set is never used: it may lead to somebody's production.
        """
        configuration = Configuration()
        try:
            if kubeconfig is None:
                load_incluster_config(client_configuration=configuration)
            else:
                await load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
        except (ConfigException, OSError) as error:
            raise KubeError(f"cannot reach a cluster: {error}") from error
        api = ApiClient(configuration)
        api.user_agent = "gpumon-controller"
        return cls(api, in_cluster=kubeconfig is None)

    def guarded(self, may_write: Callable[[], bool]) -> "KubeClient":
        """Return a client of the same connections whose writes are HeldBackError while `may_write` says no.

        It is asked right before each is sent, so that no part can forget to.
        """
        return KubeClient(self._api, in_cluster=self._in_cluster, may_write=may_write)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def access(self) -> Access:
        """Return what another client needs to reach the same server as the same user."""
        configuration = self._api.configuration
        token = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return Access(
            server=configuration.host,
            ca_file=configuration.ssl_ca_cert,
            certificate_file=configuration.cert_file,
            key_file=configuration.key_file,
            token=token.split(" ", 1)[-1] if token else None,
            insecure=not configuration.verify_ssl,
            in_cluster=self._in_cluster,
        )

    async def get(self, path: str, query: Query | None = None, *, accept: str = JSON) -> bytes:
        """GET an object or a list. Raises KubeError."""
        return await self._request("GET", path, query=query, accept=accept)

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Create an object, or ask a review. Raises KubeError."""
        return await self._request("POST", path, body=body)

    async def put(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Replace an object; with `metadata.resourceVersion` only if nobody else changed it. Raises KubeError."""
        return await self._request("PUT", path, body=body)

    async def merge_patch(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Patch by merge (RFC 7386): null removes a key, a list is replaced whole. Raises KubeError."""
        return await self._request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def strategic_patch(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Patch a built-in kind: items of its lists are found by their key. Raises KubeError."""
        return await self._request("PATCH", path, body=body, content_type=STRATEGIC_PATCH)

    async def json_patch(self, path: str, operations: list[Mapping[str, Any]]) -> bytes:
        """Patch by JSON patch (RFC 6902); a `test` that fails is InvalidError. Raises KubeError."""
        return await self._request("PATCH", path, body=operations, content_type=JSON_PATCH)

    async def delete(self, path: str, *, uid: str | None = None) -> bytes:
        """Delete an object; with `uid` only if it is still that one (else ConflictError). Raises KubeError."""
        body = {"preconditions": {"uid": uid}} if uid else None
        return await self._request("DELETE", path, body=body)

    @asynccontextmanager
    async def stream(
        self, path: str, query: Query, *, inactivity_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """GET a watch; yields an iterator over its lines. A silence longer than `inactivity_seconds` is an error."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=inactivity_seconds)
        response = await self._open("GET", path, query=query, timeout=timeout)
        try:
            yield _lines(response)
        finally:
            response.close()

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        if method != "GET" and not self._may_write():
            raise HeldBackError(f"{method} {path}: held back, since the Lease is not confirmed")
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS)
        response = await self._open(
            method, path, query=query, body=body, content_type=content_type, accept=accept, timeout=timeout
        )
        try:
            return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {_text(error)}") from error
        finally:
            response.release()

    async def _open(
        self,
        method: str,
        path: str,
        *,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own limits, not a deadline of ours
        query: Query | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        try:
            method, url, headers, payload, _ = await self._api.param_serialize(
                method,
                path,
                query_params=[(name, _plain(value)) for name, value in (query or {}).items()],
                header_params={"Accept": accept, "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._api.call_api(method, url, headers, body=payload, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            if response.status < 300:
                return response
            raise await _failure(response)
        except (aiohttp.ClientError, TimeoutError, OSError, ConfigException, ssl.SSLError) as error:
            raise UnreachableError(f"{method} {path}: {_text(error)}") from error


def object_path(group_version: str, plural: str, *, namespace: str | None = None, name: str | None = None) -> str:
    """Path of a list or an object; `group_version` is `v1` or such as `ray.io/v1`."""
    root = f"/api/{group_version}" if "/" not in group_version else f"/apis/{group_version}"
    parts = [root, *(["namespaces", namespace] if namespace else []), plural, *([name] if name else [])]
    return "/".join(parts)


async def _failure(response: aiohttp.ClientResponse) -> KubeError:
    body = await response.content.read(65_536)
    response.release()
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError):
        status = _Status(message=body[:200].decode(errors="replace") or str(response.reason))
    return classify(
        response.status,
        status.message or f"HTTP {response.status}",
        reason=status.reason,
        retry_after_seconds=_seconds(response.headers.get("Retry-After")),
    )


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of a watch of any length: aiohttp's own line reader refuses those above its buffer."""
    rest = bytearray()
    try:
        async for chunk in response.content.iter_any():
            rest += chunk
            if b"\n" not in chunk:
                continue
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line:
                    yield line
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnreachableError(f"watch broke: {_text(error)}") from error


def _plain(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _seconds(header: str | None) -> float | None:
    try:
        return float(header) if header else None
    except ValueError:
        return None


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
