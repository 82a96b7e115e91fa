# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What one sidecar answered: checked line by line, since a pod's port may be anybody's. A pod speaks for itself alone.

Answers lie in files on disk, because those of a thousand GPUs do not belong into memory.
"""

import math
from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

from verl_gpumonitor.model.trace import (
    BrokenLine,
    GpuLine,
    Header,
    HostLine,
    MarkLine,
    NotATrace,
    NvmlLine,
    Record,
    StepLine,
    TraceGpu,
    XidLine,
    parse_header,
    parse_line,
)

from .kubectl import Answer

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
MAX_GPUS: Final = 64
_MAX_LINE: Final = 1 << 20
_END: Final = b'{"type":"end"'
_STEP: Final = b'"type":"step"'
_TAKEN: Final = (GpuLine, HostLine, MarkLine, StepLine, XidLine, NvmlLine)


class _Times(msgspec.Struct, frozen=True, kw_only=True):
    """What the header of a sidecar's record says beyond the format."""

    began_unix: float
    sent_unix: float


class PodRecord:
    """One pod's record."""

    def __init__(self, pod: str, file: BinaryIO, answer: Answer) -> None:
        """Read its header, and go over it once. Raises NotATrace."""
        self.pod = pod
        self._file = file
        file.seek(0)
        first = file.readline(_MAX_LINE)
        self.header: Header = parse_header(first)
        try:
            times = msgspec.json.decode(first, type=_Times)
        except msgspec.DecodeError as error:
            raise NotATrace(f"its header tells no time: {error}") from error
        if not (math.isfinite(times.began_unix) and math.isfinite(times.sent_unix)):
            raise NotATrace("its header tells no time")
        self.began_unix = times.began_unix
        self.ahead_seconds = times.sent_unix - (answer.asked_unix + answer.first_unix) / 2
        """Its clock against that of this machine. The header was made at some time between question and answer."""
        self.doubt_seconds = (answer.first_unix - answer.asked_unix) / 2
        """How far that may be wrong."""
        self.lines = self.steps = 0
        self.whole = False
        """Whether it came to its end."""
        self.broken = 0
        """Lines that cannot be read."""
        while line := file.readline(_MAX_LINE):
            self.whole = line.startswith(_END)
            self.lines += not self.whole
            self.steps += _STEP in line

    @property
    def gpus(self) -> list[TraceGpu]:
        """The pod's own GPUs."""
        return [gpu for pod in (self.header.pods or [])[:1] for gpu in pod.gpus or ()][:MAX_GPUS]

    @property
    def memory_limit_bytes(self) -> float | None:
        """Limit of its host memory."""
        return next((pod.memory_limit_bytes for pod in self.header.pods or ()), None)

    def records(self, *, shift: float, steps: bool) -> Iterator[Record]:
        """Yield its lines as lines of this pod, `shift` seconds later, in order.

        `steps`: those of steps, too, which each pod of a job tells.
        """
        self._file.seek(0)
        self._file.readline(_MAX_LINE)
        last = 0.0
        while line := self._file.readline(_MAX_LINE):
            try:
                record = parse_line(line)
            except BrokenLine:
                self.broken += 1
                continue
            if not isinstance(record, _TAKEN) or (isinstance(record, StepLine) and not steps):
                continue
            last = max(last, round(record.t + shift, 3))
            if isinstance(record, StepLine):
                yield msgspec.structs.replace(record, t=last)
            else:
                yield msgspec.structs.replace(record, t=last, pod=self.pod)
