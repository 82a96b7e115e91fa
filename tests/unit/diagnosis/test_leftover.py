# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Memory that is held before the job's first process, however seldom somebody looks."""

import pytest

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, TaskLine, TraceGpu, TracePod

BEGIN = 24.0
GIB = 2**30


@pytest.mark.parametrize("interval", [1.0, 2.0, 5.0, 10.0])
@pytest.mark.parametrize(
    ("held", "found"),
    [
        pytest.param(lambda _: 20.0, True, id="held all the time"),
        pytest.param(lambda t: 2.0 * t, False, id="something loads"),
        pytest.param(lambda _: 0.0, False, id="free"),
    ],
)
def test_what_lies_on_a_gpu_before_the_job(interval: float, held: object, found: bool) -> None:
    assert callable(held)
    gpus = [TraceGpu(uuid=f"GPU-{n}", index=n, memory_total_bytes=80 * GIB) for n in range(2)]
    diagnosis = Diagnosis(Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=2, gpus=gpus)]))
    times = [1.0 + number * interval for number in range(int(60 / interval))]
    for t in times:
        if t >= BEGIN > t - interval:
            task = "WorkerDict.actor_rollout_init_model"
            diagnosis.feed(TaskLine(t=BEGIN, pod="w", pid=1, local_rank=0, name=task, state="begin"))
        for n in range(2):
            size = held(t) if n == 0 else 0.0
            diagnosis.feed(GpuLine(t=t, pod="w", uuid=f"GPU-{n}", utilization=0.0, memory_used_bytes=int(size * GIB)))
    assert [f.finding.scope.gpus for f in diagnosis.findings] == ([("GPU-0",)] if found else [])


@pytest.mark.parametrize(
    ("held", "works_from", "found"),
    [
        pytest.param((6, 0, 0, 0), (24, 24, 24, 24), ["GPU-0"], id="one GPU of four was not free"),
        pytest.param((6, 0, 0, 0), (24, 30, 36, 42), ["GPU-0"], id="and its siblings begin later than it"),
        pytest.param((6, 6, 6, 6), (24, 24, 24, 24), [], id="all hold the same, and nobody saw a begin"),
        pytest.param((6, 6, 6, 6), (4, 24, 24, 24), [], id="and one of them computes already"),
        pytest.param(
            (6, 6, 6, 0), (0, 24, 24, 24), ["GPU-1", "GPU-2"], id="what computes from the first moment is none"
        ),
    ],
)
def test_where_nobody_tells_of_a_process_the_job_begins_when_a_gpu_does(
    held: tuple[int, ...], works_from: tuple[int, ...], found: list[str]
) -> None:
    gpus = [TraceGpu(uuid=f"GPU-{n}", index=n, memory_total_bytes=24 * GIB) for n in range(4)]
    diagnosis = Diagnosis(Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=4, gpus=gpus)]))
    for t in range(90):
        for n in range(4):
            works = t >= works_from[n]
            used = (held[n] + (8 if works and works_from[n] else 0)) * GIB
            line = GpuLine(
                t=t + 0.1 * n, pod="w", uuid=f"GPU-{n}", utilization=0.9 if works else 0.0, memory_used_bytes=used
            )
            diagnosis.feed(line)
    leftovers = [f for f in diagnosis.findings if f.finding.reason == "LeftoverMemory"]
    assert [gpu for f in leftovers for gpu in f.finding.scope.gpus] == found
    assert [f.resolved for f in leftovers if f.resolved is not None] == []
