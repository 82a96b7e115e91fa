# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon serve` on simulated GPUs: the sidecar's series for a whole host, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simgpu
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.cli.conftest import FAKE, Host
from tests.contract.cli.neighbours import UPDATE, go_on, line_of, mark, only_if_told_apart, run_a_job, strangers
from tests.contract.sidecar.ray import Ray
from verl_gpumonitor import ResourceMonitor
from verl_gpumonitor.stages.sources.mark_sender import ENV_MARKS_PORT

Samples = dict[str, list[tuple[dict[str, str], float]]]
ENDS_WITHIN_SECONDS = 2.0
"""It ends within a second by itself; the tests' machine is shared by several of them at once."""
SETTLED_SECONDS = 7.0
"""What is decided is counted each 5 s."""
ALONE = ("--no-ray", "--marks-port", "0")


class Exporter:
    """One run of `gpumon serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        found = re.search(r":(\d+)/metrics", process.stderr.readline())
        assert found is not None
        self.url = f"http://127.0.0.1:{found[1]}"

    def get(self, path: str = "/metrics") -> str:
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    def samples(self) -> Samples:
        found: Samples = {}
        for family in text_string_to_metric_families(self.get()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def wait(self, holds: Callable[[Samples], Any], seconds: float = 15.0) -> Samples:
        end = time.monotonic() + seconds
        while not holds(found := self.samples()):
            assert time.monotonic() < end, found.keys()
            time.sleep(0.1)
        return found

    def end(self, number: int) -> float:
        """Seconds until it has exited with 0."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(5) == 0
        return time.monotonic() - began


Serve = Callable[..., Exporter]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start exporters on a host; they are killed at the end."""
    running: list[subprocess.Popen[str]] = []

    def start(host: Host, *arguments: str) -> Exporter:
        process = host.popen("serve", "--port", "0", "--interval", "0.2", *arguments)
        running.append(process)
        return Exporter(process)

    yield start
    for process in running:
        process.kill()
        process.communicate()


def gpus_up(found: Samples) -> int:
    return int(sum(value for _, value in found.get("gpumonitor_gpu_up", [])))


def test_all_gpus_are_the_hosts_own(host: Host, serve: Serve) -> None:
    exporter = serve(host, *ALONE, "--name", "box")
    found = exporter.wait(lambda found: gpus_up(found) == 4 and "gpumonitor_gpu_busy_seconds_total" in found)
    assert {labels["uuid"] for labels, _ in found["gpumonitor_gpu_power_watts"]} == {
        simgpu.uuid_of(index) for index in range(4)
    }
    assert found["gpumonitor_ownership_info"][0][0]["ownership"] == "whole-node"
    assert found["gpumonitor_gpus_requested"] == [({"namespace": "host", "pod": "box"}, 4.0)]
    assert found["gpumonitor_gpu_info"][0][0]["node"] == "box"
    assert found["gpumonitor_telemetry_available"][0][1] == 1
    assert exporter.get("/healthz") == "ok\n"


def test_memory_is_the_hosts(host: Host, serve: Serve) -> None:
    found = serve(host, *ALONE).wait(lambda found: "gpumonitor_host_memory_used_bytes" in found)
    used, limit = (found[f"gpumonitor_host_memory_{word}_bytes"][0][1] for word in ("used", "limit"))
    assert 2**20 < used < limit
    assert found["gpumonitor_host_shm_size_bytes"][0][1] > 0


def stages(found: Samples) -> set[str]:
    """Stages that run, by the metrics."""
    return {labels["stage"] for labels, _ in found.get("gpumonitor_stage_info", [])}


def source(found: Samples) -> str:
    return found["gpumonitor_stage_source_info"][0][0]["source"]


@pytest.fixture
def marks_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, to which programs that the test starts send their marks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    monkeypatch.setenv(ENV_MARKS_PORT, str(port))
    return port


def test_marks_of_a_program_become_stages(host: Host, serve: Serve, marks_port: int) -> None:
    """Also of a stage that began before the program was on a GPU."""
    exporter = serve(host, "--no-ray", "--marks-port", str(marks_port))
    exporter.wait(lambda found: gpus_up(found) == 4)
    with ResourceMonitor(interval=60) as monitor, monitor.stage("gen", role="rollout", step=1):
        time.sleep(1.0)
        assert "gen" not in stages(exporter.samples())
        with simgpu.Gpu(0, state=host.file.path) as gpu:
            gpu.hold()
            found = exporter.wait(lambda found: "gen" in stages(found))
    assert source(found) == "marks"


@pytest.fixture
def host_with_a_job(host: Host, holder: subprocess.Popen[str], ray: Ray, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host on whose GPU the holder is, while Ray's dashboard tells of a job."""
    only_if_told_apart()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.url)
    run_a_job(ray)
    line_of(holder)
    return Host(library=FAKE / "build", file=host.file)


