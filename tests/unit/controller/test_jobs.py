# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What foreign objects say, however odd they are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.controller.builders import GPUS, gpu_template, metadata
from verl_gpumonitor.model.kubernetes import unix_seconds
from verl_gpumonitor.model.vocabulary import Phase
from verl_gpumonitor_operator.controller.jobs import (
    JobKind,
    from_object,
    pytorch_job_phase,
    ray_cluster_gpus,
    ray_cluster_phase,
    ray_job_phase,
    timestamp,
    train_job_phase,
)


@pytest.mark.parametrize(
    ("deployment", "job", "phase"),
    [
        pytest.param(None, None, Phase.PENDING, id="a RayJob that KubeRay has not looked at is pending"),
        pytest.param("", "", Phase.PENDING, id="an empty status is pending"),
        pytest.param("Initializing", "", Phase.PENDING, id="its cluster is being made"),
        pytest.param("Waiting", "", Phase.PENDING, id="interactive mode waits for a person"),
        pytest.param("Suspending", "RUNNING", Phase.PENDING, id="it is being suspended"),
        pytest.param("Suspended", "", Phase.PENDING, id="a queue holds it back"),
        pytest.param("Retrying", "FAILED", Phase.PENDING, id="a failed attempt that is tried again has not failed"),
        pytest.param("Running", "PENDING", Phase.PENDING, id="the cluster runs, the job does not yet"),
        pytest.param("Running", "RUNNING", Phase.RUNNING, id="it runs"),
        pytest.param("Running", "SUCCEEDED", Phase.RUNNING, id="the submitter has not finished yet"),
        pytest.param("Complete", "SUCCEEDED", Phase.SUCCEEDED, id="it succeeded"),
        pytest.param("Complete", "STOPPED", Phase.STOPPED, id="complete does not mean success"),
        pytest.param("Complete", "FAILED", Phase.FAILED, id="complete and failed"),
        pytest.param("Complete", "", Phase.UNKNOWN, id="complete, and nobody says how"),
        pytest.param("Failed", "FAILED", Phase.FAILED, id="it failed"),
        pytest.param("Failed", "RUNNING", Phase.FAILED, id="its deadline passed while it ran"),
        pytest.param("ValidationFailed", "", Phase.FAILED, id="its spec is wrong"),
        pytest.param("Hibernating", "RUNNING", Phase.UNKNOWN, id="a word of a later version"),
    ],
)
def test_ray_job_phase(deployment: str | None, job: str | None, phase: Phase) -> None:
    assert ray_job_phase(deployment, job) is phase


@pytest.mark.parametrize(
    ("state", "suspended", "phase"),
    [
        pytest.param(None, False, Phase.PENDING, id="a new cluster"),
        pytest.param("ready", False, Phase.RUNNING, id="a ready cluster"),
        pytest.param("suspended", True, Phase.PENDING, id="a suspended cluster"),
        pytest.param("failed", False, Phase.PENDING, id="a cluster that failed may recover"),
        pytest.param("melting", False, Phase.UNKNOWN, id="a word of a later version"),
    ],
)
def test_ray_cluster_phase(state: str | None, suspended: bool, phase: Phase) -> None:
    assert ray_cluster_phase(state, suspended=suspended) is phase


def conditions(*types: str, false: tuple[str, ...] = ()) -> list[dict[str, str]]:
    return [{"type": item, "status": "False" if item in false else "True"} for item in types]


@pytest.mark.parametrize(
    ("given_conditions", "phase"),
    [
        pytest.param([], Phase.PENDING, id="a new job"),
        pytest.param(conditions("Created"), Phase.PENDING, id="it was created"),
        pytest.param(conditions("Created", "Running"), Phase.RUNNING, id="it runs"),
        pytest.param(conditions("Created", "Running", false=("Running",)), Phase.PENDING, id="it ran"),
        pytest.param(conditions("Created", "Restarting"), Phase.PENDING, id="its pods are made again"),
        pytest.param(conditions("Created", "Suspended"), Phase.PENDING, id="a queue holds it back"),
        pytest.param(conditions("Created", "Running", "Succeeded"), Phase.SUCCEEDED, id="an end outranks running"),
        pytest.param(conditions("Created", "Failed"), Phase.FAILED, id="it failed"),
        pytest.param([None, "x", {"type": 1}], Phase.PENDING, id="rubbish says nothing"),
    ],
)
def test_pytorch_job_phase(given_conditions: list[Any], phase: Phase) -> None:
    assert pytorch_job_phase(given_conditions) is phase


@pytest.mark.parametrize(
    ("given_conditions", "active", "phase"),
    [
        pytest.param([], 0, Phase.PENDING, id="no Job has active pods"),
        pytest.param([], 1, Phase.RUNNING, id="a Job has active pods"),
        pytest.param(conditions("Suspended"), 1, Phase.PENDING, id="it is suspended"),
        pytest.param(conditions("Complete"), 0, Phase.SUCCEEDED, id="it is complete"),
        pytest.param(conditions("Failed"), 1, Phase.FAILED, id="it failed"),
    ],
)
def test_train_job_phase(given_conditions: list[Any], active: int, phase: Phase) -> None:
    assert train_job_phase(given_conditions, [{"name": "node", "active": active}]) is phase


