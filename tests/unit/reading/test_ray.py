# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Ray's own words, recorded from Ray 2.60 on simulated GPUs, and whatever else may come over that socket."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.reading.ray_agent import AgentParser, named_gpus
from verl_gpumonitor.reading.ray_head import RayHeadError, RayNodeGpus, parse_nodes
from verl_gpumonitor.reading.samples import RayAgentSample

RECORDED = Path(__file__).with_name("ray-2.60")
METRICS = (RECORDED / "agent-metrics.txt").read_bytes()
UUIDS = tuple(f"GPU-{n:08x}-5eed-4a00-8000-{n:012x}" for n in range(4))
MIB = 2**20


def parsed(text: bytes, piece: int | None = None) -> RayAgentSample:
    parser = AgentParser()
    for at in range(0, len(text), piece or max(1, len(text))):
        parser.feed(text[at : at + (piece or len(text))])
    return parser.finish(taken_at=5.0)


def line(name: str, value: str, **labels: str) -> bytes:
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}\n".encode()


def test_recorded_agent() -> None:
    sample = parsed(METRICS)
    assert tuple(gpu.uuid for gpu in sample.gpus) == UUIDS
    assert sample.unnamed_gpus == {}
    idle, busy = sample.gpus[0], sample.gpus[1]
    assert (busy.utilization, busy.power_watts, busy.temperature_celsius) == (0.6, 240.0, 58.0)
    assert (busy.memory_used_bytes, busy.memory_total_bytes) == (21080 * MIB, 81920 * MIB)
    assert (busy.model, busy.index, busy.taken_at) == ("NVIDIA A100-SXM4-80GB", 1, 5.0)
    assert (idle.utilization, idle.memory_used_bytes) == (0.0, 600 * MIB)
    assert sample.host is not None
    assert sample.host.source == "ray-agent"
    assert sample.host.memory_used_bytes == 1868193792
    assert sample.host.memory_limit_bytes == 25276063744


@pytest.mark.parametrize("piece", [1, 7, 100, 4096])
def test_the_text_may_come_in_pieces_of_any_size(piece: int) -> None:
    assert parsed(METRICS, piece) == parsed(METRICS)


def test_an_older_ray_names_indexes_alone() -> None:
    """Ray 2.43 has no GpuUuid; the head's list, in the order of the index, names them."""
    text = b"".join(
        line("ray_node_gpus_utilization", f"{10 * n}.0", GpuIndex=str(n), GpuDeviceName="NVIDIA H100") for n in (1, 0)
    )
    sample = parsed(text)
    assert sample.gpus == ()
    assert sorted(sample.unnamed_gpus) == [0, 1]
    named = named_gpus(sample, UUIDS[:2])
    assert [(gpu.uuid, gpu.utilization) for gpu in named] == [(UUIDS[0], 0.0), (UUIDS[1], 0.1)]
    assert named_gpus(sample, UUIDS) == (), "another number of UUIDs names nobody"
    assert named_gpus(sample, ()) == ()


def test_gpus_that_are_named_need_no_other_names() -> None:
    sample = parsed(METRICS)
    assert named_gpus(sample, ()) == sample.gpus


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (line("ray_node_gpus_utilization", "NaN", GpuUuid="GPU-a", GpuIndex="0"), "utilization"),
        (line("ray_node_gpus_utilization", "4294967295", GpuUuid="GPU-a", GpuIndex="0"), "utilization"),
        (line("ray_node_gpus_utilization", "-1", GpuUuid="GPU-a", GpuIndex="0"), "utilization"),
        (line("ray_node_gpu_power_milliwatts", "1e30", GpuUuid="GPU-a", GpuIndex="0"), "power_watts"),
        (line("ray_node_gpu_temperature_celsius", "-9.2e18", GpuUuid="GPU-a", GpuIndex="0"), "temperature_celsius"),
        (line("ray_node_gram_used", "+Inf", GpuUuid="GPU-a", GpuIndex="0"), "memory_used_bytes"),
        (line("ray_node_gram_used", "100", GpuUuid="GPU-a", GpuIndex="0"), "memory_used_bytes"),
    ],
)
def test_garbage_is_unknown(text: bytes, what: str) -> None:
    sample = parsed(line("ray_node_gpus_available", "1.0", GpuUuid="GPU-a", GpuIndex="0") + text)
    assert [gpu.uuid for gpu in sample.gpus] == ["GPU-a"]
    assert getattr(sample.gpus[0], what) is None


