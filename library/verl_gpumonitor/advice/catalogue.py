# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which keys verl's PPO trainer knows in each released version, with their defaults: those that advice needs.

Made from the configuration that each wheel composes with Hydra (config names `ppo_trainer` and `ppo_megatron_trainer`),
and from the dataclasses behind it. A key of the dataclasses alone must be given with a leading `+`; any other key that
is not here ends the job with a struct error of Hydra. The table is parsed when it is first asked.
"""

from functools import cache
from typing import Final

import msgspec

EXAMINED: Final = ("0.3.0.post1", "0.4.1", "0.5.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1")
"""Releases whose wheels were read, oldest first."""

FSDP: Final = "fsdp"
MEGATRON: Final = "megatron"

_SHORT: Final = {
    "A": "actor_rollout_ref.actor",
    "R": "actor_rollout_ref.rollout",
    "F": "actor_rollout_ref.ref",
    "M": "actor_rollout_ref.model",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One key of one version."""

    key: str
    default: str | None
    """As it is written on a command line; None: null, or without a default."""
    follows: str | None = None
    """The key whose value this one takes if it is not given itself."""
    plus: bool = False
    """Whether the command line must say `+key`."""
    mandatory: bool = False
    """Whether the job fails without it."""


def entry(key: str, *, version: str, flavour: str) -> Entry | None:
    """Return what an examined version knows of a key; None if it has no such key. `flavour`: `fsdp` or `megatron`."""
    return _parsed().get((key, version, flavour))


def versions_of(key: str) -> frozenset[str]:
    """Return the examined versions that take a key without `+`; empty for a key that the table does not have."""
    return _takers().get(key, frozenset())


def full(key: str) -> str:
    """Return the full dotted form of the table's short one: `A.strategy` is `actor_rollout_ref.actor.strategy`."""
    first, dot, rest = key.partition(".")
    return f"{_SHORT[first]}.{rest}" if dot and first in _SHORT else key


@cache
def _parsed() -> dict[tuple[str, str, str], Entry]:
    return {
        (found.key, version, flavour): found
        for line in _TABLE.splitlines()
        for found, versions, flavours in [_line(line)]
        for version in versions
        for flavour in flavours
    }


@cache
def _takers() -> dict[str, frozenset[str]]:
    takers: dict[str, set[str]] = {}
    for (key, version, _), found in _parsed().items():
        if not found.plus:
            takers.setdefault(key, set()).add(version)
    return {key: frozenset(versions) for key, versions in takers.items()}


def _line(line: str) -> tuple[Entry, tuple[str, ...], tuple[str, ...]]:
    """Read `KEY fsdp|megatron|both FIRST..LAST [+]DEFAULT [<- KEY]`."""
    key, flavour, span, default, *arrow = line.split(" ")
    first, _, last = span.partition("..")
    value = default.removeprefix("+")
    found = Entry(
        key=full(key),
        default=None if value in ("null", "???") else value,
        follows=full(arrow[1]) if arrow else None,
        plus=default.startswith("+"),
        mandatory=value == "???",
    )
    versions = EXAMINED[EXAMINED.index(first) : EXAMINED.index(last or first) + 1]
    return found, versions, (FSDP, MEGATRON) if flavour == "both" else (flavour,)


