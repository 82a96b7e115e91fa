# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A sweep finds what watches missed, and judges nothing that it may not see."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest

from tests.unit.controller.builders import metadata
from verl_gpumonitor_operator.controller.jobs import KINDS, JobKind
from verl_gpumonitor_operator.controller.reconciler import Reconciler
from verl_gpumonitor_operator.controller.sweep import ABSENT_SECONDS, RETRY_SECONDS, SETTLE_SWEEPS, Sweeper
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import (
    ForbiddenError,
    KubeError,
    NotFoundError,
    ServerFaultError,
    UnreachableError,
)

MONITORS = "/apis/gpumonitor.dev/v1alpha1/gpumonitors"


class Lists:
    """A server with lists."""

    def __init__(self) -> None:
        self.held: dict[str, list[dict[str, Any]] | KubeError] = {info.path: [] for info in KINDS.values()}
        self.held[MONITORS] = []
        self.served: dict[str, list[str] | KubeError] = {}
        """What discovery says of a group and version: all that is held and not a 404, unless told otherwise."""

    async def get(self, path: str, query: Mapping[str, Any] | None = None) -> bytes:
        if query is None:
            return self.discovery(path)
        found = self.held[path]
        if isinstance(found, KubeError):
            raise found
        return msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "items": found})

    def discovery(self, path: str) -> bytes:
        held = [name for name, found in self.held.items() if not isinstance(found, NotFoundError)]
        default = [name.removeprefix(f"{path}/") for name in held if name.startswith(f"{path}/")]
        served = self.served.get(path, default or NotFoundError("no such group", status=404))
        if isinstance(served, KubeError):
            raise served
        return msgspec.json.encode({"kind": "APIResourceList", "resources": [{"name": name} for name in served]})


