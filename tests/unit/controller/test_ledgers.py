# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Ledgers in ConfigMaps of our own: few writes, nothing lost, and a way out where they are not to be had."""

from typing import cast

import pytest

from tests.unit.controller.fakeapi import FakeApi
from verl_gpumonitor_operator.controller.documents import Deployment
from verl_gpumonitor_operator.controller.ledgers import MAX_SHARD_BYTES, SHARDS, WRITE_SECONDS, Ledgers, names
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import ForbiddenError, ServerFaultError


class Rig:
    def __init__(self, api: FakeApi | None = None) -> None:
        self.api, self.now = api or FakeApi(), 0.0
        client = cast(KubeClient, self.api)
        owner = Deployment(client, namespace="gpumonitor-system", name="c")
        self.ledgers = Ledgers(
            client, owner, namespace="gpumonitor-system", release="gpumonitor", clock=lambda: self.now
        )

    @property
    def held(self) -> dict[str, str]:
        return {uid: text for item in self.api.of("configmaps").values() for uid, text in (item["data"] or {}).items()}


async def test_a_thousand_ledgers_take_as_many_writes_as_there_are_configmaps() -> None:
    rig = Rig()
    await rig.ledgers.load()
    for number in range(1000):
        assert rig.ledgers.put(f"uid-{number}", f"text-{number}")
    await rig.ledgers.write(only_due=True)
    assert rig.held == {f"uid-{number}": f"text-{number}" for number in range(1000)}
    assert set(rig.api.of("configmaps")) == set(names("gpumonitor"))
    assert len([path for verb, path in rig.api.writes if verb == "POST"]) == SHARDS
    again = Rig(rig.api)
    await again.ledgers.load()
    assert again.ledgers.get("uid-7") == "text-7"
    assert again.ledgers.stored("uid-7")


async def test_changes_are_written_together_after_a_while() -> None:
    rig = Rig()
    rig.ledgers.put("u", "1")
    await rig.ledgers.write(only_due=True)
    for number in range(2, 10):
        rig.ledgers.put("u", str(number))
        await rig.ledgers.write(only_due=True)
    assert rig.held == {"u": "1"}
    rig.now = WRITE_SECONDS
    before = len(rig.api.writes)
    await rig.ledgers.write(only_due=True)
    assert rig.held == {"u": "9"}
    rig.now = 10 * WRITE_SECONDS
    await rig.ledgers.write(only_due=True)
    assert len(rig.api.writes) == before + 1, "what has not changed is not written"


async def test_a_write_that_fails_is_made_good() -> None:
    rig = Rig()
    rig.ledgers.put("u", "1")
    rig.api.failures = [ServerFaultError("away", status=500)]
    await rig.ledgers.write(only_due=True)
    assert not rig.ledgers.stored("u")
    await rig.ledgers.write(only_due=True)
    assert rig.held == {}, "it waits a while"
    rig.now = 60.0
    await rig.ledgers.write(only_due=True)
    assert rig.held == {"u": "1"}


async def test_a_dropped_ledger_is_removed() -> None:
    rig = Rig()
    rig.ledgers.put("u", "1")
    await rig.ledgers.write()
    rig.ledgers.drop("u")
    await rig.ledgers.write()
    assert rig.held == {}
    assert not rig.ledgers.stored("u")


async def test_a_controller_without_the_right_says_so_and_keeps_none() -> None:
    rig = Rig()
    assert rig.ledgers.put("u", "1")
    rig.api.failures = [ForbiddenError("no", status=403)]
    await rig.ledgers.write()
    assert not rig.ledgers.available
    assert not rig.ledgers.put("u", "2")


async def test_a_controller_that_may_not_read_them_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    async def refuse(_: str) -> bytes:
        raise ForbiddenError("no", status=403)

    monkeypatch.setattr(rig.api, "get", refuse)
    await rig.ledgers.load()
    assert not rig.ledgers.available


async def test_a_full_configmap_takes_no_more_and_room_comes_back() -> None:
    rig = Rig()
    big = "x" * (MAX_SHARD_BYTES // 2 - 100)
    taken = [uid for uid in (f"uid-{number}" for number in range(40)) if rig.ledgers.put(uid, big)]
    assert len(taken) == 2 * SHARDS
    assert not any(rig.ledgers.put(f"more-{number}", big) for number in range(40))
    assert rig.ledgers.put(taken[0], big), "one that is there may change"
    rig.ledgers.drop(taken[0])
    assert any(rig.ledgers.put(f"more-{number}", big) for number in range(40))


async def test_nothing_is_written_without_the_lease() -> None:
    rig = Rig()
    rig.ledgers.__dict__["_may_write"] = lambda: False
    rig.ledgers.put("u", "1")
    await rig.ledgers.write()
    assert rig.api.writes == []


async def test_a_configmap_that_somebody_deleted_is_written_whole() -> None:
    rig = Rig()
    for number in range(50):
        rig.ledgers.put(f"uid-{number}", "before")
    await rig.ledgers.write()
    for path in [path for path in rig.api.objects if "/configmaps/" in path]:
        del rig.api.objects[path]
    for number in range(50):
        # One of each ConfigMap at least.
        if number % 2:
            rig.ledgers.put(f"uid-{number}", "after")
    await rig.ledgers.write()
    assert not rig.ledgers.stored("uid-0")
    await rig.ledgers.write()
    assert rig.held == {f"uid-{number}": "after" if number % 2 else "before" for number in range(50)}
    assert rig.ledgers.stored("uid-0")
