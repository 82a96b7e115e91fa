# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever the settings, no advice breaks what verl demands. The demands are written down here a second time."""

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_gpumonitor.advice import MAX_ADVICE, Context, advise, context_of
from verl_gpumonitor.advice.catalogue import EXAMINED, FSDP, MEGATRON, entry
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.model.findings import Advice, Finding, Scope
from verl_gpumonitor.model.vocabulary import Severity

from .builders import GIB, A, F, M, R, line

STAGES = (
    "gen", "old_log_prob", "ref", "values", "update_actor", "update_critic", "update_weights", "reward", "testing",
    "save_checkpoint", "init", "other", "unknown", None,
)  # fmt: skip
FLAGS = ("True", "False", "true", "$X", "null")
SIZES = ("1", "2", "3", "4", "8", "16")
TOKENS = ("1024", "4096", "8192", "16384", "30000", "65536", "$T")
CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": ("gae", "grpo", "rloo", "$E"),
    "algorithm.use_kl_in_reward": FLAGS,
    "data.train_batch_size": ("64", "128", "256", "1000"),
    "data.max_prompt_length": ("512", "1024", "8192"),
    "data.max_response_length": ("512", "4096", "32768", "$L"),
    "data.dataloader_num_workers": ("0", "1", "8", "16"),
    f"{M}.path": ("/m/Qwen3-0.6B", "/m/Qwen2.5-7B", "/m/Llama-70B-Instruct", "/m/mine", "/m/Qwen2.5-VL-7B"),
    f"{M}.use_remove_padding": FLAGS,
    f"{M}.enable_gradient_checkpointing": FLAGS,
    f"{M}.lora_rank": ("0", "32"),
    f"{M}.use_fused_kernels": FLAGS,
    f"{A}.strategy": ("fsdp", "fsdp2", "megatron"),
    f"{A}.ppo_mini_batch_size": ("32", "64", "256", "100"),
    f"{A}.use_dynamic_bsz": FLAGS,
    f"{A}.ppo_max_token_len_per_gpu": TOKENS,
    f"{A}.ppo_micro_batch_size_per_gpu": ("1", "2", "4", "7", "32", "99999999"),
    f"{A}.ulysses_sequence_parallel_size": SIZES,
    f"{A}.fsdp_config.ulysses_sequence_parallel_size": SIZES,
    f"{A}.fsdp_config.param_offload": FLAGS,
    f"{A}.fsdp_config.optimizer_offload": FLAGS,
    f"{A}.megatron.tensor_model_parallel_size": SIZES,
    f"{A}.megatron.pipeline_model_parallel_size": SIZES,
    f"{A}.megatron.param_offload": FLAGS,
    f"{A}.use_kl_loss": FLAGS,
    f"{A}.entropy_coeff": ("0", "0.001"),
    f"{R}.n": ("1", "5", "16"),
    f"{R}.tensor_model_parallel_size": SIZES,
    f"{R}.data_parallel_size": ("1", "2"),
    f"{R}.gpu_memory_utilization": ("0.1", "0.4", "0.85", "0.95", "9", "$U"),
    f"{R}.max_num_seqs": ("16", "256", "1024"),
    f"{R}.max_num_batched_tokens": ("2048", "8192", "65536"),
    f"{R}.max_model_len": ("null", "2048", "40000"),
    f"{R}.enable_chunked_prefill": FLAGS,
    f"{R}.enforce_eager": FLAGS,
    f"{R}.free_cache_engine": FLAGS,
    f"{R}.mode": ("sync", "async"),
    f"{R}.log_prob_use_dynamic_bsz": FLAGS,
    f"{R}.log_prob_max_token_len_per_gpu": TOKENS,
    f"{R}.log_prob_micro_batch_size_per_gpu": ("1", "8", "16"),
    f"{F}.log_prob_use_dynamic_bsz": FLAGS,
    f"{F}.log_prob_max_token_len_per_gpu": TOKENS,
    f"{F}.log_prob_micro_batch_size_per_gpu": ("1", "8", "16"),
    "critic.enable": ("True", "False", "null"),
    "critic.use_dynamic_bsz": FLAGS,
    "critic.ppo_max_token_len_per_gpu": TOKENS,
    "critic.forward_max_token_len_per_gpu": TOKENS,
    "critic.ppo_micro_batch_size_per_gpu": ("1", "4", "16"),
    "critic.fsdp.param_offload": FLAGS,
    "critic.model.fsdp_config.optimizer_offload": FLAGS,
    "critic.model.use_remove_padding": FLAGS,
    "reward.reward_model.enable": FLAGS,
    "reward_model.enable": FLAGS,
    "reward_model.use_dynamic_bsz": FLAGS,
    "trainer.n_gpus_per_node": ("1", "4", "6", "8"),
    "trainer.nnodes": ("1", "2", "3"),
    "trainer.use_v1": ("True", "False"),
    "trainer.use_legacy_worker_impl": ("auto", "disable"),
    "trainer.balance_batch": FLAGS,
    "trainer.save_freq": ("-1", "1", "20"),
    "trainer.test_freq": ("-1", "5"),
    "actor_rollout_ref.nccl_timeout": ("600", "7200"),
}
MODULES = [*["verl.trainer.main_ppo"] * 6, "verl.trainer.main_ppo_sync", "recipe.dapo.main_dapo"]
LEARNING = {
    "data.train_batch_size",
    f"{A}.ppo_mini_batch_size",
    f"{R}.n",
    f"{A}.ppo_epochs",
    "data.max_response_length",
}


