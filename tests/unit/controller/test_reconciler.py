# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From objects, pods and reports to GPUMonitors and Events, with time and the API server in the test's hand."""

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

import msgspec
import pytest

from tests.unit.controller.builders import GIB, gpu, gpu_template, identity, metadata, owner_of, pod, report
from tests.unit.controller.fakeapi import FakeApi
from verl_gpumonitor.diagnosis import DiagnosisLimits
from verl_gpumonitor.model.kubernetes import RAY_CLUSTER, unix_seconds
from verl_gpumonitor.model.report import GpuReport, StageCount, StageNow, StageQuality
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import GpuState, Severity, UnavailableReason
from verl_gpumonitor_operator.controller import ledger_text
from verl_gpumonitor_operator.controller.clinic import Clinic
from verl_gpumonitor_operator.controller.documents import Deployment
from verl_gpumonitor_operator.controller.events import EventRecorder
from verl_gpumonitor_operator.controller.jobs import JobKind, timestamp
from verl_gpumonitor_operator.controller.ledgers import Ledgers
from verl_gpumonitor_operator.controller.monitors import new_object
from verl_gpumonitor_operator.controller.namespaces import Namespaces, NamespaceSeen
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState, PodIdentity, PodRecord
from verl_gpumonitor_operator.controller.reconciler import Reconciler
from verl_gpumonitor_operator.controller.workloads import Workloads
from verl_gpumonitor_operator.controller.writer import StatusWriter
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import ForbiddenError, ServerFaultError
from verl_gpumonitor_operator.settings import Images, Injection, InjectionMode, Settings

OPERATOR = Settings(release="gpumonitor", namespace="gpumonitor-system", images=Images(sidecar="s:1", operator="o:1"))
SFT = owner_of(JobKind.PYTORCH_JOB, "sft")


