# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a job was started with, as its status shows it: the program, and those of its settings that matter here. Pure.

The command line comes from the RayJob's own spec, from Ray's list of jobs where the spec says nothing (a bare
RayCluster, `ray job submit`), or from the pod template of a PyTorchJob. It is a user's text: what cannot be read is
left out, and secrets were taken out before it got here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from verl_gpumonitor.advice.catalogue import EXAMINED
from verl_gpumonitor.advice.settings import Launch, parse_launch
from verl_gpumonitor.advice.versions import guess
from verl_gpumonitor.model.report import RayJobInfo

from .jobs import JobKind, JobSeen

MAX_OVERRIDES: Final = 24
MAX_TEXT: Final = 256
FIRST: Final = frozenset(
    (
        "model.path",
        "n_gpus_per_node",
        "nnodes",
        "adv_estimator",
        "strategy",
        "train_batch_size",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "log_prob_micro_batch_size_per_gpu",
        "micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "log_prob_use_dynamic_bsz",
        "ppo_max_token_len_per_gpu",
        "log_prob_max_token_len_per_gpu",
        "max_token_len_per_gpu",
        "max_prompt_length",
        "max_response_length",
        "max_length",
        "gpu_memory_utilization",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "ulysses_sequence_parallel_size",
        "n",
        "name",
        "mode",
        "max_num_batched_tokens",
        "max_num_seqs",
        "free_cache_engine",
        "enforce_eager",
        "param_offload",
        "optimizer_offload",
        "grad_offload",
        "offload_policy",
        "fsdp_size",
        "enable_gradient_checkpointing",
        "enable_activation_offload",
        "use_remove_padding",
        "lora_rank",
    )
)
"""Last part of a key, or its last two, that decides about memory, load or balance of GPUs: shown first."""
SECTIONS: Final = ("actor_rollout_ref.", "critic.", "data.", "algorithm.", "reward", "trainer.", "model.", "engine.")
"""Where verl keeps what may be shown after that."""
NOISE: Final = ("logger", "project_name", "experiment_name", "default_local_dir", "default_hdfs_dir", "val_files")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command line and where it was found."""

    text: str
    source: str
    """`spec`, `ray-jobs` or `pod-template`."""
    verl_version: str | None = None
    ray_names: tuple[str, ...] = ()
    """What was seen to run in it that tells verl's release."""


def command_of(job: JobSeen, listed: Sequence[RayJobInfo]) -> Command | None:
    """Return the command line of a job; None where nobody says it. `listed`: Ray's own list of its cluster."""
    own = _own(job, listed)
    version = own.verl_version if own is not None else None
    names = tuple(own.ray_names) if own is not None else ()
    if job.command:
        source = "pod-template" if job.kind is JobKind.PYTORCH_JOB else "spec"
        return Command(text=job.command, source=source, verl_version=version, ray_names=names)
    if own is not None and own.entrypoint:
        return Command(text=own.entrypoint, source="ray-jobs", verl_version=version, ray_names=names)
    return None


def _own(job: JobSeen, listed: Sequence[RayJobInfo]) -> RayJobInfo | None:
    """Ray's entry for a RayJob, by its id; for a bare RayCluster the newest that runs, or the newest."""
    if job.kind is JobKind.RAY_JOB:
        return next((item for item in listed if item.submission_id and item.submission_id == job.ray_job_id), None)
    if job.kind is not JobKind.RAY_CLUSTER:
        return None
    return max(listed, key=lambda item: (item.status == "RUNNING", item.started_at or 0.0), default=None)


def rendered(command: Command) -> Mapping[str, Any]:
    """Return `status.launch`."""
    launch = parse_launch(command.text)
    return {
        "program": (launch.module or launch.script or "")[:MAX_TEXT] or None,
        "configName": launch.config_name[:MAX_TEXT] if launch.config_name else None,
        "overrides": _overrides(launch),
        "overridesLeftOut": max(0, len(launch.overrides) - MAX_OVERRIDES) or None,
        "verlVersion": command.verl_version,
        "verlVersionGuess": _guessed(launch, command),
        "source": command.source,
    }


def _guessed(launch: Launch, command: Command) -> str | None:
    """Return the releases of verl that it can be, where it is not said; None where nothing tells."""
    versions = guess(launch, command.ray_names, said=command.verl_version)
    return None if versions.said is not None or versions.candidates == EXAMINED else versions.text


def _overrides(launch: Launch) -> list[str]:
    """Settings as `key=value`, those that matter most first, else as they were given."""
    keys = sorted(launch.overrides, key=_rank)[:MAX_OVERRIDES]
    return [_line(key, launch.overrides[key]) for key in keys]


def _rank(key: str) -> int:
    parts = key.split(".")
    if parts[-1] in FIRST or ".".join(parts[-2:]) in FIRST:
        return 0
    if parts[-1] in NOISE:
        return 3
    return 1 if key.startswith(SECTIONS) else 2


def _line(key: str, value: str) -> str:
    line = " ".join(f"{key}={value}".split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


class Launches:
    """What was made of each command line. Reading one takes a millisecond, and a job is looked at each second."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Command, Mapping[str, Any]]] = {}

    def of(self, uid: str, command: Command | None) -> Mapping[str, Any] | None:
        """Return `status.launch` of a workload."""
        if command is None:
            return None
        known = self._known.get(uid)
        if known is None or known[0] != command:
            known = self._known[uid] = (command, rendered(command))
        return known[1]

    def forget(self, uid: str) -> None:
        """Forget a workload."""
        self._known.pop(uid, None)