def drawn_settings(seed: int) -> dict[str, str]:
    """Return about half of the settings with values of any kind. By a seed: sixty choices one by one are slow."""
    dice = random.Random(seed)  # noqa: S311  # No secret.
    return {key: dice.choice(values) for key, values in CHOICES.items() if dice.random() < 0.5}


SETTINGS = st.integers(0, 2**32).map(drawn_settings)
FIGURES = (
    st.floats(0, 100).map(lambda gib: gib * GIB) | st.floats(0, 1) | st.floats(allow_nan=True, allow_infinity=True)
)
EVIDENCE = st.dictionaries(
    st.sampled_from(
        [
            "memory_total_bytes", "peak_bytes", "missing_bytes", "headroom_bytes", "growth_bytes_per_step",
            "floor_bytes", "memory_ratio", "pool_memory_ratio", "idle_ratio", "utilization",
            "host_used_bytes", "host_limit_bytes",
            "shm_used_bytes", "shm_size_bytes", "leftover_bytes", "kept_bytes", "steps_left", "xid",
        ]
    ),
    FIGURES,
)  # fmt: skip
OPEN = st.sets(st.sampled_from(["OOMRisk", "HostMemoryRisk", "Imbalance", "MemoryGrowth"]))
ROOM = st.none() | st.integers(0, 200 * GIB)


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    module = draw(st.sampled_from(MODULES))
    command = line(draw(SETTINGS), module)
    if draw(st.integers(0, 9)) == 0:
        command = "bash run.sh"
    return context_of(
        command,
        verl=draw(st.sampled_from(EXAMINED) | st.none() | st.just("0.6.0")),
        kind=draw(st.sampled_from(["RayJob", "PyTorchJob", None])),
        gpus_per_pod=draw(st.sampled_from([None, 4, 8])),
        memory_total_bytes=draw(st.sampled_from([None, 24 * GIB, 80 * GIB])),
        host_headroom_bytes=draw(ROOM),
        gpu_headroom_bytes=draw(ROOM),
        open_reasons=draw(OPEN),
    )


@st.composite
def evidence(draw: st.DrawFn) -> dict[str, float]:
    """Return figures as rules give them, and among them some that no rule would."""
    total = draw(st.sampled_from([24, 80, 141])) * GIB
    likely = {
        "memory_total_bytes": total,
        "peak_bytes": draw(st.floats(0.5, 1.0)) * total,
        "missing_bytes": draw(st.floats(0.0, 0.5)) * total,
        "idle_ratio": draw(st.floats(0, 1)),
    }
    return {**likely, **draw(EVIDENCE)} if draw(st.booleans()) else likely


@st.composite
def findings(draw: st.DrawFn) -> Finding:
    metric = draw(st.sampled_from(["memory", "utilization", "time"]))
    return Finding(
        reason=draw(st.sampled_from(["OOMRisk"] * 8 + ["LowUtilization"] * 6 + sorted(REASONS))),
        severity=Severity.WARNING,
        scope=Scope(gpus=("GPU-0",), stage=draw(st.sampled_from(STAGES))),
        message="m",
        evidence={**draw(evidence()), "metric": metric},
    )


def with_it(advice: Advice) -> dict[str, str]:
    """Return all keys that a piece of advice sets, without `+`."""
    found = dict(re.findall(r"\+?((?:[a-z_0-9]+\.)+[a-z_0-9]+)=([\w.]+)", advice.text.partition("; set ")[2]))
    return {**found, (advice.parameter or "").lstrip("+"): advice.suggested or ""}


def truth(context: Context, changes: dict[str, str], key: str) -> bool | None:
    return context.config.changed(changes).flag(key)