class Life:
    """One life of a controller."""

    def __init__(self, api: FakeApi, start: float, settings: Settings, clinic: Clinic | None) -> None:
        self.api = api
        self.now = start
        loop = asyncio.get_running_loop()
        client = cast(KubeClient, api)
        self.workloads = Workloads(observer=clinic)
        self.writer = StatusWriter(client, writes_per_second=1e6, clock=loop.time)
        self.recorder = EventRecorder(client, instance="pod", rate=1e6, burst=10_000, clock=loop.time)
        self.namespaces = Namespaces()
        owner = Deployment(client, namespace=OPERATOR.namespace, name="gpumonitor-controller")
        self.ledgers = Ledgers(
            client, owner, namespace=OPERATOR.namespace, release="gpumonitor", clock=lambda: self.now
        )
        self.reconciler = Reconciler(
            workloads=self.workloads,
            namespaces=self.namespaces,
            writer=self.writer,
            recorder=self.recorder,
            settings=settings,
            limits=DiagnosisLimits(),
            ledgers=self.ledgers,
            clock=lambda: self.now,
            clinic=clinic,
        )
        for kind in JobKind:
            self.reconciler.kind_listed(kind)
        self.tasks = [asyncio.create_task(self.writer.run()), asyncio.create_task(self.recorder.run())]
        self._sequences: dict[str, int] = {}

    def begin(self) -> None:
        """Take up what the API server holds, as the first sweep does."""
        for body in self.api.of("gpumonitors").values():
            self.reconciler.monitor_seen(body)

    async def run(self, seconds: float = 0.0) -> None:
        """Let time pass, with a tick each second."""
        for _ in range(max(1, int(seconds))):
            self.now += 1.0 if seconds else 0.0
            await self.reconciler.tick()
            await self.ledgers.write(only_due=True)
            for _ in range(15):
                await asyncio.sleep(0)
            for body in self.api.of("gpumonitors").values():
                self.reconciler.monitor_seen(body)

    def job(self, phase: str | None = "Running", *, uid: str = "uid-sft", **status: Any) -> None:
        conditions = [{"type": phase, "status": "True"}] if phase else []
        self.reconciler.job_seen(
            JobKind.PYTORCH_JOB,
            {
                "metadata": metadata("sft", uid=uid, creationTimestamp=timestamp(self.now)),
                "spec": {"pytorchReplicaSpecs": {"Master": gpu_template(4)}},
                "status": {"conditions": conditions, **status},
            },
        )

    def pod(self, **more: Any) -> PodRecord:
        record = pod("m", SFT, **more)
        self.workloads.pod_seen(record)
        return record

    def report(
        self,
        *,
        used: tuple[int, ...] = (40, 40, 40, 40),
        observed: float | None = None,
        start: str = "start-01",
        stages: list[StageCount] | None = None,
        **more: Any,
    ) -> None:
        self._sequences[start] = self._sequences.get(start, int(self.now)) + 1
        seconds = observed if observed is not None else self.now
        gpus = more.pop("gpus", None) or [
            gpu(
                f"GPU-{number}",
                memory_used_bytes=gib * GIB,
                memory_peak_bytes=gib * GIB,
                observed_seconds=seconds,
                busy_seconds=seconds / 2,
                stages=stages or [],
            )
            for number, gib in enumerate(used)
        ]
        item = report(
            "m",
            sequence=self._sequences[start],
            start_id=start,
            gpus=gpus,
            started_at=1.0,
            sent_at=self.now,
            **more,
        )
        self.workloads.accept(identity("m"), item, self.now)

    async def reporting(self, seconds: float, **more: Any) -> None:
        """Let time pass with a report each five seconds."""
        for _ in range(int(seconds // 5)):
            self.report(**more)
            await self.run(5)

    @property
    def monitor(self) -> dict[str, Any]:
        return self.api.of("gpumonitors")["sft"]

    @property
    def status(self) -> dict[str, Any]:
        return copy.deepcopy(self.monitor.get("status", {}))

    @property
    def status_writes(self) -> int:
        return sum(1 for verb, path in self.api.writes if verb == "PATCH" and path.endswith("/status"))

    @property
    def ledger(self) -> str | None:
        """The job's ledger, as a ConfigMap keeps it."""
        held = [item.get("data", {}).get("uid-sft") for item in self.api.of("configmaps").values()]
        return next((text for text in held if text is not None), None)

    def condition(self, kind: str) -> tuple[str, str]:
        (found,) = [item for item in self.status["conditions"] if item["type"] == kind]
        return found["status"], found["reason"]

    @property
    def events(self) -> list[tuple[str, str, int]]:
        """(kind of the object, reason, how often)."""
        return sorted(
            (event["regarding"]["kind"], event["reason"], event.get("series", {}).get("count", 1))
            for event in self.api.of("events").values()
        )


@asynccontextmanager
async def living(
    api: FakeApi | None = None,
    start: float = 2000.0,
    settings: Settings = OPERATOR,
    clinic: Clinic | None = None,
) -> AsyncIterator[Life]:
    life = Life(api or FakeApi(), start, settings, clinic)
    await life.ledgers.load()
    life.begin()
    try:
        yield life
    finally:
        for task in life.tasks:
            task.cancel()
        await asyncio.gather(*life.tasks, return_exceptions=True)


async def test_a_job_gets_a_monitor_that_follows_it_to_its_end_and_keeps_its_last_numbers() -> None:
    async with living() as life:
        life.job(None)
        await life.run(2)
        assert life.status["phase"] == "Pending"
        assert life.status["health"] == "Unknown"
        record = life.pod()
        life.job("Running")
        await life.reporting(60)
        assert life.status["phase"] == "Running"
        assert life.status["gpus"]["text"] == "4/4"
        assert life.status["utilization"]["text"] == "50%"
        assert life.status["memory"]["text"] == "50%"
        assert life.status["health"] == "OK"
        assert life.condition("TelemetryAvailable") == ("True", "AllReporting")
        assert life.condition("OOMRisk") == ("False", "NotDetected")
        life.job("Succeeded", completionTime=timestamp(life.now))
        life.workloads.pod_gone(record)
        await life.run(60)
        ended = life.status
        assert ended["phase"] == "Succeeded"
        assert ended["gpus"]["text"] == "4/4"
        assert ended["health"] == "OK"
        life.reconciler.job_gone(JobKind.PYTORCH_JOB, "uid-sft")
        await life.run(60)
        ended["workload"]["deletionTime"] = life.status["workload"]["deletionTime"]
        assert life.status == ended
        assert len(life.workloads) == 0


async def test_a_job_so_short_that_its_only_report_comes_after_its_end_is_shown_all_the_same() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.run(5)
        life.job("Succeeded")
        life.pod(deleting=True)
        await life.run(2)
        life.report()
        await life.run(15)
        assert life.status["phase"] == "Succeeded"
        assert life.status["gpus"]["text"] == "4/4"
        assert life.status["health"] == "OK"
        assert life.status["dataQuality"]["source"] == "nvml"
        assert life.status["utilization"]["text"] == "50%"


async def test_a_pod_that_is_being_ended_holds_its_gpus_while_it_reports_them() -> None:
    async with living() as life:
        life.job()
        life.pod(gpus=6)
        await life.reporting(15)
        assert life.status["gpus"]["text"] == "4/6", "more than its spec says"
        life.pod(gpus=6, deleting=True)
        await life.reporting(10)
        assert life.status["gpus"]["text"] == "4/6"
        await life.run(120)
        assert life.status["gpus"]["text"] == "0/4"


async def test_findings_become_conditions_health_and_events_once() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(120, used=(78, 19, 19, 19))
        assert life.condition("OOMRisk") == ("True", "OOMRisk")
        assert life.condition("Imbalanced") == ("True", "Imbalance")
        assert life.status["health"] == "OOMRisk+1"
        assert life.status["worstGpus"][0]["uuid"] == "GPU-0"
        assert life.status["worstGpus"][0]["note"] == "OOMRisk, Imbalance"
        once = [
            ("GPUMonitor", "Imbalance", 1),
            ("GPUMonitor", "OOMRisk", 1),
            ("PyTorchJob", "Imbalance", 1),
            ("PyTorchJob", "OOMRisk", 1),
        ]
        assert life.events == once
        await life.reporting(600, used=(78, 19, 19, 19))
        assert life.events == once
        await life.reporting(200)
        assert life.status["health"] == "OK"
        assert ("PyTorchJob", "OOMRiskResolved", 1) in life.events


async def test_muted_reasons_are_not_said() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.run(1)
        life.monitor["spec"]["mutedReasons"] = ["Imbalance", "OOMRisk"]
        life.monitor["metadata"]["generation"] = 2
        await life.reporting(120, used=(78, 19, 19, 19))
        assert life.status["health"] == "OK"
        assert life.status["observedGeneration"] == 2
        assert life.condition("OOMRisk") == ("False", "NotDetected")
        assert life.events == []


@pytest.mark.parametrize(
    ("injected", "used", "condition", "health"),
    [
        pytest.param(None, (), ("False", "NotInjected"), "Unknown", id="nothing is seen, so nothing can be said"),
        pytest.param("1", (40, 40, 40), ("True", "Partial"), "OK", id="what is seen is well"),
        pytest.param("1", (78, 19, 19), ("True", "Partial"), "OOMRisk+1", id="what is seen is not well"),
    ],
)
async def test_muted_reasons_about_telemetry_leave_health_and_events_alone(
    injected: str | None, used: tuple[int, ...], condition: tuple[str, str], health: str
) -> None:
    async with living() as life:
        life.job()
        life.pod(injected=injected)
        await life.run(1)
        life.monitor["spec"]["mutedReasons"] = ["TelemetryUnavailable", "TelemetryPartial"]
        life.monitor["metadata"]["generation"] = 2
        await (life.reporting(120, used=used) if used else life.run(120))
        assert life.condition("TelemetryAvailable") == condition
        assert life.status["health"] == health
        assert {reason for _, reason, _ in life.events} <= {"OOMRisk", "Imbalance"}


async def test_a_restart_keeps_counters_and_repeats_no_event() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(120, used=(78, 19, 19, 19))
        before, events, writes = life.status, life.events, len(life.api.writes)
        transitions = {item["type"]: item["lastTransitionTime"] for item in before["conditions"]}
    async with living(life.api, start=life.now + 60) as again:
        again.job()
        again.reconciler.restore()
        again.pod()
        again.reconciler.listening()
        await again.run(10)
        assert len(again.api.writes) == writes, "nothing is written before the pods have reported again"
        assert again.status == before
        await again.reporting(120, used=(78, 19, 19, 19))
        assert again.events == events
        assert again.status["health"] == "OOMRisk+1"
        assert {item["type"]: item["lastTransitionTime"] for item in again.status["conditions"]} == transitions
        assert again.status["totals"]["gpuSeconds"] > before["totals"]["gpuSeconds"]


async def test_a_pod_that_ended_while_the_controller_was_away_still_counts() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(60, observed=100.0)
    async with living(life.api, start=life.now + 60) as again:
        again.job()
        again.reconciler.restore()
        again.reconciler.listening()
        again.job("Succeeded")
        await again.run(60)
        assert again.status["phase"] == "Succeeded"
        assert again.status["totals"]["gpuSeconds"] == 400.0
        assert again.status["gpus"]["text"] == "4/4"


async def test_a_job_that_went_while_the_controller_was_away_is_ended_and_retired() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
    async with living(life.api, start=life.now + 60) as again:
        again.reconciler.restore()
        again.reconciler.listening()
        await again.run(15)
        assert again.status["phase"] == "Unknown"
        assert "was not seen" in again.status["workload"]["message"]
        assert again.status["gpus"]["text"] == "4/4"
        again.now += OPERATOR.controller.retention_seconds
        await again.run(15)
        assert again.api.of("gpumonitors") == {}


async def test_a_deleted_job_is_stopped_and_its_monitor_is_kept_for_its_own_retention() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
        life.monitor["spec"]["retentionSeconds"] = 100
        life.monitor["metadata"]["generation"] = 2
        await life.run(1)
        life.reconciler.job_gone(JobKind.PYTORCH_JOB, "uid-sft")
        await life.run(60)
        assert life.status["phase"] == "Stopped"
        await life.run(60)
        assert life.api.of("gpumonitors") == {}


@pytest.mark.parametrize("away", [False, True], ids=["the controller sees it", "the controller is away"])
async def test_a_job_that_is_deleted_long_after_its_end_is_kept_from_then_on(away: bool) -> None:
    retention = OPERATOR.controller.retention_seconds
    async with living() as life:
        life.job()
        record = life.pod()
        await life.reporting(30)
        life.job("Succeeded", completionTime=timestamp(life.now))
        life.workloads.pod_gone(record)
        await life.run(60)
        ended = life.status
        life.now += 3 * retention
        await life.run(20)
        assert life.status == ended, "nothing is written while the object is there"
        if not away:
            life.reconciler.job_gone(JobKind.PYTORCH_JOB, "uid-sft")
            await life.run(20)
    async with living(life.api, start=life.now) as again:
        again.reconciler.restore()
        again.reconciler.listening()
        await again.run(20)
        gone_at = again.status["workload"].pop("deletionTime")
        assert again.now - 41 <= (unix_seconds(gone_at) or 0) <= again.now
        assert again.status["phase"] == "Succeeded"
        assert again.status["workload"] == {**ended["workload"], "deletionTime": gone_at}
        again.now += retention - 60
        await again.run(10)
        assert set(again.api.of("gpumonitors")) == {"sft"}
        again.now += 120
        await again.run(10)
        assert again.api.of("gpumonitors") == {}


async def test_the_deletion_of_a_job_is_written_once() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
        life.reconciler.job_gone(JobKind.PYTORCH_JOB, "uid-sft")
        await life.run(100)
        workload, writes = life.status["workload"], len(life.api.writes)
        assert workload["deletionTime"] == workload["completionTime"]
        await life.run(120)
        assert len(life.api.writes) == writes


async def test_a_new_run_of_the_same_name_keeps_a_summary_of_the_one_before() -> None:
    async with living() as life:
        life.job()
        record = life.pod()
        await life.reporting(60)
        life.job("Failed")
        life.workloads.pod_gone(record)
        await life.run(60)
        life.reconciler.job_gone(JobKind.PYTORCH_JOB, "uid-sft")
        life.job(None, uid="uid-second")
        await life.run(15)
        assert life.status["workload"]["uid"] == "uid-second"
        assert life.status["phase"] == "Pending"
        assert life.status["previousRun"]["uid"] == "uid-sft"
        assert life.status["previousRun"]["phase"] == "Failed"
        assert life.status["previousRun"]["utilization"] == 0.5
        assert "totals" not in life.status
        assert "memory" not in life.status


async def test_a_hand_made_monitor_is_used_and_never_deleted() -> None:
    async with living() as life:
        made = {
            "metadata": metadata("mine", uid="uid-mine", generation=3, creationTimestamp="1970-01-01T00:00:01Z"),
            "spec": {
                "workloadRef": {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "sft"},
                "retentionSeconds": 0,
            },
        }
        life.api.objects["/apis/gpumonitor.dev/v1alpha1/namespaces/train/gpumonitors/mine"] = made
        life.begin()
        life.job()
        life.pod()
        await life.reporting(30)
        assert set(life.api.of("gpumonitors")) == {"mine"}
        assert life.api.of("gpumonitors")["mine"]["status"]["phase"] == "Running"
        life.reconciler.job_gone(JobKind.PYTORCH_JOB, "uid-sft")
        await life.run(120)
        assert set(life.api.of("gpumonitors")) == {"mine"}


async def test_a_hand_made_monitor_that_comes_later_replaces_ours() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
        assert set(life.api.of("gpumonitors")) == {"sft"}
        life.api.objects["/apis/gpumonitor.dev/v1alpha1/namespaces/train/gpumonitors/mine"] = {
            "metadata": metadata("mine", uid="uid-mine", generation=1, creationTimestamp="1970-01-01T01:00:00Z"),
            "spec": {"workloadRef": {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "sft"}},
        }
        await life.reporting(30)
        assert set(life.api.of("gpumonitors")) == {"mine"}
        assert life.api.of("gpumonitors")["mine"]["status"]["phase"] == "Running"


async def test_two_kinds_of_one_name_get_two_monitors() -> None:
    async with living() as life:
        life.job()
        await life.run(2)
        life.reconciler.job_seen(
            JobKind.RAY_JOB,
            {
                "metadata": metadata("sft", uid="uid-ray"),
                "spec": {"rayClusterSpec": {"headGroupSpec": gpu_template(1)}},
            },
        )
        await life.run(2)
        assert set(life.api.of("gpumonitors")) == {"sft", "sft-rayjob"}


async def test_a_job_gets_a_monitor_also_where_both_its_names_are_those_of_others() -> None:
    async with living() as life:
        for name in ("sft", "sft-pytorchjob"):
            life.reconciler.job_seen(
                JobKind.RAY_JOB,
                {
                    "metadata": metadata(name, uid=f"uid-ray-{name}"),
                    "spec": {"rayClusterSpec": {"headGroupSpec": gpu_template(1)}},
                },
            )
        await life.run(2)
        life.job()
        await life.run(2)
        found = life.api.of("gpumonitors")
        assert len(found) == 3
        [third] = found.keys() - {"sft", "sft-pytorchjob"}
        assert found[third]["spec"]["workloadRef"] == {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": "sft",
        }
        assert found[third]["status"]["workload"]["uid"] == "uid-sft"


async def test_a_monitor_that_is_held_back_from_its_deletion_is_not_made_anew_each_second() -> None:
    async with living() as life:
        life.job()
        await life.run(2)
        life.monitor["metadata"]["deletionTimestamp"] = "1970-01-01T00:20:00Z"
        before = len(life.api.writes)
        await life.run(60)
        assert sum(1 for verb, _ in life.api.writes[before:] if verb == "POST") <= 7
        del life.api.objects[next(path for path in life.api.objects if path.endswith("/gpumonitors/sft"))]
        life.reconciler.monitor_gone("train", "sft", "made-1")
        await life.run(11)
        assert "deletionTimestamp" not in life.monitor["metadata"]


async def test_jobs_that_are_over_slow_nothing_down() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
        entry = life.reconciler._entries["uid-sft"]
        assert entry.picture is not None and entry.picture.gpus
        entry.picture = replace(entry.picture, gpus=[*entry.picture.gpus] * 20_000)
        assert life.reconciler._pace() > 10
        entry.finished = True
        assert life.reconciler._pace() == 1.0


async def test_a_job_without_gpus_gets_no_monitor() -> None:
    async with living() as life:
        life.reconciler.job_seen(JobKind.RAY_JOB, {"metadata": metadata("cpu"), "spec": {}})
        await life.run(5)
        assert life.api.of("gpumonitors") == {}


async def test_jobs_that_had_ended_before_the_first_look_get_no_monitor() -> None:
    async with living() as life:
        life.job("Succeeded")
        life.reconciler.restore()
        await life.run(5)
        assert life.api.of("gpumonitors") == {}


async def test_a_monitor_that_somebody_deletes_is_made_again() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
        life.api.objects.clear()
        life.reconciler.monitor_gone("train", "sft", "made-1")
        await life.reporting(30)
        assert life.status["phase"] == "Running"
        assert life.monitor["metadata"]["uid"] != "made-1"


async def test_pods_without_sidecar_are_listed_with_the_reason() -> None:
    async with living() as life:
        life.job()
        life.pod(injected=None)
        await life.run(60)
        assert life.condition("TelemetryAvailable") == ("False", "NotInjected")
        (listed,) = life.status["unmonitoredPods"]
        assert (listed["name"], listed["reason"]) == ("m", "NotInjected")
        assert life.status["dataQuality"]["podsUnmonitored"] == 1
        assert life.status["health"] == "TelemetryUnavailable"
        assert life.status["gpus"]["text"] == "0/4"
        assert ("PyTorchJob", "TelemetryUnavailable", 1) in life.events


NAMELESS: dict[str, Any] = {"gpus": [], "unavailable": UnavailableReason.OWNERSHIP_UNKNOWN}
"""A report of GPUs that can be read, and of which nobody says whose they are."""


def starting(life: Life, phase: str | None = None, *, main: ContainerState | None) -> None:
    """Have a pod of a Ray cluster whose own container is in this state."""
    life.job(phase)
    life.pod(labels={RAY_CLUSTER: "c"}, main=main)


async def test_a_ray_job_that_starts_is_not_called_unseen() -> None:
    async with living() as life:
        starting(life, main=ContainerState(phase=ContainerPhase.WAITING, reason="ContainerCreating"))
        await life.reporting(120, **NAMELESS)
        assert life.condition("TelemetryAvailable") == ("Unknown", "NoReportYet")
        starting(life, "Running", main=ContainerState(phase=ContainerPhase.RUNNING, started_at=life.now))
        await life.reporting(90, **NAMELESS)
        assert life.status["health"] == "Unknown"
        assert "unmonitoredPods" not in life.status
        await life.reporting(20)
        assert life.condition("TelemetryAvailable") == ("True", "AllReporting")
        assert life.status["health"] == "OK"
        assert not [reason for _, reason, _ in life.events if reason.startswith("Telemetry")]


async def test_health_is_well_as_soon_as_all_gpus_report() -> None:
    async with living() as life:
        starting(life, "Running", main=ContainerState(phase=ContainerPhase.RUNNING, started_at=life.now))
        await life.reporting(220, **NAMELESS)
        assert life.condition("TelemetryAvailable") == ("False", "OwnershipUnknown")
        assert life.status["health"] == "TelemetryUnavailable"
        await life.reporting(5)
        await life.run(5)
        assert life.status["gpus"]["text"] == "4/4"
        assert life.status["health"] == "OK"
        assert "findings" not in life.status
        told = ("PyTorchJob", "TelemetryUnavailableResolved", 1)
        assert told not in life.events, "whether it stays is known later"
        await life.reporting(30)
        assert told in life.events


async def test_silence_is_said_after_a_minute_and_old_values_are_not_shown() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(60)
        await life.run(50)
        assert "utilization" not in life.status
        assert life.status["gpus"]["text"] == "0/4"
        await life.run(30)
        assert life.condition("TelemetryAvailable") == ("False", "NotReporting")


async def test_status_is_written_on_change_and_seldom_otherwise() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
        before = life.status_writes
        await life.reporting(300)
        assert 5 <= life.status_writes - before <= 11, "drift alone is written each 30 s"


async def test_a_server_that_fails_is_asked_again_later() -> None:
    async with living() as life:
        life.api.failures = [ServerFaultError("x", status=500)] * 3
        life.job()
        life.pod()
        await life.reporting(90)
        assert life.status["phase"] == "Running"


async def test_a_namespace_that_is_being_deleted_is_left_alone() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(30)
        life.api.failures = [ForbiddenError("is being terminated", status=403)] * 1000
        before = len(life.api.writes)
        await life.reporting(100, used=(78, 19, 19, 19))
        assert len(life.api.writes) - before <= 20
        assert life.recorder.counts.refused > 0


async def test_an_older_crd_is_named() -> None:
    async with living() as life:
        life.api.pruned = {"totals"}
        life.job()
        life.pod()
        await life.reporting(60)
        assert life.writer.counts.pruned_fields == {"status.totals"}
        assert life.status["phase"] == "Running"


async def test_an_incident_is_told_on_the_job_and_the_monitor() -> None:
    async with living() as life:
        life.job()
        record = life.pod()
        await life.run(2)
        life.reconciler.report(record, reason="SidecarRescued", message="Pod m: freed.", severity=Severity.WARNING)
        await life.run(1)
        assert life.events == [("GPUMonitor", "SidecarRescued", 1), ("PyTorchJob", "SidecarRescued", 1)]


async def test_a_train_job_says_that_it_is_not_supported() -> None:
    async with living() as life:
        resources = {"limits": {"nvidia.com/gpu": 8}}
        life.reconciler.job_seen(
            JobKind.TRAIN_JOB,
            {
                "metadata": metadata("sft"),
                "spec": {"trainer": {"numNodes": 2, "resourcesPerNode": resources}},
                "status": {"jobsStatus": [{"name": "node", "active": 2}]},
            },
        )
        await life.run(5)
        assert life.status["phase"] == "Running"
        assert life.status["gpus"]["text"] == "0/16"
        assert life.condition("TelemetryAvailable") == ("False", "NotInjected")
        assert "not supported" in life.status["dataQuality"]["message"]


async def test_an_opted_out_namespace_is_named_as_the_reason_and_makes_no_event() -> None:
    async with living() as life:
        life.namespaces.seen(NamespaceSeen(name="train", inject="disabled"))
        life.job()
        life.pod(injected=None)
        await life.run(90)
        assert life.condition("TelemetryAvailable") == ("False", "OptedOut")
        assert (
            life.status["unmonitoredPods"][0]["message"]
            == "The namespace has the label gpumonitor.dev/inject: disabled."
        )
        assert life.events == []


@pytest.mark.parametrize(
    ("injection", "inject", "words"),
    [
        pytest.param(Injection(mode=InjectionMode.OPT_IN), None, "the namespace has not", id="nobody opted in"),
        pytest.param(
            Injection(excluded_namespaces=("train",)), "enabled", "injection.excludedNamespaces", id="it is excluded"
        ),
    ],
)
async def test_a_pod_that_was_never_to_be_injected_is_not_said_to_have_been_missed(
    injection: Injection, inject: str | None, words: str
) -> None:
    """As with a GPUMonitor made by hand, or a job of which some pods were chosen."""
    async with living(settings=msgspec.structs.replace(OPERATOR, injection=injection)) as life:
        life.namespaces.seen(NamespaceSeen(name="train", inject=inject))
        body = new_object(kind=JobKind.PYTORCH_JOB, namespace="train", name="mine", workload_name="sft")
        del body["metadata"]["labels"]
        await life.api.post("/apis/gpumonitor.dev/v1alpha1/namespaces/train/gpumonitors", body)
        life.job()
        life.pod(injected=None)
        await life.run(90)
        status = life.api.of("gpumonitors")["mine"]["status"]
        assert [(one["reason"], words in one["message"]) for one in status["unmonitoredPods"]] == [("OptedOut", True)]
        assert life.events == []


@pytest.mark.parametrize(
    ("inject", "injected", "monitors"),
    [
        pytest.param(None, None, set(), id="not chosen"),
        pytest.param(None, "1", {"sft"}, id="the pod was chosen"),
        pytest.param("enabled", None, {"sft"}, id="the namespace was chosen"),
    ],
)
async def test_opt_in(inject: str | None, injected: str | None, monitors: set[str]) -> None:
    opt_in = msgspec.structs.replace(OPERATOR, injection=Injection(mode=InjectionMode.OPT_IN))
    async with living(settings=opt_in) as life:
        life.namespaces.seen(NamespaceSeen(name="train", inject=inject))
        life.job()
        life.pod(injected=injected)
        await life.run(5)
        assert set(life.api.of("gpumonitors")) == monitors


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            msgspec.structs.replace(OPERATOR, injection=Injection(excluded_namespaces=("train",))), id="excluded"
        ),
        pytest.param(msgspec.structs.replace(OPERATOR, namespace="train"), id="the operator's own"),
    ],
)
async def test_an_excluded_namespace_gets_no_monitors(settings: Settings) -> None:
    async with living(settings=settings) as life:
        life.job()
        life.pod(injected=None)
        await life.run(5)
        assert life.api.of("gpumonitors") == {}


