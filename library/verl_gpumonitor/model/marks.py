# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Marks: what a training program says of itself, one JSON datagram each, to the sidecar on localhost. Pure.

A mark may be lost, and its process may die without another word; so each one repairs what came before. It names the
spans that are open in its process, and the mark of an end repeats the begin.

    {"state":"begin","stage":"gen","t":1764537600.25,"process":"9f3c01d2a4b5e677","pid":4711,"seq":7,"span":6,"open":[6]}
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from .enums import StrEnum

MAX_MARK_BYTES: Final = 1024
"""A longer datagram is dropped unread."""
MAX_OPEN: Final = 16
"""Spans that one process has open at a time; whatever is nested deeper is not marked."""
MAX_MARK_GPUS: Final = 16
MAX_COUNT: Final = 2**53
STEP: Final = "step"
"""The stage word that is none: a span of it is one training step, and a point of it says that a step ended."""
EVERY_NODE: Final = "*"
"""In place of a node's IP in `ClusterStages`: the driver speaks for all nodes of its Ray cluster."""

# As in a report. Not imported from there: in a training process its many types would cost half the import.
Word = Annotated[str, Meta(min_length=1, max_length=64)]
Uuid = Annotated[str, Meta(min_length=1, max_length=96)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
UnixSeconds = Annotated[float, Meta(ge=0.0, le=1e11)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class MarkState(StrEnum):
    """What happened."""

    BEGIN = "begin"
    END = "end"
    POINT = "point"
    """A moment: a step that ended, or a label of the user's."""


class MarkScope(StrEnum):
    """For whom a process speaks, and how completely."""

    DRIVER = "driver"
    """The program that leads the job: what it says holds for all GPUs of the job, and between two stages nothing
    of the job runs on them."""
    RANK = "rank"
    """One rank of many: holds for its own GPU; it, too, says all that it does."""
    PART = "part"
    """One rank that tells some of its stages: between two of them it may do anything."""


STAGE_ROLES: Final = {
    "gen": "rollout",
    "testing": "rollout",
    "reward": "reward",
    "old_log_prob": "actor",
    "ref": "ref",
    "values": "critic",
    "adv": "driver",
    "update_critic": "critic",
    "update_actor": "actor",
    "update_weights": "actor",
    "save_checkpoint": "actor",
}
"""Role of a stage where the program names none: as Ray's names give it."""


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One mark. Times are Unix seconds of its node."""

    state: MarkState
    stage: Word
    """One of `vocabulary.STAGES`, `step`, or a word of the program's own."""
    t: UnixSeconds
    process: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    """Drawn by each process at its first mark: pids repeat among the containers of a pod."""
    pid: Annotated[int, Meta(ge=1, le=2**31)]
    """Within the program's own container."""
    seq: Count
    """Rises with each mark of the process. Threads may send in another order."""
    span: Count = 0
    """Ties an end to its begin; 0 for a point."""
    begin: UnixSeconds | None = None
    """On an end: when it began."""
    open: Annotated[list[Count], Meta(max_length=MAX_OPEN)] = []
    """Spans that are open in the process after this mark."""
    scope: MarkScope = MarkScope.DRIVER
    role: Annotated[str, Meta(max_length=64)] = ""
    """Empty: that of the stage."""
    step: Count | None = None
    """verl's number of the step that runs; on a point of `step`, of the one that ended."""
    rank: Annotated[int, Meta(ge=0, le=10**6)] | None = None
    local_rank: Annotated[int, Meta(ge=0, le=1024)] | None = None
    gpus: Annotated[list[Uuid], Meta(max_length=MAX_MARK_GPUS)] = []
    """GPUs of the process's container, where it knows them."""
    job: Annotated[str, Meta(max_length=128)] = ""
    memory_used_bytes: Bytes | None = None
    """Of the process's container, from its cgroup."""
    memory_limit_bytes: Bytes | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Mark)


def encode(mark: Mark) -> bytes | None:
    """Return the datagram; without the GPUs where they make it too long, None where it is too long even so."""
    datagram = _encoder.encode(mark)
    if len(datagram) > MAX_MARK_BYTES and mark.gpus:
        datagram = _encoder.encode(msgspec.structs.replace(mark, gpus=[]))
    return datagram if len(datagram) <= MAX_MARK_BYTES else None


def decode(datagram: bytes) -> Mark | None:
    """Return the mark; None for whatever is none, since anybody in the pod may send anything to the port."""
    if len(datagram) > MAX_MARK_BYTES:
        return None
    try:
        mark = _decoder.decode(datagram)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    words = (mark.stage, mark.role, mark.job, *mark.gpus)
    return mark if all(word.isprintable() for word in words) else None
