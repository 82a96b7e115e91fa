# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.diagnosis`: what the stage-aware diagnosis costs the controller, by report and by workload.

Without an API server: reports of pods with eight GPUs and ten stages, whole steps each 200 s, decoded as they come from
the wire, and looks as the controller takes them. Each size has a process of its own, so that its memory is its own;
what the diagnosis takes of that is the difference to the same population that nobody follows. The last size is the
design's, 1,000 workloads of ten pods; there a step ends with each report, for memory alone: the histories are full.
"""

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from tests.bench.controller_load import STAGES, STEP_SECONDS, stage_counts, step_report
from verl_gpumonitor.model.report import (
    REPORT_FORMAT,
    GpuReport,
    PodRef,
    Report,
    StageNow,
    StageQuality,
)
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import Ownership, Source
from verl_gpumonitor_operator.controller.clinic import BUDGET_PIECES, Clinic
from verl_gpumonitor_operator.controller.jobs import JobKind, JobSeen
from verl_gpumonitor_operator.controller.ports import Owner, PodIdentity, PodRecord
from verl_gpumonitor_operator.controller.workloads import Workloads

GIB = 2**30
GPUS = 8
INTERVAL = 15.0
BEGAN = 1_000_000.0
REPORTS_PER_SECOND = 10_000 / INTERVAL
"""At the design's size."""
LOOKS_PER_SECOND = 1000 / INTERVAL
ANY_NAME, ANY_UID = "any-name", "any-uid"

Look = list[float]
"""Seconds of CPU of a look's parts."""