def check(advice: Advice, finding: Finding, context: Context) -> None:
    parameter = advice.parameter
    if parameter is None or parameter.startswith("spec."):
        return
    config, key = context.config, parameter.lstrip("+")
    version, flavour = config.versions.primary, MEGATRON if config.flavour == MEGATRON else FSDP
    changes = with_it(advice) if advice.suggested is not None else {}

    # The key is one of that release, spelled as it wants it.
    for name in changes or {key: ""}:
        assert entry(name, version=version, flavour=flavour) is not None
    known = entry(key, version=version, flavour=flavour)
    assert known is not None
    assert parameter.startswith("+") == known.plus

    # It is of a part that this job has.
    if key.startswith("critic."):
        assert config.text("algorithm.adv_estimator") not in ("grpo", "rloo") or config.flag("critic.enable")
    if key.startswith(f"{F}.") and version != "0.3.0.post1":
        assert (config.flag(f"{A}.use_kl_loss"), config.flag("algorithm.use_kl_in_reward")) != (False, False)
    assert key != f"{F}.fsdp_config.param_offload"

    # Micro batches without dynamic batches, token limits with them.
    pairs = {
        f"{A}.ppo_micro_batch_size_per_gpu": (f"{A}.use_dynamic_bsz", True),
        f"{A}.ppo_max_token_len_per_gpu": (f"{A}.use_dynamic_bsz", False),
        f"{R}.log_prob_micro_batch_size_per_gpu": (f"{R}.log_prob_use_dynamic_bsz", True),
        f"{R}.log_prob_max_token_len_per_gpu": (f"{R}.log_prob_use_dynamic_bsz", False),
        f"{F}.log_prob_micro_batch_size_per_gpu": (f"{F}.log_prob_use_dynamic_bsz", True),
        f"{F}.log_prob_max_token_len_per_gpu": (f"{F}.log_prob_use_dynamic_bsz", False),
    }
    if key in pairs:
        switch, dead = pairs[key]
        assert truth(context, changes, switch) is not dead
    if EXAMINED.index(version) >= EXAMINED.index("0.8.0"):
        assert not re.fullmatch(r"critic\.(use_dynamic_bsz|(ppo|forward)_micro_batch_size.*|forward_max_token.*)", key)
        assert key != "critic.ulysses_sequence_parallel_size"
    if config.v1:
        assert key not in ("critic.ppo_max_token_len_per_gpu", "trainer.balance_batch")
    if version == "0.8.0":
        assert key not in (f"{A}.entropy_from_logits_with_chunking", f"{A}.entropy_checkpointing")

    assert key not in LEARNING
    if advice.suggested is None:
        return

    # A value is a change, and comes only where the settings can be seen.
    assert context.launch.known
    present = config.text(key)
    assert present is None or present.lower() != advice.suggested.lower()
    after = config.changed(changes)
    prompt, response = after.integer("data.max_prompt_length"), after.integer("data.max_response_length")
    if "max_token_len_per_gpu" in key and prompt is not None and response is not None:
        role = "critic" if key.startswith("critic") else "ref" if key.startswith(F) else "actor"
        parallel = max(after.sequence_parallel(role) or 1, 1) if not key.startswith("reward") else 1
        assert int(advice.suggested) * parallel >= prompt + response
    gpus = after.gpus
    if key == f"{R}.tensor_model_parallel_size" and gpus is not None:
        assert gpus % int(advice.suggested) == 0
    if "sequence_parallel_size" in key and gpus is not None:
        assert gpus % int(advice.suggested) == 0
        assert flavour == MEGATRON or after.flag(f"{M}.use_remove_padding") is not False or key.startswith("critic")
    if key.endswith("gpu_memory_utilization"):
        assert 0.1 <= float(advice.suggested) <= 0.95
    if key.endswith("micro_batch_size_per_gpu"):
        assert int(advice.suggested) >= 1
    gpus_of_a_sequence = max(after.sequence_parallel("actor") or 1, 1)
    mini, answers = after.integer(f"{A}.ppo_mini_batch_size"), after.integer(f"{R}.n")
    if flavour == FSDP and mini and answers and gpus and gpus % gpus_of_a_sequence == 0:
        groups = gpus // gpus_of_a_sequence
        if key == f"{A}.ppo_micro_batch_size_per_gpu" and mini * answers >= groups:
            assert (mini * answers // groups) % int(advice.suggested) == 0
        if key == "trainer.n_gpus_per_node":
            assert mini * answers % groups == 0
    assert not (key.endswith("pipeline_model_parallel_size") and key.startswith(R))
    if "offload" in key:
        trouble = context.open_reasons | {finding.reason}
        assert not (advice.suggested == "true" and "HostMemoryRisk" in trouble)
        assert not (advice.suggested == "false" and "OOMRisk" in trouble)
    if key == f"{A}.use_dynamic_bsz" and not config.legacy_workers:
        assert after.flag(f"{R}.log_prob_use_dynamic_bsz") in (True, None)


@settings(max_examples=2 * settings().max_examples, deadline=None)  # 400 in `make test`
@given(findings(), contexts())
def test_no_advice_breaks_a_demand_of_verl(finding: Finding, context: Context) -> None:
    advice = advise(finding, context)
    assert len(advice) <= MAX_ADVICE
    named = [a.parameter for a in advice if a.parameter is not None]
    assert len(named) == len(set(named))
    for one in advice:
        assert one.text
        assert one.confidence in ("high", "medium", "low")
        check(one, finding, context)


@settings(max_examples=settings().max_examples // 2, deadline=None)  # 100 there
@given(findings(), st.text(), st.none() | st.text())
def test_any_command_line_is_answered(finding: Finding, command: str, verl: str | None) -> None:
    assert len(advise(finding, context_of(command, verl=verl))) <= MAX_ADVICE
