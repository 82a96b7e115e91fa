# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What verl itself refuses, ignores or cannot do: every change is held against it before it is given. Pure.

Rules were read in the releases' source; `workers/config`, `utils/config.py` and the workers check them, some only in
the middle of a step, where a job of days then ends. A rule whose inputs are unknown does not refuse: then the advice
names its condition instead.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec

from .catalogue import MEGATRON
from .config import A, Config, F, M, R

MIN_ROLLOUT_SHARE: Final = 0.1
MAX_ROLLOUT_SHARE: Final = 0.95
"""Above it, the runtime's own memory of a GPU has no room beside the rollout engine."""
WEIGHT_BYTES: Final = 2.0
"""Of one parameter in bfloat16, as rollout engines hold it."""

_PLACES: Final = frozenset({"trainer.nnodes", "trainer.n_gpus_per_node"})

OFFLOADS: Final = ("param_offload", "optimizer_offload", "grad_offload", "offload_policy", "enable_activation_offload")
"""Last words of keys that move memory of the GPU to that of the host."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A change and what it is held against."""

    before: Config
    changes: Mapping[str, str]
    """Keys without `+`, to new values."""
    open_reasons: frozenset[str] = frozenset()
    """Reasons of other findings that hold now."""
    memory_total_bytes: int | None = None
    """Of the smallest GPU."""

    @cached_property
    def after(self) -> Config:
        """The settings with the change."""
        return self.before.changed(self.changes)


def refusals(weighed: Weighed) -> tuple[str, ...]:
    """Return why a change cannot be given, one sentence each; empty if nothing stands against it."""
    return tuple(reason for rule in _RULES for reason in rule(weighed))


def pointless(config: Config, key: str) -> bool:
    """Whether a key decides nothing in this job, whatever its value: not there, not read, or of a part not in use."""
    weighed = Weighed(before=config, changes={key: ""})
    return any(True for rule in (_known_key, _right_kind_of_limit, _in_use, _read_by_verl) for _ in rule(weighed))


class BatchKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that bound one pass over a model, of which the switch chooses one."""

    tokens: str
    """Most tokens, with dynamic batches."""
    micro: str | None
    """Sequences, without; None where batches are always dynamic."""
    switch: str | None
    role: str

    def dynamic(self, config: Config) -> bool | None:
        """Whether batches are dynamic; None if unknown."""
        return True if self.switch is None else config.flag(self.switch)


def batch_keys(config: Config) -> dict[str, BatchKeys]:
    """Return the keys by stage. Two stages of a critic may share one.

    With engine workers a critic is always batched dynamically, and the trainers of V1 take both of its limits from the
    key that is for inference.
    """
    found = {
        "update_actor": BatchKeys(
            tokens=f"{A}.ppo_max_token_len_per_gpu",
            micro=f"{A}.ppo_micro_batch_size_per_gpu",
            switch=f"{A}.use_dynamic_bsz",
            role="actor",
        ),
        "old_log_prob": _log_prob(R, "actor"),
        "ref": _log_prob(F, "ref"),
    }
    if (config.integer(f"{M}.lora_rank") or 0) > 0 and not config.legacy_workers:
        found["ref"] = found["old_log_prob"]  # The reference is then the actor without its adapter.
    for stage, kind in (("update_critic", "ppo"), ("values", "forward")):
        found[stage] = _critic(config, kind)
    if not config.versions.since("0.7.1"):
        found["reward"] = BatchKeys(
            tokens="reward_model.forward_max_token_len_per_gpu",
            micro="reward_model.micro_batch_size_per_gpu",
            switch="reward_model.use_dynamic_bsz",
            role="reward",
        )
    return found


def _log_prob(root: str, role: str) -> BatchKeys:
    return BatchKeys(
        tokens=f"{root}.log_prob_max_token_len_per_gpu",
        micro=f"{root}.log_prob_micro_batch_size_per_gpu",
        switch=f"{root}.log_prob_use_dynamic_bsz",
        role=role,
    )


def _critic(config: Config, kind: str) -> BatchKeys:
    if config.legacy_workers:
        return BatchKeys(
            tokens=f"critic.{kind}_max_token_len_per_gpu",
            micro=f"critic.{kind}_micro_batch_size_per_gpu",
            switch="critic.use_dynamic_bsz",
            role="critic",
        )
    name = "ppo_max_token_len_per_gpu" if kind == "ppo" and not config.v1 else "ppo_infer_max_token_len_per_gpu"
    return BatchKeys(tokens=f"critic.{name}", micro=None, switch=None, role="critic")


def least_tokens(config: Config, role: str) -> int | None:
    """Return the lowest safe token limit of a role: `(prompt + response) / sequence parallel`, rounded up.

    1024 + 5120 tokens over 4 GPUs give 1536. None if a length is unknown; unknown parallelism counts as 1.
    """
    longest = config.longest
    return None if longest is None else -(-longest // max(config.sequence_parallel(role) or 1, 1))


def _known_key(weighed: Weighed) -> Iterator[str]:
    if weighed.before.ppo is False:
        yield "this is not verl's PPO trainer, which these keys belong to"
    for key in weighed.changes:
        if weighed.before.entry(key) is None:
            yield f"verl {weighed.before.versions.primary} has no key {key}"


def _no_op(weighed: Weighed) -> Iterator[str]:
    if all(_same(weighed.before.text(key), value) for key, value in weighed.changes.items()):
        yield "that is its value already"


def _same(before: str | None, after: str) -> bool:
    if before is None:
        return False
    if before.lower() == after.lower():
        return True
    try:
        return float(before) == float(after)
    except ValueError:
        return False


def _right_kind_of_limit(weighed: Weighed) -> Iterator[str]:
    for keys in batch_keys(weighed.before).values():
        dynamic = keys.dynamic(weighed.after)
        if dynamic is True and keys.micro in weighed.changes:
            yield f"{keys.micro} is ignored while {keys.switch} is true"
        if dynamic is False and keys.tokens in weighed.changes:
            yield f"{keys.tokens} is ignored while {keys.switch} is false"


def _long_enough(weighed: Weighed) -> Iterator[str]:
    """A limit below the longest sequence fails an assertion in the middle of a step."""
    after = weighed.after
    for keys in batch_keys(after).values():
        if keys.dynamic(after) is False or not _used(after, keys.role):
            continue
        value, least = after.integer(keys.tokens), least_tokens(after, keys.role)
        moved = value != weighed.before.integer(keys.tokens) or least != least_tokens(weighed.before, keys.role)
        concerned = moved or keys.dynamic(weighed.before) is False or keys.tokens in weighed.changes
        if concerned and value is not None and least is not None and value < least:
            yield f"{keys.tokens} may not be below {least}, the tokens of one sequence on one GPU"


def _used(config: Config, role: str) -> bool:
    return {"ref": config.ref, "critic": config.critic, "reward": config.reward_model}.get(role) is not False


def _mini_batch_divides(weighed: Weighed) -> Iterator[str]:
    """The answers of one mini batch are dealt out to all data-parallel groups."""
    after = weighed.after
    if _PLACES.isdisjoint(weighed.changes) or after.gpus is None:
        return
    mini, answers = after.integer(f"{A}.ppo_mini_batch_size"), after.integer(f"{R}.n")
    parallel = (after.sequence_parallel("actor") or 1) * (
        _megatron_model_parallel(after, "actor") if after.flavour == MEGATRON else 1
    )
    if after.gpus % parallel or (mini and answers and mini * answers % (after.gpus // parallel)):
        yield f"the mini batch must divide over the {after.gpus} GPUs"


def _micro_batch_fits(weighed: Weighed) -> Iterator[str]:
    """Legacy workers want the mini batch of a GPU to be a multiple of the micro batch; all want at least 1."""
    after = weighed.after
    for stage, keys in batch_keys(after).items():
        value = after.integer(keys.micro) if keys.micro is not None and keys.micro in weighed.changes else None
        if value is None:
            continue
        mini = mini_batch_of_a_gpu(after, keys.role) if stage.startswith("update_") else None
        if value < 1:
            yield f"{keys.micro} must be at least 1"
        elif mini is not None and mini % value:
            yield f"{keys.micro} must divide {mini}, the mini batch of one GPU"


def mini_batch_of_a_gpu(config: Config, role: str) -> int | None:
    """Return `ppo_mini_batch_size * n / (GPUs / sequence parallel)`; None if something of it is unknown.

    64 prompts of 8 answers on 16 GPUs give 32.
    """
    key = "critic.ppo_mini_batch_size" if role == "critic" else f"{A}.ppo_mini_batch_size"
    mini, answers, gpus = config.integer(key), config.integer(f"{R}.n"), config.gpus
    parallel = config.sequence_parallel(role) or 1
    if config.flavour == MEGATRON:
        parallel *= _megatron_model_parallel(config, role)
    if not mini or not answers or not gpus or mini < 0 or answers < 0 or gpus % parallel:
        return None
    return mini * answers * parallel // gpus or None


def _megatron_model_parallel(config: Config, role: str) -> int:
    root = "critic" if role == "critic" else A
    sizes = (config.integer(f"{root}.megatron.{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
    product = 1
    for size in sizes:
        product *= max(size or 1, 1)
    return product


def _batches_divide(weighed: Weighed) -> Iterator[str]:
    after = weighed.after
    batch, mini = after.integer("data.train_batch_size"), after.integer(f"{A}.ppo_mini_batch_size")
    concerned = {"data.train_batch_size", f"{A}.ppo_mini_batch_size", f"{R}.n", *_PLACES} & weighed.changes.keys()
    always = not after.versions.since("0.6.1")
    if not concerned or batch is None or mini is None or not (always or after.flag(f"{A}.use_dynamic_bsz") is False):
        return
    if batch < mini:
        yield "data.train_batch_size may not be below ppo_mini_batch_size"
    answers, gpus = after.integer(f"{R}.n"), after.gpus
    if answers and gpus and batch * answers % gpus:
        yield f"data.train_batch_size times rollout.n must be a multiple of the {gpus} GPUs"


def _rollout_parallel(weighed: Weighed) -> Iterator[str]:
    after = weighed.after
    pipeline = after.integer(f"{R}.pipeline_model_parallel_size")
    if f"{R}.pipeline_model_parallel_size" in weighed.changes and (pipeline or 1) > 1:
        yield "verl's rollout engines do not implement pipeline parallelism (NotImplementedError)"
    keys = {f"{R}.tensor_model_parallel_size", f"{R}.data_parallel_size", f"{R}.expert_parallel_size", *_PLACES}
    if keys.isdisjoint(weighed.changes):
        return
    tensor, data = after.integer(f"{R}.tensor_model_parallel_size"), after.integer(f"{R}.data_parallel_size") or 1
    expert = after.integer(f"{R}.expert_parallel_size") or 1
    if tensor is not None and tensor < 1:
        yield "tensor_model_parallel_size must be at least 1"
    elif tensor is not None and after.gpus is not None and after.gpus % (tensor * data):
        yield f"the {after.gpus} GPUs must be a multiple of the rollout's parallel size {tensor * data}"
    if expert > 1 and tensor is not None and expert != tensor * data:
        yield "expert_parallel_size must be tensor times data parallel size"


def _rollout_memory(weighed: Weighed) -> Iterator[str]:
    """The engine's share must hold the weights; verl's guide wants share x memory x TP above twice their bytes."""
    after = weighed.after
    keys = {f"{R}.gpu_memory_utilization", f"{R}.tensor_model_parallel_size"}
    if keys.isdisjoint(weighed.changes):
        return
    share, tensor = after.number(f"{R}.gpu_memory_utilization"), after.integer(f"{R}.tensor_model_parallel_size")
    if share is not None and not MIN_ROLLOUT_SHARE <= share <= MAX_ROLLOUT_SHARE:
        yield f"gpu_memory_utilization must be from {MIN_ROLLOUT_SHARE} to {MAX_ROLLOUT_SHARE}"
    if share is None or not tensor or not weighed.memory_total_bytes or after.parameters is None:
        return
    if share * weighed.memory_total_bytes * tensor < 2 * WEIGHT_BYTES * after.parameters:
        yield "the rollout engine would have no room for the weights and a KV cache"


def _rollout_lengths(weighed: Weighed) -> Iterator[str]:
    after = weighed.after
    keys = {f"{R}.max_num_batched_tokens", f"{R}.max_model_len", f"{R}.enable_chunked_prefill"}
    if keys.isdisjoint(weighed.changes):
        return
    longest = after.longest
    length = after.integer(f"{R}.max_model_len") or longest
    tokens, chunked = after.integer(f"{R}.max_num_batched_tokens"), after.flag(f"{R}.enable_chunked_prefill")
    if after.integer(f"{R}.max_model_len") and longest and (length or 0) < longest:
        yield f"max_model_len may not be below {longest}, a prompt and its response"
    if tokens is None or length is None or tokens >= length:
        return
    if chunked is False:
        yield "without chunked prefill, max_num_batched_tokens may not be below the longest sequence"
    elif after.text(f"{R}.mode") == "sync" or not after.versions.since("0.7.0"):
        yield "this release wants max_num_batched_tokens to hold the longest sequence"


def _whole_numbers(weighed: Weighed) -> Iterator[str]:
    for key in (f"{R}.max_num_seqs", f"{R}.max_num_batched_tokens", "reward.num_workers", f"{R}.agent.num_workers"):
        if key in weighed.changes and (weighed.after.integer(key) or 0) < 1:
            yield f"{key} must be at least 1"


_OF_THE_FUNCTION: Final = frozenset({"reward_model.launch_reward_fn_async", "reward_model.num_workers"})
"""Settings of the reward function, which lie beside those of the reward model and hold without one."""


def _in_use(weighed: Weighed) -> Iterator[str]:
    """Settings of a model that this job does not have decide nothing."""
    config = weighed.after
    for key in weighed.changes:
        if key.startswith("critic.") and config.critic is False:
            yield f"there is no critic with {config.text('algorithm.adv_estimator')}"
        if key.startswith(f"{F}.") and config.ref is False:
            yield "there is no reference model without a KL term"
        of_model = key.startswith(("reward.reward_model.", "reward_model.")) and key not in _OF_THE_FUNCTION
        if of_model and config.reward_model is False:
            yield "there is no reward model"


def _read_by_verl(weighed: Weighed) -> Iterator[str]:
    """Keys that verl takes and never reads."""
    config = weighed.before
    engine, exactly = not config.legacy_workers, config.versions.primary
    dead: dict[str, bool] = {
        "trainer.balance_batch": config.v1,
        "critic.ppo_max_token_len_per_gpu": config.v1,
        f"{A}.entropy_from_logits_with_chunking": exactly == "0.8.0",
        f"{A}.entropy_checkpointing": exactly == "0.8.0",
        f"{F}.entropy_from_logits_with_chunking": exactly == "0.8.0",
        f"{F}.fsdp_config.param_offload": True,
    }
    for name in (
        "use_dynamic_bsz", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "forward_micro_batch_size",
        "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu",
    ):  # fmt: skip
        dead[f"critic.{name}"] = engine
    dead["critic.ulysses_sequence_parallel_size"] = config.versions.since("0.8.0")
    for key in weighed.changes:
        if dead.get(key) or (key.startswith("reward_model.") and config.versions.since("0.9.0")):
            yield f"verl {exactly} does not read {key}"


def _one_kind_of_batch(weighed: Weighed) -> Iterator[str]:
    """Engine workers want the actor and its log-probabilities to be batched in the same way."""
    after = weighed.after
    switches = f"{A}.use_dynamic_bsz", f"{R}.log_prob_use_dynamic_bsz"
    if after.legacy_workers or set(switches).isdisjoint(weighed.changes):
        return
    actor, log_prob = (after.flag(switch) for switch in switches)
    if actor is not None and log_prob is not None and actor != log_prob:
        yield "actor.use_dynamic_bsz and rollout.log_prob_use_dynamic_bsz must agree"


def _sequence_parallel(weighed: Weighed) -> Iterator[str]:
    after = weighed.after
    for role in ("actor", "ref", "critic"):
        key = after.sequence_parallel_key(role)
        size = after.integer(key) if key in weighed.changes else None
        if size is None:
            continue
        padding = "critic.model.use_remove_padding" if role == "critic" else f"{M}.use_remove_padding"
        if size > 1 and after.flavour != MEGATRON and after.flag(padding) is False:
            yield f"sequence parallelism needs {padding}=true"
        whole = size * (_megatron_model_parallel(after, role) if after.flavour == MEGATRON else 1)
        if size < 1 or (after.gpus is not None and after.gpus % whole):
            yield f"the GPUs must be a multiple of the parallel size {whole}"
        batch, answers = after.integer("data.train_batch_size"), after.integer(f"{R}.n")
        if after.gpus and batch and answers and not after.gpus % whole and batch * answers % (after.gpus // whole):
            yield "the batch must divide by the data-parallel size"


def _host_memory(weighed: Weighed) -> Iterator[str]:
    """An offload trades the memory of one side for that of the other: never where that side is short itself."""
    for key, value in weighed.changes.items():
        if key.rpartition(".")[2] not in OFFLOADS:
            continue
        if value.lower() == "true" and "HostMemoryRisk" in weighed.open_reasons:
            yield "the host memory that an offload needs is running out itself"
        if value.lower() == "false" and "OOMRisk" in weighed.open_reasons:
            yield "GPU memory is running out itself"


def _own_strategy(weighed: Weighed) -> Iterator[str]:
    after = weighed.after
    for key, value in weighed.changes.items():
        strategy = after.text("critic.strategy" if key.startswith("critic.") else f"{A}.strategy")
        if key.endswith(".offload_policy") and value.lower() == "true" and strategy != "fsdp2":
            yield "offload_policy is for fsdp2 only"
    graphs = f"{R}.cudagraph_capture_sizes"
    if graphs in weighed.changes and after.flag(f"{R}.enforce_eager") is True:
        yield "with enforce_eager there are no CUDA graphs"


def _reward_pool(weighed: Weighed) -> Iterator[str]:
    after, prefix = weighed.after, weighed.after.reward_prefix
    if f"{prefix}.enable_resource_pool" not in weighed.changes or after.flag(f"{prefix}.enable_resource_pool") is False:
        return
    if (after.integer(f"{prefix}.nnodes") or 0) < 1 or (after.integer(f"{prefix}.n_gpus_per_node") or 0) < 1:
        yield "a reward model's own pool needs nnodes and n_gpus_per_node above 0"


_RULES: Final[tuple[Callable[[Weighed], Iterator[str]], ...]] = (
    _known_key,
    _no_op,
    _right_kind_of_limit,
    _long_enough,
    _mini_batch_divides,
    _micro_batch_fits,
    _batches_divide,
    _rollout_parallel,
    _rollout_memory,
    _rollout_lengths,
    _whole_numbers,
    _in_use,
    _read_by_verl,
    _one_kind_of_batch,
    _sequence_parallel,
    _host_memory,
    _own_strategy,
    _reward_pool,
)