def test_more_gpus_than_a_node_can_have_are_not_believed() -> None:
    text = b"".join(line("ray_node_gpus_available", "1", GpuUuid=f"GPU-{n}", GpuIndex="0") for n in range(1000))
    assert len(parsed(text).gpus) == 64


def test_a_line_without_end_is_not_kept() -> None:
    parser = AgentParser()
    for _ in range(1000):
        parser.feed(b"ray_node_gpus_available{" + b"x" * 10000)
    parser.feed(b"\n" + line("ray_node_gpus_available", "1", GpuUuid="GPU-a", GpuIndex="0"))
    assert [gpu.uuid for gpu in parser.finish(taken_at=0).gpus] == ["GPU-a"]


def test_labels_may_hold_quotes_braces_and_commas() -> None:
    labels = rb'GpuDeviceName="a \"b\", {c} \\",GpuIndex="0",GpuUuid="GPU-a"'
    text = b"ray_node_gpus_utilization{" + labels + b"} 50.0 1700000000\n"
    gpu = parsed(text).gpus[0]
    assert (gpu.model, gpu.utilization) == ('a "b", {c} \\', 0.5)


@given(text=st.binary(max_size=2000))
def test_arbitrary_bytes_never_crash(text: bytes) -> None:
    parsed(text)
    parsed(METRICS[:3000] + text + METRICS[3000:6000])


@given(at=st.integers(0, len(METRICS)), junk=st.binary(max_size=40))
def test_a_broken_place_costs_no_crash_and_invents_no_gpu(at: int, junk: bytes) -> None:
    sample = parsed(METRICS[:at] + junk + METRICS[at:])
    for gpu in sample.gpus:
        assert gpu.utilization is None or 0 <= gpu.utilization <= 1
        assert gpu.memory_used_bytes is None or gpu.memory_used_bytes >= 0


# --- the head ---


def test_recorded_summary_and_detail() -> None:
    expected = [RayNodeGpus(node_ip="192.0.2.2", gpu_uuids=UUIDS)]
    assert parse_nodes((RECORDED / "nodes-summary.json").read_bytes()) == expected
    assert parse_nodes((RECORDED / "node-detail.json").read_bytes()) == expected


def summary(*nodes: dict[str, object]) -> bytes:
    return json.dumps({"result": True, "data": {"summary": nodes}}).encode()


@pytest.mark.parametrize(
    ("node", "uuids"),
    [
        pytest.param(
            {"ip": "10.0.0.1", "gpus": [{"index": 1, "uuid": "b"}, {"index": 0, "uuid": "a"}]},
            ("a", "b"),
            id="by index",
        ),
        pytest.param({"ip": "10.0.0.1", "gpus": []}, None, id="no GPU"),
        pytest.param({"ip": "10.0.0.1"}, None, id="nothing known of GPUs"),
        pytest.param({"gpus": [{"index": 0, "uuid": "a"}]}, None, id="no address"),
        pytest.param({"ip": "10.0.0.1", "gpus": [{"index": 0, "uuid": "a"}, {"index": 1}]}, None, id="not whole"),
        pytest.param(
            {"ip": "10.0.0.1", "gpus": [{"index": 0, "uuid": "a"}], "raylet": {"state": "DEAD"}}, None, id="dead"
        ),
        pytest.param({"ip": "10.0.0.1", "gpus": [{"index": 0, "uuid": "a" * 500}]}, None, id="an absurd UUID"),
        pytest.param(
            {"ip": "10.0.0.1", "gpus": [{"index": n, "uuid": f"u{n}"} for n in range(65)]}, None, id="too many"
        ),
    ],
)
def test_nodes(node: dict[str, object], uuids: tuple[str, ...] | None) -> None:
    expected = [] if uuids is None else [RayNodeGpus(node_ip="10.0.0.1", gpu_uuids=uuids)]
    assert parse_nodes(summary(node)) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"data": 5}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_answer_of_the_dashboard(body: bytes) -> None:
    with pytest.raises(RayHeadError):
        parse_nodes(body)


@given(body=st.binary(max_size=500))
def test_arbitrary_answers_are_refused_or_empty(body: bytes) -> None:
    with suppress(RayHeadError):
        assert parse_nodes(body) == []
