# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Workloads by what they did: GPUs whose finished steps are given, without a record."""

from collections.abc import Mapping, Sequence

from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.rule import Case, Rule
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.history import Piece
from verl_gpumonitor.model.trace import TRACE_FORMAT, Header, TraceGpu, TracePod, Workload

TOTAL_BYTES = 80 * 2**30


def stage(
    *, seconds: float = 60.0, busy: float = 0.9, peak: float = 0.5, floor: float | None = None
) -> Mapping[str, float]:
    """Say what one stage of one step was; memory as a share of the GPU's."""
    return {
        "seconds": seconds,
        "known_seconds": seconds,
        "busy_seconds": busy * seconds,
        "peak_bytes": peak * TOTAL_BYTES,
        "floor_bytes": (peak if floor is None else floor) * TOTAL_BYTES,
        "used_samples": 10,
    }


Steps = Sequence[Mapping[str, Mapping[str, float]]]


def history(*pods: tuple[str, Sequence[Steps]], told: bool = True, kind: str = "RayJob") -> History:
    """Return a workload: pods, each with its group and, of each of its GPUs, the steps, oldest first."""
    header = Header(
        format=TRACE_FORMAT,
        workload=Workload(kind=kind),
        pods=[
            TracePod(
                name=f"pod-{place}",
                group=group,
                gpus_requested=len(gpus),
                gpus=[TraceGpu(uuid=f"{place}-{n}", index=n, memory_total_bytes=TOTAL_BYTES) for n in range(len(gpus))],
            )
            for place, (group, gpus) in enumerate(pods)
        ],
    )
    made = History(header)
    made.stages_told = told
    for place, (_, gpus) in enumerate(pods):
        for n, steps in enumerate(gpus):
            take(made.gpus[f"{place}-{n}"], steps)
    return made


def take(gpu: GpuHistory, steps: Steps) -> None:
    """Give a GPU its past."""
    for step, pieces in enumerate(steps):
        gpu.now = {name: Piece(stage=name, role="actor", step=step) for name in pieces}
        for name, figures in pieces.items():
            for figure, value in figures.items():
                setattr(gpu.now[name], figure, value)
        gpu.finish(24)


def held(rule: Rule, made: History) -> list[Case]:
    """Return what a rule sees hold."""
    return [case for case in rule.judge(made, Thresholds(), {}) or () if isinstance(case, Case)]
