# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Names of every released verl, and names of nobody."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.vocabulary import ROLES, STAGES
from verl_gpumonitor.stages.names import MAX_NAME, Classified, Place, classify, place_of
from verl_gpumonitor.stages.tables import CLASSES, SERVER_METHODS, WORKER_METHODS, Kind, StageByRole

VERSIONS: dict[str, dict[str, tuple[str, str]]] = json.loads(
    (Path(__file__).parents[2] / "data" / "verl-stages.json").read_text()
)["versions"]


def every_name() -> Iterator[tuple[str, str, str, str]]:
    for version, names in VERSIONS.items():
        for name, (stage, role) in names.items():
            yield version, name, stage, role


def our_role(name: str, role: str) -> str:
    """Return what verl's table says in our words: SFT has a role of its own."""
    if name.startswith("TrainingWorker."):
        return "trainer"
    return "unknown" if role == "other" else role


def test_the_table_has_the_versions() -> None:
    assert list(VERSIONS) == ["0.3.0.post1", "0.4.1", "0.5.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1"]
    assert sum(1 for _ in every_name()) == 1498


@pytest.mark.parametrize("version", list(VERSIONS))
def test_every_name_of_a_version(version: str) -> None:
    wrong = []
    for its_version, name, stage, role in every_name():
        for written in (name, f"ray::{name}", f"ray::{name}\0\0  ", f"{name}()"):
            said = classify(written)
            if its_version == version and (said is None or (said.stage, said.role) != (stage, our_role(name, role))):
                wrong.append((written, said))
    assert wrong == []


def test_every_name_of_a_worker_keeps_its_meaning_as_a_local_class() -> None:
    for _, name, _, _ in every_name():
        if name.startswith("WorkerDict."):
            assert classify(f"create_colocated_worker_cls.<locals>.{name}") == classify(name)
            assert classify(f"klmIFKWorkerDict_0:0:{name}") == classify(name)


def of(stage: str, role: str, kind: Kind) -> Classified:
    return Classified(stage, role, kind)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            "WorkerDict.actor_rollout_ref_update_actor",
            of("update_actor", "actor", Kind.WORKER),
            id="a name with ref and rollout in it is neither",
        ),
        pytest.param(
            "WorkerDict.actor_rollout_ref_compute_ref_log_prob",
            of("ref", "ref", Kind.WORKER),
            id="a reference inside the actor's process",
        ),
        pytest.param(
            "WorkerDict.actor_rollout_compute_log_prob",
            of("old_log_prob", "actor", Kind.WORKER),
            id="with LoRA the reference runs as log-prob, and cannot be told by name",
        ),
        pytest.param(
            "WorkerDict.ref_compute_log_prob", of("ref", "ref", Kind.WORKER), id="log-prob of a reference of its own"
        ),
        pytest.param(
            "WorkerDict.critic_train_mini_batch",
            of("update_critic", "critic", Kind.WORKER),
            id="the same method under the critic's prefix",
        ),
        pytest.param("WorkerDict.critic_infer_batch", of("values", "critic", Kind.WORKER), id="values since 0.7"),
        pytest.param(
            "WorkerDict.actor_rollout_ref_from_a_later_version",
            of("other", "actor", Kind.WORKER),
            id="a later method is other, of the prefix's role",
        ),
        pytest.param("WorkerDict.my_own_method", of("other", "unknown", Kind.WORKER), id="a method of a user"),
        pytest.param(
            "klmIFKWorkerDict_0:0:WorkerDict.__init__",
            of("init", "unknown", Kind.WORKER),
            id="a constructor, which Ray writes with the actor's name",
        ),
        pytest.param(
            "FusedWorker_actor_rollout_critic._fuw_execute",
            of("other", "unknown", Kind.WORKER),
            id="a fused worker tells nothing",
        ),
        pytest.param(
            "FusedWorker_actor_rollout.__init__", of("init", "unknown", Kind.WORKER), id="but that it is built"
        ),
        pytest.param("TrainingWorker.train_batch", of("update_actor", "trainer", Kind.WORKER), id="SFT under Ray"),
        pytest.param("vLLMHttpServer.generate", of("gen", "rollout", Kind.SERVER), id="a rollout server"),
        pytest.param("vLLMHttpServerForPD.generate", of("gen", "rollout", Kind.SERVER), id="a server of later make"),
        pytest.param("AgentLoopWorkerTQ.generate_sequences", of("gen", "rollout", Kind.HELPER), id="agent loop"),
        pytest.param("RewardLoopWorker.compute_score", of("reward", "reward", Kind.HELPER), id="reward on CPU"),
        pytest.param("compute_reward_async", of("reward", "reward", Kind.HELPER), id="a plain task of reward"),
        pytest.param("OneStepTaskRunner.run", of("other", "driver", Kind.DRIVER), id="a driver"),
        pytest.param("main_task", of("other", "driver", Kind.DRIVER), id="the driver of old"),
        pytest.param("VLLM::Worker_DP0_TP3", of("other", "rollout", Kind.ENGINE), id="vLLM's worker"),
        pytest.param("VLLM::EngineCore_DP0", of("other", "rollout", Kind.ENGINE), id="vLLM's core"),
        pytest.param("sglang::scheduler_TP0", of("other", "rollout", Kind.ENGINE), id="SGLang's scheduler"),
        pytest.param("MyActor.step", of("other", "unknown", Kind.OTHER), id="an actor of nobody"),
        pytest.param("MyActor.__init__", of("init", "unknown", Kind.OTHER), id="and its constructor"),
        pytest.param("MyWorkerDict.actor_update_actor", of("other", "unknown", Kind.OTHER), id="no substring"),
        pytest.param("gen", of("other", "unknown", Kind.OTHER), id="a plain task by the name of a stage"),
        pytest.param("ray::IDLE", None, id="an idle worker of Ray"),
        pytest.param("ray::WorkerDict", None, id="a worker between two calls"),
        pytest.param("create_colocated_worker_cls.<locals>.WorkerDict", None, id="its class, as Ray tells it"),
        pytest.param("ray::vLLMHttpServer\0\0\0", None, id="a server between two calls"),
        pytest.param("ray::TaskRunnerV1", None, id="a runner that does not run"),
        pytest.param("", None, id="an empty title"),
        pytest.param("ray::", None, id="a title of the prefix alone"),
        pytest.param(" \0\0", None, id="a title of padding"),
        pytest.param("x" * 5000, of("other", "unknown", Kind.OTHER), id="a title of any length"),
        pytest.param("WorkerDict." * 90, of("other", "unknown", Kind.WORKER), id="an empty method"),
        pytest.param("アクター.更新", of("other", "unknown", Kind.OTHER), id="a title in any script"),
    ],
)
def test_classify(name: str, said: Classified | None) -> None:
    assert classify(name) == said


