# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a head says of its nodes reaches each of them whole, and none but them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.controller.builders import identity, job, owner_of, pod, report
from verl_gpumonitor.model.marks import EVERY_NODE
from verl_gpumonitor.model.report import ClusterStages, NodeStages, PodStages, RayJobInfo, RayNode, RayStage
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.relay import (
    KEPT_SECONDS,
    MAX_INTERVALS,
    MAX_NAMED,
    MAX_TOLD,
    TOLD_SECONDS,
    ClusterRelay,
)
from verl_gpumonitor_operator.controller.workloads import Workloads

NOW = 5000.0
GEN, UPDATE = "gen", "update_actor"


def stage(name: str, begin: float, end: float | None = None, **more: object) -> RayStage:
    return RayStage(stage=name, role="actor", begin=begin, end=end, **more)  # type: ignore[arg-type]


def said(
    begin: float, end: float, *, source: StageSource = StageSource.RAY_STATE, **nodes: list[RayStage]
) -> ClusterStages:
    """Each node's IP is 10.0.0. and the number in its keyword's name."""
    return ClusterStages(
        source=source,
        known_from=begin,
        known_until=end,
        nodes=[NodeStages(node_ip=f"10.0.0.{name[1:]}", intervals=items) for name, items in nodes.items()],
    )


def told(relay: ClusterRelay, ip: str = "10.0.0.1") -> tuple[float, float, list[tuple[str, float, float | None]]]:
    word = relay.word_for(ip, now=NOW)
    assert word is not None
    return word.known_from, word.known_until, [(item.stage, item.begin, item.end) for item in word.intervals]


def relay_of(*words: ClusterStages) -> ClusterRelay:
    relay = ClusterRelay()
    for word in words:
        relay.take(word, NOW)
    return relay


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101)])],
            (100, 115, [(GEN, 101, None)]),
            id="what runs has no end",
        ),
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101)]), said(115, 130, n1=[stage(GEN, 101, 120), stage(UPDATE, 120)])],
            (100, 130, [(GEN, 101, 120), (UPDATE, 120, None)]),
            id="an end that comes later is taken",
        ),
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101)]), said(115, 130)],
            (100, 130, [(GEN, 101, 115)]),
            id="what is not mentioned any more ended when it was last vouched for",
        ),
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101, 110)]), said(110, 130, n1=[stage(GEN, 101, 110)])],
            (100, 130, [(GEN, 101, 110)]),
            id="what is said twice is kept once",
        ),
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101, 110)]), said(120, 130, n1=[stage(UPDATE, 121, 125)])],
            (120, 130, [(UPDATE, 121, 125)]),
            id="after a hole the stretch begins anew",
        ),
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101, 110)]), said(90, 105, n1=[stage(UPDATE, 91)])],
            (90, 105, [(UPDATE, 91, None)]),
            id="a clock that was set back begins anew",
        ),
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101)]), said(115, 120, source=StageSource.RAY_AGENT)],
            (115, 120, []),
            id="another source begins anew",
        ),
        pytest.param(
            [said(100, 150, n1=[stage(GEN, 101, 110), stage(UPDATE, 110, 150)]), said(150, 215)],
            (215 - TOLD_SECONDS, 215, [(UPDATE, 110, 150)]),
            id="what ended before the window is not told",
        ),
        pytest.param(
            [said(100, 115, n1=[stage(GEN, 101, local_rank=0), stage(GEN, 101, 103, local_rank=1)])],
            (100, 115, [(GEN, 101, None), (GEN, 101, 103)]),
            id="ranks are kept apart",
        ),
    ],
)
def test_a_node_is_told_its_window(
    words: list[ClusterStages], expected: tuple[float, float, list[tuple[str, float, float | None]]]
) -> None:
    assert told(relay_of(*words)) == expected


def test_a_node_that_had_no_work_is_told_so() -> None:
    assert told(relay_of(said(100, 115, n1=[stage(GEN, 101)])), "10.0.0.2") == (100, 115, [])


def test_a_head_that_is_silent_for_long_is_not_quoted() -> None:
    relay = relay_of(said(100, 115, n1=[stage(GEN, 101)]))
    assert relay.word_for("10.0.0.1", now=NOW + KEPT_SECONDS) is not None
    assert relay.word_for("10.0.0.1", now=NOW + KEPT_SECONDS + 1) is None


def test_nothing_is_quoted_before_the_head_has_spoken() -> None:
    assert ClusterRelay().word_for("10.0.0.1", now=NOW) is None


def test_an_hour_takes_no_more_memory_than_two_minutes() -> None:
    relay = ClusterRelay()
    for at in range(0, 3600, 10):
        relay.take(said(at, at + 10, n1=[stage(GEN, at, at + 9)]), NOW + at)
    assert len(relay.nodes["10.0.0.1"]) <= KEPT_SECONDS / 10 + 1


