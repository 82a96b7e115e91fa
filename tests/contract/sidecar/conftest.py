# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The real sidecar as a process of its own, the simulated driver library, and a controller to report to."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simgpu
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.sidecar.controller import SERVER_NAME, Authority, Controller
from verl_gpumonitor.model import wiring

SIMULATION = Path(simgpu.__file__).parent
LIBRARY = SIMULATION / "build" / "libnvidia-ml.so.1"
PROGRAM = Path(sys.executable).parent / "gpumon-sidecar"
TOKEN_VARIABLE = "GPUMON_REPORT_TOKEN_FILE"
ENDS_WITHIN_SECONDS = 2.0
"""The sidecar ends within a second by itself; the tests' machine is shared by several of them at once."""

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Series name -> (labels, value) of each."""


class Sidecar:
    """One run of `gpumon-sidecar`."""

    def __init__(self, environ: dict[str, str], log: Path) -> None:
        self._log = log
        self._port: int | None = None
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([PROGRAM], env=environ, stdin=subprocess.DEVNULL, stderr=stderr, cwd="/")

    @property
    def log(self) -> list[dict[str, Any]]:
        """What it said so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    @property
    def port(self) -> int:
        """Port of /metrics."""
        if self._port is None:
            wait_for(lambda: self._served() is not None, 10.0, pause=0.02)
            self._port = self._served()
        assert self._port is not None
        return self._port

    def _served(self) -> int | None:
        return next((int(line["port"]) for line in self.log if line["message"].startswith("serving")), None)

    def get(self, path: str = "/metrics", seconds: float = 5.0) -> str:
        """Return the body of a 200 answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=seconds) as answer:
            assert answer.status == 200
            text: str = answer.read().decode()
            return text

    def samples(self) -> Samples:
        """Return all series, as Prometheus's own parser reads them."""
        found: Samples = {}
        for family in text_string_to_metric_families(self.get()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def value(self, name: str, **labels: str) -> float | None:
        """Return one series' value; None where there is no such series."""
        for had, value in self.samples().get(name, []):
            if labels.items() <= had.items():
                return value
        return None

    def wait(self, holds: Callable[[Samples], Any], seconds: float = 10.0) -> None:
        """Wait until the series say so."""
        wait_for(lambda: holds(self.samples()), seconds)

    def end(self, number: int = signal.SIGTERM) -> float:
        """Send a signal and return how many seconds the process took to exit with 0."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(5.0) == 0
        return time.monotonic() - began

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")


def wait_for(holds: Callable[[], Any], seconds: float, *, pause: float = 0.1) -> None:
    """Wait until it holds, or fail. `pause`: seconds between two looks, of which most fetch and parse /metrics."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(pause)


@pytest.fixture(scope="session")
def library() -> Path:
    """The folder of the built library."""
    subprocess.run(["make", "-s", "-C", str(SIMULATION)], check=True)
    return LIBRARY.parent


@pytest.fixture
def gpus(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> simgpu.StateFile:
    """Eight simulated GPUs; `simgpu`'s functions act on them."""
    path = tmp_path / "gpus"
    monkeypatch.setenv("FAKENVML_STATE", str(path))
    return simgpu.init(path, gpus=8)


Start = Callable[..., Sidecar]


@pytest.fixture
def start(library: Path, tmp_path: Path) -> Iterator[Start]:
    """Start sidecars with these variables changed; None takes one away. They are killed at the end."""
    running: list[Sidecar] = []

    def run(**changes: str | None) -> Sidecar:
        environ: dict[str, str | None] = {
            "FAKENVML_STATE": str(tmp_path / "gpus"),
            "LD_LIBRARY_PATH": str(library),
            wiring.ENV_POD_NAMESPACE: "team",
            wiring.ENV_POD_NAME: "worker-0",
            wiring.ENV_POD_UID: "3f2a-11",
            wiring.ENV_NODE_NAME: "node-a",
            wiring.ENV_GPUS_REQUESTED: "8",
            wiring.ENV_METRICS_PORT: "0",
            wiring.ENV_SAMPLE_INTERVAL: "0.25",
            **changes,
        }
        known = {name: value for name, value in environ.items() if value is not None}
        sidecar = Sidecar(known, tmp_path / f"sidecar-{len(running)}.log")
        running.append(sidecar)
        return sidecar

    yield run
    for sidecar in running:
        sidecar.process.kill()
        sidecar.process.wait()


@pytest.fixture(scope="session")
def authority() -> Authority:
    """The CA that sidecars trust from their start."""
    return Authority()


@pytest.fixture
def controller(authority: Authority, tmp_path: Path) -> Iterator[Controller]:
    """A controller that accepts everything until told otherwise."""
    running = Controller(authority.server_context(tmp_path))
    yield running
    running.close()


@pytest.fixture
def reporting(controller: Controller, authority: Authority, tmp_path: Path) -> dict[str, str]:
    """The variables with which a sidecar reports to it four times a second."""
    token = tmp_path / "token"
    token.write_text("first-token\n")
    return {
        wiring.ENV_REPORT_URL: controller.url,
        wiring.ENV_REPORT_SERVER_NAME: SERVER_NAME,
        wiring.ENV_REPORT_CA: authority.pem,
        wiring.ENV_REPORT_INTERVAL: "0.25",
        TOKEN_VARIABLE: str(token),
    }
