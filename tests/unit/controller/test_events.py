# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Events: one for each transition, found again after a restart, and never an endless retry."""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from tests.unit.controller.virtual import VirtualClock
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
    HeldBackError,
    InvalidError,
    KubeError,
    NotFoundError,
    ServerFaultError,
    TooManyRequestsError,
    UnauthorizedError,
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
        pytest.param(Step.PATCH, ConflictError("x"), Step.WAIT, id="another writer was first"),
        pytest.param(
            Step.POST, ConflictError("x", reason="Conflict"), Step.WAIT, id="another writer of the namespace's quota"
        ),
        pytest.param(
            Step.POST, ConflictError("x", reason="AlreadyExists"), Step.READ, id="it exists, in so many words"
        ),
        pytest.param(Step.POST, UnauthorizedError("x"), Step.WAIT, id="the token is being renewed"),
        pytest.param(Step.POST, HeldBackError("x"), Step.WAIT, id="the Lease is not confirmed"),
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("grpo", id="a short one"),
        pytest.param("a" * 199 + "-" + "b" * 53, id="cut behind a dash"),
        pytest.param("a" * 198 + ".-" + "b" * 53, id="cut behind a dot and a dash"),
        pytest.param("a" * 199 + ".b" + "c" * 52, id="cut behind a dot"),
        pytest.param("a" * 253, id="as long as a name may be"),
    ],
)
def test_the_name_is_one_that_the_api_server_takes(name: str) -> None:
    reference = replace(occurrence().regarding, name=name)
    made = replace(occurrence(), regarding=reference).name
    assert len(made) <= 253
    assert DNS_SUBDOMAIN.fullmatch(made)


DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


