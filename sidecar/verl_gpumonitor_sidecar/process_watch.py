# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Learns who the processes are that NVML lists on GPUs, where the pod shares its process namespace.

Reading a command line may hang, while its process is stuck in the kernel: so this has a thread of its own, and what it
does not know is not known. Drivers before 565 list processes of the host, or no memory: their lists are not used.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from verl_gpumonitor.model.samples import NodeSample
from verl_gpumonitor.stages.programs import MAX_COMMAND_BYTES, program_of
from verl_gpumonitor.stages.sources.proc_files import beginning_of

from .journal import Journal

SCAN_SECONDS: Final = 5.0
"""NVML's lists are read so often."""
MAX_PIDS: Final = 1024
OLDEST_DRIVER: Final = 565
"""From this release on a list holds the processes of the caller's own namespace, all of them, and their memory."""
FIRST_SECONDS: Final = 1.0
"""Wait at the start: until there is a first list there is nothing to read."""


def can_list(driver_version: str | None) -> bool:
    """Say whether a driver's lists of processes can be believed: `570.86.15` can; `550.54` cannot, nor can none."""
    release = (driver_version or "").partition(".")[0]
    return release.isascii() and release.isdigit() and int(release) >= OLDEST_DRIVER


def read_command(pid: int, proc: str = "/proc") -> bytes:
    """Return the beginning of a command line; empty where the process is gone or hides it."""
    return beginning_of(f"{proc}/{pid}/cmdline", MAX_COMMAND_BYTES)


class ProcessWatch:
    """Keeps a name of each process that is listed on any GPU. `latest` never waits."""

    def __init__(
        self,
        node: Callable[[], NodeSample],
        *,
        journal: Journal,
        read: Callable[[int], bytes] = read_command,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start nothing yet. `node`: returns the newest picture of the GPUs, at once."""
        self._node = node
        self._journal = journal
        self._read = read
        self._sleep = sleep
        self._names: Mapping[int, str] | None = None
        self._known: dict[bytes, str] = {}
        """Command line -> program, of the processes of the last scan."""

    def start(self) -> None:
        """Read in a daemon thread until the process ends."""
        threading.Thread(target=self._run, name="processes", daemon=True).start()

    def latest(self) -> Mapping[int, str] | None:
        """Return pid -> program, empty for one that is not known; None while lists cannot be had or believed."""
        return self._names

    def turn(self) -> None:
        """Read the names of all that are listed now."""
        node = self._node()
        if not can_list(node.driver_version) or all(gpu.processes is None for gpu in node.gpus):
            self._names = None
            return
        pids = {process.pid for gpu in node.gpus for process in gpu.processes or ()}
        self._names = self._named(sorted(pids)[:MAX_PIDS])

    def _run(self) -> None:
        self._sleep(FIRST_SECONDS)
        while True:
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - names are a nicety; the thread must go on
                self._names = None
                self._journal.state("processes", "names of processes failed for a fault of ours", error=repr(error))
            self._sleep(SCAN_SECONDS)

    def _named(self, pids: Iterable[int]) -> dict[int, str]:
        commands = {pid: self._read(pid) for pid in pids}
        known = {command: self._known.get(command) for command in commands.values()}
        self._known = {command: program_of(command) if name is None else name for command, name in known.items()}
        return {pid: self._known[command] for pid, command in commands.items()}
