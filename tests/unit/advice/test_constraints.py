# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Mapping

import pytest

from verl_gpumonitor.advice.constraints import Weighed, least_tokens, mini_batch_of_a_gpu, refusals

from .builders import FIXED, GIB, GRPO, PPO, A, F, M, R, job

CRITIC = GRPO | PPO
MEGATRON = GRPO | {f"{A}.strategy": "megatron"}
REWARD = GRPO | {"reward.reward_model.enable": "True"}


def refused(
    settings: Mapping[str, str],
    changes: Mapping[str, str],
    *,
    verl: str = "0.9.0",
    open_reasons: frozenset[str] = frozenset(),
) -> str:
    weighed = Weighed(
        before=job(settings, verl=verl).config, changes=changes, open_reasons=open_reasons, memory_total_bytes=80 * GIB
    )
    return "; ".join(refusals(weighed))


@pytest.mark.parametrize(
    ("settings", "changes", "why"),
    [
        pytest.param(
            GRPO,
            {f"{A}.ppo_micro_batch_size_per_gpu": "4"},
            "is ignored while",
            id="a micro batch with dynamic batches",
        ),
        pytest.param(
            GRPO | FIXED, {f"{A}.ppo_max_token_len_per_gpu": "8192"}, "is ignored while", id="a token limit without"
        ),
        pytest.param(GRPO, {f"{A}.ppo_max_token_len_per_gpu": "4095"}, "4096", id="below the longest sequence"),
        pytest.param(
            GRPO | {f"{F}.log_prob_max_token_len_per_gpu": "4096"},
            {"data.max_response_length": "4096"},
            "5120",
            id="a longer response than another limit holds",
        ),
        pytest.param(
            GRPO | FIXED, {f"{A}.ppo_micro_batch_size_per_gpu": "5"}, "must divide 64", id="an odd micro batch"
        ),
        pytest.param(GRPO | FIXED, {f"{A}.ppo_micro_batch_size_per_gpu": "0"}, "at least 1", id="no micro batch"),
        pytest.param(
            GRPO | FIXED,
            {f"{A}.use_dynamic_bsz": "true", f"{A}.ppo_max_token_len_per_gpu": "1024"},
            "4096",
            id="dynamic batches with a short limit",
        ),
        pytest.param(
            GRPO, {f"{R}.tensor_model_parallel_size": "3"}, "multiple of", id="TP that does not divide the GPUs"
        ),
        pytest.param(
            GRPO, {f"{R}.pipeline_model_parallel_size": "2"}, "NotImplementedError", id="pipeline parallel rollout"
        ),
        pytest.param(GRPO, {"critic.ppo_infer_max_token_len_per_gpu": "16384"}, "no critic", id="a critic with GRPO"),
        pytest.param(
            GRPO | {f"{A}.use_kl_loss": "False"},
            {f"{F}.log_prob_max_token_len_per_gpu": "8192"},
            "no reference",
            id="a reference without KL",
        ),
        pytest.param(
            CRITIC, {"critic.ppo_max_token_len_per_gpu": "16384"}, "does not read", id="V1 has another critic limit"
        ),
        pytest.param(CRITIC, {"critic.ulysses_sequence_parallel_size": "2"}, "does not read", id="the old Ulysses key"),
        pytest.param(CRITIC, {"critic.model.fsdp_config.param_offload": "true"}, "has no key", id="an old key"),
        pytest.param(
            GRPO, {f"{F}.fsdp_config.param_offload": "true"}, "does not read", id="a reference is offloaded always"
        ),
        pytest.param(GRPO, {"trainer.balance_batch": "false"}, "does not read", id="V1 always balances"),
        pytest.param(GRPO, {f"{R}.gpu_memory_utilization": "0.98"}, "from 0.1 to 0.95", id="a share beyond bounds"),
        pytest.param(
            GRPO, {f"{R}.gpu_memory_utilization": "0.15"}, "no room", id="a share that does not hold the weights"
        ),
        pytest.param(GRPO, {f"{R}.gpu_memory_utilization": "0.60"}, "already", id="no change"),
        pytest.param(
            GRPO, {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "3"}, "multiple", id="Ulysses over 3 of 8 GPUs"
        ),
        pytest.param(
            GRPO | {f"{M}.use_remove_padding": "False"},
            {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "2"},
            "needs",
            id="Ulysses with padding",
        ),
        pytest.param(
            MEGATRON, {f"{A}.fsdp_config.param_offload": "true"}, "has no key", id="FSDP's keys under Megatron"
        ),
        pytest.param(GRPO, {f"{A}.fsdp_config.offload_policy": "true"}, "fsdp2 only", id="a policy of fsdp2"),
        pytest.param(GRPO, {f"{R}.log_prob_use_dynamic_bsz": "false"}, "must agree", id="two kinds of batches"),
        pytest.param(GRPO, {f"{R}.max_model_len": "2048"}, "prompt and its response", id="too short a model length"),
        pytest.param(
            GRPO | {f"{R}.enable_chunked_prefill": "False"},
            {f"{R}.max_num_batched_tokens": "2048"},
            "without chunked",
            id="few batched tokens without chunked prefill",
        ),
        pytest.param(
            REWARD, {"reward.reward_model.enable_resource_pool": "true"}, "above 0", id="a pool without nodes"
        ),
        pytest.param(
            GRPO, {"reward.reward_model.enable_resource_pool": "true"}, "no reward model", id="a pool for nobody"
        ),
        pytest.param(
            GRPO, {"trainer.n_gpus_per_node": "6"}, "divide", id="GPUs that the mini batch does not divide over"
        ),
    ],
)
def test_a_change_is_refused(settings: Mapping[str, str], changes: Mapping[str, str], why: str) -> None:
    assert why in refused(settings, changes)


