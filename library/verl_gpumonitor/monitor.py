# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""ResourceMonitor: GPUs, CPU and memory from inside a training program, by stage of the program's own naming.

    from verl_gpumonitor import ResourceMonitor

    monitor = ResourceMonitor(interval=5, path="resources.csv")
    with monitor.stage("gen", role="rollout", step=3):
        ...
    monitor.log("after_rollout")

It runs in the process that it watches, so it never raises after its construction, and waits a second at most, for a
driver that hangs. In a pod with our sidecar its marks go there by themselves.
"""

import atexit
import errno
import fcntl
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from .model.marks import MarkScope
from .model.samples import GpuSample
from .model.vocabulary import GpuState, UnavailableReason
from .reading.machine import MachineReader, MachineSample
from .reading.reader import Reader, Reading, without_gauges
from .stages.sources.mark_sender import MarkSender, plain_step, plain_word

LIMIT_SECONDS: Final = 1.0
"""Longest wait for a reading of the GPUs."""
MIN_INTERVAL_SECONDS: Final = 0.1
HISTORY: Final = 720
"""Samples kept: an hour at one in 5 s."""
_HUNG: Final = "CALL_TIMED_OUT"
_GIB: Final = 1 << 30
_WHY: Final = {
    UnavailableReason.NO_LIBRARY: "libnvidia-ml.so.1 is not found, so there is no NVIDIA driver here",
    UnavailableReason.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded, or does not fit its library",
    UnavailableReason.NO_DEVICE_ACCESS: "this process has no access to a GPU",
}

logger = logging.getLogger("verl_gpumonitor")


class ResourceSample(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment. Ratios run 0..1; None is what could not be read."""

    t: float
    """Unix seconds."""
    pid: int
    stage: str = ""
    """The label that was given to `log`, else the innermost stage that runs; empty outside of any."""
    role: str = ""
    step: int | None = None
    cpu_utilization: float | None = None
    """Share of the container's CPU limit, or of the host's cores where there is none, since the sample before."""
    cpu_cores: float | None = None
    memory_used_bytes: int | None = None
    """Of the container where it has a limit, else of the host."""
    memory_total_bytes: int | None = None
    gpus: tuple[GpuSample, ...] = ()
    """All that this container sees, by index. Empty where it sees none."""

    @property
    def cpu_percent(self) -> float | None:
        """Return the CPU's use in percent."""
        return None if self.cpu_utilization is None else 100.0 * self.cpu_utilization

    @property
    def memory_percent(self) -> float | None:
        """Return the host memory's use in percent."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return 100.0 * self.memory_used_bytes / self.memory_total_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain dicts, lists and numbers, with both percentages."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain | {"cpu_percent": self.cpu_percent, "memory_percent": self.memory_percent}


class ResourceMonitor:
    """Samples this container's GPUs, CPU and memory, on demand or each `interval` seconds.

    May be used by several threads. After a fork the child begins anew: its own samples, its own NVML, no background
    thread until it starts one.
    """

    def __init__(
        self,
        interval: float = 5.0,
        *,
        path: str | os.PathLike[str] | None = None,
        history: int = HISTORY,
        marks: bool = True,
        scope: MarkScope | None = None,
    ) -> None:
        """Read nothing yet but the CPU's counters.

        `interval`: seconds between two samples in the background. `path`: a `.csv` (one line a GPU) or `.jsonl` (one
        a sample) to append to. `history`: samples kept in `metrics`. `marks`: tell the sidecar, if there is one.
        `scope`: for whom the marks speak; by default the environment's rank decides, and a process without one is the
        driver of the job. Raises ValueError for an interval below 0.1 s, a history below 1, or another ending.
        """
        if not interval >= MIN_INTERVAL_SECONDS:
            raise ValueError(f"interval is {interval} s, but at least {MIN_INTERVAL_SECONDS} s makes sense")
        if history < 1:
            raise ValueError(f"history is {history}; at least one sample is kept")
        self.interval = interval
        self._history_size = history
        self._sink = None if path is None else _Sink(Path(path))
        self._sender = MarkSender(scope=scope) if marks else None
        self._arguments = {"interval": interval, "path": path, "history": history, "marks": marks, "scope": scope}
        self._warned = False
        self._begin_process()

    def _begin_process(self) -> None:
        """Set up what belongs to one process; again in a forked child, where locks may be held by nobody."""
        self._pid = os.getpid()
        self._machine = MachineReader()
        self._gpus = _Gpus()
        self._history: deque[ResourceSample] = deque(maxlen=self._history_size)
        self._running: dict[int, tuple[str, str, int | None]] = {}
        self._runs = itertools.count()
        # Reentrant: a signal's handler may stop what its own thread is starting.
        self._lock = threading.RLock()
        self._stopping: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Callable[..., "ResourceMonitor"], tuple[dict[str, Any]]]:
        # Ray pickles what a remote function refers to: what arrives is a monitor of the other process.
        return _make, (self._arguments,)

    def _here(self) -> None:
        if os.getpid() != self._pid:
            self._begin_process()
            self._gpus.forked = True

    # --- what a program calls --------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[ResourceSample]:
        """Return the samples of this process, oldest first."""
        self._here()
        return list(self._history)

    def collect(self) -> ResourceSample:
        """Take a sample now."""
        return self._collect("")

    def log(self, stage: str) -> ResourceSample:
        """Take a sample, label it (`after_rollout`, `epoch_3`, …), and write one line of it to the log."""
        sample = self._collect(plain_word(stage))
        _say(logging.INFO, describe(sample))
        return sample

    @contextmanager
    def stage(self, stage: str, *, role: str = "", step: int | None = None) -> Iterator[None]:
        """Name what the block does: samples in it carry the stage, and the sidecar hears of its begin and end.

        verl's own names (`gen`, `update_actor`, …) are best; any other will do. Blocks may be nested. A block `step`
        with its number is one training step.
        """
        self._here()
        stage, role, step = plain_word(stage), plain_word(role), plain_step(step)
        running, run = self._running, next(self._runs)
        running[run] = (stage, role, step)
        span = self._sender.begin(stage, role=role, step=step) if self._sender else 0
        try:
            yield
        finally:
            running.pop(run, None)
            if self._sender and span:
                self._sender.end(span)

    def start_background(self) -> None:
        """Take a sample each interval in a thread, until `stop` or the end of the program. Again: nothing happens."""
        self._here()
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            stopping = self._stopping = threading.Event()
            thread = threading.Thread(target=self._loop, args=(stopping,), name="gpumon-monitor", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had: a limit on pids, or the interpreter ends
                _say(logging.WARNING, f"no samples in the background: {error}")
                return
            self._thread = thread
            # A daemon thread would be frozen in the middle of something at the interpreter's end.
            atexit.register(self.stop)

    def stop(self) -> None:
        """End the background thread, and wait for it, a few seconds at most."""
        self._here()
        with self._lock:
            thread, self._thread = self._thread, None
            if self._stopping is not None:
                self._stopping.set()
        atexit.unregister(self.stop)
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * LIMIT_SECONDS + 1)

    def __enter__(self) -> "ResourceMonitor":
        self.start_background()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- how it is done --------------------------------------------------------------------------------------

    def _loop(self, stopping: threading.Event) -> None:
        due = time.monotonic()
        while not stopping.wait(max(0.0, due - time.monotonic())):
            self._collect("")
            due = max(due + self.interval, time.monotonic())

    def _collect(self, label: str) -> ResourceSample:
        self._here()
        now = time.time()
        stage, role, step = next(reversed(list(self._running.values())), ("", "", None))
        machine = self._read_machine()
        sample = ResourceSample(
            t=now,
            pid=self._pid,
            stage=label or stage,
            role=role,
            step=step,
            cpu_utilization=machine.cpu_utilization,
            cpu_cores=machine.cpu_cores,
            memory_used_bytes=machine.memory_used_bytes,
            memory_total_bytes=machine.memory_total_bytes,
            gpus=self._read_gpus(),
        )
        self._history.append(sample)
        if self._sender is not None and (label or machine.memory_in_container):
            self._tell(label or stage, step, machine)
        if self._sink is not None:
            self._sink.write(sample)
        return sample

    def _read_machine(self) -> MachineSample:
        try:
            return self._machine.read()
        except Exception:  # noqa: BLE001 - the training must not die of an odd line in /proc
            return MachineSample()

    def _read_gpus(self) -> tuple[GpuSample, ...]:
        gpus, why = self._gpus.read(LIMIT_SECONDS)
        if not gpus and why and not self._warned:
            self._warned = True
            _say(logging.WARNING, f"no GPU is monitored: {why}")
        return gpus

    def _tell(self, label: str, step: int | None, machine: MachineSample) -> None:
        if self._sender is None:
            return
        known = machine.memory_in_container
        self._sender.point(
            # A label `step` would number a step; to do that is the business of the block.
            label if label not in ("", "step") else "sample",
            step=step,
            memory_used_bytes=machine.memory_used_bytes if known else None,
            memory_limit_bytes=machine.memory_total_bytes if known else None,
        )


def _make(arguments: dict[str, Any]) -> ResourceMonitor:
    return ResourceMonitor(**arguments)


class _Gpus:
    """Reads the GPUs in a thread for each reading, so that a driver that hangs keeps nobody for longer than agreed."""

    def __init__(self, open_reader: Callable[[], Reader] | None = None) -> None:
        self._open_reader = open_reader or _open_nvml
        self._reader: Reader | None = None
        self._reading = Reading()
        self._crash: str | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._since = 0.0
        self.forked = False
        """The library was opened by the parent of this process: to be closed before it is used."""

    def read(self, limit_seconds: float) -> tuple[tuple[GpuSample, ...], str | None]:
        """Return the GPUs, and why there are none. Those of a driver that hangs come without values."""
        # Not for ever: a signal's handler waits here for the thread that it interrupted.
        if not self._lock.acquire(timeout=limit_seconds):
            return self._unanswered()
        try:
            thread = self._thread
            if thread is None or not thread.is_alive():
                thread = threading.Thread(target=self._pass, name="gpumon-read", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    return (), f"no thread to read it: {error}"
                self._thread, self._since = thread, time.monotonic()
        finally:
            self._lock.release()
        # Whoever comes while a reading runs shares it; if it hangs, only the first wait is for its whole limit.
        thread.join(max(0.0, self._since + limit_seconds - time.monotonic()))
        reading = self._reading
        if thread.is_alive():
            return self._unanswered()
        return reading.gpus, self._crash or _why(reading)

    def _unanswered(self) -> tuple[tuple[GpuSample, ...], str]:
        hung = tuple(without_gauges(gpu, GpuState.NOT_RESPONDING, _HUNG) for gpu in self._reading.gpus)
        return hung, "the NVIDIA driver does not answer"

    def _pass(self) -> None:
        try:
            if self._reader is None:
                self._reader = self._open_reader()
                if self.forked:
                    _close_nvml()
            self._reading = self._reader.read_all(skip=frozenset(), processes=False)
            self._crash = None
        except Exception as error:  # noqa: BLE001 - a fault of ours or of the binding; the training goes on
            self._reading, self._crash = Reading(), f"{type(error).__name__}: {error}"


def _why(reading: Reading) -> str | None:
    """Say why there is no GPU. The reader's own message is for the operator of a sidecar."""
    reason = reading.unavailable
    return None if reason is None else f"{_WHY.get(reason, reason.value)} (NVML: {reading.error or 'no GPU'})"


