# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The few paths of an API server that the webhook reads, on a real socket; objects are changed by the test.

A controller renews its Lease there, until the test says that it is away.

It answers as slowly, or with as many refusals, as it is told to. It is no stand-in for a real API server where what
matters is its judgement: those tests run on a cluster.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from verl_gpumonitor_operator import certs

Json = dict[str, Any]

NODE: Json = {
    "metadata": {"name": "gpu-node-1", "labels": {"kubernetes.io/os": "linux"}},
    "status": {
        "allocatable": {"cpu": "95900m", "memory": "1000Gi", "nvidia.com/gpu": "8", "pods": "110"},
        "nodeInfo": {"kubeletVersion": "v1.36.0", "operatingSystem": "linux"},
    },
}


def secret(data: dict[str, bytes]) -> Json:
    return {"data": {key: base64.b64encode(value).decode() for key, value in data.items()}}


def made_certificates(now: datetime | None = None) -> dict[str, bytes]:
    names = certs.server_names("gpumonitor", "gpumonitor-system")
    data = certs.plan(None, now=now or datetime.now(UTC), names=[*names, "localhost"], published=None)
    assert data is not None
    return data


class FakeApi:
    """`objects`: path -> object, or list of objects for a list. A path that is absent answers 404."""

    def __init__(self) -> None:
        own = "/api/v1/namespaces/gpumonitor-system"
        self.certificates = made_certificates()
        self.secret_path = f"{own}/secrets/gpumonitor-certificates"
        self.lease_path = "/apis/coordination.k8s.io/v1/namespaces/gpumonitor-system/leases/gpumonitor-controller"
        self.breaker_path = f"{own}/configmaps/gpumonitor-breaker"
        self.objects: dict[str, Json | list[Json]] = {
            "/version": {"gitVersion": "v1.36.0"},
            "/api/v1/nodes": [NODE],
            "/apis/apps/v1/daemonsets": [],
            "/api/v1/pods": [],
            "/api/v1/namespaces/team-a": {"metadata": {"name": "team-a"}},
            "/api/v1/namespaces/team-a/limitranges": [],
            "/api/v1/namespaces/team-a/resourcequotas": [],
            f"{own}/services/gpumonitor-controller": {"spec": {"clusterIP": "10.96.7.7"}},
            self.secret_path: secret(certs.served_part(self.certificates)),
            self.lease_path: {"metadata": {"name": "gpumonitor-controller"}, "spec": {"holderIdentity": "a"}},
        }
        self.controller_is_away = False
        self._renewals = 0
        self.delay_seconds: dict[str, float] = {}
        self.refused: dict[str, int] = {}
        self.tokens: set[str] = set()
        self.url = ""

    def take(self, data: dict[str, bytes]) -> None:
        """Let the Secret hold what a webhook is given of these certificates."""
        self.certificates = data
        self.objects[self.secret_path] = secret(certs.served_part(data))

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.tokens.add(request.headers.get("Authorization", ""))
        await asyncio.sleep(self.delay_seconds.get(path, 0.0))
        if path in self.refused:
            return web.json_response({"kind": "Status"}, status=self.refused[path])
        found = self.objects.get(path)
        if path == self.lease_path and isinstance(found, dict) and not self.controller_is_away:
            self._renewals += 1
            found["spec"]["renewTime"] = f"2026-01-01T00:00:00.{self._renewals:06}Z"
        if found is None:
            return web.json_response({"kind": "Status"}, status=404)
        return web.json_response(self._page(found, request) if isinstance(found, list) else found)

    def _page(self, items: list[Json], request: web.Request) -> Json:
        """Lists come in pages of at most two, so that paging is always in play."""
        start = int(request.query.get("continue", "0"))
        end = start + min(2, int(request.query.get("limit", "2")))
        more = {"continue": str(end)} if end < len(items) else {}
        return {"items": items[start:end], "metadata": more}


@asynccontextmanager
async def running() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    application = web.Application()
    application.router.add_get("/{path:.*}", fake.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()
