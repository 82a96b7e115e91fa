# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Clocks that are held down: by what, also when the GPU rests at the time of the look."""

import pytest

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, StepLine, TaskLine, TraceGpu, TracePod


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        pytest.param(("hw_slowdown", "hw_power_brake_slowdown"), "held down by a power brake", id="a power brake"),
        pytest.param(("hw_slowdown", "hw_thermal_slowdown"), "held down by heat for", id="heat"),
        pytest.param(("sw_thermal_slowdown", "hw_power_brake_slowdown"), "by heat or a power brake", id="both"),
    ],
)
def test_it_is_said_what_holds_clocks_down(reasons: tuple[str, ...], words: str) -> None:
    gpu = TraceGpu(uuid="GPU-0", index=0, memory_total_bytes=80 * 2**30, power_limit_watts=700)
    header = Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=1, gpus=[gpu])])
    diagnosis = Diagnosis(header)
    task = "WorkerDict.actor_rollout_update_actor"
    for step in range(5):
        begin = 100.0 * step
        for second in range(0, 100, 2):
            t = begin + second
            if second in (0, 60):
                state = "end" if second else "begin"
                diagnosis.feed(TaskLine(t=t, pod="w", pid=1, local_rank=0, name=task, state=state))
            held = [*reasons] if second < 60 else []
            load, heat = (0.9, 87.0) if held else (0.0, 45.0)
            diagnosis.feed(
                GpuLine(t=t + 1, pod="w", uuid="GPU-0", utilization=load, temperature_celsius=heat, throttled=held)
            )
        diagnosis.feed(StepLine(t=begin + 99.5, step=step))
    (found,) = [f.finding for f in diagnosis.findings if f.finding.reason == "Throttled"]
    assert words in found.message
    assert found.evidence["throttle_reasons"] == ", ".join(reasons)
    # Not how hot it is at the time of the look, when it rests.
    assert found.evidence["temperature_celsius"] == 87
