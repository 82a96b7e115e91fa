# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""kopf is held to looking: no handler that keeps state, nothing returned, nothing posted."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import kopf
import pytest

from verl_gpumonitor_operator.controller import watch
from verl_gpumonitor_operator.controller.watch import RESOURCES, Supervisor, Watched
from verl_gpumonitor_operator.kube.client import Access
from verl_gpumonitor_operator.kube.errors import UnreachableError

ACCESS = Access(
    server="https://127.0.0.1:1",
    ca_file=None,
    certificate_file=None,
    key_file=None,
    token="t",
    insecure=False,
    in_cluster=False,
)


def registry(seen: list[tuple[bool, Mapping[str, Any]]]) -> kopf.OperatorRegistry:
    made = kopf.OperatorRegistry()
    for watched in Watched:
        watch.register(made, watched, lambda deleted, body: seen.append((deleted, body)))
    return made


def test_only_event_handlers_are_registered() -> None:
    made = registry([])
    assert len(list(made._watching.get_all_handlers())) == len(Watched)
    for other in (made._changing, made._spawning, made._indexing, made._webhooks):
        assert list(other.get_all_handlers()) == []


@pytest.mark.parametrize(("kind", "deleted"), [("ADDED", False), ("MODIFIED", False), (None, False), ("DELETED", True)])
async def test_handlers_return_none_and_hand_over_a_copy(kind: str | None, deleted: bool) -> None:
    seen: list[tuple[bool, Mapping[str, Any]]] = []
    body = {"metadata": {"name": "x"}}
    for handler in registry(seen)._watching.get_all_handlers():
        result = await cast(Any, handler.fn)(event={"type": kind, "object": body}, memo=None)
        assert result is None, "a result is written into the user's object"
    assert seen == [(deleted, body)] * len(Watched)
    assert all(handed is not body for _, handed in seen)


def test_settings_write_nothing_and_take_no_silence_for_health() -> None:
    chosen = watch.settings()
    assert not chosen.posting.enabled
    assert chosen.peering.standalone
    assert not chosen.scanning.disabled
    assert (chosen.watching.server_timeout, chosen.watching.client_timeout) == (300, 310)
    assert (chosen.networking.connect_timeout, chosen.networking.request_timeout) == (10, 30)


def test_every_watched_kind_has_a_place() -> None:
    assert set(RESOURCES) == set(Watched)


@pytest.mark.parametrize(
    ("name", "level", "message", "passes"),
    [
        pytest.param("kopf.objects", logging.INFO, "Handler 'x' succeeded.", False, id="each event"),
        pytest.param("kopf.objects", logging.WARNING, "Something is odd.", True, id="a warning"),
        pytest.param("kopf._cogs.clients.api", logging.ERROR, "Request attempt #1/9 failed", False, id="an attempt"),
        pytest.param("kopf._cogs.clients.watching", logging.ERROR, "Request attempt #9", False, id="one of a watch"),
        pytest.param(
            "kopf._core.reactor.observation", logging.WARNING, "Unresolved resources", False, id="absent CRDs"
        ),
        pytest.param("kopf._core.reactor.running", logging.ERROR, "Root task has failed", True, id="a failure"),
        pytest.param("verl_gpumonitor_operator", logging.INFO, "leading", True, id="our own"),
    ],
)
def test_kopf_is_quiet(name: str, level: int, message: str, passes: bool) -> None:
    handler = logging.StreamHandler()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        watch.quieten_kopf()
        watch.quieten_kopf()
    finally:
        root.removeHandler(handler)
    assert len(handler.filters) == 1
    assert bool(handler.filter(logging.LogRecord(name, level, "", 0, message, None, None))) == passes


class FakeRun:
    """A kopf that ends when the test says so."""

    made: ClassVar[list["FakeRun"]] = []

    def __init__(self, _access: Access, watched: list[Watched], _seen: object) -> None:
        self.watched = watched
        self.stopped = False
        self.ended: asyncio.Future[None] | None = None
        FakeRun.made.append(self)

    def start(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[None]":
        self.ended = loop.create_future()
        return self.ended

    def stop(self) -> None:
        self.stopped = True
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    FakeRun.made = []
    monkeypatch.setattr(watch, "_Run", FakeRun)
    real = asyncio.sleep

    async def quick(seconds: float) -> None:
        await real(min(seconds, 0.001))

    monkeypatch.setattr(asyncio, "sleep", quick)
    return FakeRun.made


async def supervised(supervisor: Supervisor, runs: list[FakeRun], lives: int) -> None:
    task = asyncio.create_task(supervisor.run())
    while len(runs) < lives:
        await asyncio.sleep(0.001)
        for item in runs[: lives - 1]:
            if item.ended is not None and not item.ended.done():
                item.ended.set_result(None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def supervisor_of(*answers: object, broken: frozenset[Watched] = frozenset()) -> Supervisor:
    left = list(answers)

    async def access() -> Access:
        return ACCESS

    async def works(watched: Watched) -> bool:
        return watched not in broken

    async def permitted(watched: Watched) -> bool:
        answer = left[0] if len(left) == 1 else left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return watched not in answer  # type: ignore[operator]

    return Supervisor(access=access, permitted=permitted, works=works, seen=lambda *_: None, restarted=lambda: None)


async def test_kopf_is_started_again_after_each_end(runs: list[FakeRun]) -> None:
    supervisor = supervisor_of(())
    await supervised(supervisor, runs, 3)
    assert supervisor.state.restarts >= 2
    assert runs[-1].stopped, "the last one is stopped with its supervisor"


async def test_kopf_is_started_without_what_is_refused(runs: list[FakeRun]) -> None:
    supervisor = supervisor_of({Watched.TRAIN_JOB, Watched.RAY_JOB})
    await supervised(supervisor, runs, 1)
    assert set(runs[0].watched) == {Watched.RAY_CLUSTER, Watched.PYTORCH_JOB, Watched.MONITOR}
    assert supervisor.state.refused == {Watched.TRAIN_JOB, Watched.RAY_JOB}


async def test_kopf_is_started_without_what_cannot_be_listed(runs: list[FakeRun]) -> None:
    supervisor = supervisor_of({Watched.TRAIN_JOB}, broken=frozenset({Watched.RAY_CLUSTER}))
    await supervised(supervisor, runs, 1)
    assert set(runs[0].watched) == {Watched.RAY_JOB, Watched.PYTORCH_JOB, Watched.MONITOR}
    assert supervisor.state.refused == {Watched.TRAIN_JOB}
    assert supervisor.state.broken == {Watched.RAY_CLUSTER}


async def test_an_api_server_that_is_away_is_waited_for(runs: list[FakeRun]) -> None:
    supervisor = supervisor_of(UnreachableError("away"), UnreachableError("away"), ())
    await supervised(supervisor, runs, 1)
    assert set(runs[0].watched) == set(Watched)
