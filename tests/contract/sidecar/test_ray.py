# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Ray's agent as witness and as stand-in for NVML, and what a broken one can do: nothing."""

import json
import time
from collections.abc import Iterator

import pytest
import simgpu

from tests.contract.sidecar.conftest import ENDS_WITHIN_SECONDS, Samples, Start
from tests.contract.sidecar.controller import Controller
from tests.contract.sidecar.ray import Ray, agent_page
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.report import ReportAnswer
from verl_gpumonitor.model.vocabulary import Ownership, Source

Reporting = dict[str, str]


@pytest.fixture
def ray() -> Iterator[Ray]:
    running = Ray()
    yield running
    running.close()


def on_ray(ray: Ray, requested: int, node_type: str = "worker") -> dict[str, str]:
    return {
        wiring.ENV_GPUS_REQUESTED: str(requested),
        wiring.ENV_RAY_NODE_TYPE: node_type,
        wiring.ENV_RAY_METRICS_URL: ray.url + "/metrics",
        wiring.ENV_RAY_DASHBOARD_URL: ray.url,
    }


def test_the_agent_names_which_of_eight_are_the_pods(gpus: simgpu.StateFile, start: Start, ray: Ray) -> None:
    ray.pages["/metrics"] = agent_page([4, 5, 6, 7])
    sidecar = start(**on_ray(ray, 4))

    def read_by_nvml(found: Samples) -> bool:
        """Say so; the agent may answer before the driver does, and its values are shown until then."""
        sources = [labels["source"] for labels, _ in found.get("gpumonitor_source_info", [])]
        return sources == ["nvml"] and len(found.get("gpumonitor_gpu_up", [])) == 4

    sidecar.wait(read_by_nvml)
    found = sidecar.samples()
    assert {labels["gpu"] for labels, _ in found["gpumonitor_gpu_up"]} == {"4", "5", "6", "7"}
    assert sidecar.value("gpumonitor_host_memory_used_bytes") == 5e9
    assert simgpu.uuid_of(0) not in sidecar.get()
    ray.pages.clear()
    time.sleep(1.0)
    assert len(sidecar.samples()["gpumonitor_gpu_up"]) == 4, "once known it stays"


def test_without_nvml_the_agent_is_the_source(start: Start, ray: Ray) -> None:
    ray.pages["/metrics"] = agent_page([0, 1])
    sidecar = start(**on_ray(ray, 2), LD_LIBRARY_PATH="/nonexistent")
    sidecar.wait(lambda found: len(found.get("gpumonitor_gpu_up", [])) == 2)
    assert sidecar.value("gpumonitor_source_info", source="ray-agent") == 1
    assert sidecar.value("gpumonitor_telemetry_available", reason="") == 1
    assert sidecar.value("gpumonitor_gpu_utilization_ratio", uuid=simgpu.uuid_of(1)) == pytest.approx(0.4)
    assert sidecar.value("gpumonitor_gpu_memory_used_bytes", uuid=simgpu.uuid_of(1)) == 20000 * 2**20


def test_an_older_ray_is_named_by_the_head(
    start: Start, ray: Ray, controller: Controller, reporting: Reporting
) -> None:
    ray.pages["/metrics"] = agent_page([0, 1], named=False)
    sidecar = start(**reporting, **on_ray(ray, 2), LD_LIBRARY_PATH="/nonexistent")
    controller.wait_for(lambda reports: bool(reports) and reports[-1].source is Source.RAY_AGENT)
    assert controller.reports[-1].gpus == []
    own = [simgpu.uuid_of(6), simgpu.uuid_of(7)]
    controller.answer = lambda report: ReportAnswer(accepted=report.sequence, gpu_uuids=own)
    controller.wait_for(lambda reports: [gpu.uuid for gpu in reports[-1].gpus] == own)
    assert controller.reports[-1].ownership is Ownership.RAY_HEAD
    assert sidecar.value("gpumonitor_gpu_power_watts", uuid=own[0]) == 250


def test_the_head_tells_the_nodes_gpus(start: Start, ray: Ray, controller: Controller, reporting: Reporting) -> None:
    nodes = [
        {"ip": "10.0.0.8", "gpus": [], "raylet": {"state": "ALIVE"}},
        {"ip": "10.0.0.9", "gpus": [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]},
    ]
    ray.pages["/nodes"] = json.dumps({"data": {"summary": nodes}}).encode()
    start(**reporting, **on_ray(ray, 0, "head"))
    controller.wait_for(lambda reports: any(report.ray_nodes for report in reports))
    (node,) = next(report.ray_nodes for report in controller.reports if report.ray_nodes)
    assert (node.node_ip, node.gpu_uuids) == ("10.0.0.9", ["GPU-a", "GPU-b"])
    assert controller.reports[-1].ownership is Ownership.NONE_REQUESTED
    assert controller.reports[-1].unavailable is None


BROKEN_PAGES = {
    "garbage": b"\x00\xff\xfe" * 1000,
    "one line of 12 MB": b"ray_node_gpus_available{" * 500_000,
    "20 MB": b"x" * 20_000_000,
    "impossible values": agent_page([0, 1]).replace(b"40.0", b"NaN").replace(b"20000.0", b"1e308"),
    "more GPUs than were asked for": agent_page(list(range(12))),
    "nothing": b"",
}


def test_a_broken_agent_changes_nothing(gpus: simgpu.StateFile, start: Start, ray: Ray) -> None:
    sidecars = {}
    for number, (kind, page) in enumerate(BROKEN_PAGES.items()):
        ray.pages[f"/{number}/metrics"] = ray.pages[f"/{number}/nodes"] = page
        url = f"{ray.url}/{number}"
        environ = {wiring.ENV_RAY_METRICS_URL: url + "/metrics", wiring.ENV_RAY_DASHBOARD_URL: url}
        sidecars[kind] = start(**on_ray(ray, 8, "head") | environ)
    for kind, sidecar in sidecars.items():
        sidecar.wait(lambda found: len(found.get("gpumonitor_gpu_power_watts", [])) == 8)
        for name, series in sidecar.samples().items():
            assert all(value == value and abs(value) < 1e13 for _, value in series), f"{kind}: {name}"
        assert sidecar.resident_bytes() < 60 * 2**20, kind
        assert sidecar.end() < ENDS_WITHIN_SECONDS, kind
