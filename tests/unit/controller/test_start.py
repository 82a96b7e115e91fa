# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the holder of the Lease begins, and in which order."""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from verl_gpumonitor_operator.controller import main
from verl_gpumonitor_operator.controller.main import Controller, Options
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import HeldBackError, UnreachableError
from verl_gpumonitor_operator.settings import Images, Settings


class Parts:
    """Parts of a controller that only tell that they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.listed = asyncio.Event()
        self.controller = object.__new__(Controller)
        parts: dict[str, Any] = {name: self._part(name) for name in ("rescuer", "breaker", "supervisor", "usage")}
        parts["reconciler"] = SimpleNamespace(
            run=self._part("reconciler").run, restore=lambda: self.begun.append("restore"), listening=lambda: None
        )
        parts["sweeper"] = SimpleNamespace(run=self._part("sweeper").run, complete=self.listed.wait)
        parts["ledgers"] = SimpleNamespace(run=self._part("ledgers").run, load=self._part("loaded").run)
        parts["pods"] = Pods()
        vars(self.controller).update(parts, workloads=())

    def _part(self, name: str) -> SimpleNamespace:
        async def run() -> None:
            self.begun.append(name)

        return SimpleNamespace(run=run)


class Pods:
    """A directory that is complete and empty."""

    synced = True

    def __len__(self) -> int:
        return 0

    def watch(self, _observer: object) -> None:
        """Tell of nothing."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "LISTS_SECONDS", 0.05)
    monkeypatch.setattr(main, "_calm_garbage_collection", lambda: None)


async def _work(controller: Controller) -> None:
    async with asyncio.TaskGroup() as group:
        await controller._work(group)


async def test_lists_that_never_come_do_not_hold_up_the_rescue() -> None:
    parts = Parts()
    working = asyncio.create_task(_work(parts.controller))
    async with asyncio.timeout(5.0):
        while "breaker" not in parts.begun:  # noqa: ASYNC110 - what is waited for is the start's own doing
            await asyncio.sleep(0.01)
    assert parts.begun == ["rescuer", "breaker"]
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def test_what_was_before_is_restored_once_the_lists_are_there() -> None:
    parts = Parts()
    parts.listed.set()
    await _work(parts.controller)
    assert sorted(parts.begun) == [
        "breaker",
        "ledgers",
        "loaded",
        "reconciler",
        "rescuer",
        "restore",
        "supervisor",
        "sweeper",
        "usage",
    ]
    order = [parts.begun.index(name) for name in ("loaded", "restore", "reconciler")]
    assert order == sorted(order)


def clients_within(part: object) -> Iterator[tuple[str, KubeClient]]:
    """Every client that a part holds, and the parts that it is made of; with the class that holds it."""
    seen: set[int] = set()
    waiting = [("", part)]
    while waiting:
        holder, one = waiting.pop()
        if isinstance(one, KubeClient):
            yield holder, one
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | tuple | set | frozenset):
            waiting += [(holder, item) for item in (one.values() if isinstance(one, dict) else one)]
        elif isinstance(one, MethodType):
            waiting.append((holder, one.__self__))
        elif type(one).__module__.startswith("verl_gpumonitor_operator"):
            names = {name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())}
            held = {name: getattr(one, name, None) for name in names} | getattr(one, "__dict__", {})
            waiting += [(type(one).__name__, item) for item in held.values()]


async def test_every_part_that_writes_has_a_client_that_the_lease_holds_back() -> None:
    """Two controllers never write at once: not the parts that somebody thought of, all of them."""
    settings = Settings(release="r", namespace="n", images=Images(sidecar="s", operator="o"))
    raw = KubeClient(ApiClient(Configuration(host="http://127.0.0.1:9")), in_cluster=False)
    controller = Controller(Options(settings=settings, kubeconfig=None, instance="i", identity="i"), raw)
    unguarded, guarded = set(), set()
    for holder, client in clients_within(controller):
        if client is raw:
            unguarded.add(holder)
            continue
        guarded.add(holder)
        with pytest.raises(HeldBackError):
            await client.post("/x", {})
    # The Lease itself; what stores nothing; the Deployment that owns our objects, which is read; and who hands it out.
    assert unguarded == {"Lease", "Reviews", "Deployment", "Controller"}
    writers = {"StatusWriter", "EventRecorder", "PodImages", "SecretDocument", "CaPublisher", "ConfigMapEntries"}
    assert writers <= guarded, "the parts were looked into"
    await raw.close()


async def test_a_write_that_is_held_back_may_work_later() -> None:
    asked: list[str] = []

    def may_write() -> bool:
        asked.append("")
        return False

    raw = KubeClient(ApiClient(Configuration(host="http://127.0.0.1:9")), in_cluster=False)
    client = raw.guarded(may_write)
    writes: list[Awaitable[object]] = [
        client.post("/x", {}),
        client.put("/x", {}),
        client.merge_patch("/x", {}),
        client.strategic_patch("/x", {}),
        client.json_patch("/x", []),
        client.delete("/x"),
    ]
    for write in writes:
        with pytest.raises(HeldBackError) as caught:
            await write
        assert caught.value.transient
    assert len(asked) == len(writes)
    with pytest.raises(UnreachableError):
        await client.get("/x")
    await raw.close()
