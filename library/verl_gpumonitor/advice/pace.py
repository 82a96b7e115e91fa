# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Advice about GPUs that wait: for each other (Imbalance), or for work (LowUtilization). Pure."""

from collections.abc import Callable
from typing import Final

from verl_gpumonitor.model.findings import Advice
from verl_gpumonitor.model.history import IDLE_UTILIZATION

from . import levers
from .case import Case, Found, doubtful, say
from .catalogue import MEGATRON
from .config import A, M, R
from .memory import lone_gpu

_WAITING: Final = 0.6
"""Share of a rollout without any work from which on the engines lack requests, and not room for them."""
_ROLLOUT: Final = frozenset({"gen", "testing", "reward"})


def imbalance(case: Case) -> Found:
    """Yield what evens out GPUs of one pool, by what they differ in."""
    metric = case.finding.evidence.get("metric")
    if metric == "memory":
        if case.config.flavour == MEGATRON:
            yield _pipeline_layers(case)
        yield from lone_gpu(case)
        return
    if metric == "time":
        yield from _slow_gpu(case)
        return
    yield from _uneven_load(case)


def _pipeline_layers(case: Case) -> Advice | None:
    if (case.config.integer(f"{A}.megatron.pipeline_model_parallel_size") or 1) < 2:
        return None
    return say(
        "Give the first and last pipeline stage fewer layers (Megatron's num_layers_in_last_pipeline_stage or"
        " account_for_embedding_in_pipeline_split in override_transformer_config): they also hold the embeddings",
        reason="pipeline stages hold different parts of the model",
    )


def _slow_gpu(case: Case) -> Found:
    yield levers.balance_batch(case)
    yield levers.dynamic_batches(case)
    yield say(
        "Compare clocks, temperature and power of that GPU with its peers (throttling, a lower power limit), and"
        " its links (nvidia-smi topo -m, NVLink errors); if it stays slow on the same node, have the node looked at",
        reason="the same work takes longer on it",
    )


def _uneven_load(case: Case) -> Found:
    """In rollout fewer GPUs in each replica share the answers better; in training the batch is dealt out by tokens."""
    rollout = case.stage in _ROLLOUT
    load = case.figure("value")
    if rollout and load is not None and load < IDLE_UTILIZATION:
        yield _NO_REQUESTS
    if not rollout:
        yield levers.balance_batch(case)
    if rollout or case.stage is None:
        yield levers.smaller_rollout_groups(case)
    yield levers.all_gpus(case)
    yield levers.own_reward_pool(case)
    if not rollout:
        yield levers.dynamic_batches(case)
        yield levers.remove_padding(case, M)
        yield doubtful(levers.smaller_rollout_groups(case), "If the rollout is uneven too: ")
    yield say(
        "Check where the workers lie: one rank for each GPU (Ray's dashboard, nvidia-smi), no replica across nodes,"
        " and no model loaded on one device by default",
        reason="some GPUs of the pool work while others wait",
    )


_NO_REQUESTS: Final = say(
    "See what the engine on these GPUs does, in the log of its server and in its list of requests: it gets none, has"
    " died, or was never started",
    reason="they train as all others, and have no work in the rollout",
)


def low_utilization(case: Case) -> Found:
    """Yield what gives idle GPUs work, by stage."""
    yield from _STAGES.get(case.stage or "", _any_stage)(case)


def _gen(case: Case) -> Found:
    """Idle through and through: it waits for something else. Busy in part: it could do more at once."""
    config = case.config
    if case.finding.evidence.get("cause") == "pool":
        yield _SMALLER_POOL
        return
    if case.finding.evidence.get("cause") == "rollout":
        yield from _larger_pool(case)
        return
    yield levers.all_gpus(case)
    if (case.figure("idle_ratio") or 0.0) < _WAITING:
        yield levers.chunked_prefill(case)
        yield levers.more_sequences(case)
        yield levers.smaller_rollout_groups(case) if config.integer(f"{R}.tensor_model_parallel_size") != 1 else None
        yield levers.larger_rollout_share(case)
        yield levers.more_batched_tokens(case)
    if config.flag(f"{R}.multi_turn.enable"):
        yield _SLOW_TOOLS
    yield levers.log_stats(case)
    yield _reward_workers(case)
    yield levers.asynchronous(case)
    yield say(
        "See what the engines wait for: a long tail of few long answers, tools, or rewards",
        reason=_idle(case),
        confidence="low",
    )


