# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which status is written when: news at once, drift seldom, and what a restart must know goes into the ledger first."""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from verl_gpumonitor_operator.settings import ControllerSettings

from . import ledger_text
from .entry import Entry
from .ledgers import Ledgers
from .monitors import MonitorSeen
from .status import Status, Urgency, urgency
from .workload import Workload
from .writer import Outcome, StatusWrite, StatusWriter

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 10.0
"""After a write that failed."""


class Submission:
    """Between what a look found and the writer's queue."""

    def __init__(
        self,
        *,
        writer: StatusWriter,
        ledgers: Ledgers,
        settings: ControllerSettings,
        clock: Callable[[], float],
        entries: Callable[[], Iterable[Entry]],
        missing: Callable[[MonitorSeen], None],
        touch: Callable[[str], None],
    ) -> None:
        self._writer = writer
        self._ledgers = ledgers
        self._settings = settings
        self._clock = clock
        self._entries = entries
        """All there are: the more run, the seldomer drift is written."""
        self._missing = missing
        """Told of a GPUMonitor that turned out to be gone."""
        self._touch = touch
        """Told the uid of a workload that is worth another look."""

    def submit(self, workload: Workload, entry: Entry, status: Status, now: float) -> None:
        """Have a status written, if there is news in it and its turn has come."""
        matters = urgency(entry.written, status)
        if matters is Urgency.NONE or entry.monitor is None or now < entry.not_before:
            return
        if entry.writing and matters <= entry.urgency:
            return
        ended = workload.job.ended or workload.gone_at is not None
        if entry.written_at is not None and now - entry.written_at < self._wait_seconds(matters, ended=ended):
            return
        uid = workload.job.uid

        def done(outcome: Outcome, written: Status) -> None:
            self._written(uid, entry, outcome, written)

        write = StatusWrite(
            namespace=entry.monitor.namespace,
            name=entry.monitor.name,
            before=entry.written,
            status=self._with_ledger(workload, entry, status),
            urgency=matters,
            done=done,
        )
        if not entry.writing:
            self._writer.submit(write)
        elif not self._writer.exchange(write):
            # It is on its way already. What it does not say is looked at again when it has arrived.
            return
        entry.writing, entry.urgency = True, matters

    def _wait_seconds(self, matters: Urgency, *, ended: bool) -> float:
        """Shortest time since the last write of the same object."""
        if matters is Urgency.PHASE:
            return 0.0
        if matters is Urgency.DRIFT and not ended:
            return self._drift_seconds()
        return self._settings.status_min_interval_seconds

    def _with_ledger(self, workload: Workload, entry: Entry, status: Status) -> Status:
        """Have the ledger kept, and leave it in the status where it is not kept elsewhere, or not yet."""
        uid, text = workload.job.uid, self._ledger(workload, entry)
        kept = self._ledgers.put(uid, text)
        if kept and ("ledger" not in entry.written or self._ledgers.stored(uid)):
            return status
        return {**status, "ledger": text}

    def _ledger(self, workload: Workload, entry: Entry) -> str:
        """Return the ledger as text, and say once where there is no room for all of it."""
        written = ledger_text.write(workload.ledger())
        if written.left_out and not entry.ledger_cut:
            job = workload.job
            logger.warning(
                "too many pods for the ledger: of some, what they count from now until a restart of the controller is "
                "known only if they report again after it",
                extra={
                    "object": {"kind": job.kind, "namespace": job.namespace, "name": job.name, "uid": job.uid},
                    "reason": "LedgerFull",
                    "pods": written.left_out,
                },
            )
        entry.ledger_cut = bool(written.left_out)
        return written.text

    def _drift_seconds(self) -> float:
        """Drift is written each 30 s, or slower, so that it takes at most half of the writes."""
        running = sum(1 for entry in self._entries() if not entry.finished)
        return max(30.0, running / (0.5 * self._settings.status_writes_per_second))

    def _written(self, uid: str, entry: Entry, outcome: Outcome, status: Status) -> None:
        now = self._clock()
        entry.writing, entry.urgency = False, Urgency.NONE
        if outcome in (Outcome.WRITTEN, Outcome.UNCHANGED):
            entry.written, entry.written_at = status, now
        elif outcome is Outcome.MISSING:
            if entry.monitor is not None:
                self._missing(entry.monitor)
                entry.monitor = None
            entry.not_before = now + 1.0
        else:
            entry.not_before = now + (6 * RETRY_SECONDS if outcome is Outcome.INVALID else RETRY_SECONDS)
        self._touch(uid)
