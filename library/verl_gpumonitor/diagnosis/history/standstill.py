# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Times in which a whole pool of GPUs stands still."""

from verl_gpumonitor.model.history import IDLE_UTILIZATION
from verl_gpumonitor.model.trace import GpuLine

from .gpu import DEPTH, GpuHistory


class Standstill:
    """Adds them up, by pool and the stage it stands still in."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, str, int], float] = {}
        """Pool, stage and step -> seconds of a finished step in which none of the pool's GPUs did anything."""
        self.longest: dict[tuple[str, str], float] = {}
        """Pool and stage -> longest time in which a whole pool stood still and then went on, seconds."""
        self._now: dict[tuple[str, str], float] = {}
        """The same as `steps` of the step that runs."""
        self._since: dict[str, tuple[float, str]] = {}
        self._busy: dict[str, set[str]] = {}
        self._looked_t: dict[str, float] = {}

    def take(self, gpu: GpuHistory, line: GpuLine, *, gap_seconds: float) -> None:
        """Take a sample of one GPU of a pool. A silence longer than `gap_seconds` adds nothing."""
        pool = gpu.pool
        busy = self._busy.setdefault(pool, set())
        since = line.t - self._looked_t.get(pool, line.t)
        if busy:
            self._since.pop(pool, None)
        elif 0 < since <= gap_seconds:
            self._since.setdefault(pool, (line.t, gpu.stage))
            self._now[pool, gpu.stage] = self._now.get((pool, gpu.stage), 0.0) + since
        self._looked_t[pool] = line.t
        if line.utilization is None or line.utilization >= IDLE_UTILIZATION:
            stood = self._since.pop(pool, None)
            if stood is not None:
                key = pool, stood[1]
                self.longest[key] = max(line.t - stood[0], self.longest.get(key, 0.0))
            busy.add(gpu.uuid)
        else:
            busy.discard(gpu.uuid)

    def forget(self, uuid: str) -> None:
        """Count on a GPU no longer: it is gone."""
        for busy in self._busy.values():
            busy.discard(uuid)

    def finish(self, step: int) -> None:
        """End the running step, which has this number."""
        self.steps.update({(*key, step): seconds for key, seconds in self._now.items()})
        self.steps = {key: seconds for key, seconds in self.steps.items() if key[2] > step - DEPTH}
        self._now = {}
