# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is said first about GPUs that wait: the words fit the cause."""

import pytest

from verl_gpumonitor.advice import context_of

from .builders import GRPO, Figures, R, answer, given, job, line


def test_an_engine_without_work_is_looked_at_first() -> None:
    first, *_ = answer(job(), "Imbalance", "gen", {"metric": "utilization", "value": 0.0, "pool_value": 0.9})
    assert (first.parameter, "it gets none, has died" in first.text) == (None, True)


def test_an_engine_with_less_work_is_a_matter_of_replicas() -> None:
    advice = answer(job(), "Imbalance", "gen", {"metric": "utilization", "value": 0.4, "pool_value": 0.9})
    assert f"{R}.tensor_model_parallel_size" in given(advice)
    assert not any("it gets none" in a.text for a in advice)


def test_a_rollout_pool_that_is_too_large_gets_fewer_gpus_and_not_more_requests() -> None:
    (advice,) = answer(job(), "LowUtilization", "gen", {"cause": "pool", "idle_ratio": 0.3})
    assert (advice.parameter, "rollout.n_gpus_per_node" in advice.text) == (None, True)


ASYNC = {**GRPO, "trainer.nnodes": "1", "rollout.nnodes": "1"}
WAITS: Figures = {"cause": "rollout", "trainer_gpus": 8, "other_gpus": 8, "step_share": 0.6, "idle_ratio": 0.9}


@pytest.mark.parametrize(
    ("module", "settings", "keys"),
    [
        pytest.param(
            "verl.experimental.fully_async_policy.fully_async_main",
            ASYNC,
            ["rollout.n_gpus_per_node", "async_training.staleness_threshold"],
            id="fully asynchronous",
        ),
        pytest.param(
            "verl.experimental.one_step_off_policy.main_ppo", ASYNC, ["rollout.n_gpus_per_node"], id="one step off"
        ),
        pytest.param(
            "verl.trainer.main_ppo",
            {**GRPO, "trainer.v1.trainer_mode": "separate_async"},
            [f"{R}.n_gpus_per_node"],
            id="V1's own asynchronous mode",
        ),
    ],
)
@pytest.mark.parametrize("stage", ["gen", "other"])
def test_a_trainer_that_waits_gives_gpus_to_the_rollout(
    module: str, settings: dict[str, str], keys: list[str], stage: str
) -> None:
    context = context_of(line(settings, module), verl="0.9.1", kind="RayJob", gpus=16, gpus_per_pod=8)
    advice = answer(context, "LowUtilization", stage, WAITS)
    assert [a.parameter for a in advice if a.parameter is not None and "log_stats" not in a.parameter] == keys
    # It trains for 40% of a step, so that 3.2 GPUs' worth of work stand against 8.
    assert "about 11 of the 16 GPUs" in advice[0].text


@pytest.mark.parametrize(
    ("verl", "given_value", "found"),
    [
        pytest.param("0.5.0", None, True, id="off by default"),
        pytest.param("0.6.1", "True", False, id="on already"),
        pytest.param("0.7.1", None, False, id="rewards come with answers"),
        pytest.param("0.3.0.post1", None, False, id="the key is not there yet"),
    ],
)
def test_rewards_between_stages_run_beside_log_probabilities(verl: str, given_value: str | None, found: bool) -> None:
    key = "reward_model.launch_reward_fn_async"
    settings = GRPO if given_value is None else {**GRPO, key: given_value}
    advice = answer(job(settings, verl=verl), "LowUtilization", "other", {"step_share": 0.5, "utilization": 0.0})
    assert (key in given(advice)) is found


@pytest.mark.parametrize(("current", "suggested"), [("8", "256"), ("256", "512"), ("64", "256")])
def test_an_engine_that_took_few_answers_takes_as_many_as_by_default(current: str, suggested: str) -> None:
    settings = {**GRPO, f"{R}.max_num_seqs": current}
    advice = answer(job(settings), "LowUtilization", "gen", {"utilization": 0.2, "idle_ratio": 0.0})
    assert given(advice)[f"{R}.max_num_seqs"] == (current, suggested)


@pytest.mark.parametrize(
    ("evidence", "told"),
    [
        pytest.param({"step_share": 0.5, "utilization": 0.0}, True, id="between stages of verl"),
        pytest.param({"utilization": 0.2, "seconds": 600}, False, id="where nobody tells stages"),
    ],
)
def test_between_stages_it_is_the_driver(evidence: dict[str, float], told: bool) -> None:
    texts = [a.text for a in answer(job(), "LowUtilization", "other", evidence)]
    assert any("timing_s/reward" in text for text in texts) is told


@pytest.mark.parametrize(
    ("reasons", "first", "count"),
    [
        pytest.param("hw_slowdown, hw_power_brake_slowdown", "power supplies", 1, id="a brake is no heat"),
        pytest.param("sw_thermal_slowdown", "cooling", 1, id="heat"),
        pytest.param("hw_thermal_slowdown, hw_power_brake_slowdown", "cooling", 2, id="both"),
        pytest.param("", "cooling", 2, id="nobody tells"),
    ],
)
def test_clocks_that_are_held_down_are_told_apart(reasons: str, first: str, count: int) -> None:
    advice = answer(job(), "Throttled", "update_actor", {"throttle_reasons": reasons})
    assert (first in advice[0].text, len(advice)) == (True, count)


@pytest.mark.parametrize(("stage", "sure"), [("gen", True), ("update_actor", False)])
def test_replicas_do_not_even_out_what_a_training_stage_holds(stage: str, sure: bool) -> None:
    advice = answer(job(), "Imbalance", stage, {"metric": "memory"})
    (replicas,) = [a for a in advice if a.parameter == f"{R}.tensor_model_parallel_size"]
    assert (replicas.confidence != "low", not replicas.text.startswith("If the rollout")) == (sure, sure)
