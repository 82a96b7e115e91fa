# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The page as Prometheus's own parser reads it."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from verl_gpumonitor.model.report import StageCount, StageNow, StageQuality
from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample, ReadingHealth
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import STAGES as STAGE_NAMES
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source, UnavailableReason
from verl_gpumonitor_sidecar.exporter import Page
from verl_gpumonitor_sidecar.exports import Exports, Identity, ProcessUse, ReportCounts
from verl_gpumonitor_sidecar.gpu_metrics import by_pair
from verl_gpumonitor_sidecar.pod_metrics import MAX_STAGES
from verl_gpumonitor_sidecar.state import OwnGpu, PodState, StagePicture

NOW = 100.0
UNIX = 1e9 + NOW
WHO = Identity(namespace="team", pod='p"0\\', node="n", version="1", start_id="s", started_unix=1e9)

FULL_SAMPLE = GpuSample(
    uuid="GPU-a",
    index=0,
    model="NVIDIA H100",
    taken_at=NOW,
    utilization=0.7,
    memory_bandwidth_utilization=0.05,
    memory_taken_at=NOW,
    memory_used_bytes=70,
    memory_reserved_bytes=5,
    memory_total_bytes=80,
    power_watts=500.0,
    power_limit_watts=700.0,
    temperature_celsius=60.0,
    memory_temperature_celsius=70.0,
    energy_joules=1e6,
    pcie_sent_bytes=1,
    pcie_received_bytes=2,
    nvlink_sent_bytes=3,
    nvlink_received_bytes=4,
    ecc_uncorrected_errors=0,
    throttled=("sw_power_cap", "hw_thermal_slowdown"),
)
FULL_COUNTERS = GpuCounters(
    observed_seconds=10.0,
    busy_seconds=7.0,
    energy_joules=5000.0,
    memory_peak_bytes=75,
    memory_recent_peak_bytes=72,
    xid_errors=dict.fromkeys(range(1, 40), 1),
)
FULL = OwnGpu(sample=FULL_SAMPLE, counters=FULL_COUNTERS, xid_last_unix={code: 1e9 + code for code in range(1, 40)})

STAGES = (
    StageCount("gen", "rollout", 6.0, 3.0, 2000.0, 75, 60),
    StageCount("update_actor", "actor", 4.0, 4.0, 3000.0, 50, 20),
)
PICTURE = StagePicture(
    now=StageNow(stage="gen", role="rollout", step=3),
    now_unix=UNIX,
    roles={"GPU-a": "rollout"},
    quality=StageQuality(source=StageSource.RAY_AGENT, resolution_seconds=5.0, reason="HeadSilent", steps=2),
    counts={"GPU-a": STAGES},
    pod_seconds={("", "gen", "rollout"): 7.0, ("", "update_actor", "actor"): 4.0},
)

NAMES = [
    "gpumonitor_collect_duration_seconds",
    "gpumonitor_collect_failures_total",
    "gpumonitor_collect_last_success_timestamp_seconds",
    "gpumonitor_collect_success",
    "gpumonitor_collect_timeouts_total",
    "gpumonitor_collections_total",
    "gpumonitor_gpu_busy_seconds_total",
    "gpumonitor_gpu_ecc_uncorrected_errors_total",
    "gpumonitor_gpu_energy_joules_total",
    "gpumonitor_gpu_info",
    "gpumonitor_gpu_memory_bandwidth_utilization_ratio",
    "gpumonitor_gpu_memory_peak_bytes",
    "gpumonitor_gpu_memory_recent_peak_bytes",
    "gpumonitor_gpu_memory_reserved_bytes",
    "gpumonitor_gpu_memory_temperature_celsius",
    "gpumonitor_gpu_memory_total_bytes",
    "gpumonitor_gpu_memory_used_bytes",
    "gpumonitor_gpu_nvlink_received_bytes_total",
    "gpumonitor_gpu_nvlink_sent_bytes_total",
    "gpumonitor_gpu_observed_seconds_total",
    "gpumonitor_gpu_pcie_received_bytes_total",
    "gpumonitor_gpu_pcie_sent_bytes_total",
    "gpumonitor_gpu_power_limit_watts",
    "gpumonitor_gpu_power_watts",
    "gpumonitor_gpu_stage_memory_peak_bytes",
    "gpumonitor_gpu_state_info",
    "gpumonitor_gpu_temperature_celsius",
    "gpumonitor_gpu_throttle_reasons",
    "gpumonitor_gpu_throttled",
    "gpumonitor_gpu_up",
    "gpumonitor_gpu_utilization_ratio",
    "gpumonitor_gpu_xid_errors_total",
    "gpumonitor_gpu_xid_last_timestamp_seconds",
    "gpumonitor_gpus_requested",
    "gpumonitor_gpus_visible",
    "gpumonitor_host_memory_limit_bytes",
    "gpumonitor_host_memory_used_bytes",
    "gpumonitor_host_shm_size_bytes",
    "gpumonitor_host_shm_used_bytes",
    "gpumonitor_implausible_readings_total",
    "gpumonitor_nvml_errors_total",
    "gpumonitor_ownership_info",
    "gpumonitor_report_last_success_timestamp_seconds",
    "gpumonitor_reports_dropped_total",
    "gpumonitor_reports_total",
    "gpumonitor_sidecar_cpu_seconds_total",
    "gpumonitor_sidecar_info",
    "gpumonitor_sidecar_resident_memory_bytes",
    "gpumonitor_sidecar_setting_broken",
    "gpumonitor_sidecar_start_time_seconds",
    "gpumonitor_source_info",
    "gpumonitor_stage_info",
    "gpumonitor_stage_seconds_total",
    "gpumonitor_stage_source_info",
    "gpumonitor_steps_total",
    "gpumonitor_telemetry_available",
    "gpumonitor_unsupported_readings_total",
]