GEN = StageNow(stage="gen", role="rollout", step=3)
UPDATE = StageNow(stage="update_actor", role="actor", step=3)


async def test_stage_and_step_are_shown_within_ten_seconds_and_no_more_often() -> None:
    async with living() as life:
        life.job()
        life.pod()
        quality = StageQuality(source=StageSource.RAY_STATE, resolution_seconds=1.0, steps=3)
        await life.reporting(30, stage=GEN, stage_quality=quality)
        assert (life.status["stage"], life.status["role"], life.status["step"]) == ("gen", "rollout", 3)
        assert life.status["dataQuality"]["stages"] == {"source": "ray-state", "resolutionSeconds": 1.0}
        before = life.status_writes
        for number in range(60):
            life.report(stage=(GEN, UPDATE)[number % 2], stage_quality=quality)
            await life.run(1)
        assert 4 <= life.status_writes - before <= 7
        life.report(stage=UPDATE, stage_quality=quality)
        await life.run(11)
        assert life.status["stage"] == "update_actor"
        await life.run(120)
        assert "stage" not in life.status, "what was said two minutes ago is not now"


async def test_the_table_of_stages_is_shown_and_outlives_a_restart() -> None:
    api = FakeApi()
    counts = [StageCount("gen", "rollout", 60.0, 12.0, 60 * 300.0, 70 * GIB, 20 * GIB)]
    async with living(api) as life:
        life.job()
        life.pod()
        await life.reporting(60, stages=counts)
        assert life.status["stageTable"][1].split() == ["gen", "rollout", "100%", "-", "20%", "88%", "300W"]
        assert life.status["stages"][0]["seconds"] == 240.0
        life.workloads.pod_gone(pod("m", SFT))
        await life.run(45)
        now = life.now
    async with living(api, start=now) as again:
        again.job()
        again.reconciler.restore()
        again.reconciler.listening()
        again.workloads.pod_seen(pod("m", SFT, uid="uid-second"))
        await again.run(60)
        assert again.status["stages"][0]["seconds"] == 240.0


