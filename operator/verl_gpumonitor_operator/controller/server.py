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

from verl_gpumonitor_operator.listening import Pages

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
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        self._pages = Pages(pages, host=host, port=port)

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        await self._pages.start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._pages.port

    async def close(self) -> None:
        """Stop listening."""
        await self._pages.close()

    def _healthz(self) -> web.Response:
        return web.Response(text="ok\n")

    def _readyz(self) -> web.Response:
        why_not = self._ready()
        return web.Response(text="ok\n") if why_not is None else web.Response(status=503, text=why_not + "\n")

    def _metrics(self) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
