# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A running webhook on loopback, and a client that talks to it as an API server does: TLS, keep-alive, by name."""

import asyncio
import base64
import io
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from tests.unit.admission import samples
from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.admission.kubeapi import Address, KubeApi
from verl_gpumonitor_operator.admission.server import LIMITS, Server
from verl_gpumonitor_operator.listening import ServerLimits
from verl_gpumonitor_operator.settings import Settings

from .fake_api import FakeApi

SERVER_NAME = "gpumonitor-webhook.gpumonitor-system.svc"


def review(
    pod: Any,
    *,
    namespace: str = "team-a",
    uid: str = "705ab4f5-6393-11e8-b7cc-42010a800002",
    dry_run: bool = False,
) -> bytes:
    """AdmissionReview as the API server writes it."""
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    request = {
        "uid": uid,
        "kind": kind,
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "requestKind": kind,
        "namespace": namespace,
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kuberay-system:kuberay-operator"},
        "object": pod,
        "oldObject": None,
        "dryRun": dry_run,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    return json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}).encode()


class Client:
    """Posts to /mutate and to nothing else; trusts the CA bundle that it is given."""

    def __init__(self, server: Server, ca_pem: bytes) -> None:
        self._server = server
        self._tls = ssl.create_default_context(cadata=ca_pem.decode())
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
        # Lets TLS transports close themselves.
        await asyncio.sleep(0.05)

    async def post(self, body: bytes) -> dict[str, Any]:
        """Return `response` of the answer, which always has the form of a review."""
        assert self._session is not None
        url = f"https://127.0.0.1:{self._server.addresses['mutate'][1]}/mutate"
        async with self._session.post(
            url, data=io.BytesIO(body), ssl=self._tls, server_hostname=SERVER_NAME
        ) as response:
            assert response.status == 200
            answer = json.loads(await response.read())
        assert answer["apiVersion"] == "admission.k8s.io/v1"
        assert answer["kind"] == "AdmissionReview"
        held = answer["response"]
        assert isinstance(held, dict)
        return held


def patch_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Operations of an answer; empty if it has none."""
    decoded = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    assert isinstance(decoded, list)
    return decoded


async def plain(server: Server, path: str) -> tuple[int, str]:
    """GET of the health port."""
    url = f"http://127.0.0.1:{server.addresses['health'][1]}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


@asynccontextmanager
async def serving(
    fake: FakeApi, settings: Settings = samples.SETTINGS, *, limits: ServerLimits = LIMITS
) -> AsyncIterator[Server]:
    """A webhook process's inside, ready for requests."""
    async with KubeApi(Address(url=fake.url)) as api:
        server = Server(settings, api, host="127.0.0.1", port=0, health_port=0, drain_seconds=0.0, limits=limits)
        task = asyncio.create_task(server.run())
        try:
            async with asyncio.timeout(10):
                while not server.is_ready:
                    await asyncio.sleep(0.01)
                    if task.done():
                        await task
            yield server
        finally:
            server.stop()
            await task


def bundle_of(fake: FakeApi) -> bytes:
    return certs.bundle(fake.certificates)
