# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows of simulated GPUs in good and bad days."""

import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import simgpu

from tests.contract.sidecar.conftest import ENDS_WITHIN_SECONDS, LIBRARY, Samples, Start, wait_for
from verl_gpumonitor.model import wiring

ADDED_UP = {"gpumonitor_gpu_energy_joules_total", "gpumonitor_gpu_observed_seconds_total"}


def up(samples: Samples) -> dict[str, float]:
    """Return index -> gpu_up."""
    return {labels["gpu"]: value for labels, value in samples.get("gpumonitor_gpu_up", [])}


def all_up(samples: Samples) -> bool:
    return sum(up(samples).values()) == 8


def test_eight_gpus_of_a_whole_node(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    with simgpu.Gpu(3) as gpu:
        gpu.allocate(20 * 2**30)
        with gpu.busy(utilization=0.5, seconds=60.0):
            sidecar.wait(
                lambda found: (
                    found.get("gpumonitor_gpu_busy_seconds_total")
                    and any(
                        labels["gpu"] == "3" and value > 0.4
                        for labels, value in found["gpumonitor_gpu_busy_seconds_total"]
                    )
                )
            )
            found = sidecar.samples()
    (labels,) = [labels for labels, _ in found["gpumonitor_gpu_memory_used_bytes"] if labels["gpu"] == "3"]
    assert labels == {
        "namespace": "team",
        "pod": "worker-0",
        "gpu": "3",
        "uuid": simgpu.uuid_of(3),
        "role": "unknown",
    }
    assert sidecar.value("gpumonitor_gpu_memory_peak_bytes", gpu="3") == pytest.approx(20 * 2**30, rel=0.05)
    assert {labels["stage"] for labels, _ in found["gpumonitor_gpu_busy_seconds_total"]} == {"unknown"}
    assert found["gpumonitor_source_info"][0][0]["source"] == "nvml"
    assert found["gpumonitor_ownership_info"][0][0]["ownership"] == "whole-node"
    assert found["gpumonitor_telemetry_available"] == [({"namespace": "team", "pod": "worker-0", "reason": ""}, 1.0)]
    assert found["gpumonitor_collect_success"][0][1] == 1.0


def test_the_number_of_series_is_bounded(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(all_up)
    by_gpu = [labels["gpu"] for series in sidecar.samples().values() for labels, _ in series if "gpu" in labels]
    assert max(by_gpu.count(index) for index in set(by_gpu)) <= 120
    assert max(len(labels) for series in sidecar.samples().values() for labels, _ in series) <= 12


def test_processes_that_come_and_go_add_no_series(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start(**{wiring.ENV_SHARED_PROCESSES: "1"})
    sidecar.wait(all_up)
    before = {name: len(series) for name, series in sidecar.samples().items()}
    for _ in range(30):
        with simgpu.Gpu(0) as gpu:
            gpu.allocate(2**20)
    assert {name: len(series) for name, series in sidecar.samples().items()} == before


def test_sentinels_and_garbage_are_never_shown(gpus: simgpu.StateFile, start: Start) -> None:
    simgpu.set_values(
        2,
        gpu_utilization_percent=2**32 - 1,
        memory_used_bytes=2**64 - 1,
        power_milliwatts=2**32 - 1,
        temperature_celsius=2**31 - 1,
        energy_millijoules=2**63 - 16,
        memory_temperature_celsius=2**63 - 16,
    )
    sidecar = start()
    sidecar.wait(lambda found: found.get("gpumonitor_implausible_readings_total"))
    found = sidecar.samples()
    for name, series in found.items():
        for labels, value in series:
            assert value == value, f"{name} is NaN"
            assert abs(value) < 1e13, f"{name}{labels} {value}"
            if name.endswith("_ratio"):
                assert 0 <= value <= 1
    assert sidecar.value("gpumonitor_gpu_utilization_ratio", gpu="2") is None
    assert sidecar.value("gpumonitor_gpu_power_watts", gpu="2") is None
    assert sidecar.value("gpumonitor_gpu_utilization_ratio", gpu="1") == 0


def test_a_value_that_a_gpu_does_not_offer_leaves_the_others(gpus: simgpu.StateFile, start: Start) -> None:
    simgpu.set_values(1, memory_used_bytes=simgpu.Unanswered(3))
    sidecar = start()
    sidecar.wait(lambda found: len(found.get("gpumonitor_gpu_power_watts", [])) == 8)
    # Memory has a pace of its own.
    sidecar.wait(lambda found: len(found.get("gpumonitor_gpu_memory_used_bytes", [])) == 7)
    assert sidecar.value("gpumonitor_gpu_up", gpu="1") == 1


def test_a_lost_gpu_is_lost_and_the_others_stay(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(lambda found: len(found.get("gpumonitor_gpu_observed_seconds_total", [])) == 8)
    simgpu.lose(5)
    sidecar.wait(lambda found: up(found).get("5") == 0)
    assert sum(up(sidecar.samples()).values()) == 7
    assert sidecar.value("gpumonitor_gpu_state_info", gpu="5", state="lost") == 1
    assert sidecar.value("gpumonitor_gpu_utilization_ratio", gpu="5") is None
    assert sidecar.value("gpumonitor_gpu_observed_seconds_total", gpu="5") is not None


def test_a_hanging_call_leaves_the_other_gpus_fresh(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start(**{wiring.ENV_SAMPLE_INTERVAL: "1"})
    sidecar.wait(all_up)
    simgpu.hang(gpu=4, function="nvmlDeviceGetUtilizationRates")
    sidecar.wait(lambda found: up(found).get("4") == 0, seconds=8)
    before = sidecar.value("gpumonitor_gpu_observed_seconds_total", gpu="0")
    assert before is not None
    sidecar.wait(lambda _: (sidecar.value("gpumonitor_gpu_observed_seconds_total", gpu="0") or 0) > before + 1.5)
    assert sum(up(sidecar.samples()).values()) == 7
    assert sidecar.value("gpumonitor_collect_timeouts_total") == 1
    assert sidecar.value("gpumonitor_gpu_power_watts", gpu="4") is None
    assert sidecar.get("/healthz") == "ok\n"
    simgpu.clear_faults()
    sidecar.wait(all_up)


def test_a_library_that_comes_late(gpus: simgpu.StateFile, start: Start, tmp_path: Path) -> None:
    where = tmp_path / "lib"
    where.mkdir()
    sidecar = start(LD_LIBRARY_PATH=str(where))
    sidecar.wait(lambda found: found.get("gpumonitor_telemetry_available"))
    (shown,) = sidecar.samples()["gpumonitor_telemetry_available"]
    assert (shown[0]["reason"], shown[1]) == ("NoLibrary", 0.0)
    assert sidecar.value("gpumonitor_collect_success") == 0
    assert "gpumonitor_gpu_up" not in sidecar.samples()
    shutil.copy(LIBRARY, where / LIBRARY.name)
    sidecar.wait(all_up, seconds=25)
    assert sidecar.value("gpumonitor_telemetry_available", reason="") == 1
    assert sidecar.process.poll() is None


def test_a_driver_that_is_loaded_late(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = start()
    sidecar.wait(lambda found: found.get("gpumonitor_telemetry_available"))
    (shown,) = sidecar.samples()["gpumonitor_telemetry_available"]
    assert shown[0]["reason"] in {"DriverNotLoaded", "NoDeviceAccess"}
    monkeypatch.setenv("FAKENVML_STATE", str(tmp_path / "gpus"))
    simgpu.init(tmp_path / "gpus", gpus=8)
    sidecar.wait(all_up, seconds=25)


def test_an_opening_that_hangs_is_said(gpus: simgpu.StateFile, start: Start) -> None:
    simgpu.hang(function="init")
    sidecar = start()
    sidecar.wait(lambda found: found.get("gpumonitor_telemetry_available"))
    (shown,) = sidecar.samples()["gpumonitor_telemetry_available"]
    assert (shown[0]["reason"], shown[1]) == ("NotResponding", 0.0)
    assert sidecar.get("/healthz") == "ok\n"


def test_more_gpus_than_asked_for_are_nobodys(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start(**{wiring.ENV_GPUS_REQUESTED: "4"})
    sidecar.wait(lambda found: found.get("gpumonitor_telemetry_available"))
    assert sidecar.value("gpumonitor_telemetry_available", reason="OwnershipUnknown") == 0
    assert sidecar.value("gpumonitor_gpus_visible") == 8
    assert "GPU-" not in sidecar.get()


def test_a_shared_process_namespace_shows_whose_they_are(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start(**{wiring.ENV_GPUS_REQUESTED: "2", wiring.ENV_SHARED_PROCESSES: "1"})
    with simgpu.Gpu(2) as one, simgpu.Gpu(6) as other:
        one.allocate(2**30)
        other.allocate(2**30)
        sidecar.wait(lambda found: sum(up(found).values()) == 2, seconds=15)
    assert set(up(sidecar.samples())) == {"2", "6"}


def test_a_pod_without_gpus_owns_none(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start(**{wiring.ENV_GPUS_REQUESTED: "0"})
    sidecar.wait(lambda found: found.get("gpumonitor_ownership_info"))
    assert sidecar.value("gpumonitor_ownership_info", ownership="none-requested") == 1
    assert sidecar.value("gpumonitor_telemetry_available") is None
    assert "GPU-" not in sidecar.get()


def test_twenty_scrapes_at_once_cost_no_call_into_nvml(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(all_up)
    sidecar.get()
    before = sidecar.resident_bytes()
    with ThreadPoolExecutor(20) as pool:
        for _ in range(10):
            texts = list(pool.map(lambda _: sidecar.get(), range(20)))
            assert all("gpumonitor_gpu_up" in text for text in texts)
    assert sidecar.resident_bytes() - before < 2 * 2**20
    assert simgpu.max_concurrency() == 1


def test_slow_and_broken_clients_do_not_keep_a_scrape_away(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    silent = [socket.create_connection(("127.0.0.1", sidecar.port)) for _ in range(100)]
    for client in silent[::2]:
        client.sendall(b"GET /met")
    silent[1].sendall(b"\x16\x03\x01" + b"x" * 20_000)
    assert "gpumonitor_sidecar_info" in sidecar.get()
    for client in silent:
        client.close()
    assert sidecar.get("/healthz") == "ok\n"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        pytest.param(b"GET /metrics?x=1 HTTP/1.1", b"200", id="a query is passed over"),
        pytest.param(b"HEAD /metrics HTTP/1.0", b"200", id="HEAD"),
        pytest.param(b"GET / HTTP/1.1", b"404", id="another path"),
        pytest.param(b"POST /metrics HTTP/1.1", b"405", id="another method"),
        pytest.param(b"\xff\xfe", b"400", id="no HTTP"),
    ],
)
def test_requests(start: Start, request_line: bytes, status: bytes) -> None:
    sidecar = start(LD_LIBRARY_PATH="/nonexistent")
    with socket.create_connection(("127.0.0.1", sidecar.port), timeout=5) as client:
        client.sendall(request_line + b"\r\nHost: x\r\n\r\n")
        answer = client.makefile("rb").read()
    assert answer.split(b" ")[1] == status


def test_a_taken_port_is_replaced_by_a_free_one(gpus: simgpu.StateFile, start: Start) -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("::", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        sidecar = start(**{wiring.ENV_METRICS_PORT: str(taken)})
        assert sidecar.port != taken
        assert any("taken" in line["message"] and line["port"] == taken for line in sidecar.log)


def test_broken_settings_are_said_and_waited_with(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start(**{wiring.ENV_GPUS_REQUESTED: "many", wiring.ENV_POD_UID: None})
    text = sidecar.get()
    assert f'variable="{wiring.ENV_GPUS_REQUESTED}"' in text
    assert f'variable="{wiring.ENV_POD_UID}"' in text
    assert wiring.ENV_GPUS_REQUESTED in str(sidecar.log[0])
    assert sidecar.get("/healthz") == "ok\n"
    assert sidecar.end() < ENDS_WITHIN_SECONDS


def test_values_vanish_when_nothing_is_read_any_more(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(all_up)
    simgpu.fail(9)  # DRIVER_NOT_LOADED
    sidecar.wait(lambda found: "gpumonitor_gpu_utilization_ratio" not in found)
    wait_for(lambda: sidecar.value("gpumonitor_collect_success") == 0, 5)
    frozen = sidecar.value("gpumonitor_collect_last_success_timestamp_seconds")
    assert frozen is not None
    assert set(up(sidecar.samples()).values()) == {0.0}
    sidecar.wait(lambda found: found["gpumonitor_collect_failures_total"][0][1] >= 2)
    assert sidecar.value("gpumonitor_collect_last_success_timestamp_seconds") == pytest.approx(frozen, abs=0.001)
    simgpu.clear_faults()
    sidecar.wait(all_up, seconds=25)


def test_an_xid_is_counted_with_its_time(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(all_up)
    simgpu.xid(1, 79)
    sidecar.wait(lambda _: sidecar.value("gpumonitor_gpu_xid_errors_total", gpu="1", xid="79") == 1)
    first = sidecar.value("gpumonitor_gpu_xid_last_timestamp_seconds", gpu="1", xid="79")
    simgpu.xid(1, 79)
    sidecar.wait(lambda _: sidecar.value("gpumonitor_gpu_xid_errors_total", gpu="1", xid="79") == 2)
    second = sidecar.value("gpumonitor_gpu_xid_last_timestamp_seconds", gpu="1", xid="79")
    assert first is not None and second is not None and second > first


def test_names_have_prefix_and_base_unit(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(all_up)
    for name in re.findall(r"^# TYPE (\S+)", sidecar.get(), re.MULTILINE):
        assert name.startswith("gpumonitor_")


def test_promtool_accepts_the_page(gpus: simgpu.StateFile, start: Start) -> None:
    sidecar = start()
    sidecar.wait(all_up)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=sidecar.get(), text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
