# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the classes and methods of the released verl versions, 0.3 to 0.9, are doing. Data; `names` applies it.

Read from verl's own packages. One set of tables serves all versions: a name that changed its meaning does not exist.
A class that is not here, or a method that is not, is `other`: a later verl brings new ones.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from verl_gpumonitor.model.enums import StrEnum
from verl_gpumonitor.model.vocabulary import UNKNOWN

OTHER: Final = "other"


class Kind(StrEnum):
    """What a name's process has to do with a GPU."""

    WORKER = "worker"
    """It computes on a GPU itself."""
    SERVER = "server"
    """Front of a rollout engine: its methods say what the engine's GPUs do."""
    HELPER = "helper"
    """Runs on CPU, and waits for what GPUs do elsewhere."""
    ENGINE = "engine"
    """Process of vLLM or SGLang under a server: on the GPU, and silent about the stage."""
    DRIVER = "driver"
    """Runs the whole job."""
    OTHER = "other"


class StageByRole(msgspec.Struct, frozen=True):
    """A method that means another stage under the prefix of one role."""

    default: str
    role: str
    stage: str

    def under(self, role: str) -> str:
        """Return the stage under that role."""
        return self.stage if role == self.role else self.default


Stages = Mapping[str, str | StageByRole]


class ClassRule(msgspec.Struct, frozen=True, kw_only=True):
    """How the methods of some classes are read."""

    names: tuple[str, ...] = ()
    """Whole class names."""
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    kind: Kind
    role: str = UNKNOWN
    stages: Stages = {}
    """Method -> stage; a method that is not listed is `other`."""
    prefixed: bool = False
    """Whether methods carry the prefix of a role, `actor_rollout_ref_` and the like."""
    roles: Mapping[str, str] = {}
    """Methods whose role is another than the class's or the prefix's."""

    def fits(self, name: str) -> bool:
        """Say whether a class is one of these."""
        return name in self.names or name.startswith(self.begins) or name.endswith(self.ends)


PREFIXES: Final = (
    ("actor_rollout_ref_", "actor"),
    ("actor_rollout_", "actor"),
    ("actor_", "actor"),
    ("critic_", "critic"),
    ("ref_", "ref"),
    ("rm_", "reward"),
    ("rollout_", "rollout"),
    ("teacher_", "teacher"),
    ("env_", UNKNOWN),
)
"""Role prefixes of a `WorkerDict` method, longest first: the first that fits is taken off, once."""

UNIVERSAL_METHODS: Final[Mapping[str, str]] = {
    "__init__": "init",
    "__ray_call__": OTHER,
    "__ray_terminate__": OTHER,
    "__ray_ready__": OTHER,
}
"""Methods that every Ray actor has."""

_TRAINS = StageByRole("update_actor", "critic", "update_critic")

WORKER_METHODS: Final[Stages] = {
    "init_model": "init",
    "set_loss_fn": "init",
    "reset": "init",
    "load_checkpoint": "init",
    "load_pretrained_model": "init",
    "create_transferqueue_client": "init",
    "get_zeromq_address": "init",
    "generate_sequences": "gen",
    "generate": "gen",
    "chat_completion": "gen",
    "execute_method": "gen",
    "sleep": "gen",
    "wake_up": "update_weights",
    "update_weights": "update_weights",
    "execute_checkpoint_engine": "update_weights",
    "compute_rm_score": "reward",
    # With LoRA the reference is the actor without its adapter, and from 0.8 on runs under this very name.
    "compute_log_prob": StageByRole("old_log_prob", "ref", "ref"),
    "compute_ref_log_prob": "ref",
    "save_model_to_cpu": "old_log_prob",
    "restore_model_from_cpu": "old_log_prob",
    "clear_cpu_model": "old_log_prob",
    "compute_values": "values",
    "infer_batch": StageByRole("testing", "critic", "values"),
    "train_batch": _TRAINS,
    "train_mini_batch": _TRAINS,
    "forward_backward": _TRAINS,
    "optimizer_step": _TRAINS,
    "optimizer_zero_grad": _TRAINS,
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "save_checkpoint": "save_checkpoint",
    "async_calls_finalize_fn_exec": "save_checkpoint",
}

WORKER_ROLES: Final[Mapping[str, str]] = {
    "compute_ref_log_prob": "ref",
    "generate_sequences": "rollout",
    "generate": "rollout",
    "chat_completion": "rollout",
    "execute_method": "rollout",
    "get_zeromq_address": "rollout",
    "wake_up": "rollout",
    "sleep": "rollout",
}
"""Methods of a worker whose role is not its prefix's."""

SERVER_METHODS: Final[Stages] = {
    "generate": "gen",
    "chat_completion": "gen",
    "sleep": "gen",
    "wait_for_requests_to_drain": "gen",
    "abort_all_requests": "gen",
    "abort_request": "gen",
    "resume_generation": "gen",
    "resume_engine_generation": "gen",
    "open_submission_gate": "gen",
    "wake_up": "update_weights",
    "collective_rpc": "update_weights",
    "clear_kv_cache": "update_weights",
    "release_kv_cache": "update_weights",
    "resume_kv_cache": "update_weights",
    "set_global_steps": "update_weights",
    "launch_server": "init",
    "init_engine": "init",
    "get_server_address": "init",
    "get_master_address": "init",
    "set_pd_peer": "init",
    "supports_partial_loading": "init",
}