def state(*gpus: OwnGpu, **values: object) -> PodState:
    known: dict[str, object] = {
        "gpus_requested": 1,
        "source": Source.NVML,
        "ownership": Ownership.WHOLE_NODE,
        "gpus": gpus,
        "gpus_visible": 8,
        "driver_version": "570.1",
        "host": HostSample(taken_at=NOW, memory_used_bytes=1, memory_limit_bytes=2, shm_used_bytes=3, shm_size_bytes=4),
        "health": ReadingHealth(
            collections=5, last_pass_seconds=0.01, unsupported={"x": 1}, implausible={"y": 1}, failed={"z": 1}
        ),
        "last_success_unix": 1e9,
        "success": True,
        "stages": PICTURE,
    }
    return PodState(**known | values)  # type: ignore[arg-type]


def everything(shown: PodState) -> Exports:
    return Exports(
        identity=WHO,
        state=shown,
        reports=ReportCounts(enabled=True, by_code={"200": 3, "timeout": 1}, dropped=1, last_success_unix=1e9),
        use=ProcessUse(cpu_seconds=0.5, resident_bytes=30_000_000),
        settings_problems=("GPUMON_X='y' is not usable",),
    )


def series(shown: Exports, now: float = NOW) -> dict[str, list[tuple[dict[str, str], float]]]:
    page = Page(lambda: shown, clock=lambda: now, unix_clock=lambda: 1e9 + now)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_names_are_these() -> None:
    """They are public: dashboards, alerts and recording rules use them."""
    assert sorted(series(everything(state(FULL)))) == sorted(NAMES)


def test_every_series_carries_the_pod_and_labels_survive_quoting() -> None:
    for name, rows in series(everything(state(FULL))).items():
        for labels, _ in rows:
            assert labels["namespace"] == "team", name
            assert labels["pod"] == 'p"0\\', name


def test_a_gpu_has_a_bounded_number_of_series() -> None:
    counts = tuple(StageCount(f"epoch_{number}", "trainer", 1.0, 1.0, 1.0, 1, 1) for number in range(32))
    picture = StagePicture(counts={"GPU-a": counts})
    rows = [labels for found in series(everything(state(FULL, stages=picture))).values() for labels, _ in found]
    assert sum("uuid" in labels for labels in rows) <= 120


def test_counters_by_stage() -> None:
    found = series(everything(state(FULL)))
    by_stage = {
        name: {(labels["stage"], labels["role"]): value for labels, value in found[f"gpumonitor_gpu_{name}"]}
        for name in ("observed_seconds_total", "busy_seconds_total", "energy_joules_total", "stage_memory_peak_bytes")
    }
    gen, update = ("gen", "rollout"), ("update_actor", "actor")
    assert by_stage == {
        "observed_seconds_total": {gen: 6.0, update: 4.0},
        "busy_seconds_total": {gen: 3.0, update: 4.0},
        "energy_joules_total": {gen: 2000.0, update: 3000.0},
        "stage_memory_peak_bytes": {gen: 75, update: 50},
    }
    seconds = {(labels["stage"], labels["role"]): value for labels, value in found["gpumonitor_stage_seconds_total"]}
    assert seconds == {gen: 7.0, update: 4.0}
    assert found["gpumonitor_steps_total"][0][1] == 2


def test_the_present_gauges_carry_the_role_that_runs_and_the_rest_none() -> None:
    found = series(everything(state(FULL)))
    assert found["gpumonitor_gpu_utilization_ratio"][0][0]["role"] == "rollout"
    assert found["gpumonitor_gpu_up"][0][0]["role"] == "unknown"
    assert found["gpumonitor_stage_info"][0][0]["stage"] == "gen"
    shown = everything(state(FULL, interval_seconds=10.0))
    late = series(shown, NOW + 6)
    assert late["gpumonitor_gpu_utilization_ratio"][0][0]["role"] == "unknown", "found more than 5 s ago"
    assert "gpumonitor_stage_info" not in late


