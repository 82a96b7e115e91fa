# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The one module that speaks NVML.

The library is opened once and kept: cycles of init and shutdown have hung drivers (go-nvml#152). It is opened again,
with back-off, when it was not there, or when it says that it lost its driver. A GPU is its UUID: indexes move and
handles die. Every reading is optional, every number is checked before it leaves.

Calls are what costs here: 5 a GPU and second (load, clocks' event reasons, one for field values with power and energy,
memory twice), one for events. Each 5 s a sixth for temperature, and more field values in the one there is.
"""

import ctypes
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
import pynvml

from verl_gpumonitor.model.vocabulary import GpuState, UnavailableReason

from . import plausible
from .host import driver_loaded
from .reader import PART_INIT, Reading, Xid, without_gauges
from .samples import GpuProcess, GpuSample
from .watch import CallWatch

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Handle = pynvml.c_nvmlDevice_t

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
SLOW_SECONDS: Final = 5.0
"""Time between two readings of what changes slowly (temperatures), or only ever adds up (traffic, memory errors).

In between the last ones stand; they go with the sample when the GPU does not answer."""
_MAX_EVENTS: Final = 64
_SUCCESS: Final = pynvml.NVML_SUCCESS
_MAX_XID: Final = 99_999
_ALL_LINKS: Final = 0xFFFFFFFF

NOT_OFFERED: Final = frozenset(
    {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA}
)
"""Not here, on this GPU or driver: quiet."""
_OLDER_SYMBOL: Final = frozenset(
    {
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
_GPU_GONE: Final = frozenset(
    {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND}
)
_LIBRARY_GONE: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
_ERROR_NAMES: Final[dict[int, str]] = {
    getattr(pynvml, name): name.removeprefix("NVML_ERROR_") for name in dir(pynvml) if name.startswith("NVML_ERROR_")
}
_CLOCKS_EVENT_REASONS: Final = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
_MAX_CLOCKS_EVENT_REASONS: Final = 0xFFFF
"""Bits of today end at 0x400; a word with higher ones is garbage."""

_POWER: Final = "power_watts"
_Fields = tuple[tuple[int, int, str, Callable[[float], float | None]], ...]
_QUICK_FIELDS: Final[_Fields] = (
    (pynvml.NVML_FI_DEV_POWER_AVERAGE, 0, _POWER, plausible.power_watts),
    (pynvml.NVML_FI_DEV_POWER_INSTANT, 0, _POWER, plausible.power_watts),
    (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0, "energy_joules", plausible.energy_joules),
)
"""Field, scope, name in a sample, check; NVML answers in this order.

Power: as nvmlDeviceGetPowerUsage has it, the mean of a second where the GPU offers that, else (A100 and older) the
moment's; its own call is for drivers that offer neither.
"""
_SLOW_FIELDS: Final[_Fields] = (
    (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0, "memory_temperature_celsius", plausible.temperature),
    (pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0, "ecc_uncorrected_errors", plausible.counter),
    (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, "pcie_sent_bytes", plausible.counter),
    (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, "pcie_received_bytes", plausible.counter),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS, "nvlink_sent_bytes", plausible.kibibytes),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS, "nvlink_received_bytes", plausible.kibibytes),
)
_SLOW: Final = ("temperature_celsius", *(field for _, _, field, _ in _SLOW_FIELDS))
"""Names in a sample of all that is read slowly."""
_FIELD_VALUE: Final = struct.Struct("=24xII8s")
"""nvmlFieldValue_t: (field, scope, time, latency,) type of value, return code, value. Read and written as bytes: the
binding's own structures run Python at each access, which was half the cost of a pass."""
_MEMORY_V1: Final = struct.Struct("=Q8xQ")
"""nvmlMemory_t: total, (free,) used."""
_MEMORY_V2: Final = struct.Struct("=8xQQ8xQ")
"""nvmlMemory_v2_t: (version, padding,) total, reserved, (free,) used."""


class _Questions:
    """What one call for field values asks."""

    __slots__ = ("array", "asked", "fields")

    def __init__(self, fields: _Fields) -> None:
        self.fields = fields
        self.asked = b"".join(struct.pack("=II32x", field, scope) for field, scope, _, _ in fields)
        self.array = ctypes.c_char * len(self.asked)


_QUICK_QUESTIONS: Final = _Questions(_QUICK_FIELDS)
_ALL_QUESTIONS: Final = _Questions(_QUICK_FIELDS + _SLOW_FIELDS)
_FIELD_NOT_OFFERED: Final = NOT_OFFERED | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
"""Drivers answer INVALID_ARGUMENT for the id of a field that they do not know yet."""
_VALUE_FORMATS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: struct.Struct("=d"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: struct.Struct("=I4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: struct.Struct("@L"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: struct.Struct("=Q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: struct.Struct("=q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: struct.Struct("=i4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: struct.Struct("=H6x"),
}

_MESSAGES: Final = {
    UnavailableReason.NO_LIBRARY: (
        "libnvidia-ml.so.1 is not in the sidecar's container: the node has no NVIDIA driver, or the container runtime"
        " gave the container none of the driver's files; see the chart's injection.visibility"
    ),
    UnavailableReason.DRIVER_NOT_LOADED: (
        "the NVIDIA kernel driver is not loaded on this node, or does not fit the library ({error}); after an update"
        " of the driver, pods that started before it need a restart"
    ),
    UnavailableReason.NO_DEVICE_ACCESS: (
        "NVML answers but shows no GPU ({error}): the sidecar's container has no access to the GPU devices; see the"
        " chart's injection.visibility"
    ),
    UnavailableReason.NVML_ERROR: "NVML cannot be used: {error}",
}


def error_name(code: int) -> str:
    """Return NVML's name of an error without its prefix, such as `GPU_IS_LOST`."""
    return _ERROR_NAMES.get(code, f"ERROR_{code}")


def unavailable_reason(code: int, *, driver_is_loaded: bool) -> UnavailableReason:
    """Say what an error at the opening of the library means.

    In a container without device nodes NVML claims that no driver is loaded, or fails with UNKNOWN; the kernel's own
    word (`/proc/driver/nvidia`) tells the two apart.
    """
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return UnavailableReason.NO_LIBRARY
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return UnavailableReason.NO_DEVICE_ACCESS
    if code in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_UNKNOWN) and driver_is_loaded:
        return UnavailableReason.NO_DEVICE_ACCESS
    if code in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
        return UnavailableReason.DRIVER_NOT_LOADED
    return UnavailableReason.NVML_ERROR


def close_library() -> None:
    """Close the library as this process inherited it: a forked child must open it anew. Quiet if it is not open."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


class _GpuLost(Exception):  # noqa: N818 - passes within this module
    """The GPU is gone; the text is NVML's name of the error."""


class _LibraryLost(Exception):  # noqa: N818
    """The library must be opened again."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Gpu:
    """One GPU that was seen, and its way back when it is lost."""

    __slots__ = ("answered", "error", "find_at", "find_wait", "handle", "index", "sample", "slow_at", "uuid")

    def __init__(self, uuid: str, index: int) -> None:
        self.uuid = uuid
        self.index = index
        self.handle: Handle | None = None
        self.sample = GpuSample(uuid=uuid, index=index)
        self.find_at = 0.0
        self.find_wait = 1.0
        self.slow_at = 0.0
        """When what is read slowly is due."""
        self.answered = False
        self.error: str | None = None


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
        self._slow_seconds = slow_seconds
        self._clock = clock
        self._is_driver_loaded = is_driver_loaded
        self._watch = CallWatch(clock)
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
        self._gpus: dict[str, _Gpu] = {}
        self._events: pynvml.c_nvmlEventSet_t | None = None
        self._events_stale = False
        self._events_renew_at = 0.0
        self._registered: set[str] = set()
        self._uuid_by_address: dict[int | None, str] = {}
        self._unsupported: dict[str, int] = {}
        self._implausible: dict[str, int] = {}
        self._failed: dict[str, int] = {}

    def use(self, watch: CallWatch) -> None:
        """Mark calls on this watch from now on: another thread takes over."""
        self._watch = watch

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
                xids = self._read_events(skip)
                self._reopen_if_lost(skip)
        except _LibraryLost as lost:
            self._close(lost.code, keep_handle_count=bool(skip))
        return self._reading(xids)

    def read_memory(self, *, skip: frozenset[str] = frozenset()) -> Reading:
        """Read the memory of each GPU that answered the last time."""
        try:
            for gpu in self._gpus.values():
                if gpu.handle is not None and gpu.sample.state is GpuState.OK and gpu.uuid not in skip:
                    self._read_memory_of(gpu)
        except _LibraryLost as lost:
            self._close(lost.code, keep_handle_count=bool(skip))
        return self._reading(())

    # --- calls -------------------------------------------------------------------------------------------------

    def _call(self, part: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make one call under the watch. Raises NVMLError, and Abandoned if it came back too late."""
        watch = self._watch
        watch.begin(part, function.__name__)
        try:
            return function(*args, **kwargs)
        finally:
            watch.end()

    def _offered(self, gpu: _Gpu, field: str, function: Callable[[Handle], T], handle: Handle) -> T | None:
        """Return the reading; None where this GPU or driver does not offer it, or it failed (which is counted)."""
        try:
            result = self._call(gpu.uuid, function, handle)
        except pynvml.NVMLError as error:
            self._note_error(gpu, field, error.value)
            return None
        except (ValueError, IndexError):  # the binding chokes on garbage: bytes that are no text, an absurd count
            _count(self._implausible, field)
            return None
        gpu.answered = True
        return result

    def _note_error(self, gpu: _Gpu, field: str, code: int) -> None:
        """Count a failed call. Raises when it means that the GPU or the library is gone."""
        if code in NOT_OFFERED:
            _count(self._unsupported, field)
            return
        name = error_name(code)
        _count(self._failed, name)
        if code in _LIBRARY_GONE:
            raise _LibraryLost(code)
        if code in _GPU_GONE:
            raise _GpuLost(name)
        gpu.error = gpu.error or name

    def _newest(self, gpu: _Gpu, field: str, variants: tuple[Callable[[Handle], R], ...]) -> R | None:
        """Ask by the newest symbol that the library has.

        All are tried at each pass: to find one missing costs no call, while to remember it from one GPU's answer would
        cost the others their values.
        """
        for variant in variants:
            if gpu.handle is None:
                return None
            try:
                result = self._call(gpu.uuid, variant, gpu.handle)
            except pynvml.NVMLError as error:
                if error.value in _OLDER_SYMBOL:
                    continue
                self._note_error(gpu, field, error.value)
                return None
            except (ValueError, IndexError):
                _count(self._implausible, field)
                return None
            gpu.answered = True
            return result
        _count(self._unsupported, field)
        return None

    def _checked(self, field: str, value: T | None) -> T | None:
        """Count a reading that the checks threw away, and hand it on."""
        if value is None:
            _count(self._implausible, field)
        return value

    # --- opening and closing ---------------------------------------------------------------------------------

    def _ensure_open(self) -> bool:
        if self._open:
            return True
        if self._clock() < self._open_at:
            return False
        try:
            self._call(PART_INIT, pynvml.nvmlInitWithFlags, 0)
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
            raw = self._call(PART_INIT, pynvml.nvmlSystemGetDriverVersion)
        except (pynvml.NVMLError, ValueError):
            return None
        return self._checked("driver_version", plausible.text(raw))

    def _note_closed(self, code: int) -> None:
        """Remember why there is no library, and when to look again."""
        name = error_name(code)
        _count(self._failed, name)
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
        self._events = None
        self._events_stale = False
        self._registered.clear()
        self._uuid_by_address.clear()
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
            self._call(PART_INIT, pynvml.nvmlShutdown)
        except pynvml.NVMLError as error:
            _count(self._failed, error_name(error.value))

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
            raw = self._call("count", pynvml.nvmlDeviceGetCount)
        except pynvml.NVMLError as error:
            if error.value in _LIBRARY_GONE:
                raise _LibraryLost(error.value) from error
            self._discovery_error = error.value
            _count(self._failed, error_name(error.value))
            return None
        return self._checked("count", plausible.gpu_count(raw))

    def _meet(self, index: int, skip: frozenset[str]) -> None:
        """Learn who has this index. A GPU that does not tell its UUID has no identity and is not shown."""
        part = f"index {index}"
        try:
            handle = self._call(part, pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = self._checked("uuid", plausible.text(self._call(part, pynvml.nvmlDeviceGetUUID, handle)))
        except pynvml.NVMLError as error:
            if error.value in _LIBRARY_GONE:
                raise _LibraryLost(error.value) from error
            self._discovery_error = error.value
            _count(self._failed, error_name(error.value))
            return
        except ValueError:
            _count(self._implausible, "uuid")
            return
        if uuid is None or uuid in skip:
            return
        gpu = self._gpus.setdefault(uuid, _Gpu(uuid, index))
        if gpu.handle is None or gpu.index != index:
            self._take(gpu, index, handle)

    def _take(self, gpu: _Gpu, index: int | None, handle: Handle) -> None:
        """Take a handle as that of this GPU, and read what does not change."""
        gpu.index = gpu.index if index is None else index
        gpu.find_wait = 1.0
        self._uuid_by_address[ctypes.cast(handle, ctypes.c_void_p).value] = gpu.uuid
        try:
            name = self._offered(gpu, "model", pynvml.nvmlDeviceGetName, handle)
            limit = self._offered(gpu, "power_limit_watts", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        except _GpuLost as lost:
            self._lose(gpu, str(lost))
            return
        gpu.sample = msgspec.structs.replace(
            gpu.sample,
            index=gpu.index,
            model=gpu.sample.model if name is None else self._checked("model", plausible.text(name)),
            power_limit_watts=None
            if limit is None
            else self._checked("power_limit_watts", plausible.power_watts(limit)),
        )
        gpu.handle = handle

    def _lose(self, gpu: _Gpu, error: str) -> None:
        gpu.handle = None
        gpu.find_at = self._clock() + gpu.find_wait
        gpu.find_wait = min(2 * gpu.find_wait, MAX_FIND_WAIT_SECONDS)
        gpu.sample = without_gauges(gpu.sample, GpuState.LOST, error)
        self._events_stale = True

    def _find(self, gpu: _Gpu) -> bool:
        """Look for a lost GPU by its UUID; False while it is not there, or too soon."""
        if self._clock() < gpu.find_at:
            return False
        wait = gpu.find_wait
        try:
            handle = self._call(gpu.uuid, pynvml.nvmlDeviceGetHandleByUUID, gpu.uuid)
        except pynvml.NVMLError as error:
            if error.value in _LIBRARY_GONE:
                raise _LibraryLost(error.value) from error
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

    def _read_gpu(self, gpu: _Gpu, *, processes: bool) -> None:
        if gpu.handle is None and not self._find(gpu):
            return
        gpu.answered, gpu.error = False, None
        try:
            sample = self._sample(gpu, processes=processes)
        except _GpuLost as lost:
            self._lose(gpu, str(lost))
            return
        if gpu.answered or gpu.error is None:
            gpu.sample = sample
            gpu.find_wait = 1.0
        else:
            gpu.sample = without_gauges(gpu.sample, GpuState.ERROR, gpu.error)

    def _sample(self, gpu: _Gpu, *, processes: bool) -> GpuSample:
        """Read one GPU. Raises _GpuLost and _LibraryLost."""
        handle = gpu.handle
        if handle is None:
            raise _GpuLost("NOT_FOUND")
        rates = self._offered(gpu, "utilization", pynvml.nvmlDeviceGetUtilizationRates, handle)
        others = self._read_slow_and_quick(gpu, handle)
        memory = self._read_memory(gpu)
        check = self._checked
        return GpuSample(
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.sample.model,
            power_limit_watts=gpu.sample.power_limit_watts,
            utilization=None if rates is None else check("utilization", plausible.percent(rates.gpu)),
            memory_bandwidth_utilization=(
                None if rates is None else check("memory_bandwidth_utilization", plausible.percent(rates.memory))
            ),
            throttled=self._read_throttled(gpu),
            processes=(self._read_processes(gpu, memory["memory_total_bytes"]) if processes else gpu.sample.processes),
            **others,
            **memory,
            taken_at=self._clock(),
        )

    def _read_memory_of(self, gpu: _Gpu) -> None:
        """Read memory alone, into the sample that is there."""
        try:
            values = self._read_memory(gpu)
        except _GpuLost as lost:
            self._lose(gpu, str(lost))
            return
        gpu.sample = msgspec.structs.replace(gpu.sample, **values)

    def _read_memory(self, gpu: _Gpu) -> dict[str, Any]:
        """Return the memory fields of a sample. The older call counts the driver's reserve as used."""
        info = self._newest(gpu, "memory_used_bytes", (_memory_v2, _memory_v1))
        if info is None:
            return {"memory_used_bytes": None, "memory_reserved_bytes": None, "memory_total_bytes": None}
        total = self._checked("memory_total_bytes", plausible.memory_total(info[0]))
        used = self._checked("memory_used_bytes", plausible.memory_part(info[1], total))
        reserved = info[2]
        if reserved is not None:
            reserved = self._checked("memory_reserved_bytes", plausible.memory_part(reserved, total))
        return {
            "memory_used_bytes": used,
            "memory_reserved_bytes": reserved,
            "memory_total_bytes": total,
            "memory_taken_at": self._clock() if used is not None else gpu.sample.memory_taken_at,
        }

    def _read_throttled(self, gpu: _Gpu) -> tuple[str, ...] | None:
        raw = self._newest(
            gpu,
            "throttled",
            (pynvml.nvmlDeviceGetCurrentClocksEventReasons, pynvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        )
        return None if raw is None else self._checked("throttled", _reason_names(raw))

    def _read_slow_and_quick(self, gpu: _Gpu, handle: Handle) -> dict[str, Any]:
        """Read power, energy, and what is read slowly if it is due; else take that over from the sample before."""
        now, before = self._clock(), gpu.sample
        if now < gpu.slow_at and before.taken_at is not None and before.state is GpuState.OK:
            found = self._read_fields(gpu, _quick_field_values, _QUICK_QUESTIONS)
            found.update({name: getattr(before, name) for name in _SLOW})
        else:
            found = self._read_fields(gpu, _field_values, _ALL_QUESTIONS)
            heat = self._offered(gpu, "temperature_celsius", _temperature, handle)
            if heat is not None:
                found["temperature_celsius"] = self._checked("temperature_celsius", plausible.temperature(heat))
            gpu.slow_at = now + self._slow_seconds
        if not found.get(_POWER):
            power = self._offered(gpu, _POWER, pynvml.nvmlDeviceGetPowerUsage, handle)
            found[_POWER] = None if power is None else self._checked(_POWER, plausible.power_watts(power))
        return found

    def _read_fields(
        self, gpu: _Gpu, function: Callable[[Handle], ctypes.Array[ctypes.c_char]], questions: _Questions
    ) -> dict[str, Any]:
        """Read many field values in one call. A field that is not offered has no key."""
        found: dict[str, Any] = {}
        values = self._offered(gpu, "fields", function, gpu.handle) if gpu.handle is not None else None
        if values is None:
            return found
        answers = _FIELD_VALUE.iter_unpack(values)
        for (_, _, field, check), (kind, code, raw) in zip(questions.fields, answers, strict=True):
            if code == _SUCCESS:
                # The first of two answers for one name is the better one; 0 W is none, for a GPU that can answer.
                if found.get(field):
                    continue
                form = _VALUE_FORMATS.get(kind)
                value = found[field] = None if form is None else check(form.unpack(raw)[0])
                if value is None:
                    _count(self._implausible, field)
            elif code not in _FIELD_NOT_OFFERED:
                self._note_error(gpu, field, code)
            elif field != _POWER:
                _count(self._unsupported, field)
        return found

    def _read_processes(self, gpu: _Gpu, total: int | None) -> tuple[GpuProcess, ...] | None:
        found = self._newest(
            gpu,
            "processes",
            (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2),
        )
        if found is None:
            return None
        memory: dict[int, int | None] = {}
        for process in found:
            if (pid := self._checked("processes", plausible.pid(process.pid))) is None:
                continue
            used = process.usedGpuMemory
            used = None if used is None else self._checked("processes", plausible.memory_part(used, total))
            memory[pid] = _larger(memory.get(pid), used)
        return tuple(GpuProcess(pid=pid, memory_used_bytes=used) for pid, used in sorted(memory.items()))

    # --- events ----------------------------------------------------------------------------------------------

    def _read_events(self, skip: frozenset[str]) -> tuple[Xid, ...]:
        """Return the Xids since the last time, without waiting. Quiet where the driver offers no events."""
        if "events" in skip:
            return ()
        xids: list[Xid] = []
        while self._events is not None and len(xids) < _MAX_EVENTS:
            event = self._next_event()
            if event is None:
                break
            if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                xids.extend(self._xid(event))
        if self._events_stale and self._clock() >= self._events_renew_at:
            self._free_events()
        self._register_new(skip)
        return tuple(xids)

    def _next_event(self) -> pynvml.c_nvmlEventData_t | None:
        if self._events is None:
            return None
        try:
            return self._call("events", pynvml.nvmlEventSetWait_v2, self._events, 0)
        except pynvml.NVMLError as error:
            if error.value in _LIBRARY_GONE:
                raise _LibraryLost(error.value) from error
            # One lost GPU spoils the whole set; a new one is made of those that are left.
            self._events_stale = self._events_stale or error.value in _GPU_GONE
            return None

    def _xid(self, event: pynvml.c_nvmlEventData_t) -> Iterable[Xid]:
        uuid = self._uuid_by_address.get(ctypes.cast(event.device, ctypes.c_void_p).value)
        if uuid is None or not 0 < event.eventData <= _MAX_XID:
            _count(self._implausible, "xid_errors")
            return
        yield Xid(uuid=uuid, code=event.eventData)

    def _free_events(self) -> None:
        """Let the event set go, so that a new one is made of the GPUs that are there."""
        self._events_stale = False
        self._events_renew_at = self._clock() + DISCOVERY_SECONDS
        events, self._events = self._events, None
        self._registered.clear()
        if events is None:
            return
        try:
            self._call("events", pynvml.nvmlEventSetFree, events)
        except pynvml.NVMLError as error:
            _count(self._failed, error_name(error.value))

    def _register_new(self, skip: frozenset[str]) -> None:
        """Ask for the Xids of GPUs that are new, or back. Each is asked for once, whatever the answer."""
        new = [gpu for gpu in self._gpus.values() if gpu.uuid not in self._registered and gpu.uuid not in skip]
        for gpu in new:
            if gpu.handle is None:
                continue
            try:
                if self._events is None:
                    self._events = self._call("events", pynvml.nvmlEventSetCreate)
                self._registered.add(gpu.uuid)
                wanted = pynvml.nvmlEventTypeXidCriticalError
                self._call(gpu.uuid, pynvml.nvmlDeviceRegisterEvents, gpu.handle, wanted, self._events)
            except pynvml.NVMLError as error:
                self._registered.add(gpu.uuid)
                if error.value in NOT_OFFERED:
                    _count(self._unsupported, "xid_errors")
                else:
                    _count(self._failed, error_name(error.value))

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
            message=None if unavailable is None else _MESSAGES[unavailable].format(error=error or "it counts none"),
            driver_version=self._driver_version,
            visible=self._visible,
            unsupported=self._unsupported.copy(),
            implausible=self._implausible.copy(),
            failed=self._failed.copy(),
        )

    def _why_no_gpu(self) -> tuple[UnavailableReason, str | None]:
        """Say why an open library shows no GPU: none is counted, or none of those counted lets itself be opened."""
        if self._visible is None and self._discovery_error is not None:
            reason = unavailable_reason(self._discovery_error, driver_is_loaded=self._is_driver_loaded())
            return reason, error_name(self._discovery_error)
        error = None if self._discovery_error is None else error_name(self._discovery_error)
        return UnavailableReason.NO_DEVICE_ACCESS, error


def _temperature(handle: Handle) -> int:
    return pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)


def _memory_v2(handle: Handle) -> tuple[int, int, int | None]:
    """Return total, used and reserved bytes."""
    total, reserved, used = _MEMORY_V2.unpack(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2))
    return total, used, reserved


def _memory_v1(handle: Handle) -> tuple[int, int, int | None]:
    """Return total and used bytes; the reserved ones are not told."""
    total, used = _MEMORY_V1.unpack(pynvml.nvmlDeviceGetMemoryInfo(handle))
    return total, used, None


def _field_values(handle: Handle) -> ctypes.Array[ctypes.c_char]:
    """Ask for all field values."""
    return _answers(handle, _ALL_QUESTIONS)


def _quick_field_values(handle: Handle) -> ctypes.Array[ctypes.c_char]:
    """Ask for those that change at once."""
    return _answers(handle, _QUICK_QUESTIONS)


def _answers(handle: Handle, questions: _Questions) -> ctypes.Array[ctypes.c_char]:
    """Ask. The binding's function writes the questions one by one, in Python.

    The answer has memory of its own at each call: a hung one may write into it at any later time.
    """
    function = getattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    values = questions.array.from_buffer_copy(questions.asked)
    code = function(handle, len(questions.fields), values)
    if code != _SUCCESS:
        raise pynvml.NVMLError(code)
    return values


@lru_cache(maxsize=64)
def _reason_names(raw: int) -> tuple[str, ...] | None:
    """Return the clocks' event reasons by name; None for garbage. Bits without a name are passed over."""
    if not 0 <= raw <= _MAX_CLOCKS_EVENT_REASONS:
        return None
    return tuple(name for bit, name in _CLOCKS_EVENT_REASONS if raw & bit)


def _larger(one: int | None, other: int | None) -> int | None:
    """Return the larger of two, as far as they are known: some drivers list a process twice."""
    return max((value for value in (one, other) if value is not None), default=None)


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1
