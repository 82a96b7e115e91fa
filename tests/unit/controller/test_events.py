# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Events: one for each transition, found again after a restart, and never an endless retry."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.controller import events
from verl_gpumonitor_operator.controller.events import (
    EventRecorder,
    ObjectRef,
    Occurrence,
    Step,
    TokenBucket,
    after_failure,
    first_step,
)
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    ServerFaultError,
    TooManyRequestsError,
    UnreachableError,
)


def occurrence(reason: str = "OOMRisk", *, uid: str = "uid-1", note: str = "Memory runs out.") -> Occurrence:
    reference = ObjectRef(api_version="ray.io/v1", kind="RayJob", namespace="train", name="grpo", uid=uid)
    return Occurrence(regarding=reference, reason=reason, note=note, severity=Severity.WARNING, at=1000.5)


@pytest.mark.parametrize(
    ("step", "error", "following"),
    [
        pytest.param(Step.POST, ConflictError("x"), Step.READ, id="it exists: ask how often it happened"),
        pytest.param(Step.READ, NotFoundError("x"), Step.POST, id="it expired meanwhile"),
        pytest.param(Step.PATCH, NotFoundError("x"), Step.POST, id="it expired, so it is new"),
        pytest.param(Step.POST, NotFoundError("x"), Step.DROP, id="the namespace is gone"),
        pytest.param(Step.POST, ForbiddenError("x"), Step.DROP, id="the namespace is being deleted"),
        pytest.param(Step.PATCH, ForbiddenError("x"), Step.DROP, id="a patch is refused"),
        pytest.param(Step.POST, InvalidError("x"), Step.DROP, id="the server will never take it"),
        pytest.param(Step.POST, ServerFaultError("x"), Step.WAIT, id="the server fails"),
        pytest.param(Step.POST, TooManyRequestsError("x"), Step.WAIT, id="the server asks for patience"),
        pytest.param(Step.PATCH, UnreachableError("x"), Step.WAIT, id="no answer"),
        pytest.param(Step.PATCH, ConflictError("x"), Step.DROP, id="a conflict in a patch is not ours to solve"),
    ],
)
def test_after_failure(step: Step, error: KubeError, following: Step) -> None:
    assert after_failure(step, error) is following


def test_first_step() -> None:
    assert first_step(remembered=False) is Step.POST
    assert first_step(remembered=True) is Step.PATCH


def test_the_body_is_what_the_api_server_demands() -> None:
    body = events.body(occurrence(note="ü" * 2000), instance="pod-1")
    assert body["regarding"]["uid"] == "uid-1"
    assert body["metadata"]["namespace"] == body["regarding"]["namespace"]
    assert body["eventTime"] == "1970-01-01T00:16:40.500000Z"
    assert body["type"] == "Warning"
    assert len(body["note"].encode()) <= 1024
    assert body["note"].endswith("…")
    assert {"action", "reason", "reportingController", "reportingInstance"} <= body.keys()


def test_the_name_depends_on_object_and_reason_alone() -> None:
    assert occurrence(note="a").name == occurrence(note="b").name
    assert occurrence("OOMRisk").name != occurrence("Imbalance").name
    assert occurrence(uid="uid-1").name != occurrence(uid="uid-2").name


def test_info_is_a_normal_event() -> None:
    assert (
        Occurrence(regarding=occurrence().regarding, reason="x", note="x", severity=Severity.INFO, at=0.0).event_type
        == "Normal"
    )


def test_token_bucket_lets_a_burst_pass_and_then_the_rate() -> None:
    bucket = TokenBucket(rate=5.0, burst=3)
    assert [bucket.wait(0.0) for _ in range(5)] == [0.0, 0.0, 0.0, pytest.approx(0.2), pytest.approx(0.4)]
    assert bucket.wait(100.0) == 0.0


class FakeServer:
    """Keeps Events as an API server does; answers what it is told to for the first requests."""

    def __init__(self, *failures: KubeError) -> None:
        self.failures = list(failures)
        self.held: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []

    def _fail(self, verb: str) -> None:
        self.requests.append(verb)
        if self.failures:
            raise self.failures.pop(0)

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._fail("POST")
        key = f"{path}/{body['metadata']['name']}"
        if key in self.held:
            raise ConflictError("exists", status=409)
        self.held[key] = dict(body)
        return b"{}"

    async def get(self, path: str) -> bytes:
        self._fail("GET")
        if path not in self.held:
            raise NotFoundError("gone", status=404)
        return msgspec.json.encode(self.held[path])

    async def merge_patch(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._fail("PATCH")
        if path not in self.held:
            raise NotFoundError("gone", status=404)
        self.held[path] |= body
        return b"{}"


async def recorded(server: FakeServer, *given: Occurrence, rounds: int = 1) -> EventRecorder:
    recorder = EventRecorder(
        cast(KubeClient, server), instance="pod-1", rate=1e6, burst=1000, clock=asyncio.get_running_loop().time
    )
    task = asyncio.create_task(recorder.run())
    for _ in range(rounds):
        for item in given:
            recorder.record(item)
        for _ in range(20):
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return recorder


async def test_a_repeat_becomes_a_series_of_the_same_event() -> None:
    server = FakeServer()
    await recorded(server, occurrence(), rounds=3)
    (event,) = server.held.values()
    assert event["series"]["count"] == 3
    assert server.requests == ["POST", "PATCH", "PATCH"]


async def test_after_a_restart_the_same_event_is_found_again() -> None:
    server = FakeServer()
    await recorded(server, occurrence(), rounds=2)
    await recorded(server, occurrence())
    (event,) = server.held.values()
    assert event["series"]["count"] == 3
    assert server.requests[-3:] == ["POST", "GET", "PATCH"]


async def test_a_refused_event_is_counted_and_not_tried_again() -> None:
    server = FakeServer(ForbiddenError("being terminated", status=403))
    recorder = await recorded(server, occurrence())
    assert recorder.counts.refused == 1
    assert server.requests == ["POST"]
    assert recorder.waiting == 0


async def test_the_same_event_waits_once_and_a_full_queue_counts_what_it_drops() -> None:
    recorder = EventRecorder(cast(KubeClient, FakeServer()), instance="p", rate=1.0, burst=1, clock=lambda: 0.0)
    for _ in range(10):
        recorder.record(occurrence())
    assert recorder.waiting == 1
    for number in range(events.MAX_QUEUE + 5):
        recorder.record(occurrence(uid=f"uid-x{number}"))
    assert recorder.waiting == events.MAX_QUEUE
    assert recorder.counts.overflowed == 6


def about(subject: str) -> Occurrence:
    return replace(occurrence(note=f"GPU {subject} is lost."), subject=subject)


def test_another_gpu_has_an_event_of_its_own_and_a_thousand_have_a_few() -> None:
    names = [about(f"GPU-{number}").name for number in range(1000)]
    assert len(set(names)) == events.SUBJECTS
    assert about("GPU-0").name != about("GPU-1").name
    assert about("GPU-0").name == names[0], "a restarted controller finds it again"


def test_without_a_subject_the_name_is_that_of_versions_before() -> None:
    assert occurrence().name == "grpo.a8fe7870b1eafd57"
