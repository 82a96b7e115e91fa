# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From verl's own timers to the sidecar's counters: a program of verl's shape, with our plugin, beside a sidecar."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.sidecar.conftest import Samples, Start, wait_for
from tests.unit.plugin import shape
from verl_gpumonitor.model import wiring
from verl_gpumonitor.stages.sources.mark_sender import ENV_MARKS_PORT
from verl_gpumonitor_sidecar import settings

PROGRAM = """
import time
from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking

logger = Tracking("p", "e", config={"actor_rollout_ref": {"hybrid_engine": True}})
logger.log({}, step=40)
for step in (41, 42):
    with marked_timer("step", {}):
        for stage, seconds in (("gen", 2.0), ("update_actor", 1.0)):
            with marked_timer(stage, {}):
                time.sleep(seconds)
    logger.log({}, step=step)
"""


def free_port(kind: socket.SocketKind) -> str:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def seconds(samples: Samples, stage: str) -> float:
    return sum(value for labels, value in samples.get("gpumonitor_stage_seconds_total", []) if labels["stage"] == stage)


@pytest.mark.usefixtures("gpus")
@pytest.mark.slow
def test_verls_timers_become_seconds_by_stage(start: Start, tmp_path: Path) -> None:
    shape.write(tmp_path)
    marks = free_port(socket.SOCK_DGRAM)
    sidecar = start(**{settings.ENV_MARKS_PORT: marks, wiring.ENV_METRICS_PORT: free_port(socket.SOCK_STREAM)})
    sidecar.wait(lambda samples: samples.get("gpumonitor_gpu_observed_seconds_total"))
    environ = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WG_PREFIX")},
        "PYTHONPATH": str(tmp_path),
        "VERL_USE_EXTERNAL_MODULES": "verl_gpumonitor.plugin",
        ENV_MARKS_PORT: marks,
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environ, check=True)
    wait_for(lambda: seconds(sidecar.samples(), "update_actor") > 1.9, 10.0)
    samples = sidecar.samples()
    assert seconds(samples, "gen") == pytest.approx(4.0, abs=0.3)
    assert seconds(samples, "update_actor") == pytest.approx(2.0, abs=0.3)
