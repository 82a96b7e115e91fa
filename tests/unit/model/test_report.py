# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The wire model: what is written is read, what breaks a bound is refused, and nothing crashes."""

import json
import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_gpumonitor.model.report import (
    MAX_GPUS,
    MAX_PROCESSES,
    MAX_REPORT_BYTES,
    REPORT_FORMAT,
    CollectionReport,
    GpuProcesses,
    GpuReport,
    HostReport,
    PodRef,
    ProcessReport,
    RayJobInfo,
    RayNode,
    Report,
    ReportAnswer,
    ReportError,
    StepEngine,
    StepReport,
    StepStage,
    decode_answer,
    decode_report,
    encode,
)
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source, UnavailableReason

TEXT = st.text(max_size=60)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


sizes = st.integers(0, 2**50)
ratios = st.floats(0, 1)
counts = st.integers(0, 2**53)
gpus = st.builds(
    GpuReport,
    uuid=st.text(min_size=1, max_size=96),
    state=st.sampled_from(GpuState),
    error=maybe(TEXT),
    index=maybe(st.integers(0, 1024)),
    model=maybe(TEXT),
    utilization=maybe(ratios),
    memory_used_bytes=maybe(sizes),
    memory_peak_bytes=maybe(sizes),
    memory_total_bytes=maybe(sizes),
    power_watts=maybe(st.floats(0, 5000)),
    temperature_celsius=maybe(st.floats(-50, 250)),
    observed_seconds=st.floats(0, 1e10),
    busy_seconds=st.floats(0, 1e10),
    energy_joules=maybe(st.floats(0, 1e15)),
    xid_errors=st.dictionaries(st.integers(0, 99999).map(str), counts, max_size=5),
)
pids = st.integers(1, 2**22)
listed = st.builds(
    GpuProcesses,
    st.integers(0, MAX_GPUS),
    st.lists(st.builds(ProcessReport, pids, maybe(sizes), st.text(max_size=64)), max_size=MAX_PROCESSES),
    counts,
)
steps = st.builds(
    StepReport,
    number=counts,
    begin=st.floats(0, 1e11),
    end=st.floats(0, 1e11),
    stages=st.lists(
        st.builds(
            StepStage,
            stage=st.text(min_size=1, max_size=64),
            role=st.text(min_size=1, max_size=64),
            begin=st.floats(0, 1e11),
            seconds=st.floats(0, 1e10),
            engines=st.lists(st.builds(StepEngine, st.integers(0, MAX_GPUS), sizes), max_size=3),
        ),
        max_size=3,
    ),
)
ray_jobs = st.builds(RayJobInfo, submission_id=TEXT, ray_names=st.lists(st.text(min_size=1, max_size=64), max_size=64))
reports = st.builds(
    Report,
    format=st.just(REPORT_FORMAT),
    pod=st.builds(
        PodRef,
        namespace=st.text(min_size=1, max_size=253),
        name=st.text(min_size=1, max_size=253),
        uid=st.text(min_size=1, max_size=64),
    ),
    start_id=st.text(min_size=8, max_size=64),
    sequence=st.integers(1, 2**53),
    sent_at=st.floats(0, 1e11),
    started_at=st.floats(0, 1e11),
    version=TEXT,
    final=st.booleans(),
    source=st.sampled_from(Source),
    unavailable=maybe(st.sampled_from(UnavailableReason)),
    message=maybe(TEXT),
    gpus_requested=st.integers(0, 1024),
    gpus_visible=maybe(st.integers(0, 1024)),
    ownership=st.sampled_from(Ownership),
    gpus=st.lists(gpus, max_size=4),
    gpu_processes=st.lists(listed, max_size=4),
    steps=st.lists(steps, max_size=2),
    ray_jobs=st.lists(ray_jobs, max_size=2),
    host=maybe(st.builds(HostReport, memory_used_bytes=maybe(sizes), source=maybe(st.text(max_size=32)))),
    collection=st.builds(CollectionReport, collections=counts, timeouts=counts),
    ray_nodes=st.lists(
        st.builds(
            RayNode, node_ip=st.text(max_size=64), gpu_uuids=st.lists(st.text(min_size=1, max_size=96), max_size=4)
        ),
        max_size=3,
    ),
)


