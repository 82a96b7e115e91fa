# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A mirror of a list: chunks, watches, bookmarks, expired versions, and deletions that nobody told."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from verl_gpumonitor_operator.kube import reflector as module
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import (
    ExpiredError,
    ForbiddenError,
    KubeError,
    ServerFaultError,
    TooManyRequestsError,
    UnauthorizedError,
    UnreachableError,
)
from verl_gpumonitor_operator.kube.reflector import Decoded, Reflector


class Meta(msgspec.Struct):
    uid: str
    resourceVersion: str = ""  # noqa: N815 - as the API server writes it


class Item(msgspec.Struct):
    metadata: Meta


def item(uid: str, version: str = "1") -> dict[str, Any]:
    return {"metadata": {"uid": uid, "resourceVersion": version}}


def event(kind: str, body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"type": kind, "object": body})


class Script:
    """A server that answers lists and watches in the order of a script, and then hangs."""

    def __init__(self, lists: list[Any], watches: list[list[bytes | KubeError]]) -> None:
        self.lists = lists
        self.watches = watches
        self.queries: list[Mapping[str, Any]] = []
        self.done = asyncio.Event()

    async def get(self, _path: str, query: Mapping[str, Any]) -> bytes:
        self.queries.append(query)
        if not self.lists:
            self.done.set()
            await asyncio.Event().wait()
        answer = self.lists.pop(0)
        if isinstance(answer, KubeError):
            raise answer
        return msgspec.json.encode(answer)

    @asynccontextmanager
    async def stream(self, _path: str, query: Mapping[str, Any], **_: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        self.queries.append(query)
        yield self._lines(self.watches.pop(0) if self.watches else None)

    async def _lines(self, lines: list[bytes | KubeError] | None) -> AsyncIterator[bytes]:
        if lines is None:
            self.done.set()
            await asyncio.Event().wait()
        for line in lines or ():
            if isinstance(line, KubeError):
                raise line
            yield line


class Mirror:
    def __init__(self) -> None:
        self.held: set[str] = set()
        self.told: list[str] = []

    def seen(self, item: str) -> None:
        self.held.add(item)
        self.told.append(f"+{item}")

    def gone(self, item: str) -> None:
        self.held.discard(item)
        self.told.append(f"-{item}")


def listed(*uids: str, version: str = "10", more: str = "") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": version, "continue": more}, "items": [item(uid) for uid in uids]}


def decode(raw: msgspec.Raw) -> Decoded[str]:
    meta = msgspec.json.decode(raw, type=Item).metadata
    return Decoded(uid=meta.uid, resource_version=meta.resourceVersion, item=meta.uid)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORTEST_WATCH_SECONDS", 0.0)
    real = asyncio.sleep

    async def quick(_: float) -> None:
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", quick)


async def played(script: Script) -> tuple[Mirror, Reflector[str]]:
    mirror = Mirror()
    reflector = Reflector(
        client=cast(KubeClient, script), path="/x", query={"labelSelector": "a"}, decode=decode, mirror=mirror
    )
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(script.done.wait(), timeout=5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return mirror, reflector


async def test_chunks_make_one_list() -> None:
    script = Script([listed("a", "b", more="next"), listed("c")], [])
    mirror, reflector = await played(script)
    assert mirror.held == {"a", "b", "c"}
    assert reflector.state.synced
    assert [query.get("continue") for query in script.queries[:2]] == [None, "next"]


async def test_events_are_followed_and_the_watch_goes_on_from_the_last_version() -> None:
    first = [
        event("ADDED", item("b", "11")),
        event("DELETED", item("a", "12")),
        event("BOOKMARK", {"metadata": {"resourceVersion": "20"}}),
    ]
    script = Script([listed("a")], [cast(list[bytes | KubeError], first)])
    mirror, _ = await played(script)
    assert mirror.held == {"b"}
    versions = [query["resourceVersion"] for query in script.queries if query.get("watch")]
    assert versions == ["10", "20"]
    assert all(query["labelSelector"] == "a" for query in script.queries)


async def test_a_watch_that_breaks_is_taken_up_where_it_was() -> None:
    first: list[bytes | KubeError] = [event("ADDED", item("b", "11")), UnreachableError("reset")]
    script = Script([listed("a")], [first])
    mirror, reflector = await played(script)
    assert mirror.held == {"a", "b"}
    assert [query["resourceVersion"] for query in script.queries if query.get("watch")] == ["10", "11"]
    assert reflector.state.lists == 1


async def test_what_was_deleted_while_the_watch_was_away_for_long_is_noticed() -> None:
    broken: list[list[bytes | KubeError]] = [[UnreachableError("reset")] for _ in range(4)]
    mirror, reflector = await played(Script([listed("a", "b", "c"), listed("b")], broken))
    assert mirror.held == {"b"}
    assert set(mirror.told) >= {"-a", "-c"}
    assert reflector.state.failures == 4


@pytest.mark.parametrize(
    "expired",
    [
        pytest.param(ExpiredError("too old", status=410), id="as an HTTP status"),
        pytest.param(event("ERROR", {"code": 410, "reason": "Expired", "message": "too old"}), id="as an event"),
    ],
)
async def test_an_expired_version_lists_again(expired: Any) -> None:
    mirror, reflector = await played(Script([listed("a"), listed("a", "b")], [[expired]]))
    assert mirror.held == {"a", "b"}
    assert reflector.state.failures == 0


async def test_a_server_that_is_away_at_first_is_waited_for() -> None:
    mirror, reflector = await played(Script([UnreachableError("x"), UnreachableError("x"), listed("a")], []))
    assert mirror.held == {"a"}
    assert reflector.state.failures == 2


async def test_an_object_that_cannot_be_read_is_left_out() -> None:
    script = Script([listed("a")], [[event("ADDED", {"metadata": 7}), event("ADDED", item("b", "11"))]])
    mirror, _ = await played(script)
    assert mirror.held == {"a", "b"}


async def test_what_is_nested_deeper_than_python_reads_ends_nothing() -> None:
    deep = b'{"type":"ADDED","object":' + b'{"a":' * 5000 + b"1" + b"}" * 5001
    script = Script([listed("a"), listed("a", "b")], [[deep]])
    mirror, reflector = await played(script)
    assert mirror.held == {"a", "b"}
    assert reflector.state.failures == 1


async def test_a_broken_line_lists_again() -> None:
    mirror, reflector = await played(Script([listed("a"), listed("a")], [[b"{not json"]]))
    assert mirror.held == {"a"}
    assert reflector.state.failures == 1


class Slow:
    """Sleeps as long as it is told to, in a time that stands still otherwise, and keeps the pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses: list[float] = []
        real = asyncio.sleep

        async def sleep(seconds: float) -> None:
            if seconds:
                self.pauses.append(seconds)
            await real(0)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        monkeypatch.setattr(random, "uniform", lambda _low, _high: 1.0)


@pytest.mark.parametrize(
    ("failure", "watches_for_each_list"),
    [
        pytest.param(ServerFaultError("etcd is away", status=500), 4, id="a server that fails"),
        pytest.param(UnreachableError("reset"), 4, id="a proxy that cuts each stream"),
        pytest.param(UnauthorizedError("who?", status=401), 4, id="a token that is not known yet"),
        pytest.param(ForbiddenError("rbac", status=403), 1, id="the verb is not granted"),
        pytest.param(ExpiredError("too old", status=410), 1, id="a history that is always too short"),
    ],
)
async def test_a_watch_that_never_works_does_not_ask_for_the_list_each_second(
    monkeypatch: pytest.MonkeyPatch, failure: KubeError, watches_for_each_list: int
) -> None:
    slow = Slow(monkeypatch)
    script = Script([listed("a") for _ in range(10)], [[failure] for _ in range(100)])
    _, reflector = await played(script)
    assert reflector.state.lists == 10
    assert len(slow.pauses) == 10 * watches_for_each_list
    assert slow.pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert set(slow.pauses[6:]) == {module.MAX_PAUSE_SECONDS}


async def test_a_server_that_asks_for_patience_is_asked_for_the_watch_alone_and_not_before_it_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch)
    busy = TooManyRequestsError("busy", status=429, retry_after_seconds=7.0)
    watches: list[list[bytes | KubeError]] = [[busy] for _ in range(20)]
    watches.append([event("ADDED", item("b", "11"))])
    mirror, reflector = await played(Script([listed("a")], watches))
    assert mirror.held == {"a", "b"}
    assert reflector.state.lists == 1
    assert len(slow.pauses) == 20
    assert min(slow.pauses) == 7.0


async def test_after_a_watch_that_lived_the_pauses_are_short_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    monkeypatch.setattr(module, "STEADY_SECONDS", 0.0)
    cut: list[bytes | KubeError] = [event("ADDED", item("b", "11")), UnreachableError("reset")]
    _, reflector = await played(Script([listed("a")], [list(cut) for _ in range(30)]))
    assert slow.pauses == [0.5] * 30
    assert reflector.state.lists == 1, "it goes on from where it was"


async def test_watches_that_live_and_say_nothing_are_not_believed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a proxy that holds back what it should pass on."""
    slow = Slow(monkeypatch)
    monkeypatch.setattr(module, "STEADY_SECONDS", 0.0)
    mirror, reflector = await played(
        Script([listed("a"), listed("b")], [[UnreachableError("silent")] for _ in range(4)])
    )
    assert mirror.held == {"b"}
    assert (slow.pauses, reflector.state.lists) == ([0.5] * 4, 2)


async def test_a_fault_of_ours_over_one_object_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Mirror):
        def seen(self, item: str) -> None:
            if item == "bad":
                raise KeyError(item)
            super().seen(item)

        def gone(self, item: str) -> None:
            if item == "bad":
                raise KeyError(item)
            super().gone(item)

    mirror = Faulty()
    deleted = [event("DELETED", item("bad", "11")), event("ADDED", item("c", "12"))]
    script = Script([listed("a", "bad", "b")], [cast(list[bytes | KubeError], deleted)])
    reflector = Reflector(client=cast(KubeClient, script), path="/x", query={}, decode=decode, mirror=mirror)
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(script.done.wait(), timeout=5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert mirror.held == {"a", "b", "c"}
    assert [record.message for record in caplog.records] == ["object cannot be taken, left out"] * 2
