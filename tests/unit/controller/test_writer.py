# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is written first when there is more to write than may be."""

import asyncio
from typing import cast

import pytest

from tests.unit.controller.fakeapi import FakeApi
from verl_gpumonitor_operator.controller.status import Urgency
from verl_gpumonitor_operator.controller.writer import Outcome, StatusWrite, StatusWriter, pruned_fields
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    ServerFaultError,
    TooManyRequestsError,
    UnauthorizedError,
    classify,
)

PREFIX = "/apis/gpumonitor.dev/v1alpha1/namespaces/train/gpumonitors"


class Rig:
    """A writer whose task is started when the test says so."""

    def __init__(self, *names: str) -> None:
        self.api = FakeApi()
        for name in names:
            self.api.objects[f"{PREFIX}/{name}"] = {"metadata": {"name": name}}
        loop = asyncio.get_running_loop()
        self.writer = StatusWriter(cast(KubeClient, self.api), writes_per_second=1e6, clock=loop.time)
        self.done: list[tuple[str, Outcome]] = []

    def write(self, name: str, urgency: Urgency, text: str = "x") -> StatusWrite:
        return StatusWrite(
            namespace="train",
            name=name,
            before={},
            status={"health": text},
            urgency=urgency,
            done=lambda outcome, _: self.done.append((name, outcome)),
        )

    async def run(self) -> None:
        task = asyncio.create_task(self.writer.run())
        for _ in range(50):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def order(self) -> list[str]:
        return [path.removesuffix("/status").rsplit("/", 1)[1] for _, path in self.api.writes]


async def test_what_matters_most_goes_first() -> None:
    rig = Rig("drift", "stage", "finding", "phase")
    for name, urgency in (
        ("drift", Urgency.DRIFT),
        ("stage", Urgency.PROGRESS),
        ("finding", Urgency.CHANGE),
        ("phase", Urgency.PHASE),
    ):
        rig.writer.submit(rig.write(name, urgency))
    await rig.run()
    assert rig.order == ["phase", "finding", "stage", "drift"]
    assert [outcome for _, outcome in rig.done] == [Outcome.WRITTEN] * 4


@pytest.mark.parametrize(
    ("first", "then", "order"),
    [
        pytest.param(Urgency.DRIFT, Urgency.PHASE, ["a", "b"], id="it moves to the front"),
        pytest.param(Urgency.CHANGE, Urgency.DRIFT, ["a", "b"], id="it keeps its place"),
        pytest.param(Urgency.DRIFT, Urgency.DRIFT, ["b", "a"], id="it stays behind"),
    ],
)
async def test_a_status_that_waits_is_exchanged(first: Urgency, then: Urgency, order: list[str]) -> None:
    rig = Rig("a", "b")
    rig.writer.submit(rig.write("a", first, "old"))
    rig.writer.submit(rig.write("b", Urgency.PROGRESS))
    assert rig.writer.exchange(rig.write("a", then, "new"))
    assert rig.writer.waiting == 2
    await rig.run()
    assert rig.order == order
    assert rig.api.objects[f"{PREFIX}/a"]["status"] == {"health": "new"}
    assert len(rig.done) == 2, "of the one that was exchanged nothing is told"


async def test_a_status_that_does_not_wait_is_not_exchanged() -> None:
    rig = Rig("a")
    assert not rig.writer.exchange(rig.write("a", Urgency.PHASE))
    assert rig.writer.waiting == 0


def test_fields_that_an_older_definition_drops_are_found_at_every_depth() -> None:
    sent = {"a": 1, "b": {"c": 1, "d": 2}, "e": [{"f": 1, "g": {"h": 1}}, {"f": 2}], "i": ["x"], "j": []}
    assert pruned_fields(sent, sent) == []
    kept = {"b": {"c": 1}, "e": [{"f": 1, "g": {}}, {}], "i": ["x"], "j": []}
    assert sorted(pruned_fields(sent, kept)) == ["status.a", "status.b.d", "status.e[].f", "status.e[].g.h"]


@pytest.mark.parametrize(
    ("status", "kind", "passing"),
    [
        pytest.param(401, UnauthorizedError, True, id="a token that ran out says nothing of rights"),
        pytest.param(403, ForbiddenError, False, id="a right that is not there"),
        pytest.param(409, ConflictError, False, id="another writer was first"),
        pytest.param(413, InvalidError, False, id="too large for the API server"),
        pytest.param(429, TooManyRequestsError, True, id="patience is asked for"),
        pytest.param(500, ServerFaultError, True, id="too large for etcd, or broken"),
    ],
)
def test_what_an_answer_means(status: int, kind: type[KubeError], passing: bool) -> None:
    error = classify(status, "x")
    assert type(error) is kind
    assert error.transient is passing
