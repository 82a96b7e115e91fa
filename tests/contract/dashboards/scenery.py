# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes a host's exporter on simulated GPUs, the operator's pages, and one of DCGM's shape."""

import asyncio
import csv
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import simgpu
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.controller.test_metrics import COUNTS, STEPS, registry_of
from tests.unit.controller.test_reconciler import GEN, living
from verl_gpumonitor.model import wiring
from verl_gpumonitor.stages.sources.mark_sender import ENV_MARKS_PORT
from verl_gpumonitor_operator.admission.metrics import Metrics as WebhookMetrics
from verl_gpumonitor_operator.controller.breaker import BreakerMetrics
from verl_gpumonitor_operator.controller.ingest import IngestMetrics
from verl_gpumonitor_operator.controller.reportserver import ServerMetrics
from verl_gpumonitor_operator.controller.rescue import RescueMetrics
from verl_gpumonitor_operator.controller.tokens import TokenMetrics
from verl_gpumonitor_sidecar import settings

REPOSITORY = Path(__file__).parents[3]
COMPOSE = REPOSITORY / "compose"
SIMULATION = REPOSITORY / "tests" / "fakenvml"
RULES = REPOSITORY / "charts" / "gpumonitor" / "files" / "rules.yaml"
GPUS = 4
NAMESPACE, WORKLOAD, POD = "train", "sft", "m"
"""As the controller's tests call them: the pod's name says nothing of the job's."""
LONELY = {"host": "workstation", NAMESPACE: "sft-2-master-0"}
"""Namespace -> a pod with GPUs that no controller counts to a job: of one host, and one whose name says otherwise."""
ATTEMPTS = 3
STARTED_WITHIN_SECONDS = 60.0
"""It takes 5 s, and more where all cores are busy with other tests."""

Labels = Mapping[str, str]


def program(name: str) -> str:
    """Prometheus itself, out of Debian's package; `make unit` brings it."""
    found = shutil.which(name) or str(REPOSITORY / ".cache" / "tools" / name)
    assert Path(found).exists(), f"{name} is not here: make .cache/tools/{name}"
    return found


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _controller_page() -> bytes:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(120, used=(78, 19, 19, 19), stage=GEN, stages=COUNTS, steps=STEPS)
        page = generate_latest(registry_of(life))
    registry = CollectorRegistry()
    for metrics in (IngestMetrics, ServerMetrics, TokenMetrics, RescueMetrics, BreakerMetrics):
        metrics(registry)
    return page + generate_latest(registry)


def controller_page() -> bytes:
    """What a controller with one job serves, with a finding open."""
    return asyncio.run(_controller_page())


def others_page() -> bytes:
    """GPUs of pods without a job, and a second job that has the pod, as one that borrows a RayCluster does."""
    key = f'namespace="{NAMESPACE}",workload="borrower",kind="RayJob",pod="{POD}"'
    lines = [f"gpumonitor_workload_pod_info{{{key}}} 1\n"]
    lines += [
        f'gpumonitor_gpu_info{{namespace="{namespace}",pod="{pod}",gpu="0",uuid="GPU-{pod}",role="unknown"}} 1\n'
        for namespace, pod in LONELY.items()
    ]
    return "".join(lines).encode()


def dcgm_page() -> bytes:
    """What a DCGM exporter serves with our list of counters, for the simulated GPUs."""
    lines = []
    rows = [line for line in (COMPOSE / "dcgm-counters.csv").read_text().splitlines() if not line.startswith("#")]
    for name, kind, text in csv.reader(rows, skipinitialspace=True):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for index in range(GPUS):
            labels = (
                f'gpu="{index}",UUID="{simgpu.uuid_of(index)}",device="nvidia{index}",modelName="H100",Hostname="h"'
            )
            lines.append(f"{name}{{{labels}}} {index + 1}")
    return ("\n".join(lines) + "\n").encode()


@contextmanager
def served(page: bytes) -> Iterator[int]:
    """Serve one page on localhost; gives the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class EndedError(AssertionError):
    """A program of the scenery came to its end, which none does by itself."""


class Program:
    """One that runs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def check(self) -> None:
        """Raise EndedError, with its last words, if it ended."""
        code = self._process.poll()
        if code is not None:
            raise EndedError(
                f"{self._process.args!r} ended with {code}: {self._log.read_text(errors='replace')[-2000:]}"
            )