async def test_a_new_phase_is_written_at_once() -> None:
    async with living() as life:
        life.job(None)
        life.pod()
        await life.run(15)
        assert life.status["phase"] == "Pending"
        life.report()
        await life.run(1)
        life.job("Running")
        await life.run(2)
        assert life.status["phase"] == "Running"
        life.job("Failed", completionTime=timestamp(life.now))
        await life.run(2)
        assert life.status["phase"] == "Failed"


def faulty(*lost: int, xids: Mapping[int, dict[str, int]] | None = None) -> list[GpuReport]:
    """Four GPUs, of which these are lost, and some have had Xids."""
    return [
        gpu(
            f"GPU-{number}",
            state=GpuState.LOST if number in lost else GpuState.OK,
            error="GPU_IS_LOST" if number in lost else None,
            utilization=None if number in lost else 0.5,
            observed_seconds=100.0,
            xid_errors=(xids or {}).get(number, {}),
        )
        for number in range(4)
    ]


async def test_a_lost_gpu_is_a_fault_and_the_second_one_is_told_too() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.reporting(45)
        for lost in ((1,), (1, 2)):
            for _ in range(12):
                life.report(gpus=faulty(*lost))
                await life.run(5)
        assert life.status["health"] == "GPUFault", "what is broken is not merely unseen"
        assert life.condition("GPUFault") == ("True", "GPUFault")
        assert life.condition("ApplicationFault") == ("False", "NotDetected")
        assert life.condition("TelemetryAvailable") == ("True", "Partial")
        assert {item["uuid"]: item["note"] for item in life.status["worstGpus"][:2]} == {
            "GPU-1": "GPUFault",
            "GPU-2": "GPUFault",
        }
        notes = [
            event["note"] for event in life.api.of("events").values() if event["regarding"]["kind"] != "GPUMonitor"
        ]
        assert len(notes) == 2
        assert all(any(f"GPU {uuid} of pod m is lost" in note for note in notes) for uuid in ("GPU-1", "GPU-2"))
        await life.reporting(120)
        assert life.status["health"] == "OK"
        assert ("PyTorchJob", "GPUFaultResolved", 1) in life.events


