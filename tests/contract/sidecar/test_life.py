# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Start and end of the process: it ends within a second of SIGTERM in every state, and never by itself."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import simgpu

from tests.contract.sidecar.conftest import ENDS_WITHIN_SECONDS, PROGRAM, Start, wait_for
from tests.contract.sidecar.controller import Controller
from verl_gpumonitor.model import wiring

Reporting = dict[str, str]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_final_report_is_sent_on_a_signal(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting, number: int
) -> None:
    sidecar = start(**reporting)
    controller.wait_for(lambda reports: bool(reports) and len(reports[-1].gpus) == 8)
    assert sidecar.end(number) < ENDS_WITHIN_SECONDS
    assert controller.reports[-1].final
    assert len(controller.reports[-1].gpus) == 8
    assert not any(report.final for report in controller.reports[:-1])


@pytest.mark.slow
def test_it_ends_whatever_the_controller_does(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting, silent_port: int
) -> None:
    controller.hang_seconds = 30.0
    urls = {
        "it never answers": controller.url,
        "the handshake hangs": f"https://127.0.0.1:{silent_port}/",
        "nobody is there": "https://127.0.0.1:1/",
    }
    sidecars = {kind: start(**reporting | {wiring.ENV_REPORT_URL: url}) for kind, url in urls.items()}
    for sidecar in sidecars.values():
        sidecar.wait(lambda found: found.get("gpumonitor_gpu_up"))
    time.sleep(2.0)  # Until all of them have begun a report: the first goes out in the first fifth of a second.
    for kind, sidecar in sidecars.items():
        assert sidecar.end() < ENDS_WITHIN_SECONDS, kind


def test_it_ends_while_a_call_hangs(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    simgpu.hang(gpu=4)
    sidecar = start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 1)
    assert sidecar.end() < ENDS_WITHIN_SECONDS
    assert controller.reports[-1].final


def test_it_ends_while_the_opening_hangs_or_fails(gpus: simgpu.StateFile, start: Start) -> None:
    simgpu.hang(function="init")
    hanging, without = start(), start(LD_LIBRARY_PATH="/nonexistent")
    without.wait(lambda found: found.get("gpumonitor_telemetry_available"))
    hanging.get()
    assert without.process.poll() is None
    assert hanging.end() < ENDS_WITHIN_SECONDS
    assert without.end() < ENDS_WITHIN_SECONDS


def test_it_ends_at_once_while_it_starts(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    status = Path(f"/proc/{sidecar.process.pid}/status")
    wait_for(lambda: _hears_sigterm(status), 10)
    assert sidecar.end() < ENDS_WITHIN_SECONDS


def _hears_sigterm(status: Path) -> bool:
    """Return whether the process has a handler for SIGTERM; before that, the kernel drops it for PID 1."""
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def test_a_kill_begins_a_new_start(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    first = start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 2)
    first.process.kill()
    first.process.wait()
    before = len(controller.reports)
    start(**reporting)
    controller.wait_for(lambda reports: len(reports) > before)
    old, new = controller.reports[before - 1], controller.reports[-1]
    assert old.start_id != new.start_id
    assert new.sequence == 1
    assert new.started_at > old.started_at


def test_the_process_is_not_called_python(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.get()
    assert Path(f"/proc/{sidecar.process.pid}/comm").read_text() == "gpumon-sidecar\n"
    arguments = Path(f"/proc/{sidecar.process.pid}/cmdline").read_bytes()
    assert not any(word in arguments for word in (b"monitor.py", b"raylet", b"ray::", b"default_worker.py"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root may unshare")
def test_as_pid_1_it_hears_sigterm(gpus: simgpu.StateFile, tmp_path: Path) -> None:
    """The kernel drops signals that PID 1 does not handle."""
    environ = {
        "FAKENVML_STATE": os.environ["FAKENVML_STATE"],
        "PATH": os.environ["PATH"],
        wiring.ENV_POD_NAMESPACE: "team",
        wiring.ENV_POD_NAME: "worker-0",
        wiring.ENV_POD_UID: "3f2a",
        wiring.ENV_GPUS_REQUESTED: "8",
        wiring.ENV_METRICS_PORT: "0",
    }
    with (tmp_path / "log").open("wb") as log:
        outer = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", PROGRAM], env=environ, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        end = time.monotonic() + 10
        while b"serving" not in (tmp_path / "log").read_bytes():
            assert time.monotonic() < end
            time.sleep(0.05)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        began = time.monotonic()
        os.kill(int(children[0]), signal.SIGTERM)
        assert outer.wait(5) == 0
        assert time.monotonic() - began < ENDS_WITHIN_SECONDS
    finally:
        outer.kill()
        outer.wait()
