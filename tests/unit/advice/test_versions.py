# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.advice.catalogue import EXAMINED, FSDP, entry, versions_of
from verl_gpumonitor.advice.settings import parse_launch
from verl_gpumonitor.advice.versions import VersionRange, guess

PPO = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    ("said", "primary", "candidates"),
    [
        pytest.param("0.8.0", "0.8.0", ("0.8.0",), id="an examined one"),
        pytest.param("0.3.0.post1", "0.3.0.post1", ("0.3.0.post1",), id="a post release"),
        pytest.param("v0.7.1", "0.7.1", ("0.7.1",), id="a tag"),
        pytest.param("0.6.0", "0.6.1", ("0.5.0", "0.6.1"), id="the later one of the same minor release is nearer"),
        pytest.param("0.3.1", "0.3.0.post1", ("0.3.0.post1", "0.4.1"), id="so is the earlier one"),
        pytest.param("0.10.2", "0.9.1", ("0.9.1",), id="newer than all: the newest"),
        pytest.param("0.2.0", "0.3.0.post1", ("0.3.0.post1",), id="older than all: the oldest"),
        pytest.param("1.0.dev3+g123", "0.9.1", ("0.9.1",), id="a source checkout"),
    ],
)
def test_a_version_that_is_said(said: str, primary: str, candidates: tuple[str, ...]) -> None:
    found = guess(parse_launch(f"{PPO} trainer.use_v1=True"), ["WorkerGroupRegisterCenter"], said=said)
    assert (found.primary, found.candidates, found.said) == (primary, candidates, said)


@pytest.mark.parametrize(
    ("line", "names", "first", "last"),
    [
        pytest.param("", [], "0.3.0.post1", "0.9.1", id="no evidence: all"),
        pytest.param(f"{PPO} trainer.use_v1=False", [], "0.9.0", "0.9.1", id="a new key"),
        pytest.param(f"{PPO} critic.model.fsdp_config.param_offload=True", [], "0.3.0.post1", "0.7.1", id="an old key"),
        pytest.param(f"{PPO} +trainer.use_v1=False", [], "0.3.0.post1", "0.9.1", id="a key that is added says nothing"),
        pytest.param(f"{PPO} ray_kwargs.x=1", ["ray::critic_compute_values()"], "0.6.1", "0.7.1", id="both together"),
        pytest.param("", ["TaskRunnerV1.run", "WorkerDict.actor_rollout_update_actor"], "0.9.0", "0.9.1", id="a class"),
        pytest.param("", ["vLLMHttpServer.wake_up"], "0.6.1", "0.9.1", id="a server wakes up in all releases"),
        pytest.param("", ["WorkerDict.wake_up"], "0.4.1", "0.7.0", id="a worker in old ones only"),
        pytest.param("python3 -m verl.trainer.main_ppo_sync", [], "0.8.0", "0.8.0", id="a module"),
        pytest.param(
            f"{PPO} trainer.use_v1=True ray_init.num_cpus=8", [], "0.9.0", "0.9.1", id="a contradiction is left out"
        ),
    ],
)
def test_a_version_that_is_narrowed(line: str, names: list[str], first: str, last: str) -> None:
    found = guess(parse_launch(line), names)
    assert (found.candidates[0], found.candidates[-1], found.primary) == (first, last, last)


@given(st.text(), st.lists(st.text()), st.none() | st.text())
def test_it_takes_any_words(line: str, names: list[str], said: str | None) -> None:
    found = guess(parse_launch(line), names, said=said)
    assert found.primary in found.candidates
    assert set(found.candidates) <= set(EXAMINED)


def test_ranges_say_themselves() -> None:
    assert VersionRange(candidates=("0.8.0", "0.9.0"), primary="0.9.0").text == "0.8.0 to 0.9.0"
    assert VersionRange(candidates=("0.8.0",), primary="0.8.0").text == "0.8.0"
    assert VersionRange(said="0.6.0").text == "0.6.0"


def test_the_catalogue_knows_what_moved() -> None:
    new, old = "critic.fsdp.param_offload", "critic.model.fsdp_config.param_offload"
    assert entry(new, version="0.7.1", flavour=FSDP) is None
    assert entry(old, version="0.8.0", flavour=FSDP) is None
    infer = entry("critic.ppo_infer_max_token_len_per_gpu", version="0.9.0", flavour=FSDP)
    assert infer is not None
    assert (infer.plus, infer.default) == (True, "32768")
    assert versions_of(new) == {"0.8.0", "0.9.0", "0.9.1"}
