# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Each alert in Prometheus's own evaluation: it fires, it keeps silent in the neighbouring case, and it resolves."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
RULES = REPOSITORY / "charts" / "gpumonitor" / "files" / "rules.yaml"

GPU = 'namespace="ml",pod="w-0",gpu="3",uuid="GPU-3"'
JOB = 'namespace="ml",workload="grpo",kind="RayJob",severity="warning"'


class Case(NamedTuple):
    """Series that raise an alert from a time on and let it go again, and a neighbour that must not raise it."""

    alert: str
    raised: Mapping[str, str]
    """Series -> promtool's values, at 30 s each."""
    fires_at: str
    resolved_at: str
    silent: Mapping[str, str]
    """Series that come near and mean something else."""


def finding(alert: str, reason: str, *, fires_at: str, other: str) -> Case:
    """A finding of the controller: open for half an hour, then gone."""
    series = f'gpumonitor_workload_finding{{{JOB},reason="{reason}"}}'
    neighbour = f'gpumonitor_workload_finding{{{JOB},reason="{other}"}}'
    return Case(alert, {series: "1x60 _x60"}, fires_at, "45m", {neighbour: "1x120"})


def xid(alert: str, code: int, *, other: int) -> Case:
    """An Xid at minute 5, which is forgotten after a quarter of an hour."""
    series = f'gpumonitor_gpu_xid_last_timestamp_seconds{{{GPU},xid="{code}"}}'
    neighbour = f'gpumonitor_gpu_xid_last_timestamp_seconds{{{GPU},xid="{other}"}}'
    return Case(alert, {series: "_x9 300x110"}, "6m", "21m", {neighbour: "_x9 300x110"})


HOT = f'gpumonitor_gpu_throttled{{{GPU},reason="hw_thermal_slowdown"}}'
CAPPED = f'gpumonitor_gpu_throttled{{{GPU},reason="sw_power_cap"}}'
BUSY, OBSERVED = f"gpumonitor_gpu_busy_seconds_total{{{GPU}}}", f"gpumonitor_gpu_observed_seconds_total{{{GPU}}}"
USED, LIMIT = (f'gpumonitor_host_memory_{word}_bytes{{namespace="ml",pod="w-0"}}' for word in ("used", "limit"))
SHM_USED, SHM_SIZE = (f'gpumonitor_host_shm_{word}_bytes{{namespace="ml",pod="w-0"}}' for word in ("used", "size"))
WEBHOOK = "gpumonitor_admission_injection_paused"

