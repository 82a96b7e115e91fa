# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who said which stage ran when: intervals, and the span of time for which a source vouches. Pure.

All times are Unix seconds of the node on which the work ran, which is the clock of that node's sidecar.
"""

import msgspec

from .enums import StrEnum


class StageSource(StrEnum):
    """Where a stage was learnt, best first."""

    MARKS = "marks"
    """The program itself, by datagram: exact, with the step's number."""
    TITLES = "titles"
    """Process titles of the pod, where it shares its process namespace."""
    RAY_STATE = "ray-state"
    """Ray's State API, asked by the head's sidecar: exact begins."""
    RAY_AGENT = "ray-agent"
    """Ray's metrics agent in the pod: new each 5 s."""
    LAUNCH = "launch"
    """What the job was started with, where its program does one thing all the time: a trainer that only trains."""
    NONE = "none"


class StageInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which one process, or the pod as a whole, was in one stage."""

    stage: str
    """As `vocabulary.STAGES`; a mark may bring its own word."""
    role: str
    begin: float
    end: float | None = None
    """None while it runs."""
    local_rank: int | None = None
    """GPU bundle within the pod's Ray node; None: the whole pod, or not known."""
    pid: int | None = None
    """Of the pod's own process namespace."""
    step: int | None = None
    """Number of the training step, where the source says it."""
    job: str = ""
    """Ray's submission id of the job whose work it is; empty where the source does not tell jobs apart."""
    resolution_seconds: float = 0.0
    """How far begin and end may be off."""


class StageWord(msgspec.Struct, frozen=True, kw_only=True):
    """What one source says of one pod: between the two times these intervals, and no other work it could see."""

    source: StageSource
    known_from: float
    """It vouches for nothing before."""
    known_until: float
    """What it says up to here is its last word, but for intervals that still run."""
    intervals: tuple[StageInterval, ...] = ()
    """By begin; those that ended before `known_from` are left out."""
