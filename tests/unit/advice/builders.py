# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs and findings for the tests of advice."""

from collections.abc import Iterable, Mapping

from verl_gpumonitor.advice import Context, advise, context_of
from verl_gpumonitor.model.findings import Advice, Finding, Scope
from verl_gpumonitor.model.vocabulary import Severity

GIB = 2**30
A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
F = "actor_rollout_ref.ref"
M = "actor_rollout_ref.model"

GRPO: dict[str, str] = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": "256",
    "data.max_prompt_length": "1024",
    "data.max_response_length": "3072",
    f"{M}.path": "/models/Qwen2.5-7B-Instruct",
    f"{M}.use_remove_padding": "True",
    f"{A}.ppo_mini_batch_size": "64",
    f"{A}.use_dynamic_bsz": "True",
    f"{A}.ppo_max_token_len_per_gpu": "24576",
    f"{A}.use_kl_loss": "True",
    f"{R}.name": "vllm",
    f"{R}.n": "8",
    f"{R}.tensor_model_parallel_size": "2",
    f"{R}.gpu_memory_utilization": "0.6",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
}
FIXED = {f"{A}.use_dynamic_bsz": "False", f"{A}.ppo_micro_batch_size_per_gpu": "8"}
FIXED |= {f"{root}.log_prob_micro_batch_size_per_gpu": "16" for root in (R, F)}
PPO = {"algorithm.adv_estimator": "gae"}

Figures = Mapping[str, str | int | float]
NEAR_THE_END: Figures = {
    "memory_total_bytes": 80 * GIB,
    "peak_bytes": 77 * GIB,
    "growth_bytes_per_step": 0.4 * GIB,
}


def line(settings: Mapping[str, str], module: str = "verl.trainer.main_ppo") -> str:
    return " ".join(["python3", "-m", module, *(f"{key}={value}" for key, value in settings.items())])


def job(settings: Mapping[str, str] = GRPO, *, verl: str | None = "0.9.0", **more: object) -> Context:
    known: dict[str, object] = {"kind": "RayJob", "gpus": 8, "gpus_per_pod": 8, "memory_total_bytes": 80 * GIB, **more}
    return context_of(line(settings), verl=verl, **known)  # type: ignore[arg-type]


def finding(
    reason: str,
    stage: str | None = None,
    evidence: Figures | None = None,
    *,
    pods: Iterable[str] = ("w-0",),
) -> Finding:
    return Finding(
        reason=reason,
        severity=Severity.WARNING,
        scope=Scope(pods=tuple(pods), gpus=("GPU-0",), stage=stage),
        message="",
        evidence={**(evidence or {})},
    )


def given(advice: Iterable[Advice]) -> dict[str, tuple[str | None, str | None]]:
    """Return parameter to (current, suggested), in the order given."""
    return {a.parameter: (a.current, a.suggested) for a in advice if a.parameter is not None}


def answer(
    context: Context, reason: str, stage: str | None = None, evidence: Figures | None = None
) -> tuple[Advice, ...]:
    return advise(finding(reason, stage, NEAR_THE_END if evidence is None else evidence), context)
