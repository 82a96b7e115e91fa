# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which GPUMonitor belongs to which workload."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.controller import builders
from tests.unit.controller.builders import metadata
from verl_gpumonitor.diagnosis import REASONS
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.known_monitors import KnownMonitors
from verl_gpumonitor_operator.controller.monitors import (
    MonitorSeen,
    chosen,
    from_object,
    name_for,
    names_of,
    new_object,
)

OURS = MonitorSeen(
    namespace="train",
    name="grpo",
    uid="u1",
    generation=1,
    created_at=100.0,
    kind=JobKind.RAY_JOB,
    workload_name="grpo",
    managed=True,
)
MINE = replace(OURS, name="mine", uid="u2", created_at=200.0, managed=False)


@pytest.mark.parametrize(
    ("monitors", "best"),
    [
        pytest.param([], None, id="none"),
        pytest.param([OURS], OURS, id="ours"),
        pytest.param([OURS, MINE], MINE, id="a hand-made one comes before ours"),
        pytest.param(
            [MINE, replace(MINE, name="older", created_at=1.0)],
            replace(MINE, name="older", created_at=1.0),
            id="the oldest",
        ),
        pytest.param([replace(OURS, deleting=True)], None, id="one that is being deleted is none"),
        pytest.param([replace(OURS, workload_name="other")], None, id="of another workload"),
        pytest.param([replace(OURS, kind=JobKind.PYTORCH_JOB)], None, id="of another kind"),
    ],
)
def test_chosen(monitors: list[MonitorSeen], best: MonitorSeen | None) -> None:
    assert chosen(monitors, kind=JobKind.RAY_JOB, name="grpo") == best


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        pytest.param({}, "grpo", id="free"),
        pytest.param({"grpo": OURS}, "grpo", id="it is the workload's own"),
        pytest.param({"grpo": replace(OURS, kind=JobKind.RAY_CLUSTER)}, "grpo-rayjob", id="another kind has the name"),
        pytest.param({"grpo": replace(MINE, workload_name="x")}, "grpo-rayjob", id="a hand-made one has the name"),
    ],
)
def test_name_for(taken: dict[str, MonitorSeen], name: str) -> None:
    assert name_for(kind=JobKind.RAY_JOB, name="grpo", taken=taken) == name


def test_a_long_name_stays_a_name() -> None:
    taken = {"x" * 253: replace(OURS, workload_name="other")}
    assert len(name_for(kind=JobKind.RAY_CLUSTER, name="x" * 253, taken=taken)) == 253


def test_what_is_made_is_read_back_as_ours() -> None:
    made = new_object(kind=JobKind.PYTORCH_JOB, namespace="train", name="sft", workload_name="sft")
    assert "ownerReferences" not in made["metadata"]
    made["metadata"] |= {"uid": "u", "generation": 1}
    found = from_object(made)
    assert found is not None
    assert (found.managed, found.kind, found.workload_name) == (True, JobKind.PYTORCH_JOB, "sft")
    assert (found.retention_seconds, found.muted_reasons, found.workload_uid) == (None, frozenset(), None)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        None,
        {"workloadRef": {"kind": "Deployment", "name": "x"}},
        {"workloadRef": {"kind": "RayJob"}},
        {"workloadRef": "x"},
        [],
    ],
)
def test_a_monitor_of_nothing_is_left_out(spec: Any) -> None:
    assert from_object({"metadata": metadata("x"), "spec": spec}) is None


def test_spec_and_status_are_read() -> None:
    found = from_object(
        {
            "metadata": metadata("x", generation=4),
            "spec": {
                "workloadRef": {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "grpo"},
                "mutedReasons": ["Imbalance"],
                "retentionSeconds": 60,
            },
            "status": {"workload": {"uid": "u9", "completionTime": "1970-01-01T00:00:10Z"}},
        }
    )
    assert found is not None
    assert (found.generation, found.muted_reasons, found.retention_seconds) == (4, frozenset({"Imbalance"}), 60.0)
    assert (found.workload_uid, found.completed_at, found.managed) == ("u9", 10.0, False)


def test_the_schema_knows_each_reason_that_can_be_muted() -> None:
    definition = yaml.safe_load((Path(__file__).parents[3] / "crds" / "gpumonitor.dev_gpumonitors.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert schema["mutedReasons"]["items"]["enum"] == list(REASONS)


def test_a_second_name_that_is_cut_is_one_that_the_api_server_takes() -> None:
    assert names_of(kind=JobKind.RAY_JOB, name="x" * 245 + ".y")[1] == "x" * 245 + "-rayjob"
    assert names_of(kind=JobKind.RAY_JOB, name="x" * 245 + "-" * 8)[1] == "x" * 245 + "-rayjob"
    assert all(len(name) <= 253 for name in names_of(kind=JobKind.PYTORCH_JOB, name="x" * 253))


def test_the_last_name_is_nobody_elses() -> None:
    taken = {name: replace(OURS, name=name, workload_name=name) for name in ("a", "a-pytorchjob")}
    name = name_for(kind=JobKind.PYTORCH_JOB, name="a", taken=taken)
    assert name == names_of(kind=JobKind.PYTORCH_JOB, name="a")[2]
    assert len({one for kind in JobKind for word in ("a", "b") for one in names_of(kind=kind, name=word)[1:]}) == 16


def test_of_what_is_gone_nothing_stays() -> None:
    known = KnownMonitors()
    for number in range(3):
        for monitor in (OURS, MINE):
            known.keep(replace(monitor, namespace=f"ci-{number}"))
    assert len(list(known)) == 6
    for number in range(3):
        for monitor in (OURS, MINE):
            assert known.gone(f"ci-{number}", monitor.name, monitor.uid) is not None
        assert known.gone(f"ci-{number}", OURS.name, OURS.uid) is None
    assert not any(vars(known).values())


@pytest.mark.parametrize("workload", ["grpo", "another"])
def test_thousands_that_somebody_made_cost_no_job_its_turn(workload: str) -> None:
    known, job = KnownMonitors(), builders.job(JobKind.RAY_JOB, "grpo")
    known.keep(OURS)
    for number in range(5000):
        known.keep(replace(MINE, name=f"n{number}", uid=f"n{number}", workload_name=workload))
    begin = time.process_time()
    for _ in range(10):
        found = known.of(job)
    assert time.process_time() - begin < 2.0
    assert found is not None and found.name == ("n0" if workload == "grpo" else "grpo")


def test_one_that_changes_hands_is_found_by_its_new_workload_alone() -> None:
    known, job = KnownMonitors(), builders.job(JobKind.RAY_JOB, "grpo")
    known.keep(MINE)
    assert known.of(job) == MINE
    known.keep(replace(MINE, uid="u3", workload_name="other"))
    assert known.of(job) is None
    assert known.of(builders.job(JobKind.RAY_JOB, "other")) is not None
