# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a head tells of its cluster: the new and the running, and what was not accepted again."""

import msgspec
import pytest

from verl_gpumonitor.model.marks import EVERY_NODE
from verl_gpumonitor.model.report import ClusterStages, PodStages, RayStage
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor_sidecar.cluster_report import MAX_BYTES, ClusterDue, ray_stage, together
from verl_gpumonitor_sidecar.staging import word_of
from verl_gpumonitor_sidecar.state import ClusterStagesSeen

NOW = 1e9


def run(stage: str, begin: float, end: float | None = None, rank: int | None = None) -> StageInterval:
    end = None if end is None else NOW + end
    return StageInterval(stage=stage, role="actor", begin=NOW + begin, end=end, local_rank=rank)


def seen(
    until: float, *intervals: StageInterval, since: float = -1000.0, marks: StageWord | None = None
) -> ClusterStagesSeen:
    return ClusterStagesSeen(known_from=NOW + since, known_until=NOW + until, nodes={"a": intervals}, marks=marks)


def stages(told: ClusterStages | None) -> list[str]:
    assert told is not None
    return [stage.stage for node in told.nodes for stage in node.intervals]


def span(told: ClusterStages | None) -> tuple[float, float]:
    assert told is not None
    return told.known_from - NOW, told.known_until - NOW


def test_each_report_goes_on_where_the_last_that_arrived_ended() -> None:
    due = ClusterDue()
    first = due.take(seen(0, run("init", -500, -200), run("gen", -50, -20), run("ref", -20)), [], NOW)
    assert (span(first), stages(first)) == ((-90.0, 0.0), ["gen", "ref"])
    again = due.take(seen(5, run("gen", -50, -20), run("ref", -20, 3), run("update_actor", 3)), [], NOW + 5)
    assert (span(again), stages(again)) == ((-85.0, 5.0), ["gen", "ref", "update_actor"]), "the first did not arrive"
    due.arrived(again)
    after = due.take(seen(20, run("gen", -50, -20), run("ref", -20, 3), run("update_actor", 3)), [], NOW + 20)
    assert (span(after), stages(after)) == ((5.0, 20.0), ["ref", "update_actor"])
    due.arrived(after)
    assert due.take(seen(20, run("update_actor", 3)), [], NOW + 20) is None, "nothing new"


def test_a_clock_that_was_set_back_begins_anew() -> None:
    due = ClusterDue()
    due.arrived(due.take(seen(0, run("gen", -5)), [], NOW))
    assert span(due.take(seen(-500, run("gen", -505)), [], NOW - 500)) == (-590.0, -500.0)


def test_the_span_is_told_by_the_controllers_clock_and_has_no_gap() -> None:
    """The difference of the clocks is known a little better with each answer."""
    due = ClusterDue()
    ends: list[float] = []
    for number, ahead in enumerate((0.0, 12.4, 12.1, 12.3, 12.3)):
        told = due.take(seen(15.0 * number, run("gen", -5)), [], NOW, ahead=ahead)
        due.arrived(told)
        begin, end = span(told)
        assert end == pytest.approx(15 * number + ahead)
        assert not ends or begin <= ends[-1]
        assert [each.begin for node in told.nodes for each in node.intervals] == [NOW - 5] if told else False
        ends.append(end)


def test_what_ended_by_another_clock_is_not_too_old_for_it() -> None:
    due = ClusterDue()
    due.arrived(due.take(seen(0, run("gen", -60)), [], NOW))
    state = msgspec.structs.replace(seen(15, run("gen", -60, -19)), ahead={"a": -20.0})
    assert stages(due.take(state, [], NOW)) == ["gen"], "it ended a second after the last report"


def test_marks_of_the_driver_are_told_by_the_controllers_clock() -> None:
    told = ClusterDue().take(seen(0, marks=marks(0)), ["b"], NOW, ahead=12.0)
    assert told is not None
    assert [each.begin for each in told.nodes[0].intervals] == [NOW - 18]
    said = PodStages(
        source=told.source,
        known_from=told.known_from,
        known_until=told.known_until,
        intervals=told.nodes[0].intervals,
    )
    heard = word_of(said, ahead=12.0)
    assert (heard.known_until, [each.begin for each in heard.intervals]) == (NOW, [NOW - 30])