async def test_an_xid_of_the_program_is_no_hardware() -> None:
    async with living() as life:
        life.job()
        life.pod()
        life.report(gpus=faulty(xids={2: {"31": 1}}))
        await life.run(5)
        assert life.status["health"] == "ApplicationFault"
        assert life.condition("GPUFault") == ("False", "NotDetected")
        assert ("PyTorchJob", "ApplicationFault", 1) in life.events


async def test_a_fault_that_was_open_before_a_restart_does_not_stay_for_ever() -> None:
    api = FakeApi()
    async with living(api) as life:
        life.job()
        life.pod()
        for _ in range(6):
            life.report(gpus=faulty(1))
            await life.run(5)
        assert life.condition("GPUFault")[0] == "True"
        now = life.now
    async with living(api, start=now) as again:
        again.job()
        again.reconciler.restore()
        again.pod()
        await again.reporting(30)
        assert again.condition("GPUFault") == ("False", "NotDetected")
        assert again.status["health"] == "OK"


async def test_muted_faults_are_not_shown() -> None:
    async with living() as life:
        life.job()
        life.pod()
        await life.run(3)
        life.monitor["spec"]["mutedReasons"] = ["GPUFault"]
        life.monitor["metadata"]["generation"] = 2
        await life.run(1)
        for _ in range(6):
            life.report(gpus=faulty(1))
            await life.run(5)
        assert life.status["health"] == "OK"
        assert life.condition("GPUFault") == ("False", "NotDetected")
        assert life.events == []


