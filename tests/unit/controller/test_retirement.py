# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUMonitors that were kept long enough: they go, slowly, and one that cannot go keeps no other one."""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest

from tests.unit.controller.builders import job
from tests.unit.controller.fakeapi import FakeApi
from verl_gpumonitor_operator.controller import retirement
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.known_monitors import KnownMonitors
from verl_gpumonitor_operator.controller.monitors import MonitorSeen, from_object, new_object
from verl_gpumonitor_operator.controller.retirement import MAX_DELETIONS, MAX_FAILURES, Retirement
from verl_gpumonitor_operator.controller.workloads import Workloads
from verl_gpumonitor_operator.controller.writer import StatusWriter
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import ForbiddenError, KubeError, ServerFaultError

NOW = 1_000_000.0


class Guarded(FakeApi):
    """Refuses to delete some objects, or answers late."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: Callable[[str], KubeError | None] = lambda _: None
        self.delay = 0.0

    async def delete(self, path: str, *, uid: str | None = None) -> bytes:
        error = self.refuses(path.rsplit("/", 1)[1])
        if error is not None:
            self.writes.append(("DELETE", path))
            raise error
        await asyncio.sleep(self.delay)
        return await super().delete(path, uid=uid)


class Rig:
    """GPUMonitors of jobs that are gone for longer than they are kept."""

    def __init__(self, count: int) -> None:
        self.api, self.known = Guarded(), KnownMonitors()
        loop = asyncio.get_running_loop()
        self.writer = StatusWriter(cast(KubeClient, self.api), writes_per_second=1e6, clock=loop.time)
        self.retirement = Retirement(
            known=self.known, workloads=Workloads(None), writer=self.writer, retention_seconds=60.0, gone=self._gone
        )
        self.retirement.listed_kinds.add(JobKind.RAY_JOB)
        for number in range(count):
            self._add(f"job-{number:04d}")

    def _add(self, name: str) -> None:
        body = new_object(kind=JobKind.RAY_JOB, namespace="train", name=name, workload_name=name)
        ended = "1970-01-02T00:00:00Z"
        body["metadata"] |= {"uid": name, "creationTimestamp": ended}
        body["status"] = {"phase": "Succeeded", "workload": {"completionTime": ended, "deletionTime": ended}}
        self.api.objects[f"/apis/gpumonitor.dev/v1alpha1/namespaces/train/gpumonitors/{name}"] = body
        seen = from_object(body)
        assert seen is not None
        self.known.keep(seen)

    def _gone(self, monitor: MonitorSeen) -> None:
        self.known.gone(monitor.namespace, monitor.name, monitor.uid)

    async def look(self, seconds: float = 0.0) -> int:
        """Look once; returns how many requests that took."""
        before = len(self.api.writes)
        await self.retirement.look(NOW + seconds)
        return len(self.api.writes) - before


async def test_thousands_that_are_due_at_once_go_a_few_with_each_look() -> None:
    rig = Rig(300)
    assert await rig.look() == MAX_DELETIONS
    for number in range(1, 300 // MAX_DELETIONS):
        assert await rig.look(5.0 * number) == MAX_DELETIONS
    assert not list(rig.known)
    assert await rig.look(1000.0) == 0


async def test_one_that_a_policy_keeps_keeps_no_other_one() -> None:
    rig = Rig(10)
    rig.api.refuses = lambda name: ForbiddenError("kept", status=403) if name == "job-0000" else None
    assert await rig.look() == 10
    assert [monitor.name for monitor in rig.known] == ["job-0000"]
    assert await rig.look(5.0) == 0, "it is left alone for a while"
    assert await rig.look(retirement.RETRY_SECONDS + 1.0) == 1


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ForbiddenError("all are kept", status=403), id="refused"),
        pytest.param(ServerFaultError("down", status=500), id="failed"),
    ],
)
async def test_where_none_can_go_few_are_tried(error: KubeError) -> None:
    rig = Rig(300)
    rig.api.refuses = lambda _: error
    asked = [await rig.look(5.0 * number) for number in range(24)]
    assert sum(asked) <= MAX_FAILURES * (24 * 5.0 / retirement.REST_SECONDS + 1)


async def test_a_slow_api_server_holds_no_look_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retirement, "DELETION_SECONDS", 0.05)
    rig = Rig(10)
    rig.api.delay = 3600.0
    async with asyncio.timeout(5.0):
        assert await rig.look() == 0
    rig.api.delay = 0.0
    assert await rig.look(5.0) == 10


async def test_thousands_for_one_job_that_somebody_made_take_no_long_time() -> None:
    """The label that tells ours can be written by anybody, too."""
    rig = Rig(0)
    workloads = Workloads(None)
    workloads.job_seen(job(JobKind.RAY_JOB, "busy"), NOW)
    rig.retirement = Retirement(
        known=rig.known, workloads=workloads, writer=rig.writer, retention_seconds=60.0, gone=rig._gone
    )
    for number in range(3000):
        for kind in ("ours", "theirs"):
            name = f"n{number}-{kind}"
            body = new_object(kind=JobKind.RAY_JOB, namespace="train", name=name, workload_name="busy")
            body["metadata"]["uid"] = name
            if kind == "theirs":
                del body["metadata"]["labels"]
            monitor = from_object(body)
            assert monitor is not None
            rig.known.keep(monitor)
    begin = time.process_time()
    await rig.retirement.look(NOW)
    assert time.process_time() - begin < 2.0
