# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Names of the processes that NVML lists, and when its lists cannot be believed."""

from pathlib import Path

import pytest

from verl_gpumonitor.model.samples import GpuProcess, GpuSample, NodeSample
from verl_gpumonitor.model.vocabulary import Source
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.process_watch import MAX_PIDS, ProcessWatch, can_list, read_command


def node(*pids: int, driver: str | None = "570.86.15", listed: bool = True) -> NodeSample:
    found = tuple(GpuProcess(pid=pid, memory_used_bytes=2**30) for pid in pids)
    gpu = GpuSample(uuid="GPU-0", processes=found if listed else None)
    return NodeSample(source=Source.NVML, gpus=(gpu,), driver_version=driver)


class Proc:
    """Command lines, and how often they were asked for."""

    def __init__(self, **commands: str) -> None:
        self.commands = {int(pid.removeprefix("p")): text.encode() for pid, text in commands.items()}
        self.read: list[int] = []

    def __call__(self, pid: int) -> bytes:
        self.read.append(pid)
        return self.commands.get(pid, b"")


def watch(picture: NodeSample, proc: Proc) -> ProcessWatch:
    return ProcessWatch(lambda: picture, journal=Journal(lambda _: None), read=proc)


def test_only_what_is_listed_is_looked_at() -> None:
    proc = Proc(p7="ray::WorkerDict.x", p8="VLLM::EngineCore", p9="sshd")
    seen = watch(node(7, 8, 40), proc)
    assert seen.latest() is None
    seen.turn()
    assert seen.latest() == {7: "ray::WorkerDict", 8: "VLLM::EngineCore", 40: ""}
    assert proc.read == [7, 8, 40]


def test_a_new_title_is_seen_and_a_process_that_is_gone_forgotten() -> None:
    proc = Proc(p7="python3")
    seen = watch(node(7), proc)
    seen.turn()
    proc.commands[7] = b"ray::WorkerDict.x"
    seen.turn()
    assert seen.latest() == {7: "ray::WorkerDict"}
    proc.commands.clear()
    seen.turn()
    assert seen.latest() == {7: ""}


@pytest.mark.parametrize(
    "picture",
    [
        node(7, driver="550.54.15"),
        node(7, driver=None),
        node(7, driver="unknown"),
        node(7, listed=False),
        NodeSample(driver_version="570.86.15"),
    ],
    ids=["an old driver", "no version", "no number", "no list", "no GPU"],
)
def test_lists_that_cannot_be_believed_name_nobody(picture: NodeSample) -> None:
    proc = Proc(p7="python3")
    seen = watch(picture, proc)
    seen.turn()
    assert seen.latest() is None
    assert proc.read == []


def test_an_empty_list_is_one() -> None:
    seen = watch(node(), Proc())
    seen.turn()
    assert seen.latest() == {}


def test_their_number_is_bounded() -> None:
    proc = Proc()
    watch(node(*range(1, 3 * MAX_PIDS)), proc).turn()
    assert len(proc.read) == MAX_PIDS


@pytest.mark.parametrize(("version", "can"), [("565.57.01", True), ("1000.1", True), ("560.35", False), ("٥٦٥", False)])
def test_drivers(version: str, can: bool) -> None:
    assert can_list(version) is can


def test_a_command_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "cmdline").write_bytes(b"x\0" * 4000)
    assert len(read_command(12, str(tmp_path))) == 4096
    assert read_command(13, str(tmp_path)) == b""
