# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which GPUs of one group of pods are compared with each other, and what is found by that."""

import pytest

from tests.unit.diagnosis.pasts import Steps, held, history, stage
from verl_gpumonitor.diagnosis.alike import alike
from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.diagnosis.rules import low_utilization, oom_risk, uneven

TRAINS: Steps = [{"gen": stage(busy=0.0, peak=0.45), "update_actor": stage(peak=0.7)}] * 6
SERVES: Steps = [{"gen": stage(seconds=120, busy=0.9, peak=0.95)}] * 6
BOTH: Steps = [{"gen": stage(busy=0.9, peak=0.8), "update_actor": stage(peak=0.7)}] * 6
LEFT_OUT: Steps = [{"gen": stage(busy=0.0, peak=0.8), "update_actor": stage(peak=0.7)}] * 6
NOTHING: Steps = [{"gen": stage(busy=0.0, peak=0.01)}] * 6


@pytest.mark.parametrize(
    ("gpus", "parts"),
    [
        pytest.param([BOTH] * 4, [4], id="a colocated job is one"),
        pytest.param([TRAINS] * 2 + [SERVES] * 2, [2, 2], id="trained ranks and engines of an asynchronous trainer"),
        pytest.param(
            [TRAINS] * 2 + [SERVES] * 5 + [NOTHING], [2, 6], id="an engine without work is one of the engines"
        ),
        pytest.param([BOTH] * 3 + [NOTHING], [4], id="a GPU without work is one of a colocated job"),
        pytest.param([BOTH] * 4 + [SERVES] * 2, [4, 2], id="more engines beside a colocated job"),
        pytest.param([SERVES] * 4, [4], id="engines alone"),
        pytest.param([], [0], id="no GPU"),
    ],
)
def test_gpus_are_cut_by_the_work_they_do(gpus: list[Steps], parts: list[int]) -> None:
    made = history(("workers", gpus))
    assert [len(part) for part in alike([*made.gpus.values()])] == parts


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(history(("w", [TRAINS] * 2 + [SERVES] * 6)), id="few train, in the same pod"),
        pytest.param(history(("w", [TRAINS] * 8), *[("w", [SERVES] * 8)] * 3), id="few train, in a pod of their own"),
        pytest.param(history(*[("w", [TRAINS] * 8)] * 7, ("w", [SERVES] * 8)), id="few generate"),
    ],
)
def test_trained_ranks_and_engines_of_one_group_are_not_compared(made: History) -> None:
    for rule in (uneven.RULE, oom_risk.RULE, low_utilization.RULE):
        assert held(rule, made) == []


@pytest.mark.parametrize(
    ("busy", "left_out"),
    [pytest.param(1, 1, id="one of two"), pytest.param(4, 4, id="half"), pytest.param(2, 6, id="most")],
)
def test_gpus_that_train_and_have_no_work_in_any_rollout_are_named(busy: int, left_out: int) -> None:
    made = history(("w", [BOTH] * busy + [LEFT_OUT] * left_out))
    found = [case.finding for case in held(uneven.RULE, made)]
    assert [(f.evidence["metric"], f.scope.stage) for f in found] == [("utilization", "gen")]
    assert set(found[0].scope.gpus) == {f"0-{n}" for n in range(busy, busy + left_out)}


def test_a_rollout_without_any_work_leaves_out_nobody() -> None:
    assert held(uneven.RULE, history(("w", [LEFT_OUT] * 8))) == []
