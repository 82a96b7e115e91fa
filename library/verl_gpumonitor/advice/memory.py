# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Advice about GPU memory: which lever, for which stage. Pure.

A colocated GPU is held in turn by rollout engine, actor, reference model and critic. What helps one stage does nothing
for another: a smaller rollout share does not lower the peak of an update, for the engine sleeps then.
"""

from collections.abc import Callable
from typing import Final

from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.findings import Advice

from . import levers
from .case import Case, Found, doubtful, say
from .config import A, M, R

_OUTLIER: Final = 0.25
"""A GPU so much fuller than its pool, as a share of its memory, has a problem of its own, not of the batch."""
_SFT: Final = ("verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer_ray")


def oom_risk(case: Case) -> Found:
    """Yield what gives the stage room that comes near the end of the GPU's memory."""
    if _alone(case):
        yield from lone_gpu(case)
        batch = levers.smaller_batch(case, case.stage or "")
        yield doubtful(batch, "Until the cause is found, the fullest GPU sets the batch of all: ")
        return
    if case.config.launch.module in _SFT or (case.stage is None and case.finding.scope.role == "trainer"):
        yield _sft(case)
        return
    if not case.config.launch.known:
        yield from _unseen(case)
        return
    yield from _STAGES.get(case.stage or "", _no_stage)(case)


