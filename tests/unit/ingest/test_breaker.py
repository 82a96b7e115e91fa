# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.unit.ingest import builders
from tests.unit.ingest.builders import IMAGES, MAIN_IMAGE, NOW, Clock, value_of
from verl_gpumonitor_operator.admission.preflight import BreakerState as WebhooksState
from verl_gpumonitor_operator.command import COMMAND
from verl_gpumonitor_operator.controller.breaker import (
    CLOSED,
    MAX_NAMESPACES,
    UNKNOWN_SECONDS,
    BreakerKeeper,
    BreakerMetrics,
    BreakerState,
    Evidence,
    Pause,
    decode,
    encode,
    step,
)
from verl_gpumonitor_operator.controller.jobs import GpuResources
from verl_gpumonitor_operator.controller.pods import decode as decode_pod
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState, PodRecord
from verl_gpumonitor_operator.kube.errors import KubeError, UnreachableError
from verl_gpumonitor_operator.settings import BreakerSettings

IMAGE = IMAGES.sidecar
SETTINGS = BreakerSettings(cool_down_seconds=60, max_cool_down_seconds=200)
SENTENCE = "pod train/a: ErrImagePull"
QUIET = Evidence(image=IMAGE)


def pod_record(**changes: Any) -> PodRecord:
    return builders.pod_record(**({"own_command": True} | changes))


def waiting_pod(reason: str, **changes: Any) -> PodRecord:
    return builders.waiting_pod(reason, **({"own_command": True} | changes))


def failing(*namespaces: str, latest_start: float | None = None, image: str = IMAGE) -> Evidence:
    return Evidence(image=image, failing=dict.fromkeys(namespaces, SENTENCE), latest_start=latest_start)


def started(at: float, namespace: str = "train") -> Evidence:
    return Evidence(image=IMAGE, started={namespace: at}, latest_start=at)


def pause(*, at: float = 0.0, cool_down: float = 60.0) -> Pause:
    return Pause(since=at, until=at + cool_down, reason=SENTENCE)


def opened(*, at: float = 0.0, cool_down: float = 60.0, image: str = IMAGE, namespace: str = "train") -> BreakerState:
    return BreakerState(image=image, namespaces={namespace: pause(at=at, cool_down=cool_down)})


@pytest.mark.parametrize(
    ("before", "evidence", "now", "after"),
    [
        pytest.param(CLOSED, QUIET, 5.0, CLOSED, id="closed stays closed"),
        pytest.param(CLOSED, failing("train"), 5.0, opened(at=5.0), id="the first failure opens"),
        pytest.param(opened(), QUIET, 59.9, opened(), id="the cool-down passes"),
        pytest.param(opened(), failing("train"), 59.9, opened(), id="what fails during the cool-down adds nothing"),
        pytest.param(opened(), started(59.0), 59.9, opened(), id="nor does what starts during it"),
        pytest.param(opened(), QUIET, 60.0, opened(), id="half-open waits for evidence"),
        pytest.param(
            opened(), failing("train"), 60.0, opened(at=60.0, cool_down=120.0), id="half-open, a failure doubles"
        ),
        pytest.param(
            opened(at=60.0, cool_down=120.0),
            failing("train"),
            180.0,
            opened(at=180.0, cool_down=200.0),
            id="up to the longest cool-down",
        ),
        pytest.param(opened(), started(59.0), 70.0, opened(), id="a start from before says nothing"),
        pytest.param(opened(), started(60.0), 70.0, CLOSED, id="a start afterwards closes"),
        pytest.param(opened(), started(60.0, "other"), 70.0, opened(), id="not one in another namespace"),
        pytest.param(
            opened(),
            Evidence(image=IMAGE, failing={"train": SENTENCE}, started={"train": 65.0}, latest_start=65.0),
            70.0,
            opened(at=70.0, cool_down=120.0),
            id="a failure weighs more than a start",
        ),
        pytest.param(opened(), QUIET, 260.0, CLOSED, id="after a long silence it is forgotten"),
        pytest.param(opened(image="old"), QUIET, 10.0, CLOSED, id="another image closes it at once"),
        pytest.param(opened(image="old"), failing("train"), 10.0, opened(at=10.0), id="unless that one fails as well"),
    ],
)
def test_step_of_one_namespace(before: BreakerState, evidence: Evidence, now: float, after: BreakerState) -> None:
    assert step(before, evidence, now, SETTINGS) == after


def test_after_closing_the_cool_down_begins_anew() -> None:
    state = opened(cool_down=200.0)
    state = step(state, started(201.0), 202.0, SETTINGS)
    assert step(state, failing("train"), 300.0, SETTINGS).namespaces["train"].cool_down_seconds == 60.0


