# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which names of Ray's tasks tell verl's release: data, and how they are found in what runs. Pure.

Whoever sees tasks run (a head's sidecar) passes on these words alone, so that nothing of the user's is in them.
"""

from collections.abc import Mapping
from typing import Final

RELEASES: Final[Mapping[str, tuple[str, str]]] = {
    "TaskRunnerV1": ("0.9.0", "0.9.1"),
    "AgentLoopWorkerTQ": ("0.8.0", "0.9.1"),
    "FullyAsyncTrainer": ("0.8.0", "0.9.1"),
    "FullyAsyncRollouter": ("0.8.0", "0.9.1"),
    "OneStepTaskRunner": ("0.8.0", "0.9.1"),
    "TRTLLMHttpServer": ("0.8.0", "0.9.1"),
    "CheckpointEngineWorker": ("0.7.1", "0.9.1"),
    "GlobalRequestLoadBalancer": ("0.7.1", "0.9.1"),
    "actor_rollout_update_weights": ("0.7.1", "0.9.1"),
    "actor_rollout_ref_update_weights": ("0.7.1", "0.9.1"),
    "RewardLoopWorker": ("0.7.0", "0.9.1"),
    "RewardComputeWorker": ("0.7.0", "0.9.1"),
    "critic_infer_batch": ("0.7.0", "0.9.1"),
    "critic_train_mini_batch": ("0.7.0", "0.9.1"),
    "vLLMHttpServer": ("0.6.1", "0.9.1"),
    "SGLangHttpServer": ("0.6.1", "0.9.1"),
    "get_master_addr_port": ("0.6.1", "0.9.1"),
    "AgentLoopWorker": ("0.5.0", "0.9.1"),
    "RewardManagerWorker": ("0.6.1", "0.6.1"),
    "vLLMAsyncRollout": ("0.6.1", "0.7.0"),
    "critic_compute_values": ("0.3.0.post1", "0.7.1"),
    "critic_update_critic": ("0.3.0.post1", "0.7.1"),
    "WorkerDict.wake_up": ("0.4.1", "0.7.0"),
    "AsyncSGLangServer": ("0.5.0", "0.5.0"),
    "AsyncSglangServer": ("0.4.1", "0.4.1"),
    "AsyncvLLMServer": ("0.4.1", "0.5.0"),
    "WorkerGroupRegisterCenter": ("0.3.0.post1", "0.5.0"),
    "main_task": ("0.3.0.post1", "0.7.0"),
}
"""Names of Ray's classes, methods and both together, and the releases (first, last) that have them."""

SLEEP: Final = "sleep"
"""The method by which a rollout engine is put to sleep."""
MAX_NAME: Final = 256
"""Longer names are none of verl's."""


def words_of(name: str) -> tuple[str, ...]:
    """Return a task's name without Ray's marks, and its parts: the words that may tell something."""
    bare = name.removeprefix("ray::").removesuffix("()")
    return (bare, *bare.split("."))


def telling(name: str) -> tuple[str, ...]:
    """Return those words of a task's name or a title that tell verl's release, or that an engine is put to sleep."""
    if len(name) > MAX_NAME:
        return ()
    return tuple(dict.fromkeys(word for word in words_of(name) if word in RELEASES or word == SLEEP))
