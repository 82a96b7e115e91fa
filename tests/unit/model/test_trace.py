# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
from typing import get_args

import pytest

from verl_gpumonitor.model.trace import (
    KNOWN_TYPES,
    TRACE_FORMAT,
    BrokenLine,
    GpuLine,
    Header,
    NotATrace,
    Record,
    parse_header,
    parse_line,
)


def test_a_sample_is_read_with_what_is_known_of_it() -> None:
    line = parse_line(
        b'{"type":"gpu","t":1.5,"pod":"w","uuid":"GPU-1","utilization":null,"memory_used_bytes":5,"new":1}'
    )
    assert line == GpuLine(t=1.5, pod="w", uuid="GPU-1", memory_used_bytes=5)


def test_a_mean_of_bytes_is_a_number_too() -> None:
    line = parse_line(b'{"type":"gpu","t":1,"pod":"w","uuid":"GPU-1","memory_used_bytes":1.5e9}')
    assert isinstance(line, GpuLine)
    assert line.memory_used_bytes == 1.5e9


@pytest.mark.parametrize("line", [b'{"type":"comet","t":1}', b'{"type":"comet"}'])
def test_a_type_that_is_not_known_is_passed_over(line: bytes) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b"[1]", id="no object"),
        pytest.param(b'{"t":1}', id="no type"),
        pytest.param(b'{"type":"gpu","t":1,"pod":"w"', id="cut off"),
        pytest.param(b'{"type":"gpu","t":"one","pod":"w","uuid":"g"}', id="a time in words"),
        pytest.param(b'{"type":"gpu","t":-1,"pod":"w","uuid":"g"}', id="a time before the start"),
        pytest.param(b'{"type":"gpu","t":NaN,"pod":"w","uuid":"g"}', id="no number"),
        pytest.param(b'{"type":"gpu","t":1,"pod":"w","uuid":"g","utilization":17}', id="more than all"),
        pytest.param(b'{"type":"gpu","t":1,"pod":"w","uuid":"g","memory_used_bytes":-1}', id="less than nothing"),
        pytest.param(b'{"type":"gpu","t":1,"pod":"w","uuid":null}', id="no uuid"),
        pytest.param(b"[" * 100_000, id="without end"),
    ],
)
def test_a_broken_line_says_so(line: bytes) -> None:
    with pytest.raises(BrokenLine):
        parse_line(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(b'{"type":"header","format":"other/9"}', "other/9", id="another format"),
        pytest.param(b'{"type":"step","t":1}', "no header", id="another line"),
        pytest.param(b"hello", "no header", id="no trace"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_reason(line: bytes, said: str) -> None:
    with pytest.raises(NotATrace, match=said):
        parse_header(line)


def test_a_header_may_know_nothing_but_its_format() -> None:
    assert parse_header(b'{"type":"header","format":"gpumonitor-trace/1"}') == Header(format=TRACE_FORMAT)


def test_the_types_are_those_of_the_format() -> None:
    kinds = {kind.__struct_config__.tag for kind in get_args(Record)}
    assert kinds | {"header"} == KNOWN_TYPES
