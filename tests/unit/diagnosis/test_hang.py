# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, where nobody tells stages."""

import pytest

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, JobLine, TraceGpu, TracePod, Workload

WORKED, UNTIL = 800, 2600


def _diagnosis(kind: str) -> Diagnosis:
    pods = [
        TracePod(
            name=name,
            group=group,
            gpus_requested=4,
            gpus=[
                TraceGpu(uuid=f"{name}-{n}", index=n, memory_total_bytes=80 * 2**30, power_limit_watts=700)
                for n in range(4)
            ],
        )
        for name, group in (("m", "Master"), ("w", "Worker"))
    ]
    return Diagnosis(Header(format=TRACE_FORMAT, workload=Workload(kind=kind), pods=pods))


@pytest.mark.parametrize("still", [None, "w-2"])
def test_all_pods_of_a_trainer_hang_together_and_one_rank_is_the_cause(still: str | None) -> None:
    diagnosis = _diagnosis("PyTorchJob")
    diagnosis.feed(JobLine(t=0, phase="Running"))
    for t in range(2, UNTIL, 4):
        for pod in "mw":
            for n in range(4):
                uuid = f"{pod}-{n}"
                watts, load = (600, 0.97) if t < WORKED else (90, 0.0) if uuid == still else (150, 1.0)
                line = GpuLine(
                    t=t, pod=pod, uuid=uuid, utilization=load, power_watts=watts, memory_used_bytes=60 * 2**30
                )
                diagnosis.feed(line)
    found = [tracked.finding for tracked in diagnosis.findings]
    assert [f.reason for f in found] == ["Hang"]
    everybody = {f"{pod}-{n}" for pod in "mw" for n in range(4)}
    assert set(found[0].scope.gpus) == ({still} if still else everybody)