def _open_nvml() -> Reader:
    """Open the real reader. Imported here: a program that never collects does not pay for it."""
    from .reading.nvml.reader import NvmlReader

    return NvmlReader()


def _close_nvml() -> None:
    from .reading.nvml.reader import close_library

    close_library()


class _Sink:
    """A file that lines are appended to, whole ones, also by several processes."""

    COLUMNS: Final = (
        "timestamp", "pid", "stage", "role", "step", "cpu_utilization", "memory_used_bytes", "memory_total_bytes",
        "gpu_index", "gpu_uuid", "gpu_name", "gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes",
        "gpu_power_watts", "gpu_temperature_celsius",
    )  # fmt: skip

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"{path}: a .csv or .jsonl file can be written")
        self._path = path.absolute()  # the program may go to another folder, as Hydra's jobs do
        self._failed = False

    def write(self, sample: ResourceSample) -> None:
        """Append a sample. The first failure is said, the others are not."""
        try:
            self._append(sample)
            self._failed = False
        except Exception as error:  # noqa: BLE001 - a full disk is no reason for a training to end
            if not self._failed:
                self._failed = True
                _say(logging.WARNING, f"{self._path} is not written: {error}")

    def _append(self, sample: ResourceSample) -> None:
        # Opened each time, so that a rotated file is left, and a child shares nothing with its parent.
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            csv = self._path.suffix == ".csv"
            text = _csv(sample) if csv else msgspec.json.encode(sample).decode() + "\n"
            size = os.fstat(descriptor).st_size
            if size == 0 and csv:
                # Ranks begin together: one of them writes the head, before anybody's first line.
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
            if size == 0:
                text = ",".join(self.COLUMNS) + "\n" + text if csv else text
            elif os.pread(descriptor, 1, size - 1) != b"\n":
                text = "\n" + text  # a disk that was full left half a line
            if os.write(descriptor, text.encode()) < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _csv(sample: ResourceSample) -> str:
    """Return one line a GPU, or one without any. Unknown values are empty."""
    head: list[object] = [
        f"{sample.t:.3f}", sample.pid, sample.stage, sample.role, sample.step, _short(sample.cpu_utilization),
        sample.memory_used_bytes, sample.memory_total_bytes,
    ]  # fmt: skip
    rows: list[list[object]] = [
        [
            *head, gpu.index, gpu.uuid, gpu.model, gpu.utilization, gpu.memory_used_bytes, gpu.memory_total_bytes,
            gpu.power_watts, gpu.temperature_celsius,
        ]
        for gpu in sample.gpus
    ]  # fmt: skip
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows or [[*head, *[None] * 8]])


