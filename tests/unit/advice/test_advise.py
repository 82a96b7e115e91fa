# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Mapping

import pytest

from verl_gpumonitor.advice import MAX_ADVICE, advise, context_of
from verl_gpumonitor.advice.advisors import _ADVISORS
from verl_gpumonitor.diagnosis.health import REASONS

from .builders import FIXED, GIB, GRPO, NEAR_THE_END, PPO, A, F, M, R, answer, finding, given, job, line

PPO_JOB = GRPO | PPO | {f"{A}.use_kl_loss": "False"}
TIGHT = GRPO | {f"{A}.ppo_max_token_len_per_gpu": "5120", "data.max_response_length": "3072"}


def test_every_reason_has_an_advisor() -> None:
    assert set(_ADVISORS) == set(REASONS)


@pytest.mark.parametrize(
    ("settings", "verl", "stage", "first"),
    [
        pytest.param(GRPO, "0.9.0", "update_actor", f"{A}.ppo_max_token_len_per_gpu", id="actor, dynamic"),
        pytest.param(GRPO | FIXED, "0.9.0", "update_actor", f"{A}.ppo_micro_batch_size_per_gpu", id="actor, fixed"),
        pytest.param(GRPO, "0.9.0", "old_log_prob", f"{R}.log_prob_max_token_len_per_gpu", id="old_log_prob, dynamic"),
        pytest.param(GRPO | FIXED, "0.5.0", "old_log_prob", f"{R}.log_prob_micro_batch_size_per_gpu", id="and fixed"),
        pytest.param(GRPO, "0.9.0", "ref", f"{F}.log_prob_max_token_len_per_gpu", id="ref"),
        pytest.param(
            GRPO | {f"{M}.lora_rank": "32"}, "0.9.0", "ref", f"{R}.log_prob_max_token_len_per_gpu",
            id="with LoRA the reference is the actor",
        ),
        pytest.param(PPO_JOB, "0.9.0", "update_critic", "+critic.ppo_infer_max_token_len_per_gpu", id="critic of V1"),
        pytest.param(
            PPO_JOB | {"trainer.use_v1": "False"}, "0.9.0", "update_critic", "critic.ppo_max_token_len_per_gpu",
            id="critic of V0",
        ),
        pytest.param(PPO_JOB, "0.8.0", "update_critic", "critic.ppo_max_token_len_per_gpu", id="critic of 0.8.0"),
        pytest.param(PPO_JOB, "0.8.0", "values", "+critic.ppo_infer_max_token_len_per_gpu", id="values of 0.8.0"),
        pytest.param(
            PPO_JOB | {"critic.model.use_remove_padding": "True"}, "0.7.1", "values",
            "critic.forward_max_token_len_per_gpu", id="values of 0.7.1",
        ),
        pytest.param(PPO_JOB, "0.7.1", "update_critic", "critic.model.use_remove_padding", id="padding comes first"),
        pytest.param(GRPO, "0.9.0", "gen", f"{R}.gpu_memory_utilization", id="gen"),
        pytest.param(GRPO, "0.9.0", "update_weights", f"{R}.gpu_memory_utilization", id="the resume window"),
        pytest.param(
            GRPO | {f"{R}.free_cache_engine": "False"}, "0.9.0", "update_weights", f"{R}.free_cache_engine",
            id="an engine that keeps its cache",
        ),
        pytest.param(
            GRPO | {f"{M}.enable_gradient_checkpointing": "False"}, "0.9.0", "update_actor",
            f"{M}.enable_gradient_checkpointing", id="checkpointing that was turned off comes first",
        ),
        pytest.param(
            {k: v for k, v in GRPO.items() if k != f"{M}.use_remove_padding"}, "0.5.0", "update_actor",
            f"{M}.use_remove_padding", id="old releases pad by default",
        ),
    ],
)  # fmt: skip
def test_the_first_lever_of_a_stage(settings: Mapping[str, str], verl: str, stage: str, first: str) -> None:
    advice = answer(job(settings, verl=verl), "OOMRisk", stage)
    assert advice[0].parameter == first
    assert advice[0].suggested is not None
    assert len(advice) <= MAX_ADVICE
    assert all(a.text for a in advice)