CLASSES: Final = (
    ClassRule(names=("WorkerDict",), kind=Kind.WORKER, prefixed=True, stages=WORKER_METHODS, roles=WORKER_ROLES),
    # All calls of a fused worker go through one method: nothing can be told.
    ClassRule(names=("FusedWorker",), begins=("FusedWorker_",), kind=Kind.WORKER),
    # Under its own name it is the worker of SFT; as a critic of PPO it is inside WorkerDict.
    ClassRule(names=("TrainingWorker",), kind=Kind.WORKER, role="trainer", stages=WORKER_METHODS),
    ClassRule(names=("TinkerTrainingWorker",), kind=Kind.WORKER, role="actor", stages=WORKER_METHODS),
    ClassRule(
        names=(
            "ActorRolloutRefWorker",
            "AsyncActorRolloutRefWorker",
            "DetachActorWorker",
            "CheckpointEngineWorker",
            "vLLMAsyncRollout",
            "ServerAdapter",
        ),
        kind=Kind.WORKER,
        role="rollout",
        stages=WORKER_METHODS,
        roles=WORKER_ROLES,
    ),
    ClassRule(
        names=("AsyncvLLMServer", "AsyncSglangServer", "AsyncSGLangServer"),
        begins=("vLLMHttpServer", "SGLangHttpServer", "TRTLLMHttpServer"),
        kind=Kind.SERVER,
        role="rollout",
        stages=SERVER_METHODS,
    ),
    ClassRule(
        begins=("AgentLoopWorker",),
        kind=Kind.HELPER,
        role="rollout",
        stages={"generate_sequences": "gen", "create_transferqueue_client": "init"},
    ),
    ClassRule(
        names=("RewardLoopWorker", "RewardManagerWorker", "RewardComputeWorker"),
        kind=Kind.HELPER,
        role="reward",
        stages={"compute_score": "reward", "compute_score_batch": "reward"},
    ),
    ClassRule(
        ends=("LoadBalancer",),
        kind=Kind.HELPER,
        role="rollout",
        stages={
            "acquire_server": "gen",
            "release_server": "gen",
            "require_acquire_fields": "init",
            "require_release_fields": "init",
        },
    ),
    ClassRule(
        names=("TokenBucketWorker", "ExecutionWorker", "SearchExecutionWorker", "VisualExecutionWorker"),
        kind=Kind.HELPER,
        stages={"acquire": "gen", "release": "gen", "execute": "gen"},
    ),
    ClassRule(
        names=("FullyAsyncTrainer",),
        kind=Kind.DRIVER,
        role="driver",
        stages={
            "init_workers": "init",
            "set_rollouter": "init",
            "set_total_train_steps": "init",
            "set_message_queue_client": "init",
            "load_checkpoint": "init",
            "get_actor_wg": "init",
            "_fit_update_weights": "update_weights",
            "_fit_validate": "testing",
        },
    ),
    ClassRule(
        names=("FullyAsyncRollouter",),
        kind=Kind.DRIVER,
        role="driver",
        stages={
            "init_workers": "init",
            "set_max_required_samples": "init",
            "set_hybrid_worker_group": "init",
            "set_message_queue_client": "init",
            "load_checkpoint": "init",
            "get_replicas": "init",
            "get_max_queue_size": "init",
            "get_total_train_steps": "init",
            "do_validate": "testing",
            "save_checkpoint": "save_checkpoint",
            "reset_staleness": "update_weights",
            "wait_for_enough_samples": "gen",
        },
    ),
    ClassRule(ends=("TaskRunner", "TaskRunnerV1"), kind=Kind.DRIVER, role="driver"),
    ClassRule(
        names=("WorkerGroupRegisterCenter", "NCCLIDStore"),
        kind=Kind.OTHER,
        stages={"get_rank_zero_info": "init", "set_worker_info": "init", "get_worker_info": "init", "get": "init"},
    ),
    ClassRule(names=("MessageQueue", "TrajectoryTracker"), kind=Kind.OTHER),
)
"""The first rule that fits a class holds."""


class PlainTask(msgspec.Struct, frozen=True):
    """A Ray task that is no method of an actor."""

    stage: str
    role: str = UNKNOWN
    kind: Kind = Kind.OTHER


PLAIN_TASKS: Final[Mapping[str, PlainTask]] = {
    "compute_reward_async": PlainTask("reward", "reward", Kind.HELPER),
    "_launch_individual_rewards": PlainTask("reward", "reward", Kind.HELPER),
    "main_task": PlainTask(OTHER, "driver", Kind.DRIVER),
    "get_master_addr_port": PlainTask("init"),
    "write_config_file": PlainTask("init"),
    "reload_prometheus": PlainTask("init"),
}

IDLE_TITLES: Final = frozenset({"IDLE", "IDLE_SpillWorker", "IDLE_RestoreWorker"})
"""Titles of Ray workers that hold no task and no actor."""

ENGINE_TITLES: Final = ("VLLM::", "sglang::")
"""How the titles of an engine's own processes begin. They tell a tensor-parallel rank, and never the stage."""

SERVER_PURPOSES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "reward": ("reward", {"gen": "reward", "update_weights": "reward"}),
    "teacher": ("teacher", {"update_weights": OTHER}),
}
"""Word in the Ray name of a server that is none of the policy's -> its role, and what its stages mean instead."""
