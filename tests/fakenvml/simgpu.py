# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Use and control simulated GPUs: programs allocate and compute, tests set values and faults.

The GPUs live in a memory-mapped state file (state.h describes it; the C library of this folder
answers NVML calls from it). `FAKENVML_STATE` names the file, /run/fakenvml/state is the default.

For programs, `Gpu`: allocate, free, busy, power. What a process holds vanishes when it dies, even
by SIGKILL: its lock on the record goes with it. For tests, the functions `init`, `set_values`,
`fail`, `delay`, `hang`, `xid`, ... and the same on the command line (`python simgpu.py --help`).

One file, standard library only, so that it can be copied beside any program. Python 3.9 or newer.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import math
import mmap
import os
import platform
import re
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Union

MAGIC = 0x4C4D564E454B4146
VERSION = 1
DEFAULT_PATH = "/run/fakenvml/state"

MAX_GPUS = 32
MAX_READINGS = 64
MAX_CONTEXTS = 256
MAX_FAULTS = 64
MAX_EVENTS = 256
MAX_CALLS = 1024
MAX_CLIENTS = 64

LOCK_CHANGE = 1 << 40
LOCK_FOLD = LOCK_CHANGE + 256
LOCK_CONTEXT = LOCK_CHANGE + 4096

# Open-file-description locks. As numbers: Python built on old headers lacks the names.
F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 36, 37, 38
FLOCK = struct.Struct("@hhqqi4x")

READINGS = (
    "gpu_utilization_percent",
    "memory_utilization_percent",
    "memory_used_bytes",
    "memory_free_bytes",
    "memory_total_bytes",
    "memory_reserved_bytes",
    "bar1_used_bytes",
    "power_milliwatts",
    "power_limit_milliwatts",
    "energy_millijoules",
    "temperature_celsius",
    "memory_temperature_celsius",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "video_clock_mhz",
    "performance_state",
    "fan_speed_percent",
    "encoder_utilization_percent",
    "decoder_utilization_percent",
    "pcie_tx_kilobytes_per_second",
    "pcie_rx_kilobytes_per_second",
    "pcie_tx_bytes",
    "pcie_rx_bytes",
    "pcie_replays",
    "clocks_event_reasons",
    "ecc_corrected_volatile",
    "ecc_uncorrected_volatile",
    "ecc_corrected_aggregate",
    "ecc_uncorrected_aggregate",
    "remapped_rows_correctable",
    "remapped_rows_uncorrectable",
    "remapped_rows_pending",
    "remapped_rows_failure",
    "retired_pages_corrected",
    "retired_pages_uncorrected",
    "retired_pages_pending",
    "nvlink_tx_kibibytes",
    "nvlink_rx_kibibytes",
    "nvlink_crc_errors",
    "nvlink_replay_errors",
    "nvlink_recovery_errors",
    "nvlink_links",
    "compute_mode",
    "persistence_mode",
    "mig_mode",
)
"""What a GPU reports, in the order of the state file."""

MODE_SIMULATED, MODE_FIXED, MODE_DOUBLE, MODE_ERROR = range(4)
FAULT_ERROR, FAULT_SLEEP, FAULT_SPIN, FAULT_HANG = 1, 2, 3, 4
SCOPE_ANY, SCOPE_FUNCTION, SCOPE_INIT, SCOPE_FAMILY = range(4)
CONTEXT_COMPUTE, CONTEXT_GRAPHICS, CONTEXT_MPS = 1, 2, 4
PROCESS_MODES = ("namespace", "namespace-no-memory", "host")
"""Process lists of drivers from 565 on, of 535.113 to 560, and of older ones."""

NOT_AVAILABLE = 2**64 - 1
"""NVML's "value not available"; in 32-bit results it becomes 2^32-1."""
BLANK = 9223372036854775794
"""The blank that field values and exporters built on them have shown (2^63 - 14)."""

GPU_IS_LOST = 15
XID_EVENT = 8

TEMPERATURE_SECONDS = 10.0
NVLINK_TX_KIBIBYTES_PER_SECOND = 20.0 * 1024 * 1024
NVLINK_RX_SHARE = 0.75

# ---- layout; a test compares it with the C side ----

u32, u64, i32, f64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_double


class FakeGpu(ctypes.Structure):
    """struct fake_gpu."""

    uuid: bytes
    name: bytes
    serial: bytes
    present: int
    minor: int
    pci_domain: int
    pci_bus: int
    pci_device: int
    pci_device_id: int
    pci_subsystem_id: int
    power_idle_milliwatts: int
    power_limit_milliwatts: int
    sm_clock_idle_mhz: int
    sm_clock_max_mhz: int
    memory_clock_mhz: int
    video_clock_mhz: int
    fold_sequence: int
    memory_total_bytes: int
    memory_reserved_bytes: int
    folded_at_ns: int
    energy_millijoules: float
    temperature_celsius: float
    nvlink_tx_kibibytes: float
    nvlink_rx_kibibytes: float
    mode: ctypes.Array[ctypes.c_uint32]
    value: ctypes.Array[ctypes.c_uint64]

    _fields_ = [
        ("uuid", ctypes.c_char * 80),
        ("name", ctypes.c_char * 96),
        ("serial", ctypes.c_char * 32),
        ("present", u32),
        ("minor", u32),
        ("pci_domain", u32),
        ("pci_bus", u32),
        ("pci_device", u32),
        ("pci_device_id", u32),
        ("pci_subsystem_id", u32),
        ("power_idle_milliwatts", u32),
        ("power_limit_milliwatts", u32),
        ("sm_clock_idle_mhz", u32),
        ("sm_clock_max_mhz", u32),
        ("memory_clock_mhz", u32),
        ("video_clock_mhz", u32),
        ("fold_sequence", u32),
        ("memory_total_bytes", u64),
        ("memory_reserved_bytes", u64),
        ("folded_at_ns", u64),
        ("energy_millijoules", f64),
        ("temperature_celsius", f64),
        ("nvlink_tx_kibibytes", f64),
        ("nvlink_rx_kibibytes", f64),
        ("mode", u32 * MAX_READINGS),
        ("value", u64 * MAX_READINGS),
    ]


