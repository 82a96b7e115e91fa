# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One holder at a time, told by our own clock alone."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec
import pytest

from tests.unit.controller.virtual import VirtualClock
from verl_gpumonitor_operator.controller.documents import Deployment
from verl_gpumonitor_operator.controller.lease import Claim, Lease, Observation, decide
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import ConflictError, NotFoundError


@pytest.mark.parametrize(
    ("holder", "age", "claim"),
    [
        pytest.param("me", 0.0, Claim.RENEW, id="it is ours"),
        pytest.param("me", 1000.0, Claim.RENEW, id="it is ours, from before a restart of this container"),
        pytest.param("", 0.0, Claim.TAKE, id="it was given back"),
        pytest.param("other", 0.0, Claim.WAIT, id="somebody holds it"),
        pytest.param("other", 15.0, Claim.WAIT, id="somebody holds it to the last moment"),
        pytest.param("other", 15.1, Claim.TAKE, id="its holder has not renewed it for its duration"),
    ],
)
def test_decide(holder: str, age: float, claim: Claim) -> None:
    seen = Observation(holder=holder, version="1", since=100.0)
    assert decide(seen, identity="me", now=100.0 + age, duration_seconds=15.0) is claim


@pytest.mark.parametrize(
    ("own", "said", "age", "claim"),
    [
        pytest.param(5.0, 60.0, 59.0, Claim.WAIT, id="a holder with a longer duration is waited for"),
        pytest.param(5.0, 60.0, 60.1, Claim.TAKE, id="and no longer"),
        pytest.param(15.0, 5.0, 14.0, Claim.WAIT, id="a shorter one changes nothing"),
        pytest.param(15.0, 0.0, 15.1, Claim.TAKE, id="a record that says none"),
        pytest.param(15.0, 1e9, 300.1, Claim.TAKE, id="nobody is waited for without end"),
    ],
)
def test_the_longer_of_both_durations_counts(own: float, said: float, age: float, claim: Claim) -> None:
    seen = Observation(holder="other", version="1", since=100.0, duration_seconds=said)
    assert decide(seen, identity="me", now=100.0 + age, duration_seconds=own) is claim


class Server:
    """A Lease as an API server keeps it, on a clock that tests move; its answers may be slow or missing."""

    def __init__(self) -> None:
        self.version = 0
        self.spec: dict[str, Any] | None = None
        self.answer: Callable[[], Awaitable[None]] = _at_once

    async def get(self, _path: str) -> bytes:
        await self.answer()
        if self.spec is None:
            raise NotFoundError("gone", status=404)
        return msgspec.json.encode({"metadata": {"resourceVersion": str(self.version)}, "spec": self.spec})

    async def post(self, _path: str, body: Mapping[str, Any]) -> bytes:
        if self.spec is not None:
            raise ConflictError("exists", status=409)
        return self._keep(body)

    async def put(self, _path: str, body: Mapping[str, Any]) -> bytes:
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise ConflictError("changed", status=409)
        return self._keep(body)

    def _keep(self, body: Mapping[str, Any]) -> bytes:
        self.version += 1
        self.spec = dict(body["spec"])
        return b"{}"

    @property
    def holder(self) -> str:
        return str((self.spec or {}).get("holderIdentity"))


async def _at_once() -> None:
    return


class Owner:
    """No Deployment owns the Lease."""

    async def metadata(self, name: str) -> dict[str, Any]:
        return {"name": name}


DURATION = 15.0


def candidate(server: Server, identity: str) -> Lease:
    lease = Lease(
        cast(KubeClient, server),
        cast(Deployment, Owner()),
        namespace="n",
        name="lease",
        identity=identity,
        duration=DURATION,
    )
    lease._now = asyncio.get_running_loop().time
    return lease


@pytest.mark.parametrize("delay", [0.0, 3.0, 7.4])
@pytest.mark.parametrize("silent_at", [0.5, 5.0, 11.0])
async def test_two_never_may_write_at_once_however_slow_the_answers_are(
    monkeypatch: pytest.MonkeyPatch, delay: float, silent_at: float
) -> None:
    """The holder's answers become slow, then stop; another takes the Lease as soon as it may."""
    VirtualClock(monkeypatch)
    loop = asyncio.get_running_loop()
    server, began = Server(), loop.time()
    first, second = candidate(server, "first"), candidate(server, "second")
    await first.acquire()

    class Slow(Server):
        """The same Lease, seen through a bad connection."""

        async def get(self, path: str) -> bytes:
            if loop.time() - began > silent_at:
                await asyncio.sleep(3600)
            return await server.get(path)

        async def put(self, path: str, body: Mapping[str, Any]) -> bytes:
            answer = await server.put(path, body)
            await asyncio.sleep(delay)
            return answer

    first._client = cast(KubeClient, Slow())
    holding = asyncio.create_task(first.hold())
    taking = asyncio.create_task(second.acquire())
    both = 0
    while loop.time() - began < 90:
        await asyncio.sleep(0.05)
        both += first.confirmed and second.confirmed
    assert second.confirmed or second.leading
    assert both == 0
    for task in (holding, taking):
        task.cancel()
    await asyncio.gather(holding, taking, return_exceptions=True)


async def test_who_held_it_meanwhile_has_written_so_it_is_lost_even_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    VirtualClock(monkeypatch)
    server = Server()
    lease = candidate(server, "me")
    await lease.acquire()
    holding = asyncio.create_task(lease.hold())
    assert server.spec is not None
    server.version += 1
    server.spec["holderIdentity"] = ""
    await holding
    assert not lease.leading
    assert not lease.confirmed
    assert server.holder == "", "nobody else waits for a holder that ends"


async def test_a_lease_that_somebody_deleted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualClock(monkeypatch)
    server = Server()
    lease = candidate(server, "me")
    await lease.acquire()
    holding = asyncio.create_task(lease.hold())
    server.spec = None
    await asyncio.sleep(DURATION)
    assert lease.confirmed
    assert server.holder == "me"
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


async def test_a_loop_that_stood_still_may_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(monkeypatch)
    lease = candidate(Server(), "me")
    await lease.acquire()
    assert lease.confirmed
    clock.now += DURATION * 2 / 3
    assert not lease.confirmed


async def test_the_record_says_no_shorter_time_than_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualClock(monkeypatch)
    server = Server()
    lease = candidate(server, "me")
    lease._duration = 5.9
    await lease.acquire()
    assert server.spec is not None
    assert server.spec["leaseDurationSeconds"] == 6
