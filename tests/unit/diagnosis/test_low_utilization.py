# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Time that is wasted in each step, and time that is not."""

import pytest

from tests.unit.diagnosis.pasts import TOTAL_BYTES, Steps, held, history, stage
from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.diagnosis.rules.low_utilization import RULE

WORK = {"gen": stage(seconds=60), "update_actor": stage(seconds=60)}


def _saves(seconds: float, *, each: int = 1) -> Steps:
    saved = {**WORK, "save_checkpoint": stage(seconds=seconds, busy=0.0)}
    return [saved if step % each == 0 else WORK for step in range(9)]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        pytest.param(_saves(200), True, id="a checkpoint in each step that takes most of it"),
        pytest.param(_saves(200, each=2), False, id="the same in each second step"),
        pytest.param(_saves(30), False, id="a short one in each step"),
    ],
)
def test_a_checkpoint_is_a_waste_if_it_fills_each_step(steps: Steps, found: bool) -> None:
    stages = [case.finding.scope.stage for case in held(RULE, history(("w", [steps] * 4)))]
    assert stages == (["save_checkpoint"] if found else [])


def _pools(still: float, *, serving: int = 1, colocated: bool = False) -> History:
    """Return a trainer and pools that serve, which stand still for this part of each step of 100 s."""
    trainer = [{"update_actor": stage(seconds=80), "other": stage(seconds=20, busy=0.0)}] * 8
    serves = [{"gen": stage(seconds=100 * (1 - still)), "other": stage(seconds=100 * still, busy=0.0)}] * 8
    made = history(("trainer", [trainer] * 4), *[(f"serves-{n}", [serves] * 4) for n in range(serving)])
    for pod in made.pods.values():
        pod.work.servers_seen = colocated or pod.pool != "trainer"
        pod.work.workers_seen = True
    pools = [pool for pool in made.pools() if pool != "trainer"]
    made.standstill.steps = {(pool, "other", step): 100 * still for pool in pools for step in range(8)}
    return made


@pytest.mark.parametrize(
    ("made", "found"),
    [
        pytest.param(_pools(0.75), ["gen"], id="most of each step"),
        pytest.param(_pools(0.4), [], id="a part of it: they take turns"),
        pytest.param(_pools(0.75, serving=2), [], id="of two pools that serve one may be a reward model's"),
        pytest.param(_pools(0.75, colocated=True), [], id="the trainer has engines: this is a reward model's"),
    ],
)
def test_a_rollout_pool_that_stands_still_for_most_of_each_step_is_too_large(made: History, found: list[str]) -> None:
    cases = held(RULE, made)
    assert [case.finding.scope.stage for case in cases] == found
    assert all(case.finding.scope.pods == ("pod-1",) and case.finding.evidence["cause"] == "pool" for case in cases)


def _trainer_waits(
    share: float, *, stage_name: str = "gen", generates: bool = False, trains: str = "update_actor"
) -> History:
    """Return a trainer that waits for this part of each step of 200 s, and a pool that generates all the time."""
    waits = {stage_name: stage(seconds=200 * share, busy=0.9 if generates else 0.0)}
    trainer = [{**waits, trains: stage(seconds=200 * (1 - share))}] * 8
    made = history(("trainer", [trainer] * 4), ("rollout", [[{"gen": stage(seconds=200)}] * 8] * 12))
    for pod in made.pods.values():
        pod.work.workers_seen, pod.work.servers_seen = pod.pool == "trainer", pod.pool == "rollout"
    made.standstill.steps = {("trainer", stage_name, step): 0.0 if generates else 200 * share for step in range(8)}
    return made


@pytest.mark.parametrize(
    ("made", "found"),
    [
        pytest.param(_trainer_waits(0.7), ["gen"], id="through most of each step"),
        pytest.param(_trainer_waits(0.7, stage_name="other"), ["other"], id="the same where its pause has no name"),
        pytest.param(_trainer_waits(0.45), [], id="for a while: they take turns"),
        pytest.param(_trainer_waits(0.45, stage_name="other"), [], id="for a while, in a pause"),
        pytest.param(_trainer_waits(0.7, generates=True), [], id="it generates itself"),
        pytest.param(
            _trainer_waits(0.7, stage_name="other", trains="update_critic"), [], id="a critic with GPUs of its own"
        ),
    ],
)
def test_a_trainer_that_waits_for_other_gpus_is_told_from_an_idle_rollout(made: History, found: list[str]) -> None:
    cases = held(RULE, made)
    assert [case.finding.scope.stage for case in cases] == found
    for case in cases:
        evidence = case.finding.evidence
        assert (evidence["cause"], evidence["trainer_gpus"], evidence["other_gpus"]) == ("rollout", 4, 12)
        assert case.finding.scope.role == "actor"


@pytest.mark.parametrize(("busy", "found"), [(0.15, True), (0.25, True), (0.47, False), (0.35, False)])
def test_a_generation_is_a_waste_where_hardly_anything_runs(busy: float, found: bool) -> None:
    steps = [{"gen": stage(seconds=200, busy=busy), "update_actor": stage(seconds=60)}] * 8
    assert bool(held(RULE, history(("w", [steps] * 4)))) is found


def test_it_is_told_what_the_stage_leaves_free_and_not_what_the_engine_does() -> None:
    steps = [{"gen": stage(seconds=40, peak=0.9), "update_actor": stage(seconds=200, busy=0.2, peak=0.3)}] * 8
    (case,) = held(RULE, history(("w", [steps] * 4)))
    assert case.finding.evidence["headroom_bytes"] == round(0.7 * TOTAL_BYTES)


@pytest.mark.parametrize(
    ("seconds", "busy", "found"),
    [
        pytest.param(200, 0.15, True, id="through much of each step, with little load"),
        pytest.param(20, 0.15, False, id="for a while"),
        pytest.param(200, 0.6, False, id="busily"),
    ],
)
def test_weights_that_are_handed_over_for_long_are_a_waste(seconds: float, busy: float, found: bool) -> None:
    steps = [{**WORK, "update_weights": stage(seconds=seconds, busy=busy)}] * 8
    assert bool(held(RULE, history(("w", [steps] * 4)))) is found