async def test_the_ledger_is_kept_where_nobody_has_to_read_it_and_goes_with_its_job() -> None:
    async with living() as life:
        life.job()
        record = life.pod()
        await life.reporting(60)
        assert "ledger" not in life.status
        kept = ledger_text.read(life.ledger or "")
        assert kept is not None
        assert kept.pods[record.uid].totals(gone=False).gpu_seconds > 0
        assert [path for verb, path in life.api.writes if verb == "PATCH" and "configmaps" in path], "it is kept up"
        life.job("Succeeded", completionTime=timestamp(life.now))
        life.workloads.pod_gone(record)
        await life.run(60)
        assert life.ledger is None


async def test_a_ledger_from_a_version_before_moves_out_of_the_status() -> None:
    api = FakeApi()
    async with living(api) as life:
        life.ledgers.__dict__["_refused"] = True
        life.job()
        life.pod()
        await life.reporting(60, observed=100.0)
        assert life.status["ledger"], "a controller that may not keep it elsewhere leaves it there"
        assert life.ledger is None
        gone = pod("m", SFT)
        life.workloads.pod_gone(gone)
        await life.run(60)
        now = life.now
    async with living(api, start=now) as again:
        again.job()
        again.reconciler.restore()
        again.reconciler.listening()
        await again.run(5)
        workload = again.workloads.get("uid-sft")
        assert workload is not None
        assert workload.totals().gpu_seconds == 400.0
        again.pod(uid="uid-second")
        await again.run(120)
        assert "ledger" not in again.status
        assert again.ledger is not None


