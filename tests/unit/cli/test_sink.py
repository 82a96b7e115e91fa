# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Files of a log: whole lines, also on a disk that runs full, and no more of them than were asked for."""

import errno
import os
from pathlib import Path

import pytest

from verl_gpumonitor.cli.sink import RotatingFile


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes what fits and says how much that was; only the next call would fail."""
    path = tmp_path / "gpu.csv"
    file = RotatingFile(path, first=b"head\n")
    file.write(b"one\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:3]))
    with pytest.raises(OSError, match="No space left") as full:
        file.write(b"two, which is long\n")
    assert full.value.errno == errno.ENOSPC
    monkeypatch.undo()
    file.write(b"three\n")
    file.close()
    assert path.read_bytes() == b"head\none\nthree\n"


def test_each_file_has_the_head_and_the_oldest_goes(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "gpu.csv", first=b"h\n", max_bytes=6, kept=2)
    for line in (b"aa\n", b"bb\n", b"cc\n", b"dd\n"):
        file.write(line)
    file.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "gpu.csv": b"h\ndd\n",
        "gpu.csv.1": b"h\ncc\n",
        "gpu.csv.2": b"h\nbb\n",
    }


def test_a_line_that_was_cut_off_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_bytes(b"h\n1,2")
    file = RotatingFile(path, first=b"h\n")
    file.write(b"3,4\n")
    file.close()
    assert path.read_bytes() == b"h\n1,2\n3,4\n"


def test_a_file_that_cannot_be_kept_aside_is_said_and_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in which nothing can be renamed: its own error is said, and no other file is closed for it."""

    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    file = RotatingFile(tmp_path / "gpu.csv", first=b"h\n", max_bytes=6)
    file.write(b"aa\n")
    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(PermissionError):
        file.write(b"bb\n")
    file.close()
    assert (tmp_path / "gpu.csv").read_bytes() == b"h\naa\n"
