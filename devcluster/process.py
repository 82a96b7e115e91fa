# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping the components as plain processes.

A pid file alone proves nothing, since pids are reused: it holds the process's start time too, as /proc tells it. And as
a run can be killed between the start and the pid file, every process of ours carries a mark in its environment, by
which strays are found.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devcluster.command import appended, write_aside
from devcluster.errors import ClusterError

MARK = "GPUMONITOR_DEVCLUSTER_COMPONENT"
"""Environment variable of each process of the cluster; containerd's shims inherit it, containers do not."""
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How a component is started.

    `files`: what it reads at its start, by which one sees that it must be started anew. `stop_seconds`: what it may
    take to end by itself before it is killed.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    stop_seconds: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One process for certain: the pid, and when it started (clock ticks since boot)."""

    pid: int
    start_ticks: int


def parse_stat(text: str) -> tuple[str, int]:
    """Return state and start time from /proc/PID/stat. The command's name in it may hold spaces and brackets."""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def identity(pid: int) -> Identity | None:
    """Return who a pid is now; None if nobody, or only a zombie."""
    try:
        state, start_ticks = parse_stat((_PROC / str(pid) / "stat").read_text())
    except (OSError, IndexError, ValueError):
        return None
    return None if state in "ZX" else Identity(pid=pid, start_ticks=start_ticks)


def fingerprint(spec: Spec) -> str:
    """Return a hash of how a component is started: the very program, its options, the files that it reads."""
    digest = hashlib.sha256(
        repr((os.path.realpath(spec.argv[0]), spec.argv, sorted(spec.environment.items()))).encode()
    )
    for path in spec.files:
        digest.update(path.read_bytes() if path.exists() else b"-")
    return digest.hexdigest()[:12]


def marked() -> dict[int, str]:
    """Return each running process of ours (pid to component), however it was started. Shims say `containerd`."""
    prefix = f"{MARK}=".encode()
    found: dict[int, str] = {}
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(prefix) and identity(int(folder.name)) is not None:
                    found[int(folder.name)] = entry.removeprefix(prefix).decode(errors="replace")
    return found


def kill_all(pids: Iterable[int], *, wait_seconds: float = 10.0) -> list[int]:
    """Kill processes at once and wait for them; return those that would not go."""
    targets = [who for pid in pids if (who := identity(pid)) is not None]
    for who in targets:
        _signal(who, signal.SIGKILL)
    return [who.pid for who in targets if not _ended(who, wait_seconds=wait_seconds)]


class Processes:
    """The components' processes, by pid files in `run`, with their logs in `logs`."""

    def __init__(self, *, run: Path, logs: Path) -> None:
        self._run = run
        self._logs = logs
        self._children: list[subprocess.Popen[bytes]] = []

    def log(self, name: str) -> Path:
        """Return the path of a component's log."""
        return self._logs / f"{name}.log"

    def running(self, name: str) -> Identity | None:
        """Return the component's process; None if it does not run."""
        record = self._recorded(name)
        try:
            recorded = Identity(pid=record["pid"], start_ticks=record["start_ticks"])
        except KeyError:
            return None
        return recorded if identity(recorded.pid) == recorded else None

    def start(self, spec: Spec) -> bool:
        """Start a component unless it runs as it should; return whether it was started.

        One that was started otherwise (options, files, version) is stopped, and strays of its kind are killed.
        """
        wanted = fingerprint(spec)
        if self.running(spec.name) is not None:
            if self._recorded(spec.name).get("fingerprint") == wanted:
                return False
            self.stop(spec)
        self._kill_strays(spec)
        self._reap()
        environment = {**os.environ, **spec.environment, MARK: spec.name}
        with appended(self.log(spec.name)) as stream:
            stream.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} $ {' '.join(spec.argv)}\n".encode())
            stream.flush()
            child = self._spawn(spec, environment, stream.fileno())
        self._children.append(child)
        who = identity(child.pid)
        if who is None:
            raise ClusterError(f"{spec.name} ended at once", f"See {self.log(spec.name)}")
        record = {"pid": who.pid, "start_ticks": who.start_ticks, "fingerprint": wanted}
        write_aside(self._pid_file(spec.name), json.dumps(record))
        return True

    def stop(self, spec: Spec) -> bool:
        """End a component, by SIGKILL after its time; return whether it ran."""
        who = self.running(spec.name)
        if who is not None:
            _signal(who, signal.SIGTERM)
            if not _ended(who, wait_seconds=spec.stop_seconds):
                _signal(who, signal.SIGKILL)
                _ended(who, wait_seconds=10)
        self._kill_strays(spec)
        self._reap()
        self._pid_file(spec.name).unlink(missing_ok=True)
        return who is not None

    def _recorded(self, name: str) -> dict[str, Any]:
        """Return what the pid file says; empty if there is none, or it is damaged."""
        try:
            record = json.loads(self._pid_file(name).read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _reap(self) -> None:
        """Forget the children that ended, which lets the kernel forget them too."""
        self._children = [child for child in self._children if child.poll() is None]

    def _pid_file(self, name: str) -> Path:
        return self._run / f"{name}.pid"

    @staticmethod
    def _spawn(spec: Spec, environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise ClusterError(f"{spec.argv[0]} is not there", "Run `python -m devcluster up`.") from error

    @staticmethod
    def _kill_strays(spec: Spec) -> None:
        """Kill processes that carry the component's mark and run its program. Not the shims, which are containerd's."""
        program = Path(spec.argv[0]).name
        kill_all(pid for pid, name in marked().items() if name == spec.name and _program(pid) == program)


def _program(pid: int) -> str:
    try:
        return Path((_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")).name
    except OSError:
        return ""


def _signal(who: Identity, number: signal.Signals) -> None:
    if identity(who.pid) == who:
        with contextlib.suppress(ProcessLookupError):
            os.kill(who.pid, number)


def _ended(who: Identity, *, wait_seconds: float) -> bool:
    deadline = time.monotonic() + wait_seconds
    while identity(who.pid) == who:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
