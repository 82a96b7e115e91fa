# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Names of the controller's series are public; unknown values have none, and what is gone leaves none."""

import asyncio
import itertools
import logging
import os
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, enable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.controller.builders import GIB, gpu_template, metadata, owner_of, pod
from tests.unit.controller.test_reconciler import GEN, Life, living
from tests.unit.test_docs import in_code
from verl_gpumonitor.model.report import StageCount, StepReport
from verl_gpumonitor_operator import logs
from verl_gpumonitor_operator.controller import main
from verl_gpumonitor_operator.controller.certificates import CertificateState
from verl_gpumonitor_operator.controller.ingest import IngestMetrics
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.lease import Lease
from verl_gpumonitor_operator.controller.metrics import ControllerCollector, Parts
from verl_gpumonitor_operator.controller.pods import PodStore
from verl_gpumonitor_operator.controller.server import HealthServer
from verl_gpumonitor_operator.controller.sweep import SweepState
from verl_gpumonitor_operator.controller.watch import Watched, WatchState

NAMES = {
    "gpumonitor_controller_certificate_failures_total",
    "gpumonitor_controller_kind_unavailable",
    "gpumonitor_controller_leading",
    "gpumonitor_controller_looks_total",
    "gpumonitor_controller_missed_deletions_total",
    "gpumonitor_controller_pod_watch_failures_total",
    "gpumonitor_controller_pods",
    "gpumonitor_controller_ready",
    "gpumonitor_controller_sweep_failures_total",
    "gpumonitor_controller_sweeps_total",
    "gpumonitor_controller_tick_lag_seconds",
    "gpumonitor_controller_watch_restarts_total",
    "gpumonitor_crd_pruned_field",
    "gpumonitor_events_total",
    "gpumonitor_events_waiting",
    "gpumonitor_monitors_created_total",
    "gpumonitor_monitors_deleted_total",
    "gpumonitor_status_writes_total",
    "gpumonitor_status_writes_waiting",
    "gpumonitor_workload_finding",
    "gpumonitor_workload_gpus_reported",
    "gpumonitor_workload_gpus_requested",
    "gpumonitor_workload_info",
    "gpumonitor_workload_memory_peak_ratio",
    "gpumonitor_workload_pod_info",
    "gpumonitor_workload_pods_unmonitored",
    "gpumonitor_workload_stage_busy_seconds_total",
    "gpumonitor_workload_stage_energy_joules_total",
    "gpumonitor_workload_stage_info",
    "gpumonitor_workload_stage_memory_peak_ratio",
    "gpumonitor_workload_stage_seconds_total",
    "gpumonitor_workload_step",
    "gpumonitor_workload_step_seconds",
    "gpumonitor_workload_utilization_ratio",
}


COUNTS = [
    StageCount("gen", "rollout", 60.0, 12.0, 6000.0, 70 * GIB, 20 * GIB),
    StageCount("epoch_1", "mine", 1.0, 0.5),
    StageCount("epoch_2", "mine", 2.0, 0.5),
]
STEPS = [StepReport(number=1, begin=0.0, end=9.0)]


def registry_of(life: Life) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(
        ControllerCollector(
            Parts(
                reconciler=life.reconciler,
                writer=life.writer,
                recorder=life.recorder,
                pods=PodStore(lambda: True),
                lease=cast(Lease, SimpleNamespace(leading=True)),
                watch=WatchState(refused=frozenset({Watched.TRAIN_JOB})),
                sweep=SweepState(absent={"RayJob"}),
                certificates=CertificateState(),
                pod_failures=lambda: 0,
                ready=lambda: True,
            )
        )
    )
    return registry


def scraped(life: Life) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Series by name and labels. Fails where one comes twice."""
    series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(generate_latest(registry_of(life)).decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in series
            series[key] = sample.value
    return series


def of_workload(life: Life) -> dict[str, float]:
    return {name: value for (name, _), value in scraped(life).items() if name.startswith("gpumonitor_workload")}


async def test_names() -> None:
    async with living() as life:
        life.writer.counts.pruned_fields = frozenset({"status.x"})
        life.job()
        life.pod()
        await life.reporting(120, used=(78, 19, 19, 19), stage=GEN, stages=COUNTS, steps=STEPS)
        found = scraped(life)
        assert {name for name, _ in found} == NAMES
        finding = {dict(labels)["reason"] for name, labels in found if name == "gpumonitor_workload_finding"}
        assert finding == {"OOMRisk", "Imbalance"}
        kinds = {labels for name, labels in found if name == "gpumonitor_controller_kind_unavailable"}
        assert kinds == {(("kind", "RayJob"), ("reason", "absent")), (("kind", "TrainJob"), ("reason", "forbidden"))}


async def test_a_program_may_say_what_it_likes_and_series_are_few() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30, stages=COUNTS)
        seconds = {
            (dict(labels)["stage"], dict(labels)["role"]): value
            for (name, labels), value in scraped(life).items()
            if name == "gpumonitor_workload_stage_seconds_total"
        }
        assert seconds == {("gen", "rollout"): 240.0, ("other", "unknown"): 12.0}


async def test_unknown_values_have_no_series() -> None:
    async with living() as life:
        life.job()
        life.pod(injected=None)
        await life.run(5)
        found = of_workload(life)
        assert found["gpumonitor_workload_gpus_reported"] == 0
        assert found["gpumonitor_workload_pods_unmonitored"] == 1
        assert not {"gpumonitor_workload_utilization_ratio", "gpumonitor_workload_memory_peak_ratio"} & found.keys()


async def test_a_workload_that_is_gone_leaves_no_series() -> None:
    async with living() as life:
        life.job()
        record = life.pod()
        await life.reporting(30)
        life.workloads.pod_gone(record)
        life.reconciler.job_gone(JobKind.PYTORCH_JOB, "uid-sft")
        await life.run(60)
        assert of_workload(life) == {}


def pods_of(life: Life) -> set[tuple[str, str, str]]:
    """Kind, workload and pod of each series that joins them; all are 1 and of the workload's namespace."""
    found = {labels: value for (name, labels), value in scraped(life).items() if name == "gpumonitor_workload_pod_info"}
    assert set(found.values()) <= {1.0}
    assert {dict(labels)["namespace"] for labels in found} <= {"train"}
    return {(by["kind"], by["workload"], by["pod"]) for by in map(dict, found)}