_SMALLER_POOL: Final = say(
    "Give the rollout fewer GPUs, or the trainer more of them: rollout.nnodes and rollout.n_gpus_per_node (of"
    f" trainer.v1.trainer_mode=separate_async {R}.nnodes and {R}.n_gpus_per_node) against trainer.nnodes and"
    " trainer.n_gpus_per_node",
    reason="the rollout pool waits for the trainer for most of each step",
    price=f"the rollout's GPUs must still divide by {R}.tensor_model_parallel_size, and the trainer's fit the batch",
)

_FULLY_ASYNC: Final = "verl.experimental.fully_async_policy.fully_async_main"


def _larger_pool(case: Case) -> Found:
    """The trainer waits for a rollout on other GPUs: let that have more of them, or run further ahead."""
    separate = case.config.launch.overrides.get("trainer.v1.trainer_mode") == "separate_async"
    root = R if separate else "rollout"
    key = f"{root}.n_gpus_per_node"
    yield say(
        f"Give the rollout more GPUs, or the trainer fewer: {root}.nnodes and {key} against trainer.nnodes and"
        f" trainer.n_gpus_per_node{_even(case)}",
        parameter=key,
        reason=_idle(case),
        price=f"the rollout's GPUs must divide by {R}.tensor_model_parallel_size, and the model fit the trainer's",
    )
    if case.config.launch.module == _FULLY_ASYNC:
        yield say(
            "If answers of an older policy may be used, raise async_training.staleness_threshold (0.1 by default) and"
            " leave async_training.partial_rollout on: generation then runs on while weights are handed over",
            parameter="async_training.staleness_threshold",
            reason=_idle(case),
            price="answers are further from the policy that is trained: learning changes",
            confidence="low",
        )
    yield levers.log_stats(case)
    yield _SLOW_TOOLS if case.config.flag(f"{R}.multi_turn.enable") else None


def _even(case: Case) -> str:
    """Return a split in which neither waits, by the time both work now.

    8 GPUs train for 40% of a step and 8 generate for all of it: 3.2 and 8, so that of 16 the rollout wants 11.
    """
    trainer, others, share = case.figure("trainer_gpus"), case.figure("other_gpus"), case.figure("step_share")
    if not trainer or not others or share is None or not 0 <= share < 1:
        return ""
    wanted = (trainer + others) * others / (others + trainer * (1 - share))
    return f"; by what both do now, about {wanted:.0f} of the {trainer + others:.0f} GPUs should generate"


_DRIVER: Final = say(
    "See what the driver does between the stages (timing_s/reward, timing_s/adv, and what timing_s/step"
    " has beyond its stages): mostly rewards on the CPU, which can run at once with the rollout and in more processes,"
    " else loading of data or dumps of answers",
    reason="no stage runs for a good part of each step",
)

_SLOW_TOOLS: Final = say(
    "Answers wait for tools between their turns: bound the time of one call, and run more of them at once",
    reason="multi_turn.enable is on",
)


def _reward(case: Case) -> Found:
    yield _reward_workers(case)
    yield levers.own_reward_pool(case)
    yield say(
        "Rewards are computed on the CPU while GPUs wait: make the function asynchronous, bound the time of one"
        " call (sandbox, judge), or give the head more cores",
        reason=_idle(case),
    )


def _reward_workers(case: Case) -> Advice | None:
    key = "reward.num_workers" if case.config.versions.since("0.7.1") else "reward_model.num_workers"
    current = case.config.integer(key)
    if current is None or case.stage not in _ROLLOUT or not case.config.launch.known:
        return None
    value = current * 2
    if value > 64:
        return None
    text = f"If rewards are what it waits for, raise {key} from {current} to {value}: more of them are computed at once"
    price = "CPU and host memory for each worker"
    return case.change(key, str(value), text=text, reason=_idle(case), price=price, confidence="low")


def _update_actor(case: Case) -> Found:
    yield levers.remove_padding(case, M)
    yield levers.larger_batch(case, "update_actor")
    yield levers.dynamic_batches(case)
    yield from _no_copies(case, "actor")
    yield levers.balance_batch(case)
    yield _profile(case)


def _old_log_prob(case: Case) -> Found:
    yield levers.remove_padding(case, M)
    yield levers.larger_batch(case, "old_log_prob")
    yield levers.dynamic_batches(case)
    yield _profile(case)


