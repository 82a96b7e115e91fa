# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Containers of the job, which come and go on a host that is looked at for months.

What else ties processes to a job is in the tests of the recording, which tells of them.
"""

import shutil
from pathlib import Path

import pytest

from verl_gpumonitor.stages.sources.kin import Kin


class Proc:
    """A /proc of our own, in which containers are told by their mount namespace, as Slurm's are."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put(1)

    def put(self, pid: int, *, parent: int = 1, mounts: str = "mnt:[1]") -> None:
        folder = self.root / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "ns" / "mnt").symlink_to(mounts)
        (folder / "stat").write_text(f"{pid} (python3) S {parent} " + "0 " * 18)

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))

    def keep(self, kin: Kin) -> None:
        kin.keep({int(each.name) for each in self.root.iterdir()})


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_a_container_is_the_jobs_while_anybody_known_lives_in_it(proc: Proc) -> None:
    proc.put(10, mounts="mnt:[7]")
    proc.put(11, parent=10, mounts="mnt:[7]")
    kin = Kin(proc.root)
    kin.join(11)
    proc.end(11)
    proc.keep(kin)
    proc.put(12, mounts="mnt:[7]")
    assert kin.has(12), "the process that began the one on the GPU is there still"
    proc.end(10)
    proc.keep(kin)
    proc.put(13, mounts="mnt:[7]")
    assert kin.has(13), "and now the one that was found by it"


def test_the_number_of_a_container_is_given_to_another_one(proc: Proc) -> None:
    proc.put(9)
    proc.put(10, parent=9, mounts="mnt:[7]")
    kin = Kin(proc.root)
    kin.join(10)
    proc.end(10)
    proc.keep(kin)
    proc.put(11, mounts="mnt:[7]")
    assert not kin.has(11)
