# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the holder of the Lease begins, and in which order."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from verl_gpumonitor_operator.controller import main
from verl_gpumonitor_operator.controller.main import Controller


class Parts:
    """Parts of a controller that only tell that they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.listed = asyncio.Event()
        self.controller = object.__new__(Controller)
        parts: dict[str, Any] = {name: self._part(name) for name in ("rescuer", "breaker", "supervisor")}
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
    ]
    order = [parts.begun.index(name) for name in ("loaded", "restore", "reconciler")]
    assert order == sorted(order)
