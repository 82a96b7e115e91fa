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
