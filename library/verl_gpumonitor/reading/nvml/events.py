# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Xids, by an event set of NVML."""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import pynvml

from verl_gpumonitor.reading.reader import Xid

from .calls import Calls
from .errors import GPU_GONE, LIBRARY_GONE, NOT_OFFERED, LibraryLost
from .gpu import Gpu, Handle

PART: Final = "events"
"""Of the library, which is left out when a call about events hangs."""
RENEW_SECONDS: Final = 10.0
"""Shortest time between two event sets."""
_MAX_EVENTS: Final = 64
_MAX_XID: Final = 99_999


class Events:
    """The event set of an open library. Raises LibraryLost."""

    def __init__(self, calls: Calls, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._clock = clock
        self._events: pynvml.c_nvmlEventSet_t | None = None
        self._stale = False
        self._renew_at = 0.0
        self._registered: set[str] = set()
        self._uuid_by_address: dict[int | None, str] = {}

    def forget(self) -> None:
        """Drop what belonged to a library that is closed."""
        self._events = None
        self._stale = False
        self._registered.clear()
        self._uuid_by_address.clear()

    def name(self, handle: Handle, uuid: str) -> None:
        """Learn whose handle this is: events name it alone."""
        self._uuid_by_address[ctypes.cast(handle, ctypes.c_void_p).value] = uuid

    def spoil(self) -> None:
        """Hear that a GPU was lost: the set it is in is of no more use."""
        self._stale = True

    def read(self, gpus: Mapping[str, Gpu], skip: frozenset[str]) -> tuple[Xid, ...]:
        """Return the Xids since the last time, without waiting. Quiet where the driver offers no events."""
        if PART in skip:
            return ()
        xids: list[Xid] = []
        while self._events is not None and len(xids) < _MAX_EVENTS:
            event = self._next_event()
            if event is None:
                break
            if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                xids.extend(self._xid(event))
        if self._stale and self._clock() >= self._renew_at:
            self._free_events()
        self._register_new(gpus, skip)
        return tuple(xids)

    def _next_event(self) -> pynvml.c_nvmlEventData_t | None:
        if self._events is None:
            return None
        try:
            return self._calls.call(PART, pynvml.nvmlEventSetWait_v2, self._events, 0)
        except pynvml.NVMLError as error:
            if error.value in LIBRARY_GONE:
                raise LibraryLost(error.value) from error
            # One lost GPU spoils the whole set; a new one is made of those that are left.
            self._stale = self._stale or error.value in GPU_GONE
            return None

    def _xid(self, event: pynvml.c_nvmlEventData_t) -> Iterable[Xid]:
        uuid = self._uuid_by_address.get(ctypes.cast(event.device, ctypes.c_void_p).value)
        if uuid is None or not 0 < event.eventData <= _MAX_XID:
            self._calls.note_implausible("xid_errors")
            return
        yield Xid(uuid=uuid, code=event.eventData)

    def _free_events(self) -> None:
        """Let the event set go, so that a new one is made of the GPUs that are there."""
        self._stale = False
        self._renew_at = self._clock() + RENEW_SECONDS
        events, self._events = self._events, None
        self._registered.clear()
        if events is None:
            return
        try:
            self._calls.call(PART, pynvml.nvmlEventSetFree, events)
        except pynvml.NVMLError as error:
            self._calls.note_failed(error.value)

    def _register_new(self, gpus: Mapping[str, Gpu], skip: frozenset[str]) -> None:
        """Ask for the Xids of GPUs that are new, or back. Each is asked for once, whatever the answer."""
        new = [gpu for gpu in gpus.values() if gpu.uuid not in self._registered and gpu.uuid not in skip]
        for gpu in new:
            if gpu.handle is None:
                continue
            try:
                if self._events is None:
                    self._events = self._calls.call(PART, pynvml.nvmlEventSetCreate)
                self._registered.add(gpu.uuid)
                wanted = pynvml.nvmlEventTypeXidCriticalError
                self._calls.call(gpu.uuid, pynvml.nvmlDeviceRegisterEvents, gpu.handle, wanted, self._events)
            except pynvml.NVMLError as error:
                self._registered.add(gpu.uuid)
                if error.value in NOT_OFFERED:
                    self._calls.note_unsupported("xid_errors")
                else:
                    self._calls.note_failed(error.value)