@given(report=reports)
@settings(deadline=None)
def test_what_is_written_is_read(report: Report) -> None:
    assert decode_report(encode(report)) == report


@given(accepted=counts, interval=maybe(st.floats(1, 600)), pem=maybe(TEXT))
def test_an_answer_comes_back(accepted: int, interval: float | None, pem: str | None) -> None:
    answer = ReportAnswer(accepted=accepted, interval_seconds=interval, ca_pem=pem)
    assert decode_answer(encode(answer)) == answer


def test_unknown_leaves_no_key() -> None:
    text = encode(GpuReport(uuid="GPU-0"))  # type: ignore[arg-type]
    assert json.loads(text) == {"uuid": "GPU-0"}


def valid() -> dict[str, Any]:
    return {
        "format": REPORT_FORMAT,
        "pod": {"namespace": "ns", "name": "pod", "uid": "u-1"},
        "start_id": "12345678",
        "sequence": 1,
        "sent_at": 1.0,
        "started_at": 1.0,
        "gpus": [{"uuid": "GPU-0"}],
    }


def test_the_smallest_valid_report() -> None:
    assert decode_report(json.dumps(valid()).encode()).gpus[0].state is GpuState.OK


def test_an_older_sidecar_lists_no_processes() -> None:
    report = decode_report(json.dumps(valid()).encode())
    assert report.gpu_processes == []
    assert "gpu_processes" not in json.loads(encode(report))


def test_a_short_list_of_processes_is_completed() -> None:
    report = decode_report(json.dumps({**valid(), "gpu_processes": [[0], [1, [[7], [8, 5]]]]}).encode())
    assert report.gpu_processes == [GpuProcesses(0), GpuProcesses(1, [ProcessReport(7), ProcessReport(8, 5)])]


def test_fields_of_a_later_version_are_skipped() -> None:
    decode_report(json.dumps({**valid(), "later": {"deep": [1, 2]}}).encode())


BROKEN: list[tuple[str, Any]] = [
    ("pod", None),
    ("pod", {"namespace": "", "name": "p", "uid": "u"}),
    ("pod", {"namespace": "n", "name": "x" * 254, "uid": "u"}),
    ("format", "gpumonitor-report/9"),
    ("format", 1),
    ("start_id", "short"),
    ("sequence", 0),
    ("sequence", -1),
    ("sequence", 2**60),
    ("sequence", 1.5),
    ("sent_at", -1),
    ("gpus", [{"uuid": ""}]),
    ("gpus", [{"uuid": "GPU-0"}] * (MAX_GPUS + 1)),
    ("gpus", [{"uuid": "GPU-0", "utilization": 1.01}]),
    ("gpus", [{"uuid": "GPU-0", "utilization": -0.01}]),
    ("gpus", [{"uuid": "GPU-0", "memory_used_bytes": -1}]),
    ("gpus", [{"uuid": "GPU-0", "memory_used_bytes": 2**64 - 1}]),
    ("gpus", [{"uuid": "GPU-0", "memory_used_bytes": 2**63 - 14}]),
    ("gpus", [{"uuid": "GPU-0", "power_watts": 4294967.295}]),
    ("gpus", [{"uuid": "GPU-0", "temperature_celsius": -9.2e18}]),
    ("gpus", [{"uuid": "GPU-0", "busy_seconds": -1}]),
    ("gpus", [{"uuid": "GPU-0", "state": "fine"}]),
    ("gpus", [{"uuid": "GPU-0", "xid_errors": {"drop table": 1}}]),
    ("gpus", [{"uuid": "GPU-0", "xid_errors": {"31": -1}}]),
    ("gpu_processes", [[MAX_GPUS + 1]]),
    ("gpu_processes", [[-1]]),
    ("gpu_processes", [[0, [[0]]]]),
    ("gpu_processes", [[0, [[2**22 + 1]]]]),
    ("gpu_processes", [[0, [[7, -1]]]]),
    ("gpu_processes", [[0, [[7, 2**51]]]]),
    ("gpu_processes", [[0, [[7, 1, "x" * 65]]]]),
    ("gpu_processes", [[0, [[7]] * (MAX_PROCESSES + 1)]]),
    ("gpu_processes", [[0, [], -1]]),
    ("gpu_processes", [[0]] * (MAX_GPUS + 1)),
    ("ray_jobs", [{"submission_id": "a", "ray_names": [""]}]),
    ("ray_jobs", [{"submission_id": "a", "ray_names": ["x"] * 65}]),
    ("ray_jobs", [{"submission_id": "a", "ray_names": ["x" * 65]}]),
    ("source", "rumour"),
    ("message", "x" * 513),
    ("version", "x" * 65),
    ("gpus_requested", 5000),
]


