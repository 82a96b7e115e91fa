# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from verl_gpumonitor.advice import context_of
from verl_gpumonitor.advice.catalogue import MEGATRON
from verl_gpumonitor.advice.config import Config

from .builders import GRPO, A, F, M, R, job, line


def config(
    settings: dict[str, str], *, verl: str | None = "0.9.0", more: str = "", module: str = "verl.trainer.main_ppo"
) -> Config:
    return context_of(f"{line(settings, module)} {more}", verl=verl).config


def test_a_value_is_what_is_said_else_followed_else_the_default() -> None:
    found = config({f"{A}.ppo_max_token_len_per_gpu": "24576"})
    assert found.integer(f"{A}.ppo_max_token_len_per_gpu") == 24576
    assert found.integer(f"{R}.log_prob_max_token_len_per_gpu") == 24576
    assert found.integer(f"{F}.log_prob_max_token_len_per_gpu") == 24576
    assert found.number(f"{R}.gpu_memory_utilization") == 0.5
    assert config({f"{A}.use_dynamic_bsz": "true"}, verl="0.4.1").flag(f"{F}.log_prob_use_dynamic_bsz") is True


@pytest.mark.parametrize(
    ("verl", "default"), [("0.8.0", 1024), ("0.9.0", 256), ("0.9.1", 256), ("0.3.0.post1", 1024), ("0.8.5", 1024)]
)
def test_defaults_are_those_of_the_release(verl: str, default: int) -> None:
    assert config({}, verl=verl).integer(f"{R}.max_num_seqs") == default


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(config({f"{R}.gpu_memory_utilization": "$SHARE"}), id="a variable"),
        pytest.param(config({}, more="--config-path=/mine"), id="a configuration of the user's own"),
        pytest.param(config({}, more="--config-name mine"), id="another name of it"),
        pytest.param(config({}, module="recipe.dapo.main_dapo"), id="a recipe has other defaults"),
        pytest.param(context_of("bash run.sh").config, id="a script"),
        pytest.param(config({}, more=f"~{R}.gpu_memory_utilization"), id="a key that was taken out"),
    ],
)
def test_what_cannot_be_known_is_none(found: Config) -> None:
    assert found.number(f"{R}.gpu_memory_utilization") is None


@pytest.mark.parametrize(
    ("module", "settings", "verl", "expected"),
    [
        pytest.param("main_ppo", {}, "0.9.0", True, id="the default from 0.9 on"),
        pytest.param("main_ppo", {"trainer.use_v1": "False"}, "0.9.0", False, id="switched off"),
        pytest.param("main_ppo", {}, "0.8.0", False, id="not yet"),
        pytest.param("main_ppo_sync", {}, "0.8.0", True, id="their preview"),
        pytest.param("main_ppo_sync", {}, None, True, id="the module tells the release"),
        pytest.param("main_ppo_sync", {}, "0.3.0.post1", False, id="a release that has none"),
    ],
)
def test_the_trainers_of_v1(module: str, settings: dict[str, str], verl: str | None, expected: bool) -> None:
    assert config(settings, verl=verl, module=f"verl.trainer.{module}").v1 is expected


def test_null_and_nonsense_decide_nothing() -> None:
    found = config({f"{R}.max_num_seqs": "null", f"{R}.n": "many", f"{A}.use_dynamic_bsz": "maybe"})
    assert (found.integer(f"{R}.max_num_seqs"), found.integer(f"{R}.n"), found.flag(f"{A}.use_dynamic_bsz")) == (
        None,
    ) * 3


@pytest.mark.parametrize(
    ("settings", "critic"),
    [
        ({"algorithm.adv_estimator": "grpo"}, False),
        ({}, True),
        ({"critic.enable": "False"}, False),
        ({"algorithm.adv_estimator": "grpo", "critic.enable": "true"}, True),
        ({"algorithm.adv_estimator": "$E"}, None),
    ],
)
def test_whether_there_is_a_critic(settings: dict[str, str], critic: bool | None) -> None:
    assert config(settings).critic is critic


def test_whether_there_is_a_reference_model() -> None:
    assert config({}).ref is False
    assert config({f"{A}.use_kl_loss": "True"}).ref is True
    assert config({"algorithm.use_kl_in_reward": "True"}).ref is True
    assert config({}, verl="0.3.0.post1").ref is True


def test_old_reward_keys_do_nothing_in_new_releases() -> None:
    assert config({"reward_model.enable": "True"}, verl="0.7.1").reward_model is True
    assert config({"reward_model.enable": "True"}, verl="0.9.0").reward_model is False
    assert config({"reward.reward_model.enable": "True"}).reward_model is True


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({f"{A}.strategy": "megatron"}, ""),
        ({"model_engine": "megatron"}, ""),
        ({}, "--config-name=ppo_megatron_trainer"),
    ],
)
def test_megatron_has_keys_of_its_own(settings: dict[str, str], more: str) -> None:
    found = config(settings, more=more)
    assert found.flavour == MEGATRON
    assert found.flag(f"{A}.megatron.param_offload") is False
    assert found.entry(f"{A}.fsdp_config.param_offload") is None


@pytest.mark.parametrize(
    ("path", "billions"),
    [
        ("/m/Qwen2.5-7B-Instruct", 7),
        ("Qwen/Qwen3-0.6B", 0.6),
        ("/m/Qwen3-30B-A3B", 30),
        ("/7B/mine", None),
        ("/m/x7Bx", None),
    ],
)
def test_the_size_of_a_model_is_in_its_name(path: str, billions: float | None) -> None:
    assert config({f"{M}.path": path}).parameters == (None if billions is None else pytest.approx(billions * 1e9))


def test_a_plus_is_put_where_the_release_needs_it() -> None:
    assert (
        job(GRPO).config.spelled("critic.ppo_infer_max_token_len_per_gpu") == "+critic.ppo_infer_max_token_len_per_gpu"
    )
    assert job(GRPO).config.spelled(f"{R}.enable_sleep_mode") == f"+{R}.enable_sleep_mode"
    assert job(GRPO).config.spelled(f"{R}.n") == f"{R}.n"
