# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.controller`: what the controller costs at 1,000 workloads and 10,000 pods.

A real etcd and API server of the bench's own hold the objects; nothing runs them. The controller is started twice: at
first it makes all GPUMonitors, then it comes back to them, as after a restart. Everything is gone afterwards.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.controller_load import Load, create
from tests.bench.controller_server import MissingProgramError, api_server, prepare, programs
from verl_gpumonitor_operator.kube.client import KubeClient

PROGRAMS = Path("/var/cache/gpumonitor-devcluster/bin")
BUDGET = "budget: 1 core, 1024 MiB, restart to full picture in 60 s, 20 status writes/s"


def said(text: str) -> None:
    """Print progress."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", flush=True)


async def fill(kubeconfig: Path, load: Load) -> None:
    """Create the load."""
    await prepare(kubeconfig)
    client = await KubeClient.connect(kubeconfig)
    try:
        await create(client, load, said)
    finally:
        await client.close()


def life(kubeconfig: Path, *, seconds: float, began: float) -> dict[str, dict[str, float]]:
    """Run one life of the controller; returns its figures by their event."""
    argv = [sys.executable, "-m", "tests.bench.controller_process", f"--kubeconfig={kubeconfig}"]
    process = subprocess.Popen([*argv, f"--seconds={seconds}", f"--began={began}"], stdout=subprocess.PIPE, text=True)
    figures = {}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            values = json.loads(line)
            event = values.pop("event")
            figures[event] = values
            said(f"{event}: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()))
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return figures


def table(name: str, figures: dict[str, dict[str, float]]) -> None:
    """Print the figures of one life."""
    print(f"\n{name}")
    for event, text in (
        ("lists", "lists of jobs and pods complete"),
        ("reported", "every pod has reported"),
        ("written", "every GPUMonitor shows all GPUs"),
    ):
        if event in figures:
            print(f"  {text:<34} {figures[event]['seconds']:8.1f} s   {figures[event]['rss_mib']:7.0f} MiB RSS")
    steady = figures.get("steady")
    if steady:
        for key, text in (
            ("cpu_cores", "CPU, cores"),
            ("rss_mib", "RSS, MiB"),
            ("reports_per_second", "reports/s"),
            ("status_writes_per_second", "status writes/s"),
            ("looks_per_second", "looks at workloads/s"),
            ("worst_lag_seconds", "worst lag of the loop, s"),
        ):
            print(f"  {'steady: ' + text:<34} {steady[key]:8.2f}")


def main() -> int:
    """Run the bench; 1 if the figures did not come in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=1000)
    parser.add_argument("--pods-per-workload", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the steady time")
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="folder with etcd and kube-apiserver")
    given = parser.parse_args()
    # So that etcd and the API server are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    load = Load(workloads=given.workloads, pods_per_workload=given.pods_per_workload)
    try:
        found = programs(given.programs)
    except MissingProgramError as error:
        print(error, file=sys.stderr)
        return 1
    with TemporaryDirectory(prefix="gpumonitor-bench-") as folder, api_server(found, Path(folder)) as kubeconfig:
        said(f"making {load.workloads} workloads and {load.pods} pods")
        asyncio.run(fill(kubeconfig, load))
        began = time.time() - 3600.0
        first = life(kubeconfig, seconds=given.seconds, began=began)
        second = life(kubeconfig, seconds=given.seconds, began=began)
    print(f"\n{load.workloads} workloads, {load.pods} pods, {load.pods * 8} GPUs; {BUDGET}")
    table("first start (makes all GPUMonitors)", first)
    table("restart", second)
    return 0 if "steady" in first and "steady" in second else 1


if __name__ == "__main__":
    sys.exit(main())