def test_a_ray_job_is_read_in_whole() -> None:
    body = {
        "metadata": metadata("grpo", creationTimestamp="2026-01-01T00:00:00Z"),
        "spec": {
            "rayClusterSpec": {
                "headGroupSpec": gpu_template(None),
                "workerGroupSpecs": [{"replicas": 2, **gpu_template(8)}],
            }
        },
        "status": {
            "jobDeploymentStatus": "Running",
            "jobStatus": "RUNNING",
            "rayClusterName": "grpo-x7",
            "startTime": "2026-01-01T00:01:00Z",
            "endTime": None,
            "message": "all is well",
        },
    }
    seen = from_object(JobKind.RAY_JOB, body, GPUS)
    assert seen is not None
    assert (seen.phase, seen.ray_cluster, seen.gpus_requested) == (Phase.RUNNING, "grpo-x7", 16)
    assert seen.started_at == unix_seconds("2026-01-01T00:01:00Z")
    assert seen.completed_at is None
    assert seen.message == "Running: all is well"
    assert not seen.borrows_cluster


def test_a_ray_job_with_a_cluster_selector_borrows_its_cluster() -> None:
    body = {"metadata": metadata("tune"), "spec": {"clusterSelector": {"ray.io/cluster": "shared"}}}
    seen = from_object(JobKind.RAY_JOB, body, GPUS)
    assert seen is not None
    assert seen.borrows_cluster
    assert seen.gpus_requested is None


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        pytest.param({}, 0, id="an empty spec asks for none"),
        pytest.param({"headGroupSpec": gpu_template(4)}, 4, id="the head counts"),
        pytest.param({"workerGroupSpecs": [{"replicas": 3, "numOfHosts": 2, **gpu_template(8)}]}, 48, id="hosts count"),
        pytest.param({"workerGroupSpecs": [{"minReplicas": 2, **gpu_template(1)}]}, 2, id="the least replicas count"),
        pytest.param(
            {"workerGroupSpecs": [{"replicas": 2, "suspend": True, **gpu_template(1)}]},
            0,
            id="a suspended group has none",
        ),
        pytest.param({"workerGroupSpecs": [None, 3, "x"], "headGroupSpec": []}, 0, id="rubbish has none"),
    ],
)
def test_gpus_of_a_ray_cluster(spec: dict[str, Any], gpus: int) -> None:
    assert ray_cluster_gpus(spec, GPUS) == gpus


@pytest.mark.parametrize("devices", ["1" * 400, "9" * 19, "100001", "1" * 5000])
def test_a_number_of_gpus_that_nobody_has_counts_as_none(devices: str) -> None:
    """No schema bounds it, and one that is no float would spoil the metrics of all other jobs."""
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": devices}}}]}}
    assert ray_cluster_gpus({"workerGroupSpecs": [{"replicas": 2, "template": template}]}, GPUS) == 0


def test_gpus_of_a_cluster_fit_the_status_whatever_its_replicas() -> None:
    group = {"replicas": 2**31 - 1, "numOfHosts": 2**31 - 1, **gpu_template(8)}
    assert 0 < ray_cluster_gpus({"workerGroupSpecs": [group] * 100}, GPUS) < 2**63


def test_gpus_of_a_pytorch_job_are_summed_over_replicas() -> None:
    replicas = {"Master": gpu_template(8), "Worker": {"replicas": 3, **gpu_template(8)}}
    body = {"metadata": metadata("sft"), "spec": {"pytorchReplicaSpecs": replicas}}
    seen = from_object(JobKind.PYTORCH_JOB, body, GPUS)
    assert seen is not None
    assert seen.gpus_requested == 32


def test_requests_and_limits_of_one_resource_are_not_added() -> None:
    assert GPUS.requested([({"nvidia.com/gpu": "4"}, {"nvidia.com/gpu": "4", "amd.com/gpu": 2, "cpu": "8"})]) == 6


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        pytest.param("1970-01-01T00:00:10Z", 10.0, id="whole seconds"),
        pytest.param("1970-01-01T00:00:10.500000Z", 10.5, id="microseconds"),
        pytest.param("1970-01-01T01:00:10+01:00", 10.0, id="another zone"),
        pytest.param("0001-01-01T00:00:00Z", None, id="Go's zero time is unknown"),
        pytest.param("soon", None, id="no timestamp"),
        pytest.param(12, None, id="no text"),
        pytest.param(None, None, id="nothing"),
    ],
)
def test_unix_seconds(text: object, seconds: float | None) -> None:
    assert unix_seconds(text) == seconds


def test_timestamp_is_whole_and_of_utc() -> None:
    assert timestamp(10.9) == "1970-01-01T00:00:10Z"
    assert timestamp(None) is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "headGroupSpec",
        "workerGroupSpecs",
        "pytorchReplicaSpecs",
        "clusterSelector",
        "rayClusterSpec",
        "conditions",
        "jobsStatus",
        "jobStatus",
        "jobDeploymentStatus",
        "startTime",
        "trainer",
        "state",
        "suspend",
        "replicas",
    ]
)


@given(
    kind=st.sampled_from(JobKind),
    spec=ANYTHING | st.dictionaries(FIELDS, ANYTHING, max_size=4),
    status=ANYTHING | st.dictionaries(FIELDS, ANYTHING, max_size=4),
)
def test_no_object_raises(kind: JobKind, spec: Any, status: Any) -> None:
    seen = from_object(kind, {"metadata": metadata("odd"), "spec": spec, "status": status}, GPUS)
    assert seen is not None
    assert seen.gpus_requested is None or seen.gpus_requested >= 0


def test_an_object_without_identity_is_left_out() -> None:
    assert from_object(JobKind.RAY_JOB, {"metadata": {"name": "x"}}, GPUS) is None
    assert from_object(JobKind.RAY_JOB, {}, GPUS) is None