class FakeContext(ctypes.Structure):
    """struct fake_context: one process on one GPU."""

    sequence: int
    used: int
    gpu: int
    kind: int
    pid: int
    host_pid: int
    pid_namespace: int
    started_at_ns: int
    memory_bytes: int
    busy_until_ns: int
    utilization: float
    memory_utilization: float
    power_watts: float

    _fields_ = [
        ("sequence", u32),
        ("used", u32),
        ("gpu", u32),
        ("kind", u32),
        ("pid", u32),
        ("host_pid", u32),
        ("pid_namespace", u64),
        ("started_at_ns", u64),
        ("memory_bytes", u64),
        ("busy_until_ns", u64),
        ("utilization", f64),
        ("memory_utilization", f64),
        ("power_watts", f64),
    ]


class FakeFault(ctypes.Structure):
    """struct fake_fault."""

    active: int
    kind: int
    scope: int
    gpu: int
    function_hash: int
    argument: int
    skip: int
    limit: int
    matched: int
    serial: int
    function: bytes

    _fields_ = [
        ("active", u32),
        ("kind", u32),
        ("scope", u32),
        ("gpu", i32),
        ("function_hash", u64),
        ("argument", u64),
        ("skip", u64),
        ("limit", u64),
        ("matched", u64),
        ("serial", u64),
        ("function", ctypes.c_char * 72),
    ]


class FakeEvent(ctypes.Structure):
    """struct fake_event."""

    sequence: int
    type: int
    data: int
    gpu: int
    gpu_instance: int
    compute_instance: int

    _fields_ = [
        ("sequence", u64),
        ("type", u64),
        ("data", u64),
        ("gpu", u32),
        ("gpu_instance", u32),
        ("compute_instance", u32),
        ("reserved", u32),
    ]


class FakeCall(ctypes.Structure):
    """struct fake_call: how often one function was called."""

    hash: int
    count: int
    name: bytes

    _fields_ = [("hash", u64), ("count", u64), ("name", ctypes.c_char * 72)]


class FakeClient(ctypes.Structure):
    """struct fake_client: one process that initialised the library."""

    pid_namespace: int
    pid: int
    inits: int
    started_at_ns: int
    last_call_at_ns: int
    calls: int
    inside: int
    max_inside: int
    threads: int

    _fields_ = [
        ("pid_namespace", u64),
        ("pid", u32),
        ("inits", u32),
        ("started_at_ns", u64),
        ("last_call_at_ns", u64),
        ("calls", u64),
        ("inside", u32),
        ("max_inside", u32),
        ("threads", u32),
        ("reserved", u32),
    ]


class FakeState(ctypes.Structure):
    """struct fake_state: the whole file."""

    magic: int
    version: int
    size: int
    gpu_count: int
    init_error: int
    process_mode: int
    duplicate_processes: int
    faults_active: int
    change: int
    max_concurrency: int
    cuda_version: int
    epoch: int
    contexts_limit: int
    driver_version: bytes
    nvml_version: bytes
    event_sequence: int
    gpus: ctypes.Array[FakeGpu]
    contexts: ctypes.Array[FakeContext]
    faults: ctypes.Array[FakeFault]
    events: ctypes.Array[FakeEvent]
    calls: ctypes.Array[FakeCall]
    clients: ctypes.Array[FakeClient]

    _fields_ = [
        ("magic", u64),
        ("version", u32),
        ("size", u32),
        ("gpu_count", u32),
        ("init_error", u32),
        ("process_mode", u32),
        ("duplicate_processes", u32),
        ("faults_active", u32),
        ("change", u32),
        ("max_concurrency", u32),
        ("cuda_version", u32),
        ("epoch", u32),
        ("contexts_limit", u32),
        ("driver_version", ctypes.c_char * 80),
        ("nvml_version", ctypes.c_char * 80),
        ("event_sequence", u64),
        ("gpus", FakeGpu * MAX_GPUS),
        ("contexts", FakeContext * MAX_CONTEXTS),
        ("faults", FakeFault * MAX_FAULTS),
        ("events", FakeEvent * MAX_EVENTS),
        ("calls", FakeCall * MAX_CALLS),
        ("clients", FakeClient * MAX_CLIENTS),
    ]


# ---- errors ----


class SimulatedGpuError(Exception):
    """Base of what this module raises."""


class NoDriverError(SimulatedGpuError):
    """There is no state file, or one of another version."""


class NoSuchGpuError(SimulatedGpuError):
    """No GPU of that index or UUID is visible to this process."""


class OutOfMemoryError(SimulatedGpuError, MemoryError):
    """The GPU has less free memory than asked for. Nothing was allocated."""


# ---- the file ----


def state_path(path: str | Path | None = None) -> Path:
    """Return `path`, or what FAKENVML_STATE says, or the default."""
    return Path(path or os.environ.get("FAKENVML_STATE") or DEFAULT_PATH)


