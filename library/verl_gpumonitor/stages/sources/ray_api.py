# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Answers of Ray's dashboard, its State API and its jobs list -> values. Pure parsers of what the job's own head says.

Only the few fields that are needed are decoded: a task's whole record is 1.6 KB, with its runtime environment. Ray
writes some numbers as text, in some versions.
"""

from collections.abc import Iterable
from typing import Final, Generic, TypeVar

import msgspec

from verl_gpumonitor.stages.cluster import RayActor, RayHost, RayTask

MAX_TEXT: Final = 512

_Number = int | float | str | None
_T = TypeVar("_T")


class RayApiError(Exception):
    """The answer is none of the State API's, or says that it failed."""


class Listing(msgspec.Struct, Generic[_T], frozen=True):
    """One answer of a list."""

    items: tuple[_T, ...]
    whole: bool
    """False: there is more of it than the limit let through."""


class RayJobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the jobs list; the entrypoint may hold secrets."""

    job_id: str = ""
    """Ray's own; empty before the driver runs."""
    submission_id: str = ""
    status: str = ""
    entrypoint: str = ""
    started_at: float | None = None


class _Task(msgspec.Struct):
    task_id: str | None = None
    name: str | None = None
    func_or_class_name: str | None = None
    node_id: str | None = None
    actor_id: str | None = None
    job_id: str | None = None
    worker_pid: _Number = None
    start_time_ms: _Number = None
    attempt_number: _Number = None


class _Actor(msgspec.Struct):
    actor_id: str | None = None
    class_name: str | None = None
    name: str | None = None
    node_id: str | None = None
    job_id: str | None = None


class _Host(msgspec.Struct):
    node_id: str | None = None
    node_ip: str | None = None
    resources_total: dict[str, msgspec.Raw] | None = None


class _List(msgspec.Struct, Generic[_T]):
    result: list[_T]
    num_filtered: _Number = None
    warnings: list[str] | None = None


class _Data(msgspec.Struct, Generic[_T]):
    result: _List[_T]


class _Answer(msgspec.Struct, Generic[_T]):
    data: _Data[_T] | None = None
    msg: str | None = None


class _Job(msgspec.Struct):
    job_id: str | None = None
    submission_id: str | None = None
    status: str | None = None
    entrypoint: str | None = None
    start_time: _Number = None


_tasks = msgspec.json.Decoder(_Answer[_Task])
_actors = msgspec.json.Decoder(_Answer[_Actor])
_hosts = msgspec.json.Decoder(_Answer[_Host])
_jobs = msgspec.json.Decoder(list[_Job])


def parse_tasks(body: bytes | bytearray) -> Listing[RayTask]:
    """Return the tasks of `/api/v0/tasks?detail=1`; those without name or node are left out. Raises RayApiError."""
    listing = _decode(_tasks, body)
    return Listing(tuple(_each(_task(raw) for raw in listing.items)), listing.whole)


def parse_actors(body: bytes | bytearray) -> Listing[RayActor]:
    """Return the actors of `/api/v0/actors`. Raises RayApiError."""
    listing = _decode(_actors, body)
    return Listing(tuple(_each(_actor(raw) for raw in listing.items)), listing.whole)


def parse_hosts(body: bytes | bytearray) -> Listing[RayHost]:
    """Return the nodes of `/api/v0/nodes`. Raises RayApiError."""
    listing = _decode(_hosts, body)
    return Listing(tuple(_each(_host(raw) for raw in listing.items)), listing.whole)


def parse_jobs(body: bytes | bytearray) -> list[RayJobEntry]:
    """Return the entries of `/api/jobs/` in Ray's order. Raises RayApiError."""
    try:
        raws = _jobs.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RayApiError(str(error)) from error
    return [
        RayJobEntry(
            job_id=_text(raw.job_id),
            submission_id=_text(raw.submission_id)[:128],
            status=_text(raw.status)[:32],
            entrypoint=raw.entrypoint or "",
            started_at=_seconds(raw.start_time),
        )
        for raw in raws
    ]


def _decode(decoder: "msgspec.json.Decoder[_Answer[_T]]", body: bytes | bytearray) -> Listing[_T]:
    try:
        answer = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RayApiError(str(error)) from error
    if answer.data is None:
        raise RayApiError(_text(answer.msg) or "the answer has no data")
    listing = answer.data.result
    if not listing.result and listing.warnings:
        # Ray's store did not answer the dashboard: nothing is known, which is not "nothing runs".
        raise RayApiError(listing.warnings[0][:MAX_TEXT])
    filtered = _number(listing.num_filtered)
    return Listing(tuple(listing.result), filtered is None or filtered <= len(listing.result))


def _each(values: Iterable[_T | None]) -> Iterable[_T]:
    return (value for value in values if value is not None)


def _task(raw: _Task) -> RayTask | None:
    name = (raw.name or raw.func_or_class_name or "")[:2048]
    if not name or not raw.node_id or not raw.task_id:
        return None
    pid = _number(raw.worker_pid)
    return RayTask(
        task_id=f"{_text(raw.task_id)}#{_number(raw.attempt_number) or 0:.0f}",
        name=name,
        node_id=_text(raw.node_id),
        actor_id=_text(raw.actor_id),
        job_id=_text(raw.job_id),
        pid=None if pid is None or not 0 < pid < 2**31 else int(pid),
        begin=_seconds(raw.start_time_ms),
    )


def _actor(raw: _Actor) -> RayActor | None:
    if not raw.actor_id or not raw.node_id:
        return None
    return RayActor(
        actor_id=_text(raw.actor_id),
        class_name=_text(raw.class_name),
        name=_text(raw.name),
        node_id=_text(raw.node_id),
        job_id=_text(raw.job_id),
    )


def _host(raw: _Host) -> RayHost | None:
    if not raw.node_id or not raw.node_ip or len(raw.node_ip) > 64:
        return None
    has_gpus = "GPU" in (raw.resources_total or {})
    return RayHost(node_id=_text(raw.node_id), ip=raw.node_ip, has_gpus=has_gpus)


def _text(value: str | None) -> str:
    return (value or "")[:MAX_TEXT]


def _number(value: _Number) -> float | None:
    """Return a finite number, also one that is written as text."""
    try:
        number = float(value) if value is not None and (not isinstance(value, str) or len(value) < 32) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 2**53 else None


def _seconds(milliseconds: _Number) -> float | None:
    """Return Unix seconds; None for what is no time of this century, such as Ray's 0 for not yet."""
    number = _number(milliseconds)
    return None if number is None or not 1e12 <= number < 4e12 else number / 1000
