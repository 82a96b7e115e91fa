# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUMonitors whose job is gone: their last word is written, and those that were kept long enough are deleted."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

from verl_gpumonitor.model.vocabulary import Phase

from .jobs import JobKind, timestamp
from .known_monitors import KnownMonitors
from .monitors import MonitorSeen
from .status import Status, Urgency
from .workloads import Workloads
from .writer import Outcome, StatusWrite, StatusWriter

REMEMBER_SECONDS: Final = 10.0
MAX_DELETIONS: Final = 20
"""Of one look, each some seconds after the other: thousands that are due at once wait for a later one."""
DELETION_SECONDS: Final = 3.0
"""All deletions of one look end within this time, so that no slow API server holds up what runs."""
MAX_FAILURES: Final = 3
"""Deletions of one look that may fail; then it is not about one object, and none is tried for a while."""
REST_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 600.0
"""One whose deletion failed (somebody's policy keeps it) is not tried again before this time."""
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
        self._no_deletion_before = 0.0
        self._undeleted: dict[str, float] = {}
        """By uid: those whose deletion failed, and when it may be tried again."""
        self._forgotten: dict[str, float] = {}
        """Runs that were seen to their end, with the time: their last status may still be on its way back to us."""

    def forgotten(self, uid: str, now: float) -> None:
        """Take note that a run was seen to its end."""
        self._forgotten[uid] = now

    async def look(self, now: float) -> None:
        """End the statuses of runs that went while nobody looked, and delete what was kept long enough."""
        self._forgotten = {uid: at for uid, at in self._forgotten.items() if now - at < REMEMBER_SECONDS}
        self._undeleted = {uid: at for uid, at in self._undeleted.items() if at > now}
        due = []
        best: dict[str, MonitorSeen | None] = {}
        for monitor in self._known:
            workload = self._workloads.named(monitor.kind, monitor.namespace, monitor.workload_name)
            if workload is not None:
                uid = workload.job.uid
                if uid not in best:
                    # Once for each workload: anybody may make as many GPUMonitors for one as there is room for.
                    best[uid] = self._known.of(workload.job)
                is_due = _is_double(monitor, best[uid])
            elif monitor.kind in self.listed_kinds and monitor.workload_uid not in self._forgotten:
                is_due = self._is_over(monitor, now)
            else:
                continue
            if is_due and not monitor.deleting and self._undeleted.get(monitor.uid, 0.0) <= now:
                due.append(monitor)
        await self._delete(due[:MAX_DELETIONS], now)

    def _is_over(self, monitor: MonitorSeen, now: float) -> bool:
        """Note that the job of a GPUMonitor is gone; say whether it was kept long enough since then."""
        ends = [at for at in (monitor.completed_at, monitor.deleted_at) if at is not None]
        if monitor.status.get("phase") is not None and len(ends) < 2:
            self._end_unseen(monitor, now)
            return False
        kept = monitor.retention_seconds
        retention = kept if kept is not None else self._retention_seconds
        since = max(ends, default=monitor.created_at)
        return monitor.managed and since is not None and now - since > retention

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

    async def _delete(self, due: Iterable[MonitorSeen], now: float) -> None:
        if now < self._no_deletion_before:
            return
        failures = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELETION_SECONDS):
                for monitor in due:
                    if await self._writer.delete(monitor):
                        self._gone(monitor)
                        continue
                    self._undeleted[monitor.uid] = now + RETRY_SECONDS
                    failures += 1
                    if failures >= MAX_FAILURES:
                        self._no_deletion_before = now + REST_SECONDS
                        return


def _is_double(monitor: MonitorSeen, best: MonitorSeen | None) -> bool:
    """Whether it is one of ours where a hand-made one, the best, shows the same workload."""
    return best is not None and best.uid != monitor.uid and monitor.managed and not best.managed
