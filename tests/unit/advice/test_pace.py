# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is said first about GPUs that wait: the words fit the cause."""

import pytest

from .builders import R, answer, given, job


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
