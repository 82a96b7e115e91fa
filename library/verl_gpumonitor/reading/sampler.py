# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler thread, and the watchdog that replaces it when a call into NVML hangs.

One thread alone touches the reader. When its call takes longer than the limit, it is abandoned: the part of the
library it hangs in (one GPU, as a rule) is left out, and a new thread goes on with the others. When the call returns
at last, the old thread ends without touching anything, and the part is taken back. Since a part that hangs is not
entered again, there are never more threads than parts. The opening of the library is the exception: nobody can do
anything without it, so nobody takes over, and it is said.

Imports are counted here: this runs in a sidecar of 30 MiB, so no logging, dataclasses or asyncio.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from verl_gpumonitor.model.vocabulary import GpuState, Source, UnavailableReason
from verl_gpumonitor.timeline.accumulate import GpuAccumulator, add_sample, add_xid

from .reader import PART_INIT, Reader, Reading, without_gauges
from .samples import GpuSample, NodeSample, ReadingHealth
from .watch import Abandoned, Call, CallWatch, StopSign

TIMED_OUT: Final = "CALL_TIMED_OUT"
"""Our own name, among NVML's, of the error of a GPU whose call hangs."""
REPEAT_SECONDS: Final = 600.0
"""A part that hangs again so soon after the last time is held out for a while after its return."""
FIRST_HOLD_SECONDS: Final = 10.0
MAX_HOLD_SECONDS: Final = 300.0
_NONE: Final[frozenset[str]] = frozenset()


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often is read, and how long a call may take."""

    interval_seconds: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """Time between two full samples of each GPU."""
    memory_interval_seconds: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """Time between two readings of memory; from `interval_seconds` up it is read with the rest alone."""
    call_limit_seconds: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """A call that takes longer counts as hung."""
    processes_interval_seconds: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """Time between two readings of the processes on each GPU; None: not read."""


class _Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the library that is left out, because a call about it hangs or hung a moment ago."""

    since: float
    hangs: int
    """How often it hung in a row."""
    until: float | None = None
    """End of the time it is still held out after its return; None while the call hangs."""