def _lock(fd: int, command: int, kind: int, start: int) -> bool:
    """Take or give back one byte's lock; False where another holds it and we do not wait."""
    try:
        fcntl.fcntl(fd, command, FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
    except BlockingIOError:
        return False
    return True


def _locked(fd: int, start: int) -> bool:
    """Return whether another open file description holds the lock of this byte."""
    answer = fcntl.fcntl(fd, F_OFD_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
    return bool(FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class StateFile:
    """One mapped state file. Locks are held on a descriptor apart from the mapping's.

    mmap duplicates its descriptor and a forked child inherits it; a lock on that open file
    description would outlive its process in the child. The lock's own descriptor is closed in
    every forked child.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writable = os.access(path, os.W_OK)
        self._mutex = threading.RLock()
        self._lock_fd: int | None = None
        self.own_contexts: dict[int, int] = {}
        """GPU -> number of this process's context on it."""
        self._map()

    def _map(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDWR if self.writable else os.O_RDONLY)
        except FileNotFoundError as error:
            raise NoDriverError(f"no state file at {self.path}") from error
        try:
            self.inode = os.fstat(fd).st_ino
            if os.fstat(fd).st_size < ctypes.sizeof(FakeState):
                raise NoDriverError(f"{self.path} is too short to be a state file")
            access = mmap.ACCESS_WRITE if self.writable else mmap.ACCESS_READ
            self._memory = mmap.mmap(fd, ctypes.sizeof(FakeState), access=access)
        finally:
            os.close(fd)
        self._live = FakeState.from_buffer(self._memory) if self.writable else None
        if not _is_ours(self.state):
            raise NoDriverError(f"{self.path} is no state file of version {VERSION}")

    @property
    def state(self) -> FakeState:
        """The live state, or a copy of this moment where it may only be read."""
        return self._live or FakeState.from_buffer_copy(self._memory)

    @property
    def lock_fd(self) -> int:
        """The descriptor that carries this process's locks."""
        with self._mutex:
            if self._lock_fd is None:
                self._lock_fd = os.open(self.path, os.O_RDWR if self.writable else os.O_RDONLY)
                if os.fstat(self._lock_fd).st_ino != self.inode:
                    raise NoDriverError(f"{self.path} was replaced by another state file")
            return self._lock_fd

    def forget_after_fork(self) -> None:
        """In a forked child: leave the parent's locks and contexts alone."""
        fd, self._lock_fd = self._lock_fd, None
        self.own_contexts = {}
        self._mutex = threading.RLock()
        if fd is not None:
            os.close(fd)

    @contextmanager
    def changing(self) -> Iterator[FakeState]:
        """Hold the file for a change; afterwards wake the calls that wait for one."""
        if not self.writable:
            raise SimulatedGpuError(f"{self.path} may not be written")
        with self._mutex:
            _lock(self.lock_fd, F_OFD_SETLKW, fcntl.F_WRLCK, LOCK_CHANGE)
            try:
                yield self.state
            finally:
                self.state.change = (self.state.change + 1) % 2**32
                _lock(self.lock_fd, F_OFD_SETLK, fcntl.F_UNLCK, LOCK_CHANGE)
                _wake(self.state)

    def alive(self, number: int) -> bool:
        """Return whether a live process, perhaps this one, holds the context `number`."""
        if number in self.own_contexts.values():
            return True
        return _locked(self.lock_fd, LOCK_CONTEXT + number)

    def contexts(self, gpu: int) -> list[FakeContext]:
        """Return the live contexts on one GPU."""
        state = self.state
        return [
            context
            for number, context in enumerate(state.contexts[: state.contexts_limit])
            if context.used and context.gpu == gpu and self.alive(number)
        ]

    def fold(self, gpu: int) -> None:
        """Integrate energy, temperature and traffic of one GPU up to now. Within `changing`."""
        _lock(self.lock_fd, F_OFD_SETLKW, fcntl.F_WRLCK, LOCK_FOLD + gpu)
        try:
            load_of(self, gpu).fold_into(self.state.gpus[gpu])
        finally:
            _lock(self.lock_fd, F_OFD_SETLK, fcntl.F_UNLCK, LOCK_FOLD + gpu)


_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1
_open_files: dict[Path, StateFile] = {}
_open_mutex = threading.Lock()


def _wake(state: FakeState) -> None:
    """Wake hung calls and event waits at once; without it they look again within a second."""
    number = _FUTEX_NUMBERS.get(platform.machine())
    if number is None:
        return
    address = ctypes.addressof(state) + FakeState.change.offset  # type: ignore[attr-defined]
    _libc().syscall(ctypes.c_long(number), ctypes.c_void_p(address), _FUTEX_WAKE, 2**31 - 1, None, None, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def open_state(path: str | Path | None = None) -> StateFile:
    """Open the state file, once per process. Raises NoDriverError where there is none."""
    where = state_path(path)
    with _open_mutex:
        known = _open_files.get(where)
        try:
            if known is None or known.inode != where.stat().st_ino:
                known = _open_files[where] = StateFile(where)
        except FileNotFoundError as error:
            raise NoDriverError(f"no state file at {where}") from error
        return known


def _after_fork() -> None:
    global _open_mutex
    _open_mutex = threading.Lock()
    for known in _open_files.values():
        known.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)

# ---- load: the formulas of simulation.c; change both ----


@dataclass(frozen=True)
class Load:
    """What the live contexts make one GPU do."""

    busy: float
    """0..1: 1 - product(1 - u) over the contexts."""
    memory_busy: float
    power_milliwatts: float
    average_power_milliwatts: float
    """Since the readings were last folded."""
    memory_bytes: int
    now_ns: int

    def fold_into(self, gpu: FakeGpu) -> None:
        """Carry the integrated readings of `gpu` on to this load's moment."""
        seconds = max(0, self.now_ns - gpu.folded_at_ns) / 1e9
        target = 28.0 + 50.0 * self.average_power_milliwatts / gpu.power_limit_milliwatts
        sent = self.busy * NVLINK_TX_KIBIBYTES_PER_SECOND * seconds
        kept = math.exp(-seconds / TEMPERATURE_SECONDS)
        gpu.fold_sequence |= 1
        gpu.energy_millijoules += self.average_power_milliwatts * seconds
        gpu.temperature_celsius = target + (gpu.temperature_celsius - target) * kept
        gpu.nvlink_tx_kibibytes += sent
        gpu.nvlink_rx_kibibytes += sent * NVLINK_RX_SHARE
        gpu.folded_at_ns = self.now_ns
        gpu.fold_sequence = (gpu.fold_sequence + 1) % 2**32


def _busy_at(context: FakeContext, now_ns: int) -> bool:
    return context.busy_until_ns == 0 or now_ns < context.busy_until_ns


def _lasted(context: FakeContext, since_ns: int, now_ns: int) -> float:
    """Return the share of that time in which the context's load lasted."""
    if _busy_at(context, now_ns):
        return 1.0
    if now_ns <= since_ns or context.busy_until_ns <= since_ns:
        return 0.0
    return (context.busy_until_ns - since_ns) / (now_ns - since_ns)


def _context_power(gpu: FakeGpu, context: FakeContext) -> float:
    """Return what the context adds to idle power, in milliwatts."""
    if context.power_watts >= 0:
        return context.power_watts * 1000.0 - gpu.power_idle_milliwatts
    full = 0.9 * gpu.power_limit_milliwatts - gpu.power_idle_milliwatts
    return context.utilization * full


def load_of(file: StateFile, index: int) -> Load:
    """Return the load of the GPU with this index in the state file."""
    gpu = file.state.gpus[index]
    now_ns = time.monotonic_ns()
    contexts = file.contexts(index)
    busy = [context for context in contexts if _busy_at(context, now_ns)]
    idle = gpu.power_idle_milliwatts
    power = idle + sum(_context_power(gpu, context) for context in busy)
    average = idle + sum(
        _context_power(gpu, context) * _lasted(context, gpu.folded_at_ns, now_ns) for context in contexts
    )
    limit = gpu.power_limit_milliwatts
    return Load(
        busy=1.0 - math.prod(1.0 - context.utilization for context in busy),
        memory_busy=1.0 - math.prod(1.0 - context.memory_utilization for context in busy),
        power_milliwatts=max(0.0, min(power, limit)),
        average_power_milliwatts=max(0.0, min(average, limit)),
        memory_bytes=sum(context.memory_bytes for context in contexts),
        now_ns=now_ns,
    )


# ---- for programs ----


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def visible_gpus(file: StateFile | None = None) -> list[int]:
    """Return the numbers of the GPUs that this process sees, as the library numbers them.

    FAKENVML_GPU_<i>=1 chooses GPU i; without any such variable, and with FAKENVML_ALL=1, all.
    """
    state = (file or open_state()).state
    chosen = any(name.startswith("FAKENVML_GPU_") for name in os.environ)
    every = _is_set("FAKENVML_ALL") or not chosen
    return [
        index
        for index in range(state.gpu_count)
        if state.gpus[index].present and (every or _is_set(f"FAKENVML_GPU_{index}"))
    ]


class Gpu:
    """One GPU as this process sees it, and this process's context on it.

    The first `hold`, `allocate`, `busy` or `power` makes the context: from then on NVML lists the
    process. All `Gpu` objects of one GPU in one process share it. It ends with `close` or the
    process; a forked child starts without.
    """

    def __init__(self, gpu: int | str = 0, *, state: str | Path | None = None) -> None:
        """`gpu`: index among the visible GPUs, or UUID. Raises NoSuchGpuError, NoDriverError."""
        self._file = open_state(state)
        self.number = self._find(gpu)
        """Number in the state file, which is the index on the host."""

    def _find(self, gpu: int | str) -> int:
        visible = visible_gpus(self._file)
        if isinstance(gpu, int):
            if not 0 <= gpu < len(visible):
                raise NoSuchGpuError(f"GPU {gpu}: only {len(visible)} visible")
            return visible[gpu]
        for number in visible:
            if self._file.state.gpus[number].uuid.decode() == gpu:
                return number
        raise NoSuchGpuError(f"GPU {gpu} is not visible")

    @classmethod
    def cuda(cls, ordinal: int = 0) -> Gpu:
        """Return the GPU that CUDA would give as device `ordinal` (CUDA_VISIBLE_DEVICES)."""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            return cls(ordinal)
        entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
        if not 0 <= ordinal < len(entries):
            raise NoSuchGpuError(f"CUDA device {ordinal}: CUDA_VISIBLE_DEVICES={listed!r}")
        entry = entries[ordinal]
        return cls(int(entry) if entry.isdigit() else entry)

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self._file.state.gpus[self.number].uuid.decode()

    @property
    def memory_total_bytes(self) -> int:
        """All memory, the driver's reserved part included."""
        return self._file.state.gpus[self.number].memory_total_bytes

    @property
    def memory_free_bytes(self) -> int:
        """What can still be allocated, by anyone."""
        return _memory_free(self._file, self.number)

    @property
    def allocated_bytes(self) -> int:
        """What this process holds."""
        number = self._file.own_contexts.get(self.number)
        return 0 if number is None else self._file.state.contexts[number].memory_bytes

    def hold(self, *, kind: int = CONTEXT_COMPUTE) -> None:
        """Make this process's context, with nothing allocated, where there is none yet."""
        with self._changing(kind=kind):
            pass

    def allocate(self, size_bytes: int) -> None:
        """Allocate memory. Raises OutOfMemoryError, and then holds what it held before."""
        if size_bytes < 0:
            raise ValueError("a negative size")
        with self._changing() as context:
            free = _memory_free(self._file, self.number)
            if size_bytes > free:
                raise OutOfMemoryError(
                    f"GPU {self.number}: {_mib(size_bytes)} asked for, {_mib(free)} free"
                    f" of {_mib(self.memory_total_bytes)}"
                )
            context.memory_bytes += size_bytes

    def free(self, size_bytes: int | None = None) -> None:
        """Free that much of what this process holds; None frees all. Never below zero."""
        with self._changing() as context:
            held = context.memory_bytes
            context.memory_bytes = 0 if size_bytes is None else max(0, held - size_bytes)

    def busy(
        self,
        utilization: float = 0.9,
        *,
        power_watts: float | None = None,
        memory_utilization: float | None = None,
        seconds: float | None = None,
    ) -> Busy:
        """Be busy from now on: for `seconds`, or until changed, or to the end of a `with` block.

        `utilization` 0..1 is the share of time with a kernel of this process resident;
        `power_watts` the board's draw while only this process works (None: follows utilisation);
        `memory_utilization` 0..1 (None: 0.4 of the other). Returns at once.
        """
        if not 0.0 <= utilization <= 1.0:
            raise ValueError("utilization is a share: 0..1")
        until = 0 if seconds is None else time.monotonic_ns() + int(seconds * 1e9)
        with self._changing() as context:
            context.utilization = utilization
            context.memory_utilization = 0.4 * utilization if memory_utilization is None else memory_utilization
            context.power_watts = -1.0 if power_watts is None else power_watts
            context.busy_until_ns = until
        return Busy(self)

    def idle(self) -> None:
        """Stop being busy; memory stays."""
        self.busy(0.0, power_watts=None)

    def power(self, watts: float | None) -> None:
        """Set the board's draw while only this process works; None: follow utilisation."""
        with self._changing() as context:
            context.power_watts = -1.0 if watts is None else watts

    def close(self) -> None:
        """End the context: memory and load are gone, the process is no longer listed."""
        number = self._file.own_contexts.get(self.number)
        if number is None:
            return
        with self._file.changing() as state:
            self._file.fold(self.number)
            _clear_context(state.contexts[number])
            del self._file.own_contexts[self.number]
            fd = self._file.lock_fd
            _lock(fd, F_OFD_SETLK, fcntl.F_UNLCK, LOCK_CONTEXT + number)

    def __enter__(self) -> Gpu:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _changing(self, *, kind: int = CONTEXT_COMPUTE) -> Iterator[FakeContext]:
        """Give this process's context for a change, with the past integrated before it."""
        with self._file.changing():
            self._file.fold(self.number)
            number = self._file.own_contexts.get(self.number)
            if number is None:
                number = _claim_context(self._file, self.number, kind)
            context = self._file.state.contexts[number]
            context.sequence += 1
            try:
                yield context
            finally:
                context.sequence += 1


class Busy:
    """The load that `Gpu.busy` set. As a `with` block it ends with the block."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __enter__(self) -> Gpu:
        return self._gpu

    def __exit__(self, *_: object) -> None:
        self._gpu.idle()


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def _memory_free(file: StateFile, index: int) -> int:
    """Return what is free; where a test has fixed the used memory, what that leaves."""
    gpu = file.state.gpus[index]
    used = load_of(file, index).memory_bytes
    reading = READINGS.index("memory_used_bytes")
    if gpu.mode[reading] == MODE_FIXED:
        used = gpu.value[reading]
    return max(0, gpu.memory_total_bytes - gpu.memory_reserved_bytes - used)


def _clear_context(context: FakeContext) -> None:
    """Empty a record; its sequence runs on and ends even."""
    sequence = context.sequence | 1
    context.sequence = sequence
    context.used = 0
    for name in ("gpu", "kind", "pid", "host_pid", "pid_namespace", "started_at_ns"):
        setattr(context, name, 0)
    context.memory_bytes = context.busy_until_ns = 0
    context.utilization = context.memory_utilization = 0.0
    context.power_watts = -1.0
    context.sequence = (sequence + 1) % 2**32


def _host_pid() -> int:
    """Return the pid in the outermost namespace that /proc shows; at worst, the own one."""
    match = re.search(r"^NSpid:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match.group(1)) if match else os.getpid()


def _claim_context(file: StateFile, gpu: int, kind: int) -> int:
    """Take a free record, or one whose process is dead, and lock it for this process."""
    for number, context in enumerate(file.state.contexts):
        if not _lock(file.lock_fd, F_OFD_SETLK, fcntl.F_WRLCK, LOCK_CONTEXT + number):
            continue
        if number in file.own_contexts.values():
            continue
        _clear_context(context)
        context.gpu, context.kind = gpu, kind
        context.pid, context.host_pid = os.getpid(), _host_pid()
        context.pid_namespace = Path("/proc/self/ns/pid").stat().st_ino
        context.started_at_ns = time.monotonic_ns()
        context.used = 1
        file.state.contexts_limit = max(file.state.contexts_limit, number + 1)
        file.own_contexts[gpu] = number
        return number
    raise SimulatedGpuError(f"all {MAX_CONTEXTS} contexts are in use")


# ---- for tests: creation ----


@dataclass(frozen=True)
class Model:
    """What kind of GPU is simulated."""

    name: str = "NVIDIA A100-SXM4-80GB"
    memory_total_bytes: int = 81920 << 20
    memory_reserved_bytes: int = 600 << 20
    power_idle_watts: int = 60
    power_limit_watts: int = 400
    sm_clock_idle_mhz: int = 210
    sm_clock_max_mhz: int = 1410
    memory_clock_mhz: int = 1593
    video_clock_mhz: int = 1275


def uuid_of(index: int) -> str:
    """Return the UUID of the simulated GPU with this number."""
    return f"GPU-{index:08x}-5eed-4a00-8000-{index:012x}"


def _fill_gpu(gpu: FakeGpu, index: int, model: Model) -> None:
    gpu.uuid, gpu.name = uuid_of(index).encode(), model.name.encode()
    gpu.serial = f"15640210{index:05d}".encode()
    gpu.present, gpu.minor = 1, index
    gpu.pci_domain, gpu.pci_bus, gpu.pci_device = 0, 0x07 + 0x08 * index, 0
    gpu.pci_device_id, gpu.pci_subsystem_id = 0x20B210DE, 0x147F10DE
    gpu.power_idle_milliwatts = model.power_idle_watts * 1000
    gpu.power_limit_milliwatts = model.power_limit_watts * 1000
    gpu.sm_clock_idle_mhz, gpu.sm_clock_max_mhz = model.sm_clock_idle_mhz, model.sm_clock_max_mhz
    gpu.memory_clock_mhz, gpu.video_clock_mhz = model.memory_clock_mhz, model.video_clock_mhz
    gpu.memory_total_bytes = model.memory_total_bytes
    gpu.memory_reserved_bytes = model.memory_reserved_bytes
    _start_integration(gpu)


def _start_integration(gpu: FakeGpu) -> None:
    idle_share = gpu.power_idle_milliwatts / gpu.power_limit_milliwatts
    gpu.folded_at_ns = time.monotonic_ns()
    gpu.energy_millijoules = gpu.nvlink_tx_kibibytes = gpu.nvlink_rx_kibibytes = 0.0
    gpu.temperature_celsius = 28.0 + 50.0 * idle_share


def _new_epoch() -> int:
    """Return a number that no other start of the counters has, not even another file's."""
    return (time.monotonic_ns() >> 10) % 2**32


def _fill_state(state: FakeState, gpus: int, model: Model, driver_version: str) -> None:
    for index in range(MAX_GPUS):
        if index < gpus:
            _fill_gpu(state.gpus[index], index, model)
        else:
            state.gpus[index].present = 0
    state.size, state.gpu_count = ctypes.sizeof(FakeState), gpus
    state.driver_version = driver_version.encode()
    state.nvml_version = f"12.{driver_version}".encode()
    state.cuda_version, state.epoch = 12080, _new_epoch()
    state.magic, state.version = MAGIC, VERSION


def init(
    path: str | Path | None = None,
    *,
    gpus: int = 8,
    model: Model | None = None,
    driver_version: str = "570.124.06",
) -> StateFile:
    """Make the state file, whole or not at all, mode 0666. One that exists is reset in place.

    In place: programs and containers that have it mapped go on with it, live contexts stay.
    """
    if not 0 <= gpus <= MAX_GPUS:
        raise ValueError(f"0 to {MAX_GPUS} GPUs")
    where, model = state_path(path), model or Model()
    if not _is_state_file(where):
        fresh = FakeState()
        _fill_state(fresh, gpus, model, driver_version)
        _write_atomically(where, bytes(fresh))
        return open_state(where)
    file = open_state(where)
    reset(file)
    with file.changing() as state:
        _fill_state(state, gpus, model, driver_version)
    return file


def _is_state_file(where: Path) -> bool:
    try:
        with where.open("rb") as stream:
            header = FakeState.from_buffer_copy(stream.read(ctypes.sizeof(FakeState)))
    except (FileNotFoundError, ValueError):
        return False
    return _is_ours(header)


def _is_ours(state: FakeState) -> bool:
    found = (state.magic, state.version, state.size)
    return found == (MAGIC, VERSION, ctypes.sizeof(FakeState))


def _write_atomically(where: Path, content: bytes) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=where.parent, prefix=f".{where.name}.")
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(content)
            os.fchmod(stream.fileno(), 0o666)  # containers run as any user
        Path(temporary).rename(where)
    except BaseException:
        Path(temporary).unlink()
        raise


def reset(file: StateFile | None = None) -> None:
    """Take back all values, faults, events and counters. Live contexts stay."""
    file = file or open_state()
    with file.changing() as state:
        state.init_error = state.process_mode = state.duplicate_processes = 0
        state.faults_active = state.event_sequence = state.max_concurrency = 0
        for table in (state.faults, state.events, state.calls):
            ctypes.memset(table, 0, ctypes.sizeof(table))
        for gpu in state.gpus[: state.gpu_count]:
            gpu.present = 1
            ctypes.memset(gpu.mode, 0, ctypes.sizeof(gpu.mode))
            _start_integration(gpu)
        for client in state.clients:
            client.calls, client.max_inside, client.threads = 0, client.inside, 0
        state.epoch = _new_epoch()


# ---- for tests: values ----


@dataclass(frozen=True)
class Unanswered:
    """A reading that every call answers with this NVML error code."""

    code: int = 3


Value = Union[int, float, Unanswered]  # noqa: UP007 (evaluated: Python 3.9)
"""int: fixed, cut to the caller's width; float: a double in field values; or an error."""


def _reading(name: str) -> int:
    if name not in READINGS:
        raise ValueError(f"no reading {name!r}; there are: {', '.join(READINGS)}")
    return READINGS.index(name)


def _encode(value: Value) -> tuple[int, int]:
    if isinstance(value, Unanswered):
        return MODE_ERROR, value.code
    if isinstance(value, float):
        return MODE_DOUBLE, int.from_bytes(struct.pack("=d", value), sys.byteorder)
    return MODE_FIXED, value % 2**64


def set_values(gpu: int, *, file: StateFile | None = None, **values: Value) -> None:
    """Fix readings of GPU number `gpu`, by name: `set_values(0, power_milliwatts=NOT_AVAILABLE)`.

    Negative numbers and numbers too large are possible: they come out as a driver's garbage does.
    """
    with (file or open_state()).changing() as state:
        for name, value in values.items():
            reading = _reading(name)
            mode, raw = _encode(value)
            state.gpus[gpu].value[reading] = raw
            state.gpus[gpu].mode[reading] = mode


def clear_values(gpu: int, *names: str, file: StateFile | None = None) -> None:
    """Let these readings, or all, follow the simulation again."""
    with (file or open_state()).changing() as state:
        for name in names or READINGS:
            state.gpus[gpu].mode[_reading(name)] = MODE_SIMULATED


def set_present(gpu: int, present: bool, *, file: StateFile | None = None) -> None:
    """Take a GPU off the list, or put it back.

    A process sees the change when it initialises anew; a handle it has answers GPU_IS_LOST.
    """
    with (file or open_state()).changing() as state:
        state.gpus[gpu].present = int(present)


def set_driver(
    *,
    file: StateFile | None = None,
    init_error: int | None = None,
    version: str | None = None,
    process_mode: str | None = None,
    duplicate_processes: int | None = None,
) -> None:
    """Change the driver; None leaves as it is.

    `init_error`: what initialisation answers (9: not loaded; 0: none). `process_mode`: one of
    PROCESS_MODES. `duplicate_processes`: list each process so many times more.
    """
    with (file or open_state()).changing() as state:
        if init_error is not None:
            state.init_error = init_error
        if version is not None:
            state.driver_version = version.encode()
        if process_mode is not None:
            state.process_mode = PROCESS_MODES.index(process_mode)
        if duplicate_processes is not None:
            state.duplicate_processes = duplicate_processes


# ---- for tests: faults ----


def _hash(text: str) -> int:
    value = 14695981039346656037
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def _family(function: str) -> str:
    return re.sub(r"_v\d$", "", function)


def _check_function(function: str, exact: bool) -> None:
    """Refuse a name that is no NVML function, where the list of names is at hand."""
    symbols = Path(__file__).with_name("symbols.txt")
    if not symbols.exists():
        return
    known = symbols.read_text().split()
    if function not in (known if exact else {_family(name) for name in known}):
        raise ValueError(f"no NVML function {function!r}")


def _scope(function: str | None, exact: bool) -> tuple[int, int]:
    if function is None:
        return SCOPE_ANY, 0
    if function == "init":
        return SCOPE_INIT, 0
    exact = exact or function != _family(function)
    _check_function(function, exact)
    return (SCOPE_FUNCTION if exact else SCOPE_FAMILY), _hash(function)


def inject(
    kind: int,
    *,
    argument: int = 0,
    gpu: int | None = None,
    function: str | None = None,
    exact: bool = False,
    skip: int = 0,
    limit: int = 0,
    file: StateFile | None = None,
) -> int:
    """Add a fault and return its number for `clear_fault`.

    `gpu` None: every call, with or without a GPU; else calls with that GPU. `function` None: every
    function; "init": initialisation; a name without version: all its versions, unless `exact`; a
    name with one (`..._v2`): that only. `skip` matching calls pass, then `limit` (0: all) are hit.
    """
    scope, function_hash = _scope(function, exact)
    with (file or open_state()).changing() as state:
        for number, fault in enumerate(state.faults):
            if fault.active:
                continue
            fault.kind, fault.scope, fault.gpu = kind, scope, -1 if gpu is None else gpu
            fault.function_hash, fault.argument = function_hash, argument
            fault.skip, fault.limit, fault.matched = skip, limit, 0
            fault.function = (function or "").encode()
            fault.serial = time.monotonic_ns()
            fault.active = 1
            state.faults_active += 1
            return number
    raise SimulatedGpuError(f"all {MAX_FAULTS} faults are in use")


def fail(
    code: int,
    *,
    gpu: int | None = None,
    function: str | None = None,
    exact: bool = False,
    skip: int = 0,
    limit: int = 0,
    file: StateFile | None = None,
) -> int:
    """Let calls answer this NVML error code. See `inject`."""
    return inject(
        FAULT_ERROR,
        argument=code,
        gpu=gpu,
        function=function,
        exact=exact,
        skip=skip,
        limit=limit,
        file=file,
    )


def lose(gpu: int, *, file: StateFile | None = None) -> int:
    """Let every call on this GPU answer GPU_IS_LOST, until the fault is cleared."""
    return fail(GPU_IS_LOST, gpu=gpu, file=file)


def delay(
    microseconds: int,
    *,
    spin: bool = False,
    gpu: int | None = None,
    function: str | None = None,
    exact: bool = False,
    file: StateFile | None = None,
) -> int:
    """Let calls take so much longer, asleep or (`spin`) on the CPU. See `inject`."""
    kind = FAULT_SPIN if spin else FAULT_SLEEP
    return inject(kind, argument=microseconds, gpu=gpu, function=function, exact=exact, file=file)


def hang(
    *,
    gpu: int | None = None,
    function: str | None = None,
    exact: bool = False,
    skip: int = 0,
    limit: int = 0,
    file: StateFile | None = None,
) -> int:
    """Let calls not return until the fault is cleared. See `inject`."""
    return inject(
        FAULT_HANG,
        gpu=gpu,
        function=function,
        exact=exact,
        skip=skip,
        limit=limit,
        file=file,
    )


def clear_fault(number: int, *, file: StateFile | None = None) -> None:
    """End one fault; calls that hang in it return."""
    with (file or open_state()).changing() as state:
        if state.faults[number].active:
            state.faults[number].active = 0
            state.faults_active -= 1


def clear_faults(*, file: StateFile | None = None) -> None:
    """End all faults."""
    file = file or open_state()
    for number in range(MAX_FAULTS):
        if file.state.faults[number].active:
            clear_fault(number, file=file)


def xid(gpu: int, code: int, *, event_type: int = XID_EVENT, file: StateFile | None = None) -> None:
    """Send an event, by default an XID, to every event set that registered for it."""
    with (file or open_state()).changing() as state:
        event = state.events[state.event_sequence % MAX_EVENTS]
        event.type, event.data, event.gpu = event_type, code, gpu
        event.gpu_instance = event.compute_instance = 0xFFFFFFFF
        event.sequence = state.event_sequence + 1
        state.event_sequence += 1


# ---- for tests: what was called ----


@dataclass(frozen=True)
class Client:
    """One process that initialised the library; ended ones stay until their place is needed."""

    pid: int
    """In its own PID namespace."""
    pid_namespace: int
    inits: int
    calls: int
    inside: int
    """Calls that have not returned."""
    max_inside: int
    """The most calls inside at once: 1 where one thread at a time touches NVML."""
    threads: int
    """Distinct threads that made a call."""


def calls(file: StateFile | None = None) -> dict[str, int]:
    """Return how often each function was called, by all processes that may write the file."""
    state = (file or open_state()).state
    return {call.name.decode(): call.count for call in state.calls if call.count}


def clients(file: StateFile | None = None) -> list[Client]:
    """Return the processes that initialised the library, the newest last."""
    state = (file or open_state()).state
    found = sorted((c for c in state.clients if c.pid), key=lambda client: client.started_at_ns)
    return [Client(c.pid, c.pid_namespace, c.inits, c.calls, c.inside, c.max_inside, c.threads) for c in found]


def max_concurrency(file: StateFile | None = None) -> int:
    """Return the most calls that any one process had inside at once since the last reset."""
    return (file or open_state()).state.max_concurrency


def _describe_gpu(file: StateFile, index: int) -> dict[str, Any]:
    gpu, load = file.state.gpus[index], load_of(file, index)
    set_readings = {
        name: {"mode": gpu.mode[number], "value": gpu.value[number]}
        for number, name in enumerate(READINGS)
        if gpu.mode[number] != MODE_SIMULATED
    }
    contexts = [
        {
            "pid": context.pid,
            "pid_namespace": context.pid_namespace,
            "memory_bytes": context.memory_bytes,
            "utilization": context.utilization if _busy_at(context, load.now_ns) else 0.0,
        }
        for context in file.contexts(index)
    ]
    return {
        "index": index,
        "uuid": gpu.uuid.decode(),
        "name": gpu.name.decode(),
        "present": bool(gpu.present),
        "memory_total_bytes": gpu.memory_total_bytes,
        "memory_used_bytes": load.memory_bytes,
        "utilization": round(load.busy, 4),
        "power_watts": load.power_milliwatts / 1000.0,
        "set": set_readings,
        "contexts": contexts,
    }


def _describe_faults(state: FakeState) -> list[dict[str, Any]]:
    kinds = {FAULT_ERROR: "error", FAULT_SLEEP: "sleep", FAULT_SPIN: "spin", FAULT_HANG: "hang"}
    return [
        {
            "number": number,
            "kind": kinds.get(fault.kind, "?"),
            "argument": fault.argument,
            "gpu": None if fault.gpu < 0 else fault.gpu,
            "function": fault.function.decode() or None,
            "matched": fault.matched,
        }
        for number, fault in enumerate(state.faults)
        if fault.active
    ]


def show(file: StateFile | None = None) -> dict[str, Any]:
    """Return the whole state, ready for JSON. `set` holds what a test has fixed."""
    file = file or open_state()
    state = file.state
    return {
        "driver_version": state.driver_version.decode(),
        "init_error": state.init_error,
        "process_mode": PROCESS_MODES[state.process_mode],
        "duplicate_processes": state.duplicate_processes,
        "gpus": [_describe_gpu(file, index) for index in range(state.gpu_count)],
        "faults": _describe_faults(state),
        "max_concurrency": state.max_concurrency,
        "clients": [asdict(client) for client in clients(file)],
        "calls": calls(file),
    }


# ---- command line ----

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of "2GiB", "512Mi", "1000". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f"no size: {text!r}")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def parse_value(text: str) -> Value:
    """Return the value of "12", "-1", "nan", "1.5", "na", "blank" or "error:3"."""
    if text.startswith("error:"):
        return Unanswered(int(text[len("error:") :]))
    named = {"na": NOT_AVAILABLE, "blank": BLANK}
    if text in named:
        return named[text]
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


def _print_table(description: dict[str, Any]) -> None:
    print(f"driver {description['driver_version']}")
    for gpu in description["gpus"]:
        used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
        print(
            f"{gpu['index']:>2} {gpu['uuid']} {gpu['utilization'] * 100:4.0f} %"
            f" {_mib(used):>10} / {_mib(total)} {gpu['power_watts']:5.0f} W"
            f"{'' if gpu['present'] else ' (absent)'}"
            f" pids {[context['pid'] for context in gpu['contexts']]}"
        )
        for name, entry in gpu["set"].items():
            print(f"     {name}: mode {entry['mode']}, value {entry['value']}")
    for fault in description["faults"]:
        print(f"fault {json.dumps(fault)}")


def _run_init(options: argparse.Namespace) -> None:
    model = Model(name=options.name, memory_total_bytes=options.memory)
    init(options.state, gpus=options.gpus, model=model, driver_version=options.driver)


def _run_show(options: argparse.Namespace) -> None:
    description = show(open_state(options.state))
    if options.json:
        print(json.dumps(description, indent=2))
    else:
        _print_table(description)


def _run_set(options: argparse.Namespace) -> None:
    values = dict(item.split("=", 1) for item in options.values)
    parsed = {name: parse_value(text) for name, text in values.items()}
    file = open_state(options.state)
    for gpu in _chosen_gpus(options, file):
        set_values(gpu, file=file, **parsed)


def _run_clear(options: argparse.Namespace) -> None:
    """Without options: everything that `set` and `fault` did."""
    file = open_state(options.state)
    if options.fault is not None:
        clear_fault(options.fault, file=file)
        return
    if options.gpu is None and not options.values:
        clear_faults(file=file)
    for gpu in _chosen_gpus(options, file):
        clear_values(gpu, *options.values, file=file)
        set_present(gpu, True, file=file)


def _chosen_gpus(options: argparse.Namespace, file: StateFile) -> Sequence[int]:
    return range(file.state.gpu_count) if options.gpu is None else [options.gpu]


def _run_fault(options: argparse.Namespace) -> None:
    file = open_state(options.state)
    if options.kind == "absent":
        set_present(options.gpu, False, file=file)
        return
    kinds = {
        "error": FAULT_ERROR,
        "lost": FAULT_ERROR,
        "sleep": FAULT_SLEEP,
        "spin": FAULT_SPIN,
        "hang": FAULT_HANG,
    }
    number = inject(
        kinds[options.kind],
        argument=GPU_IS_LOST if options.kind == "lost" else options.argument,
        gpu=options.gpu,
        function=options.function,
        exact=options.exact,
        skip=options.skip,
        limit=options.limit,
        file=file,
    )
    print(number)


def _run_driver(options: argparse.Namespace) -> None:
    set_driver(
        file=open_state(options.state),
        init_error=options.init_error,
        version=options.version,
        process_mode=options.process_mode,
        duplicate_processes=options.duplicates,
    )


def _run_xid(options: argparse.Namespace) -> None:
    xid(options.gpu, options.code, file=open_state(options.state))


def _run_reset(options: argparse.Namespace) -> None:
    reset(open_state(options.state))


def _run_use(options: argparse.Namespace) -> None:
    """Hold a GPU until the time is over or a signal comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gpu = Gpu(options.gpu or 0, state=options.state)
    gpu.allocate(options.memory)
    gpu.busy(options.busy, power_watts=options.power)
    print(f"pid {os.getpid()} holds {gpu.uuid}", flush=True)
    time.sleep(options.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Control simulated GPUs.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--state", help="state file (default: $FAKENVML_STATE)")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--gpu", type=int, help="number of the GPU (default: all)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, *parents: argparse.ArgumentParser) -> Any:
        command = commands.add_parser(name, help=text, parents=[common, *parents])
        command.set_defaults(run=run)
        return command

    command = add("init", _run_init, "make the state file, or reset one in place")
    command.add_argument("--gpus", type=int, default=8)
    command.add_argument("--name", default=Model.name)
    command.add_argument("--memory", type=parse_size, default=Model.memory_total_bytes)
    command.add_argument("--driver", default="570.124.06", help="driver version")
    command = add("show", _run_show, "print GPUs, contexts, faults")
    command.add_argument("--json", action="store_true", help="all of it, also calls and clients")
    command = add("set", _run_set, "fix readings: NAME=VALUE", one)
    command.add_argument("values", nargs="+", help="NAME=int, float, nan, na, blank or error:CODE")
    command = add("clear", _run_clear, "undo set and fault", one)
    command.add_argument("--fault", type=int, help="only this fault")
    command.add_argument("values", nargs="*", help="names of readings (default: all)")
    command = add("fault", _run_fault, "inject; prints the fault's number", one)
    command.add_argument("kind", choices=["error", "lost", "sleep", "spin", "hang", "absent"], help="what happens")
    command.add_argument("argument", nargs="?", type=int, default=0, help="NVML code; microseconds")
    command.add_argument("--function", help='NVML function, all its versions; or "init"')
    command.add_argument("--exact", action="store_true", help="only the version that is named")
    command.add_argument("--skip", type=int, default=0, help="matching calls that pass first")
    command.add_argument("--limit", type=int, default=0, help="calls that are hit (0: all)")
    command = add("driver", _run_driver, "change the driver")
    command.add_argument("--init-error", type=int, help="9: not loaded; 0: none")
    command.add_argument("--version")
    command.add_argument("--process-mode", choices=PROCESS_MODES)
    command.add_argument("--duplicates", type=int, help="list each process so many times more")
    command = add("xid", _run_xid, "send an XID event")
    command.add_argument("gpu", type=int)
    command.add_argument("code", type=int)
    add("reset", _run_reset, "undo everything; live contexts stay")
    command = add("use", _run_use, "hold a visible GPU, as a program would", one)
    command.add_argument("--memory", type=parse_size, default=0)
    command.add_argument("--busy", type=float, default=0.0, help="utilisation, 0..1")
    command.add_argument("--power", type=float, help="watts")
    command.add_argument("--seconds", type=float, default=86400.0)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 1 where it could not be done, with the reason on stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (SimulatedGpuError, ValueError) as error:
        print(f"simgpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
