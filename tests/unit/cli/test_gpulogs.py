# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Logs in all the forms people have them in, and what is said of those that cannot be read."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.cli import columns
from verl_gpumonitor.cli.gpulogs import trace_of
from verl_gpumonitor.cli.logrows import Problems
from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.trace import GpuLine, Header, NotATrace
from verl_gpumonitor.monitor import ResourceMonitor, ResourceSample

GIB, MIB = 2**30, 2**20
SMI = b"""timestamp, index, name, temperature.gpu, utilization.gpu [%], memory.used [MiB], memory.total [MiB]
2026/11/30 21:00:00.100, 0, NVIDIA A100-SXM4-80GB, 64, 85 %, 79872 MiB, 81920 MiB
2026/11/30 21:00:00.101, 1, NVIDIA A100-SXM4-80GB, 41, [N/A], 20480 MiB, 81920 MiB
2026/11/30 21:00:05.100, 0, NVIDIA A100-SXM4-80GB, 65, 86 %, 79873 MiB, 81920 MiB
"""


def read(text: bytes, interval: float = 5.0) -> tuple[Header, list[GpuLine], Problems]:
    problems = Problems()
    header, lines, _ = trace_of(text.splitlines(keepends=True), interval_seconds=interval, problems=problems)
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


TWO_ROUNDS = [("GPU-0", 0.0, 0.85, 78 * GIB), ("GPU-1", 0.0, 0.11, 19 * GIB)]
GUIDE = b"""timestamp, index, name, utilization.gpu [%], memory.used [MiB], memory.total [MiB]
2026/11/30 21:00:00.100, 0, NVIDIA A100-SXM4-80GB, 85 %, 79872 MiB, 81920 MiB
2026/11/30 21:00:00.100, 1, NVIDIA A100-SXM4-80GB, 11 %, 19456 MiB, 81920 MiB
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(GUIDE.replace(b", ", b";"), id="between semicolons"),
        pytest.param(GUIDE.replace(b", ", b"\t"), id="between tabs"),
        pytest.param(GUIDE.replace(b", ", b";").replace(b"85 %", b"85,0"), id="a decimal comma"),
        pytest.param(GUIDE.replace(b"85 %", b'"85,0 %"'), id="a decimal comma between quotes"),
        pytest.param(GUIDE.replace(b"NVIDIA A100-SXM4-80GB", b'"NVIDIA A100, 80GB"'), id="a comma in a name"),
        pytest.param(GUIDE.replace(b"NVIDIA A100-SXM4-80GB", b'"NVIDIA A100'), id="a quote that is never closed"),
        pytest.param(GUIDE.replace(b"\n", b"\r\n"), id="lines as of Windows"),
        pytest.param(b"\n# of today\n\n" + GUIDE, id="something before the head"),
        pytest.param(GUIDE + GUIDE.splitlines(keepends=True)[0], id="the head again"),
        pytest.param(GUIDE.replace(b"2026/11/30", b"30.11.2026"), id="a day first"),
        pytest.param(GUIDE.replace(b"/11/30 21:00:00.100", b"-11-30T21:00:00Z"), id="an ISO time"),
        pytest.param(GUIDE.replace(b"2026/11/30 21:00:00.100", b"1796072400100"), id="milliseconds"),
    ],
)
def test_tables_of_all_countries_and_programs(text: bytes) -> None:
    _, lines, problems = read(text)
    assert (problems.rows, problems.notes) == (0, [])
    assert [(line.uuid, line.t, line.utilization, line.memory_used_bytes) for line in lines] == TWO_ROUNDS


def test_the_query_of_nvidias_own_manual_is_read_by_bus_id() -> None:
    text = (
        b"timestamp, name, pci.bus_id, pstate, utilization.gpu [%], memory.total [MiB], memory.used [MiB]\n"
        b"2026/11/30 21:00:00.100, NVIDIA A100-SXM4-80GB, 00000000:0A:00.0, P0, 85 %, 81920 MiB, 79872 MiB\n"
        b"2026/11/30 21:00:00.100, NVIDIA A100-SXM4-80GB, 00000000:0B:00.0, P0, 11 %, 81920 MiB, 19456 MiB\n"
    )
    _, lines, problems = read(text)
    assert problems.rows == 0
    assert [(line.uuid, line.utilization) for line in lines] == [
        ("00000000:0A:00.0", 0.85),
        ("00000000:0B:00.0", 0.11),
    ]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        pytest.param(b"nan %", "no number", id="no number"),
        pytest.param(b"inf", "no number", id="infinity"),
        pytest.param(b"1e400", "no share", id="too large for a number"),
        pytest.param(b"-5", "no share", id="below zero"),
        pytest.param(b"500 %", "no share", id="more than all"),
    ],
)
def test_what_no_load_can_be_is_refused_and_never_made_to_fit(cell: bytes, says: str) -> None:
    _, lines, problems = read(b"index,utilization.gpu,memory.used\n0," + cell + b",5\n0,50,5\n")
    assert [line.utilization for line in lines] == [0.5]
    assert (problems.rows, says in problems.first[0]) == (1, True)


@pytest.mark.parametrize("cell", [b"-7", b"inf", b"1e30", b"5 apples"])
def test_what_is_no_size_of_memory_is_refused(cell: bytes) -> None:
    _, lines, problems = read(b"index,utilization.gpu,memory.used\n0,50," + cell + b"\n0,50,5\n")
    assert ([line.memory_used_bytes for line in lines], problems.rows) == ([5 * MIB], 1)


@pytest.mark.parametrize("time", [b"inf", b"-5", b"1e300", b"11/30/2026 10:00", b"yesterday"])
def test_what_is_no_time_is_refused(time: bytes) -> None:
    text = b"timestamp,index,utilization.gpu\n1,0,50\n" + time + b",0,60\n9,0,50\n"
    _, lines, problems = read(text)
    assert ([line.t for line in lines], problems.rows) == ([0.0, 8.0], 1)


@pytest.mark.parametrize("cell", [b"[N/A]", b"[Not Supported]", b"[GPU requires reset]", b"nan", b"", b"N/A"])
def test_what_nvidia_smi_cannot_say_is_unknown(cell: bytes) -> None:
    _, lines, problems = read(b"index,utilization.gpu,memory.used,memory.total\n0," + cell + b",5," + cell + b"\n")
    assert (lines[0].utilization, lines[0].memory_used_bytes, problems.rows) == (None, 5 * MIB, 0)


def test_lines_of_a_size_that_no_row_has_are_named() -> None:
    text = b"index,utilization.gpu\n" + b"x" * 300_000 + b"\n" + b"1," * 300_000 + b"\n0,50\n"
    _, lines, problems = read(text)
    assert (len(lines), problems.rows) == (1, 2)
    with pytest.raises(NotATrace, match="no head"):
        read(b"x" * 300_000 + b"\n")


def day(hour: int, minute: int, index: int) -> bytes:
    return b"2026/10/25 %02d:%02d:00.000,%d,50\n" % (hour, minute, index)


TIMED = b"timestamp,index,utilization.gpu\n"


def test_the_hour_that_comes_twice_in_autumn_is_two_hours() -> None:
    rows = [day(2, minute, index) for _ in range(2) for minute in range(60) for index in range(2)]
    _, lines, problems = read(TIMED + b"".join(rows))
    assert (len(lines), lines[-1].t) == (240, 119 * 60.0)
    assert [line.t for line in lines] == sorted(line.t for line in lines)
    assert "goes back" in problems.notes[0]


def test_logs_of_single_gpus_that_were_joined_are_one() -> None:
    rows = [day(2, minute, index) for index in range(3) for minute in range(60)]
    header, lines, problems = read(TIMED + b"".join(rows))
    assert header.pods
    assert len(header.pods[0].gpus or ()) == 3
    assert (len(lines), lines[-1].t, problems.rows, problems.notes) == (180, 59 * 60.0, 0, [])


def test_a_gpu_that_comes_late_and_goes_is_one_of_them() -> None:
    rows = [day(2, minute, index) for minute in range(60) for index in range(2) if index == 0 or 10 < minute < 20]
    header, lines, _ = read(TIMED + b"".join(rows))
    assert header.pods
    assert [gpu.index for gpu in header.pods[0].gpus or ()] == [0, 1]
    assert len([line for line in lines if line.uuid == "GPU-1"]) == 9


def test_a_gpu_whose_uuid_is_sometimes_unknown_is_one() -> None:
    rows = [b"%d,0,%s,50\n" % (60 * at, [b"[N/A]", b"GPU-abc"][at % 2]) for at in range(10)]
    _, lines, problems = read(b"timestamp,index,uuid,utilization.gpu\n" + b"".join(rows))
    assert ({line.uuid for line in lines}, problems.notes) == ({"GPU-abc"}, [])


def test_nvidia_smis_number_says_why_clocks_are_held_down() -> None:
    text = b"index,utilization.gpu,clocks_throttle_reasons.active\n0,50,0x0000000000000040\n"
    _, lines, _ = read(text)
    assert lines[0].throttled == ["hw_thermal_slowdown"]


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_what_resource_monitor_writes_is_read(tmp_path: Path, ending: str) -> None:
    """Its shares run from 0 to 1, its memory is in bytes; a sample without a GPU is the host's alone."""
    path = tmp_path / f"resources{ending}"
    monitor = ResourceMonitor(path=path, marks=False)
    gpus = tuple(
        GpuSample(uuid=f"GPU-{n}", index=n, utilization=0.5, memory_used_bytes=GIB, memory_total_bytes=80 * GIB)
        for n in range(2)
    )
    assert monitor._sink is not None
    for at in range(3):
        monitor._sink.write(ResourceSample(t=1e9 + 20 * at, pid=1, gpus=gpus if at else (), memory_used_bytes=7))
    with path.open("rb") as file:
        header, lines, _ = trace_of(file, interval_seconds=1.0, problems=(problems := Problems()))
        found = [(line.uuid, line.t, line.utilization, line.memory_used_bytes) for line in lines]
    assert (problems.rows, problems.notes) == (0, [])
    assert found == [(f"GPU-{n}", t, 0.5, GIB) for t in (0.0, 20.0) for n in range(2)]
    assert header.pods
    assert [gpu.memory_total_bytes for gpu in header.pods[0].gpus or ()] == [80 * GIB] * 2


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


@pytest.mark.parametrize("text", [b"", b"\n\n", b"\0\0\n"])
def test_of_an_empty_file_it_is_said_that_it_is_empty(text: bytes) -> None:
    with pytest.raises(NotATrace, match="it is empty"):
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
