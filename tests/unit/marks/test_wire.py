# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A mark on the wire: small, and whatever else arrives on the port is refused quietly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.marks import (
    MAX_MARK_BYTES,
    MAX_MARK_GPUS,
    MAX_OPEN,
    Mark,
    MarkScope,
    MarkState,
    decode,
    encode,
)

FULL = Mark(
    state=MarkState.END,
    stage="update_actor",
    t=1764537600.123456,
    process="0123456789abcdef",
    pid=4711,
    seq=12,
    span=11,
    begin=1764537500.5,
    open=[3, 7],
    scope=MarkScope.RANK,
    role="actor",
    step=42,
    rank=13,
    local_rank=5,
    gpus=[f"GPU-{n:08x}-0000-0000-0000-000000000000" for n in range(8)],
    job="raysubmit_abc",
    memory_used_bytes=2**40,
    memory_limit_bytes=2**41,
)
SMALL: dict[str, object] = {"state": "begin", "stage": "gen", "t": 1.0, "process": "0" * 16, "pid": 1, "seq": 1}


def test_a_mark_comes_back_as_it_went() -> None:
    datagram = encode(FULL)
    assert datagram is not None
    assert len(datagram) <= MAX_MARK_BYTES
    assert decode(datagram) == FULL


def test_gpus_are_left_out_when_they_make_it_too_long() -> None:
    long = Mark(
        state=MarkState.BEGIN,
        stage="s" * 64,
        t=1764537600.123456,
        process="0123456789abcdef",
        pid=2**31,
        seq=2**53,
        open=[2**53] * MAX_OPEN,
        gpus=["G" * 96] * MAX_MARK_GPUS,
        job="j" * 128,
    )
    datagram = encode(long)
    assert datagram is not None
    found = decode(datagram)
    assert found is not None
    assert found.gpus == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"state": "start"}, id="unknown state"),
        pytest.param({"stage": ""}, id="no stage"),
        pytest.param({"stage": "x" * 65}, id="stage too long"),
        pytest.param({"stage": "gen\ninjected 1"}, id="line break in a stage"),
        pytest.param({"role": "\x1b[31m"}, id="escape in a role"),
        pytest.param({"t": -1}, id="time before the epoch"),
        pytest.param({"t": 1e300}, id="time out of any range"),
        pytest.param({"t": "now"}, id="time is no number"),
        pytest.param({"process": "ABCDEF0123456789"}, id="process in capitals"),
        pytest.param({"process": "0" * 17}, id="process too long"),
        pytest.param({"pid": 0}, id="pid of nobody"),
        pytest.param({"seq": -1}, id="negative number"),
        pytest.param({"seq": 2**64}, id="number beyond 64 bits"),
        pytest.param({"open": list(range(17))}, id="too many open"),
        pytest.param({"gpus": [""]}, id="empty UUID"),
        pytest.param({"gpus": ["GPU-\u202e"]}, id="a UUID that reverses text"),
        pytest.param({"step": -1}, id="negative step"),
        pytest.param({"memory_used_bytes": -1}, id="negative memory"),
    ],
)
def test_what_is_no_mark_is_none(change: dict[str, object]) -> None:
    assert decode(json.dumps(SMALL).encode()) is not None
    assert decode(json.dumps(SMALL | change).encode()) is None


def test_unknown_fields_are_passed_over_so_that_the_format_can_grow() -> None:
    assert decode(json.dumps(SMALL | {"later": [1, {"a": None}]}).encode()) is not None


@pytest.mark.parametrize(
    "datagram",
    [b"", b"{}", b"null", b"[" * 1024, b'{"a":' * 200, b"\xff\xfe", b"1" * 1024, b"x" * 1025, b'{"t":NaN}'],
    ids=["empty", "no fields", "null", "deep list", "deep object", "no text", "large number", "too long", "NaN"],
)
def test_garbage_is_none(datagram: bytes) -> None:
    assert decode(datagram) is None


@given(st.binary(max_size=1100))
def test_no_bytes_raise(datagram: bytes) -> None:
    assert decode(datagram) is None
