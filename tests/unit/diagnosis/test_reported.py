# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A workload that is known by its reports: steps come whole, as pieces, and what is judged by them."""

import pytest

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.reported import ReportedHistory, StepPieces, piece_of
from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, JobLine, TraceGpu, TracePod, Workload

GPUS = ("GPU-0", "GPU-1")
VLLM = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"
    " actor_rollout_ref.rollout.gpu_memory_utilization=0.7"
)
STEP_SECONDS = 120.0


def diagnosis_of(entrypoint: str) -> Diagnosis:
    header = Header(format=TRACE_FORMAT, workload=Workload(kind="RayJob", name="grpo"), entrypoint=entrypoint, pods=[])
    history = ReportedHistory(header)
    gpus = [TraceGpu(uuid=uuid, index=place, memory_total_bytes=80 * GIB) for place, uuid in enumerate(GPUS)]
    history.add_pod(TracePod(name="w-0", node_role="worker", group="workers", gpus_requested=2, gpus=gpus))
    return Diagnosis(header, history=history)


def step_of(*, awake_gib: float, asleep_gib: float) -> StepPieces:
    """A rollout, a pause in which the engine sleeps, and an update."""
    figures = (
        ("gen", "rollout", 60.0, awake_gib),
        ("other", "unknown", 5.0, asleep_gib),
        ("update_actor", "actor", 50.0, 45.0),
    )
    return [
        (
            uuid,
            piece_of(
                stage=stage,
                role=role,
                seconds=seconds,
                observed_seconds=seconds,
                busy_seconds=0.8 * seconds,
                energy_joules=300.0 * seconds,
                peak_bytes=int(gib * GIB),
                floor_bytes=int(gib * GIB),
            ),
        )
        for uuid in GPUS
        for stage, role, seconds, gib in figures
    ]


@pytest.mark.parametrize(
    ("entrypoint", "asleep_gib", "found"),
    [
        (VLLM, 38.0, True),
        (VLLM, 9.0, False),
        (f"{VLLM} actor_rollout_ref.rollout.free_cache_engine=False", 56.0, False),
        (VLLM.replace("vllm", "sglang"), 38.0, False),
    ],
    ids=["it keeps most", "it frees its share", "it is to stay awake", "its share means something else"],
)
def test_an_engine_that_sleeps_and_keeps_its_memory(entrypoint: str, asleep_gib: float, found: bool) -> None:
    diagnosis = diagnosis_of(entrypoint)
    history = diagnosis.history
    assert isinstance(history, ReportedHistory)
    history.feed(JobLine(t=0.0, phase="Running"))
    for number in range(1, 7):
        t = number * STEP_SECONDS
        history.present("w-0", "update_actor", "actor", t=t)
        for uuid in GPUS:
            history.feed(GpuLine(t=t, pod="w-0", uuid=uuid, utilization=0.8, memory_used_bytes=45 * GIB))
        history.take_step("w-0", step_of(awake_gib=56.0, asleep_gib=asleep_gib), t=t)
        diagnosis.judge(t)
    reasons = {tracked.finding.reason for tracked in diagnosis.findings}
    assert ("RolloutMemoryNotReleased" in reasons) is found
