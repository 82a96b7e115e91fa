# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Pools that fall into two halves: when that is a fault, and when two kinds of work."""

import pytest

from tests.unit.diagnosis.pasts import Steps, held, history, stage
from verl_gpumonitor.diagnosis.rules.uneven import RULE

VISIBLE = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"
PIPELINE = f"{VISIBLE} actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"


def _pool(peaks: list[float], *, trains: list[str] | None = None, entrypoint: str = VISIBLE) -> tuple[list[Steps], str]:
    """Return GPUs with these peaks in their training stage, in each of six steps."""
    names = trains or ["update_actor"] * len(peaks)
    gpus = [[{"gen": stage(peak=0.5), name: stage(peak=peak)}] * 6 for peak, name in zip(peaks, names, strict=True)]
    return [*gpus], entrypoint


@pytest.mark.parametrize(
    ("pool", "odd"),
    [
        pytest.param(_pool([0.75, 0.74, 0.41, 0.40]), ["0-0", "0-1"], id="a second model on two of four"),
        pytest.param(_pool([0.7] * 4 + [0.4] * 4), ["0-0", "0-1", "0-2", "0-3"], id="on four of eight"),
        pytest.param(_pool([0.66, 0.58, 0.52, 0.45]), [], id="one group that is spread"),
        pytest.param(_pool([0.75, 0.74, 0.73, 0.40, 0.39]), [], id="most of them: less on some"),
        pytest.param(_pool([0.75, 0.74, 0.65, 0.64]), [], id="halves that are near each other"),
        pytest.param(_pool([0.75, 0.74, 0.41, 0.40], entrypoint=PIPELINE), [], id="two pipeline stages"),
        pytest.param(_pool([0.75, 0.74, 0.41, 0.40], entrypoint="bash train.sh"), [], id="settings out of sight"),
        pytest.param(
            _pool([0.75, 0.74, 0.41, 0.40], trains=["update_actor", "update_actor", "update_critic", "update_critic"]),
            [],
            id="an actor's and a critic's GPUs in one pod",
        ),
    ],
)
def test_half_of_a_pool_that_holds_far_more(pool: tuple[list[Steps], str], odd: list[str]) -> None:
    gpus, entrypoint = pool
    made = history(("w", gpus))
    made.entrypoint = entrypoint
    made.pipeline_stages = 2 if entrypoint == PIPELINE else 1
    found = [sorted(c.finding.scope.gpus) for c in held(RULE, made) if c.finding.evidence["metric"] == "memory"]
    assert found == ([odd] if odd else [])


@pytest.mark.parametrize(
    ("loads", "found"),
    [
        pytest.param([0.95] * 4 + [0.0] * 4, True, id="half gets no requests"),
        pytest.param([0.95] * 4 + [0.07] * 4, True, id="half gets hardly any"),
        pytest.param([0.95] * 4 + [0.6] * 4, False, id="half gets fewer"),
    ],
)
def test_half_of_a_pool_that_has_no_work_in_the_rollout(loads: list[float], found: bool) -> None:
    gpus = [[{"gen": stage(busy=busy, seconds=100), "update_actor": stage()}] * 7 for busy in loads]
    cases = [c for c in held(RULE, history(("w", gpus))) if c.finding.evidence["metric"] == "utilization"]
    assert bool(cases) is found
    assert all(len(case.finding.scope.gpus) == 4 for case in cases)
