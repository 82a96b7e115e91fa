# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The definition of GPUMonitor: one source, full, bounded, and true to what the programs write."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.chart.rendering import CHART, REPOSITORY, Chart, Object, Rendered
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import GpuState, Phase
from verl_gpumonitor_operator.controller import ledger_text

NAME = "gpumonitors.gpumonitor.dev"
SOURCE = CHART / "files" / "gpumonitor.dev_gpumonitors.yaml"

GOOD: Object = {
    "apiVersion": "gpumonitor.dev/v1alpha1",
    "kind": "GPUMonitor",
    "metadata": {"name": "grpo-8b"},
    "spec": {
        "workloadRef": {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "grpo-8b"},
        "mutedReasons": ["Imbalance"],
        "retentionSeconds": 3600,
    },
    "status": {
        "observedGeneration": 1,
        "phase": "Running",
        "stage": "update_actor",
        "role": "actor",
        "step": 42,
        "health": "OOMRisk+1",
        "workload": {"uid": "u", "startTime": "2026-01-02T03:04:05Z", "message": "", "rayCluster": "grpo-8b-x"},
        "gpus": {"requested": 16, "reported": 16, "text": "16/16"},
        "utilization": {"mean": 0.71, "text": "71%"},
        "memory": {"peakRatio": 0.91, "peakBytes": 77, "totalBytes": 85, "text": "91%"},
        "dataQuality": {
            "source": "nvml",
            "podsMonitored": 3,
            "podsUnmonitored": 0,
            "gapsSeconds": 0.5,
            "lostStarts": 0,
            "stages": {"source": "ray-state", "resolutionSeconds": 1.0, "reason": "x", "message": "…"},
            "diagnosis": {"gpus": 16, "steps": 4, "notJudged": [{"reason": "OOMRisk", "message": "…"}]},
        },
        "totals": {"gpuSeconds": 1.5, "busySeconds": 1.0, "energyJoules": 400.0},
        "worstGpus": [
            {"pod": "w-0", "uuid": "GPU-0", "index": 0, "state": "ok", "utilization": 1, "powerWatts": 300.5}
        ],
        "secondsPerStep": 81.5,
        "launch": {
            "program": "verl.trainer.main_ppo",
            "overrides": ["a.b=1"],
            "verlVersion": "0.9.1",
            "verlVersionGuess": "0.8.0 to 0.9.1",
            "source": "spec",
        },
        "pools": [{"name": "rollout", "stage": "gen", "role": "rollout", "gpus": 8}],
        "stageTable": ["STAGE  ROLE", "gen    rollout"],
        "stages": [{"stage": "gen", "role": "rollout", "seconds": 4.5, "share": 0.4, "secondsPerStep": 30.25}],
        "unmonitoredPods": [{"name": "w-1", "reason": "NotInjected", "message": "…"}],
        "recommendations": [{"reason": "OOMRisk", "parameter": "a.b", "suggested": "1"}],
        "conditions": [
            {
                "type": "OOMRisk",
                "status": "True",
                "reason": "OOMRisk",
                "message": "…",
                "lastTransitionTime": "2026-01-02T03:04:05Z",
            }
        ],
        "previousRun": {"uid": "v", "phase": "Failed", "utilization": 0.5, "memoryPeakRatio": 0.9, "health": "OK"},
    },
}


@pytest.fixture(scope="module")
def version() -> Object:
    """The one served version."""
    versions: list[Object] = yaml.safe_load(SOURCE.read_text())["spec"]["versions"]
    assert len(versions) == 1
    return versions[0]


@pytest.fixture(scope="module")
def schema(version: Object) -> Object:
    """Its schema."""
    found: Object = version["schema"]["openAPIV3Schema"]
    return found


