# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is written first when there is more to write than may be."""

import asyncio
from typing import cast

import pytest

from tests.unit.controller.fakeapi import FakeApi
from tests.unit.controller.virtual import VirtualClock
from verl_gpumonitor_operator.controller import monitors, writer
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.monitors import MonitorSeen
from verl_gpumonitor_operator.controller.rates import Refusals
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


class Refusing(FakeApi):
    """Refuses all writes in some namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: set[str] = set()

    def _write(self, verb: str, path: str) -> None:
        super()._write(verb, path)
        if path.split("/namespaces/")[1].split("/")[0] in self.refuses:
            raise ForbiddenError("exceeded quota", status=403)


class Pressed(VirtualClock):
    """A writer at its usual pace, on a clock that jumps to what is due next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.api = Refusing()
        self.writer = StatusWriter(cast(KubeClient, self.api), writes_per_second=20.0, clock=lambda: self.now)
        self.done: dict[str, list[tuple[float, Outcome]]] = {}

    def add(self, namespace: str, name: str) -> None:
        self.api.objects[f"/apis/gpumonitor.dev/v1alpha1/namespaces/{namespace}/gpumonitors/{name}"] = {}

    def submit(self, namespace: str, name: str) -> None:
        def done(outcome: Outcome, _: object) -> None:
            self.done.setdefault(namespace, []).append((self.now, outcome))

        self.writer.submit(
            StatusWrite(
                namespace=namespace,
                name=name,
                before={},
                status={"health": str(self.now)},
                urgency=Urgency.CHANGE,
                done=done,
            )
        )

    def create(self, namespace: str, number: int) -> list[asyncio.Task[MonitorSeen | None]]:
        """Ask for so many new objects at once."""
        bodies = (
            monitors.new_object(kind=JobKind.RAY_JOB, namespace=namespace, name=f"j-{one}", workload_name="j")
            for one in range(number)
        )
        return [asyncio.create_task(self.writer.create(body)) for body in bodies]

    def asked(self, namespace: str) -> int:
        return sum(f"/namespaces/{namespace}/" in path for _, path in self.api.writes)

    async def until(self, seconds: float) -> None:
        task = asyncio.create_task(self.writer.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def free_writes_come_soon(pressed: Pressed) -> None:
    """Statuses of another namespace are all written within seconds."""
    for number in range(40):
        pressed.add("free", f"job-{number}")
        pressed.submit("free", f"job-{number}")
    began = pressed.now
    await pressed.until(20.0)
    written = [at - began for at, outcome in pressed.done["free"] if outcome is Outcome.WRITTEN]
    assert len(written) == 40
    assert max(written) < 5.0


async def test_a_namespace_that_refuses_a_thousand_statuses_takes_nobody_elses_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pressed = Pressed(monkeypatch)
    pressed.api.refuses.add("full")
    for number in range(1000):
        pressed.submit("full", f"job-{number}")
    await free_writes_come_soon(pressed)
    assert len(pressed.done["full"]) == 1000, "each is told, so that none waits for ever"
    assert pressed.asked("full") <= writer.REFUSALS + writer.WORKERS


async def test_a_namespace_that_refuses_a_thousand_monitors_takes_nobody_elses_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pressed = Pressed(monkeypatch)
    pressed.api.refuses.add("full")
    making = pressed.create("full", 1000)
    await free_writes_come_soon(pressed)
    assert await asyncio.gather(*making) == [None] * 1000
    assert pressed.asked("full") <= writer.REFUSALS + writer.CREATORS


async def test_many_new_jobs_do_not_keep_the_statuses_of_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an installation beside 3,000 jobs, what runs is written at half the pace at least."""
    pressed = Pressed(monkeypatch)
    making = pressed.create("new", 3000)
    for number in range(100):
        pressed.add("free", f"job-{number}")
        pressed.submit("free", f"job-{number}")
    began = pressed.now
    await pressed.until(20.0)
    assert max(at - began for at, _ in pressed.done["free"]) < 15.0
    assert len(pressed.done["free"]) == 100
    for task in making:
        task.cancel()
    await asyncio.gather(*making, return_exceptions=True)


def test_one_object_that_is_refused_is_not_its_namespace() -> None:
    refusals = Refusals(after=3, rest_seconds=30.0, capacity=2)
    for _ in range(10):
        refusals.refused("n", 0.0)
        refusals.refused("n", 0.0)
        assert not refusals.rests("n", 0.0)
        refusals.taken("n")
    for _ in range(3):
        refusals.refused("n", 0.0)
    assert refusals.rests("n", 29.9)
    assert not refusals.rests("n", 30.0)
    refusals.refused("n", 30.0)
    assert refusals.rests("n", 59.9), "one more is enough"
    for other in ("a", "b"):
        refusals.refused(other, 30.0)
    assert not refusals.rests("n", 31.0), "the oldest is forgotten"
