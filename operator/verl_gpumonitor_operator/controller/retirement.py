# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUMonitors whose job is gone: their last word is written, and those that were kept long enough are deleted."""

from collections.abc import Callable
from typing import Final

from verl_gpumonitor.model.vocabulary import Phase

from .jobs import JobKind, timestamp
from .known_monitors import KnownMonitors
from .monitors import MonitorSeen
from .status import Status, Urgency
from .workload import Workload
from .workloads import Workloads
from .writer import Outcome, StatusWrite, StatusWriter

REMEMBER_SECONDS: Final = 10.0
TERMINAL: Final = (Phase.SUCCEEDED.value, Phase.FAILED.value, Phase.STOPPED.value)


class Retirement:
    """Looks through all GPUMonitors now and then."""

    def __init__(
        self,
        *,
        known: KnownMonitors,
        workloads: Workloads,
        writer: StatusWriter,
        retention_seconds: float,
        gone: Callable[[MonitorSeen], None],
    ) -> None:
        self._known = known
        self._workloads = workloads
        self._writer = writer
        self._retention_seconds = retention_seconds
        """How long one is kept whose spec does not say it."""
        self._gone = gone
        """Told of one that is there no more."""
        self.listed_kinds: set[JobKind] = set()
        """Kinds of which a complete list was seen, so that a job that is not known does not exist."""
        self._forgotten: dict[str, float] = {}
        """Runs that were seen to their end, with the time: their last status may still be on its way back to us."""

    def forgotten(self, uid: str, now: float) -> None:
        """Take note that a run was seen to its end."""
        self._forgotten[uid] = now

    async def look(self, now: float) -> None:
        """End the statuses of runs that went while nobody looked, and delete what was kept long enough."""
        self._forgotten = {uid: at for uid, at in self._forgotten.items() if now - at < REMEMBER_SECONDS}
        for monitor in self._known:
            workload = self._workloads.named(monitor.kind, monitor.namespace, monitor.workload_name)
            if workload is not None:
                await self._drop_double(workload, monitor)
            elif monitor.kind in self.listed_kinds and monitor.workload_uid not in self._forgotten:
                await self._retire(monitor, now)

    async def _drop_double(self, workload: Workload, monitor: MonitorSeen) -> None:
        """Delete one of ours where a hand-made one shows the same workload."""
        best = self._known.of(workload.job)
        if best is not None and best.uid != monitor.uid and monitor.managed and not best.managed:
            await self._delete(monitor)

    async def _retire(self, monitor: MonitorSeen, now: float) -> None:
        """Note that the job of a GPUMonitor is gone, and delete it when it was kept long enough since then."""
        ends = [at for at in (monitor.completed_at, monitor.deleted_at) if at is not None]
        if monitor.status.get("phase") is not None and len(ends) < 2:
            self._end_unseen(monitor, now)
            return
        kept = monitor.retention_seconds
        retention = kept if kept is not None else self._retention_seconds
        since = max(ends, default=monitor.created_at)
        if monitor.managed and since is not None and now - since > retention:
            await self._delete(monitor)

    def _end_unseen(self, monitor: MonitorSeen, now: float) -> None:
        """Write the end of a job that is gone: only when it went, or, where nobody saw it end, that it ended, too."""
        status = dict(monitor.status)
        phase = status.get("phase")
        workload = {"completionTime": timestamp(now), **(status.get("workload") or {}), "deletionTime": timestamp(now)}
        if phase not in TERMINAL:
            phase = Phase.UNKNOWN.value
            workload["message"] = "The job was deleted while the controller did not run; how it ended was not seen."
        ended = {**status, "phase": phase, "workload": workload}

        def done(outcome: Outcome, _: Status) -> None:
            if outcome is Outcome.MISSING:
                self._gone(monitor)

        self._writer.submit(
            StatusWrite(
                namespace=monitor.namespace,
                name=monitor.name,
                before=status,
                status=ended,
                urgency=Urgency.CHANGE,
                done=done,
            )
        )
        self._known.written(monitor, ended)

    async def _delete(self, monitor: MonitorSeen) -> None:
        if await self._writer.delete(monitor):
            self._gone(monitor)
