# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whose stages count on a whole host: those of the job on its GPUs, and of no other program that runs there.

A pod's processes are one job's; a host may run many, and one Ray, whose servers may be anybody's. `gpumon record` tells
them apart by the same `JobProcesses`.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from verl_gpumonitor.model.samples import NodeSample
from verl_gpumonitor.stages.sources.job_processes import JobProcesses
from verl_gpumonitor.stages.sources.kin import holders_of

from .journal import Journal
from .loop import StageReading
from .stage_watch import StageView

SCAN_SECONDS: Final = 1.0
UNDECIDED: Final = (
    "the driver does not list the processes on the GPUs, and several jobs run on this host: whose GPUs these are is not"
    " known, and stages and marks of none of them are counted"
)
_RAYS: Final = ("own", "cluster", "cluster_changes", "jobs")
"""What Ray's servers say in a view."""


class HostJob:
    """Scans the host's processes, in a thread of its own: a command line may take for ever to read."""

    def __init__(
        self,
        node: Callable[[], NodeSample],
        *,
        journal: Journal,
        processes: JobProcesses | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start nothing yet. `node`: returns the newest picture of the GPUs, with the processes on them, at once."""
        self._node = node
        self._journal = journal
        self._clock = clock
        self._sleep = sleep
        self._undecided = False
        """Whether it was said that it is not known whose stages count."""
        self.processes = processes or JobProcesses()

    def start(self) -> None:
        """Scan in a daemon thread until the process ends."""
        threading.Thread(target=self._run, name="job", daemon=True).start()

    def turn(self) -> None:
        """Scan once, but not before the GPUs were looked at: nobody knows then who holds them."""
        node = self._node()
        if node.health.collections == node.health.failures == 0:
            return
        self.processes.on_gpus(holders_of(node))
        self.processes.scan(self._clock())
        if self.processes.undecided:
            self._undecided = True
            self._journal.state("job", "stages are not told", error=UNDECIDED)
        elif self._undecided:
            self._journal.state("job", "it is known by now whose stages count")

    def _run(self) -> None:
        while True:
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - without this thread no stage would ever count again
                self._journal.state("job", "processes are not looked at, for a fault of ours", error=repr(error))
            self._sleep(SCAN_SECONDS)


class JobStages:
    """What the sources of stages say of the job on the GPUs. Ray is not heard while it is another's.

    What Ray said up to the moment when it was the job's no more stays: seconds may still wait for it.
    """

    def __init__(self, watch: StageReading, processes: JobProcesses) -> None:
        """`watch`: titles that it reads are the job's own already."""
        self._watch = watch
        self._processes = processes
        self._heard = StageView()
        self.has_ray = False
        """Whether Ray's servers were the job's at the last look."""

    def latest(self) -> StageView:
        """Return what was said last, at once."""
        view = self._watch.latest()
        self.has_ray = self._processes.has_ray(view.jobs)
        if self.has_ray:
            self._heard = view
            return view
        return msgspec.structs.replace(view, **{name: getattr(self._heard, name) for name in _RAYS})

    def set_titles_needed(self, needed: bool) -> None:
        """Say whether titles are wanted."""
        self._watch.set_titles_needed(needed)