def below(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Every schema within a schema, with its path."""
    yield path, schema
    for name, one in schema.get("properties", {}).items():
        yield from below(one, f"{path}.{name}")
    if "items" in schema:
        yield from below(schema["items"], f"{path}[]")


def refused(schema: Object, document: Object) -> bool:
    """Whether the schema refuses a document, or has no place for one of its fields."""
    try:
        jsonschema.validate(document, closed(schema))
    except jsonschema.ValidationError:
        return True
    return False


def closed(schema: Object) -> Object:
    """The schema with unknown fields refused, where the API server would drop them."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: closed(one) for name, one in schema["properties"].items()}
        result["additionalProperties"] = False
    if "items" in schema:
        result["items"] = closed(schema["items"])
    return result


def changed(path: str, value: object) -> Object:
    """GOOD with another value at a dotted path."""
    document: Any = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = path.split(".")
    at = document
    for name in parents:
        at = at[int(name)] if name.isdigit() else at[name]
    at[last] = value
    return dict(document)


def test_a_full_object_is_taken(schema: Object) -> None:
    open_metadata = {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}
    assert not refused(open_metadata, GOOD)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("spec.workloadRef", {"kind": "RayJob", "name": "x"}, id="a reference without version"),
        pytest.param("spec.workloadRef.kind", "Job", id="a kind that is not watched"),
        pytest.param("spec.retentionSeconds", -1, id="a negative retention"),
        pytest.param("spec.mutedReasons", ["A"] * 33, id="too many muted reasons"),
        pytest.param("status.phase", "Done", id="a phase of another word"),
        pytest.param("status.utilization.mean", 71, id="a ratio in percent"),
        pytest.param("status.utilization.mean", -1, id="a sentinel for unknown"),
        pytest.param("status.memory.peakBytes", -1, id="negative bytes"),
        pytest.param("status.worstGpus", [{"pod": "p"}] * 17, id="more than the worst 16 GPUs"),
        pytest.param("status.unmonitoredPods", [{"name": "p"}] * 17, id="more than 16 unmonitored pods"),
        pytest.param("status.stages", [{"stage": "s"}] * 17, id="more than 16 stages"),
        pytest.param("status.stages.0.share", 40, id="a share in percent"),
        pytest.param("status.launch.overrides", ["a=1"] * 25, id="more settings than 24"),
        pytest.param("status.pools", [{"name": "p"}] * 9, id="more than 8 pools"),
        pytest.param("status.dataQuality.stages.source", "guess", id="a source of stages of another word"),
        pytest.param("status.recommendations", [{"reason": "r"}] * 9, id="more than 8 recommendations"),
        pytest.param("status.worstGpus.0.powerWatts", 4294967.295, id="NVML's sentinel as power"),
        pytest.param("status.conditions.0.status", "yes", id="a condition of another word"),
        pytest.param("status.conditions.0.reason", "", id="a condition without reason"),
        pytest.param("status.step", 1.5, id="half a step"),
        pytest.param("status.everyGpu", [], id="a field that nobody knows"),
    ],
)
def test_nonsense_is_refused(schema: Object, path: str, value: object) -> None:
    open_metadata = {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}
    assert refused(open_metadata, changed(path, value))


def test_every_field_is_described_and_bounded(schema: Object) -> None:
    for path, one in below(schema):
        if path not in ("", ".metadata") and not path.endswith("[]"):
            assert one.get("description"), f"{path} has no description"
        if one["type"] == "array":
            assert "maxItems" in one, f"{path} has no bound"
        if one["type"] == "string" and path.startswith((".spec", ".status")):
            assert {"maxLength", "enum", "format"} & set(one), f"{path} has no bound"
        if one["type"] in ("integer", "number"):
            assert "minimum" in one, f"{path} has no bound"


def test_the_sets_are_the_vocabularys(schema: Object) -> None:
    status = schema["properties"]["status"]["properties"]
    assert status["phase"]["enum"] == list(Phase)
    assert status["previousRun"]["properties"]["phase"]["enum"] == list(Phase)
    assert status["worstGpus"]["items"]["properties"]["state"]["enum"] == list(GpuState)
    assert status["dataQuality"]["properties"]["stages"]["properties"]["source"]["enum"] == list(StageSource)


def test_the_bound_of_the_ledger_is_the_writers(schema: Object) -> None:
    assert schema["properties"]["status"]["properties"]["ledger"]["maxLength"] == ledger_text.MAX_WRITTEN


def test_what_a_person_sees(version: Object) -> None:
    columns = [(one["name"].upper(), one["jsonPath"]) for one in version["additionalPrinterColumns"]]
    assert columns[:9] == [
        ("KIND", ".spec.workloadRef.kind"),
        ("PHASE", ".status.phase"),
        ("STAGE", ".status.stage"),
        ("STEP", ".status.step"),
        ("GPUS", ".status.gpus.text"),
        ("UTIL", ".status.utilization.text"),
        ("MEM-PEAK", ".status.memory.text"),
        ("HEALTH", ".status.health"),
        ("AGE", ".metadata.creationTimestamp"),
    ]
    assert all(one["priority"] == 1 for one in version["additionalPrinterColumns"][9:])


def test_columns_show_fields_that_exist(version: Object, schema: Object) -> None:
    paths = {path for path, _ in below(schema)}
    for column in version["additionalPrinterColumns"]:
        assert column["jsonPath"] in paths | {".metadata.creationTimestamp"}


def test_the_reference_cannot_be_changed(schema: Object) -> None:
    rules = schema["properties"]["spec"]["properties"]["workloadRef"]["x-kubernetes-validations"]
    assert "self == oldSelf" in [one["rule"] for one in rules]


def test_the_chart_renders_the_one_source_and_keeps_it(default: Rendered, chart: Chart) -> None:
    rendered = default.get("CustomResourceDefinition", NAME)
    source = yaml.safe_load(SOURCE.read_text())
    assert rendered["spec"] == source["spec"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert (REPOSITORY / "crds" / SOURCE.name).read_bytes() == SOURCE.read_bytes()
    assert not chart.render({"crds": {"install": False}}).of("CustomResourceDefinition")
    assert not (CHART / "crds").exists(), "Helm never upgrades what lies there"