def run(*history: tuple[float, Evidence], before: BreakerState = CLOSED) -> BreakerState:
    state = before
    for now, evidence in history:
        state = step(state, evidence, now, SETTINGS)
    return state


def test_one_namespace_never_stops_the_others() -> None:
    state = CLOSED
    for second in range(0, 10_000, 5):
        state = step(state, failing("train"), float(second), SETTINGS)
        assert not state.stops(second)
    assert list(state.namespaces) == ["train"]


@pytest.mark.parametrize(
    ("history", "is_open"),
    [
        pytest.param([(0.0, failing("a", "b"))], False, id="two namespaces may be one tenant's"),
        pytest.param([(0.0, failing("a", "b", "c"))], True, id="three at once"),
        pytest.param([(0.0, failing("a")), (20.0, failing("b")), (40.0, failing("c"))], True, id="one after another"),
        pytest.param(
            [(0.0, failing("a")), (20.0, failing("b")), (61.0, failing("c"))], False, id="the first has cooled down"
        ),
        pytest.param(
            [(10.0, failing("a", "b")), (20.0, failing("c", latest_start=15.0))],
            False,
            id="the image has started somewhere meanwhile",
        ),
        pytest.param(
            [(10.0, failing("a", "b")), (20.0, failing("c", latest_start=9.0))], True, id="it had started before"
        ),
    ],
)
def test_several_namespaces_that_fail_stop_injection_for_all(
    history: list[tuple[float, Evidence]], is_open: bool
) -> None:
    state = run(*history)
    assert state.open is is_open
    assert state.stops(history[-1][0]) is is_open


def test_the_one_for_all_says_how_many_fail() -> None:
    assert run((0.0, failing("a", "b", "c"))).reason == f"it fails in 3 namespaces; {SENTENCE}"


def test_the_one_for_all_is_half_open_after_its_cool_down_and_a_start_anywhere_closes_it() -> None:
    broken = run((0.0, failing("a", "b", "c")))
    assert broken.stops(59.9)
    assert not broken.stops(60.0)
    again = run((60.0, failing("a")), before=broken)
    assert (again.since, again.stops(61.0)) == (0.0, False)
    mended = run((65.0, started(62.0, "d")), before=again)
    assert not mended.open
    assert list(mended.namespaces) == ["a", "b", "c"]


def test_half_open_several_that_fail_again_double_it() -> None:
    broken = run((0.0, failing("a", "b", "c")), (60.0, failing("a", "d")), (65.0, failing("c")))
    assert (broken.since, broken.cool_down_seconds) == (65.0, 120.0)


def test_the_document_is_bounded() -> None:
    state = step(CLOSED, failing(*(f"team-{number:04}" for number in range(2_000))), 0.0, SETTINGS)
    assert len(state.namespaces) == MAX_NAMESPACES
    assert state.open
    assert decode(encode(state)) == state


names = st.sampled_from(["a", "b", "c", "d"])
times = st.floats(min_value=0, max_value=1e5)
evidences = st.builds(
    Evidence,
    image=st.sampled_from([IMAGE, "other"]),
    failing=st.dictionaries(names, st.just("pod")),
    started=st.dictionaries(names, times),
    latest_start=st.none() | times,
)


@given(st.lists(st.tuples(st.floats(min_value=0.1, max_value=400), evidences), max_size=40))
def test_whatever_happens_none_is_open_longer_than_allowed(history: list[tuple[float, Evidence]]) -> None:
    state, now = CLOSED, 0.0
    for seconds, evidence in history:
        now += seconds
        state = step(state, evidence, now, SETTINGS)
        pauses = [*state.namespaces.values(), *([state] if state.open else [])]
        for one in pauses:
            assert state.image == evidence.image
            assert 60.0 - 1e-6 <= one.cool_down_seconds <= 200.0 + 1e-6
            assert one.since <= now
        assert decode(encode(state)) == state
        assert step(state, Evidence(image="another"), now, SETTINGS) == CLOSED


def test_the_document_is_what_the_webhook_reads() -> None:
    one = {"since": 5.0, "until": 65.0, "reason": SENTENCE}
    assert json.loads(encode(opened(at=5.0))) == {"open": False, "image": IMAGE, "namespaces": {"train": one}}
    assert json.loads(encode(CLOSED)) == {"open": False}