@pytest.mark.parametrize(
    ("settings", "changes", "verl"),
    [
        pytest.param(GRPO, {f"{A}.ppo_max_token_len_per_gpu": "4096"}, "0.9.0", id="the longest sequence itself"),
        pytest.param(GRPO, {f"{R}.tensor_model_parallel_size": "4"}, "0.9.0", id="TP that divides the GPUs"),
        pytest.param(CRITIC, {"critic.ppo_infer_max_token_len_per_gpu": "16384"}, "0.9.0", id="V1's critic limit"),
        pytest.param(CRITIC, {"critic.ppo_max_token_len_per_gpu": "16384"}, "0.8.0", id="V0's critic limit"),
        pytest.param(CRITIC, {"critic.model.fsdp_config.param_offload": "true"}, "0.7.1", id="an old key in its time"),
        pytest.param(
            GRPO | FIXED, {f"{A}.ppo_micro_batch_size_per_gpu": "4"}, "0.5.0", id="a micro batch that divides"
        ),
        pytest.param(
            REWARD,
            {f"reward.reward_model.{k}": v for k, v in {"enable_resource_pool": "true", "nnodes": "1"}.items()},
            "0.9.0",
            id="a pool with nodes",
        ),
    ],
)
def test_a_change_is_allowed(settings: Mapping[str, str], changes: Mapping[str, str], verl: str) -> None:
    assert refused(settings, changes, verl=verl) == ""


def test_memory_is_not_moved_to_where_it_is_short() -> None:
    key = f"{A}.fsdp_config.optimizer_offload"
    assert "host memory" in refused(GRPO, {key: "true"}, open_reasons=frozenset({"HostMemoryRisk"}))
    held = GRPO | {key: "True"}
    assert "GPU memory" in refused(held, {key: "false"}, open_reasons=frozenset({"OOMRisk"}))


def test_worked_values() -> None:
    split = GRPO | {"data.max_response_length": "5120", f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4"}
    assert least_tokens(job(split).config, "actor") == 1536
    assert mini_batch_of_a_gpu(job(GRPO | {"trainer.nnodes": "2"}).config, "actor") == 32
