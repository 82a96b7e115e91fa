# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What may not wait for the next interval."""

from collections.abc import Sequence

from verl_gpumonitor.model.samples import GpuCounters, GpuSample
from verl_gpumonitor.model.vocabulary import GpuState
from verl_gpumonitor_sidecar.state import OwnGpu, PodState
from verl_gpumonitor_sidecar.urgency import Known, look


def state(at: float, used: int | None, *, gpu_state: GpuState = GpuState.OK, xids: int = 0) -> PodState:
    sample = GpuSample(
        uuid="a",
        state=gpu_state,
        taken_at=at,
        memory_taken_at=at,
        memory_used_bytes=used,
        memory_reserved_bytes=1,
        memory_total_bytes=100,
    )
    counters = GpuCounters(xid_errors={31: xids} if xids else {})
    return PodState(gpus_requested=1, gpus=(OwnGpu(sample=sample, counters=counters),))


def news(moments: Sequence[PodState]) -> list[bool]:
    """Return at each moment, a second after the other, whether there was news."""
    known, found = Known(), []
    for now, moment in enumerate(moments):
        known, is_news = look(known, moment, float(now))
        found.append(is_news)
    return found


def test_nearly_full_is_news_once() -> None:
    assert news([state(t, used) for t, used in enumerate([50, 93, 94, 99, 50, 96])]) == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]


def test_nearly_full_is_news_again_after_a_calm_minute() -> None:
    used = [96] + [50] * 60 + [96, 96]
    found = news([state(t, value) for t, value in enumerate(used)])
    assert [t for t, is_news in enumerate(found) if is_news] == [0, 61]


def test_an_old_or_unknown_memory_is_no_news() -> None:
    assert not any(news([state(-10, 99), state(1, None)]))


def test_a_gpu_that_stops_answering_is_news_once() -> None:
    lost = [state(t, None, gpu_state=GpuState.LOST) for t in range(3)]
    assert news([state(0, 50), *lost]) == [False, True, False, False]


def test_each_new_xid_is_news() -> None:
    assert news([state(t, 50, xids=count) for t, count in enumerate([0, 1, 1, 2])]) == [False, True, False, True]
