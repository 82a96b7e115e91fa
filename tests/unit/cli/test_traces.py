# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
import gc
import gzip
from pathlib import Path

import pytest

from verl_gpumonitor.cli.records import open_run
from verl_gpumonitor.cli.traces import TraceReader, open_trace
from verl_gpumonitor.model.trace import NotATrace, StepLine, TraceError

HEADER = b'{"type":"header","format":"gpumonitor-trace/1"}'


def _step(t: float, step: int = 0) -> bytes:
    return b'{"type":"step","t":%g,"step":%d}' % (t, step)


def _times(*lines: bytes) -> list[float]:
    return [record.t for record in TraceReader([HEADER, *lines]).records()]


@pytest.mark.parametrize(
    ("lines", "times"),
    [
        pytest.param([_step(1), _step(2), _step(9)], [1, 2, 9], id="in order"),
        pytest.param([_step(3), _step(1.5), _step(9)], [1.5, 3, 9], id="out of order by less than two seconds"),
        pytest.param([_step(1, 1), _step(1, 1), _step(2)], [1, 2], id="a line that comes twice is one"),
        pytest.param([_step(1, 1), _step(1, 2)], [1, 1], id="two lines of one moment are two"),
        pytest.param([], [], id="none"),
    ],
)
def test_records_come_in_order_and_once(lines: list[bytes], times: list[float]) -> None:
    assert _times(*lines) == times


def test_a_line_that_comes_too_late_is_named_and_passed_over() -> None:
    reader = TraceReader([HEADER, _step(1), _step(10), _step(20), _step(5)])
    assert [record.t for record in reader.records()] == [1, 10, 20]
    assert [problem.line for problem in reader.problems] == [5]


def test_broken_lines_are_counted_and_the_first_are_named() -> None:
    reader = TraceReader([HEADER, *([b"{broken"] * 80), b"", b'{"type":"comet"}', _step(3)])
    assert list(reader.records()) == [StepLine(t=3, step=0)]
    assert (reader.problem_count, len(reader.problems), reader.problems[0].line) == (80, 50, 2)


@pytest.mark.parametrize("packed", [True, False])
def test_a_file_is_read_plain_or_packed(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "trace"
    text = b"\n".join([HEADER, _step(1), _step(2)])
    path.write_bytes(gzip.compress(text) if packed else text)
    with open_trace(str(path)) as reader:
        assert [record.t for record in reader.records()] == [1, 2]


def test_a_packed_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    lines = [HEADER, *(_step(t, t * 7919 % 1000) for t in range(20_000))]
    path.write_bytes(gzip.compress(b"\n".join(lines))[:40_000])
    with open_trace(str(path)) as reader:
        read = sum(1 for _ in reader.records())
    assert 1_000 < read < 20_000
    assert any("too early" in problem.text for problem in reader.problems)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "No such file", id="no file"),
        pytest.param(b"", "empty", id="an empty one"),
        pytest.param(b"a,b,c\n1,2,3\n", "no header", id="another kind of file"),
        pytest.param(b"\x1f\x8bnot gzip", "cannot be read", id="what only looks packed"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=said), open_trace(str(path)):
        pass


def test_an_empty_iterable_is_no_trace() -> None:
    with pytest.raises(NotATrace):
        TraceReader([])


ROWS = [HEADER, _step(1), _step(2)]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\xef\xbb\xbf" + b"\n".join(ROWS), id="a mark of UTF-8"),
        pytest.param(b"\n".join(ROWS).decode().encode("utf-16"), id="UTF-16 as PowerShell writes it"),
        pytest.param(b"\xfe\xff" + b"\n".join(ROWS).decode().encode("utf-16-be"), id="the other UTF-16"),
        pytest.param(b"\n".join(ROWS).decode().encode("utf-16-le"), id="UTF-16 without a mark"),
        pytest.param(b"\r\n".join(ROWS), id="lines as of Windows"),
        pytest.param(b"\r".join(ROWS), id="lines as of an old Mac"),
        pytest.param(b"\n\n" + b"\n".join(ROWS), id="empty lines before"),
        pytest.param(gzip.compress(b"\xef\xbb\xbf" + b"\n".join(ROWS)), id="packed, with a mark"),
    ],
)
def test_text_of_all_systems_is_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with open_run(str(path)) as run:
        assert [record.t for record in run.records] == [1, 2]
        assert list(run.complaints) == []


@pytest.mark.parametrize(("magic", "name"), [(b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh9", "bzip2")])
def test_what_is_packed_otherwise_is_named(tmp_path: Path, magic: bytes, name: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(magic + b"\r\n\0" * 50)
    with pytest.raises(TraceError, match=f"packed as {name}"), open_run(str(path)):
        pass


def test_a_packed_log_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv.gz"
    rows = b"".join(b"%d,0,%d\n" % (100 * at, at * 7 % 101) for at in range(5000))
    path.write_bytes(gzip.compress(b"timestamp,index,utilization.gpu\n" + rows)[:-2000])
    with open_run(str(path)) as run:
        assert len(list(run.records)) > 100
        assert "ends too early" in next(iter(run.complaints))


def test_a_fault_of_whoever_reads_is_not_the_files(tmp_path: Path) -> None:
    """A pipe that is closed while the lines are shown is no file that cannot be read."""
    path = tmp_path / "trace"
    path.write_bytes(b"\n".join(ROWS))
    with pytest.raises(BrokenPipeError), open_run(str(path)):
        raise BrokenPipeError


def test_a_file_that_is_left_in_its_middle_says_nothing_afterwards(tmp_path: Path) -> None:
    """Warnings are errors here, those of what is collected later too."""
    path = tmp_path / "table.csv"
    path.write_bytes(("a,b\n" + "1,2\n" * 20_000).encode("utf-16"))
    with pytest.raises(TraceError, match="no head"), open_run(str(path)):
        pass
    gc.collect()
