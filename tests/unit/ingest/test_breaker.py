# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.unit.ingest.builders import IMAGES, MAIN_IMAGE, NOW, Clock, pod_record, value_of, waiting_pod
from verl_gpumonitor_operator.controller.breaker import (
    CLOSED,
    BreakerKeeper,
    BreakerMetrics,
    BreakerState,
    Evidence,
    decode,
    encode,
    step,
)
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState
from verl_gpumonitor_operator.kube.errors import KubeError, UnreachableError
from verl_gpumonitor_operator.settings import BreakerSettings

IMAGE = IMAGES.sidecar
SETTINGS = BreakerSettings(cool_down_seconds=60, max_cool_down_seconds=200)
FAILING = Evidence(image=IMAGE, failing="pod train/a: ErrImagePull")
QUIET = Evidence(image=IMAGE)


def opened(*, at: float = 0.0, cool_down: float = 60.0, image: str = IMAGE) -> BreakerState:
    return BreakerState(open=True, image=image, since=at, until=at + cool_down, reason="pod train/a: ErrImagePull")


@pytest.mark.parametrize(
    ("before", "evidence", "now", "after"),
    [
        pytest.param(CLOSED, QUIET, 5.0, CLOSED, id="closed stays closed"),
        pytest.param(CLOSED, FAILING, 5.0, opened(at=5.0), id="the first failure opens"),
        pytest.param(opened(), QUIET, 59.9, opened(), id="the cool-down passes"),
        pytest.param(opened(), FAILING, 59.9, opened(), id="what fails during the cool-down adds nothing"),
        pytest.param(
            opened(), Evidence(image=IMAGE, started_at=59.0), 59.9, opened(), id="nor does what starts during it"
        ),
        pytest.param(opened(), QUIET, 60.0, opened(), id="half-open waits for evidence"),
        pytest.param(opened(), FAILING, 60.0, opened(at=60.0, cool_down=120.0), id="half-open, a failure doubles"),
        pytest.param(
            opened(at=60.0, cool_down=120.0),
            FAILING,
            180.0,
            opened(at=180.0, cool_down=200.0),
            id="up to the longest cool-down",
        ),
        pytest.param(
            opened(), Evidence(image=IMAGE, started_at=59.0), 70.0, opened(), id="a start from before says nothing"
        ),
        pytest.param(opened(), Evidence(image=IMAGE, started_at=60.0), 70.0, CLOSED, id="a start afterwards closes"),
        pytest.param(
            opened(),
            Evidence(image=IMAGE, failing="pod train/a: ErrImagePull", started_at=65.0),
            70.0,
            opened(at=70.0, cool_down=120.0),
            id="a failure weighs more than a start",
        ),
        pytest.param(opened(image="old"), QUIET, 10.0, CLOSED, id="another image closes it at once"),
        pytest.param(opened(image="old"), FAILING, 10.0, opened(at=10.0), id="unless that one fails as well"),
    ],
)
def test_step(before: BreakerState, evidence: Evidence, now: float, after: BreakerState) -> None:
    assert step(before, evidence, now, SETTINGS) == after


def test_after_closing_the_cool_down_begins_anew() -> None:
    state = opened(cool_down=200.0)
    state = step(state, Evidence(image=IMAGE, started_at=201.0), 202.0, SETTINGS)
    assert step(state, FAILING, 300.0, SETTINGS).cool_down_seconds == 60.0


evidences = st.builds(
    Evidence,
    image=st.sampled_from([IMAGE, "other"]),
    failing=st.none() | st.just("pod"),
    started_at=st.none() | st.floats(min_value=0, max_value=1e5),
)


@given(st.lists(st.tuples(st.floats(min_value=0.1, max_value=400), evidences), max_size=40))
def test_whatever_happens_it_is_never_open_longer_than_allowed(history: list[tuple[float, Evidence]]) -> None:
    state, now = CLOSED, 0.0
    for seconds, evidence in history:
        now += seconds
        state = step(state, evidence, now, SETTINGS)
        if state.open:
            assert state.image == evidence.image
            assert 60.0 - 1e-6 <= state.cool_down_seconds <= 200.0 + 1e-6
            assert state.since <= now
        assert decode(encode(state)) == state
        assert step(state, Evidence(image="another"), now, SETTINGS) == CLOSED


def test_the_document_is_what_the_webhook_reads() -> None:
    assert json.loads(encode(opened(at=5.0))) == {
        "open": True,
        "image": IMAGE,
        "since": 5.0,
        "until": 65.0,
        "reason": "pod train/a: ErrImagePull",
    }
    assert json.loads(encode(CLOSED)) == {"open": False}