def test_values_come_from_what_is_missing() -> None:
    def suggested(peak_gib: float) -> int:
        evidence = {"memory_total_bytes": 80 * GIB, "peak_bytes": peak_gib * GIB}
        return int(given(answer(job(), "OOMRisk", "update_actor", evidence))[f"{A}.ppo_max_token_len_per_gpu"][1] or 0)

    values = [suggested(peak) for peak in (73, 75, 77, 79)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) >= 3
    share = given(answer(job(), "OOMRisk", "gen", {"memory_total_bytes": 80 * GIB, "missing_bytes": 8 * GIB}))
    assert share[f"{R}.gpu_memory_utilization"] == ("0.6", "0.5")


def test_a_limit_never_goes_below_one_sequence_and_then_sequences_are_split() -> None:
    far = {"memory_total_bytes": 80 * GIB, "peak_bytes": 79 * GIB, "missing_bytes": 40 * GIB}
    parameters = given(answer(job(TIGHT), "OOMRisk", "update_actor", far))
    assert parameters[f"{A}.ppo_max_token_len_per_gpu"] == ("5120", "4096")
    at_bound = TIGHT | {f"{A}.ppo_max_token_len_per_gpu": "4096"}
    advice = answer(job(at_bound), "OOMRisk", "update_actor", far)
    split = next(a for a in advice if a.parameter == f"{A}.fsdp_config.ulysses_sequence_parallel_size")
    assert split.suggested == "2"
    assert f"{A}.ppo_max_token_len_per_gpu=" in split.text
    assert f"{A}.ppo_max_token_len_per_gpu" not in given(advice)


def test_offloads_follow_release_and_strategy() -> None:
    def offloads(settings: Mapping[str, str], verl: str, stage: str) -> set[str]:
        found: set[str] = set()
        for advice in answer(job(settings, verl=verl), "OOMRisk", stage):
            own = "critic" if stage == "update_critic" else "actor_rollout_ref"
            if (advice.parameter or "").startswith(own) and (advice.parameter or "").endswith("r_offload"):
                found.add((advice.parameter or "").rpartition(".")[0])
        return found

    padded = {"critic.model.use_remove_padding": "True"}
    assert offloads(PPO_JOB | padded, "0.7.1", "update_critic") == {"critic.model.fsdp_config"}
    assert "critic.fsdp" in offloads(PPO_JOB, "0.8.0", "update_critic")
    assert offloads(GRPO, "0.9.0", "update_actor") == {f"{A}.fsdp_config"}
    megatron = GRPO | {f"{A}.strategy": "megatron"}
    assert offloads(megatron, "0.9.0", "update_actor") == {f"{A}.megatron"}


def test_no_offload_where_host_memory_is_short() -> None:
    for context in (job(open_reasons=["HostMemoryRisk"]), job(host_headroom_bytes=4 * GIB)):
        assert not [p for p in given(answer(context, "OOMRisk", "update_actor")) if "offload" in p]


def test_the_worked_fix_of_one_hot_gpu() -> None:
    settings = PPO_JOB | FIXED | {f"{R}.tensor_model_parallel_size": "4", "trainer.n_gpus_per_node": "4"}
    settings |= {"data.max_prompt_length": "512", "data.max_response_length": "512", f"{R}.n": "1"}
    context = job(settings, gpus=4, gpus_per_pod=4, open_reasons=["Imbalance", "OOMRisk"])
    for reason, evidence in (
        ("OOMRisk", {"memory_ratio": 0.98, "pool_memory_ratio": 0.24, "memory_total_bytes": 80 * GIB}),
        ("Imbalance", {"metric": "memory"}),
        ("Imbalance", {"metric": "utilization"}),
    ):
        advice = advise(finding(reason, None, evidence), context)
        assert advice[0].parameter == f"{R}.tensor_model_parallel_size"
        assert (advice[0].current, advice[0].suggested) == ("4", "2")
        assert "2 replicas" in advice[0].text
        assert "pipeline_model_parallel_size above 1" in advice[0].text
        assert all("pipeline" not in (a.parameter or "") for a in advice)


