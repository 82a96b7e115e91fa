# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which log-probabilities of a LoRA job are the reference's."""

import pytest

from verl_gpumonitor.stages.cluster import RayTask
from verl_gpumonitor.stages.lora import ReferencePasses
from verl_gpumonitor.stages.sources.ray_jobs import has_lora

LOG_PROB = "actor_rollout_compute_log_prob"
UPDATE = "actor_rollout_update_actor"


def passes(*methods: str) -> list[int]:
    """Let one worker run methods one after the other, each seen twice; returns which are the reference's."""
    references = ReferencePasses()
    found = []
    for number, method in enumerate(methods):
        task = RayTask(task_id=f"t{number}", name=f"WorkerDict.{method}", node_id="n", actor_id="a")
        other = RayTask(task_id="x", name="WorkerDict.actor_rollout_compute_log_prob", node_id="n", actor_id="b")
        for _ in range(2):
            seen = references.look([task, other])
        assert seen <= {task.task_id}
        found += [number] if seen else []
    return found


@pytest.mark.parametrize(
    ("methods", "references"),
    [
        pytest.param([LOG_PROB, LOG_PROB, UPDATE] * 2, [1, 4], id="the second of two in a row"),
        pytest.param([LOG_PROB, UPDATE] * 2, [], id="one a step is the policy's"),
        pytest.param([LOG_PROB] * 4, [1, 3], id="steps without an update that was seen"),
        pytest.param([LOG_PROB, "actor_rollout__query_dispatch_info", LOG_PROB], [2], id="with a query in between"),
        pytest.param(["actor_save_model_to_cpu", LOG_PROB, "actor_restore_model_from_cpu"], [], id="moving a model"),
        pytest.param([LOG_PROB, "critic_infer_batch", LOG_PROB], [], id="with values in between"),
    ],
)
def test_reference_passes(methods: list[str], references: list[int]) -> None:
    assert passes(*methods) == references


@pytest.mark.parametrize(
    ("entrypoint", "lora"),
    [
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_rank=64", True),
        ("python3 -m verl.trainer.main_ppo +actor_rollout_ref.model.lora.rank=8 a=b", True),
        ("python3 -m verl.trainer.main_ppo 'actor_rollout_ref.model.lora_adapter_path=/models/a'", True),
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_rank=0", False),
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_adapter_path=null", False),
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_alpha=16", False),
        ("bash run.sh", False),
        ("", False),
    ],
)
def test_whether_a_command_line_turns_lora_on(entrypoint: str, lora: bool) -> None:
    assert has_lora(entrypoint) is lora
