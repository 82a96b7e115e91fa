# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Event sets: what is delivered to whom, and when."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import simgpu


@pytest.fixture
def events(nvml: Any) -> Iterator[Any]:
    """An event set that registered for XIDs of GPUs 0 and 2."""
    found = nvml.nvmlEventSetCreate()
    for index in (0, 2):
        nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), nvml.nvmlEventTypeXidCriticalError, found)
    yield found
    nvml.nvmlEventSetFree(found)


def _next(nvml: Any, events: Any, timeout_ms: int = 0) -> tuple[int, int]:
    event = nvml.nvmlEventSetWait_v2(events, timeout_ms)
    assert event.eventType == nvml.nvmlEventTypeXidCriticalError
    assert event.gpuInstanceId == 0xFFFFFFFF
    return nvml.nvmlDeviceGetIndex(event.device), event.eventData


def test_xids_come_in_order_each_once_and_only_of_registered_gpus(nvml: Any, events: Any) -> None:
    for gpu, code in [(0, 31), (1, 48), (0, 31), (2, 79)]:
        simgpu.xid(gpu, code)
    assert [_next(nvml, events) for _ in range(3)] == [(0, 31), (0, 31), (2, 79)]
    with pytest.raises(nvml.NVMLError_Timeout):
        _next(nvml, events)


def test_a_wait_honours_its_timeout(nvml: Any, events: Any) -> None:
    start = time.monotonic()
    with pytest.raises(nvml.NVMLError_Timeout):
        _next(nvml, events, 150)
    assert 0.15 <= time.monotonic() - start < 0.5


def test_a_waiting_call_wakes_at_once_and_costs_nothing_meanwhile(nvml: Any, events: Any) -> None:
    timer = threading.Timer(0.3, simgpu.xid, args=[2, 79])
    timer.start()
    start, cpu = time.monotonic(), time.thread_time()
    assert _next(nvml, events, 5000) == (2, 79)
    assert time.monotonic() - start < 0.6
    assert time.thread_time() - cpu < 0.02
    timer.join()


def test_events_before_the_set_are_not_delivered(nvml: Any) -> None:
    simgpu.xid(0, 31)
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlEventTypeXidCriticalError, events)
    with pytest.raises(nvml.NVMLError_Timeout):
        nvml.nvmlEventSetWait_v2(events, 0)
    nvml.nvmlEventSetFree(events)


def test_xids_are_among_the_supported_types(nvml: Any, device: Any) -> None:
    assert nvml.nvmlDeviceGetSupportedEventTypes(device) & nvml.nvmlEventTypeXidCriticalError