CASES = [
    finding("GPUMonitorHang", "Hang", fires_at="1m", other="LowUtilization"),
    finding("GPUMonitorGPUFault", "GPUFault", fires_at="1m", other="ApplicationFault"),
    finding("GPUMonitorHostMemoryRisk", "SharedMemoryRisk", fires_at="2m", other="OOMRisk"),
    finding("GPUMonitorHostMemoryRisk", "HostMemoryRisk", fires_at="2m", other="OOMRisk"),
    finding("GPUMonitorOOMRisk", "OOMRisk", fires_at="2m", other="HostMemoryRisk"),
    finding("GPUMonitorOOMRisk", "MemoryGrowth", fires_at="2m", other="Imbalance"),
    finding("GPUMonitorOOMRisk", "RolloutMemoryNotReleased", fires_at="2m", other="Imbalance"),
    finding("GPUMonitorApplicationFault", "ApplicationFault", fires_at="1m", other="GPUFault"),
    finding("GPUMonitorForeignGPUMemory", "LeftoverMemory", fires_at="2m", other="MemoryGrowth"),
    finding("GPUMonitorForeignGPUMemory", "ForeignProcess", fires_at="2m", other="MemoryGrowth"),
    finding("GPUMonitorImbalance", "Imbalance", fires_at="6m", other="Throttled"),
    finding("GPUMonitorThrottled", "Throttled", fires_at="6m", other="Imbalance"),
    finding("GPUMonitorLowUtilization", "LowUtilization", fires_at="20m", other="Hang"),
    Case(
        "GPULost",
        {f"gpumonitor_gpu_up{{{GPU}}}": "1x4 0x20 1x100"},
        "8m",
        "20m",
        {f"gpumonitor_gpu_up{{{GPU}}}": "1x4 0x2 1x100"},
    ),
    xid("GPUHardwareXid", 79, other=31),
    xid("GPUApplicationXid", 31, other=79),
    Case(
        "GPUUncorrectedMemoryErrors",
        {f"gpumonitor_gpu_ecc_uncorrected_errors_total{{{GPU}}}": "2x9 3x110"},
        "6m",
        "30m",
        {f"gpumonitor_gpu_ecc_uncorrected_errors_total{{{GPU}}}": "7x120"},
    ),
    Case("GPUHeldDownByHeat", {HOT: "1x30 _x100"}, "12m", "30m", {CAPPED: "1x120"}),
    Case(
        "GPUsIdle",
        {BUSY: "0+0x150 0+30x200", OBSERVED: "0+30x350"},
        "70m",
        "110m",
        {BUSY: "0+3x350", OBSERVED: "0+30x350"},
    ),
    Case(
        "HostMemoryNearItsLimit",
        {USED: "97x20 50x100", LIMIT: "100x120"},
        "5m",
        "20m",
        {USED: "90x120", LIMIT: "100x120"},
    ),
    Case("SharedMemoryNearlyFull", {SHM_USED: "95x20 5x100", SHM_SIZE: "100x120"}, "5m", "20m", {SHM_USED: "95x120"}),
    Case(
        "GPUTelemetryUnavailable",
        {'gpumonitor_telemetry_available{namespace="ml",pod="w-0",reason="NoLibrary"}': "0x40 _x100"},
        "12m",
        "30m",
        {'gpumonitor_telemetry_available{namespace="ml",pod="w-0"}': "1x120"},
    ),
    Case(
        "GPUMonitorInjectionStopped",
        {"gpumonitor_breaker_open": "1x20 0x100"},
        "6m",
        "20m",
        {"gpumonitor_breaker_open": "0x120"},
    ),
    Case(
        "GPUMonitorControllerAway",
        {"gpumonitor_controller_leading": "0x30 1x100", WEBHOOK: "0x130"},
        "10m",
        "20m",
        {"gpumonitor_controller_leading": "1x120", WEBHOOK: "1x120"},
    ),
    Case(
        "GPUMonitorControllerAway",
        {WEBHOOK: "1x40"},
        "10m",
        "30m",
        {"gpumonitor_gpu_up": "1x120"},
    ),
    Case(
        "GPUMonitorControllerShortOfCPU",
        {"gpumonitor_controller_tick_lag_seconds": "9x40 0x100"},
        "15m",
        "30m",
        {"gpumonitor_controller_tick_lag_seconds": "1x120"},
    ),
]


GROUPS: list[dict[str, Any]] = yaml.load(RULES.read_text(), Loader=yaml.CSafeLoader)["groups"]


def alerts() -> list[dict[str, Any]]:
    """All alert rules of the file."""
    return [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]


def rules_of(alert: str) -> dict[str, Any]:
    """The file with this alert alone, and all recording rules: promtool computes every rule at every half minute."""
    wanted = [[rule for rule in group["rules"] if rule.get("alert", alert) == alert] for group in GROUPS]
    return {"groups": [{**group, "rules": rules} for group, rules in zip(GROUPS, wanted, strict=True) if rules]}


class Moment(NamedTuple):
    """Series, and a time at which to look at an alert."""

    series: Mapping[str, str]
    time: str


def silent(alert: str, moments: Sequence[Moment], folder: Path) -> bool:
    """Whether an alert is silent at all these moments, by promtool."""
    rules = folder / "rules.json"
    rules.write_text(json.dumps(rules_of(alert)))
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": name, "values": values} for name, values in moment.series.items()],
                "alert_rule_test": [{"eval_time": moment.time, "alertname": alert, "exp_alerts": []}],
            }
            for moment in moments
        ],
    }
    path = folder / "test.json"
    path.write_text(json.dumps(document))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    # promtool fails for a broken test as well, and then says nothing of the alert.
    assert done.returncode == 0 or f"alertname: {alert}" in said, said
    return done.returncode == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert} by {next(iter(case.raised))[:60]}")
def test_an_alert_fires_resolves_and_keeps_silent(case: Case, tmp_path: Path) -> None:
    assert not silent(case.alert, [Moment(case.raised, case.fires_at)], tmp_path)
    others = [Moment(case.raised, case.resolved_at), Moment(case.silent, case.fires_at)]
    assert silent(case.alert, others, tmp_path)


def test_each_alert_has_its_case() -> None:
    assert {rule["alert"] for rule in alerts()} == {case.alert for case in CASES}


def test_each_alert_links_a_page_that_is_there() -> None:
    for rule in alerts():
        assert (REPOSITORY / rule["annotations"]["runbook_url"]).is_file(), rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_prometheus_takes_the_file() -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, capture_output=True)