@pytest.mark.parametrize(
    ("actor_name", "name", "stage", "role"),
    [
        pytest.param("vllm_server_0_0", "vLLMHttpServer.generate", "gen", "rollout", id="of the policy"),
        pytest.param("vllm_server_reward_0_0", "vLLMHttpServer.generate", "reward", "reward", id="of a reward model"),
        pytest.param("vllm_server_reward_0_0", "vLLMHttpServer.wake_up", "reward", "reward", id="which wakes up"),
        pytest.param("sglang_server_teacher_1_0", "SGLangHttpServer.generate", "gen", "teacher", id="of a teacher"),
        pytest.param(
            "rollout_teacher_0CheckpointEngineWorker_0:1",
            "CheckpointEngineWorker.update_weights",
            "other",
            "teacher",
            id="whose weights nobody updates",
        ),
        pytest.param("abc123WorkerDict_0:1", "WorkerDict.ref_init_model", "init", "ref", id="a worker"),
        pytest.param("server_reward_" * 900, "WorkerDict.ref_init_model", "init", "ref", id="anything"),
    ],
)
def test_the_actors_name_tells_what_a_server_is_for(actor_name: str, name: str, stage: str, role: str) -> None:
    said = classify(name, actor_name=actor_name)
    assert said is not None
    assert (said.stage, said.role) == (stage, role)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param("klmIFKWorkerDict_0:5", Place(0, 5), id="of the first node"),
        pytest.param("abc_WorkerDict_12:0", Place(12, 0), id="of the thirteenth"),
        pytest.param("FusedWorker_actor_critic_0:1", Place(0, 1), id="a fused worker"),
        pytest.param("vllm_server_0_1", None, id="a server, whose numbers mean another thing"),
        pytest.param("klmIFKWorkerDict_0:5 ", None, id="not at the end"),
        pytest.param("WorkerDict_0:12345", None, id="no rank that large"),
        pytest.param("WorkerDict_0:²", None, id="no digit"),
        pytest.param("", None, id="no name"),
        pytest.param("9" * 100_000 + "WorkerDict_1:2", Place(1, 2), id="a long one"),
    ],
)
def test_place_of(name: str, place: Place | None) -> None:
    assert place_of(name) == place


@given(st.text(), st.text())
def test_whatever_the_name_the_words_are_ours(name: str, actor_name: str) -> None:
    for text in (name, f"WorkerDict.{name}", f"{name}.generate", f"ray::{name}", f"{name}_1:2"):
        said = classify(text, actor_name=actor_name)
        assert said is None or (said.stage in STAGES and said.role in ROLES)
        place_of(text)


def test_the_bound_of_the_length_is_exact() -> None:
    assert classify("ray::" + "\0" * (MAX_NAME - 5)) is None
    assert classify("ray::" + "\0" * (MAX_NAME - 4)) == of("other", "unknown", Kind.OTHER)


def test_the_tables_use_our_words_alone() -> None:
    stages = {stage for rule in CLASSES for stage in rule.stages.values()} | set(SERVER_METHODS.values())
    for stage in stages | set(WORKER_METHODS.values()):
        words = {stage.default, stage.stage} if isinstance(stage, StageByRole) else {stage}
        assert words <= set(STAGES)
    assert {rule.role for rule in CLASSES} <= set(ROLES)
