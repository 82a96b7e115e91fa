# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Port 8081, plain HTTP: `/healthz`, `/readyz`, `/metrics`.

Healthy is a process whose event loop answers: the API server's being away is no reason to be killed. Ready is one that
takes reports, or stands by for the one that does.
"""

from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from verl_gpumonitor_operator.listening import listening

PORT: Final = 8081


class HealthServer:
    """Answers kubelet and Prometheus."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        ready: Callable[[], str | None],
        host: str | None = None,
        port: int = PORT,
    ) -> None:
        """`host` None: all addresses."""
        self._registry = registry
        self._ready = ready
        self._address = (host, port)
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, listening(*self._address)).start()

    @property
    def port(self) -> int:
        """The port that is listened on; 0 before the start."""
        addresses = self._runner.addresses if self._runner else []
        return int(addresses[0][1]) if addresses else 0

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        why_not = self._ready()
        return web.Response(text="ok\n") if why_not is None else web.Response(status=503, text=why_not + "\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
