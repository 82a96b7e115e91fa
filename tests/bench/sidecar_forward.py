# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's own parts, driven through virtual time as fast as the machine allows. Started by `tests.bench.sidecar`.

A process of its own, whose imports are the sidecar's: the real reader, sampler, join, page and report. A collection
is a full pass over all GPUs, their processes included, and a turn of the loop; each fifteenth is scraped and reported.
Prints a JSON line a hundred times.
"""

import os
import sys
from collections.abc import Iterator

import msgspec

from verl_gpumonitor.model.report import PodRef, encode
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings, _Run
from verl_gpumonitor_sidecar import program as _program  # noqa: F401 - its imports are part of the memory
from verl_gpumonitor_sidecar.exporter import Exports, Identity, Page
from verl_gpumonitor_sidecar.join import Terms
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.loop import Loop
from verl_gpumonitor_sidecar.reports import Sender, Turn, build

GPUS = 8
STEPS = 100
"""How often memory is told."""
EACH = 15
"""A scrape and a report come after so many collections."""


def drive(collections: int) -> Iterator[dict[str, float]]:
    """Yield collections, memory and number of series, a hundred times in all."""
    now = [1000.0]
    sampler = Sampler(settings=SamplerSettings(processes_interval_seconds=1.0), clock=lambda: now[0])
    # The sampler's pass is its thread's own business; here this thread takes its place.
    run = sampler._run = _Run(lambda: now[0])
    loop = Loop(
        Terms(gpus_requested=GPUS),
        node=sampler,
        ray=None,
        shared_processes=True,
        journal=Journal(lambda _: None),
        clock=lambda: now[0],
        unix_clock=lambda: 1e9 + now[0],
    )
    page = Page(
        lambda: Exports(identity=Identity(namespace="team", pod="worker-0"), state=loop.state), clock=lambda: now[0]
    )
    sender = Sender(
        pod=PodRef(namespace="team", name="worker-0", uid="u"), start_id="1" * 32, started_unix=1e9, version="bench"
    )
    for number in range(1, collections + 1):
        sampler._pass(run, full=True)
        loop.turn()
        if number % EACH == 0:
            page.text()
            encode(build(sender, loop.state, Turn(sequence=number, now=now[0], now_unix=1e9 + now[0])))
        if number % max(1, collections // STEPS) == 0:
            lines = page.text().splitlines()
            series = sum(not line.startswith(b"#") for line in lines)
            yield {"collections": number, "rss_mib": _rss_mib(), "series": series}
        now[0] += 1.0


def _rss_mib() -> float:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib would be in the memory that is measured
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


if __name__ == "__main__":
    for told in drive(int(sys.argv[1])):
        os.write(1, msgspec.json.encode(told) + b"\n")