async def test_a_ledger_whose_job_is_unknown_goes() -> None:
    api = FakeApi()
    async with living(api) as life:
        life.ledgers.put("uid-gone", "text")
        await life.ledgers.write()
    async with living(api) as again:
        assert again.ledgers.get("uid-gone") == "text"
        again.reconciler.restore()
        await again.ledgers.write()
        assert not [item for item in api.of("configmaps").values() if item.get("data")]


async def test_a_ledger_that_is_too_long_is_cut_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with living() as life:
        life.job()
        gone = life.pod()
        await life.reporting(30, observed=100.0)
        life.workloads.pod_gone(gone)
        for number in range(900):
            name, uid, start = f"w-{number}", str(uuid4()), uuid4().hex
            life.workloads.pod_seen(pod(name, SFT, uid=uid))
            item = report(name, start_id=start, gpus=[gpu(observed_seconds=10.0)])
            life.workloads.accept(PodIdentity(namespace="train", name=name, uid=uid), item, life.now)
        await life.run(90)
        assert life.status["totals"]["gpuSeconds"] == 9400.0
        kept = ledger_text.read(life.ledger or "")
        assert kept is not None
        assert kept.folded.gpu_seconds == 400.0
        assert 200 < len(kept.pods) < 900
    assert [record.__dict__["reason"] for record in caplog.records if "ledger" in record.message] == ["LedgerFull"]
