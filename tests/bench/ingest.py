# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.ingest`: what reports of 8 GPUs cost the report server, over TLS on the loopback.

The server runs in a process of its own, whose CPU time and memory are measured; the clients' cost is not in the
figures. Token reviews and the sink are stand-ins: this is the price of TLS, HTTP, checks, JSON and answers.
"""

import argparse
import asyncio
import contextlib
import ssl
import subprocess
import sys
import time
import uuid
from asyncio import sslproto
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from aiohttp import web
from prometheus_client import CollectorRegistry

from tests.unit.ingest.builders import Bundle, FakeReviewer, Pods, Sink, Switch, pod_record, report
from verl_gpumonitor.model.report import encode
from verl_gpumonitor_operator import certs, listening
from verl_gpumonitor_operator.certificates import load_leaf, server_context
from verl_gpumonitor_operator.controller import reportserver
from verl_gpumonitor_operator.controller.ingest import IngestLimits, IngestMetrics, ReportService
from verl_gpumonitor_operator.controller.ports import PodRecord
from verl_gpumonitor_operator.controller.rates import Rate
from verl_gpumonitor_operator.controller.tokens import TokenLimits, TokenMetrics, Tokens, claimed_by

SERVER_NAME = "gpumonitor-controller.gpumonitor-system.svc"
PODS = 1000
UNLIMITED = Rate(burst=1e12, per_second=1e12)
EXPIRES_AT = 4_000_000_000.0


def pods() -> list[PodRecord]:
    """The senders."""
    return [pod_record(uid=f"uid-{number:06d}", name=f"job-worker-{number}") for number in range(PODS)]


async def serve_bare(folder: Path) -> None:
    """Run a server that does no more than read a body and answer, to see what TLS and HTTP cost by themselves."""

    async def handle(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(body=b"{}", content_type="application/json")

    context = server_context()
    load_leaf(context, {name: (folder / name).read_bytes() for name in (certs.LEAF, certs.LEAF_KEY)})
    server = web.Server(handle, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, ssl=context)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    listening.close()
    await server.shutdown(0.1)


async def serve(folder: Path, buffer_bytes: int) -> None:
    """Run the server until its standard input ends; its first line of output is its port."""
    reviewer, registry, directory = FakeReviewer(), CollectorRegistry(), Pods.of(*pods())
    for pod in directory.records():
        reviewer.issue(pod, expires_at=EXPIRES_AT)
    tokens = Tokens(
        reviewer,
        known_pod=claimed_by(directory),
        metrics=TokenMetrics(registry),
        limits=TokenLimits(known=UNLIMITED, each_pod=UNLIMITED),
    )
    service = ReportService(
        tokens=tokens,
        pods=directory,
        sink=Sink(keep=False),
        readiness=Switch(),
        ca=Bundle((folder / "ca.crt").read_text()),
        metrics=IngestMetrics(registry),
        limits=IngestLimits(each_pod=UNLIMITED),
    )
    certificate = reportserver.LiveCertificate()
    certificate.load({name: (folder / name).read_bytes() for name in (certs.LEAF, certs.LEAF_KEY)})
    server = reportserver.ReportServer(
        service,
        certificate=certificate,
        metrics=reportserver.ServerMetrics(registry),
        host="127.0.0.1",
        port=0,
        limits=listening.ServerLimits(connections_of_peer=20_000),
    )
    await server.start()
    sslproto.SSLProtocol.max_size = buffer_bytes
    print(server.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close(0.1)


@dataclass
class Server:
    """The server's process."""

    process: psutil.Process
    port: int
    context: ssl.SSLContext

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss(self) -> int:
        return int(self.process.memory_info().rss)


