# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The flight record of one workload, `gpumonitor-trace/1`: its typed lines, and one line of JSON to one of them. Pure.

Files, compression and the order of lines are `cli.traces`' matter. Every time is in seconds since the start of the
trace. A field that is absent or null is None: not known. Unknown fields and unknown types are skipped, so that the
format can grow.

    TraceError
    +-- NotATrace      the first line is no header of this format
    +-- BrokenLine     one line that is no JSON, or whose known fields have wrong types
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from .vocabulary import TRACE_FORMAT as TRACE_FORMAT

MAX_LINE_BYTES: Final = 4 * 1024 * 1024
"""A header of 1,000 pods takes 2 MB; whatever is longer is not read as JSON."""

Time = Annotated[float, Meta(ge=0.0, le=1e10)]
Number = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
"""Bytes, watts: whoever resamples a trace may write `1e9` or a mean."""
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]


class TraceError(Exception):
    """A trace, or a part of it, that cannot be read. The text is for the person at the keyboard."""


class NotATrace(TraceError):  # noqa: N818
    """What was opened is no trace of a format known here."""


class BrokenLine(TraceError):  # noqa: N818
    """One line that must be skipped; the text says what is wrong with it."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class Workload(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Whose record it is."""

    api_version: str | None = None
    kind: str | None = None
    namespace: str | None = None
    name: str | None = None


class Frameworks(msgspec.Struct, frozen=True, kw_only=True):
    """Versions, as far as known."""

    verl: str | None = None
    ray: str | None = None
    torch: str | None = None


class TraceGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that is the pod's own."""

    uuid: str
    index: int | None = None
    model: str | None = None
    memory_total_bytes: Number | None = None
    power_limit_watts: Number | None = None


class TracePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of the workload."""

    name: str
    node: str | None = None
    node_role: str | None = None
    """`head`, `worker` or `master`."""
    group: str | None = None
    """Worker group or replica type: the pool of its GPUs."""
    gpus_requested: int | None = None
    memory_limit_bytes: Number | None = None
    gpus: list[TraceGpu] | None = None


class Header(_Line, frozen=True, kw_only=True, tag="header"):
    """The first line."""

    format: str
    workload: Workload | None = None
    entrypoint: str | None = None
    """Command line of the driver."""
    frameworks: Frameworks | None = None
    pods: list[TracePod] | None = None
    notes: list[str] | None = None
    """What a reader must know of how it came about, such as pods that did not answer."""


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a context on a GPU, in the pod's own process ids."""

    pid: int
    title: str | None = None
    memory_used_bytes: Number | None = None


class GpuLine(_Line, frozen=True, kw_only=True, tag="gpu"):
    """One sample of one GPU."""

    t: Time
    pod: str
    uuid: str
    utilization: Ratio | None = None
    memory_used_bytes: Number | None = None
    memory_peak_bytes: Number | None = None
    """Highest since this GPU's line before."""
    power_watts: Number | None = None
    temperature_celsius: float | None = None
    sm_active: Ratio | None = None
    tensor_active: Ratio | None = None
    throttled: list[str] | None = None
    """NVML's clocks-event reasons in snake case; empty: none."""
    processes: list[GpuProcess] | None = None
    """None: not looked at in this sample; empty: nobody is to be seen there."""


class HostProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a pod and its resident memory."""

    pid: int
    title: str | None = None
    rss_bytes: Number | None = None


class HostLine(_Line, frozen=True, kw_only=True, tag="host"):
    """One sample of a pod's host memory."""

    t: Time
    pod: str
    memory_used_bytes: Number | None = None
    """Working set of the pod."""
    memory_limit_bytes: Number | None = None
    shm_used_bytes: Number | None = None
    shm_size_bytes: Number | None = None
    processes: list[HostProcess] | None = None


class TaskLine(_Line, frozen=True, kw_only=True, tag="task"):
    """A Ray task of a pod began or ended. One that dies has a begin and no end."""

    t: Time
    pod: str
    pid: int | None = None
    local_rank: int | None = None
    """None for servers and agents."""
    name: str
    state: str
    """`begin` or `end`."""


class TitleLine(_Line, frozen=True, kw_only=True, tag="title"):
    """A process has this title from now on."""

    t: Time
    pod: str
    pid: int
    title: str
    parent_pid: int | None = None


class MarkLine(_Line, frozen=True, kw_only=True, tag="mark"):
    """The training program says that a stage began or ended."""

    t: Time
    pod: str
    rank: int | None = None
    stage: str
    role: str | None = None
    state: str
    step: int | None = None


class StepLine(_Line, frozen=True, kw_only=True, tag="step"):
    """The trainer finished this step."""

    t: Time
    step: int | None = None


class XidLine(_Line, frozen=True, kw_only=True, tag="xid"):
    """The driver reported an Xid."""

    t: Time
    pod: str | None = None
    uuid: str | None = None
    code: int


class NvmlLine(_Line, frozen=True, kw_only=True, tag="nvml"):
    """NVML's answer changed."""

    t: Time
    pod: str
    uuid: str | None = None
    """None: the library itself."""
    error: str | None = None
    """NVML's name without its prefix; None: recovered."""


class PodLine(_Line, frozen=True, kw_only=True, tag="pod"):
    """State of a pod's container changed."""

    t: Time
    pod: str
    phase: str | None = None
    container: str | None = None
    reason: str | None = None
    exit_code: int | None = None
    restart_count: int | None = None


class JobLine(_Line, frozen=True, kw_only=True, tag="job"):
    """The workload's phase changed."""

    t: Time
    phase: str | None = None
    message: str | None = None


Record = GpuLine | HostLine | TaskLine | TitleLine | MarkLine | StepLine | XidLine | NvmlLine | PodLine | JobLine
"""Every line but the header."""

KNOWN_TYPES: Final = frozenset(
    ("header", "gpu", "host", "task", "title", "mark", "step", "xid", "nvml", "pod", "job"),
)


class _Kind(msgspec.Struct, frozen=True):
    type: str | None = None


_ANY = msgspec.json.Decoder(Header | Record)
_KIND = msgspec.json.Decoder(_Kind)


def parse_line(line: bytes) -> Header | Record | None:
    """Return what a line says; None for a type that is not known here. Raises BrokenLine."""
    if len(line) > MAX_LINE_BYTES:
        raise BrokenLine(f"is longer than {MAX_LINE_BYTES} bytes")
    try:
        return _ANY.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if _foreign(line):
            return None
        raise BrokenLine(str(error)) from error


def parse_header(line: bytes) -> Header:
    """Return the first line's header. Raises NotATrace, whose text says what is there instead."""
    try:
        header = parse_line(line)
    except BrokenLine as error:
        raise NotATrace(f"the first line is no header of a trace: {error}") from error
    if not isinstance(header, Header):
        raise NotATrace("the first line is no header of a trace")
    if header.format != TRACE_FORMAT:
        raise NotATrace(f"its format is {header.format!r}; this version reads {TRACE_FORMAT!r}")
    return header


def _foreign(line: bytes) -> bool:
    """Say whether a line is well-formed JSON of a type that is not known here."""
    try:
        kind = _KIND.decode(line).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return kind is not None and kind not in KNOWN_TYPES