@pytest.mark.parametrize("holder", ["VLLM::EngineCore"], indirect=True)
def test_another_job_of_the_host_is_not_counted(host_with_a_job: Host, serve: Serve, ray: Ray, marks_port: int) -> None:
    """A driver, workers, marks and a dashboard of somebody who holds no GPU here."""
    with strangers():
        exporter = serve(host_with_a_job, "--marks-port", str(marks_port))
        exporter.wait(lambda found: gpus_up(found) == 4)
        mark()
        for _ in range(2):
            ray.wait_until_asked("/api/v0/tasks")
        end = time.monotonic() + SETTLED_SECONDS
        while time.monotonic() < end:
            assert stages(exporter.samples()) <= {"other", "unknown"}
            time.sleep(0.2)
        counted = exporter.samples().get("gpumonitor_stage_seconds_total", [])
    assert {labels["stage"] for labels, _ in counted} <= {"other", "unknown"}


@pytest.mark.parametrize("holder", [f"ray::{UPDATE}"], indirect=True)
def test_of_several_jobs_the_one_on_the_gpus_is_counted(
    host_with_a_job: Host, serve: Serve, holder: subprocess.Popen[str]
) -> None:
    """Until it ends, and whatever a dashboard says after that."""
    with strangers():
        exporter = serve(host_with_a_job, "--marks-port", "0")
        exporter.wait(lambda found: stages(found) == {"update_actor"})
        go_on(holder)
        exporter.wait(lambda found: not stages(found) - {"other", "unknown"}, seconds=30.0)


def test_a_lost_gpu_is_shown_as_lost(host: Host, serve: Serve) -> None:
    exporter = serve(host, *ALONE)
    exporter.wait(lambda found: gpus_up(found) == 4)
    simgpu.lose(2, file=host.file)
    found = exporter.wait(lambda found: gpus_up(found) == 3)
    assert [labels["gpu"] for labels, value in found["gpumonitor_gpu_up"] if value == 0] == ["2"]


def test_without_a_driver_it_serves_that(bare_host: Host, serve: Serve) -> None:
    exporter = serve(bare_host, *ALONE)
    found = exporter.wait(lambda found: "gpumonitor_telemetry_available" in found)
    assert [(labels["reason"], value) for labels, value in found["gpumonitor_telemetry_available"]] == [
        ("NoLibrary", 0.0)
    ]
    assert "gpumonitor_gpu_up" not in found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_at_once(host: Host, serve: Serve, number: int) -> None:
    exporter = serve(host, *ALONE)
    exporter.wait(lambda found: gpus_up(found) == 4)
    assert exporter.end(number) < ENDS_WITHIN_SECONDS


def test_it_listens_where_it_is_told(host: Host, serve: Serve) -> None:
    exporter = serve(host, *ALONE, "--address", "127.0.0.1")
    exporter.samples()
    port = int(exporter.url.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", port))


def test_a_taken_port_is_said(host: Host) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = host.run("serve", "--address", "127.0.0.1", "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken" in done.stderr
    assert "--port" in done.stderr


def test_an_address_that_is_not_this_hosts_is_said(host: Host) -> None:
    done = host.run("serve", "--address", "192.0.2.7")
    assert done.returncode == 1
    assert "cannot listen on port 9410 of 192.0.2.7" in done.stderr


def test_the_sidecars_image_can_run_it_without_click(host: Host) -> None:
    program = "import sys; sys.modules['click'] = None; from verl_gpumonitor_sidecar import host; host.main()"
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        environ = {**os.environ, "GPUMON_METRICS_PORT": port}
        done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr
