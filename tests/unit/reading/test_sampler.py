# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler with readers that fail in ways the real one should not."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from verl_gpumonitor.model.vocabulary import GpuState, Source, UnavailableReason
from verl_gpumonitor.reading.reader import Reader, Reading
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings
from verl_gpumonitor.reading.samples import GpuSample, NodeSample
from verl_gpumonitor.reading.watch import Abandoned, CallWatch, StopSign

SETTINGS = SamplerSettings(interval_seconds=0.02, memory_interval_seconds=0.01, call_limit_seconds=0.2)


class OneGpu:
    """A reader of one GPU that breaks as it is told."""

    def __init__(self) -> None:
        self.breaks: Exception | None = None
        self.ends_thread = False
        self.gate = threading.Event()
        self.gate.set()
        self.passes = 0
        self._watch = CallWatch(time.monotonic)

    def use(self, watch: CallWatch) -> None:
        self._watch = watch

    def read_all(self, *, skip: frozenset[str], processes: bool) -> Reading:  # noqa: ARG002 - the protocol's
        if self.ends_thread:
            self.ends_thread = False
            raise SystemExit
        if self.breaks is not None:
            raise self.breaks
        if "GPU-0" not in skip:
            watch = self._watch
            watch.begin("GPU-0", "a_call")
            self.gate.wait(10)
            watch.end()
        self.passes += 1
        sample = GpuSample(uuid="GPU-0", taken_at=time.monotonic(), utilization=0.5)
        return Reading(gpus=(sample,), visible=1)

    def read_memory(self, *, skip: frozenset[str]) -> Reading:
        return self.read_all(skip=skip, processes=False)


@pytest.fixture
def reader() -> OneGpu:
    return OneGpu()


@pytest.fixture
def sampler(reader: OneGpu) -> Iterator[Sampler]:
    sampler = Sampler(lambda: reader, SETTINGS)
    yield sampler
    reader.gate.set()
    sampler.stop(wait_seconds=2)


def until(sampler: Sampler, holds: Callable[[NodeSample], bool]) -> NodeSample:
    end = time.monotonic() + 10
    while not holds(latest := sampler.latest()):
        assert time.monotonic() < end, latest
        time.sleep(0.005)
    return latest


def good(sample: NodeSample) -> bool:
    return sample.source is Source.NVML and sample.gpus[0].state is GpuState.OK


def test_before_the_first_pass_nothing_is_claimed(sampler: Sampler) -> None:
    assert sampler.latest() == NodeSample()


def test_a_fault_of_the_reader_is_said_and_outlived(
    sampler: Sampler, reader: OneGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler.start()
    until(sampler, good)
    reader.breaks = ValueError("as broken as can be")
    broken = until(sampler, lambda sample: sample.unavailable is not None)
    assert (broken.unavailable, broken.error) == (UnavailableReason.NVML_ERROR, "READER_FAILED")
    assert broken.gpus[0].utilization is None
    assert broken.health.failures > 0
    reader.breaks = None
    until(sampler, good)
    assert "as broken as can be" in capsys.readouterr().err


def test_a_reader_that_cannot_be_made_is_tried_again(reader: OneGpu, capsys: pytest.CaptureFixture[str]) -> None:
    tries = iter([False, False, True])

    def make() -> Reader:
        if not next(tries):
            raise OSError("not yet")
        return reader

    sampler = Sampler(make, SETTINGS)
    sampler.start()
    until(sampler, good)
    sampler.stop()
    assert capsys.readouterr().err.count("OSError: not yet") == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_is_replaced(sampler: Sampler, reader: OneGpu) -> None:
    sampler.start()
    until(sampler, good)
    reader.ends_thread = True
    while reader.ends_thread:
        time.sleep(0.005)
    passes = reader.passes
    until(sampler, lambda _: reader.passes > passes + 3)


def test_where_no_thread_is_to_be_had_it_is_tried_again(
    sampler: Sampler, reader: OneGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refusals = threading.Thread.start, iter([True, True])

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "gpumon-sampler" and next(refusals, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sampler.start()
    until(sampler, good)


def test_a_hung_thread_touches_nothing_after_its_return(sampler: Sampler, reader: OneGpu) -> None:
    sampler.start()
    until(sampler, good)
    reader.gate.clear()
    hung = until(sampler, lambda sample: sample.gpus[0].state is GpuState.NOT_RESPONDING)
    assert hung.health.timeouts == 1
    assert hung.gpus[0].utilization is None
    reader.gate.set()
    until(sampler, good)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("gpumon-sampler") <= 2, "the old one has ended, or is about to"


def test_starting_twice_starts_one_thread(sampler: Sampler) -> None:
    sampler.start()
    sampler.start()
    assert [thread.name for thread in threading.enumerate()].count("gpumon-watchdog") == 1


def test_a_watch_that_was_abandoned_says_so_at_the_end_of_its_call() -> None:
    watch = CallWatch(lambda: 5.0)
    watch.begin("GPU-0", "a_call")
    call = watch.call
    assert call is not None
    assert (call.part, call.function, call.since) == ("GPU-0", "a_call", 5.0)
    assert watch.abandon(call)
    with pytest.raises(Abandoned):
        watch.end()


def test_a_call_that_came_back_in_time_is_not_abandoned() -> None:
    watch = CallWatch(lambda: 5.0)
    watch.begin("GPU-0", "a_call")
    call = watch.call
    assert call is not None
    watch.end()
    watch.begin("GPU-1", "another")
    assert not watch.abandon(call)
    watch.end()


def test_of_thread_and_watchdog_one_alone_has_the_call() -> None:
    """They meet at the same moment, five hundred times."""
    watch, gate = CallWatch(time.monotonic), threading.Barrier(2, timeout=10)
    wins: list[bool] = []

    def watchdog() -> None:
        for _ in range(500):
            gate.wait()
            call = watch.call
            wins.append(call is not None and watch.abandon(call))
            gate.wait()

    thread = threading.Thread(target=watchdog)
    thread.start()
    for _ in range(500):
        watch.begin("GPU-0", "a_call")
        gate.wait()
        try:
            watch.end()
            kept = True
        except Abandoned:
            kept = False
        gate.wait()
        assert kept is not wins[-1]
    thread.join()


def test_the_watchdog_looks_again_when_the_call_in_progress_can_hang(sampler: Sampler, reader: OneGpu) -> None:
    sampler.start()
    until(sampler, good)
    reader.gate.clear()
    time.sleep(0.05)
    assert 0 < sampler.check() < SETTINGS.call_limit_seconds


def test_a_stop_sign_wakes_all_who_sleep() -> None:
    sign, woken = StopSign(), []
    threads = [threading.Thread(target=lambda: woken.append(sign.wait(10))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not sign.wait(0.01)
    sign.give()
    sign.give()
    for thread in threads:
        thread.join(5)
    assert woken == [True] * 3
    assert sign.wait(0)
