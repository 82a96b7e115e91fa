# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A real report server with real TLS on the loopback, beside a stand-in for the API server's token review."""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from tests.unit.ingest.builders import NOW, Bundle, Clock, FakeReviewer, Pods, Sink, Switch, pod_record, value_of
from verl_gpumonitor.model.report import Report, encode
from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.controller.ingest import IngestLimits, IngestMetrics, ReportService
from verl_gpumonitor_operator.controller.reportserver import LiveCertificate, ReportServer, ServerMetrics
from verl_gpumonitor_operator.controller.tokens import TokenMetrics, Tokens, claimed_by
from verl_gpumonitor_operator.listening import ServerLimits

SERVER_NAME = "gpumonitor-controller.gpumonitor-system.svc"
NAMES = certs.server_names("gpumonitor", "gpumonitor-system")
POD = pod_record()
HEAD = pod_record(
    name="job-head", uid="uid-head", labels={"ray.io/cluster": "job", "ray.io/node-type": "head"}, gpus_requested=0
)


def new_certificates() -> dict[str, bytes]:
    """A new CA with a leaf, as the Secret holds them."""
    data = certs.plan(None, now=datetime.now(UTC), names=NAMES, published=None)
    assert data is not None
    return data


def trusting(*bundles: bytes) -> ssl.SSLContext:
    """A client that trusts these CAs."""
    return ssl.create_default_context(cadata=b"".join(bundles).decode())


@dataclass
class Rig:
    """A running server and what stands around it."""

    clock: Clock = field(default_factory=Clock)
    reviewer: FakeReviewer = field(default_factory=FakeReviewer)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    pods: Pods = field(default_factory=lambda: Pods.of(POD, HEAD))
    sink: Sink = field(default_factory=Sink)
    switch: Switch = field(default_factory=Switch)
    bundle: Bundle = field(default_factory=Bundle)
    certificate: LiveCertificate = field(default_factory=LiveCertificate)
    certificates: dict[str, bytes] = field(default_factory=new_certificates)

    async def start(self, *, limits: IngestLimits | None = None, server_limits: ServerLimits | None = None) -> None:
        self.tokens = Tokens(
            self.reviewer,
            known_pod=claimed_by(self.pods),
            metrics=TokenMetrics(self.registry),
            clock=self.clock,
        )
        service = ReportService(
            tokens=self.tokens,
            pods=self.pods,
            sink=self.sink,
            readiness=self.switch,
            ca=self.bundle,
            metrics=IngestMetrics(self.registry),
            limits=limits,
            clock=self.clock,
        )
        self.server = ReportServer(
            service,
            certificate=self.certificate,
            metrics=ServerMetrics(self.registry),
            host="127.0.0.1",
            port=0,
            limits=server_limits,
        )
        self.certificate.load(self.certificates)
        await self.server.start()
        self.token = self.reviewer.issue(POD)
        self.head_token = self.reviewer.issue(HEAD)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.port}/v1/report"

    def client_context(self) -> ssl.SSLContext:
        return trusting(self.certificates[certs.CA_BUNDLE])

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.client_context(), limit=0))

    async def post(
        self,
        session: aiohttp.ClientSession,
        body: bytes | Report | AsyncIterator[bytes],
        *,
        token: str | None = None,
        **options: Any,
    ) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Send a report; returns code, JSON and headers."""
        data: Any = encode(body) if isinstance(body, Report) else body
        if isinstance(data, bytes) and len(data) > 2**20:
            data = io.BytesIO(data)
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"} | options.pop("headers", {})
        async with session.post(
            self.url, data=data, headers=headers, server_hostname=SERVER_NAME, **options
        ) as response:
            return response.status, await response.json(), response.headers

    async def drained(self) -> None:
        """Wait until no connection is open. Raises TimeoutError after 5 s."""
        async with asyncio.timeout(5):
            while self.value("gpumonitor_report_connections"):  # noqa: ASYNC110 - a gauge has no event
                await asyncio.sleep(0.01)

    def counted(self, code: int) -> float | None:
        return value_of(self.registry, "gpumonitor_ingest_reports_total", code=str(code))

    def value(self, name: str, **labels: str) -> float | None:
        return value_of(self.registry, name, **labels)


StartRig = Callable[..., Coroutine[Any, Any, Rig]]


@pytest.fixture
async def start() -> AsyncIterator[StartRig]:
    """Start a server with limits of its own; it ends with the test."""
    async with AsyncExitStack() as stack:

        async def make(*, limits: IngestLimits | None = None, server_limits: ServerLimits | None = None) -> Rig:
            rig = Rig()
            await rig.start(limits=limits, server_limits=server_limits)
            stack.push_async_callback(rig.tokens.close)
            stack.push_async_callback(rig.server.close, 0.2)
            return rig

        yield make


@pytest.fixture
async def rig(start: StartRig) -> Rig:
    """A server with the usual limits."""
    return await start()


__all__ = ["HEAD", "NOW", "POD", "SERVER_NAME", "Rig", "StartRig", "new_certificates", "trusting"]