@contextmanager
def running(command: Sequence[str], log: Path, **environ: str) -> Iterator[Program]:
    """Run a program until the end of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=out, stderr=out)
        try:
            yield Program(process, log)
        finally:
            process.kill()
            process.wait()


def configuration(targets: Mapping[str, Sequence[int]], rules: Path) -> dict[str, Any]:
    """The configuration of compose, at this place: job -> ports of its targets; faster, as tests are short."""
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    loaded["global"] = {"scrape_interval": "1s", "evaluation_interval": "2s"}
    loaded["rule_files"] = [str(rules)]
    for job in loaded["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in targets.get(job["job_name"], ())]}]
    return loaded


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer. Raises AssertionError with what Prometheus said."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from error

    def query(self, expr: str) -> list[tuple[Labels, float]]:
        """Labels and value of each series now."""
        found = self.ask("query", query=expr)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]

    def series(self, selector: str) -> list[Labels]:
        """Labels of all series that fit."""
        found: list[Labels] = self.ask("series", **{"match[]": selector})
        return found

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False


def build_simulation() -> None:
    """Build the library that stands for the driver's. One at a time: workers of pytest would write the same file."""
    with (Path(tempfile.gettempdir()) / f"gpumonitor-simulation-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", str(SIMULATION)], check=True)


@contextmanager
def scenery(folder: Path) -> Iterator[Prometheus]:
    """All of it, with an Xid and a throttled GPU."""
    build_simulation()
    with ExitStack() as stack:
        yield begun(folder, stack)


def begun(folder: Path, stack: ExitStack) -> Prometheus:
    """Start all of it, and anew where a program ends at once.

    It does where another process has taken its port meanwhile, or where the code is being edited as it starts.
    """
    for number in range(1, ATTEMPTS + 1):
        place = folder / str(number)
        place.mkdir()
        with ExitStack() as attempt:
            try:
                asked = started(place, attempt)
            except EndedError:
                if number == ATTEMPTS:
                    raise
            else:
                stack.push(attempt.pop_all())
                return asked
        time.sleep(1.0)
    raise AssertionError("not reached")


def started(folder: Path, stack: ExitStack) -> Prometheus:
    """Start all of it and wait until it measures. Raises EndedError."""
    state = simgpu.init(folder / "gpus", gpus=GPUS)
    simgpu.set_values(1, file=state, clocks_event_reasons=0x40)  # HW thermal slowdown
    exporter, prometheus, marks = free_port(), free_port(), free_port(socket.SOCK_DGRAM)
    simulated = {
        "FAKENVML_STATE": str(state.path),
        "LD_LIBRARY_PATH": str(SIMULATION / "build"),
        "PYTHONPATH": str(SIMULATION),
        ENV_MARKS_PORT: str(marks),
        settings.ENV_MARKS_PORT: str(marks),
        wiring.ENV_METRICS_PORT: str(exporter),
        wiring.ENV_POD_NAMESPACE: NAMESPACE,
        wiring.ENV_POD_NAME: POD,
        wiring.ENV_SAMPLE_INTERVAL: "0.5",
    }
    pages = (controller_page(), WebhookMetrics().rendered(), others_page())
    ports = [stack.enter_context(served(page)) for page in pages]
    dcgm = stack.enter_context(served(dcgm_page()))
    config, rules = folder / "prometheus.yaml", folder / "rules.yaml"
    rules.write_text(RULES.read_text().replace("interval: 30s", "interval: 2s"))
    targets = {"gpumonitor": [exporter, *ports], "dcgm": [dcgm], "prometheus": [prometheus]}
    config.write_text(yaml.safe_dump(configuration(targets, rules)))
    load = [sys.executable, str(COMPOSE / "simulated" / "load.py"), "--step-seconds", "6"]
    serve = [sys.executable, "-m", "verl_gpumonitor_sidecar.host"]
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{prometheus}",
    ]
    programs = (
        stack.enter_context(running(load, folder / "load.log", **simulated)),
        stack.enter_context(running(serve, folder / "exporter.log", **simulated)),
        stack.enter_context(running(command, folder / "prometheus.log")),
    )
    asked = Prometheus(prometheus)

    def measures() -> bool:
        for one in programs:
            one.check()
        return asked.ready() and bool(asked.query("gpumonitor_gpu_up == 1"))

    wait_for(measures, STARTED_WITHIN_SECONDS)
    simgpu.xid(1, 79, file=state)
    return asked


def wait_for(holds: Any, seconds: float) -> None:
    """Wait until it holds, or fail."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.2)