@pytest.mark.parametrize(
    "document",
    [None, "", "{", "[]", "null", '{"open": "yes"}', '{"open": false, "image": "x"}', '{"open": true, "until": "x"}'],
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
        self.keeper = BreakerKeeper(
            image=IMAGE,
            settings=SETTINGS,
            store=self.store,
            metrics=BreakerMetrics(self.registry),
            clock=self.clock,
            interval_seconds=0.01,
            retry_seconds=0.01,
        )

    async def tick(self, seconds: float = 0.0) -> bool:
        self.clock.advance(seconds)
        return await self.keeper.tick()

    def shown(self, name: str) -> float | None:
        return value_of(self.registry, name)


async def test_a_failing_pod_stops_injection_and_is_named() -> None:
    rig = Rig()
    rig.keeper.pod_seen(waiting_pod("ErrImagePull"))
    assert await rig.tick()
    state = decode(rig.store.document)
    assert (state.image, state.until) == (IMAGE, NOW + 60)
    assert "train/job-worker-0 on node node-1" in state.reason
    assert (rig.shown("gpumonitor_breaker_open"), rig.shown("gpumonitor_breaker_openings_total")) == (1, 1)


async def test_a_pod_that_was_freed_before_the_next_look_counts_all_the_same() -> None:
    rig = Rig()
    rig.keeper.pod_seen(waiting_pod("ErrImagePull"))
    rig.keeper.pod_seen(waiting_pod("ErrImagePull", sidecar_image=MAIN_IMAGE))
    await rig.tick()
    assert rig.keeper.state.open


async def test_pods_with_other_images_are_no_evidence() -> None:
    rig = Rig()
    rig.keeper.pod_seen(waiting_pod("ErrImagePull", sidecar_image="reg.example/sidecar:old"))
    rig.keeper.pod_seen(waiting_pod("ErrImagePull", injected=None))
    await rig.tick()
    assert rig.store.saved == []


async def test_a_state_is_written_once_and_taken_up_by_the_next_process() -> None:
    rig = Rig()
    rig.keeper.pod_seen(waiting_pod("ErrImagePull"))
    for _ in range(5):
        await rig.tick(1.0)
    assert len(rig.store.saved) == 1
    rig.keeper.pod_gone(waiting_pod("ErrImagePull"))

    successor = Rig(rig.store.document)
    started = ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW + 66)
    await successor.tick(65.0)
    assert successor.keeper.state.open
    successor.keeper.pod_seen(pod_record(sidecar=started))
    await successor.tick(2.0)
    assert [json.loads(document) for document in successor.store.saved] == [{"open": False}]
    assert successor.shown("gpumonitor_breaker_open") == 0


async def test_while_half_open_it_is_shown_as_injecting() -> None:
    rig = Rig(encode(opened(at=NOW)))
    await rig.tick(59.0)
    assert rig.shown("gpumonitor_breaker_open") == 1
    await rig.tick(1.0)
    assert rig.shown("gpumonitor_breaker_open") == 0


async def test_an_api_server_that_is_away_delays_and_loses_nothing() -> None:
    rig = Rig()
    rig.store.failure = UnreachableError("no route")
    rig.keeper.pod_seen(waiting_pod("ErrImagePull"))
    rig.keeper.pod_seen(waiting_pod("ErrImagePull", sidecar_image=MAIN_IMAGE))
    assert not await rig.tick()
    rig.store.failure = None
    assert await rig.tick(1.0)
    assert decode(rig.store.document).open
    rig.store.failure = UnreachableError("no route")
    rig.keeper.pod_seen(pod_record(sidecar=ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW + 62)))
    assert not await rig.tick(62.0)
    rig.store.failure = None
    assert await rig.tick(1.0)
    assert not decode(rig.store.document).open
    assert rig.shown("gpumonitor_breaker_write_failures_total") == 2


async def test_the_loop_writes_at_once() -> None:
    rig = Rig()
    vars(rig.keeper)["_interval_seconds"] = 60.0
    task = asyncio.create_task(rig.keeper.run())
    await asyncio.sleep(0.01)
    rig.keeper.pod_seen(waiting_pod("ErrImagePull"))
    async with asyncio.timeout(2.0):
        while not rig.store.saved:  # noqa: ASYNC110 - what is waited for is the loop's own doing
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