def marks(until: float) -> StageWord:
    return StageWord(
        source=StageSource.MARKS, known_from=NOW - 30, known_until=NOW + until, intervals=(run("gen", -30),)
    )


@pytest.mark.parametrize(
    ("until", "ips", "source", "nodes"),
    [
        pytest.param(0.0, ["a", "b"], "marks", ["a", "b"], id="the driver speaks for all nodes with GPUs"),
        pytest.param(0.0, [], "marks", [EVERY_NODE], id="for every node where they are not known"),
        pytest.param(0.0, [f"10.0.0.{n}" for n in range(100)], "marks", [EVERY_NODE], id="or too many"),
        pytest.param(-21.0, ["b"], "ray-state", ["a"], id="a silent driver leaves it to the State API"),
    ],
)
def test_marks_of_the_driver(until: float, ips: list[str], source: str, nodes: list[str]) -> None:
    told = ClusterDue().take(seen(0, run("gen", -9), marks=marks(until)), ips, NOW)
    assert told is not None
    assert (told.source, [node.node_ip for node in told.nodes]) == (source, nodes)


def test_another_source_tells_its_past_again() -> None:
    due = ClusterDue()
    due.arrived(due.take(seen(0, run("gen", -9), marks=marks(0)), ["a"], NOW))
    assert span(due.take(seen(30, run("gen", -9), marks=marks(0)), ["a"], NOW + 30)) == (-60.0, 30.0)


def test_a_node_without_work_is_not_named() -> None:
    told = ClusterDue().take(seen(0, run("gen", -500, -300)), [], NOW)
    assert told is not None
    assert told.nodes == []


def test_ranks_are_told_as_one_where_they_would_be_too_much() -> None:
    ranks = tuple(
        run("update_actor", -80 + 10 * step + rank / 100, -75 + 10 * step, rank)
        for step in range(8)
        for rank in range(8)
    )
    nodes = {f"10.0.{number // 256}.{number % 256}": ranks for number in range(200)}
    told = ClusterDue().take(ClusterStagesSeen(known_from=NOW - 1000, known_until=NOW, nodes=nodes), [], NOW)
    assert told is not None
    assert [len(node.intervals) for node in told.nodes] == [8] * 200
    few = {"a": ranks}
    told = ClusterDue().take(ClusterStagesSeen(known_from=NOW - 1000, known_until=NOW, nodes=few), [], NOW)
    assert [len(node.intervals) for node in told.nodes] == [64] if told else False


def test_too_much_is_not_told_at_all_rather_than_a_part() -> None:
    """A node that is left out would be taken for one without work."""
    ranks = tuple(run(f"stage_{number}", -50 + number) for number in range(40))
    nodes = {f"node-{number}": ranks for number in range(MAX_BYTES // 2000)}
    assert ClusterDue().take(ClusterStagesSeen(known_from=NOW - 100, known_until=NOW, nodes=nodes), [], NOW) is None


def test_ranks_as_one_begin_with_the_first_and_end_with_the_last() -> None:
    ranks = [
        RayStage("ref", "ref", 10.0, 12.0, 0),
        RayStage("ref", "ref", 10.5, 13.0, 1),
        RayStage("ref", "ref", 20.0, None, 0),
        RayStage("ref", "ref", 20.2, 21.0, 1),
        RayStage("gen", "rollout", 20.0, None, None),
    ]
    assert together(ranks) == [
        RayStage("ref", "ref", 10.0, 13.0),
        RayStage("ref", "ref", 20.0, None),
        RayStage("gen", "rollout", 20.0, None),
    ]


def test_what_goes_over_the_wire_is_within_its_bounds() -> None:
    wild = StageInterval(
        stage="", role="r" * 99, begin=-5.0, end=-9.0, local_rank=-1, step=-4, job="j" * 300, resolution_seconds=1e9
    )
    assert ray_stage(wild) == RayStage("other", "r" * 64, 0.0, 0.0, None, None, "j" * 128, 3600.0)
