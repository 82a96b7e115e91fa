# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of all GPUs, one after the other -> lines of a trace. Pure."""

from collections.abc import Callable
from typing import Final

from verl_gpumonitor.model.samples import GpuSample, NodeSample
from verl_gpumonitor.model.trace import GpuLine, GpuProcess, NvmlLine, XidLine
from verl_gpumonitor.model.vocabulary import GpuState

PROCESSES_SECONDS: Final = 10.0
"""Processes are written so often, and when others are there."""
MAX_XIDS: Final = 16
"""Lines for one code at one look; a GPU may tell of hundreds at once."""
_NAMES: Final = {"CALL_TIMED_OUT": "TIMEOUT"}
"""Our own names of errors -> NVML's, where it has one that means the same."""


class GpuLines:
    """Remembers what was written of each GPU."""

    def __init__(self, pod: str, *, began: float) -> None:
        """`began`: the trace's time 0 by the clock of the samples."""
        self._pod = pod
        self._began = began
        self._read_at: dict[str, float] = {}
        """GPU -> its last reading of memory that went into a peak."""
        self._peaks: dict[str, int] = {}
        self._written_at: dict[str, float] = {}
        self._processes: dict[str, tuple[float, frozenset[int]]] = {}
        self._errors: dict[str | None, str | None] = {}
        self._xids: dict[tuple[str, int], int] = {}

    def events(self, node: NodeSample, now: float) -> list[NvmlLine | XidLine]:
        """Return what happened since the last call. To be called twice a second, so that no peak is missed."""
        for uuid, counters in node.counters.items():
            for at, used in counters.memory_readings:
                if at > self._read_at.get(uuid, self._began):
                    self._read_at[uuid] = at
                    self._peaks[uuid] = max(used, self._peaks.get(uuid, 0))
        return [*self._changed_errors(node, now), *self._new_xids(node)]

    def samples(self, node: NodeSample, title_of: Callable[[int], str | None]) -> list[GpuLine]:
        """Return a line for each GPU that was read since its line before; none for one that does not answer."""
        return [
            self._line(gpu, gpu.taken_at, title_of)
            for gpu in node.gpus
            if gpu.state is GpuState.OK
            and gpu.taken_at is not None
            and gpu.taken_at > self._written_at.get(gpu.uuid, float("-inf"))
        ]

    def _line(self, gpu: GpuSample, taken_at: float, title_of: Callable[[int], str | None]) -> GpuLine:
        self._written_at[gpu.uuid] = taken_at
        peak, used = self._peaks.pop(gpu.uuid, None), gpu.memory_used_bytes
        if used is not None:
            peak = max(used, peak or 0)
        return GpuLine(
            t=self._t(taken_at),
            pod=self._pod,
            uuid=gpu.uuid,
            utilization=gpu.utilization,
            memory_used_bytes=used,
            memory_peak_bytes=peak,
            power_watts=None if gpu.power_watts is None else round(gpu.power_watts, 1),
            temperature_celsius=gpu.temperature_celsius,
            throttled=None if gpu.throttled is None else list(gpu.throttled),
            processes=self._processes_of(gpu, taken_at, title_of),
        )

    def _processes_of(
        self, gpu: GpuSample, at: float, title_of: Callable[[int], str | None]
    ) -> list[GpuProcess] | None:
        if gpu.processes is None:
            return None
        pids = frozenset(process.pid for process in gpu.processes)
        before = self._processes.get(gpu.uuid)
        if before is not None and before[1] == pids and at - before[0] < PROCESSES_SECONDS:
            return None
        self._processes[gpu.uuid] = (at, pids)
        return [
            GpuProcess(pid=process.pid, title=title_of(process.pid), memory_used_bytes=process.memory_used_bytes)
            for process in gpu.processes
        ]

    def _changed_errors(self, node: NodeSample, now: float) -> list[NvmlLine]:
        errors: dict[str | None, str | None] = {None: None}
        back: dict[str | None, float] = {}
        """When a GPU was read again, which is before it is looked at here."""
        if node.unavailable is not None:
            errors[None] = node.error or node.unavailable.value
        else:
            # While the library itself is away, all GPUs are, and that is one problem.
            errors |= {gpu.uuid: _error(gpu) for gpu in node.gpus}
            back = {gpu.uuid: gpu.taken_at for gpu in node.gpus if gpu.taken_at is not None}
        changed = {key: error for key, error in errors.items() if error != self._errors.get(key)}
        self._errors |= errors
        return [
            self._changed(uuid, error, now if error else min(now, back.get(uuid, now)))
            for uuid, error in changed.items()
        ]

    def _changed(self, uuid: str | None, error: str | None, at: float) -> NvmlLine:
        return NvmlLine(t=self._t(at), pod=self._pod, uuid=uuid, error=_NAMES.get(error or "", error))

    def _new_xids(self, node: NodeSample) -> list[XidLine]:
        lines: list[XidLine] = []
        for uuid, counters in node.counters.items():
            for code, count in counters.xid_errors.items():
                new = count - self._xids.get((uuid, code), 0)
                self._xids[uuid, code] = count
                line = XidLine(t=self._t(counters.xid_last_at[code]), pod=self._pod, uuid=uuid, code=code)
                lines += [line] * min(new, MAX_XIDS)
        return lines

    def _t(self, at: float) -> float:
        return max(0.0, round(at - self._began, 3))


def _error(gpu: GpuSample) -> str | None:
    return None if gpu.state is GpuState.OK else gpu.error or "UNKNOWN"
