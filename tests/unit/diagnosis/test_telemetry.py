# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Lines that do not come, and lines in which nothing is."""

import pytest

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, TraceGpu, TracePod


@pytest.mark.parametrize(
    ("silent", "empty", "words"),
    [
        pytest.param((300, 380), (0, 0), None, id="a minute and a half of silence"),
        pytest.param((300, 460), (0, 0), "nothing has come", id="a longer silence"),
        pytest.param((0, 0), (300, 460), "neither utilisation nor memory", id="lines with nothing in them"),
    ],
)
def test_silence_is_not_taken_for_empty_lines(
    silent: tuple[float, float], empty: tuple[float, float], words: str | None
) -> None:
    pods = [TracePod(name=p, gpus_requested=1, gpus=[TraceGpu(uuid=p, memory_total_bytes=2**36)]) for p in ("a", "b")]
    diagnosis = Diagnosis(Header(format=TRACE_FORMAT, pods=pods))
    for n in range(300):
        t = 2.0 * n
        for pod in ("a", "b"):
            nothing = pod == "b" and empty[0] <= t < empty[1]
            used = None if nothing else 2**35
            if pod == "a" or not silent[0] <= t < silent[1]:
                load = None if nothing else 0.9
                diagnosis.feed(GpuLine(t=t, pod=pod, uuid=pod, utilization=load, memory_used_bytes=used))
    found = [f.finding.message for f in diagnosis.findings if f.finding.reason == "TelemetryUnavailable"]
    assert len(found) == (words is not None)
    assert all(words is not None and words in message for message in found)
