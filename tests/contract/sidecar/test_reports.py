# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What arrives at the controller, over real TLS, and what the sidecar does with its answers."""

from pathlib import Path

import pytest
import simgpu

from tests.contract.sidecar.conftest import TOKEN_VARIABLE, Start
from tests.contract.sidecar.controller import SERVER_NAME, Authority, Controller
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.report import ReportAnswer
from verl_gpumonitor.model.vocabulary import Ownership, Source, UnavailableReason

Reporting = dict[str, str]


def test_reports_tell_the_pods_gpus(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    sidecar = start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 3)
    first, last = controller.reports[0], controller.reports[-1]
    assert (last.pod.namespace, last.pod.name, last.pod.uid) == ("team", "worker-0", "3f2a-11")
    assert [report.sequence for report in controller.reports] == list(range(1, len(controller.reports) + 1))
    assert first.start_id == last.start_id
    assert last.source is Source.NVML
    assert last.ownership is Ownership.WHOLE_NODE
    assert last.unavailable is None
    assert (last.gpus_requested, last.gpus_visible, len(last.gpus)) == (8, 8, 8)
    assert last.gpus[0].uuid == simgpu.uuid_of(0)
    assert last.gpus[0].utilization == 0.0
    assert last.gpus[0].observed_seconds > 0
    assert controller.tokens[0] == "Bearer first-token"
    assert controller.connections == 1, "the connection is kept alive"
    # The sidecar counts a report when its answer is there, which is a moment after the controller has it.
    controller.wait_for(lambda reports: sidecar.value("gpumonitor_reports_total", code="200") == len(reports))


def test_a_renewed_token_is_used_at_the_next_report(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 1)
    Path(reporting[TOKEN_VARIABLE]).write_text("second-token")
    controller.wait_for(lambda _: controller.tokens[-1] == "Bearer second-token")


def test_a_token_that_comes_late(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    token = Path(reporting[TOKEN_VARIABLE])
    token.unlink()
    sidecar = start(**reporting)
    sidecar.wait(lambda _: sidecar.value("gpumonitor_reports_total", code="token"))
    token.write_text("late-token")
    controller.wait_for(lambda reports: len(reports) >= 1, seconds=15)


def test_a_refusal_for_good_drops_that_report_alone(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    controller.status = 400
    sidecar = start(**reporting)
    for number, status in enumerate((400, 403, 413), start=1):
        controller.status = status
        controller.wait_for(lambda reports, number=number: len(reports) >= number)  # type: ignore[misc]
    controller.status = 200
    controller.wait_for(lambda reports: reports[-1].collection.dropped_reports >= 3)
    assert sidecar.value("gpumonitor_reports_dropped_total") == controller.reports[-1].collection.dropped_reports


@pytest.mark.slow
def test_retry_after_is_obeyed(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    controller.status, controller.headers = 503, {"Retry-After": "1"}
    start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 2)
    first, second = controller.reports[:2]
    assert second.sent_at - first.sent_at >= 1.0
    controller.status = 200
    controller.wait_for(lambda reports: reports[-1].collection.dropped_reports >= 2)


def test_a_replay_counts_as_delivered(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    controller.status = 409
    sidecar = start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 2)
    assert sidecar.value("gpumonitor_reports_dropped_total") == 0


def test_a_restarted_controller_is_found_again(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    sidecar = start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 2)
    controller.drop_connections()
    before = len(controller.reports)
    controller.wait_for(lambda reports: len(reports) >= before + 2)
    assert controller.connections == 2
    assert sidecar.value("gpumonitor_reports_dropped_total") == 0, "one try on a fresh connection was enough"


def test_a_successor_of_the_ca_is_adopted_beside_the_first(
    gpus: simgpu.StateFile,
    start: Start,
    controller: Controller,
    reporting: Reporting,
    authority: Authority,
    tmp_path: Path,
) -> None:
    successor = Authority("successor")
    controller.answer = lambda report: ReportAnswer(accepted=report.sequence, ca_pem=successor.pem)
    sidecar = start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 1)
    for context in (successor.server_context(tmp_path), authority.server_context(tmp_path)):
        controller.use(context)
        controller.drop_connections()
        before = len(controller.reports)
        controller.wait_for(lambda reports, before=before: len(reports) >= before + 2)  # type: ignore[misc]
    assert sidecar.value("gpumonitor_reports_total", code="tls") is None


def test_a_foreign_ca_or_name_gets_no_report_and_no_token(
    gpus: simgpu.StateFile,
    start: Start,
    controller: Controller,
    reporting: Reporting,
    authority: Authority,
    tmp_path: Path,
) -> None:
    controller.use(Authority("foreign").server_context(tmp_path))
    sidecar = start(**reporting)
    sidecar.wait(lambda _: sidecar.value("gpumonitor_reports_total", code="tls"))
    controller.use(authority.server_context(tmp_path, "another.svc"))
    before = sidecar.value("gpumonitor_reports_total", code="tls") or 0
    sidecar.wait(lambda _: (sidecar.value("gpumonitor_reports_total", code="tls") or 0) > before)
    assert controller.tokens == []
    controller.use(authority.server_context(tmp_path, SERVER_NAME))
    controller.wait_for(lambda reports: len(reports) >= 1, seconds=20)


def test_the_controller_may_name_the_pods_gpus(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    own = [simgpu.uuid_of(1), simgpu.uuid_of(2)]
    sidecar = start(**reporting, **{wiring.ENV_GPUS_REQUESTED: "2"})
    controller.wait_for(lambda reports: bool(reports) and reports[-1].unavailable is not None)
    assert controller.reports[-1].unavailable is UnavailableReason.OWNERSHIP_UNKNOWN
    assert controller.reports[-1].gpus == []
    controller.answer = lambda report: ReportAnswer(accepted=report.sequence, gpu_uuids=own)
    controller.wait_for(lambda reports: [gpu.uuid for gpu in reports[-1].gpus] == own)
    assert controller.reports[-1].ownership is Ownership.RAY_HEAD
    controller.answer = lambda report: ReportAnswer(accepted=report.sequence)
    before = len(controller.reports)
    controller.wait_for(lambda reports: len(reports) >= before + 2)
    assert [gpu.uuid for gpu in controller.reports[-1].gpus] == own, "once known it stays"
    assert sidecar.value("gpumonitor_telemetry_available", reason="") == 1


def test_a_report_says_why_clocks_are_held_down(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    simgpu.set_values(0, file=gpus, clocks_event_reasons=0x44)
    start(**reporting)
    controller.wait_for(lambda reports: bool(reports and reports[-1].gpus and reports[-1].gpus[0].throttled))
    held, free = controller.reports[-1].gpus[:2]
    assert held.throttled == ["sw_power_cap", "hw_thermal_slowdown"]
    assert free.throttled == ["gpu_idle"]


def test_risk_is_reported_at_once(
    gpus: simgpu.StateFile, start: Start, controller: Controller, reporting: Reporting
) -> None:
    controller.answer = lambda report: ReportAnswer(accepted=report.sequence, interval_seconds=60.0)
    sidecar = start(**reporting)
    controller.wait_for(lambda reports: len(reports) >= 1)
    with simgpu.Gpu(0) as gpu:
        gpu.allocate(int(gpu.memory_total_bytes * 0.96))
        controller.wait_for(lambda reports: len(reports) >= 2, seconds=8)
        used = controller.reports[-1].gpus[0].memory_used_bytes
        assert used is not None
        assert used > 0.9 * gpu.memory_total_bytes
    assert sidecar.value("gpumonitor_reports_total", code="200") == 2