def test_the_webhook_understands_the_document() -> None:
    written = encode(run((0.0, failing("a", "b", "c")), (60.0, failing("a"))))
    read = msgspec.json.decode(written, type=WebhooksState)
    assert read.pause(IMAGE, 59.0, "z") == f"it fails in 3 namespaces; {SENTENCE}"
    assert read.pause(IMAGE, 61.0, "a") == f"in this namespace: {SENTENCE}"
    assert read.pause(IMAGE, 61.0, "b") is None
    assert read.pause("another", 61.0, "a") is None


@pytest.mark.parametrize(
    "document",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        '{"open": "yes"}',
        '{"open": false, "image": "x"}',
        '{"open": true, "until": "x"}',
        '{"namespaces": {"a": 5}}',
    ],
)
def test_a_document_that_cannot_be_read_is_a_closed_breaker(document: str | None) -> None:
    assert decode(document) == CLOSED


@given(st.text(max_size=50))
def test_any_document_can_be_read(document: str) -> None:
    decode(document)


@dataclass
class Store:
    document: str | None = None
    saved: list[str] = field(default_factory=list)
    failure: KubeError | None = None

    async def load(self) -> str | None:
        if self.failure is not None:
            raise self.failure
        return self.document

    async def save(self, document: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.document = document
        self.saved.append(document)


class Rig:
    def __init__(self, document: str | None = None) -> None:
        self.store, self.clock, self.registry = Store(document), Clock(), CollectorRegistry()
        self.strangers: set[str] = set()
        self.keeper = BreakerKeeper(
            image=IMAGE,
            settings=SETTINGS,
            store=self.store,
            metrics=BreakerMetrics(self.registry),
            belongs=lambda pod: pod.uid not in self.strangers,
            clock=self.clock,
            interval_seconds=0.01,
            retry_seconds=0.01,
        )

    async def tick(self, seconds: float = 0.0) -> bool:
        self.clock.advance(seconds)
        return await self.keeper.tick()

    def shown(self, name: str) -> float | None:
        return value_of(self.registry, name)

    def fail(self, **changes: Any) -> None:
        self.keeper.pod_seen(waiting_pod("ErrImagePull", **changes))


async def test_a_failing_pod_stops_injection_in_its_namespace_and_is_named() -> None:
    rig = Rig()
    rig.fail()
    assert await rig.tick()
    state = decode(rig.store.document)
    assert (state.image, state.open, state.namespaces["train"].until) == (IMAGE, False, NOW + 60)
    assert "train/job-worker-0 on node node-1" in state.namespaces["train"].reason
    assert (rig.shown("gpumonitor_breaker_open"), rig.shown("gpumonitor_breaker_openings_total")) == (0, 1)
    assert rig.shown("gpumonitor_breaker_open_namespaces") == 1


async def test_failing_pods_of_several_namespaces_stop_it_for_all() -> None:
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.fail(namespace=name, uid=f"uid-{name}")
        rig.keeper.pod_seen(waiting_pod("ErrImagePull", namespace=name, uid=f"uid-{name}", sidecar_image=MAIN_IMAGE))
        await rig.tick(5.0)
    assert decode(rig.store.document).open
    assert rig.shown("gpumonitor_breaker_open") == 1


async def test_a_start_elsewhere_keeps_it_to_the_namespaces_that_fail() -> None:
    rig = Rig()
    for name in ("a", "b"):
        rig.fail(namespace=name, uid=f"uid-{name}")
    await rig.tick(5.0)
    started = ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW + 7)
    rig.keeper.pod_seen(pod_record(namespace="d", uid="uid-d", sidecar=started))
    await rig.tick(5.0)
    rig.fail(namespace="c", uid="uid-c")
    await rig.tick(5.0)
    state = decode(rig.store.document)
    assert (state.open, sorted(state.namespaces)) == (False, ["a", "b", "c"])


async def test_a_pod_that_was_freed_before_the_next_look_counts_all_the_same() -> None:
    rig = Rig()
    rig.fail()
    rig.fail(sidecar_image=MAIN_IMAGE)
    await rig.tick()
    assert rig.keeper.state.namespaces


async def test_a_sidecar_that_lost_its_restart_policy_stops_injection() -> None:
    rig = Rig()
    rig.keeper.pod_seen(pod_record(phase="Pending", native=False))
    await rig.tick()
    assert rig.keeper.state.namespaces["train"].reason.endswith(": not-native")


