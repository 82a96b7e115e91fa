# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The measured process: the whole controller, with reports put into its sink, and a line of JSON for each figure.

Making the reports is not the controller's work; its CPU time is taken off. Their way over TLS is another bench
(`tests.bench.ingest`).
"""

import argparse
import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.bench.controller_load import OPERATOR_NAMESPACE, report_of
from verl_gpumonitor_operator import logs
from verl_gpumonitor_operator.controller.main import Controller, Options
from verl_gpumonitor_operator.controller.ports import PodIdentity, PodRecord
from verl_gpumonitor_operator.controller.writer import Outcome
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.settings import Images, Settings

INTERVAL_SECONDS = 15.0
STEP_SECONDS = 0.1


class Feeder:
    """Sends each pod's report every 15 s, evenly over time, as sidecars with their jitter do."""

    def __init__(self, controller: Controller, began: float) -> None:
        self._controller = controller
        self._began = began
        self._sequence = int(time.time())
        self.cpu_seconds = 0.0
        """Spent on making reports."""
        self.sent = 0
        self.rounds = 0

    async def run(self) -> None:
        """Feed for ever."""
        await until(lambda: self._controller.ready)
        loop = asyncio.get_running_loop()
        while True:
            start = loop.time()
            pods = list(self._controller.pods.records())
            self._sequence += 1
            for number, pod in enumerate(pods):
                due = start + INTERVAL_SECONDS * number / len(pods)
                if due - loop.time() > STEP_SECONDS:
                    await asyncio.sleep(due - loop.time())
                self._send(pod)
            self.rounds += 1
            await asyncio.sleep(max(0.0, start + INTERVAL_SECONDS - loop.time()))

    def _send(self, pod: PodRecord) -> None:
        before = time.thread_time()
        now = time.time()
        report = report_of(pod, sequence=self._sequence, now=now, began=self._began)
        self.cpu_seconds += time.thread_time() - before
        identity = PodIdentity(namespace=pod.namespace, name=pod.name, uid=pod.uid)
        self._controller.workloads.accept(identity, report, now)
        self.sent += 1


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition, looking often enough for figures in tenths of a second."""
    while True:
        if holds():
            return
        await asyncio.sleep(0.1)


def say(event: str, **values: float) -> None:
    """Print one figure."""
    print(json.dumps({"event": event, **values}), flush=True)


async def measure(controller: Controller, feeder: Feeder, started: float, seconds: float) -> None:
    """Follow the start, then a steady time of so many seconds."""
    process = psutil.Process()
    await until(lambda: controller.ready)
    say("lists", seconds=time.monotonic() - started, rss_mib=process.memory_info().rss / 2**20)
    await until(lambda: feeder.rounds >= 1)
    say("reported", seconds=time.monotonic() - started, rss_mib=process.memory_info().rss / 2**20)
    total = len(controller.workloads)
    entries = controller.reconciler.entries
    await until(lambda: sum(1 for _, entry in entries() if _complete(entry.written)) >= total)
    say("written", seconds=time.monotonic() - started, rss_mib=process.memory_info().rss / 2**20)
    await steady(controller, feeder, process, seconds)


def _complete(status: object) -> bool:
    gpus = status.get("gpus", {}) if isinstance(status, dict) else {}
    return bool(gpus) and gpus["reported"] == gpus["requested"] > 0


async def steady(controller: Controller, feeder: Feeder, process: psutil.Process, seconds: float) -> None:
    """Measure a time in which nothing but reports happens."""
    counts = controller.writer.counts.outcomes
    cpu, making = process.cpu_times(), feeder.cpu_seconds
    writes, sent, looks, began = (
        counts[Outcome.WRITTEN],
        feeder.sent,
        controller.reconciler.times.looks,
        time.monotonic(),
    )
    lag = 0.0
    while time.monotonic() - began < seconds:
        await asyncio.sleep(1.0)
        lag = max(lag, controller.reconciler.times.lag_seconds)
    took = time.monotonic() - began
    after = process.cpu_times()
    busy = after.user + after.system - cpu.user - cpu.system - (feeder.cpu_seconds - making)
    say(
        "steady",
        seconds=took,
        cpu_cores=busy / took,
        rss_mib=process.memory_info().rss / 2**20,
        reports_per_second=(feeder.sent - sent) / took,
        status_writes_per_second=(counts[Outcome.WRITTEN] - writes) / took,
        looks_per_second=(controller.reconciler.times.looks - looks) / took,
        worst_lag_seconds=lag,
    )


async def run(kubeconfig: Path, seconds: float, began: float) -> None:
    """Run the controller until the figures are there."""
    started = time.monotonic()
    settings = Settings(
        release="bench",
        namespace=OPERATOR_NAMESPACE,
        images=Images(sidecar="bench/sidecar:1", operator="bench/operator:1"),
    )
    options = Options(
        settings=settings,
        kubeconfig=kubeconfig,
        instance="bench",
        identity="bench",
        report_port=0,
        health_port=0,
        host="127.0.0.1",
    )
    client = await KubeClient.connect(kubeconfig)
    controller = Controller(options, client)
    feeder = Feeder(controller, began)
    serving = asyncio.create_task(controller.serve())
    feeding = asyncio.create_task(feeder.run())
    measuring = asyncio.create_task(measure(controller, feeder, started, seconds))
    await asyncio.wait({serving, feeding, measuring}, return_when=asyncio.FIRST_COMPLETED)
    for task in (feeding, serving, measuring):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    await client.close()


def main() -> None:
    """Run with the arguments of `tests.bench.controller`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--began", type=float, required=True)
    given = parser.parse_args()
    logs.configure(logging.WARNING)
    asyncio.run(run(given.kubeconfig, given.seconds, given.began))


if __name__ == "__main__":
    main()