def test_smaller_groups_must_still_hold_the_weights() -> None:
    large = GRPO | {f"{M}.path": "/models/Qwen2.5-72B", f"{R}.tensor_model_parallel_size": "8"}
    assert f"{R}.tensor_model_parallel_size" not in given(
        answer(job(large), "Imbalance", "gen", {"metric": "utilization"})
    )


@pytest.mark.parametrize(
    ("verl", "enable", "pool"),
    [
        ("0.9.0", "reward.reward_model.enable", "reward.reward_model.enable_resource_pool"),
        ("0.7.1", "reward.reward_model.enable", "reward.reward_model.enable_resource_pool"),
        ("0.7.0", "reward_model.enable", "reward_model.enable_resource_pool"),
    ],
)
def test_a_reward_model_gets_a_pool_by_the_key_of_its_release(verl: str, enable: str, pool: str) -> None:
    context = job(GRPO | {enable: "True"}, verl=verl)
    advice = answer(context, "Imbalance", None, {"metric": "memory"})
    found = next(a for a in advice if a.parameter == pool)
    assert found.suggested == "true"
    assert "nnodes=1" in found.text


def test_settings_that_cannot_be_seen_give_conditions() -> None:
    context = context_of("bash run.sh", kind="RayJob", memory_total_bytes=80 * GIB)
    for stage in ("update_actor", "old_log_prob", "ref", "update_critic", "values", "gen", "update_weights", None):
        advice = answer(context, "OOMRisk", stage)
        assert advice
        assert all(a.suggested is None and a.confidence == "low" for a in advice)
    first = answer(context, "OOMRisk", "update_actor")[0]
    assert first.text.startswith(f"If {A}.use_dynamic_bsz is true, lower {A}.ppo_max_token_len_per_gpu")


def test_a_release_that_is_not_known_is_said() -> None:
    context = job(PPO_JOB, verl=None)
    found = next(a for a in answer(context, "OOMRisk", "update_critic") if "offload" in (a.parameter or ""))
    assert found.confidence == "low"
    assert "as verl 0.9.1 calls it" in found.text


def test_a_supervised_job_gets_no_keys_of_ppo() -> None:
    context = context_of("torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=/m/x-7B", verl="0.9.0")
    for reason in REASONS:
        for stage in ("update_actor", "gen", None):
            advice = answer(context, reason, stage)
            assert not [p for p in given(advice) if not p.startswith("spec.")], reason


@pytest.mark.parametrize(
    ("kind", "pod", "start"),
    [
        ("RayJob", "j-head-x1", "spec.rayClusterSpec.headGroupSpec.template.spec."),
        ("RayJob", "j-worker-x1", "spec.rayClusterSpec.workerGroupSpecs[].template.spec."),
        ("RayCluster", "j-worker-x1", "spec.workerGroupSpecs[].template.spec."),
        ("PyTorchJob", "j-master-0", "spec.pytorchReplicaSpecs.*.template.spec."),
        (None, "p", "spec."),
    ],
)
def test_fields_of_a_pod_are_named_where_the_job_has_them(kind: str | None, pod: str, start: str) -> None:
    evidence = {"shm_used_bytes": 60 * 2**20, "shm_size_bytes": 64 * 2**20}
    advice = advise(finding("SharedMemoryRisk", None, evidence, pods=[pod]), job(kind=kind))
    assert advice[0].parameter == f"{start}volumes[].emptyDir.sizeLimit"
    assert (advice[0].current, advice[0].suggested) == ("64Mi", "8Gi")
    host = {"host_used_bytes": 240 * GIB, "host_limit_bytes": 251 * GIB}
    limit = advise(finding("HostMemoryRisk", None, host, pods=[pod]), job(kind=kind))[0]
    assert limit.parameter == f"{start}containers[].resources.limits.memory"
    assert (limit.current, limit.suggested) == ("251Gi", "288Gi")