class Cluster(VirtualClock):
    """An API server with many namespaces, on a clock of its own that passes while the recorder sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.held: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[float, str, str]] = []
        """When, verb, path."""
        self.answers: dict[str, Callable[[str], KubeError | None]] = {}
        """By namespace: what it says to a verb."""
        self.recorder = EventRecorder(
            cast(KubeClient, self), instance="pod-1", rate=5.0, burst=50, clock=lambda: self.now
        )

    def _ask(self, verb: str, path: str) -> None:
        self.requests.append((self.now, verb, path))
        namespace = path.split("/namespaces/")[1].split("/")[0]
        answer = self.answers.get(namespace)
        error = answer(verb) if answer is not None else None
        if error is not None:
            raise error

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._ask("POST", path)
        key = f"{path}/{body['metadata']['name']}"
        if key in self.held:
            raise ConflictError("exists", status=409, reason="AlreadyExists")
        self.held[key] = dict(body)
        return b"{}"

    async def get(self, path: str) -> bytes:
        self._ask("GET", path)
        return msgspec.json.encode(self.held[path])

    async def merge_patch(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._ask("PATCH", path)
        if path not in self.held:
            raise NotFoundError("gone", status=404)
        self.held[path] |= body
        return b"{}"

    def happen(self, reason: str, *, uid: str, namespace: str = "train", severity: Severity = Severity.WARNING) -> None:
        reference = ObjectRef(api_version="ray.io/v1", kind="RayJob", namespace=namespace, name=uid, uid=uid)
        self.recorder.record(
            Occurrence(regarding=reference, reason=reason, note=reason, severity=severity, at=self.now)
        )

    async def until(self, seconds: float, every: float = 10.0, flap: Callable[[int], None] = lambda _: None) -> None:
        """Let time pass; `flap` is called each so many seconds."""
        task = asyncio.create_task(self.recorder.run())
        for number in range(int(seconds / every)):
            flap(number)
            await asyncio.sleep(every)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_thousand_jobs_that_flap_are_written_at_the_pace_and_each_within_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    reasons = ("OOMRisk", "Imbalance", "Throttled")

    def flap(number: int) -> None:
        for job in range(1000):
            for reason in reasons:
                cluster.happen(
                    reason + ("Resolved" if number % 2 else ""),
                    uid=f"job-{job}",
                    severity=Severity.INFO if number % 2 else Severity.WARNING,
                )

    await cluster.until(600.0, every=30.0, flap=flap)
    begin = cluster.requests[0][0]
    assert len(cluster.requests) <= 50 + 5 * (cluster.now - begin) + 1
    assert cluster.recorder.waiting <= events.MAX_QUEUE
    assert cluster.recorder.counts.overflowed > 0, "what was dropped is counted"
    first = [body["reason"] for body in list(cluster.held.values())[:1000]]
    assert not any(reason.endswith("Resolved") for reason in first), "news before the all-clear"


async def test_one_job_that_flaps_all_day_is_a_number_that_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    await cluster.until(24 * 3600.0, every=10.0, flap=lambda _: cluster.happen("Imbalance", uid="job-0"))
    (event,) = cluster.held.values()
    day = 24 * 3600
    assert len(cluster.requests) <= 1 + 25 + day / 300 + 1
    assert event["series"]["count"] >= day / 10 - 31, "all are counted, but for those that wait"
    assert event["series"]["count"] + 31 >= cluster.recorder.counts.posted + cluster.recorder.counts.repeated


async def test_a_quota_that_refuses_is_asked_now_and_then_and_costs_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.answers["full"] = lambda verb: (
        ForbiddenError("exceeded quota: events", status=403) if verb == "POST" else None
    )

    def flap(number: int) -> None:
        for job in range(1000):
            cluster.happen("OOMRisk", uid=f"full-{job}", namespace="full", severity=Severity.CRITICAL)
        cluster.happen(f"Reason{number}", uid="other", namespace="free", severity=Severity.INFO)

    await cluster.until(300.0, every=10.0, flap=flap)
    assert sum("/full/" in path for _, _, path in cluster.requests) <= 300 / events.REFUSED_SECONDS + events.REFUSALS
    assert sum(body["regarding"]["namespace"] == "free" for body in cluster.held.values()) == 30
    assert cluster.recorder.counts.refused == 30_000
    del cluster.answers["full"]
    await cluster.until(60.0, flap=lambda _: cluster.happen("OOMRisk", uid="full-0", namespace="full"))
    assert any(body["regarding"]["namespace"] == "full" for body in cluster.held.values()), "it has room again"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(TooManyRequestsError("slow down", status=429, retry_after_seconds=5.0), id="429"),
        pytest.param(ServerFaultError("webhook", status=500), id="500"),
        pytest.param(ConflictError("quota", status=409, reason="Conflict"), id="409 of a quota"),
    ],
)
async def test_a_namespace_that_fails_holds_nobody_else_up(monkeypatch: pytest.MonkeyPatch, error: KubeError) -> None:
    cluster = Cluster(monkeypatch)
    cluster.answers["bad"] = lambda _: error
    for job in range(40):
        cluster.happen("Hung", uid=f"bad-{job}", namespace="bad", severity=Severity.CRITICAL)
    cluster.happen("OOMRisk", uid="other", namespace="good")
    written: list[int] = []
    await cluster.until(300.0, flap=lambda _: written.append(len(cluster.held)))
    assert written[2] == 1, "after 20 s"
    assert cluster.recorder.waiting == 0
    assert cluster.recorder.counts.given_up == 40
    assert sum("/bad/" in path for _, _, path in cluster.requests) == 40 * events.MAX_TRIES


async def test_an_outage_of_a_minute_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    back = cluster.now + 60.0
    cluster.answers["train"] = lambda _: UnreachableError("away") if cluster.now < back else None
    cluster.happen("OOMRisk", uid="job-0")
    await cluster.until(120.0)
    assert len(cluster.held) == 1


async def test_an_event_whose_answer_was_lost_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    post, lost = cluster.post, [True]

    async def answer_is_lost(path: str, body: Mapping[str, Any]) -> bytes:
        answer = await post(path, body)
        if lost.pop() if lost else False:
            raise UnreachableError("reset")
        return answer

    monkeypatch.setattr(cluster, "post", answer_is_lost)
    cluster.happen("OOMRisk", uid="job-0")
    await cluster.until(10.0)
    (event,) = cluster.held.values()
    assert "series" not in event


async def test_what_came_while_the_first_waited_is_in_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    for _ in range(3):
        cluster.happen("OOMRisk", uid="job-0")
    await cluster.until(10.0)
    (event,) = cluster.held.values()
    assert event["series"]["count"] == 3


def test_a_full_queue_drops_the_least_grave() -> None:
    recorder = EventRecorder(cast(KubeClient, FakeServer()), instance="p", rate=1.0, burst=1, clock=lambda: 0.0)
    for number in range(events.MAX_QUEUE):
        recorder.record(replace(occurrence(uid=f"uid-{number}"), severity=Severity.INFO))
    recorder.record(replace(occurrence("Hung", uid="uid-hung"), severity=Severity.CRITICAL))
    assert recorder.waiting == events.MAX_QUEUE
    assert recorder.counts.overflowed == 1
    first = recorder._queue.take(0.0)
    assert first is not None
    assert first.occurrence.reason == "Hung"
    assert f"train/{occurrence(uid='uid-0').name}" in recorder._queue._by_severity[Severity.INFO], "the newest goes"
