# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The changes themselves: each lever weighs one setting for one case and returns advice, or None. Pure.

A lever knows how its setting works, sizes the new value from the evidence and names its price. Which levers a finding
asks, and in which order, is the advisors' matter; what verl refuses is `constraints`' matter.
"""

from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.findings import Advice

from .case import STATE_BYTES, Case, round_down
from .catalogue import MEGATRON
from .config import A, M, R
from .constraints import BatchKeys, batch_keys, least_tokens

SLOWER = "more and smaller micro batches make the stage a little slower; what is learnt stays the same"
_TRIES = 512
"""So many micro batch sizes are tried for one that divides the mini batch."""
_INFERENCE_BYTES = 4.0
"""Of one parameter in a forward pass: weights in fp32."""

# Batches.


def smaller_batch(case: Case, stage: str) -> Advice | None:
    """Lower what one pass over the model holds: the token limit with dynamic batches, else the micro batch."""
    keys = batch_keys(case.config).get(stage)
    if keys is None:
        return None
    state_bytes = STATE_BYTES if stage.startswith("update_") else _INFERENCE_BYTES
    dynamic = keys.dynamic(case.config)
    if dynamic is None:
        text = f"If {keys.switch} is true, lower {keys.tokens}; if it is false, lower {keys.micro}"
        return case.condition(keys.tokens, text=text, price=SLOWER)
    if dynamic or keys.micro is None:
        return _smaller_limit(case, keys, case.kept_share(state_bytes=state_bytes))
    return _smaller_micro_batch(case, keys.micro, case.kept_share(state_bytes=state_bytes))


def _smaller_limit(case: Case, keys: BatchKeys, share: float | None) -> Advice | None:
    key = keys.tokens
    current, least = case.config.integer(key), least_tokens(case.config, keys.role)
    if current is None or share is None:
        bound = f", but not below {least}, the tokens of one sequence" if least else ""
        return case.condition(key, text=f"Lower {key}{bound}", price=SLOWER)
    value = max(round_down(current * share), _up(least or 1))
    if value >= current:
        return None
    at_bound = least is not None and value < least + 256 and current * share < value
    text = (
        f"Lower {key} from {current} to {value}, so that one micro batch holds {1 - value / current:.0%} fewer tokens"
    )
    if at_bound:
        text += "; that is the least that holds one whole sequence, and may not be enough by itself"
    if least is None:
        text += "; it must stay above the longest prompt and response (over the sequence parallel size)"
    confidence = "medium" if at_bound else "high"
    return case.change(
        key, str(value), text=text, price=SLOWER, confidence=confidence, along=_pinned(case, keys, value)
    )


def _pinned(case: Case, keys: BatchKeys, value: int) -> dict[str, str]:
    """Return the limits of other stages that would follow this one below their own least, with the values they have."""
    config, found = case.config, {}
    for other in batch_keys(config).values():
        known, least = config.entry(other.tokens), least_tokens(config, other.role)
        follows = known is not None and known.follows == keys.tokens and not config.given(other.tokens)
        if follows and other.role != keys.role and least is not None and value < least and config.ref is not False:
            found[other.tokens] = str(max(config.integer(other.tokens) or least, least))
    return found


def _up(tokens: int) -> int:
    """Return the next multiple of 128, which leaves nothing to rounding in verl."""
    return -(-tokens // 128) * 128


def _smaller_micro_batch(case: Case, key: str, share: float | None) -> Advice | None:
    current = case.config.integer(key)
    if current is None or share is None:
        return case.condition(key, text=f"Lower {key}; it must divide the mini batch of one GPU", price=SLOWER)
    most = min(int(current * share), current - 1)
    for value in range(most, max(0, most - _TRIES), -1):
        text = f"Lower {key} from {current} to {value}"
        found = case.change(key, str(value), text=text, price=SLOWER, confidence="high")
        if found is not None:
            return found
    if current > 1 and share * current < 1:
        text = f"Lower {key} from {current} to 1, which may not be enough by itself"
        return case.change(key, "1", text=text, price=SLOWER)
    return None


def larger_batch(case: Case, stage: str) -> Advice | None:
    """Raise what one pass holds where much memory was never used: fewer and larger passes."""
    keys = batch_keys(case.config).get(stage)
    if keys is None or "OOMRisk" in case.context.open_reasons:
        return None
    dynamic = keys.dynamic(case.config)
    if dynamic is None:
        text = f"If GPU memory is free in this stage, raise {keys.tokens} (with dynamic batches) or {keys.micro}"
        return case.condition(keys.tokens, text=text, price="a higher peak of GPU memory")
    key = keys.tokens if dynamic or keys.micro is None else keys.micro
    current, factor = case.config.integer(key), _room(case)
    if current is None or _headroom(case) is None:
        text = f"If GPU memory is free in this stage, raise {key}: larger passes keep the GPU busier"
        return case.condition(key, text=text, price="a higher peak of GPU memory")
    if factor is None:
        return None
    if key == keys.tokens:
        return _raised(case, key, current, round_down(current * factor))
    most = int(current * factor)
    sizes = range(most, max(current, most - _TRIES), -1)
    return next(filter(None, (_raised(case, key, current, size) for size in sizes)), None)


def _raised(case: Case, key: str, current: int, value: int) -> Advice | None:
    if value <= current:
        return None
    text = f"Raise {key} from {current} to {value}: larger passes keep the GPU busier, and its memory has room for them"
    reason = _room_text(case)
    return case.change(key, str(value), text=text, reason=reason, price="a higher peak of GPU memory in this stage")


def _room(case: Case) -> float | None:
    """Return by what factor a batch may grow with half of the memory that was never used; None if unknown.

    20 of 80 GiB free give (80 + 20) / 80 = 1.25 of what was used at most, and at most twice.
    """
    headroom, total = _headroom(case), case.total_bytes
    if headroom is None or not total or headroom < 0.1 * total:
        return None
    return min(1.0 + 0.5 * headroom / max(total - headroom, 0.25 * total), 2.0)


def _headroom(case: Case) -> float | None:
    headroom = case.figure("headroom_bytes")
    return case.context.gpu_headroom_bytes if headroom is None else headroom


def _room_text(case: Case) -> str:
    headroom = _headroom(case)
    return "" if headroom is None else f"{headroom / GIB:.1f} GiB of the GPU were never used"


def dynamic_batches(case: Case) -> Advice | None:
    """Pack sequences by tokens rather than by number: even passes, no padding between long and short answers."""
    config = case.config
    key = f"{A}.use_dynamic_bsz"
    if config.flag(key) is not False or config.longest is None:
        return None
    limit = f"{A}.ppo_max_token_len_per_gpu"
    least = least_tokens(config, "actor") or 0
    present = config.integer(limit)
    along = {limit: str(_up(2 * config.longest))} if present is None or present < least else {}
    if config.given(f"{R}.log_prob_use_dynamic_bsz"):
        along[f"{R}.log_prob_use_dynamic_bsz"] = "true"
    text = (
        f"Set {key}=true: micro batches are then filled by tokens (ppo_max_token_len_per_gpu, about twice prompt and"
        " response), and long and short answers are dealt out evenly"
    )
    price = "the micro batch sizes are ignored from then on; what is learnt stays the same"
    return case.change(key, "true", text=text, price=price, along=along)


# Activations and logits.


def gradient_checkpointing(case: Case, model: str) -> Advice | None:
    """Keep no activations between layers; verl's default, so worth a word only where it was turned off."""
    key = f"{model}.enable_gradient_checkpointing"
    if case.config.flag(key) is not False or case.config.flavour == MEGATRON:
        return None
    text = f"Set {key}=true: activations are computed again in the backward pass instead of being kept"
    return case.change(key, "true", text=text, price="about a third more computing in the update", confidence="high")


