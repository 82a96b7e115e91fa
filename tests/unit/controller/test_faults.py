# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Broken GPUs and breaking programs, told apart by their Xids and NVML's errors."""

import pytest

from tests.unit.controller.builders import gpu, report
from verl_gpumonitor.model.vocabulary import GpuState
from verl_gpumonitor_operator.controller.faults import FaultState, look, message
from verl_gpumonitor_operator.controller.status import GpuView
from verl_gpumonitor_operator.controller.xids import MAX_CODES, PodXids, XidSeen

NOW = 10_000.0
Said = tuple[tuple[str, str], ...]


def view(uuid: str = "GPU-0", *, xids: dict[int, float] | None = None, **more: object) -> GpuView:
    """`xids`: code -> how long ago."""
    seen = {code: XidSeen(1, NOW - ago) for code, ago in (xids or {}).items()}
    return GpuView.of(gpu(uuid, **more), pod="w-0", node=None, pool="", utilization=None, xids=seen)


def said(*gpus: GpuView, before: FaultState | None = None, now: float = NOW) -> Said:
    found = look(before or FaultState(), gpus, now=now)
    return tuple((fault.key.reason, fault.key.uuid) for fault in found.state.open)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(view(), (), id="all well"),
        pytest.param(view(state=GpuState.LOST, error="GPU_IS_LOST"), ("GPUFault",), id="lost"),
        pytest.param(view(state=GpuState.ERROR, error="RESET_REQUIRED"), ("GPUFault",), id="it wants a reset"),
        pytest.param(view(state=GpuState.ERROR, error="UNKNOWN"), (), id="an error that may mean anything"),
        pytest.param(view(state=GpuState.NOT_RESPONDING), (), id="a call hangs since a moment"),
        *(
            pytest.param(view(xids={code: 5.0}), ("GPUFault",), id=f"hardware Xid {code}")
            for code in (48, 64, 74, 79, 94, 95, 119, 120)
        ),
        *(
            pytest.param(view(xids={code: 5.0}), ("ApplicationFault",), id=f"the program's Xid {code}")
            for code in (13, 31, 43, 45, 68, 109)
        ),
        pytest.param(view(xids={63: 5.0}), (), id="a row was remapped, as it should"),
        pytest.param(view(xids={9999: 5.0}), (), id="an Xid that nobody knows"),
        pytest.param(view(xids={79: 1801.0}), (), id="a hardware Xid half an hour ago"),
        pytest.param(view(xids={31: 601.0}), (), id="a program's Xid ten minutes ago"),
        pytest.param(view(xids={79: 8.0, 45: 5.0}), ("GPUFault",), id="45 after 79 is its consequence"),
        pytest.param(view(xids={79: 5.0, 31: 8.0}), ("ApplicationFault", "GPUFault"), id="31 before 79 is its own"),
        pytest.param(view(xids={79: 5.0}, state=GpuState.LOST), ("GPUFault",), id="lost after an Xid is one fault"),
    ],
)
def test_what_is_wrong(one: GpuView, expected: tuple[str, ...]) -> None:
    assert said(one) == tuple((reason, "GPU-0") for reason in expected)


def test_a_hanging_call_becomes_a_fault_when_it_lasts() -> None:
    state = FaultState()
    hangs = view(state=GpuState.NOT_RESPONDING)
    for seconds, is_open in ((0, False), (30, False), (59, False), (61, True)):
        state = look(state, [hangs], now=NOW + seconds).state
        assert bool(state.open) is is_open


def test_a_second_gpu_is_news_and_the_end_comes_once() -> None:
    one, two = view("GPU-1", state=GpuState.LOST), view("GPU-2", state=GpuState.LOST)
    well = [view("GPU-1"), view("GPU-2")]
    first = look(FaultState(), [one, well[1]], now=NOW)
    assert [fault.key.uuid for fault in first.raised] == ["GPU-1"]
    second = look(first.state, [one, two], now=NOW + 10)
    assert [fault.key.uuid for fault in second.raised] == ["GPU-2"]
    third = look(second.state, well, now=NOW + 20)
    assert (third.raised, third.resolved) == ([], [])
    half = look(third.state, [well[0], two], now=NOW + 85)
    assert half.resolved == [], "the other one is still broken"
    away = look(half.state, well, now=NOW + 90)
    assert look(away.state, well, now=NOW + 151).resolved == ["GPUFault"]


def test_of_a_gpu_that_nobody_reports_nothing_is_concluded() -> None:
    first = look(FaultState(), [view(state=GpuState.LOST)], now=NOW)
    assert said(before=first.state, now=NOW + 200) == (("GPUFault", "GPU-0"),)
    assert said(before=first.state, now=NOW + 400) == (), "after five minutes it is not known any more"


def test_the_message_names_the_first_gpus_and_what_to_do() -> None:
    lost = [view(f"GPU-{number}", state=GpuState.LOST, error="GPU_IS_LOST") for number in range(6)]
    text = message("GPUFault", look(FaultState(), lost, now=NOW).state.open)
    assert text.startswith("GPU GPU-0 of pod w-0 is lost: NVML says GPU_IS_LOST; GPU GPU-1")
    assert "and 2 more GPUs" in text
    assert "drain the node" in text


# Counters to times


def counted(*reports: tuple[str, float, dict[str, int]]) -> dict[int, XidSeen]:
    """Reports (start, time, Xids of GPU-0)."""
    pod = PodXids()
    for start, at, xids in reports:
        pod.take(report("w-0", start_id=start, gpus=[gpu(xid_errors=xids)]), at)
    return dict(pod.of("GPU-0"))


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param([("start-001", 1.0, {})], {}, id="none"),
        pytest.param([("start-001", 1.0, {"79": 1}), ("start-001", 9.0, {"79": 1})], {79: (1, 1.0)}, id="no more"),
        pytest.param([("start-001", 1.0, {"79": 1}), ("start-001", 9.0, {"79": 2})], {79: (2, 9.0)}, id="one more"),
        pytest.param([("start-001", 1.0, {"79": 3}), ("start-002", 9.0, {"79": 1})], {79: (1, 9.0)}, id="a new start"),
        pytest.param(
            [("start-001", 1.0, {"79": 3}), ("start-002", 9.0, {})], {79: (3, 1.0)}, id="a new start that had none"
        ),
        pytest.param([("start-001", 1.0, {"79": 0})], {}, id="zero is none"),
    ],
)
def test_when_an_xid_was_counted(
    reports: list[tuple[str, float, dict[str, int]]], expected: dict[int, tuple[int, float]]
) -> None:
    assert counted(*reports) == {code: XidSeen(*seen) for code, seen in expected.items()}


def test_codes_are_bounded() -> None:
    assert len(counted(*(("start-001", 1.0, {str(code): 1}) for code in range(100)))) == MAX_CODES
