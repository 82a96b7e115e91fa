# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.diagnosis`: what the stage-aware diagnosis costs the controller, by report and by workload.

In one process and without an API server: reports of pods with eight GPUs and ten stages, whole steps each 200 s, and
looks as the controller takes them. 1,000 workloads of ten pods are the design's size; their steps do not fit the room
for all, so that some are followed whole, some by two GPUs of each pod, and the rest not at all.
"""

import argparse
import gc
import sys
import time
from collections import Counter
from pathlib import Path

from tests.bench.controller_load import STAGES, STEP_SECONDS, stage_counts
from verl_gpumonitor.model.report import (
    REPORT_FORMAT,
    GpuReport,
    PodRef,
    Report,
    StageNow,
    StageQuality,
    StepGpu,
    StepReport,
    StepStage,
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


def _step(number: int, end: float) -> StepReport:
    stages = [
        StepStage(
            stage=stage,
            role=role,
            begin=end - STEP_SECONDS,
            seconds=share * STEP_SECONDS,
            gpus=[
                StepGpu(
                    place, share * STEP_SECONDS, share * STEP_SECONDS * 0.6, 9000.0, (60 + place % 3) * GIB, 20 * GIB
                )
                for place in range(GPUS)
            ],
        )
        for stage, role, share in STAGES
    ]
    return StepReport(number=number, step=number, begin=end - STEP_SECONDS, end=end, stages=stages)


def report_of(pod: PodRecord, round_: int) -> Report:
    """Return the report of a pod in a round."""
    age = (round_ + 1) * INTERVAL
    number = int(age // STEP_SECONDS)
    ends_now = number > int((age - INTERVAL) // STEP_SECONDS)
    stage, role, _ = STAGES[round_ % len(STAGES)]
    gpus = [
        GpuReport(
            uuid=f"GPU-{pod.uid}-{place}",
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
        pod=PodRef(namespace="bench", name=pod.name, uid=pod.uid),
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
        steps=[_step(number, BEGAN + age)] if ends_now else [],
    )


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


def measure(workloads: int, pods: int, steps: int, budget: int) -> None:
    """Print the figures of one size."""
    timed = Timed(Clinic(interval_seconds=INTERVAL, budget_pieces=budget))
    world, records = _world(workloads, pods, timed)
    gc.collect()
    before, looked, looks = _rss_mib(), 0.0, 0
    for round_ in range(int(steps * STEP_SECONDS / INTERVAL) + 1):
        at = BEGAN + (round_ + 1) * INTERVAL
        for record in records:
            identity = PodIdentity(namespace="bench", name=record.name, uid=record.uid)
            world.accept(identity, report_of(record, round_), at)
        begin = time.process_time()
        for workload in world.all():
            timed.clinic.look(workload, command=None, thresholds=None, phase="Running", now=at)
            looks += 1
        looked += time.process_time() - begin
    gc.collect()
    grown = _rss_mib() - before
    follows = Counter(case.patient.follows.value for case in timed.clinic._cases.values())
    gpus = sum(case.patient.gpus for case in timed.clinic._cases.values())
    per_second = workloads * pods / INTERVAL
    cores = per_second * timed.seconds / timed.reports + workloads / INTERVAL * looked / looks
    print(
        f"\n{workloads} workloads, {len(records)} pods, {len(records) * GPUS} GPUs, {steps} steps; room {budget} pieces"
    )
    print(f"  followed                       {dict(follows)}, {gpus} GPUs, {timed.clinic.pieces} pieces")
    print(f"  diagnosis, us a report         {1e6 * timed.seconds / timed.reports:8.0f}")
    print(f"  diagnosis, us a look           {1e6 * looked / looks:8.0f}")
    print(f"  diagnosis, cores at this size  {cores:8.3f}")
    print(f"  memory, MiB in all (with all that the controller keeps of pods)  {grown:8.1f}")
    print(f"  memory, KiB a workload         {1024 * grown / workloads:8.1f}")


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--budget", type=int, default=BUDGET_PIECES)
    parser.add_argument("--quick", action="store_true", help="ten workloads, and one of 1,024 GPUs, alone")
    given = parser.parse_args()
    measure(10, 10, given.steps, 0)
    measure(10, 10, given.steps, given.budget)
    measure(1, 128, given.steps, given.budget)
    if not given.quick:
        measure(1000, 10, given.steps, given.budget)
    return 0


if __name__ == "__main__":
    sys.exit(main())
