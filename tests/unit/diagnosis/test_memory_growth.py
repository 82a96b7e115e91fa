# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Growth is a course that a stage has, not one of many that look like it by chance."""

from collections.abc import Callable, Sequence

import pytest

from tests.unit.diagnosis.pasts import Steps, held, history, stage
from verl_gpumonitor.diagnosis.rules.memory_growth import RULE

LINE = [0.30 + 0.01 * k for k in range(10)]
FLAT = [0.30] * 10
JUMP = [0.30] * 6 + [0.42] * 4
STEADY_FLOOR = 0.2
LIKE_A_LINE = [0.30, 0.31, 0.31, 0.32, 0.32, 0.34, 0.36, 0.39, 0.41, 0.42]


def _steps(name: str, levels: Sequence[float]) -> Steps:
    flat = {"gen": stage(peak=0.6), "ref": stage(peak=0.4), "update_actor": stage(peak=0.5)}
    return [{**flat, name: stage(peak=level)} for level in levels]


@pytest.mark.parametrize(
    ("name", "gpus", "found"),
    [
        pytest.param("old_log_prob", [LINE] * 8, True, id="all GPUs grow"),
        pytest.param("old_log_prob", [LINE] + [FLAT] * 7, True, id="one GPU grows by itself"),
        pytest.param("old_log_prob", [JUMP] * 8, False, id="all jump once"),
        pytest.param("old_log_prob", [LIKE_A_LINE] + [JUMP] * 7, False, id="all jump, and one looks like a line"),
        pytest.param("other", [LINE] + [FLAT] * 7, False, id="what is held between stages, on one GPU"),
        pytest.param("other", [LINE] * 8, False, id="the same on all: no stage grows"),
    ],
)
def test_what_counts_as_growth(name: str, gpus: Sequence[Sequence[float]], found: bool) -> None:
    made = history(("workers", [_steps(name, levels) for levels in gpus]))
    assert bool(held(RULE, made)) is found


def test_a_leak_shows_between_stages_too_and_is_told_of_a_stage() -> None:
    steps = [{n: stage(peak=at + level) for n, at in (("other", 0.0), ("ref", 0.1), ("gen", 0.3))} for level in LINE]
    (case,) = held(RULE, history(("workers", [steps] * 4)))
    assert case.finding.scope.stage in ("ref", "gen")
    assert case.finding.evidence["stages"] == 3


def test_peaks_of_one_gpu_in_one_stage_are_chance_and_its_floor_is_not() -> None:
    others = [[{"ref": stage(peak=0.4), "gen": stage(peak=0.6), "update_actor": stage(peak=0.5)}] * 10] * 7
    peaks = [{**others[0][0], "ref": stage(peak=level, floor=STEADY_FLOOR)} for level in LINE]
    assert held(RULE, history(("w", [peaks, *others]))) == []
    floors = [{**others[0][0], "ref": stage(peak=0.45, floor=level)} for level in LINE]
    assert [case.finding.scope.gpus for case in held(RULE, history(("w", [floors, *others])))] == [("0-0",)]


def test_where_no_stage_is_told_all_time_is_one_stage() -> None:
    steps = [{"other": stage(peak=level)} for level in LINE]
    assert [case.finding.scope.stage for case in held(RULE, history(("w", [steps] * 4), told=False))] == ["other"]


@pytest.mark.parametrize(
    ("floor", "why"),
    [
        pytest.param(lambda level: level - 0.1, "as a leak does", id="what stays held between two batches"),
        pytest.param(lambda _: STEADY_FLOOR, "as growing batches do", id="what a batch takes"),
    ],
)
def test_master_and_workers_of_a_pytorchjob_are_one_pool_without_answers(
    floor: Callable[[float], float], why: str
) -> None:
    steps = [{"other": stage(peak=level, floor=floor(level))} for level in LINE]
    made = history(("Master", [steps] * 2), ("Worker", [steps] * 2), told=False, kind="PyTorchJob")
    (case,) = held(RULE, made)
    assert len(case.finding.scope.gpus) == 4
    assert why in case.finding.message