def test_host_memory_is_given_back_where_the_gpu_has_room() -> None:
    settings = GRPO | {f"{A}.fsdp_config.optimizer_offload": "True", f"{A}.fsdp_config.param_offload": "True"}
    key = f"{A}.fsdp_config.optimizer_offload"
    assert given(answer(job(settings, gpu_headroom_bytes=30 * GIB), "HostMemoryRisk", None, {}))[key] == (
        "True",
        "false",
    )
    assert given(answer(job(settings), "HostMemoryRisk", None, {}))[key] == ("True", None)
    assert key not in given(answer(job(settings, gpu_headroom_bytes=GIB), "HostMemoryRisk", None, {}))
    assert key not in given(answer(job(settings, open_reasons=["OOMRisk"]), "HostMemoryRisk", None, {}))


def test_idle_rollout_gets_more_to_do() -> None:
    slow = GRPO | {
        f"{R}.enable_chunked_prefill": "False",
        f"{R}.max_num_seqs": "32",
        "data.max_prompt_length": "8192",
    }
    parameters = given(answer(job(slow, gpu_headroom_bytes=20 * GIB), "LowUtilization", "gen", {"idle_ratio": 0.5}))
    assert list(parameters)[:3] == [
        f"{R}.enable_chunked_prefill",
        f"{R}.max_num_seqs",
        f"{R}.tensor_model_parallel_size",
    ]
    assert parameters[f"{R}.max_num_seqs"] == ("32", "256")


def test_idle_updates_get_larger_passes_if_memory_is_free() -> None:
    evidence = {"memory_total_bytes": 80 * GIB, "headroom_bytes": 40 * GIB, "utilization": 0.3}
    parameters = given(answer(job(), "LowUtilization", "update_actor", evidence))
    assert parameters[f"{A}.ppo_max_token_len_per_gpu"] == ("24576", "36864")
    full = {"memory_total_bytes": 80 * GIB, "headroom_bytes": 4 * GIB}
    assert f"{A}.ppo_max_token_len_per_gpu" not in given(answer(job(), "LowUtilization", "update_actor", full))


def test_gpus_that_the_trainer_does_not_use_are_named() -> None:
    half = GRPO | {"trainer.n_gpus_per_node": "4"}
    assert given(answer(job(half), "LowUtilization", None, {}))["trainer.n_gpus_per_node"] == ("4", "8")


def test_what_changes_learning_says_so() -> None:
    for stage in ("gen", "testing"):
        for advice in answer(job(GRPO | {f"{R}.multi_turn.enable": "True"}), "LowUtilization", stage, {}):
            if advice.parameter in ("trainer.v1.trainer_mode", f"{R}.multi_turn.max_assistant_turns"):
                assert "learning" in advice.price


def test_a_sleeping_engine_that_keeps_memory() -> None:
    awake = GRPO | {f"{R}.free_cache_engine": "False"}
    assert answer(job(awake), "RolloutMemoryNotReleased", None, {})[0].parameter == f"{R}.free_cache_engine"
    command = f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {line(GRPO)}"
    texts = [a.text for a in advise(finding("RolloutMemoryNotReleased"), context_of(command, verl="0.9.0"))]
    assert any("expandable_segments:True" in text for text in texts)
    off = answer(
        context_of(f"{line(GRPO)} +{R}.enable_sleep_mode=False", verl="0.9.0"), "RolloutMemoryNotReleased", None, {}
    )
    assert off[0].parameter == f"+{R}.enable_sleep_mode"


def test_a_leak_is_looked_for_and_growing_answers_are_bounded() -> None:
    advice = answer(job(), "MemoryGrowth", "update_actor", NEAR_THE_END)
    assert advice[0].parameter == f"{A}.ppo_max_token_len_per_gpu"
    assert advice[0].text.startswith("If growing answers")
    assert any("snapshot" in a.text for a in advice)


def test_an_unknown_reason_has_no_advice() -> None:
    assert advise(finding("Nothing"), job()) == ()


