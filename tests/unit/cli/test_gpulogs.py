# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Logs in all the forms people have them in, and what is said of those that cannot be read."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.cli import columns
from verl_gpumonitor.cli.gpulogs import Problems, trace_of
from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.trace import GpuLine, Header, NotATrace

GIB, MIB = 2**30, 2**20
SMI = b"""timestamp, index, name, temperature.gpu, utilization.gpu [%], memory.used [MiB], memory.total [MiB]
2026/11/30 21:00:00.100, 0, NVIDIA A100-SXM4-80GB, 64, 85 %, 79872 MiB, 81920 MiB
2026/11/30 21:00:00.101, 1, NVIDIA A100-SXM4-80GB, 41, [N/A], 20480 MiB, 81920 MiB
2026/11/30 21:00:05.100, 0, NVIDIA A100-SXM4-80GB, 65, 86 %, 79873 MiB, 81920 MiB
"""


def read(text: bytes, interval: float = 5.0) -> tuple[Header, list[GpuLine], Problems]:
    problems = Problems()
    header, lines = trace_of(text.splitlines(keepends=True), interval_seconds=interval, problems=problems)
    return header, list(lines), problems


def test_nvidia_smi_as_it_prints_with_units() -> None:
    header, lines, problems = read(SMI)
    assert problems.rows == 0
    assert header.pods is not None
    gpus = header.pods[0].gpus or []
    assert [(gpu.uuid, gpu.index, gpu.memory_total_bytes) for gpu in gpus] == [
        ("GPU-0", 0, 80 * GIB),
        ("GPU-1", 1, 80 * GIB),
    ]
    assert [(round(line.t, 3), line.uuid, line.utilization) for line in lines] == [
        (0.0, "GPU-0", 0.85),
        (0.001, "GPU-1", None),
        (5.0, "GPU-0", 0.86),
    ]
    assert lines[0].memory_used_bytes == 78 * GIB


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"memory.used [MiB],index,utilization.gpu [%]\n1024,0,50\n1024,1,50\n1024,0,50\n", id="nounits"),
        pytest.param(
            b"index, utilization.gpu, memory.used\n0, 50, 1024\n1, 50, 1024\n0, 50, 1024\n", id="no units at all"
        ),
        pytest.param(
            b"index,memory.used,utilization.gpu\n0,1 GiB,50 %\n1,1.0 GiB,50%\n0,1 GiB,50 %\n", id="units by hand"
        ),
        pytest.param(
            b"index,name,temperature,utilization,memory\n0,A,40,50,1024\n1,A,40,50,1024\n0,A,40,50,1024\n",
            id="short names",
        ),
        pytest.param(
            b'{"index":0,"utilization":0.5,"memory_used_bytes":1073741824}\n'
            b'{"index":1,"utilization":0.5,"memory_used_bytes":1073741824}\n'
            b'{"index":0,"utilization":0.5,"memory_used_bytes":1073741824}\n',
            id="JSON lines",
        ),
    ],
)
def test_the_same_log_in_other_forms(text: bytes) -> None:
    """Without times each round is one interval after the one before."""
    _, lines, problems = read(text, interval=20.0)
    assert problems.rows == 0
    assert [(line.t, line.uuid, line.utilization, line.memory_used_bytes) for line in lines] == [
        (0.0, "GPU-0", 0.5, GIB),
        (0.0, "GPU-1", 0.5, GIB),
        (20.0, "GPU-0", 0.5, GIB),
    ]


def test_rows_within_five_seconds_are_one_line_that_keeps_the_peak() -> None:
    """The first line, of the first five seconds, has the mean load, the newest memory and its peak."""
    rows = [b"timestamp,index,utilization.gpu,memory.used"]
    rows += [
        b"%d,0,%d,%d" % (1000 + at, load, used) for at, load, used in ((0, 10, 5), (2, 20, 9), (4, 30, 7), (6, 0, 1))
    ]
    _, lines, _ = read(b"\n".join(rows) + b"\n")
    assert [(line.t, line.utilization, line.memory_used_bytes, line.memory_peak_bytes) for line in lines] == [
        (4.0, pytest.approx(0.2), 7 * MIB, 9 * MIB),
        (6.0, 0.0, MIB, MIB),
    ]


def test_a_model_names_its_memory_where_the_log_does_not() -> None:
    header, _, _ = read(b"index,name,memory.used [MiB]\n0,NVIDIA A100-SXM4-80GB,1\n0,NVIDIA A100-SXM4-80GB,1\n")
    assert header.pods
    assert header.pods[0].gpus
    assert header.pods[0].gpus[0].memory_total_bytes == 80 * GIB


def test_broken_rows_are_named_and_the_rest_is_read() -> None:
    """A garbled row, one cut off by a full disk, and the head again, as when two logs were joined."""
    text = (
        SMI
        + b"2026/11/30 21:00:09, x, A, 1, 1 %, 1 MiB, 1 MiB\n"
        + SMI.splitlines(keepends=True)[0]
        + b"2026/11/30 21:0"
    )
    _, lines, problems = read(text)
    assert len(lines) == 3
    assert problems.rows == 2
    assert problems.first[0].startswith("line 5:")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"a,b,c\n1,2,3\n", id="another table"),
        pytest.param(b"\x1f\x8b\x00\xff\n", id="binary"),
        pytest.param(SMI.splitlines(keepends=True)[0], id="a head alone"),
        pytest.param(b'{"a": 1}\n', id="other JSON"),
        pytest.param(b"0, NVIDIA A100, 40, 50 %\n", id="nvidia-smi with noheader"),
    ],
)
def test_what_is_no_log_is_refused_with_what_to_do(text: bytes) -> None:
    with pytest.raises(NotATrace, match="gpumon log"):
        read(text)


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(NotATrace):
        read(data)


@given(
    st.lists(
        st.builds(
            GpuSample,
            uuid=st.sampled_from(["GPU-a", "GPU-b"]),
            index=st.just(0),
            utilization=st.none() | st.integers(0, 100).map(lambda percent: percent / 100),
            memory_used_bytes=st.none() | st.integers(0, 80 * 1024).map(lambda mib: mib * MIB),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_what_gpumon_log_writes_is_read_back(samples: list[GpuSample]) -> None:
    names = columns.chosen("+uuid")
    rows = [columns.csv_row(sample, names, unix=1e9 + 20 * at) for at, sample in enumerate(samples)]
    _, lines, problems = read((columns.head(names) + "".join(rows)).encode())
    assert problems.rows == 0
    assert [(line.uuid, line.utilization, line.memory_used_bytes) for line in lines] == [
        (sample.uuid, sample.utilization, sample.memory_used_bytes) for sample in samples
    ]