_TABLE: Final = """\
A.calculate_entropy both 0.7.0..0.9.1 false
A.entropy_checkpointing fsdp 0.4.1..0.9.1 false
A.entropy_coeff both 0.3.0.post1 0.001
A.entropy_coeff both 0.4.1..0.9.1 0
A.entropy_from_logits_with_chunking fsdp 0.4.1..0.9.1 false
A.entropy_from_logits_with_chunking megatron 0.9.0..0.9.1 false
A.fsdp_config.entropy_checkpointing fsdp 0.6.1..0.8.0 false
A.fsdp_config.entropy_checkpointing fsdp 0.9.0..0.9.1 false <- A.entropy_checkpointing
A.fsdp_config.entropy_from_logits_with_chunking fsdp 0.6.1..0.8.0 false
A.fsdp_config.entropy_from_logits_with_chunking fsdp 0.9.0..0.9.1 false <- A.entropy_from_logits_with_chunking
A.fsdp_config.forward_prefetch fsdp 0.4.1..0.9.1 false
A.fsdp_config.fsdp_size fsdp 0.3.0.post1..0.9.1 -1
A.fsdp_config.offload_policy fsdp 0.4.1..0.9.1 false
A.fsdp_config.optimizer_offload fsdp 0.3.0.post1..0.9.1 false
A.fsdp_config.param_offload fsdp 0.3.0.post1..0.9.1 false
A.fsdp_config.reshard_after_forward fsdp 0.4.1..0.9.1 true
A.fsdp_config.ulysses_sequence_parallel_size fsdp 0.6.1..0.9.1 1
A.megatron.context_parallel_size megatron 0.4.1..0.9.1 1
A.megatron.entropy_from_logits_with_chunking megatron 0.9.0..0.9.1 false <- A.entropy_from_logits_with_chunking
A.megatron.expert_model_parallel_size megatron 0.4.1..0.9.1 1
A.megatron.grad_offload megatron 0.4.1..0.9.0 false
A.megatron.optimizer_offload megatron 0.4.1..0.9.1 false
A.megatron.override_transformer_config.recompute_granularity megatron 0.5.0..0.9.1 null
A.megatron.override_transformer_config.recompute_method megatron 0.5.0..0.9.1 null
A.megatron.override_transformer_config.recompute_num_layers megatron 0.5.0..0.9.1 null
A.megatron.param_offload megatron 0.4.1..0.9.1 false
A.megatron.pipeline_model_parallel_size megatron 0.3.0.post1..0.9.1 1
A.megatron.tensor_model_parallel_size megatron 0.3.0.post1 4
A.megatron.tensor_model_parallel_size megatron 0.4.1..0.9.1 1
A.megatron.virtual_pipeline_model_parallel_size megatron 0.3.0.post1..0.9.1 null
A.ppo_epochs both 0.3.0.post1..0.9.1 1
A.ppo_max_token_len_per_gpu fsdp 0.3.0.post1..0.9.1 16384
A.ppo_max_token_len_per_gpu megatron 0.4.1..0.9.1 16384
A.ppo_micro_batch_size both 0.3.0.post1..0.9.1 null
A.ppo_micro_batch_size_per_gpu both 0.3.0.post1..0.9.1 null
A.ppo_mini_batch_size both 0.3.0.post1..0.9.1 256
A.strategy fsdp 0.3.0.post1..0.9.1 fsdp
A.strategy megatron 0.3.0.post1..0.9.1 megatron
A.ulysses_sequence_parallel_size fsdp 0.3.0.post1..0.9.1 1
A.use_dynamic_bsz both 0.3.0.post1..0.9.1 false
A.use_kl_loss both 0.3.0.post1..0.9.1 false
actor_rollout_ref.hybrid_engine both 0.3.0.post1..0.9.1 true
M.enable_activation_offload fsdp 0.4.1..0.9.1 false
M.enable_activation_offload megatron 0.7.0..0.9.1 false
M.enable_gradient_checkpointing fsdp 0.3.0.post1..0.9.1 true
M.enable_gradient_checkpointing megatron 0.3.0.post1..0.4.1 false
M.enable_gradient_checkpointing megatron 0.7.0..0.9.1 true
M.lora_rank fsdp 0.4.1..0.9.1 0
M.lora_rank megatron 0.7.0..0.9.1 0
M.path both 0.3.0.post1..0.9.1 ~/models/deepseek-llm-7b-chat
M.use_fused_kernels fsdp 0.4.1..0.9.1 false
M.use_fused_kernels megatron 0.5.0..0.9.1 false
M.use_liger fsdp 0.4.1..0.9.1 false
M.use_liger megatron 0.7.0..0.9.1 false
M.use_remove_padding fsdp 0.3.0.post1..0.6.1 false
M.use_remove_padding fsdp 0.7.0..0.9.1 true
M.use_remove_padding megatron 0.6.1..0.7.1 false
M.use_remove_padding megatron 0.8.0..0.9.1 true
actor_rollout_ref.nccl_timeout fsdp 0.6.1..0.9.1 600
actor_rollout_ref.nccl_timeout megatron 0.4.1..0.9.1 600
F.entropy_from_logits_with_chunking fsdp 0.4.1..0.9.1 false
F.entropy_from_logits_with_chunking megatron 0.9.0..0.9.1 false
F.fsdp_config.entropy_from_logits_with_chunking fsdp 0.6.1..0.8.0 false
F.fsdp_config.entropy_from_logits_with_chunking fsdp 0.9.0..0.9.1 false <- F.entropy_from_logits_with_chunking
F.fsdp_config.param_offload fsdp 0.3.0.post1..0.9.1 false
F.fsdp_config.ulysses_sequence_parallel_size fsdp 0.6.1..0.9.1 1
F.log_prob_max_token_len_per_gpu fsdp 0.3.0.post1..0.9.1 16384 <- A.ppo_max_token_len_per_gpu
F.log_prob_max_token_len_per_gpu megatron 0.4.1..0.9.1 16384 <- A.ppo_max_token_len_per_gpu
F.log_prob_micro_batch_size both 0.3.0.post1..0.9.1 null
F.log_prob_micro_batch_size_per_gpu both 0.3.0.post1..0.9.1 null
F.log_prob_use_dynamic_bsz fsdp 0.3.0.post1..0.9.1 false <- A.use_dynamic_bsz
F.log_prob_use_dynamic_bsz megatron 0.4.1..0.9.1 false <- A.use_dynamic_bsz
F.megatron.context_parallel_size megatron 0.4.1..0.6.1 1
F.megatron.context_parallel_size megatron 0.7.0..0.9.1 1 <- A.megatron.context_parallel_size
F.megatron.param_offload megatron 0.4.1..0.6.1 false
F.megatron.param_offload megatron 0.7.0..0.9.1 false <- A.megatron.param_offload
F.megatron.pipeline_model_parallel_size megatron 0.3.0.post1..0.6.1 1
F.megatron.pipeline_model_parallel_size megatron 0.7.0..0.9.1 1 <- A.megatron.pipeline_model_parallel_size
F.megatron.tensor_model_parallel_size megatron 0.3.0.post1 4
F.megatron.tensor_model_parallel_size megatron 0.4.1..0.6.1 1
F.megatron.tensor_model_parallel_size megatron 0.7.0..0.9.1 1 <- A.megatron.tensor_model_parallel_size
F.strategy fsdp 0.4.1..0.9.1 fsdp <- A.strategy
F.strategy megatron 0.4.1 megatron <- A.strategy
F.strategy megatron 0.5.0..0.9.1 megatron
F.ulysses_sequence_parallel_size fsdp 0.3.0.post1..0.9.1 1 <- A.ulysses_sequence_parallel_size
R.agent.num_workers both 0.5.0..0.9.1 8
R.checkpoint_engine.backend both 0.7.1..0.9.1 naive
R.checkpoint_engine.update_weights_bucket_megabytes both 0.7.1..0.9.1 2048
R.cudagraph_capture_sizes both 0.6.1..0.9.1 null
R.data_parallel_size both 0.6.1..0.9.1 1
R.disable_log_stats both 0.3.0.post1..0.9.1 true
R.enable_chunked_prefill fsdp 0.3.0.post1..0.9.1 true
R.enable_chunked_prefill megatron 0.3.0.post1..0.5.0 false
R.enable_chunked_prefill megatron 0.6.1..0.9.1 true
R.enable_prefix_caching both 0.6.1..0.9.1 true
R.enable_sleep_mode both 0.7.0..0.9.1 +true
R.enforce_eager both 0.3.0.post1..0.5.0 true
R.enforce_eager both 0.6.1..0.9.1 false
R.expert_parallel_size both 0.6.1..0.9.1 1
R.free_cache_engine both 0.3.0.post1..0.9.1 true
R.gpu_memory_utilization both 0.3.0.post1..0.9.1 0.5
R.layered_summon fsdp 0.4.1..0.9.1 false
R.layered_summon megatron 0.8.0..0.9.1 false
R.load_format fsdp 0.3.0.post1..0.5.0 dummy_dtensor
R.load_format fsdp 0.6.1..0.9.1 dummy
R.load_format megatron 0.3.0.post1..0.5.0 dummy_megatron
R.load_format megatron 0.6.1..0.9.1 dummy
R.log_prob_max_token_len_per_gpu fsdp 0.3.0.post1..0.9.1 16384 <- A.ppo_max_token_len_per_gpu
R.log_prob_max_token_len_per_gpu megatron 0.4.1..0.9.1 16384 <- A.ppo_max_token_len_per_gpu
R.log_prob_micro_batch_size both 0.3.0.post1..0.9.1 null
R.log_prob_micro_batch_size_per_gpu both 0.3.0.post1..0.9.1 null
R.log_prob_use_dynamic_bsz fsdp 0.3.0.post1..0.9.1 false <- A.use_dynamic_bsz
R.log_prob_use_dynamic_bsz megatron 0.4.1..0.9.1 false <- A.use_dynamic_bsz
R.max_model_len both 0.3.0.post1..0.9.1 null
R.max_num_batched_tokens both 0.3.0.post1..0.9.1 8192
R.max_num_seqs both 0.3.0.post1..0.8.0 1024
R.max_num_seqs both 0.9.0..0.9.1 256
R.mode both 0.4.1..0.6.1 sync
R.mode both 0.7.0..0.9.1 async
R.multi_turn.enable both 0.4.1..0.9.1 false
R.multi_turn.max_assistant_turns both 0.4.1..0.9.1 null
R.n both 0.3.0.post1..0.9.1 1
R.n_gpus_per_node both 0.7.1..0.9.1 8 <- trainer.n_gpus_per_node
R.name both 0.3.0.post1..0.5.0 vllm
R.name both 0.6.1..0.9.1 ???
R.nnodes both 0.7.1..0.9.1 0
R.pipeline_model_parallel_size both 0.6.1..0.9.1 1
R.prompt_length both 0.3.0.post1..0.9.1 512 <- data.max_prompt_length
R.response_length both 0.3.0.post1..0.9.1 512 <- data.max_response_length
R.tensor_model_parallel_size fsdp 0.3.0.post1..0.9.1 2
R.tensor_model_parallel_size megatron 0.3.0.post1 2
R.tensor_model_parallel_size megatron 0.4.1..0.5.0 1
R.tensor_model_parallel_size megatron 0.6.1..0.9.1 2
R.update_weights_bucket_megabytes both 0.5.0..0.7.0 512
algorithm.adv_estimator both 0.3.0.post1..0.9.1 gae
algorithm.rollout_correction.bypass_mode both 0.6.1..0.9.1 false
algorithm.use_kl_in_reward both 0.4.1..0.9.1 false
critic.enable both 0.6.1..0.9.1 null
critic.forward_max_token_len_per_gpu fsdp 0.3.0.post1..0.9.1 32768 <- critic.ppo_max_token_len_per_gpu
critic.forward_max_token_len_per_gpu megatron 0.4.1..0.9.1 32768 <- critic.ppo_max_token_len_per_gpu
critic.forward_micro_batch_size fsdp 0.3.0.post1..0.9.1 null <- critic.ppo_micro_batch_size
critic.forward_micro_batch_size_per_gpu fsdp 0.3.0.post1..0.9.1 null <- critic.ppo_micro_batch_size_per_gpu
critic.fsdp.offload_policy fsdp 0.8.0..0.9.1 false
critic.fsdp.optimizer_offload fsdp 0.8.0..0.9.1 false
critic.fsdp.param_offload fsdp 0.8.0..0.9.1 false
critic.fsdp.ulysses_sequence_parallel_size fsdp 0.8.0..0.9.1 1
critic.megatron.context_parallel_size megatron 0.4.1..0.9.1 1
critic.megatron.grad_offload megatron 0.4.1..0.9.0 false
critic.megatron.optimizer_offload megatron 0.4.1..0.9.1 false
critic.megatron.override_transformer_config.recompute_granularity megatron 0.6.1..0.9.1 null
critic.megatron.override_transformer_config.recompute_method megatron 0.6.1..0.9.1 null
critic.megatron.override_transformer_config.recompute_num_layers megatron 0.6.1..0.9.1 null
critic.megatron.param_offload megatron 0.4.1..0.9.1 false
critic.megatron.pipeline_model_parallel_size megatron 0.3.0.post1..0.9.1 1
critic.megatron.tensor_model_parallel_size megatron 0.3.0.post1 4
critic.megatron.tensor_model_parallel_size megatron 0.4.1..0.9.1 1
critic.model.enable_activation_offload fsdp 0.4.1..0.9.1 false
critic.model.enable_activation_offload megatron 0.8.0..0.9.1 false
critic.model.enable_gradient_checkpointing fsdp 0.3.0.post1..0.9.1 true
critic.model.enable_gradient_checkpointing megatron 0.3.0.post1..0.4.1 false
critic.model.enable_gradient_checkpointing megatron 0.8.0..0.9.1 true
critic.model.fsdp_config.offload_policy fsdp 0.4.1..0.7.1 false
critic.model.fsdp_config.optimizer_offload fsdp 0.3.0.post1..0.7.1 false
critic.model.fsdp_config.param_offload fsdp 0.3.0.post1..0.7.1 false
critic.model.fsdp_config.ulysses_sequence_parallel_size fsdp 0.6.1..0.7.1 1
critic.model.lora_rank fsdp 0.4.1..0.9.1 0
critic.model.lora_rank megatron 0.8.0..0.9.1 0
critic.model.path both 0.3.0.post1..0.9.1 ~/models/deepseek-llm-7b-chat
critic.model.use_remove_padding fsdp 0.3.0.post1..0.7.1 false
critic.model.use_remove_padding fsdp 0.8.0..0.9.1 true
critic.model.use_remove_padding megatron 0.8.0..0.9.1 true
critic.ppo_infer_max_token_len_per_gpu both 0.6.1..0.9.1 +32768
critic.ppo_max_token_len_per_gpu fsdp 0.3.0.post1..0.9.1 32768
critic.ppo_max_token_len_per_gpu megatron 0.4.1..0.9.1 32768
critic.ppo_micro_batch_size both 0.3.0.post1..0.9.1 null
critic.ppo_micro_batch_size_per_gpu both 0.3.0.post1..0.4.1 null
critic.ppo_micro_batch_size_per_gpu both 0.5.0..0.9.1 null <- critic.ppo_micro_batch_size
critic.ppo_mini_batch_size both 0.3.0.post1..0.9.1 256 <- A.ppo_mini_batch_size
critic.strategy fsdp 0.3.0.post1 fsdp
critic.strategy fsdp 0.4.1 fsdp <- A.strategy
critic.strategy fsdp 0.5.0..0.9.1 fsdp
critic.strategy megatron 0.3.0.post1 megatron
critic.strategy megatron 0.4.1 megatron <- A.strategy
critic.strategy megatron 0.5.0..0.9.1 megatron
critic.ulysses_sequence_parallel_size fsdp 0.3.0.post1..0.9.1 1
critic.use_dynamic_bsz both 0.3.0.post1..0.9.1 false <- A.use_dynamic_bsz
data.dataloader_num_workers both 0.5.0..0.9.1 8
data.filter_overlong_prompts both 0.3.0.post1..0.9.1 false
data.gen_batch_size both 0.9.0..0.9.1 null
data.image_key fsdp 0.3.0.post1..0.9.1 images
data.image_key megatron 0.5.0..0.9.1 images
data.max_prompt_length both 0.3.0.post1..0.9.1 512
data.max_response_length both 0.3.0.post1..0.9.1 512
data.train_batch_size both 0.3.0.post1..0.9.1 1024
data.val_batch_size both 0.3.0.post1..0.9.1 null
reward.num_workers both 0.7.1..0.9.1 8
reward.reward_model.enable both 0.7.1..0.9.1 false
reward.reward_model.enable_resource_pool both 0.7.1..0.9.1 false
reward.reward_model.model_path both 0.7.1..0.9.1 null
reward.reward_model.n_gpus_per_node both 0.7.1..0.9.1 8
reward.reward_model.nnodes both 0.7.1..0.9.1 0
reward.reward_model.rollout.free_cache_engine both 0.7.1..0.9.1 true
reward.reward_model.rollout.gpu_memory_utilization both 0.7.1..0.9.1 0.5
reward.reward_model.rollout.max_num_seqs both 0.7.1..0.9.1 1024
reward.reward_model.rollout.tensor_model_parallel_size both 0.7.1..0.9.1 2
reward_model.enable both 0.3.0.post1..0.7.0 false
reward_model.enable both 0.7.1..0.9.1 null
reward_model.enable_resource_pool both 0.6.1..0.7.0 false
reward_model.enable_resource_pool both 0.7.1..0.9.1 null
reward_model.forward_max_token_len_per_gpu fsdp 0.3.0.post1..0.7.0 32768 <- critic.forward_max_token_len_per_gpu
reward_model.forward_max_token_len_per_gpu megatron 0.4.1..0.7.0 32768 <- critic.forward_max_token_len_per_gpu
reward_model.launch_reward_fn_async both 0.4.1..0.7.0 false
reward_model.micro_batch_size both 0.3.0.post1..0.7.0 null
reward_model.micro_batch_size_per_gpu both 0.3.0.post1..0.7.0 null
reward_model.model.fsdp_config.param_offload fsdp 0.3.0.post1..0.7.0 false
reward_model.model.path both 0.3.0.post1..0.7.0 ~/models/FsfairX-LLaMA3-RM-v0.1
reward_model.model.path both 0.7.1..0.9.1 null
reward_model.n_gpus_per_node both 0.6.1 0
reward_model.n_gpus_per_node both 0.7.0 8
reward_model.n_gpus_per_node both 0.7.1..0.9.1 null
reward_model.nnodes both 0.6.1..0.7.0 0
reward_model.nnodes both 0.7.1..0.9.1 null
reward_model.num_workers both 0.7.0 1
reward_model.num_workers both 0.7.1..0.9.1 null
reward_model.rollout.free_cache_engine both 0.7.0 true
reward_model.rollout.free_cache_engine both 0.7.1..0.9.1 null
reward_model.rollout.gpu_memory_utilization both 0.7.0 0.5
reward_model.rollout.gpu_memory_utilization both 0.7.1..0.9.1 null
reward_model.rollout.tensor_model_parallel_size both 0.7.0 2
reward_model.rollout.tensor_model_parallel_size both 0.7.1..0.9.1 null
reward_model.strategy fsdp 0.3.0.post1 fsdp
reward_model.strategy fsdp 0.4.1 fsdp <- A.strategy
reward_model.strategy fsdp 0.5.0..0.7.0 fsdp
reward_model.strategy megatron 0.3.0.post1 megatron
reward_model.strategy megatron 0.4.1 megatron <- A.strategy
reward_model.strategy megatron 0.5.0..0.7.0 megatron
reward_model.use_dynamic_bsz both 0.3.0.post1..0.7.0 false <- critic.use_dynamic_bsz
reward_model.use_reward_loop both 0.7.0 true
trainer.balance_batch both 0.3.0.post1..0.9.1 true
trainer.critic_warmup both 0.3.0.post1..0.9.1 0
trainer.n_gpus_per_node both 0.3.0.post1..0.9.1 8
trainer.nnodes both 0.3.0.post1..0.9.1 1
trainer.save_freq both 0.3.0.post1..0.9.1 -1
trainer.test_freq fsdp 0.3.0.post1..0.9.1 -1
trainer.test_freq megatron 0.3.0.post1 2
trainer.test_freq megatron 0.4.1..0.9.1 -1
trainer.use_legacy_worker_impl fsdp 0.5.0..0.7.1 auto
trainer.use_legacy_worker_impl megatron 0.7.0..0.7.1 auto
trainer.use_v1 both 0.9.0..0.9.1 true
trainer.v1.trainer_mode both 0.9.0..0.9.1 sync
trainer.val_before_train both 0.4.1..0.9.1 true"""