async def test_each_living_pod_of_a_running_job_is_named() -> None:
    async with living() as life:
        life.job()
        record = life.pod()
        life.workloads.pod_seen(pod("w-0", record.owner, phase="Pending"))
        life.workloads.pod_seen(pod("w-1", record.owner, phase="Failed"))
        life.workloads.pod_seen(pod("w-0", record.owner, uid="uid-w-0-again"))
        await life.run(5)
        assert pods_of(life) == {("PyTorchJob", "sft", "m"), ("PyTorchJob", "sft", "w-0")}
        life.job("Succeeded")
        await life.run(5)
        assert pods_of(life) == set()


async def test_pods_of_a_borrowed_cluster_are_the_clusters_and_while_it_runs_the_jobs() -> None:
    def tune(life: Life, *, deployment: str, job: str) -> None:
        life.reconciler.job_seen(
            JobKind.RAY_JOB,
            {
                "metadata": metadata("tune"),
                "spec": {"clusterSelector": {"ray.io/cluster": "shared"}},
                "status": {"rayClusterName": "shared", "jobDeploymentStatus": deployment, "jobStatus": job},
            },
        )

    of_cluster = {("RayCluster", "shared", "shared-head"), ("RayCluster", "shared", "shared-w0")}
    async with living() as life:
        spec = {"headGroupSpec": gpu_template(None), "workerGroupSpecs": [{"replicas": 1, **gpu_template(4)}]}
        life.reconciler.job_seen(JobKind.RAY_CLUSTER, {"metadata": metadata("shared"), "spec": spec})
        life.workloads.pod_seen(pod("shared-head", owner_of(JobKind.RAY_CLUSTER, "shared"), gpus=0))
        life.workloads.pod_seen(pod("shared-w0", owner_of(JobKind.RAY_CLUSTER, "shared")))
        tune(life, deployment="Running", job="RUNNING")
        await life.run(5)
        assert pods_of(life) == of_cluster | {("RayJob", "tune", name) for _, _, name in of_cluster}
        tune(life, deployment="Complete", job="SUCCEEDED")
        await life.run(5)
        assert pods_of(life) == of_cluster


async def test_pods_of_a_jobs_own_cluster_are_the_jobs_alone() -> None:
    async with living() as life:
        cluster = metadata("tune-x", owner={"kind": "RayJob", "name": "tune", "uid": "uid-tune"})
        body = {"spec": {}, "status": {"rayClusterName": "tune-x", "jobDeploymentStatus": "Running"}}
        life.reconciler.job_seen(JobKind.RAY_JOB, {"metadata": metadata("tune"), **body})
        life.reconciler.job_seen(JobKind.RAY_CLUSTER, {"metadata": cluster, "spec": {}})
        life.workloads.pod_seen(pod("tune-x-head", owner_of(JobKind.RAY_CLUSTER, "tune-x")))
        await life.run(5)
        assert pods_of(life) == {("RayJob", "tune", "tune-x-head")}


def test_no_two_processes_serve_a_series_of_the_same_name() -> None:
    served = [set(series) for series in in_code().values()]
    for one, other in itertools.combinations(served, 2):
        assert not one & other


def test_the_process_serves_no_time_of_creation_beside_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    async def ended(_: object) -> int:
        return 0

    monkeypatch.setattr(main, "parse", lambda: None)
    monkeypatch.setattr(main, "run", ended)
    monkeypatch.setattr(logs, "configure", lambda: None)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    main.main()
    try:
        registry = CollectorRegistry()
        IngestMetrics(registry).answered(200)
        assert "_created" not in generate_latest(registry).decode()
        assert codes == [0]
    finally:
        enable_created_metrics()  # type: ignore[no-untyped-call] # the package types all but this one


async def fetched(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_health_answers_while_not_ready() -> None:
    why: list[Any] = ["lists are not complete"]
    server = HealthServer(CollectorRegistry(), ready=lambda: why[0], host="127.0.0.1", port=0)
    await server.start()
    try:
        assert (await fetched(server.port, "/healthz"))[0] == 200
        assert await fetched(server.port, "/readyz") == (503, "lists are not complete\n")
        why[0] = None
        assert (await fetched(server.port, "/readyz"))[0] == 200
        assert (await fetched(server.port, "/metrics"))[0] == 200
    finally:
        await server.close()
        await asyncio.sleep(0)
