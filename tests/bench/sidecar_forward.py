# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's own parts, driven through virtual time as fast as the machine allows. Started by `tests.bench.sidecar`.

A process of its own, whose imports are the sidecar's: the real reader, sampler, join, timeline, page and report. A
collection is a full pass over all GPUs, their processes included, a turn of the loop, and what the recorder keeps of
it; each fifteenth is scraped and reported, and its answer brings the head's word on stages, each of which lasts 5 s.
After each thousandth somebody reads the record.
Prints a JSON line a hundred times.
"""

import os
import sys
from collections.abc import Iterator

import msgspec

from verl_gpumonitor.model.report import PodRef, PodStages, RayStage, ReportAnswer, encode
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings, _Run
from verl_gpumonitor_sidecar import program as _program  # noqa: F401 - its imports are part of the memory
from verl_gpumonitor_sidecar.exporter import Page
from verl_gpumonitor_sidecar.exports import Exports, Identity
from verl_gpumonitor_sidecar.flight_record import FlightRecord, Place
from verl_gpumonitor_sidecar.join import Terms
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.loop import Loop
from verl_gpumonitor_sidecar.recorder import Recorder
from verl_gpumonitor_sidecar.reports import Sender, Turn, build
from verl_gpumonitor_sidecar.staging import Context

GPUS = 8
STEPS = 100
"""How often memory is told."""
UNIX = 1e9
STAGE_SECONDS = 5.0
STAGES = (
    ("gen", "rollout"),
    ("old_log_prob", "actor"),
    ("ref", "ref"),
    ("update_actor", "actor"),
    ("update_weights", "actor"),
)
EACH = 15
"""A scrape and a report come after so many collections."""
READ = 1000
"""And a reader of the record after so many."""


def head_word(now: float) -> PodStages:
    """Return what a head says that was heard 5 s ago."""
    until = now - 5.0
    intervals = []
    for number in range(int((until - 90) / STAGE_SECONDS), int(until / STAGE_SECONDS) + 1):
        stage, role = STAGES[number % len(STAGES)]
        begin = number * STAGE_SECONDS
        end = begin + STAGE_SECONDS
        intervals += [RayStage(stage, role, begin, end if end <= until else None, rank) for rank in range(GPUS)]
    return PodStages(source=StageSource.RAY_STATE, known_from=until - 90, known_until=until, intervals=intervals)


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
        context=Context(ray_node_type="worker", started_unix=UNIX + now[0]),
        shared_processes=True,
        journal=Journal(lambda _: None),
        clock=lambda: now[0],
        unix_clock=lambda: UNIX + now[0],
    )
    recorder = Recorder(gpus_requested=GPUS)
    record = FlightRecord(recorder, Place(pod="worker-0"), clock=lambda: now[0], unix_clock=lambda: UNIX + now[0])
    page = Page(
        lambda: Exports(identity=Identity(namespace="team", pod="worker-0"), state=loop.state), clock=lambda: now[0]
    )
    sender = Sender(
        pod=PodRef(namespace="team", name="worker-0", uid="u"), start_id="1" * 32, started_unix=1e9, version="bench"
    )
    for number in range(1, collections + 1):
        sampler._pass(run, full=True)
        loop.turn()
        recorder.look(loop.state, now=now[0], now_unix=UNIX + now[0])
        if number % READ == 0:
            sum(len(piece) for piece in record.pieces())
        if number % EACH == 0:
            page.text()
            encode(build(sender, loop.state, Turn(sequence=number, now=now[0], now_unix=UNIX + now[0])))
            loop.take_steps(max((step.number for step in loop.state.stages.steps), default=0))
            loop.take_answer(ReportAnswer(accepted=number, stages=head_word(UNIX + now[0])))
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