@pytest.mark.parametrize(("field", "value"), BROKEN)
def test_what_breaks_a_bound_is_refused_with_the_field_named(field: str, value: object) -> None:
    with pytest.raises(ReportError) as refused:
        decode_report(json.dumps({**valid(), field: value}).encode())
    assert field.rstrip("s") in str(refused.value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(number: float) -> None:
    """Python's json writes them; JSON has neither."""
    body = json.dumps({**valid(), "gpus": [{"uuid": "GPU-0", "utilization": number}]}).encode()
    with pytest.raises(ReportError):
        decode_report(body)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 400])
def test_numbers_beyond_a_double_are_refused(number: str) -> None:
    body = json.dumps(valid()).replace('"sent_at": 1.0', f'"sent_at": {number}').encode()
    with pytest.raises(ReportError):
        decode_report(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b'"text"',
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"\x00" * 10_000_000,
    ],
)
def test_what_is_no_report_is_refused(body: bytes) -> None:
    with pytest.raises(ReportError):
        decode_report(body)


@given(body=st.binary(max_size=1000))
def test_arbitrary_bytes_are_refused(body: bytes) -> None:
    for decode in (decode_report, decode_answer):
        with pytest.raises(ReportError):
            decode(body)


@given(report=reports, at=st.integers(0, 5000), junk=st.binary(max_size=8))
@settings(deadline=None)
def test_a_damaged_report_is_refused_or_within_its_bounds(report: Report, at: int, junk: bytes) -> None:
    body = encode(report)
    at %= len(body)
    with suppress(ReportError):
        damaged = decode_report(body[:at] + junk + body[at + len(junk) :])
        assert msgspec.convert(msgspec.to_builtins(damaged), Report) == damaged


def test_a_report_of_the_largest_node_is_well_below_the_limit() -> None:
    gpu = GpuReport(
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        error="GPU_IS_LOST",
        index=63,
        model="NVIDIA H100 80GB HBM3",
        utilization=0.123456789,
        memory_used_bytes=2**37,
        memory_reserved_bytes=2**30,
        memory_total_bytes=2**37,
        memory_peak_bytes=2**37,
        memory_recent_peak_bytes=2**37,
        power_watts=612.345,
        power_limit_watts=700.0,
        temperature_celsius=65.0,
        observed_seconds=123456.789,
        busy_seconds=123456.789,
        energy_joules=1234567890.123,
        xid_errors={"31": 2, "79": 1},
    )
    report = Report(
        format=REPORT_FORMAT,
        pod=PodRef(namespace="n" * 63, name="p" * 253, uid="u" * 36),
        start_id="s" * 32,
        sequence=2**40,
        sent_at=1.8e9,
        started_at=1.8e9,
        gpus=[gpu] * MAX_GPUS,
    )
    assert len(encode(report)) < MAX_REPORT_BYTES / 4
