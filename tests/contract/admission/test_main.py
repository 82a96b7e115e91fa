# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The process itself: its exit codes, its logs, and its end on SIGTERM."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec

from tests.unit.admission import samples

from . import fake_api


async def started(*arguments: str) -> Process:
    command = (sys.executable, "-m", "verl_gpumonitor_operator.admission.main", *arguments)
    return await asyncio.create_subprocess_exec(*command, stderr=PIPE, env={"PATH": ""})


async def test_settings_that_cannot_be_used_end_the_process_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"relaese": "x"}')
    process = await started("--settings", str(file), "--api-server", "http://127.0.0.1:9")
    _, stderr = await process.communicate()
    assert process.returncode == 2
    line = json.loads(stderr.splitlines()[-1])
    assert line["severity"] == "error"
    assert "relaese" in line["error"]


async def test_outside_of_a_cluster_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(msgspec.json.encode(samples.SETTINGS))
    process = await started("--settings", str(file))
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert "KUBERNETES_SERVICE_HOST" in json.loads(stderr.splitlines()[-1])["error"]


async def test_it_ends_on_sigterm(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(msgspec.json.encode(samples.SETTINGS))
    async with fake_api.running() as fake:
        ports = ("--host", "127.0.0.1", "--port", "0", "--health-port", "0")
        process = await started("--settings", str(file), "--api-server", fake.url, *ports)
        assert process.stderr is not None
        lines = [json.loads(await process.stderr.readline())]
        while lines[-1]["message"] != "serving":
            lines.append(json.loads(await process.stderr.readline()))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            _, rest = await process.communicate()
        assert process.returncode == 0
        assert [json.loads(line)["message"] for line in rest.splitlines()] == ["draining"]
