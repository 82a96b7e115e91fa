# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the sources say in, one picture out: the ladder of sources, whose the GPUs are, what adds up."""

from typing import Any

import pytest

from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample, NodeSample, RayAgentSample, ReadingHealth
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source, UnavailableReason
from verl_gpumonitor_sidecar.join import Inputs, Memory, Terms, join
from verl_gpumonitor_sidecar.state import PodState, gauges

TWO = Terms(gpus_requested=2)


def gpu(uuid: str, at: float, **values: Any) -> GpuSample:
    known = {"utilization": 0.5, "memory_used_bytes": 10, "memory_total_bytes": 100} | values
    return GpuSample(uuid=uuid, taken_at=at, memory_taken_at=at, **known)


def node(at: float, *uuids: str, **values: Any) -> NodeSample:
    """NVML as it answers: these GPUs, read at this time."""
    known: dict[str, Any] = {
        "source": Source.NVML,
        "gpus": tuple(gpu(uuid, at) for uuid in uuids),
        "counters": {uuid: GpuCounters(observed_seconds=at, busy_seconds=at / 2) for uuid in uuids},
        "visible": len(uuids),
        "health": ReadingHealth(collections=1, last_success_at=at),
    }
    return NodeSample(**known | values)


NO_LIBRARY = NodeSample(
    unavailable=UnavailableReason.NO_LIBRARY, message="no library", health=ReadingHealth(failures=1)
)


def agent(at: float, *uuids: str) -> RayAgentSample:
    return RayAgentSample(gpus=tuple(gpu(uuid, at, power_watts=100.0) for uuid in uuids))


def after(*moments: tuple[float, Inputs], terms: Terms = TWO) -> PodState:
    """Return the picture after these moments."""
    memory, state = Memory(), PodState(gpus_requested=0)
    for now, inputs in moments:
        memory, state = join(memory, inputs, terms=terms, now=now, now_unix=1e9 + now)
    return state


def uuids(state: PodState) -> list[str]:
    return [own.sample.uuid for own in state.gpus]


@pytest.mark.parametrize(
    ("inputs", "source", "ownership", "unavailable", "own"),
    [
        pytest.param(Inputs(), "none", "unknown", None, [], id="before the first pass nothing is claimed"),
        pytest.param(Inputs(node=node(10, "a", "b")), "nvml", "whole-node", None, ["a", "b"], id="the whole node"),
        pytest.param(
            Inputs(node=node(10, "a", "b", "c")),
            "nvml",
            "unknown",
            "OwnershipUnknown",
            [],
            id="more than asked for",
        ),
        pytest.param(
            Inputs(node=node(10, "a", "b", "c"), agent=agent(10, "b", "c")),
            "nvml",
            "ray-agent",
            None,
            ["b", "c"],
            id="Ray names whose they are, NVML reads them",
        ),
        pytest.param(
            Inputs(node=node(10, "a", "b", "c"), relayed_uuids=("c", "a")),
            "nvml",
            "ray-head",
            None,
            ["c", "a"],
            id="the controller relays whose they are",
        ),
        pytest.param(
            Inputs(node=node(10, "a", "b", "c"), processes_on=("a", "c")),
            "nvml",
            "processes",
            None,
            ["a", "c"],
            id="processes show whose they are",
        ),
        pytest.param(Inputs(node=NO_LIBRARY), "none", "unknown", "NoLibrary", [], id="nothing to read with"),
        pytest.param(
            Inputs(node=NO_LIBRARY, agent=agent(10, "a", "b")),
            "ray-agent",
            "ray-agent",
            None,
            ["a", "b"],
            id="Ray's agent stands in",
        ),
        pytest.param(
            Inputs(node=NO_LIBRARY, agent=agent(-6, "a", "b")),
            "none",
            "ray-agent",
            "NoLibrary",
            ["a", "b"],
            id="an agent that was silent for 16 s stands in no more",
        ),
        pytest.param(
            Inputs(node=NO_LIBRARY, agent=RayAgentSample(host=HostSample())),
            "none",
            "unknown",
            "NoLibrary",
            [],
            id="an agent without GPUs is no source of them",
        ),
    ],
)
def test_one_moment(inputs: Inputs, source: str, ownership: str, unavailable: str | None, own: list[str]) -> None:
    state = after((10.0, inputs))
    assert (state.source, state.ownership, state.unavailable, uuids(state)) == (source, ownership, unavailable, own)


def test_as_many_as_were_asked_for_prove_nothing_where_gpus_are_shared() -> None:
    terms = Terms(gpus_requested=2, gpus_shared=True)
    alone = after((10.0, Inputs(node=node(10, "a", "b"))), terms=terms)
    assert (alone.ownership, alone.unavailable, uuids(alone)) == ("unknown", "OwnershipUnknown", [])
    named = after((10.0, Inputs(node=node(10, "a", "b"), agent=agent(10, "a", "b"))), terms=terms)
    assert (named.ownership, uuids(named)) == ("ray-agent", ["a", "b"])