def _short(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)


def _cell(value: object) -> str:
    """Return a field of CSV, quoted where it must be."""
    text = "" if value is None else str(value)
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\r\n') else text


def describe(sample: ResourceSample) -> str:
    """Return one line for people.

    `[after_rollout] step 3 | CPU 41% | memory 312.4/1007.6 GiB 31% | GPU0 97% 61.2/79.6 GiB 77% 412 W 63 C | …`
    """
    parts = [f"[{sample.stage}]" if sample.stage else "[]"]
    if sample.step is not None:
        parts[0] += f" step {sample.step}"
    parts.append(f"CPU {_percent(sample.cpu_utilization)}")
    parts.append(f"memory {_of(sample.memory_used_bytes, sample.memory_total_bytes)}")
    parts.extend(_describe_gpu(gpu) for gpu in sample.gpus)
    return " | ".join(parts).replace("\n", " ").replace("\r", " ")


def _describe_gpu(gpu: GpuSample) -> str:
    name = f"GPU{'?' if gpu.index is None else gpu.index}"
    if gpu.state is not GpuState.OK:
        return f"{name} {gpu.state.value}"
    power = "" if gpu.power_watts is None else f" {gpu.power_watts:.0f} W"
    heat = "" if gpu.temperature_celsius is None else f" {gpu.temperature_celsius:.0f} C"
    return f"{name} {_percent(gpu.utilization)} {_of(gpu.memory_used_bytes, gpu.memory_total_bytes)}{power}{heat}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f}%"


def _of(used: int | None, total: int | None) -> str:
    if used is None or not total:
        return "-"
    return f"{used / _GIB:.1f}/{total / _GIB:.1f} GiB {100 * used / total:.0f}%"


def _say(level: int, message: str) -> None:
    """Log a line that is to be seen: who calls `log` wants it.

    verl sets the root logger to WARNING, so ours has a level of its own; and where nobody configured logging at all,
    Python would print warnings alone.
    """
    try:
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        if logger.hasHandlers():
            logger.log(level, "%s", message)
        elif logger.isEnabledFor(level):
            sys.stderr.write(f"gpumonitor: {message}\n")
    except Exception:  # noqa: BLE001, S110 - stderr may be closed; there is nobody left to tell
        pass
