# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Files of real processes that are read again and again."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_gpumonitor.stages.sources.proc_files import MAX_OPEN, ProcFiles

PROC = Path("/proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        while (
            ProcFiles(PROC).command_line(process.pid) != b"sleep\x0060\x00"
        ):  # It is no sleeper from the first moment.
            time.sleep(0.01)
        yield process
        process.kill()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_kept_file_follows_its_process(sleeper: subprocess.Popen[bytes]) -> None:
    files = ProcFiles(PROC)
    before = open_files()
    first = [files.command_line(sleeper.pid, keep=True) for _ in range(3)]
    assert open_files() == before + 1
    sleeper.kill()
    # A zombie has no command line any more, but still a state.
    while files.command_line(sleeper.pid, keep=True):
        time.sleep(0.01)
    zombie = files.command_line(sleeper.pid, keep=True), files.stat(sleeper.pid) != b""
    sleeper.wait()
    gone = files.command_line(sleeper.pid, keep=True), files.command_line(sleeper.pid, keep=True)
    assert first == [b"sleep\x0060\x00"] * 3
    assert zombie == (b"", True)
    assert gone == (None, b"")
    assert open_files() == before


def test_without_keeping_nothing_stays_open(sleeper: subprocess.Popen[bytes]) -> None:
    files = ProcFiles(PROC)
    before = open_files()
    files.command_line(sleeper.pid)
    files.stat(sleeper.pid)
    files.newest_pid()
    assert sleeper.pid in files.pids()
    assert open_files() == before


def test_no_more_than_so_many_stay_open(tmp_path: Path) -> None:
    for pid in range(1, MAX_OPEN + 10):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(b"ray::IDLE")
    files = ProcFiles(tmp_path)
    before = open_files()
    assert {files.command_line(pid, keep=True) for pid in range(1, MAX_OPEN + 10)} == {b"ray::IDLE"}
    assert open_files() == before + MAX_OPEN
    for pid in range(1, MAX_OPEN + 10):
        files.forget(pid)
    assert open_files() == before


def test_the_number_given_last_grows_with_each_process() -> None:
    files = ProcFiles(PROC)
    before = files.newest_pid()
    subprocess.run(["true"], check=True)
    assert before.strip().isdigit()
    assert files.newest_pid() != before


def test_where_there_is_no_proc(tmp_path: Path) -> None:
    files = ProcFiles(tmp_path / "absent")
    assert (files.pids(), files.newest_pid(), files.stat(1)) == (set(), b"", b"")
    assert files.command_line(1, keep=True) == b""
