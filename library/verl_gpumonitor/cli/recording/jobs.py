# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which job of Ray's list is recorded, and how it goes. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from verl_gpumonitor.model.report import RayJobInfo
from verl_gpumonitor.stages.sources.ray_jobs import ALIVE, only_alive

PHASES: Final = {
    "PENDING": "Pending",
    "RUNNING": "Running",
    "SUCCEEDED": "Succeeded",
    "FAILED": "Failed",
    "STOPPED": "Stopped",
}
"""Ray's word on a job -> the trace's."""


class PhaseChange(NamedTuple):
    """The job that is followed is in another phase, or it is another job."""

    phase: str
    message: str


class FollowedJob:
    """Follows the job that is seen alive; when it is over, the next one. Of several at once, it is not known which."""

    def __init__(self) -> None:
        """None was seen."""
        self.info: RayJobInfo | None = None
        self.first: RayJobInfo | None = None
        """The first one that was followed, whose record this is."""
        self.phase: str | None = None

    def look(self, infos: Sequence[RayJobInfo]) -> PhaseChange | None:
        """Take the list, the newest first; says what changed."""
        own = None if self.info is None else next((info for info in infos if _same(info, self.info)), None)
        if own is None or own.status not in ALIVE:
            ended = self._told(own) if own is not None else None
            if ended is not None:
                return ended  # The next one is met at the next look.
            own = only_alive(infos)
        if own is None:
            return None
        if self.info is None or not _same(own, self.info):
            self.phase = None
        self.info = own
        self.first = self.first or own
        return self._told(own)

    def _told(self, info: RayJobInfo) -> PhaseChange | None:
        phase = PHASES.get(info.status, "Unknown")
        if phase == self.phase:
            return None
        self.phase = phase
        name = f"Ray job {info.submission_id}" if info.submission_id else "the driver's Ray job"
        return PhaseChange(phase, f"{name} is {info.status}")


def _same(one: RayJobInfo, other: RayJobInfo) -> bool:
    if one.submission_id or other.submission_id:
        return one.submission_id == other.submission_id
    return (one.entrypoint, one.started_at) == (other.entrypoint, other.started_at)