def report_of(name: str, uid: str, round_: int, step_seconds: float = STEP_SECONDS) -> Report:
    """Return the report of a pod in a round."""
    age = (round_ + 1) * INTERVAL
    number = int(age // step_seconds)
    ends_now = number > int((age - INTERVAL) // step_seconds)
    stage, role, _ = STAGES[round_ % len(STAGES)]
    gpus = [
        GpuReport(
            uuid=f"GPU-{uid}-{place}",
            index=place,
            utilization=0.6,
            memory_used_bytes=50 * GIB,
            memory_total_bytes=80 * GIB,
            memory_recent_peak_bytes=60 * GIB,
            power_watts=450.0,
            power_limit_watts=700.0,
            observed_seconds=age,
            busy_seconds=age * 0.6,
            energy_joules=age * 450.0,
            stages=stage_counts(age, 60 * GIB),
        )
        for place in range(GPUS)
    ]
    return Report(
        format=REPORT_FORMAT,
        pod=PodRef(namespace="bench", name=name, uid=uid),
        start_id="start-001",
        sequence=round_ + 1,
        sent_at=BEGAN + age,
        started_at=BEGAN,
        source=Source.NVML,
        ownership=Ownership.WHOLE_NODE,
        gpus_requested=GPUS,
        gpus=gpus,
        stage=StageNow(stage=stage, role=role),
        stage_quality=StageQuality(source=StageSource.RAY_STATE, resolution_seconds=1.0),
        steps=[step_report(number, BEGAN + age)] if ends_now else [],
    )


def reports(records: list[PodRecord], round_: int, step_seconds: float) -> Iterator[Report]:
    """Yield what all pods report in a round, each decoded by itself: no two share a name or a figure."""
    text = msgspec.json.encode(report_of(ANY_NAME, ANY_UID, round_, step_seconds))
    decoder = msgspec.json.Decoder(Report)
    for record in records:
        own = text.replace(ANY_NAME.encode(), record.name.encode()).replace(ANY_UID.encode(), record.uid.encode())
        yield decoder.decode(own)


class Timed:
    """A clinic whose work is timed, apart from all else that a report makes."""

    def __init__(self, clinic: Clinic) -> None:
        self.clinic = clinic
        self.seconds = 0.0
        self.reports = 0

    def report(self, workload: object, track: object, report: object, at: float) -> None:
        """Take a report. A `ReportObserver`."""
        begin = time.process_time()
        self.clinic.report(workload, track, report, at)  # type: ignore[arg-type]
        self.seconds += time.process_time() - begin
        self.reports += 1


def _world(workloads: int, pods: int, observer: Timed | None) -> tuple[Workloads, list[PodRecord]]:
    world = Workloads(observer)
    records = []
    for number in range(workloads):
        uid = f"uid-{number}"
        world.job_seen(
            JobSeen(
                kind=JobKind.RAY_CLUSTER,
                namespace="bench",
                name=f"job-{number}",
                uid=uid,
                created_at=BEGAN,
                gpus_requested=pods * GPUS,
            ),
            BEGAN,
        )
        owner = Owner(api_version="ray.io/v1", kind="RayCluster", name=f"job-{number}", uid=uid)
        for place in range(pods):
            name = f"job-{number}-{place}"
            record = PodRecord(
                namespace="bench",
                name=name,
                uid=f"pod-{number}-{place}",
                labels={"ray.io/group": "workers"},
                owner=owner,
                phase="Running",
                gpus_requested=GPUS,
                injected="1",
            )
            world.pod_seen(record)
            records.append(record)
    return world, records


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    workloads: int
    pods: int
    steps: int
    budget: int = BUDGET_PIECES
    full: bool = False
    """For memory alone: a step ends with each report, so that the histories are soon full; one look, at the end."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a size cost."""

    follows: dict[str, int]
    gpus: int
    """Followed."""
    steps: int
    """Remembered of each stage, at most."""
    grown_mib: float
    report_seconds: float
    look_seconds: float
    longest_look_seconds: float
    longest_part_seconds: float
    """For so long no other work of the controller has its turn."""


def measure(size: Size) -> Figures:
    """Let a population live. To be called in a process of its own."""
    # As the controller does.
    gc.set_threshold(50_000, 20, 100)
    timed = Timed(Clinic(interval_seconds=INTERVAL, budget_pieces=size.budget))
    world, records = _world(size.workloads, size.pods, timed)
    gc.collect()
    before, at = _rss_mib(), BEGAN
    looks: list[Look] = []
    step_seconds = INTERVAL if size.full else STEP_SECONDS
    for round_ in range(int(size.steps * step_seconds / INTERVAL) + 1):
        at = BEGAN + (round_ + 1) * INTERVAL
        for record, report in zip(records, reports(records, round_, step_seconds), strict=True):
            world.accept(PodIdentity(namespace="bench", name=record.name, uid=record.uid), report, at)
        looks += [] if size.full else _looks(timed.clinic, world, at)
    # Late enough for steps that wait for others' to be closed.
    looks += _looks(timed.clinic, world, at + 10 * INTERVAL) if size.full else []
    patients = [case.patient for case in timed.clinic._cases.values()]
    return Figures(
        follows=Counter(patient.follows.value for patient in patients),
        gpus=sum(patient.gpus for patient in patients),
        steps=max(patient.depth for patient in patients),
        grown_mib=_rss_mib() - before,
        report_seconds=timed.seconds / timed.reports,
        look_seconds=sum(sum(look) for look in looks) / len(looks),
        longest_look_seconds=max(sum(look) for look in looks),
        longest_part_seconds=max(max(look) for look in looks),
    )


def _looks(clinic: Clinic, world: Workloads, at: float) -> list[Look]:
    """Look at all workloads."""
    looks = []
    for workload in world.all():
        begin, look = time.process_time(), []
        for _ in clinic.judging(workload, command=None, thresholds=None, phase="Running", now=at):
            now = time.process_time()
            look.append(now - begin)
            begin = now
        clinic.opinion(workload.job.uid)
        looks.append([*look, time.process_time() - begin])
    return looks


def _apart(size: Size) -> Figures:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as processes:
        return processes.submit(measure, size).result()


def tell(size: Size) -> None:
    """Measure a size with the diagnosis and without, and print the figures."""
    with_it, without = _apart(size), _apart(msgspec.structs.replace(size, budget=0))
    gpus, taken = size.workloads * size.pods * GPUS, with_it.grown_mib - without.grown_mib
    print(f"\n{size.workloads} workloads, {size.workloads * size.pods} pods, {gpus} GPUs, {size.steps} steps")
    print(f"  followed                        {dict(with_it.follows)}, {with_it.gpus} GPUs by {with_it.steps} steps")
    print(f"  memory of the process, MiB      {with_it.grown_mib:8.1f}, without diagnosis {without.grown_mib:.1f}")
    if with_it.gpus:
        each = 1024 * taken / with_it.gpus
        print(f"  diagnosis, KiB a followed GPU   {each:8.2f}, of 80,000 GPUs {80_000 * each / 1024:.0f} MiB")
    if not size.full:
        cores = REPORTS_PER_SECOND * with_it.report_seconds, LOOKS_PER_SECOND * with_it.look_seconds
        longest, part = 1e3 * with_it.longest_look_seconds, 1e3 * with_it.longest_part_seconds
        print(f"  diagnosis, us a report          {1e6 * with_it.report_seconds:8.0f}")
        print(f"  diagnosis, us a look            {1e6 * with_it.look_seconds:8.0f}")
        print(f"  the longest, ms                 {longest:8.0f}, in parts of up to {part:.0f}")
        if size.pods * GPUS == 80:
            print(f"  share of one core, 667 reports/s{sum(cores):8.3f}: reports {cores[0]:.3f}, looks {cores[1]:.3f}")
    sys.stdout.flush()


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget", type=int, default=BUDGET_PIECES)
    parser.add_argument("--quick", action="store_true", help="ten workloads, and one of 1,024 GPUs, alone")
    given = parser.parse_args()
    tell(Size(workloads=10, pods=10, steps=given.steps, budget=given.budget))
    tell(Size(workloads=1, pods=128, steps=given.steps, budget=given.budget))
    if not given.quick:
        tell(Size(workloads=100, pods=10, steps=given.steps, budget=given.budget))
        tell(Size(workloads=1000, pods=10, steps=given.steps, budget=given.budget, full=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
