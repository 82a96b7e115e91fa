# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the controller remembers of one workload between two looks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_gpumonitor.diagnosis.thresholds import Thresholds

from .assessment import Assessment, FindingStates
from .monitors import MonitorSeen
from .status import Picture, Urgency, previous_run


@dataclass(kw_only=True, slots=True)
class Entry:
    """What is remembered of one workload between two looks."""

    monitor: MonitorSeen | None = None
    written: Mapping[str, Any] = field(default_factory=dict)
    """Status that the API server holds, as far as we know."""
    written_at: float | None = None
    writing: bool = False
    """A write of it waits or is on its way."""
    urgency: Urgency = Urgency.NONE
    """How urgent that write is."""
    creating: bool = False
    not_before: float = 0.0
    """No write before this time: the last one failed."""
    states: FindingStates = field(default_factory=FindingStates)
    looked_at: float = 0.0
    restored: bool = False
    """Its status is from before a restart, and not every pod has reported since."""
    finished: bool = False
    """It has ended, and its last status is written."""
    most_reported: int = 0
    """Most GPUs that were seen well at one time."""
    ledger_cut: bool = False
    """Its ledger has no room for all of its pods."""
    ended_unseen: bool = False
    """It had ended before it was first seen, so that there is nothing to say of it."""
    thresholds: tuple[int, Thresholds | None, str] | None = None
    """Generation of the spec, the thresholds that it sets, or None where they cannot be, and what is said of them."""
    assessment: Assessment | None = None
    picture: Picture | None = None

    def adopt(self, monitor: MonitorSeen) -> None:
        """Go on from the status of this GPUMonitor."""
        self.monitor = monitor
        self.written = monitor.status
        self.written_at = None
        self.finished = False

    def base(self, uid: str) -> Mapping[str, Any]:
        """Status to go on from for the run of that uid: the last one of it, or the summary of the run before."""
        said_of = self.written.get("workload")
        said_uid = said_of.get("uid") if isinstance(said_of, Mapping) else None
        if said_uid in (None, uid):
            return self.written
        return {"previousRun": previous_run(self.written)}