@pytest.mark.slow
def test_a_flood_shortens_the_window_and_says_so() -> None:
    relay = ClusterRelay()
    for at in range(200):
        many = [stage(f"s{number}", at, at + 0.5) for number in range(250)]
        relay.take(said(at, at + 1, n1=many), NOW)
        assert sum(len(held) for held in relay.nodes.values()) <= MAX_INTERVALS
    begin, end, intervals = told(relay)
    assert len(intervals) <= MAX_TOLD
    assert all(until is not None and until <= end for _, _, until in intervals)
    assert begin > end - TOLD_SECONDS
    assert not [1 for _, _, until in intervals if until is not None and until <= begin]


def test_a_flood_of_what_never_ends_is_let_go() -> None:
    relay = ClusterRelay()
    for at in range(3):
        nodes = {f"n{node}": [stage(f"s{at}-{number}", at) for number in range(256)] for node in range(80)}
        relay.take(said(0, at + 1, source=StageSource.RAY_STATE, **nodes), NOW)
        assert sum(len(held) for held in relay.nodes.values()) <= MAX_INTERVALS


def test_names_of_nodes_are_bounded() -> None:
    relay = ClusterRelay()
    relay.name(f"10.{number}" for number in range(MAX_NAMED + 100))
    assert len(relay.named) == MAX_NAMED
    assert "10.0" not in relay.named


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[str, float, float]], list[tuple[float, bool]]]:
    """One node's work (stage, begin, end), and the head's reports (time, whether it arrived)."""
    at, work = 100.0, []
    for _ in range(draw(st.integers(1, 12))):
        begin = at + draw(st.sampled_from([0.0, 0.5, 3.0]))
        at = begin + draw(st.sampled_from([0.25, 2.0, 20.0, 60.0]))
        work.append((draw(st.sampled_from([GEN, UPDATE])), begin, at))
    times = sorted(draw(st.lists(st.floats(101.0, at + 30.0), min_size=1, max_size=12, unique=True)))
    return work, [(time, draw(st.booleans())) for time in times]


@given(history=histories())
def test_lost_reports_lose_nothing_while_the_head_repeats_what_was_not_accepted(
    history: tuple[list[tuple[str, float, float]], list[tuple[float, bool]]],
) -> None:
    work, reports = history
    relay, accepted = ClusterRelay(), 100.0
    for time, arrives in reports:
        delta = [
            stage(name, begin, end if end <= time else None)
            for name, begin, end in work
            if begin <= time and end > accepted
        ]
        if not arrives:
            continue
        relay.take(said(accepted, time, n1=delta), NOW)
        accepted = time
        since = max(100.0, time - TOLD_SECONDS)
        assert told(relay) == (
            since,
            time,
            [(name, begin, end if end <= time else None) for name, begin, end in work if begin <= time and end > since],
        )


# In the answers to reports

HEAD = {"ray.io/node-type": "head"}


def cluster(name: str, number: int) -> Workloads:
    """A cluster with a head and two workers, at 10.0.<number>.1 to .3."""
    workloads = Workloads()
    add_cluster(workloads, name, number)
    return workloads


def add_cluster(workloads: Workloads, name: str, number: int) -> None:
    owner = owner_of(JobKind.RAY_CLUSTER, name)
    workloads.job_seen(job(JobKind.RAY_CLUSTER, name), NOW)
    workloads.pod_seen(pod(f"{name}-head", owner, labels=HEAD, gpus=0, pod_ip=f"10.0.{number}.1"))
    for worker in (2, 3):
        workloads.pod_seen(pod(f"{name}-w{worker}", owner, pod_ip=f"10.0.{number}.{worker}"))


def speak(workloads: Workloads, name: str, ip: str, *, at: float = NOW, sequence: int = 1) -> PodStages | None:
    word = ClusterStages(
        source=StageSource.RAY_STATE,
        known_from=at - 20,
        known_until=at,
        nodes=[NodeStages(node_ip=ip, intervals=[stage(GEN, at - 10)])],
    )
    return workloads.accept(identity(name), report(name, sequence=sequence, gpus=[], cluster_stages=word), at).stages


def ask(workloads: Workloads, name: str, *, sequence: int = 1, at: float = NOW) -> list[str] | None:
    word = workloads.accept(identity(name), report(name, sequence=sequence), at).stages
    return None if word is None else [item.stage for item in word.intervals]


def test_a_worker_is_told_what_its_own_head_says_of_it() -> None:
    workloads = cluster("a", 0)
    add_cluster(workloads, "b", 1)
    assert ask(workloads, "a-w2", sequence=1) is None
    assert speak(workloads, "a-head", "10.0.0.2") is None, "a head has asked itself"
    assert ask(workloads, "a-w2", sequence=2) == [GEN]
    assert ask(workloads, "a-w3", sequence=1) == []
    assert ask(workloads, "b-w2") is None


def test_a_head_cannot_speak_for_another_cluster() -> None:
    workloads = cluster("a", 0)
    add_cluster(workloads, "b", 1)
    speak(workloads, "a-head", "10.0.1.2")
    assert ask(workloads, "b-w2") is None


def test_a_worker_cannot_speak_for_others() -> None:
    workloads = cluster("a", 0)
    speak(workloads, "a-w3", "10.0.0.2")
    assert ask(workloads, "a-w2") is None


