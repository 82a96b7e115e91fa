# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of the webhook: `python -m tests.bench.webhook`.

The real process on loopback, asked over TLS keep-alive as an API server asks, with an API server behind it that answers
the reads of each pod at once. Printed are requests a second, times to an answer, the webhook's CPU for each, and
memory; nothing is asserted here.
The three processes share the machine's cores, so the figures are lower than on a machine of the webhook's own.
"""

import argparse
import asyncio
import contextlib
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import psutil

from tests.contract.admission import fake_api
from tests.contract.admission.serving import SERVER_NAME, bundle_of, review
from tests.unit.admission import samples

BUDGET = "budget: p99 10 ms, 60 MiB"
PORT, HEALTH_PORT = 29443, 28081
KINDS = {
    "injected (worker, Guaranteed)": samples.ray_worker(),
    "injected (worker, BestEffort)": samples.best_effort(samples.ray_worker()),
    "not ours (submitter)": samples.ray_submitter(),
}


class Run(NamedTuple):
    seconds: float
    times: list[float]

    def line(self, name: str, connections: int) -> str:
        cuts = statistics.quantiles(self.times, n=100)
        rate = len(self.times) / self.seconds
        return f"{name:32} {connections:4d} {rate:8.0f} {cuts[49] * 1e3:8.2f} {cuts[98] * 1e3:8.2f}"


@contextlib.asynccontextmanager
async def webhook(url: str, directory: Path) -> AsyncIterator[psutil.Process]:
    """The process as it runs in its pod, ready."""
    settings = directory / "settings.json"
    settings.write_bytes(msgspec.json.encode(samples.SETTINGS))
    command = [sys.executable, "-m", "verl_gpumonitor_operator.admission.main", "--settings", str(settings)]
    command += ["--api-server", url, "--host", "127.0.0.1", "--port", str(PORT), "--health-port", str(HEALTH_PORT)]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL, env={**os.environ})
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{HEALTH_PORT}/readyz") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.05)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def measure(tls: ssl.SSLContext, body: bytes, *, connections: int, seconds: float) -> Run:
    times: list[float] = []
    end = time.monotonic() + seconds

    async def one_connection() -> None:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            while time.monotonic() < end:
                started = time.monotonic()
                url = f"https://127.0.0.1:{PORT}/mutate"
                async with session.post(url, data=body, ssl=tls, server_hostname=SERVER_NAME) as response:
                    answer = json.loads(await response.read())
                times.append(time.monotonic() - started)
                if not answer["response"]["allowed"]:
                    raise SystemExit("a pod was refused")

    started = time.monotonic()
    await asyncio.gather(*(one_connection() for _ in range(connections)))
    return Run(time.monotonic() - started, times)


async def serve_api(ready: Path) -> None:
    """The API server's part, in a process of its own, so that it does not slow the client's clock."""
    async with fake_api.running() as fake:
        whole = ready.with_suffix(".part")
        await asyncio.to_thread(whole.write_text, json.dumps({"url": fake.url, "ca": bundle_of(fake).decode()}))
        whole.rename(ready)
        await asyncio.Event().wait()


def wait_for(file: Path, seconds: float = 30.0) -> str:
    """Content of a file that another process writes in one go."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if file.exists():
            return file.read_text()
        time.sleep(0.05)
    raise SystemExit(f"{file.name} did not appear")


@contextlib.asynccontextmanager
async def api_process(directory: Path) -> AsyncIterator[dict[str, str]]:
    ready = directory / "api.json"
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, "--serve-api", str(ready))
    try:
        yield json.loads(await asyncio.to_thread(wait_for, ready))
    finally:
        process.terminate()
        await process.wait()


async def bench(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with api_process(directory) as api, webhook(api["url"], directory) as process:
            tls = ssl.create_default_context(cadata=api["ca"])
            print(f"webhook ({BUDGET}; review of {len(review(samples.ray_worker()))} bytes)")
            print(f"{'pod':32} {'conn':>4} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms':>8}")
            print(f"{'RSS at rest':32} {process.memory_info().rss / 2**20:.1f} MiB")
            for kind, pod in KINDS.items():
                for connections in (1, 8):
                    before = sum(process.cpu_times()[:2])
                    run = await measure(tls, review(pod), connections=connections, seconds=seconds)
                    cpu = (sum(process.cpu_times()[:2]) - before) / len(run.times)
                    print(f"{run.line(kind, connections)} {cpu * 1e3:8.2f}", flush=True)
            print(f"{'RSS after the load':32} {process.memory_info().rss / 2**20:.1f} MiB")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run (default: %(default)s)")
    parser.add_argument("--serve-api", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_api(arguments.serve_api) if arguments.serve_api else bench(arguments.seconds))


if __name__ == "__main__":
    main()
