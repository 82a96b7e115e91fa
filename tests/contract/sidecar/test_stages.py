# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The real sidecar and stages: marks by datagram, a head's State API, a head's word, and what a broken Ray can do."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
import simgpu

from tests.contract.sidecar.conftest import Start
from tests.contract.sidecar.controller import Controller
from tests.contract.sidecar.ray import Ray, agent_page
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.marks import Mark, MarkState, encode
from verl_gpumonitor.model.report import PodStages, RayStage, Report, ReportAnswer
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor_sidecar.settings import ENV_MARKS_PORT

IP = "10.0.0.9"
UPDATE = "WorkerDict.actor_rollout_ref_update_actor"


@pytest.fixture
def ray() -> Iterator[Ray]:
    running = Ray()
    yield running
    running.close()


def on_ray(ray: Ray, node_type: str, requested: int = 8) -> dict[str, str]:
    return {
        wiring.ENV_GPUS_REQUESTED: str(requested),
        wiring.ENV_RAY_NODE_TYPE: node_type,
        wiring.ENV_RAY_METRICS_URL: ray.url + "/metrics",
        wiring.ENV_RAY_DASHBOARD_URL: ray.url,
        wiring.ENV_POD_IP: IP,
    }


def listing(result: list[dict[str, object]]) -> bytes:
    return json.dumps({"result": True, "msg": "", "data": {"result": {"result": result, "warnings": None}}}).encode()


def serve_state(ray: Ray, *names: str) -> float:
    """Let tasks of these names run since a second ago; return when they began."""
    began = round(time.time() - 1.0, 3)
    tasks: list[dict[str, object]] = [
        {
            "task_id": f"t{number}",
            "name": name,
            "state": "RUNNING",
            "node_id": "n0",
            "actor_id": "",
            "job_id": "01000000",
            "worker_pid": 100 + number,
            "start_time_ms": int(began * 1000),
        }
        for number, name in enumerate(names)
    ]
    ray.pages["/api/v0/tasks"] = listing(tasks)
    ray.pages["/api/v0/actors"] = listing([])
    ray.pages["/api/v0/nodes"] = listing([{"node_id": "n0", "node_ip": IP, "resources_total": {"GPU": 8.0}}])
    job = {"job_id": "01000000", "submission_id": "raysubmit_1", "status": "RUNNING", "entrypoint": "python -m x k=v"}
    ray.pages["/api/jobs/"] = json.dumps([job]).encode()
    return began


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_a_head_counts_its_own_stages_and_reports_those_of_the_cluster(
    gpus: simgpu.StateFile, start: Start, ray: Ray, controller: Controller, reporting: dict[str, str]
) -> None:
    began = serve_state(ray, UPDATE)
    sidecar = start(**on_ray(ray, "head"), **reporting)
    sidecar.wait(lambda _: sidecar.value("gpumonitor_gpu_observed_seconds_total", stage="update_actor", gpu="3"))
    assert sidecar.value("gpumonitor_stage_info", stage="update_actor", role="actor") == 1
    assert sidecar.value("gpumonitor_gpu_power_watts", role="actor", gpu="3") is not None
    controller.wait_for(
        lambda reports: any(report.cluster_stages and report.cluster_stages.nodes for report in reports)
    )
    told = next(report.cluster_stages for report in controller.reports if report.cluster_stages is not None)
    assert told.source is StageSource.RAY_STATE
    (node,) = told.nodes
    assert (node.node_ip, [stage.stage for stage in node.intervals]) == (IP, ["update_actor"])
    assert node.intervals[0].begin == pytest.approx(began, abs=0.01)
    jobs = [job for report in controller.reports for job in report.ray_jobs]
    assert {(job.submission_id, job.entrypoint) for job in jobs} == {("raysubmit_1", "python -m x k=v")}


@pytest.mark.slow
def test_a_head_without_gpus_speaks_for_its_cluster(
    start: Start, ray: Ray, controller: Controller, reporting: dict[str, str]
) -> None:
    serve_state(ray, UPDATE)
    sidecar = start(**on_ray(ray, "head", requested=0), **reporting)
    controller.wait_for(
        lambda reports: any(report.cluster_stages and report.cluster_stages.nodes for report in reports)
    )
    assert "gpumonitor_stage_seconds_total" not in sidecar.samples()