def test_pods_that_share_an_address_are_told_nothing() -> None:
    workloads = cluster("a", 0)
    workloads.pod_seen(pod("a-w4", owner_of(JobKind.RAY_CLUSTER, "a"), pod_ip="10.0.0.2"))
    speak(workloads, "a-head", "10.0.0.2")
    assert ask(workloads, "a-w2") is None


def test_silence_means_nothing_where_the_head_calls_nodes_by_other_addresses() -> None:
    workloads = cluster("a", 0)
    speak(workloads, "a-head", "fd00::2")
    assert ask(workloads, "a-w2") is None
    nodes = [RayNode(node_ip="10.0.0.3", gpu_uuids=["GPU-1"])]
    workloads.accept(identity("a-head"), report("a-head", sequence=2, gpus=[], ray_nodes=nodes), NOW)
    assert ask(workloads, "a-w2", sequence=2) == []


def test_what_the_driver_marks_holds_for_every_node() -> None:
    workloads = cluster("a", 0)
    speak(workloads, "a-head", EVERY_NODE)
    assert ask(workloads, "a-w2") == [GEN]
    relay = relay_of(said(100, 115, n1=[stage(UPDATE, 103)]))
    every = NodeStages(node_ip=EVERY_NODE, intervals=[stage(GEN, 101)])
    relay.take(replace_nodes(said(115, 120), every), NOW)
    assert told(relay) == (100, 120, [(GEN, 101, None), (UPDATE, 103, 115)])


def test_a_driver_that_marks_on_a_worker_is_heard_and_goes_before_the_head() -> None:
    workloads = cluster("a", 0)
    speak(workloads, "a-head", "10.0.0.2")
    marked = ClusterStages(
        source=StageSource.MARKS,
        known_from=NOW - 20,
        known_until=NOW,
        nodes=[NodeStages(node_ip=EVERY_NODE, intervals=[stage(UPDATE, NOW - 10)])],
    )
    workloads.accept(identity("a-w3"), report("a-w3", cluster_stages=marked), NOW)
    assert ask(workloads, "a-w2", at=NOW + 5) == [UPDATE]
    assert ask(workloads, "a-w2", at=NOW + 60, sequence=2) == [GEN], "once the driver is silent, the head's word holds"


def replace_nodes(word: ClusterStages, *nodes: NodeStages) -> ClusterStages:
    return ClusterStages(
        source=word.source, known_from=word.known_from, known_until=word.known_until, nodes=list(nodes)
    )


def test_a_restarted_controller_knows_again_with_the_next_report() -> None:
    workloads = cluster("a", 0)
    speak(workloads, "a-head", "10.0.0.2", at=NOW, sequence=7)
    assert ask(workloads, "a-w2", sequence=9) == [GEN]


def test_a_replay_of_the_head_changes_nothing() -> None:
    workloads = cluster("a", 0)
    speak(workloads, "a-head", "10.0.0.2", sequence=2)
    speak(workloads, "a-head", "10.0.0.3", sequence=2)
    assert ask(workloads, "a-w3") == []


def test_a_replaced_worker_with_another_address_is_told_its_own() -> None:
    workloads = cluster("a", 0)
    speak(workloads, "a-head", "10.0.0.2")
    assert ask(workloads, "a-w2") == [GEN]
    gone = pod("a-w2", owner_of(JobKind.RAY_CLUSTER, "a"), pod_ip="10.0.0.2")
    workloads.pod_gone(gone)
    workloads.pod_seen(replace(gone, name="a-w5", uid="uid-a-w5", pod_ip="10.0.0.5"))
    assert ask(workloads, "a-w5") == []


def test_the_jobs_that_the_head_lists_are_kept() -> None:
    workloads = cluster("a", 0)
    jobs = [RayJobInfo(submission_id="raysubmit_1", entrypoint="python3 -m verl.trainer.main_ppo")]
    workloads.accept(identity("a-w2"), report("a-w2", ray_jobs=jobs), NOW)
    workload = workloads.get("uid-a")
    assert workload is not None
    [group] = workload.groups.values()
    assert group.ray_jobs == ()
    workloads.accept(identity("a-head"), report("a-head", gpus=[], ray_jobs=jobs), NOW)
    assert group.ray_jobs == tuple(jobs)


@pytest.mark.parametrize("intervals", [0, 1, 3])
def test_a_head_whose_time_stands_still_takes_no_room_without_end(intervals: int) -> None:
    relay = ClusterRelay()
    for number in range(300):
        nodes = [
            NodeStages(node_ip=f"{number}-{node}", intervals=[stage(GEN, 100 + one) for one in range(intervals)])
            for node in range(100)
        ]
        relay.take(ClusterStages(source=StageSource.RAY_STATE, known_from=100.0, known_until=115.0, nodes=nodes), NOW)
    assert len(relay.nodes) <= MAX_INTERVALS
    assert sum(map(len, relay.nodes.values())) <= MAX_INTERVALS
    assert len(relay.nodes) > 0 or intervals == 0
    assert len(relay.named) <= MAX_NAMED
