# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`GET /trace` of the real sidecar: what it saw of simulated GPUs, as a trace that the commands read."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import simgpu
from click.testing import CliRunner

from tests.contract.sidecar.conftest import Start, wait_for
from tests.contract.sidecar.test_marks import PROGRAM, free_port
from tests.contract.sidecar.test_metrics import all_up
from tests.unit.plugin import shape
from verl_gpumonitor.cli.main import main
from verl_gpumonitor.cli.traces import open_trace
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.trace import GpuLine, MarkLine
from verl_gpumonitor.stages.sources.mark_sender import ENV_MARKS_PORT
from verl_gpumonitor_sidecar import settings

MIB = 2**20
SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


def diagnosed(path: Path) -> list[dict[str, Any]]:
    """What `gpumon diagnose --json` finds."""
    done = CliRunner().invoke(main, ["diagnose", str(path), "--json"])
    assert done.exit_code == 0, done.output
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return findings


@pytest.mark.slow
def test_a_gpu_that_is_full_in_the_update_is_found_in_the_record(
    gpus: simgpu.StateFile, start: Start, tmp_path: Path
) -> None:
    """The program tells its stages through verl's timers; one GPU is nearly full, the others at half."""
    shape.write(tmp_path)
    marks = free_port(socket.SOCK_DGRAM)
    port = free_port(socket.SOCK_STREAM)
    sidecar = start(HF_TOKEN=SECRET, **{settings.ENV_MARKS_PORT: marks, wiring.ENV_METRICS_PORT: port})
    sidecar.wait(all_up)
    program = PROGRAM.replace("(41, 42)", "(41, 42, 43)").replace("1.0", "2.5")
    environ = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WG_PREFIX")},
        "PYTHONPATH": str(tmp_path),
        "VERL_USE_EXTERNAL_MODULES": "verl_gpumonitor.plugin",
        ENV_MARKS_PORT: marks,
    }
    with ExitStack() as held:
        for index in range(8):
            gpu = held.enter_context(simgpu.Gpu(index))
            gpu.allocate((81_000 if index == 0 else 38_000) * MIB)
        subprocess.run([sys.executable, "-c", program], env=environ, check=True)
        text = sidecar.get(wiring.TRACE_PATH, seconds=20.0)
    assert SECRET not in text
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with open_trace(str(path)) as trace:
        lines = list(trace.records())
        assert not trace.problems
    (pod,) = trace.header.pods or []
    assert (pod.name, pod.node, pod.gpus_requested, len(pod.gpus or ())) == ("worker-0", "node-a", 8, 8)
    assert {line.uuid for line in lines if isinstance(line, GpuLine)} == {simgpu.uuid_of(index) for index in range(8)}
    told = [(line.stage, line.step) for line in lines if isinstance(line, MarkLine) and line.state == "begin"]
    assert told[:4] == [("gen", 41), ("update_actor", 41), ("gen", 42), ("update_actor", 42)]
    scopes = [finding["scope"] for finding in diagnosed(path) if finding["reason"] == "OOMRisk"]
    # It was full before the program told its first stage, too.
    assert {*(scope["stage"] for scope in scopes)} - {"unknown"} == {"update_actor"}
    assert {*(tuple(scope["gpus"]) for scope in scopes)} == {(simgpu.uuid_of(0),)}


def test_a_reader_that_stalls_costs_neither_metrics_nor_samples(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(all_up)
    with socket.create_connection(("127.0.0.1", sidecar.port)) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(b"GET /trace HTTP/1.1\r\nHost: x\r\n\r\n")
        before = sidecar.value("gpumonitor_collections_total") or 0.0
        wait_for(lambda: (sidecar.value("gpumonitor_collections_total") or 0.0) >= before + 8, 6.0)
    assert json.loads(sidecar.get("/trace").splitlines()[-1])["type"] == "end"


def test_a_pod_without_gpus_has_a_record_too(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start(**{wiring.ENV_GPUS_REQUESTED: "0", wiring.ENV_RAY_NODE_TYPE: "head"})
    first, *_, last = sidecar.get("/trace").splitlines()
    assert json.loads(first)["pods"][0]["node_role"] == "head"
    assert json.loads(last)["lines"] == 0