def test_a_head_tells_what_runs_of_verls_own_and_nothing_of_the_users(
    start: Start, ray: Ray, controller: Controller, reporting: dict[str, str]
) -> None:
    serve_state(ray, UPDATE, "vLLMHttpServer.sleep", "TaskRunnerV1.run", "MyJudge.hf_abcdefghijklmnop")
    start(**on_ray(ray, "head", requested=0), **reporting)
    controller.wait_for(lambda reports: any(job.ray_names for report in reports for job in report.ray_jobs), 20.0)
    (told, *_) = [job.ray_names for report in controller.reports for job in report.ray_jobs if job.ray_names]
    assert told == ["TaskRunnerV1", "sleep", "vLLMHttpServer"]


def test_a_dashboard_that_answers_with_something_else_is_said(
    gpus: simgpu.StateFile, start: Start, ray: Ray, controller: Controller, reporting: dict[str, str]
) -> None:
    ray.pages["/metrics"] = agent_page(list(range(8)))
    ray.pages["/api/v0/tasks"] = b"<html>"
    sidecar = start(**on_ray(ray, "head"), **reporting)
    sidecar.wait(lambda _: sidecar.value("gpumonitor_stage_source_info", reason="StateApiUnusable"))
    controller.wait_for(lambda reports: bool(reports) and reports[-1].stage_quality.reason == "StateApiUnusable")
    assert sidecar.value("gpumonitor_gpu_up", gpu="0") == 1


def test_a_workers_seconds_go_where_its_head_says(
    gpus: simgpu.StateFile, start: Start, ray: Ray, controller: Controller, reporting: dict[str, str]
) -> None:
    def answer(report: Report) -> ReportAnswer:
        now = time.time()
        told = [RayStage("ref", "ref", report.started_at - 5.0)]
        word = PodStages(source=StageSource.RAY_STATE, known_from=now - 60, known_until=now, intervals=told)
        return ReportAnswer(accepted=report.sequence, stages=word)

    controller.answer = answer
    sidecar = start(**on_ray(ray, "worker"), **reporting)
    sidecar.wait(lambda _: (sidecar.value("gpumonitor_gpu_observed_seconds_total", stage="ref", gpu="0") or 0) > 1)
    assert sidecar.value("gpumonitor_stage_source_info", source="ray-state") == 1
    sidecar.end()
    last = controller.reports[-1]
    assert last.final
    for gpu in last.gpus:
        assert sum(count.observed_seconds for count in gpu.stages) == pytest.approx(gpu.observed_seconds)


def test_marks_bring_stages_and_steps(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: dict[str, str]
) -> None:
    port = free_port()
    sidecar = start(**reporting, **{ENV_MARKS_PORT: str(port), wiring.ENV_METRICS_PORT: str(19_000 + port % 10_000)})
    sidecar.wait(lambda found: found.get("gpumonitor_gpu_up"))
    marks = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    marks.sendto(b"garbage", ("127.0.0.1", port))
    sequence = 0
    for step in (1, 2, 3):
        for stage in ("gen", "update_actor"):
            began = time.time()
            for state in (MarkState.BEGIN, MarkState.END):
                sequence += 1
                ends = state is MarkState.END
                mark = Mark(
                    state=state,
                    stage=stage,
                    t=time.time(),
                    process="9f3c01d2a4b5e677",
                    pid=1,
                    seq=sequence,
                    span=step * 10 + len(stage),
                    begin=began if ends else None,
                    open=[] if ends else [step * 10 + len(stage)],
                    step=step,
                )
                marks.sendto(encode(mark) or b"", ("127.0.0.1", port))
                time.sleep(0.0 if ends else 0.6)
    marks.close()
    sidecar.wait(lambda _: (sidecar.value("gpumonitor_steps_total") or 0) >= 2)
    sidecar.end()
    steps = [step for report in controller.reports for step in report.steps]
    assert [(step.number, step.step) for step in steps] == [(1, 1), (2, 2), (3, 3)], "each once"
    for told in steps:
        seconds = {stage.stage: stage.seconds for stage in told.stages}
        assert seconds["gen"] == pytest.approx(0.6, abs=0.4)
        assert len(told.stages[0].gpus) == 8


def test_a_port_of_marks_that_is_taken_harms_nothing(gpus: simgpu.StateFile, start: Start) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = int(other.getsockname()[1])
        environ = {ENV_MARKS_PORT: str(port), wiring.ENV_METRICS_PORT: str(19_000 + port % 10_000)}
        sidecar = start(**environ)
        sidecar.wait(lambda found: found.get("gpumonitor_gpu_up"))
        time.sleep(1.0)
    assert [line["message"] for line in sidecar.log].count("marks cannot be received") == 1
