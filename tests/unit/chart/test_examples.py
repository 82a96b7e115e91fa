# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The examples' manifests and programs, as far as they can be judged without a cluster and without Ray."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import yaml

from devcluster.versions import RAY
from tests.unit.chart.rendering import REPOSITORY, Object

EXAMPLES = REPOSITORY / "examples"
USABLE_BYTES = (80 * 1024 - 600) * 2**20
"""What a simulated A100 offers besides the driver's reserved part."""


def manifest(path: str) -> Object:
    """The one manifest of a file."""
    document: Object = yaml.safe_load((EXAMPLES / path).read_text())
    return document


@pytest.fixture
def main_ppo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in for verl's trainer, with nothing behind its imports of Ray."""
    names = ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")
    for name in names:
        module: Any = ModuleType(name)
        module.PlacementGroup = module.PlacementGroupSchedulingStrategy = module.placement_group = object
        module.actor = ModuleType("ray.actor")
        module.actor.ActorHandle = object
        monkeypatch.setitem(sys.modules, name, module)
    return load("main_ppo")


def load(name: str) -> Any:
    """Import one of the examples' programs by its path."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / "workloads" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_example_is_a_kustomization_over_the_programs() -> None:
    found = {path.parent.name: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob("*/kustomization.yaml")}
    assert set(found) == {"workloads", "rayjob-grpo", "rayjob-hot-gpu0", "pytorchjob-sft", "raycluster"}
    generator = found.pop("workloads")["configMapGenerator"][0]
    assert {path.name for path in (EXAMPLES / "workloads").glob("*.py")} == set(generator["files"])
    for name, document in found.items():
        assert {"../workloads", "../rayjob-grpo"} & set(document["resources"]), name


def test_the_rayjob_is_of_verls_shape() -> None:
    job = manifest("rayjob-grpo/rayjob.yaml")
    words = job["spec"]["entrypoint"].split()
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    overrides = dict(word.split("=", 1) for word in words[3:])
    cluster = job["spec"]["rayClusterSpec"]
    group = cluster["workerGroupSpecs"][0]
    container = group["template"]["spec"]["containers"][0]
    assert int(overrides["trainer.nnodes"]) == group["replicas"] == 2
    assert overrides["trainer.n_gpus_per_node"] == container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert cluster["rayVersion"] == RAY
    assert len(job["metadata"]["name"]) <= 47


def test_the_hot_job_differs_by_its_scenario_alone() -> None:
    patches = yaml.safe_load(manifest("rayjob-hot-gpu0/kustomization.yaml")["patches"][0]["patch"])
    assert [patch["path"] for patch in patches] == [
        "/metadata/name",
        "/spec/rayClusterSpec/workerGroupSpecs/0/template/spec/containers/0/env/0/value",
    ]
    group = manifest("rayjob-grpo/rayjob.yaml")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert group["template"]["spec"]["containers"][0]["env"][0] == {"name": "SCENARIO", "value": "balanced"}
    assert len(patches[0]["value"]) <= 47


def test_the_scenarios_are_what_they_are_called(main_ppo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    balanced = [main_ppo.work_of(rank) for rank in range(8)]
    assert {0.60 <= work.utilization <= 0.65 and 36 <= work.peak_bytes / 2**30 <= 40 for work in balanced} == {True}
    monkeypatch.setenv("SCENARIO", "hot-gpu0")
    hot, *others = [main_ppo.work_of(rank) for rank in range(8)]
    assert (hot.utilization, hot.peak_bytes) == (0.85, 78 * 2**30)
    assert hot.peak_bytes <= USABLE_BYTES
    assert {0.10 <= work.utilization <= 0.12 and 18 <= work.peak_bytes / 2**30 <= 20 for work in others} == {True}


def test_no_stage_holds_more_than_the_peak(main_ppo: Any) -> None:
    asleep, awake = main_ppo.ROLLOUT_ASLEEP, main_ppo.ROLLOUT_AWAKE
    actor = (main_ppo.ACTOR_RESIDENT, main_ppo.ACTOR_LOG_PROB, main_ppo.ACTOR_UPDATE)
    assert max(asleep + max(actor), awake + main_ppo.ACTOR_RESIDENT) == pytest.approx(1.0)


def test_the_console_line_is_verls(main_ppo: Any) -> None:
    line = main_ppo.console_line(3, {"gen": 5.0, "update_actor": 4.5})
    assert line == "step:3 - timing_s/gen:5.000 - timing_s/update_actor:4.500 - training/global_step:3"


def test_overrides_are_read_as_hydra_does(main_ppo: Any) -> None:
    assert main_ppo.overrides(["+a.b=1", "++c=x=y", "--help"]) == {"a.b": "1", "c": "x=y"}


@pytest.mark.parametrize(("node", "local_rank", "rank"), [("0", 0, "0"), ("0", 3, "3"), ("1", 0, "4"), ("1", 3, "7")])
def test_ranks_are_counted_as_torchrun_does(node: str, local_rank: int, rank: str) -> None:
    """The training-operator's RANK and WORLD_SIZE count pods, torchrun's count GPUs."""
    environment = load("sft_trainer").rank_environment(local_rank, 4, {"RANK": node, "WORLD_SIZE": "2", "HOME": "/h"})
    assert environment == {"RANK": rank, "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "8", "HOME": "/h"}


def test_the_sft_job_is_whole() -> None:
    job = manifest("pytorchjob-sft/pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"] == replicas["Worker"]
    pod = replicas["Master"]["template"]["spec"]
    assert pod["shareProcessNamespace"] is True
    assert [one["name"] for one in pod["containers"]] == ["pytorch"]