@pytest.mark.parametrize("stages", [STAGE_NAMES, [f"epoch_{number}" for number in range(40)]])
def test_no_counter_falls_when_stages_are_shown_together(stages: list[str]) -> None:
    shown: dict[tuple[str, str], float] = {}
    for known in range(1, len(stages) + 1):
        counts = [StageCount(stage, "unknown", 1.0 + known, 1.0, None, 1, 1) for stage in stages[:known]]
        before, shown = shown, {pair: count.observed_seconds for pair, count in by_pair(counts).items()}
        assert len(shown) <= MAX_STAGES
        assert all(shown[pair] >= value for pair, value in before.items())
        assert sum(shown.values()) == pytest.approx(known * (1.0 + known))


def test_unknown_is_no_series() -> None:
    bare = OwnGpu(sample=GpuSample(uuid="GPU-b", taken_at=NOW), counters=GpuCounters())
    found = series(everything(state(bare)))
    assert {name for name, rows in found.items() if any("uuid" in labels for labels, _ in rows)} == {
        "gpumonitor_gpu_info",
        "gpumonitor_gpu_up",
        "gpumonitor_gpu_state_info",
    }


def test_values_age_at_the_time_of_the_scrape() -> None:
    """The loop may be stuck: then nobody makes a new state, and the old one must not be shown as the present."""
    shown = everything(state(FULL))
    assert series(shown, NOW + 3)["gpumonitor_gpu_up"][0][1] == 1
    late = series(shown, NOW + 3.1)
    assert late["gpumonitor_gpu_up"][0][1] == 0
    assert not {"gpumonitor_gpu_utilization_ratio", "gpumonitor_gpu_memory_used_bytes"} & set(late)
    assert late["gpumonitor_gpu_memory_peak_bytes"][0][1] == 75
    assert "gpumonitor_gpu_memory_recent_peak_bytes" not in late
    assert "gpumonitor_host_memory_used_bytes" not in series(shown, NOW + 61)


def test_what_is_no_number_is_no_series() -> None:
    bad = OwnGpu(
        sample=GpuSample(uuid="GPU-b", taken_at=NOW, power_watts=float("nan"), temperature_celsius=float("inf")),
        counters=GpuCounters(energy_joules=-1.0),
    )
    found = series(everything(state(bad)))
    assert not {
        "gpumonitor_gpu_power_watts",
        "gpumonitor_gpu_temperature_celsius",
        "gpumonitor_gpu_energy_joules_total",
    } & set(found)


def test_before_the_first_pass_nothing_is_claimed() -> None:
    found = series(Exports(identity=WHO, state=PodState(gpus_requested=8)))
    assert not {"gpumonitor_telemetry_available", "gpumonitor_collect_success", "gpumonitor_source_info"} & set(found)


@pytest.mark.parametrize(
    ("shown", "rows"),
    [
        pytest.param(state(FULL), [("", 1.0)], id="available"),
        pytest.param(
            state(source=Source.NONE, unavailable=UnavailableReason.NO_LIBRARY, success=False),
            [("NoLibrary", 0.0)],
            id="not available",
        ),
        pytest.param(
            state(gpus_requested=0, source=Source.NONE, ownership=Ownership.NONE_REQUESTED), [], id="not asked for"
        ),
    ],
)
def test_telemetry_available(shown: PodState, rows: list[tuple[str, float]]) -> None:
    found = series(everything(shown)).get("gpumonitor_telemetry_available", [])
    assert [(labels["reason"], value) for labels, value in found] == rows


def test_a_lost_gpu_keeps_its_counters_alone() -> None:
    lost = OwnGpu(
        sample=GpuSample(uuid="GPU-a", state=GpuState.LOST, error="GPU_IS_LOST", taken_at=NOW), counters=FULL_COUNTERS
    )
    found = series(everything(state(lost)))
    assert found["gpumonitor_gpu_up"][0][1] == 0
    assert found["gpumonitor_gpu_state_info"][0][0]["error"] == "GPU_IS_LOST"
    assert [value for _, value in found["gpumonitor_gpu_busy_seconds_total"]] == [3.0, 4.0]


def test_the_page_is_rendered_once_a_second() -> None:
    now = [0.0]
    page = Page(lambda: everything(state(FULL)), clock=lambda: now[0])
    first = page.text()
    now[0] = 0.9
    assert page.text() is first
    now[0] = 1.0
    page.text()
    assert page.renderings == 2
    now[0] = -50.0
    page.text()
    assert page.renderings == 3, "a clock that runs back freezes nothing"


def test_a_fault_of_ours_does_not_fail_the_scrape() -> None:
    def broken() -> Exports:
        raise KeyError("x")

    assert b'gpumonitor_export_error{error="KeyError"} 1' in Page(broken).text()