def megatron_recompute(case: Case, root: str) -> Advice | None:
    """Let Megatron compute activations again."""
    key = f"{root}.megatron.override_transformer_config.recompute_granularity"
    if case.config.flavour != MEGATRON or case.config.text(key) is not None or not case.config.launch.known:
        return None
    along = {
        key.replace("granularity", "method"): "uniform",
        key.replace("granularity", "num_layers"): "1",
    }
    text = f"Set {key}=full: activations are computed again in the backward pass instead of being kept"
    return case.change(key, "full", text=text, price="about a third more computing in the update", along=along)


def remove_padding(case: Case, model: str) -> Advice | None:
    """Pack sequences without padding: the padded width is the longest prompt and response, for every sequence."""
    key = f"{model}.use_remove_padding"
    if case.config.flag(key) is not False:
        return None
    text = f"Set {key}=true: no memory and no time for padding tokens"
    return case.change(key, "true", text=text, price="the model's class must support it (most do)", confidence="high")


def entropy_in_chunks(case: Case) -> Advice | None:
    """Compute the entropy of the logits piece by piece: sequence x vocabulary in fp32 is the peak of log-probs."""
    config = case.config
    root = f"{A}.fsdp_config" if config.versions.primary == "0.8.0" and config.flavour != MEGATRON else A
    key = f"{root}.entropy_from_logits_with_chunking"
    if config.flag(key) is True or config.flag(f"{M}.use_fused_kernels") is True:
        return None
    text = f"Set {key}=true: the entropy is taken over pieces of the logits, not over all of them at once"
    price = "a little slower; values stay the same"
    if not config.launch.known:
        return case.condition(key, text=f"{text}, if it is not so already", price=price)
    return case.change(key, "true", text=text, price=price)