class _Run:
    """One sampler thread, and the mark of what it does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.watch = CallWatch(clock)
        self.thread: threading.Thread | None = None
        self.timed_out: Call | None = None
        """A hung call that cannot be taken over from, already counted."""


def open_nvml(clock: Callable[[], float]) -> Reader:
    """Return the real reader. Imported here, so that whoever brings another reader does not pay for pynvml."""
    from .nvml.reader import NvmlReader

    return NvmlReader(clock=clock)


class Sampler:
    """Reads all GPUs in a thread of its own; `latest()` never waits for it.

    Nothing raises: without a library, without a GPU, with a hanging driver, `latest()` says so.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader] | None = None,
        settings: SamplerSettings = SamplerSettings(),  # noqa: B008 - frozen
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet. `open_reader` None means NVML."""
        self._open_reader = open_reader or (lambda: open_nvml(clock))
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        """Guards everything below but `_latest`, which is replaced as a whole and read without it."""
        self._reader: Reader | None = None
        self._run: _Run | None = None
        self._watchdog: threading.Thread | None = None
        self._stopping = StopSign()
        self._stuck: dict[str, _Stuck] = {}
        self._reading = Reading()
        self._accumulators: dict[str, GpuAccumulator] = {}
        self._health = ReadingHealth()
        self._processes_at: float | None = None
        self._latest = NodeSample()

    def start(self) -> None:
        """Start the sampler thread and its watchdog. A second call does nothing."""
        with self._lock:
            if self._run is not None or self._stopping.given:
                return
            self._start_run()
            self._watchdog = threading.Thread(target=self._watch_loop, name="gpumon-watchdog", daemon=True)
            self._watchdog.start()

    def latest(self) -> NodeSample:
        """Return the newest picture of all GPUs. Lock-free, at once, from any thread.

        Before the first pass it is a NodeSample with no GPU, no reason and `health.collections` 0.
        """
        return self._latest

    def stop(self, *, wait_seconds: float = 0.5) -> None:
        """Tell the threads to end, and wait that long at most: a hung one is left behind (they are daemons)."""
        with self._lock:
            self._stopping.give()
        end = time.monotonic() + wait_seconds
        run = self._run
        for thread in (self._watchdog, None if run is None else run.thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    # --- the sampler thread ----------------------------------------------------------------------------------

    def _start_run(self) -> None:
        """Start a sampler thread in place of the present one. The caller holds the lock."""
        run = self._run = _Run(self._clock)
        thread = threading.Thread(target=self._sample_loop, args=(run,), name="gpumon-sampler", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had (a limit on pids): the watchdog tries again
            return
        run.thread = thread

    def _sample_loop(self, run: _Run) -> None:
        """Read until told to stop, or until replaced."""
        interval = self._settings.interval_seconds
        memory_interval = self._settings.memory_interval_seconds
        full_at = memory_at = self._clock()
        while not self._stopping.given and self._run is run:
            now = self._clock()
            full = now >= full_at
            full_at = _next(full_at, interval, now)
            memory_at = _next(memory_at, memory_interval, now)
            if not self._pass(run, full=full):
                return
            due = full_at if memory_interval >= interval else min(full_at, memory_at)
            self._stopping.wait(max(0.0, due - self._clock()))

    def _pass(self, run: _Run, *, full: bool) -> bool:
        """Make one pass and publish it; False when this thread was replaced meanwhile."""
        call = None
        try:
            began = self._clock()
            with self._lock:
                skip = self._skipped(began)
                processes = full and self._processes_due(began)
            reader = self._ready_reader(run)
            reading = reader.read_all(skip=skip, processes=processes) if full else reader.read_memory(skip=skip)
        except Abandoned as farewell:
            call = farewell.call
        except Exception:  # noqa: BLE001 - the loop must outlive any fault of a reader; it is printed and counted
            self._note_crash(run)
            return True
        if call is not None:
            self._take_back(call)
            return False
        with self._lock:
            if self._run is run:
                self._take(reading, full=full, began=began)
        return True

    def _ready_reader(self, run: _Run) -> Reader:
        """Return the reader, opened by the first thread, with its calls marked as this thread's."""
        if self._reader is None:
            self._reader = self._open_reader()
        self._reader.use(run.watch)
        return self._reader

    def _skipped(self, now: float) -> frozenset[str]:
        """Return the parts to leave out, after forgetting those whose time is over."""
        if not self._stuck:
            return _NONE
        for part, stuck in list(self._stuck.items()):
            if stuck.until is not None and now >= stuck.until + REPEAT_SECONDS:
                del self._stuck[part]
        return frozenset(part for part, stuck in self._stuck.items() if stuck.until is None or now < stuck.until)

    def _processes_due(self, now: float) -> bool:
        interval = self._settings.processes_interval_seconds
        if interval is None or (self._processes_at is not None and now < self._processes_at + interval):
            return False
        self._processes_at = now
        return True

    def _take(self, reading: Reading, *, full: bool, began: float) -> None:
        """Add up a reading and publish it. The caller holds the lock."""
        now = self._clock()
        for sample in reading.gpus:
            before = self._accumulators.get(sample.uuid) or GpuAccumulator()
            self._accumulators[sample.uuid] = add_sample(
                before, sample, interval_seconds=self._settings.interval_seconds
            )
        for xid in reading.xids:
            before = self._accumulators.get(xid.uuid) or GpuAccumulator()
            self._accumulators[xid.uuid] = add_xid(before, xid.code, at=now)
        self._reading = reading
        if full:
            self._note_pass(reading, now=now, began=began)
        self._publish()

    def _note_pass(self, reading: Reading, *, now: float, began: float) -> None:
        usable = reading.unavailable is None
        answered = any(sample.state is GpuState.OK for sample in reading.gpus)
        self._health = msgspec.structs.replace(
            self._health,
            collections=self._health.collections + usable,
            failures=self._health.failures + (not usable),
            last_success_at=now if usable and answered else self._health.last_success_at,
            last_pass_seconds=now - began,
        )

    def _note_crash(self, run: _Run) -> None:
        """Say that the reader itself broke: a fault of ours, never the job's."""
        sys.excepthook(*sys.exc_info())
        with self._lock:
            if self._run is run:
                self._health = msgspec.structs.replace(self._health, failures=self._health.failures + 1)
                self._reading = Reading(
                    gpus=tuple(
                        without_gauges(sample, GpuState.ERROR, "READER_FAILED") for sample in self._reading.gpus
                    ),
                    unavailable=UnavailableReason.NVML_ERROR,
                    error="READER_FAILED",
                    message="the reader failed; its traceback is in the sidecar's log",
                )
                self._publish()
        self._stopping.wait(self._settings.interval_seconds)

    def _take_back(self, call: Call) -> None:
        """A hung call returned: let its part in again, later if it hung before."""
        with self._lock:
            stuck = self._stuck.get(call.part)
            if stuck is not None:
                hold = 0.0 if stuck.hangs == 1 else min(FIRST_HOLD_SECONDS * 2 ** (stuck.hangs - 2), MAX_HOLD_SECONDS)
                self._stuck[call.part] = msgspec.structs.replace(stuck, until=self._clock() + hold)

    # --- the watchdog ----------------------------------------------------------------------------------------

    def _watch_loop(self) -> None:
        wait = self._settings.call_limit_seconds
        while not self._stopping.wait(wait):
            wait = self.check()

    def check(self) -> float:
        """Replace the sampler thread if its call hangs, or if it is gone. Called by the watchdog thread.

        Returns the seconds until a call can next have taken too long: a wake-up costs more than a look.
        """
        limit = self._settings.call_limit_seconds
        with self._lock:
            run = self._run
            if run is None:
                return limit
            if run.thread is None or not run.thread.is_alive():
                self._start_run()
                return limit
            call = run.watch.call
            if call is None:
                return limit
            left = call.since + limit - self._clock()
            if left > 0:
                return left
            if call.part == PART_INIT:
                self._note_hung_init(run, call)
            elif run.watch.abandon(call):
                self._leave_out(call)
                self._start_run()
            return limit

    def _leave_out(self, call: Call) -> None:
        """Leave the part out, and say so at once: the next pass may take its time."""
        before = self._stuck.get(call.part)
        hangs = 1 if before is None else before.hangs + 1
        self._stuck[call.part] = _Stuck(since=call.since, hangs=hangs)
        self._health = msgspec.structs.replace(self._health, timeouts=self._health.timeouts + 1)
        self._publish()

    def _note_hung_init(self, run: _Run, call: Call) -> None:
        """Say that the library does not open. The thread goes on by itself when the call returns."""
        if run.timed_out is call:
            return
        run.timed_out = call
        self._health = msgspec.structs.replace(self._health, timeouts=self._health.timeouts + 1)
        self._reading = msgspec.structs.replace(
            self._reading,
            gpus=tuple(without_gauges(s, GpuState.NOT_RESPONDING, TIMED_OUT) for s in self._reading.gpus),
            unavailable=UnavailableReason.NOT_RESPONDING,
            error=TIMED_OUT,
            message=f"the NVIDIA driver does not answer: {call.function} has not returned",
            visible=None,
        )
        self._publish()

    # --- publishing ------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Put the newest picture in place of the last one. The caller holds the lock."""
        reading = self._reading
        unavailable, error, message = reading.unavailable, reading.error, reading.message
        gpus = self._shown(reading.gpus)
        # A reader that leaves out the call that hangs sees no GPU, and would take that for one that may not be seen.
        blind = unavailable in (None, UnavailableReason.NO_DEVICE_ACCESS)
        if blind and (hung := self._hung_without_gpus(gpus)) is not None:
            unavailable, error = UnavailableReason.NOT_RESPONDING, TIMED_OUT
            message = f"the NVIDIA driver does not answer: a call about {hung} has not returned"
        self._latest = NodeSample(
            source=Source.NVML if unavailable is None and gpus else Source.NONE,
            gpus=gpus,
            counters={uuid: state.counters for uuid, state in self._accumulators.items()},
            unavailable=unavailable,
            error=error,
            message=message,
            driver_version=reading.driver_version,
            visible=reading.visible,
            health=msgspec.structs.replace(
                self._health,
                unsupported=reading.unsupported,
                implausible=reading.implausible,
                failed=reading.failed,
            ),
        )

    def _shown(self, samples: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
        """Return the samples, those of hanging GPUs without what they said last."""
        left_out = self._skipped(self._clock())
        if not left_out:
            return samples
        return tuple(
            without_gauges(sample, GpuState.NOT_RESPONDING, TIMED_OUT) if sample.uuid in left_out else sample
            for sample in samples
        )

    def _hung_without_gpus(self, gpus: tuple[GpuSample, ...]) -> str | None:
        """Return the part whose hang keeps us from seeing any GPU at all; None while some are known."""
        if gpus:
            return None
        return next((part for part, stuck in self._stuck.items() if stuck.until is None), None)


def _next(due: float, interval: float, now: float) -> float:
    """Return when something is due again: in step with before, and never twice at once after a stall."""
    if now < due:
        return due
    return due + interval if due + interval > now else now + interval