def test_a_pod_that_asks_for_none_owns_none_whatever_is_seen() -> None:
    state = after((10.0, Inputs(node=node(10, "a"), agent=agent(10, "a"))), terms=Terms(gpus_requested=0))
    assert (state.source, state.ownership, state.unavailable) == (Source.NONE, Ownership.NONE_REQUESTED, None)
    assert state.gpus == ()
    assert state.success is None
    assert state.started


def test_a_gpu_that_disappears_is_a_lost_gpu_of_this_pod() -> None:
    state = after((10.0, Inputs(node=node(10, "a", "b"))), (11.0, Inputs(node=node(11, "a"))))
    assert [own.sample.state for own in state.gpus] == [GpuState.OK, GpuState.LOST]
    assert state.gpus[1].counters.observed_seconds == 10, "what it did stays counted"


def test_the_source_moves_down_and_up_and_counters_never_fall() -> None:
    memory = Memory()
    observed = []
    moments = [(10.0, Inputs(node=node(10, "a", "b")))]
    moments += [(t, Inputs(node=NO_LIBRARY, agent=agent(t, "a", "b"))) for t in (15.0, 20.0, 25.0)]
    moments += [(26.0, Inputs(node=node(26, "a", "b"), agent=agent(25, "a", "b")))]
    sources = []
    for now, inputs in moments:
        memory, state = join(memory, inputs, terms=TWO, now=now, now_unix=1e9 + now)
        sources.append(str(state.source))
        observed.append(state.gpus[0].counters.observed_seconds)
    assert sources == ["nvml", "ray-agent", "ray-agent", "ray-agent", "nvml"]
    assert observed == [10.0, 10.0, 15.0, 20.0, 36.0]
    assert state.gpus[0].counters.energy_joules == 1000.0


def test_the_time_without_ray_is_a_gap() -> None:
    state = after(
        (0.0, Inputs(agent=agent(0, "a", "b"))),
        (5.0, Inputs(agent=agent(5, "a", "b"))),
        (6.0, Inputs(node=node(6, "a", "b", counters={}))),
        (300.0, Inputs(agent=agent(300, "a", "b"))),
    )
    assert state.gpus[0].counters.observed_seconds == 5.0


def test_without_any_source_the_gpus_stay_listed_but_answer_no_more() -> None:
    state = after((10.0, Inputs(node=node(10, "a", "b"))), (20.0, Inputs(node=NO_LIBRARY)))
    assert uuids(state) == ["a", "b"]
    assert {own.sample.state for own in state.gpus} == {GpuState.ERROR}
    assert state.gpus[0].counters.observed_seconds == 10
    assert state.success is False


def test_an_older_ray_is_named_in_the_heads_order() -> None:
    unnamed = RayAgentSample(unnamed_gpus={1: gpu("", 10, utilization=0.9), 0: gpu("", 10, utilization=0.1)})
    state = after((10.0, Inputs(node=NO_LIBRARY, agent=unnamed, relayed_uuids=("x", "y"))))
    assert [(own.sample.uuid, own.sample.utilization) for own in state.gpus] == [("x", 0.1), ("y", 0.9)]


def test_success_follows_the_newest_reading() -> None:
    late = node(10, "a", "b")
    assert after((12.9, Inputs(node=late))).success is True
    assert after((13.1, Inputs(node=late))).success is False


def test_the_time_of_success_does_not_move_with_the_clock() -> None:
    memory, before = join(Memory(), Inputs(node=node(10, "a", "b")), terms=TWO, now=10.5, now_unix=1000.5)
    _, later = join(memory, Inputs(node=node(10, "a", "b")), terms=TWO, now=11.0, now_unix=5.0)
    assert before.last_success_unix == later.last_success_unix == 1000.0


def test_the_time_of_an_xid_does_not_move_with_the_clock() -> None:
    seen = {"a": GpuCounters(xid_errors={79: 1}, xid_last_at={79: 9.0})}
    memory, before = join(Memory(), Inputs(node=node(10, "a", "b", counters=seen)), terms=TWO, now=10, now_unix=1000)
    _, later = join(memory, Inputs(node=node(11, "a", "b", counters=seen)), terms=TWO, now=11, now_unix=5)
    assert before.gpus[0].xid_last_unix == later.gpus[0].xid_last_unix == {79: 999}


@pytest.mark.parametrize(
    ("load_age", "memory_age", "utilization", "memory_used"),
    [
        pytest.param(1.0, 0.5, 0.5, 10, id="fresh"),
        pytest.param(3.0, 3.0, 0.5, 10, id="three intervals old"),
        pytest.param(3.1, 0.5, None, 10, id="load is old, memory is not"),
        pytest.param(1.0, 3.1, 0.5, None, id="memory is old, load is not"),
        pytest.param(9.0, 9.0, None, None, id="both are old"),
    ],
)
def test_gauges_age(load_age: float, memory_age: float, utilization: float | None, memory_used: int | None) -> None:
    sample = GpuSample(
        uuid="a",
        model="H100",
        taken_at=100 - load_age,
        memory_taken_at=100 - memory_age,
        utilization=0.5,
        memory_used_bytes=10,
    )
    shown = gauges(sample, PodState(gpus_requested=1, interval_seconds=1.0), 100.0)
    assert (shown.utilization, shown.memory_used_bytes) == (utilization, memory_used)
    assert shown.model == "H100"