@pytest.mark.parametrize("figure", [0.0, 5e-324, 1e308, float("inf"), float("nan"), -1.0])
def test_figures_that_are_no_measurement_are_survived(figure: float) -> None:
    for reason in REASONS:
        for stage in ("update_actor", "gen", None):
            keys = ("memory_total_bytes", "peak_bytes", "missing_bytes", "headroom_bytes", "lowest_bytes", "held_bytes")
            for known in ({}, {"memory_total_bytes": 80.0 * GIB, "peak_bytes": 77.0 * GIB}):
                advise(finding(reason, stage, {**dict.fromkeys(keys, figure), **known}), job())


def test_a_share_is_never_cut_below_half_for_what_an_engine_keeps() -> None:
    kept = {"memory_total_bytes": 141 * GIB, "kept_bytes": 59 * GIB, "missing_bytes": 59 * GIB}
    advice = answer(job(memory_total_bytes=141 * GIB), "RolloutMemoryNotReleased", "update_actor", kept)
    assert given(advice)[f"{R}.gpu_memory_utilization"] == ("0.6", "0.3")
    assert any("not be enough by itself" in a.text for a in advice)


def test_a_pod_that_was_killed_gets_more_than_its_limit_whatever_was_seen_last() -> None:
    seen = {"host_used_bytes": 300 * GIB, "host_limit_bytes": 1000 * GIB, "killed": 1}
    (field, *_) = answer(job(), "HostMemoryRisk", None, seen)
    assert (field.current, field.suggested) == ("1000Gi", "1200Gi")


@pytest.mark.parametrize(("gpus", "found"), [(8, True), (0, False)])
def test_a_pod_without_gpus_holds_nothing_that_is_offloaded(gpus: int, found: bool) -> None:
    settings = {**GRPO, f"{A}.fsdp_config.optimizer_offload": "True"}
    context = job(settings, gpu_headroom_bytes=60 * GIB)
    figures = {"host_used_bytes": 60 * GIB, "host_limit_bytes": 64 * GIB, "gpus_requested": gpus}
    assert (f"{A}.fsdp_config.optimizer_offload" in given(answer(context, "HostMemoryRisk", None, figures))) is found


@pytest.mark.parametrize(
    ("kind", "stage", "found"),
    [
        pytest.param("PyTorchJob", "other", False, id="torchrun that tells no stages"),
        pytest.param("PyTorchJob", "update_actor", True, id="a trainer whose stages are told"),
        pytest.param("RayJob", "update_actor", True, id="a Ray job whose settings are out of sight"),
    ],
)
@pytest.mark.parametrize("reason", ["Imbalance", "OOMRisk"])
def test_a_job_of_torchrun_gets_no_keys_of_rl(reason: str, kind: str, stage: str | None, found: bool) -> None:
    context = context_of("bash train.sh", kind=kind, gpus=16, gpus_per_pod=8, memory_total_bytes=80 * GIB)
    figures = {**NEAR_THE_END, "metric": "utilization"}
    keys = given(advise(finding(reason, stage, figures), context))
    assert any(key.startswith("actor_rollout_ref.") for key in keys) is found


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        pytest.param({"spinning_gpus": 0, "still_gpus": 8}, "the driver waits for", id="all stand still"),
        pytest.param({"spinning_gpus": 7, "still_gpus": 1}, "wait in a collective", id="one stands still"),
        pytest.param({"spinning_gpus": 8, "still_gpus": 0}, "wait in a collective", id="all spin"),
    ],
)
def test_where_all_stand_still_the_driver_is_looked_at(figures: Mapping[str, int], words: str) -> None:
    assert words in answer(job(), "Hang", "other", figures)[0].text


def test_memory_that_is_not_the_jobs_is_looked_at_before_its_settings() -> None:
    figures = {**NEAR_THE_END, "cause": "beside_peers", "metric": "memory"}
    first, *_ = answer(job(open_reasons={"LeftoverMemory"}), "Imbalance", "gen", figures)
    assert (first.parameter, "LeftoverMemory" in first.text) == (None, True)