def _alone(case: Case) -> bool:
    """Whether few GPUs are near the end while their pool is not."""
    beside = case.figure("beside_peers")
    if beside is not None:
        return bool(beside)
    mine, pool = case.figure("memory_ratio"), case.figure("pool_memory_ratio")
    if mine is not None and pool is not None:
        return mine - pool >= _OUTLIER
    peak, others, total = case.peak_bytes, case.figure("pool_peak_bytes", "pool_memory_bytes"), case.total_bytes
    if peak is not None and others is not None and total:
        return (peak - others) / total >= _OUTLIER
    gpus = case.config.gpus or case.context.gpus
    few = gpus is not None and 0 < len(case.finding.scope.gpus) <= max(1, gpus // 3)
    return few and "Imbalance" in case.context.open_reasons


_TRAINED: Final = frozenset({"old_log_prob", "ref", "values", "update_critic", "update_actor"})
"""Stages in which the rollout engine sleeps."""


def lone_gpu(case: Case) -> Found:
    """Yield what takes load off one GPU that carries more than its peers."""
    trained = case.stage in _TRAINED
    yield _not_the_jobs(case)
    yield None if trained else levers.smaller_rollout_groups(case)
    yield levers.own_reward_pool(case)
    yield levers.all_gpus(case)
    yield say(
        "See who holds memory on that GPU (nvidia-smi on its node): processes of other ranks, a reward model or a"
        " judge that was loaded there by default (cuda:0), or a part of the model that is not split. Give each rank"
        " its own device (torch.cuda.set_device(LOCAL_RANK)), and each model a pool of its own",
        reason="its peers of the same pool hold far less, so the size of the batch is not what fills it",
    )
    if trained:
        yield doubtful(levers.smaller_rollout_groups(case), "If the rollout is uneven too: ")


def _not_the_jobs(case: Case) -> Advice | None:
    """Memory that is not the job's own is found already, and no setting of the job's gives it back."""
    others = sorted(case.context.open_reasons & {"LeftoverMemory", "ForeignProcess"})
    if not others:
        return None
    return say(
        f"Look at the finding {' and '.join(others)} first: where it names this GPU, its peers have that memory free",
        reason="memory that is not the job's lies on a GPU",
        confidence="medium",
    )


def _update_actor(case: Case) -> Found:
    yield levers.gradient_checkpointing(case, M)
    yield levers.remove_padding(case, M)
    yield levers.smaller_batch(case, "update_actor")
    yield levers.megatron_recompute(case, A)
    if (case.config.number(f"{A}.entropy_coeff") or 0) != 0 or case.config.flag(f"{A}.calculate_entropy"):
        yield levers.entropy_in_chunks(case)
    root = levers.offload_root(case, "actor")
    yield levers.offload(case, root, "optimizer")
    yield levers.offload(case, root, "param")
    yield levers.sequence_parallel(case, "update_actor")
    yield levers.fused_kernels(case)
    yield levers.activation_offload(case, M)
    yield _smaller_model_share("update_actor")


def _old_log_prob(case: Case) -> Found:
    yield levers.remove_padding(case, M)
    yield levers.smaller_batch(case, "old_log_prob")
    yield levers.entropy_in_chunks(case)
    yield levers.offload(case, levers.offload_root(case, "actor"), "optimizer")
    yield levers.fused_kernels(case)
    yield levers.sequence_parallel(case, "old_log_prob")
    yield _smaller_model_share("old_log_prob")


def _ref(case: Case) -> Found:
    yield levers.remove_padding(case, M)
    yield levers.smaller_batch(case, "ref")
    yield levers.offload(case, levers.offload_root(case, "actor"), "optimizer")
    yield levers.offload(case, levers.offload_root(case, "actor"), "param")
    yield levers.fused_kernels(case)
    yield levers.sequence_parallel(case, "ref")
    yield _smaller_model_share("ref")


def _update_critic(case: Case) -> Found:
    yield levers.gradient_checkpointing(case, "critic.model")
    yield levers.remove_padding(case, "critic.model")
    yield levers.smaller_batch(case, "update_critic")
    yield levers.megatron_recompute(case, "critic")
    yield from _critic_beside(case, "update_critic")


def _values(case: Case) -> Found:
    yield levers.remove_padding(case, "critic.model")
    yield levers.smaller_batch(case, "values")
    yield from _critic_beside(case, "values")


def _critic_beside(case: Case, stage: str) -> Found:
    """What the actor keeps on the GPU lies beside the critic's stages; the critic's own states come back for them."""
    root = levers.offload_root(case, "critic")
    yield levers.offload(case, root, "optimizer")
    yield levers.offload(case, levers.offload_root(case, "actor"), "optimizer")
    yield levers.offload(case, root, "param")
    yield levers.sequence_parallel(case, stage)
    yield levers.activation_offload(case, "critic.model")
    yield _smaller_model_share("the critic's stages")


def _gen(case: Case) -> Found:
    yield levers.smaller_rollout_share(
        case, why="while answers are generated, memory beside the engine's share is missing"
    )
    yield levers.smaller_reward_share(case)
    yield levers.own_reward_pool(case)
    yield levers.eager(case)
    yield levers.fewer_sequences(case)
    yield levers.shorter_model_length(case)
    root = levers.offload_root(case, "actor")
    yield levers.offload(case, root, "param")
    yield levers.offload(case, root, "optimizer")


def _update_weights(case: Case) -> Found:
    """The resume window: weights of the actor and of the engine are on the GPU together."""
    yield levers.free_cache(case)
    yield levers.smaller_rollout_share(
        case,
        why="when weights are handed over, the GPU holds those of the actor and of the engine, and its cache",
    )
    yield levers.offload(case, levers.offload_root(case, "actor"), "param")
    yield levers.smaller_bucket(case)
    yield levers.offload(case, levers.offload_root(case, "actor"), "optimizer")
    yield levers.own_reward_pool(case)


def _reward(case: Case) -> Found:
    yield levers.own_reward_pool(case)
    yield levers.smaller_reward_share(case)
    if case.config.reward_model:
        yield levers.smaller_batch(case, "reward")
    yield say(
        "Look for copies of the reward model that take memory by accident: one loaded in a reward function lies on"
        " the GPU of whichever process calls it",
        reason=case.need,
    )


def _no_stage(case: Case) -> Found:
    """Which stage is at its peak is not known, so that every lever is a guess; the usual one is the update."""
    yield levers.remove_padding(case, M)
    yield levers.gradient_checkpointing(case, M)
    batch = levers.smaller_batch(case, "update_actor")
    yield doubtful(batch, "The stage at the peak is not known; if it is update_actor: ")
    share = levers.smaller_rollout_share(case, why="the rollout engine leaves too little beside itself")
    yield doubtful(share, "The stage at the peak is not known; if it is gen or update_weights: ")


def _unseen(case: Case) -> Found:
    """The settings are out of sight (a script): say which ones decide this stage, and on what they depend."""
    stage = case.stage or ""
    yield levers.smaller_batch(case, stage)
    if stage in ("gen", "testing", "update_weights"):
        yield levers.smaller_rollout_share(case, why=f"memory beside the rollout engine is missing in {stage}")
    if stage in ("update_actor", "update_critic"):
        key = f"{levers.offload_root(case, 'critic' if stage == 'update_critic' else 'actor')}.optimizer_offload"
        text = f"If {key} is false and the pod has host memory to spare, set it to true"
        if "HostMemoryRisk" not in case.context.open_reasons:
            yield case.condition(key, text=text, price="host memory, and time for the copies")
    if stage == "old_log_prob":
        yield levers.entropy_in_chunks(case)
    yield say(
        "The driver's command line does not show the settings, so which of these is set cannot be said; verl prints"
        " its whole configuration at the start of the driver's log",
        reason=case.need,
        confidence="low",
    )


def _sft(case: Case) -> Advice:
    return say(
        "Lower data.micro_batch_size_per_gpu, or with data.use_dynamic_bsz the token limit"
        " data.max_token_len_per_gpu (not below the longest sample); then turn on gradient checkpointing, padding"
        " removal or offloading",
        reason=case.need,
        price="more and smaller micro batches are a little slower; what is learnt stays the same",
        confidence="low",
    )


def _smaller_model_share(stage: str) -> Advice:
    return say(
        f"If that is not enough, spread the model over more GPUs. A smaller {R}.gpu_memory_utilization does not help"
        f" in {stage}: the engine sleeps then",
        confidence="low",
    )


_STAGES: Final[dict[str, Callable[[Case], Found]]] = {
    "update_actor": _update_actor,
    "old_log_prob": _old_log_prob,
    "ref": _ref,
    "update_critic": _update_critic,
    "values": _values,
    "gen": _gen,
    "testing": _gen,
    "update_weights": _update_weights,
    "reward": _reward,
}


def memory_growth(case: Case) -> Found:
    """Yield what bounds growing batches, and how a leak is found."""
    if (case.figure("stages") or 1) <= 1:
        yield doubtful(
            levers.smaller_batch(case, case.stage or ""),
            "If growing answers are the cause (see response_length/mean): ",
        )
    if _images(case):
        yield say(
            "If images or videos are worked on, look at the caches of their encoder first: vLLM keeps processed"
            f" inputs and encoder outputs (+{R}.engine_kwargs.vllm.… turns its multi-modal cache off), and"
            " processors keep their own",
            reason="the model's name or the data say that it takes images",
            price="inputs are processed again where a prompt comes back",
        )
    growth, left = case.figure("growth_bytes_per_step"), case.figure("steps_left")
    rate = f"{growth / GIB:.2f} GiB more each step" if growth else "more after each step"
    ahead = f", full in about {left:.0f} steps" if left is not None and left >= 0 else ""
    yield say(
        "Take two memory snapshots some steps apart and compare what was added: global_profiler.tool=torch_memory"
        " with global_profiler.steps (from verl 0.6.1), or torch.cuda.memory._record_memory_history. Usual causes:"
        " tensors kept in lists or metrics without detach() or cpu(), and caches without a bound",
        reason=f"{rate}{ahead}",
        price="the steps under the profiler are slower",
    )
    yield say(
        "Until the cause is found, save checkpoints often enough (trainer.save_freq) that a restart loses little; a"
        " new process begins without the growth",
        reason=f"{rate}{ahead}",
        price="time for each checkpoint",
        confidence="low",
    )


def _images(case: Case) -> bool:
    config = case.config
    path = (config.launch.overrides.get(f"{M}.path") or "").rpartition("/")[2].lower()
    words = path.replace("_", "-").split("-")
    return config.given("data.image_key") or any(w in ("vl", "vision", "omni", "llava", "internvl") for w in words)


def rollout_not_released(case: Case) -> Found:
    """Yield what makes a sleeping engine give its memory back."""
    yield levers.free_cache(case)
    yield levers.sleep_mode(case)
    if "expandable_segments:true" in _allocator(case).lower():
        yield say(
            "Take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF: vLLM's sleep needs an allocator of its"
            " own, and verl switches expandable segments itself around the hand-over of weights",
            reason="the command line sets it",
            confidence="high",
        )
    yield levers.eager(case)
    kept = case.figure("kept_bytes", "memory_used_bytes", "missing_bytes")
    yield levers.smaller_rollout_share(case, why="what the engine keeps while it sleeps is missing in the update")
    held = f"{kept / GIB:.1f} GiB stayed on the GPU" if kept else "much of its memory stayed on the GPU"
    yield say(
        "Look in the engine's log for what sleep freed and what it kept. What stays usually belongs to CUDA graphs,"
        " to NCCL, to a draft or LoRA adapter, or to weights that a sleep of level 1 moves to the host; engines"
        f" before vLLM 0.8.3 and SGLang without torch_memory_saver free less ({R}.free_cache_engine must be true)",
        reason=held,
    )


def _allocator(case: Case) -> str:
    launch = case.config.launch
    return " ".join(value for name, value in launch.environment.items() if name.endswith("_ALLOC_CONF"))


def leftover_memory(case: Case) -> Found:
    """Yield how a GPU gets rid of what was there before the job."""
    held = case.figure("leftover_bytes", "held_bytes", "memory_used_bytes")
    said = f"{held / GIB:.1f} GiB were held before the job's own processes began" if held else "memory was held before"
    yield say(
        "Find the holder on the node (nvidia-smi, or fuser -v /dev/nvidia*): a process that outlived its pod, or"
        " another job on the same GPU. End it, or cordon the node and let the pod start elsewhere",
        reason=said,
        confidence="high",
    )
    key = f"{R}.gpu_memory_utilization"
    current, total = case.config.number(key), case.total_bytes
    if held and total and current is not None and current > 1 - held / total:
        value = int((1 - held / total - 0.05) * 20) / 20
        text = f"Until then lower {key} from {current:g} to {value:g}: it is a share of the whole GPU"
        price = "a smaller KV cache on all GPUs"
        yield case.change(key, f"{value:g}", text=text, reason=said, price=price)


def foreign_process(case: Case) -> Found:
    """Yield how contexts of other ranks are kept off a GPU."""
    if (case.config.launch.module or "") in _SFT or case.config.launch.processes_per_node:
        yield say(
            "Call torch.cuda.set_device(LOCAL_RANK) before anything touches CUDA (init_process_group with"
            " device_id, map_location for torch.load): a rank without a device of its own opens a context on GPU 0"
            " too",
            reason="each context holds some hundred MiB there, and the GPU with all of them is the first to be full",
            confidence="high",
        )
    yield say(
        "See whose processes they are (nvidia-smi on the node). Those of other ranks: give each its device before"
        " CUDA is used, and do not set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES without doing so. Those of"
        " nobody in the job: another pod shares the GPU, or a process outlived its own",
        reason="processes that are not this GPU's rank hold memory on it",
    )
    yield levers.own_reward_pool(case)