def fused_kernels(case: Case) -> Advice | None:
    """Compute log-probabilities without the logits ever being in memory as a whole."""
    key = f"{M}.use_fused_kernels"
    if case.config.flag(key) is not False:
        return None
    text = f"Set {key}=true: log-probabilities and entropy are computed without holding all logits"
    return case.change(key, "true", text=text, price="for models that verl patches only; numbers differ in rounding")


def activation_offload(case: Case, model: str) -> Advice | None:
    """Move activations to host memory between forward and backward pass (FSDP)."""
    key = f"{model}.enable_activation_offload"
    if case.config.flavour == MEGATRON or case.config.flag(key) is not False:
        return None
    moved = (case.missing_bytes or 8 * GIB) * (case.context.gpus_per_pod or 1)
    room = case.context.host_headroom_bytes
    if room is not None and room < 1.25 * moved:
        return None
    text = f"Set {key}=true: activations wait in host memory for the backward pass"
    return case.change(key, "true", text=text, price="host memory and time for the copies")


def sequence_parallel(case: Case, stage: str) -> Advice | None:
    """Split each sequence over twice as many GPUs (Ulysses; context parallelism under Megatron).

    With dynamic batches a pass holds `limit x size` tokens, so that a larger size alone frees nothing: it halves the
    least limit, and is worth its price only where that stands in the way, together with a lower limit.
    """
    config = case.config
    keys = batch_keys(config)[stage]
    key, size = config.sequence_parallel_key(keys.role), config.sequence_parallel(keys.role)
    if size is None or size < 1 or config.gpus is None or 2 * size > min(config.gpus, case.context.gpus_per_pod or 8):
        return None
    along: dict[str, str] = {}
    if keys.dynamic(config) is not False:
        current, least, share = config.integer(keys.tokens), least_tokens(config, keys.role), case.kept_share()
        if current is None or least is None or share is None or current * share >= least:
            return None
        value = max(round_down(current * share), _up(-(-least // 2)))
        along = {keys.tokens: str(value), **_pinned(case, keys, value)}
    text = (
        f"Raise {key} from {size} to {2 * size}: each sequence, and its activations, is split over {2 * size} GPUs"
        " (the number of attention heads must be a multiple of it)"
    )
    price = "communication in every layer; fewer sequences are worked on at once. What is learnt stays the same"
    return case.change(key, str(2 * size), text=text, price=price, along=along)


# Offloading.


def offload(case: Case, root: str, what: str) -> Advice | None:
    """Move weights (`param`), moments (`optimizer`) or gradients (`grad`) to host memory between the stages."""
    key = f"{root}.{what}_offload"
    if case.config.flag(key) is not False:
        return None
    of_one = {"param": 4.0, "optimizer": 8.0, "grad": 4.0}[what]
    if _host_is_short(case, of_one):
        return None
    text = f"Set {key}=true: it waits in host memory while other stages run, and comes back for its own"
    held = _host_bytes(case, of_one)
    cost = f"about {held / GIB:.0f} GiB of host memory on each pod" if held else "host memory of that size on each pod"
    return case.change(key, "true", text=text, price=f"{cost}, and time for the copies at each change of stage")


def keep_on_gpu(case: Case, root: str, what: str) -> Advice | None:
    """Take an offload back, for host memory or for the time of the copies, where GPU memory is free."""
    key = f"{root}.{what}_offload"
    if case.config.flag(key) is not True:
        return None
    held, room = _gpu_bytes(case, {"param": 4.0, "optimizer": 8.0, "grad": 4.0}[what]), case.context.gpu_headroom_bytes
    price = "GPU memory of that size in every stage"
    if held is None or room is None:
        text = f"If GPU memory has room in all stages, set {key}=false: what it moves then stays off the host"
        return case.condition(key, text=text, price=price) if "OOMRisk" not in case.context.open_reasons else None
    if held > 0.8 * room:
        return None
    text = (
        f"Set {key}=false: {held / GIB:.1f} GiB stay on each GPU instead of on the host, and {room / GIB:.1f} are free"
    )
    return case.change(key, "false", text=text, price=price)


def offload_root(case: Case, role: str) -> str:
    """Return where a role's offload keys are in the job's verl and strategy."""
    config = case.config
    if config.flavour == MEGATRON:
        return "critic.megatron" if role == "critic" else f"{A}.megatron"
    if role == "critic":
        return "critic.fsdp" if config.versions.since("0.8.0") else "critic.model.fsdp_config"
    return f"{A}.fsdp_config"


def _gpu_bytes(case: Case, of_one: float) -> float | None:
    parameters, gpus = case.config.parameters, case.config.gpus
    return of_one * parameters / gpus if parameters and gpus else None


def _host_bytes(case: Case, of_one: float) -> float | None:
    each, gpus = _gpu_bytes(case, of_one), case.context.gpus_per_pod or case.config.integer("trainer.n_gpus_per_node")
    return each * gpus if each and gpus else None


def _host_is_short(case: Case, of_one: float) -> bool:
    """Whether the pod's host memory is known to have no room for what an offload would bring."""
    room, wanted = case.context.host_headroom_bytes, _host_bytes(case, of_one)
    if room is None:
        return False
    return room < (wanted or 8 * GIB) * 1.25


# The rollout engine.


def smaller_rollout_share(case: Case, *, why: str) -> Advice | None:
    """Lower the engine's share of each GPU by what is missing, but by half at most: the model must fit in it."""
    key = f"{R}.gpu_memory_utilization"
    current, missing, total = case.config.number(key), case.missing_bytes, case.total_bytes
    price = "a smaller KV cache: fewer answers are generated at once"
    if current is None or missing is None or not total:
        return case.condition(key, text=f"Lower {key}: {why}", price=price)
    exact = max(current - missing / total, 0.5 * current)
    short = current - missing / total < exact
    for value in (int(exact * 20 + 1e-9) / 20, int(exact * 100 + 1e-9) / 100):
        text = f"Lower {key} from {current:g} to {value:g}: {why}"
        if short:
            text += "; it will not be enough by itself, and less would leave too little for weights and cache"
        found = case.change(key, f"{value:g}", text=text, price=price, confidence="medium" if short else "high")
        if found is not None:
            return found
    return None


def larger_rollout_share(case: Case) -> Advice | None:
    """Raise the engine's share where much memory was never used: more answers at once."""
    key = f"{R}.gpu_memory_utilization"
    current, headroom, total = case.config.number(key), _headroom(case), case.total_bytes
    if current is None or headroom is None or not total or {"OOMRisk", "MemoryGrowth"} & case.context.open_reasons:
        return None
    value = int(min(current + 0.5 * headroom / total, 0.9) * 20 + 1e-9) / 20
    if value <= current:
        return None
    text = f"Raise {key} from {current:g} to {value:g}: a larger KV cache lets more answers be generated at once"
    price = "less room for the moment when weights are handed over to the engine"
    return case.change(key, f"{value:g}", text=text, reason=_room_text(case), price=price)


def eager(case: Case) -> Advice | None:
    """Do without CUDA graphs, whose memory is beside the engine's share and stays while it sleeps."""
    key = f"{R}.enforce_eager"
    if case.config.flag(key) is not False:
        return None
    text = (
        f"Set {key}=true, or fewer {R}.cudagraph_capture_sizes: the memory of CUDA graphs is beside the engine's share"
    )
    if not case.config.versions.since("0.6.1"):
        text = f"Set {key}=true: the memory of CUDA graphs is beside the engine's share"
    return case.change(key, "true", text=f"{text}, and is kept while it sleeps", price="slower generation of tokens")


def free_cache(case: Case) -> Advice | None:
    """Let the engine give its memory back between rollouts."""
    key = f"{R}.free_cache_engine"
    if case.config.flag(key) is not False:
        return None
    text = f"Set {key}=true: the rollout engine then gives back its cache while the model is trained"
    return case.change(key, "true", text=text, price="some seconds a step to fill it again", confidence="high")


def sleep_mode(case: Case) -> Advice | None:
    """Take back a switch that keeps vLLM from sleeping."""
    key = f"{R}.enable_sleep_mode"
    if case.config.flag(key) is not False:
        return None
    text = f"Set +{key}=true again, or leave it out: without sleep mode the engine keeps weights and cache on the GPU"
    return case.change(key, "true", text=text, price="some seconds a step to wake up", confidence="high")


def shorter_model_length(case: Case) -> Advice | None:
    """Bound one request's KV cache by what the job can generate; from 0.7.1 on the default is the model's own limit."""
    key, config = f"{R}.max_model_len", case.config
    if not config.versions.since("0.7.1") or config.longest is None or not config.defaults_hold or config.text(key):
        return None
    text = (
        f"Set {key}={config.longest} (prompt and response): by default a request may ask for the model's whole length"
    )
    price = "requests of several turns must fit into it too"
    return case.change(key, str(config.longest), text=text, price=price)


def fewer_sequences(case: Case) -> Advice | None:
    """Lower how many answers the engine works on at once, by the share that is missing."""
    key = f"{R}.max_num_seqs"
    current, share = case.config.integer(key), case.kept_share(state_bytes=_INFERENCE_BYTES)
    if current is None or share is None:
        return None
    value = int(current * share) // 8 * 8 or 8
    if value >= current:
        return None
    text = f"Lower {key} from {current} to {value}: fewer answers at once, with less memory for sampling their logits"
    return case.change(key, str(value), text=text, price="slower generation where the engine would take more at once")


def more_sequences(case: Case) -> Advice | None:
    """Let the engine take as many answers at once as one of its replicas has to generate."""
    key, config = f"{R}.max_num_seqs", case.config
    current, wanted = config.integer(key), _answers_of_a_replica(case)
    if current is None:
        return None
    if wanted is None or wanted <= current or "OOMRisk" in case.context.open_reasons:
        return None
    value = min(-(-wanted // 64) * 64, max(4 * current, 256), 1024)
    if value <= current:
        return None
    text = f"Raise {key} from {current} to {value}: each replica has {wanted} answers to generate in a step"
    return case.change(key, str(value), text=text, reason=text, price="more KV cache in use; beyond it, answers wait")


def _answers_of_a_replica(case: Case) -> int | None:
    config = case.config
    batch, answers = config.integer("data.train_batch_size"), config.integer(f"{R}.n")
    gpus, tensor = config.gpus, config.integer(f"{R}.tensor_model_parallel_size")
    if not batch or not answers or not gpus or not tensor or gpus < tensor or batch < 0 or answers < 0 or tensor < 0:
        return None
    return -(-batch * answers // (gpus // tensor))


def more_batched_tokens(case: Case) -> Advice | None:
    """Raise the tokens of one pass of the engine to what one whole prompt and response take."""
    key, config = f"{R}.max_num_batched_tokens", case.config
    current, longest = config.integer(key), config.longest
    if current is None or longest is None or "OOMRisk" in case.context.open_reasons:
        return None
    value = max(8192, _up(longest))
    if value <= current:
        return None
    text = f"Raise {key} from {current} to {value}: one pass of the engine may then take a whole prompt and response"
    return case.change(key, str(value), text=text, reason=text, price="more memory for activations of the engine")


def chunked_prefill(case: Case) -> Advice | None:
    """Mix pieces of long prompts with decoding, so that the GPU does both at once."""
    key = f"{R}.enable_chunked_prefill"
    if case.config.flag(key) is not False:
        return None
    text = f"Set {key}=true: long prompts are worked on in pieces beside the decoding of other answers"
    return case.change(key, "true", text=text, price="the first token of one answer comes a little later")


def smaller_rollout_groups(case: Case) -> Advice | None:
    """Halve the rollout's tensor parallel size: twice as many replicas share the answers.

    The way to spread load with more pipeline stages instead is closed: verl's engines refuse more than one.
    """
    key, config = f"{R}.tensor_model_parallel_size", case.config
    current, gpus = config.integer(key), config.gpus
    if current is None:
        text = f"If {key} is above what the weights need, lower it: more and smaller replicas share the answers"
        return case.condition(key, text=f"{text}. {_no_pipeline(case)}".rstrip(), price=_weights_price(case))
    if current < 2 or current % 2:
        return None
    value = current // 2
    replicas = f": {gpus // value} replicas share the answers instead of {gpus // current}" if gpus else ""
    fits = "" if config.parameters else ", if share x memory x size stays above twice the weights' bytes"
    text = f"Lower {key} from {current} to {value}{replicas}{fits}. {_no_pipeline(case)}".rstrip()
    return case.change(
        key, str(value), text=text, reason=f"{current} GPUs generate together", price=_weights_price(case)
    )


def _no_pipeline(case: Case) -> str:
    if case.config.versions.since("0.6.1"):
        return f"Do not try {R}.pipeline_model_parallel_size above 1 for it: verl's engines refuse it"
    return "This release knows no pipeline parallelism for the rollout"


def _weights_price(case: Case) -> str:
    parameters, current = case.config.parameters, case.config.integer(f"{R}.tensor_model_parallel_size")
    if parameters and current:
        each = 2 * parameters / max(current // 2, 1) / GIB
        return f"{each:.0f} GiB of weights on each GPU while answers are generated, instead of {each / 2:.0f}"
    return "twice the weights on each GPU while answers are generated"


def smaller_bucket(case: Case) -> Advice | None:
    """Hand weights over to the engine in smaller pieces."""
    config = case.config
    name = "checkpoint_engine.update_weights_bucket_megabytes"
    key = f"{R}.{name if config.versions.since('0.7.1') else name.partition('.')[2]}"
    current = config.integer(key)
    if current is None or current <= 256:
        return None
    value = max(256, current // 4)
    text = f"Lower {key} from {current} to {value}: weights are handed over to the engine in smaller pieces"
    return case.change(key, str(value), text=text, price="the hand-over takes a little longer")


# Placement.


def own_reward_pool(case: Case) -> Advice | None:
    """Give the reward model GPUs of its own: it shares those of the trainer by default, and keeps memory there."""
    config = case.config
    if config.reward_model is not True:
        return None
    prefix = config.reward_prefix
    key = f"{prefix}.enable_resource_pool"
    if config.flag(key) is True:
        return None
    along = {
        f"{prefix}.{name}": "1"
        for name in ("nnodes", "n_gpus_per_node")
        if (config.integer(f"{prefix}.{name}") or 0) < 1
    }
    text = (
        f"Set {key}=true, so that the reward model has GPUs of its own; now it lies on those of the trainer"
        f" ({prefix}.n_gpus_per_node and .nnodes say how many, beside the trainer's)"
    )
    return case.change(
        key, "true", text=text, reason="the reward model shares the trainer's GPUs", price="more GPUs", along=along
    )


def smaller_reward_share(case: Case) -> Advice | None:
    """Lower the share of a reward server that lies on the trainer's GPUs."""
    config = case.config
    key = f"{config.reward_prefix}.rollout.gpu_memory_utilization"
    current, missing, total = config.number(key), case.missing_bytes, case.total_bytes
    if config.reward_model is not True or current is None or missing is None or not total:
        return None
    value = int((current - missing / total) * 20 + 1e-9) / 20
    if not 0.1 <= value < current:
        return None
    text = f"Lower {key} from {current:g} to {value:g}: the reward model's server takes that much less"
    return case.change(key, f"{value:g}", text=text, price="fewer answers are judged at once")


def log_stats(case: Case) -> Advice | None:
    """Let the engine say what it does: running and waiting answers, use of its cache."""
    key = f"{R}.disable_log_stats"
    if case.config.flag(key) is not True:
        return None
    text = f"Set {key}=false first: the engine's log then shows running and waiting answers and how full its cache is"
    return case.change(key, "false", text=text, price="some lines of log", confidence="medium")


def asynchronous(case: Case) -> Advice | None:
    """Let a long tail of few answers run on while the next batch begins. Changes what is learnt."""
    key = "trainer.v1.trainer_mode"
    if not case.config.v1 or case.config.text(key) != "sync":
        return None
    text = (
        f"If a long tail of few answers is what all wait for, think about an asynchronous {key} (colocate_async,"
        " separate_async), or a lower data.max_response_length"
    )
    price = "this changes learning: answers of older weights, or cut answers"
    return case.condition(key, text=text, price=price)


def all_gpus(case: Case) -> Advice | None:
    """Use the GPUs that a pod has and the trainer was not told of."""
    key, config = "trainer.n_gpus_per_node", case.config
    current, there = config.integer(key), case.context.gpus_per_pod
    if current is None or there is None or current >= there:
        return None
    text = f"Raise {key} from {current} to {there}: each pod has {there} GPUs, and the trainer uses {current} of them"
    return case.change(key, str(there), text=text, reason=text, price="none, if all of them are meant for this job")


def balance_batch(case: Case) -> Advice | None:
    """Deal out sequences so that each rank gets about as many tokens."""
    key = "trainer.balance_batch"
    if case.config.flag(key) is not False:
        return None
    text = f"Set {key}=true: each rank then gets about as many tokens, instead of as many sequences"
    return case.change(key, "true", text=text, price="the order of samples within a batch changes", confidence="high")