@contextlib.contextmanager
def running(buffer_bytes: int = listening.TLS_BUFFER_BYTES) -> Iterator[Server]:
    """Start a server, a bare one where the buffer is 0; it ends with the block."""
    data = certs.plan(
        None,
        now=datetime.now(UTC),
        names=certs.server_names("gpumonitor", "gpumonitor-system"),
        published=None,
    )
    assert data is not None
    with TemporaryDirectory() as name:
        for key in (certs.CA_BUNDLE, certs.LEAF, certs.LEAF_KEY):
            (Path(name) / key).write_bytes(data[key])
        command = [sys.executable, "-m", "tests.bench.ingest", "--serve", name, "--buffer-bytes", str(buffer_bytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            context = ssl.create_default_context(cadata=data[certs.CA_BUNDLE].decode())
            yield Server(process=psutil.Process(process.pid), port=port, context=context)
            process.communicate()


class Client:
    """One sidecar's connection, as cheap as can be."""

    def __init__(self, server: Server, pod: PodRecord, token: str) -> None:
        self._server, self._pod, self._token, self._sequence = server, pod, token, 0
        self._body = encode(report(pod, sequence=9_999_999, start_id=uuid.uuid4().hex))
        self.size = len(self._body)

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self._server.port, ssl=self._server.context, server_hostname=SERVER_NAME
        )

    async def send(self) -> None:
        self._sequence += 1
        body = self._body.replace(b"9999999", b"%d" % (1_000_000 + self._sequence))
        head = (
            f"POST /v1/report HTTP/1.1\r\nHost: c\r\nAuthorization: Bearer {self._token}\r\nContent-Length: {len(body)}"
        )
        self.writer.write(head.encode() + b"\r\n\r\n" + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200"), answer
        await self.reader.readexactly(int(answer.split(b"content-length:")[1].split(b"\r\n")[0]))

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def clients(server: Server, number: int) -> list[Client]:
    """Make that many clients, each of a pod of its own."""
    reviewer = FakeReviewer()
    senders = pods()[:number]
    return [Client(server, pod, reviewer.issue(pod, expires_at=EXPIRES_AT)) for pod in senders]


async def keep_alive(server: Server, label: str, connections: int, seconds: float) -> None:
    """Reports on connections that are kept. A bare server is run beside, for the machine's share of the figures."""
    senders = clients(server, connections)
    for sender in senders:
        await sender.connect()
        await sender.send()
    count, until = 0, time.monotonic() + seconds

    async def go_on(sender: Client) -> None:
        nonlocal count
        while time.monotonic() < until:
            await sender.send()
            count += 1

    cpu, begun = server.cpu_seconds(), time.monotonic()
    await asyncio.gather(*map(go_on, senders))
    used, wall = server.cpu_seconds() - cpu, time.monotonic() - begun
    print(
        f"  {label:5}  {connections:3} connections, {senders[0].size} bytes each: {count / used:.0f} reports/s per core"
        f" ({used / count * 1e6:.0f} us each), {count / wall:.0f}/s at {used / wall:.0%} of a core,"
        f" RSS {server.rss() >> 20} MiB"
    )
    for sender in senders:
        await sender.close()


async def connect_each_time(server: Server, number: int) -> None:
    """Reports on a new connection each."""
    [sender] = clients(server, 1)
    cpu = server.cpu_seconds()
    for _ in range(number):
        await sender.connect()
        await sender.send()
        await sender.close()
    used = server.cpu_seconds() - cpu
    print(f"  a new connection each time: {number / used:.0f} reports/s per core ({used / number * 1e6:.0f} us each)")


async def idle_memory(server: Server, label: str) -> None:
    """Memory of a connection that is open and was used once."""
    senders = clients(server, PODS)
    await senders[0].connect()
    await senders[0].send()
    before = server.rss()
    for sender in senders[1:]:
        await sender.connect()
        await sender.send()
    each = (server.rss() - before) / (len(senders) - 1)
    print(f"  {label}: {each / 1024:.0f} KiB a connection, {each * 10_000 / 2**20:.0f} MiB for 10,000 sidecars")
    for sender in senders:
        await sender.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--buffer-bytes", type=int, default=listening.TLS_BUFFER_BYTES, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    options = parser.parse_args()
    if options.serve is not None:
        work = serve(options.serve, options.buffer_bytes) if options.buffer_bytes else serve_bare(options.serve)
        asyncio.run(work)
        return
    with running(0) as bare, running() as server:
        for connections in (1, 50, 500):
            asyncio.run(keep_alive(bare, "bare", connections, options.seconds))
            asyncio.run(keep_alive(server, "whole", connections, options.seconds))
        asyncio.run(connect_each_time(server, 300))
    with running() as server:
        asyncio.run(idle_memory(server, f"memory, TLS buffers of {listening.TLS_BUFFER_BYTES >> 10} KiB"))
    with running(256 * 1024) as server:
        asyncio.run(idle_memory(server, "memory, asyncio's own buffers of 256 KiB"))


if __name__ == "__main__":
    main()
