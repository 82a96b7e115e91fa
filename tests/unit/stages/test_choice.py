# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which of several things that run at once is the stage of a GPU."""

from itertools import permutations

import pytest

from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.stages.choice import choose


def at(stage: str, begin: float = 0.0, *, rank: int | None = None, role: str = "actor") -> StageInterval:
    return StageInterval(stage=stage, role=role, begin=begin, local_rank=rank)


@pytest.mark.parametrize(
    ("running", "chosen"),
    [
        pytest.param([], None, id="nothing runs"),
        pytest.param([at("gen")], at("gen"), id="one thing runs"),
        pytest.param([at("update_actor", 1), at("gen", 2)], at("update_actor", 1), id="an update beats a server's gen"),
        pytest.param([at("gen", 1), at("reward", 2)], at("gen", 1), id="a rollout beats a reward on CPU"),
        pytest.param(
            [at("gen", 1), at("other", 2, rank=0)], at("gen", 1), id="a stage beats other, even the GPU's own"
        ),
        pytest.param([at("gen", 1), at("init", 2, rank=0)], at("gen", 1), id="and init"),
        pytest.param([at("init", 1), at("other", 2)], at("init", 1), id="init beats other"),
        pytest.param([at("other", 1), at("unknown", 2)], at("other", 1), id="what is seen beats what is not known"),
        pytest.param(
            [at("reward", 1, rank=0), at("gen", 2)], at("reward", 1, rank=0), id="the GPU's own beats the pod's"
        ),
        pytest.param([at("ref", 1), at("values", 2)], at("values", 2), id="of two of a kind, the later"),
        pytest.param([at("epoch_3", 2), at("gen", 1)], at("gen", 1), id="verl's word beats a word of the user"),
        pytest.param([at("epoch_3", 1), at("other", 2)], at("epoch_3", 1), id="which beats other"),
        pytest.param(
            [at("gen", role="rollout"), at("gen", role="actor")], at("gen", role="rollout"), id="a tie is settled"
        ),
    ],
)
def test_choose(running: list[StageInterval], chosen: StageInterval | None) -> None:
    for order in permutations(running):
        assert choose(order) == chosen


def test_of_nested_marks_the_innermost_holds() -> None:
    assert choose([at("testing", 1), at("gen", 2)], nested=True) == at("gen", 2)
    assert choose([at("update_actor", 1), at("my_inner_part", 2)], nested=True) == at("my_inner_part", 2)
    assert choose([at("gen", 1), at("epoch_3", 1)], nested=True) == at("gen", 1)