class Clock:
    """Time that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Believes:
    """A reconciler that only remembers."""

    def __init__(self) -> None:
        self.jobs: dict[JobKind, set[str]] = {kind: set() for kind in JobKind}
        self.monitors: set[tuple[str, str, str]] = set()
        self.listed_kinds: set[JobKind] = set()

    def kind_listed(self, kind: JobKind) -> None:
        self.listed_kinds.add(kind)

    def known_jobs(self, kind: JobKind) -> set[str]:
        return set(self.jobs[kind])

    def job_seen(self, kind: JobKind, body: Mapping[str, Any]) -> None:
        self.jobs[kind].add(body["metadata"]["uid"])

    def job_gone(self, kind: JobKind, uid: str) -> None:
        self.jobs[kind].discard(uid)

    def known_monitors(self) -> set[tuple[str, str, str]]:
        return set(self.monitors)

    def monitor_seen(self, body: Mapping[str, Any]) -> None:
        meta = body["metadata"]
        self.monitors.add((meta["namespace"], meta["name"], meta["uid"]))

    def monitor_gone(self, namespace: str, name: str, uid: str) -> None:
        self.monitors.discard((namespace, name, uid))


def swept(clock: Clock | None = None) -> tuple[Lists, Believes, Sweeper]:
    lists, believes = Lists(), Believes()
    return lists, believes, Sweeper(cast(KubeClient, lists), cast(Reconciler, believes), clock=clock or Clock())


RAY = KINDS[JobKind.RAY_JOB].path


async def test_what_is_listed_is_seen_and_what_is_not_is_gone() -> None:
    lists, believes, sweeper = swept()
    believes.jobs[JobKind.RAY_JOB] = {"uid-old", "uid-kept"}
    believes.monitors = {("train", "old", "uid-m")}
    lists.held[RAY] = [{"metadata": metadata("kept")}, {"metadata": metadata("new")}]
    assert await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-kept", "uid-new"}
    assert believes.monitors == set()
    assert sweeper.state.corrected == 1
    assert believes.listed_kinds == set(JobKind)


async def test_a_fault_of_ours_over_one_object_keeps_no_other_from_being_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lists, believes, sweeper = swept()
    believes.jobs[JobKind.RAY_JOB] = {"uid-bad"}
    lists.held[RAY] = [{"metadata": metadata(name)} for name in ("a", "bad", "b")]
    taken = believes.job_seen

    def job_seen(kind: JobKind, body: Mapping[str, Any]) -> None:
        if body["metadata"]["name"] == "bad":
            raise KeyError("bad")
        taken(kind, body)

    monkeypatch.setattr(believes, "job_seen", job_seen)
    assert await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-a", "uid-b", "uid-bad"}, "what is listed is not gone"
    assert "object cannot be taken, left out" in caplog.messages


ABSENT = NotFoundError("no such kind", status=404)


async def test_a_kind_whose_crd_is_absent_for_long_has_no_objects() -> None:
    clock = Clock()
    lists, believes, sweeper = swept(clock)
    believes.jobs[JobKind.RAY_JOB] = {"uid-old"}
    lists.held[RAY] = ABSENT
    for seconds in (0.0, 120.0, 120.0):
        clock.now += seconds
        assert await sweeper.sweep(), "other kinds are listed, so it is no failure"
        assert believes.jobs[JobKind.RAY_JOB] == {"uid-old"}
        assert JobKind.RAY_JOB not in believes.listed_kinds
        assert sweeper.state.absent == {"RayJob"}
    clock.now += 120.0
    assert await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == set()
    assert JobKind.RAY_JOB in believes.listed_kinds
    lists.held[RAY] = []
    assert await sweeper.sweep()
    assert sweeper.state.absent == set()


async def test_few_answers_far_apart_are_not_enough() -> None:
    clock = Clock()
    lists, believes, sweeper = swept(clock)
    believes.jobs[JobKind.RAY_JOB] = {"uid-old"}
    lists.held[RAY] = ABSENT
    await sweeper.sweep()
    clock.now += 10 * ABSENT_SECONDS
    await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-old"}


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([], id="a list that works"),
        pytest.param(UnreachableError("reset"), id="a list that fails"),
    ],
)
async def test_an_absence_that_was_interrupted_begins_anew(between: list[dict[str, Any]] | KubeError) -> None:
    clock = Clock()
    lists, believes, sweeper = swept(clock)
    for found in (ABSENT, ABSENT, between, ABSENT):
        lists.held[RAY] = found
        await sweeper.sweep()
        clock.now += ABSENT_SECONDS
    believes.jobs[JobKind.RAY_JOB] = {"uid-old"}
    lists.held[RAY] = ABSENT
    await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-old"}


@pytest.mark.parametrize(
    "discovery",
    [
        pytest.param(["rayclusters", "rayjobs"], id="discovery knows the kind"),
        pytest.param(ServerFaultError("etcd", status=500), id="discovery fails"),
        pytest.param(UnreachableError("reset"), id="discovery is away"),
        pytest.param(ForbiddenError("no", status=403), id="discovery may not be asked"),
    ],
)
async def test_a_404_that_discovery_does_not_confirm_is_a_hiccup(discovery: list[str] | KubeError) -> None:
    clock = Clock()
    lists, believes, sweeper = swept(clock)
    believes.jobs[JobKind.RAY_JOB] = {"uid-old"}
    lists.held[RAY] = ABSENT
    lists.served["/apis/ray.io/v1"] = discovery
    for _ in range(5):
        assert not await sweeper.sweep()
        clock.now += ABSENT_SECONDS
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-old"}
    assert sweeper.state.failing == {"RayJob"}


async def test_our_own_monitors_are_not_believed_gone_by_one_404_either() -> None:
    lists, believes, sweeper = swept()
    believes.monitors = {("train", "old", "uid-m")}
    lists.held[MONITORS] = ABSENT
    assert await sweeper.sweep()
    assert believes.monitors == {("train", "old", "uid-m")}


async def test_the_first_lists_do_not_wait_for_kinds_that_are_not_installed() -> None:
    lists, believes, sweeper = swept()
    lists.held[KINDS[JobKind.PYTORCH_JOB].path] = ABSENT
    await sweeper.complete()
    assert believes.listed_kinds == set(JobKind) - {JobKind.PYTORCH_JOB}


async def test_a_kind_that_may_not_be_listed_is_not_judged() -> None:
    lists, believes, sweeper = swept()
    believes.jobs[JobKind.RAY_JOB] = {"uid-old"}
    lists.held[RAY] = ForbiddenError("no", status=403)
    assert await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-old"}
    assert JobKind.RAY_JOB not in believes.listed_kinds
    assert sweeper.state.refused == {"RayJob"}


async def test_a_list_that_fails_judges_nothing() -> None:
    lists, believes, sweeper = swept()
    believes.jobs[JobKind.RAY_JOB] = {"uid-old"}
    lists.held[RAY] = UnreachableError("reset")
    assert not await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-old"}
    assert sweeper.state.failures == 1


async def test_a_broken_kind_keeps_nobody_from_the_others() -> None:
    lists, believes, sweeper = swept()
    believes.jobs = {kind: {"uid-old"} for kind in JobKind}
    lists.held[KINDS[JobKind.RAY_CLUSTER].path] = ServerFaultError("conversion webhook failed", status=500)
    assert not await sweeper.sweep()
    assert believes.jobs == {kind: {"uid-old"} if kind is JobKind.RAY_CLUSTER else set() for kind in JobKind}
    assert believes.listed_kinds == set(JobKind) - {JobKind.RAY_CLUSTER}
    assert sweeper.state.failing == {"RayCluster"}
    lists.held[KINDS[JobKind.RAY_CLUSTER].path] = []
    assert await sweeper.sweep()
    assert sweeper.state.failing == set()


async def test_an_object_nested_deeper_than_python_reads_fails_the_list_of_its_kind_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists, believes, sweeper = swept()
    believes.jobs = {kind: {"uid-old"} for kind in JobKind}
    answered = lists.get

    async def get(path: str, query: Mapping[str, Any] | None = None) -> bytes:
        if path == RAY:
            return b'{"items":[' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"]}"
        return await answered(path, query)

    monkeypatch.setattr(lists, "get", get)
    assert not await sweeper.sweep()
    assert sweeper.state.failing == {"RayJob"}
    assert believes.jobs == {kind: {"uid-old"} if kind is JobKind.RAY_JOB else set() for kind in JobKind}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were made, none of which takes time; the hundredth ends the test's work."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)
        if len(made) == 100:
            raise TimeoutError

    monkeypatch.setattr(asyncio, "sleep", pause)
    return made


async def test_the_first_lists_do_not_wait_for_ever_for_a_broken_kind(pauses: list[float]) -> None:
    lists, believes, sweeper = swept()
    lists.held[KINDS[JobKind.TRAIN_JOB].path] = ServerFaultError("conversion webhook failed", status=500)
    await sweeper.complete()
    assert pauses == [RETRY_SECONDS] * (SETTLE_SWEEPS - 1)
    assert believes.listed_kinds == set(JobKind) - {JobKind.TRAIN_JOB}


async def test_the_first_lists_wait_for_a_server_that_is_away(pauses: list[float]) -> None:
    lists, _, sweeper = swept()
    lists.held = dict.fromkeys(lists.held, UnreachableError("refused"))
    with pytest.raises(TimeoutError):
        await sweeper.complete()
    assert len(pauses) == 100


async def test_an_object_that_comes_while_the_list_is_under_way_is_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists, believes, sweeper = swept()
    real = lists.get

    async def get(path: str, query: Mapping[str, Any] | None = None) -> bytes:
        if path == RAY:
            believes.jobs[JobKind.RAY_JOB].add("uid-just-now")
        return await real(path, query)

    monkeypatch.setattr(lists, "get", get)
    assert await sweeper.sweep()
    assert believes.jobs[JobKind.RAY_JOB] == {"uid-just-now"}