async def test_a_sidecar_that_keeps_ending_in_a_pod_that_has_begun_counts_after_a_while() -> None:
    rig = Rig()
    for _ in range(2):
        rig.keeper.pod_seen(waiting_pod("CrashLoopBackOff", phase="Running"))
        await rig.tick(29.9)
        assert rig.keeper.state == CLOSED
        rig.keeper.pod_seen(pod_record())
        await rig.tick(5.0)
    rig.keeper.pod_seen(waiting_pod("CrashLoopBackOff", phase="Running"))
    await rig.tick(20.0)
    rig.keeper.pod_seen(waiting_pod("CrashLoopBackOff", phase="Running"))
    await rig.tick(10.0)
    assert "CrashLoopBackOff" in rig.keeper.state.namespaces["train"].reason
    rig.keeper.pod_gone(waiting_pod("CrashLoopBackOff", phase="Running"))
    await rig.tick(60.0)
    assert rig.keeper.state.namespaces["train"].cool_down_seconds == 60.0, "what is gone fails no more"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sidecar_image": "reg.example/sidecar:old"}, id="another image"),
        pytest.param({"injected": None}, id="not injected"),
        pytest.param({"own_command": False}, id="our image with somebody else's command"),
    ],
)
async def test_other_pods_are_no_evidence(changes: dict[str, Any]) -> None:
    rig = Rig()
    rig.fail(**changes)
    await rig.tick()
    assert rig.store.saved == []


@pytest.mark.parametrize(
    ("command", "own"),
    [
        pytest.param(list(COMMAND), True, id="what the webhook writes"),
        pytest.param(["/bin/false"], False, id="what somebody else writes"),
        pytest.param(None, False, id="none"),
    ],
)
def test_a_container_is_known_by_its_command(command: list[str] | None, own: bool) -> None:
    container = {"name": "gpumonitor", "image": IMAGE, "restartPolicy": "Always", "command": command}
    body = {
        "metadata": {"namespace": "train", "name": "p", "uid": "u"},
        "spec": {"containers": [{"name": "ray-worker"}], "initContainers": [container]},
    }
    pod = decode_pod(msgspec.json.encode(body), GpuResources.of((".*/gpu$",))).item
    assert pod.own_command is own


async def test_a_pod_of_nobody_we_know_is_no_evidence() -> None:
    rig = Rig()
    rig.strangers.add("uid-0")
    rig.fail()
    for _ in range(100):
        await rig.tick(1.0)
    assert rig.store.saved == []


async def test_a_pod_whose_job_is_told_of_later_counts_then() -> None:
    rig = Rig()
    rig.strangers.add("uid-0")
    rig.fail()
    rig.fail(sidecar_image=MAIN_IMAGE)
    await rig.tick(UNKNOWN_SECONDS - 1)
    rig.strangers.clear()
    await rig.tick(0.5)
    assert list(decode(rig.store.document).namespaces) == ["train"]


async def test_a_state_is_written_once_and_taken_up_by_the_next_process() -> None:
    rig = Rig()
    rig.fail()
    for _ in range(5):
        await rig.tick(1.0)
    assert len(rig.store.saved) == 1
    rig.keeper.pod_gone(waiting_pod("ErrImagePull"))

    successor = Rig(rig.store.document)
    started = ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW + 66)
    await successor.tick(65.0)
    assert successor.keeper.state.namespaces
    successor.keeper.pod_seen(pod_record(sidecar=started))
    await successor.tick(2.0)
    assert [json.loads(document) for document in successor.store.saved] == [{"open": False}]
    assert successor.shown("gpumonitor_breaker_open_namespaces") == 0


async def test_while_half_open_it_is_shown_as_injecting() -> None:
    rig = Rig(encode(opened(at=NOW)))
    await rig.tick(59.0)
    assert rig.shown("gpumonitor_breaker_open_namespaces") == 1
    await rig.tick(1.0)
    assert rig.shown("gpumonitor_breaker_open_namespaces") == 0


async def test_an_api_server_that_is_away_delays_and_loses_nothing() -> None:
    rig = Rig()
    rig.store.failure = UnreachableError("no route")
    rig.fail()
    rig.fail(sidecar_image=MAIN_IMAGE)
    assert not await rig.tick()
    rig.store.failure = None
    assert await rig.tick(1.0)
    assert decode(rig.store.document).namespaces
    rig.store.failure = UnreachableError("no route")
    rig.keeper.pod_seen(pod_record(sidecar=ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW + 62)))
    assert not await rig.tick(62.0)
    rig.store.failure = None
    assert await rig.tick(1.0)
    assert not decode(rig.store.document).namespaces
    assert rig.shown("gpumonitor_breaker_write_failures_total") == 2


async def test_the_loop_writes_at_once() -> None:
    rig = Rig()
    vars(rig.keeper)["_interval_seconds"] = 60.0
    task = asyncio.create_task(rig.keeper.run())
    await asyncio.sleep(0.01)
    rig.fail()
    async with asyncio.timeout(2.0):
        while not rig.store.saved:  # noqa: ASYNC110 - what is waited for is the loop's own doing
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
