# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The real kopf beside a kind whose list and watch fail for long: all other kinds go on."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from verl_gpumonitor_operator.controller import watch
from verl_gpumonitor_operator.controller.watch import RESOURCES, Supervisor, Watched
from verl_gpumonitor_operator.kube.client import Access

Json = dict[str, Any]
CRDS = ("apiextensions.k8s.io", "v1", "customresourcedefinitions")
BROKEN = RESOURCES[Watched.RAY_CLUSTER]


class ApiServer:
    """Discovery, empty lists, and watches that tell of what `add` brings. RayClusters fail, as they are told to."""

    def __init__(self) -> None:
        self.served = {(item.group, item.version, item.plural) for item in RESOURCES.values()} | {CRDS}
        self.requests: dict[str, int] = {}
        self.stream_error = False
        """Whether the broken kind's list works, and its watch sends an error."""
        self.url = ""
        self._watches: dict[str, list[asyncio.Queue[Json]]] = {}

    def add(self, watched: Watched, name: str) -> None:
        metadata = {"namespace": "train", "name": name, "uid": f"uid-{name}", "resourceVersion": "2"}
        item = {"apiVersion": "x/v1", "kind": watched.value, "metadata": metadata}
        for queue in self._watches.get(RESOURCES[watched].plural, []):
            queue.put_nowait({"type": "ADDED", "object": item})

    def is_watched(self, watched: Watched) -> bool:
        return bool(self._watches.get(RESOURCES[watched].plural))

    async def groups(self, _: web.Request) -> web.Response:
        versions = sorted({(group, version) for group, version, _ in self.served})
        found = [
            {"name": group, "versions": [{"version": version}], "preferredVersion": {"version": version}}
            for group, version in versions
        ]
        return web.json_response({"groups": found})

    async def resources(self, request: web.Request) -> web.Response:
        place = (request.match_info["group"], request.match_info["version"])
        verbs = ["list", "watch", "get", "patch"]
        found = [
            {"name": plural, "kind": plural.title(), "singularName": plural, "namespaced": True, "verbs": verbs}
            for group, version, plural in sorted(self.served)
            if (group, version) == place
        ]
        return web.json_response({"resources": found})

    async def objects(self, request: web.Request) -> web.StreamResponse:
        plural = request.match_info["plural"]
        self.requests[plural] = self.requests.get(plural, 0) + 1
        is_broken, watches = plural == BROKEN.plural, "watch" in request.query
        if is_broken and not self.stream_error:
            return web.json_response({"kind": "Status", "code": 500, "message": "conversion failed"}, status=500)
        if not watches:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        return await self._stream(request, plural, fails=is_broken)

    async def _stream(self, request: web.Request, plural: str, *, fails: bool) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if fails:
            status = {"kind": "Status", "code": 500, "message": "conversion failed"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        queue: asyncio.Queue[Json] = asyncio.Queue()
        queues = self._watches.setdefault(plural, [])
        queues.append(queue)
        try:
            while True:
                await response.write(json.dumps(await queue.get()).encode() + b"\n")
        finally:
            queues.remove(queue)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        application = web.Application()
        application.add_routes(
            [
                web.get("/api", _core),
                web.get("/api/v1", _core),
                web.get("/apis", self.groups),
                web.get("/apis/{group}/{version}", self.resources),
                web.get("/apis/{group}/{version}/{plural}", self.objects),
            ]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield
        finally:
            await runner.cleanup()


async def _core(_: web.Request) -> web.Response:
    verbs = ["list", "watch"]
    namespaces = {"name": "namespaces", "kind": "Namespace", "singularName": "", "namespaced": False, "verbs": verbs}
    return web.json_response({"versions": ["v1"], "resources": [namespaces]})


class Following:
    """A supervised kopf, and what it has seen."""

    def __init__(self, server: ApiServer, *, probes: bool) -> None:
        self.seen: list[str] = []
        self._server = server
        self._probes = probes
        self.supervisor = Supervisor(
            access=self._access,
            permitted=self._yes,
            works=self._works,
            seen=self._take,
            restarted=lambda: None,
        )

    async def _access(self) -> Access:
        empty = {"ca_file": None, "certificate_file": None, "key_file": None}
        return Access(server=self._server.url, token="t", insecure=False, in_cluster=False, **empty)

    async def _yes(self, _: Watched) -> bool:
        return True

    async def _works(self, watched: Watched) -> bool:
        return not self._probes or RESOURCES[watched] is not BROKEN

    def _take(self, _watched: Watched, _deleted: bool, body: Mapping[str, Any]) -> None:
        self.seen.append(body["metadata"]["name"])

    async def until(self, name: str, server: ApiServer) -> None:
        """Make a RayJob and wait until it was seen."""
        async with asyncio.timeout(10):
            while not server.is_watched(Watched.RAY_JOB):  # noqa: ASYNC110 - it is kopf's thread that is waited for
                await asyncio.sleep(0.02)
            server.add(Watched.RAY_JOB, name)
            while name not in self.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def following(server: ApiServer, *, probes: bool) -> AsyncIterator[Following]:
    async with server.running():
        follower = Following(server, probes=probes)
        task = asyncio.create_task(follower.supervisor.run())
        try:
            yield follower
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # Its thread is told to end, and must not be left to the next test.
            async with asyncio.timeout(10):
                while server.is_watched(Watched.RAY_JOB):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


def quick(_: watch.Backoffs) -> Iterator[float]:
    return itertools.repeat(0.02)


async def test_a_kind_that_answers_500_for_long_keeps_no_other_from_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.Backoffs, "__iter__", quick)
    server = ApiServer()
    async with following(server, probes=False) as follower:
        await follower.until("first", server)
        began = time.monotonic()
        while server.requests.get(BROKEN.plural, 0) < 30:
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.02)
        await follower.until("second", server)
        assert follower.supervisor.state.restarts == 0


async def test_a_kind_whose_watch_sends_errors_is_left_out() -> None:
    server = ApiServer()
    server.stream_error = True
    async with following(server, probes=True) as follower:
        await follower.until("first", server)
        await asyncio.sleep(1.5)
        await follower.until("second", server)
        assert follower.supervisor.state.restarts == 0
        assert follower.supervisor.state.broken == {Watched.RAY_CLUSTER}
        assert BROKEN.plural not in server.requests


def test_requests_never_give_up() -> None:
    pauses = list(itertools.islice(watch.settings().networking.error_backoffs, 1000))  # type: ignore[arg-type]
    assert (pauses[0], max(pauses), pauses[-1]) == (1.0, 30.0, 30.0)
