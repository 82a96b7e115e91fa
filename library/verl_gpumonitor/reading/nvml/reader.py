# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Reads all GPUs of the node: the opening of the library, which GPUs there are, and one pass over them.

The library is opened once and kept: cycles of init and shutdown have hung drivers (go-nvml#152). It is opened again,
with back-off, when it was not there, or when it says that it lost its driver. A GPU is its UUID: indexes move and
handles die. Every reading is optional, every number is checked before it leaves.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import pynvml

from verl_gpumonitor.model.vocabulary import GpuState, UnavailableReason
from verl_gpumonitor.reading import plausible
from verl_gpumonitor.reading.host import driver_loaded
from verl_gpumonitor.reading.reader import PART_INIT, Reading, Xid, without_gauges
from verl_gpumonitor.reading.watch import CallWatch

from .calls import Calls
from .errors import LIBRARY_GONE, GpuLost, LibraryLost, error_name, sentence, unavailable_reason
from .events import Events
from .gpu import Gpu, Handle
from .values import SLOW_SECONDS, Values

DISCOVERY_SECONDS: Final = 10.0
"""Time between two counts of the GPUs."""
MAX_OPEN_WAIT_SECONDS: Final = 15.0
"""Longest wait before the library is looked for again; a driver that comes late is seen that soon."""
MAX_FIND_WAIT_SECONDS: Final = 15.0
"""Longest wait before a lost GPU is looked for again."""
LOST_SECONDS: Final = 60.0
"""After so long with a GPU that does not answer, the library is closed and opened: NVML lists GPUs at its opening
alone, so one that comes back, or a reloaded driver, is only then seen."""
MAX_LOST_SECONDS: Final = 3600.0
"""The time doubles up to this while other GPUs answer,"""
MAX_DEAD_SECONDS: Final = 600.0
"""and up to this while none does."""


def close_library() -> None:
    """Close the library as this process inherited it: a forked child must open it anew. Quiet if it is not open."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


class NvmlReader:
    """Reads all GPUs of the node through NVML. Used by one thread at a time; nothing raises but Abandoned."""

    def __init__(
        self,
        *,
        slow_seconds: float = SLOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        is_driver_loaded: Callable[[], bool] = driver_loaded,
    ) -> None:
        """Touch nothing yet: the library is opened by the first reading."""
        self._clock = clock
        self._is_driver_loaded = is_driver_loaded
        self._calls = Calls(CallWatch(clock))
        self._values = Values(self._calls, slow_seconds=slow_seconds, clock=clock)
        self._events = Events(self._calls, clock)
        self._open = False
        self._open_at = 0.0
        self._open_wait = 1.0
        self._unavailable: UnavailableReason | None = None
        self._error: str | None = None
        self._driver_version: str | None = None
        self._visible: int | None = None
        self._discovery_error: int | None = None
        self._discover_at = 0.0
        self._whole_at = clock()
        self._lost_wait = LOST_SECONDS
        self._gpus: dict[str, Gpu] = {}

    def use(self, watch: CallWatch) -> None:
        """Mark calls on this watch from now on: another thread takes over."""
        self._calls.watch = watch

    def read_all(self, *, skip: frozenset[str] = frozenset(), processes: bool = False) -> Reading:
        """Read everything of each GPU that is not left out, and the events since the last time."""
        xids: tuple[Xid, ...] = ()
        try:
            if self._ensure_open():
                self._discover(skip)
                for gpu in self._gpus.values():
                    if gpu.uuid in skip:
                        gpu.sample = without_gauges(gpu.sample, GpuState.NOT_RESPONDING, None)
                    else:
                        self._read_gpu(gpu, processes=processes)
                xids = self._events.read(self._gpus, skip)
                self._reopen_if_lost(skip)
        except LibraryLost as lost:
            self._close(lost.code, keep_handle_count=bool(skip))
        return self._reading(xids)

    def read_memory(self, *, skip: frozenset[str] = frozenset()) -> Reading:
        """Read the memory of each GPU that answered the last time."""
        try:
            for gpu in self._gpus.values():
                if gpu.handle is not None and gpu.sample.state is GpuState.OK and gpu.uuid not in skip:
                    self._read_memory_of(gpu)
        except LibraryLost as lost:
            self._close(lost.code, keep_handle_count=bool(skip))
        return self._reading(())

    # --- opening and closing ---------------------------------------------------------------------------------

    def _ensure_open(self) -> bool:
        if self._open:
            return True
        if self._clock() < self._open_at:
            return False
        try:
            self._calls.call(PART_INIT, pynvml.nvmlInitWithFlags, 0)
        except pynvml.NVMLError as error:
            self._note_closed(error.value)
            return False
        self._open = True
        self._open_wait = 1.0
        self._unavailable = self._error = None
        self._whole_at = self._discover_at = self._clock()
        self._driver_version = self._read_driver_version()
        return True

    def _read_driver_version(self) -> str | None:
        try:
            raw = self._calls.call(PART_INIT, pynvml.nvmlSystemGetDriverVersion)
        except (pynvml.NVMLError, ValueError):
            return None
        return self._calls.checked("driver_version", plausible.text(raw))

    def _note_closed(self, code: int) -> None:
        """Remember why there is no library, and when to look again."""
        name = self._calls.note_failed(code)
        self._open = False
        self._open_at = self._clock() + self._open_wait
        self._open_wait = min(2 * self._open_wait, MAX_OPEN_WAIT_SECONDS)
        self._unavailable = unavailable_reason(code, driver_is_loaded=self._is_driver_loaded())
        self._error = name
        self._visible = None
        self._forget_handles()
        for gpu in self._gpus.values():
            gpu.sample = without_gauges(gpu.sample, GpuState.ERROR, name)

    def _forget_handles(self) -> None:
        """Drop what belonged to the opened library."""
        self._events.forget()
        for gpu in self._gpus.values():
            gpu.handle = None
            gpu.find_at = 0.0

    def _close(self, code: int, *, keep_handle_count: bool) -> None:
        """Close the library after it said that it is of no more use.

        Not while a thread hangs inside: a shutdown would wait for it, or pull the ground away.
        """
        if not keep_handle_count and code != pynvml.NVML_ERROR_UNINITIALIZED:
            self._shutdown()
        self._note_closed(code)

    def _shutdown(self) -> None:
        try:
            self._calls.call(PART_INIT, pynvml.nvmlShutdown)
        except pynvml.NVMLError as error:
            self._calls.note_failed(error.value)

    def _reopen_if_lost(self, skip: frozenset[str]) -> None:
        """Begin anew when a GPU, or every one, has been gone for a long time."""
        now = self._clock()
        answering = [gpu.sample.state is GpuState.OK for gpu in self._gpus.values()]
        if skip or (answering and all(answering)):
            self._whole_at = now
            self._lost_wait = self._lost_wait if skip else LOST_SECONDS
            return
        if now - self._whole_at < self._lost_wait:
            return
        self._lost_wait = min(2 * self._lost_wait, MAX_LOST_SECONDS if any(answering) else MAX_DEAD_SECONDS)
        self._shutdown()
        self._open = False
        self._open_at = now
        self._forget_handles()

    # --- which GPUs there are ----------------------------------------------------------------------------------

    def _discover(self, skip: frozenset[str]) -> None:
        """Count the GPUs now and then, and meet those that are new, or whose index moved."""
        now = self._clock()
        if now < self._discover_at or "count" in skip:
            return
        self._discovery_error = None
        visible = self._read_count()
        known = {gpu.index for gpu in self._gpus.values() if gpu.handle is not None}
        unmet = [index for index in range(visible or 0) if visible != self._visible or index not in known]
        self._visible = visible
        for index in unmet:
            if f"index {index}" not in skip:
                self._meet(index, skip)
        self._gpus = dict(sorted(self._gpus.items(), key=lambda item: item[1].index))
        # Only now, so that where one of these calls hangs, the next thread has the rest to do at once; and not while
        # one is left out, so that it is met as soon as it returns.
        if not any(f"index {index}" in skip for index in unmet):
            self._discover_at = now + DISCOVERY_SECONDS

    def _read_count(self) -> int | None:
        try:
            raw = self._calls.call("count", pynvml.nvmlDeviceGetCount)
        except pynvml.NVMLError as error:
            if error.value in LIBRARY_GONE:
                raise LibraryLost(error.value) from error
            self._discovery_error = error.value
            self._calls.note_failed(error.value)
            return None
        return self._calls.checked("count", plausible.gpu_count(raw))

    def _meet(self, index: int, skip: frozenset[str]) -> None:
        """Learn who has this index. A GPU that does not tell its UUID has no identity and is not shown."""
        part = f"index {index}"
        try:
            handle = self._calls.call(part, pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = self._calls.checked("uuid", plausible.text(self._calls.call(part, pynvml.nvmlDeviceGetUUID, handle)))
        except pynvml.NVMLError as error:
            if error.value in LIBRARY_GONE:
                raise LibraryLost(error.value) from error
            self._discovery_error = error.value
            self._calls.note_failed(error.value)
            return
        except ValueError:
            self._calls.note_implausible("uuid")
            return
        if uuid is None or uuid in skip:
            return
        gpu = self._gpus.setdefault(uuid, Gpu(uuid, index))
        if gpu.handle is None or gpu.index != index:
            self._take(gpu, index, handle)

    def _take(self, gpu: Gpu, index: int | None, handle: Handle) -> None:
        """Take a handle as that of this GPU, and read what does not change."""
        gpu.index = gpu.index if index is None else index
        gpu.find_wait = 1.0
        self._events.name(handle, gpu.uuid)
        try:
            self._values.meet(gpu, handle)
        except GpuLost as lost:
            self._lose(gpu, str(lost))
            return
        gpu.handle = handle

    def _lose(self, gpu: Gpu, error: str) -> None:
        gpu.handle = None
        gpu.find_at = self._clock() + gpu.find_wait
        gpu.find_wait = min(2 * gpu.find_wait, MAX_FIND_WAIT_SECONDS)
        gpu.sample = without_gauges(gpu.sample, GpuState.LOST, error)
        self._events.spoil()

    def _find(self, gpu: Gpu) -> bool:
        """Look for a lost GPU by its UUID; False while it is not there, or too soon."""
        if self._clock() < gpu.find_at:
            return False
        wait = gpu.find_wait
        try:
            handle = self._calls.call(gpu.uuid, pynvml.nvmlDeviceGetHandleByUUID, gpu.uuid)
        except pynvml.NVMLError as error:
            if error.value in LIBRARY_GONE:
                raise LibraryLost(error.value) from error
            gpu.find_at = self._clock() + wait
            gpu.find_wait = min(2 * wait, MAX_FIND_WAIT_SECONDS)
            if gpu.sample.state is not GpuState.LOST:
                gpu.sample = without_gauges(gpu.sample, GpuState.LOST, error_name(error.value))
            return False
        self._take(gpu, None, handle)
        # A driver may give the handle and lose the GPU at the first question: the waits go on growing until a
        # reading worked.
        gpu.find_wait = min(2 * wait, MAX_FIND_WAIT_SECONDS)
        return gpu.handle is not None

    # --- readings --------------------------------------------------------------------------------------------

    def _read_gpu(self, gpu: Gpu, *, processes: bool) -> None:
        if gpu.handle is None and not self._find(gpu):
            return
        gpu.answered, gpu.error = False, None
        try:
            sample = self._values.sample(gpu, processes=processes)
        except GpuLost as lost:
            self._lose(gpu, str(lost))
            return
        if gpu.answered or gpu.error is None:
            gpu.sample = sample
            gpu.find_wait = 1.0
        else:
            gpu.sample = without_gauges(gpu.sample, GpuState.ERROR, gpu.error)

    def _read_memory_of(self, gpu: Gpu) -> None:
        try:
            self._values.read_memory(gpu)
        except GpuLost as lost:
            self._lose(gpu, str(lost))

    # --- the result ------------------------------------------------------------------------------------------

    def _reading(self, xids: tuple[Xid, ...]) -> Reading:
        unavailable, error = self._unavailable, self._error
        if unavailable is None and self._open and not self._gpus:
            unavailable, error = self._why_no_gpu()
        return Reading(
            gpus=tuple(gpu.sample for gpu in self._gpus.values()),
            xids=xids,
            unavailable=unavailable,
            error=error,
            message=None if unavailable is None else sentence(unavailable, error),
            driver_version=self._driver_version,
            visible=self._visible,
            unsupported=self._calls.unsupported.copy(),
            implausible=self._calls.implausible.copy(),
            failed=self._calls.failed.copy(),
        )

    def _why_no_gpu(self) -> tuple[UnavailableReason, str | None]:
        """Say why an open library shows no GPU: none is counted, or none of those counted lets itself be opened."""
        if self._visible is None and self._discovery_error is not None:
            reason = unavailable_reason(self._discovery_error, driver_is_loaded=self._is_driver_loaded())
            return reason, error_name(self._discovery_error)
        error = None if self._discovery_error is None else error_name(self._discovery_error)
        return UnavailableReason.NO_DEVICE_ACCESS, error