def _ref(case: Case) -> Found:
    yield levers.remove_padding(case, M)
    yield levers.larger_batch(case, "ref")
    yield levers.dynamic_batches(case)
    yield _profile(case)


def _update_critic(case: Case) -> Found:
    yield levers.remove_padding(case, "critic.model")
    yield levers.larger_batch(case, "update_critic")
    yield from _no_copies(case, "critic")
    yield _profile(case)


def _values(case: Case) -> Found:
    yield levers.remove_padding(case, "critic.model")
    yield levers.larger_batch(case, "values")
    yield _profile(case)


def _no_copies(case: Case, role: str) -> Found:
    root = levers.offload_root(case, role)
    if case.context.gpu_headroom_bytes is not None:
        yield levers.keep_on_gpu(case, root, "optimizer")
        yield levers.keep_on_gpu(case, root, "param")


def _save_checkpoint(case: Case) -> Found:
    key, current = "trainer.save_freq", case.config.integer("trainer.save_freq")
    share = case.figure("idle_ratio", "stage_share")
    if current is not None and current > 0:
        value = current * (4 if share and share > 0.3 else 2)
        text = f"Raise {key} from {current} to {value}: GPUs stand idle while a checkpoint is written"
        yield case.change(key, str(value), text=text, reason=_idle(case), price="a failure loses more steps")
    yield say(
        "Write checkpoints to a faster or a local disk, sharded, or asynchronously",
        reason=_idle(case),
        price="a local disk ends with its node",
    )


def _testing(case: Case) -> Found:
    key, current = "trainer.test_freq", case.config.integer("trainer.test_freq")
    if current is not None and current > 0:
        text = f"Raise {key} from {current} to {2 * current}: validation takes time in which nothing is learnt"
        yield case.change(key, str(2 * current), text=text, reason=_idle(case), price="fewer points of validation")
    yield from _gen(case)


def _update_weights(case: Case) -> Found:
    yield say(
        "Look at the links between the GPUs (nvidia-smi topo -m, NCCL_DEBUG=INFO): handing over weights is bound by"
        f" them; larger pieces ({R}.checkpoint_engine.update_weights_bucket_megabytes, from verl 0.7.1) mean fewer"
        " of them",
        reason=_idle(case),
        price="more GPU memory in the hand-over",
        confidence="low",
    )


def _any_stage(case: Case) -> Found:
    if case.finding.evidence.get("cause") == "rollout":
        yield from _larger_pool(case)
        return
    yield levers.all_gpus(case)
    if case.finding.scope.stage == "other" and case.figure("step_share") is not None:
        yield _asynchronous_rewards(case)
        yield _DRIVER
    yield _profile(case)


def _asynchronous_rewards(case: Case) -> Advice | None:
    """Let rewards be computed beside log-probabilities; from 0.7.0 on they are computed while answers come."""
    key = "reward_model.launch_reward_fn_async"
    if case.config.flag(key) is not False or case.config.versions.since("0.7.0"):
        return None
    text = f"Set {key}=true: the reward function then runs on the CPU beside the log-probabilities on the GPUs"
    return case.change(key, "true", text=text, reason=_idle(case), price="CPU cores that loading of data uses as well")


def _profile(case: Case) -> Advice:
    return say(
        "Profile one step (global_profiler.tool=nsys or torch, global_profiler.steps, from verl 0.6.1): waiting for"
        " data, for copies between host and GPU, or for another rank look different there",
        reason=_idle(case),
        price="the steps under the profiler are slower",
        confidence="low",
    )


def _idle(case: Case) -> str:
    idle, busy = case.figure("idle_ratio"), case.figure("utilization")
    stage = case.stage or "the step"
    if idle is not None and 0 <= idle <= 1:
        return f"GPUs are idle for {idle:.0%} of {stage}"
    return f"GPUs are {busy:.0%} busy in {stage}" if busy is not None and 0 <= busy <= 1 else f"GPUs wait in {stage}"


_STAGES: Final[dict[str, Callable[[Case], Found]]] = {
    "gen": _gen,
    "reward": _reward,
    "update_actor": _update_actor,
    "old_log_prob": _old_log_prob,
    "ref": _ref,
    "update_critic": _update_critic,
    "values": _values,
    "save_checkpoint": _save_checkpoint,
    "testing": _testing,
    "update_weights": _update_weights,
}
