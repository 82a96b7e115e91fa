# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What several Xids of one job are: one problem, or more; news, or the driver that cleans up."""

import pytest

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.model.trace import TRACE_FORMAT, Header, JobLine, PodLine, TraceGpu, TracePod, XidLine

Xid = tuple[float, str, int]
"""Time, GPU such as `a0` (the first of pod a), code."""


def _diagnosed(xids: list[Xid], *others: JobLine | PodLine) -> list[tuple[str, float, set[str]]]:
    """Return reason, Xid and GPUs of what is found, over the seconds of the record."""
    pods = [
        TracePod(name=pod, gpus_requested=4, gpus=[TraceGpu(uuid=f"{pod}{n}", index=n) for n in range(4)])
        for pod in ("a", "b")
    ]
    diagnosis = Diagnosis(Header(format=TRACE_FORMAT, pods=pods))
    lines = [XidLine(t=t, pod=uuid[0], uuid=uuid, code=code) for t, uuid, code in xids]
    for record in sorted([JobLine(t=0.0, phase="Running"), *lines, *others], key=lambda record: record.t):
        diagnosis.feed(record)
    found = [tracked.finding for tracked in diagnosis.findings]
    return [(f.reason, float(str(f.evidence.get("xid", 0))), set(f.scope.gpus)) for f in found]


@pytest.mark.parametrize(
    ("xids", "found"),
    [
        pytest.param([(9, "a0", 43), (10, "a0", 45)], [("ApplicationFault", 43, {"a0"})], id="45 cleans up after 43"),
        pytest.param(
            [(9, "a0", 31), (9.5, "a0", 43), (10, "a0", 45)], [("ApplicationFault", 31, {"a0"})], id="both after 31"
        ),
        pytest.param([(9, "a0", 45)], [("ApplicationFault", 45, {"a0"})], id="45 alone is news"),
        pytest.param(
            [(9, "a0", 31), *((10, gpu, 45) for gpu in ("a0", "a1", "b0"))],
            [("ApplicationFault", 31, {"a0"})],
            id="45 on all GPUs of the program that 31 ended",
        ),
        pytest.param(
            [(9, "a0", 79), *((30, gpu, 45) for gpu in ("a1", "b0", "b1"))],
            [("GPUFault", 79, {"a0"})],
            id="45 on the GPUs of the others that a lost one ended",
        ),
        pytest.param(
            [(9, "a0", 31), (10, "b0", 43)],
            [("ApplicationFault", 31, {"a0"}), ("ApplicationFault", 43, {"b0"})],
            id="43 of another GPU is that one's own",
        ),
        pytest.param(
            [(9, "a0", 43), (300, "a0", 45)],
            [("ApplicationFault", 43, {"a0"}), ("ApplicationFault", 45, {"a0"})],
            id="45 long after is another's",
        ),
    ],
)
def test_what_the_driver_cleans_up_is_no_news(xids: list[Xid], found: list[tuple[str, float, set[str]]]) -> None:
    assert _diagnosed(xids) == found


def test_what_is_cleared_away_after_the_end_of_a_job_is_no_fault() -> None:
    assert _diagnosed([(60.5, "a0", 45)], JobLine(t=60, phase="Stopped")) == []


def test_a_container_that_ran_out_of_host_memory_explains_what_is_cleared_away() -> None:
    killed = PodLine(t=60, pod="a", phase="Running", container="ray-worker", reason="OOMKilled", exit_code=137)
    assert [reason for reason, *_ in _diagnosed([(61, "a0", 45), (61, "a1", 45)], killed)] == ["HostMemoryRisk"]


@pytest.mark.parametrize(
    ("xids", "found"),
    [
        pytest.param([(9, "a0", 74), (9.2, "a1", 74)], [{"a0", "a1"}], id="both ends of a link"),
        pytest.param([(9, "a0", 74), (9.2, "b0", 74)], [{"a0"}, {"b0"}], id="links of two nodes"),
        pytest.param([(9, "a0", 79), (10, "a1", 48)], [{"a0"}, {"a1"}], id="two faults of two GPUs"),
        pytest.param([(9, "a0", 48), (9.1, "a0", 64)], [{"a0"}], id="two words of one GPU"),
        pytest.param([(9, "a0", 48), (900, "a1", 48)], [{"a0"}, {"a1"}], id="the same fault much later"),
        pytest.param([(9, "a0", 74), (9.1, "a1", 74), (2000, "a1", 74)], [{"a0", "a1"}], id="it stays one problem"),
    ],
)
def test_one_fault_of_hardware_is_one_finding(xids: list[Xid], found: list[set[str]]) -> None:
    assert [gpus for _, _, gpus in _diagnosed(xids)] == found
