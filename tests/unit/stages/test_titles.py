# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What runs in a pod, by the titles of its processes."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.stages.sources import titles as titles_module
from verl_gpumonitor.stages.sources.proc_files import ProcFiles
from verl_gpumonitor.stages.sources.titles import (
    LIST_ANYWAY_SCANS,
    LIST_SCANS,
    RARE_SCANS,
    SETTLED_SCANS,
    ProcessStat,
    Titles,
    parse_stat,
    parse_title,
)

UPDATE = "ray::WorkerDict.actor_rollout_ref_update_actor"
SAVE = "ray::WorkerDict.actor_rollout_ref_save_checkpoint"


class FakeProc:
    """A tree like /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "meminfo").write_text("")
        self.put(1, "pause", "/pause", parent=0)
        self.put(7, "raylet", "/ray/raylet --port=1", parent=1)

    def put(self, pid: int, name: str, title: str, *, parent: int = 7, ticks: int = 0, started: int = 5) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "cmdline").write_bytes(title.replace(" ", "\0").encode() + b"\0" * 40)
        fields = ["S", parent, *[0] * 9, ticks, 0, *[0] * 6, started, 0, 0]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")

    def remove(self, pid: int) -> None:
        for file in (self.root / str(pid)).iterdir():
            # An open file of a process that is gone tells nothing.
            file.write_text("")
            file.unlink()
        (self.root / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def scanned(proc: FakeProc, *times: float) -> Titles:
    titles = Titles(proc.root, ticks_per_second=100)
    for at in times:
        titles.observe(at)
    return titles


def stages(titles: Titles, now: float) -> list[tuple[str, int | None, float, float | None]]:
    return [(each.stage, each.pid, each.begin, each.end) for each in titles.word(now).intervals]


def test_titles_become_intervals(proc: FakeProc) -> None:
    proc.put(20, "ray::WorkerDict", "ray::WorkerDict")
    proc.put(21, "ray::WorkerDict", "ray::WorkerDict")
    titles = scanned(proc, 10)
    proc.put(20, "ray::WorkerDict", UPDATE)
    titles.observe(11)
    proc.put(20, "ray::WorkerDict", SAVE)
    titles.observe(12)
    word = titles.word(12)
    assert (word.source, word.known_from, word.known_until) == (StageSource.TITLES, 10, 12)
    assert stages(titles, 12) == [("update_actor", 20, 10.5, 11.5), ("save_checkpoint", 20, 11.5, None)]
    assert {each.resolution_seconds for each in word.intervals} == {1.0}


@pytest.mark.parametrize(
    ("processes", "seen"),
    [
        pytest.param([], [], id="no worker"),
        pytest.param([(20, 7, UPDATE)], ["update_actor"], id="a worker of the raylet"),
        pytest.param([(20, 7, "ray::WorkerDict"), (30, 20, SAVE)], [], id="a child that kept its parent's title"),
        pytest.param([(20, 7, UPDATE), (30, 20, UPDATE)], ["update_actor"], id="the title of both at the time"),
        pytest.param([(20, 7, UPDATE), (30, 20, UPDATE), (40, 30, UPDATE)], ["update_actor"], id="a child's child"),
        pytest.param([(20, 7, "ray::WorkerDict"), (30, 1, SAVE)], [], id="a child whose parent is gone"),
        pytest.param([(20, 7, "ray::WorkerDict"), (30, 0, SAVE)], [], id="a child of nobody"),
        pytest.param([(19, 7, "bash -c exec"), (20, 19, UPDATE)], ["update_actor"], id="a worker behind a shell"),
        pytest.param([(20, 7, "vllm VLLM::Worker"), (21, 7, "VLLM::Worker_TP0")], [], id="an engine tells no stage"),
        pytest.param([(20, 7, "ray::vLLMHttpServer.wake_up")], ["update_weights"], id="a server"),
        pytest.param([(20, 7, "ray::AgentLoopWorker.generate_sequences")], ["gen"], id="a helper"),
        pytest.param([(20, 7, "ray::AgentLoopWorker.__init__")], [], id="a helper that starts is nothing"),
        pytest.param([(20, 7, "ray::TaskRunner.run"), (21, 7, "ray::IDLE")], [], id="driver and idle workers"),
    ],
)
def test_whose_title_it_is(proc: FakeProc, processes: list[tuple[int, int, str]], seen: list[str]) -> None:
    for pid, parent, title in processes:
        proc.put(pid, "bash" if title.startswith("bash") else title[:15], title, parent=parent)
    assert [stage for stage, *_ in stages(scanned(proc, 10, 11), 11)] == seen


def test_without_a_raylet_to_be_seen_the_parent_decides(proc: FakeProc) -> None:
    proc.remove(7)
    proc.put(20, "x", UPDATE, parent=0)
    proc.put(30, "x", SAVE, parent=20)
    assert [stage for stage, *_ in stages(scanned(proc, 10), 10)] == ["update_actor"]


def test_a_namespace_of_its_own_vouches_for_nothing(proc: FakeProc) -> None:
    titles = scanned(proc, 10, 11)
    assert (titles.word(12).known_from, titles.word(12).known_until) == (12, 12)


def test_no_proc_at_all(tmp_path: Path) -> None:
    titles = Titles(tmp_path / "absent")
    assert not titles.observe(1.0)
    assert titles.word(2.0).intervals == ()


@pytest.mark.parametrize(
    ("title", "ticks", "seen"),
    [
        pytest.param("ray::vLLMHttpServer", 30, ["gen"], id="a busy server generates"),
        pytest.param("ray::vLLMHttpServer", 2, [], id="an idle one does not"),
        pytest.param("VLLM::EngineCore_DP0", 95, ["gen"], id="a busy engine core does"),
        pytest.param("VLLM::EngineCore_DP0", 3, [], id="an idle one does not, either"),
        pytest.param("VLLM::Worker_TP0", 100, [], id="a worker that spins tells nothing"),
        pytest.param("sglang::scheduler_TP0", 100, [], id="nor does SGLang's scheduler"),
        pytest.param("ray::SGLangHttpServer", 40, ["gen"], id="SGLang's server does"),
        pytest.param("ray::WorkerDict", 100, [], id="and a worker of verl has its title"),
        pytest.param("ray::vLLMHttpServer.launch_server", 100, ["init"], id="a server that starts is busy too"),
    ],
)
def test_the_rollout_is_told_by_the_cpu_of_its_servers(proc: FakeProc, title: str, ticks: int, seen: list[str]) -> None:
    proc.put(19, "x", "ray::WorkerDict")
    proc.put(20, "x", title)
    titles = scanned(proc, 10)
    proc.put(20, "x", title, ticks=ticks)
    titles.observe(11)
    assert [stage for stage, *_ in stages(titles, 11)] == seen


def test_a_process_that_ends_ends_its_stage(proc: FakeProc) -> None:
    proc.put(19, "x", "ray::WorkerDict")
    proc.put(20, "x", UPDATE)
    titles = scanned(proc, 10, 11)
    proc.remove(20)
    titles.observe(12)
    assert stages(titles, 12) == [("update_actor", 20, 10, 11.5)]


def test_a_parent_that_ends_makes_its_child_an_orphan(proc: FakeProc) -> None:
    proc.put(19, "bash", "bash", parent=7)
    proc.put(20, "x", UPDATE, parent=19)
    proc.put(21, "x", "ray::WorkerDict")
    titles = scanned(proc, 10, 11)
    proc.remove(19)
    proc.put(20, "x", UPDATE, parent=1)
    titles.observe(12)
    assert stages(titles, 12) == [("update_actor", 20, 10, 11.5)]


def test_what_has_long_been_none_of_ours_is_seldom_looked_at(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in range(100, 400):
        proc.put(pid, "sleep", "sleep 1")
    proc.put(20, "x", UPDATE)
    read: list[int] = []
    files = ProcFiles(proc.root)
    monkeypatch.setattr(titles_module, "ProcFiles", lambda _: files)
    titles = Titles(proc.root)
    command_line, stat = files.command_line, files.stat

    def counted_line(pid: int, *, keep: bool = False) -> bytes | None:
        read.append(pid)
        return command_line(pid, keep=keep)

    def counted_stat(pid: int) -> bytes:
        read.append(pid)
        return stat(pid)

    monkeypatch.setattr(files, "command_line", counted_line)
    monkeypatch.setattr(files, "stat", counted_stat)
    for at in range(SETTLED_SCANS + 2):
        titles.observe(at)
    read.clear()
    for at in range(100, 100 + RARE_SCANS):
        titles.observe(at)
    assert len(read) <= 2 * 302 + RARE_SCANS + 2
    proc.put(150, "x", UPDATE, started=99)
    for at in range(200, 200 + RARE_SCANS):
        titles.observe(at)
    assert {pid for _, pid, _, _ in stages(titles, 200 + RARE_SCANS)} == {20, 150}


@pytest.mark.parametrize(
    ("text", "stat"),
    [
        pytest.param(
            b"20 (ray::WorkerDict) S 7 20 20 0 -1 4194560 9 0 0 0 250 30 0 0 20 0 9 0 123456 1 2 3\n",
            ProcessStat("ray::WorkerDict", 7, 280, 123456),
            id="a process",
        ),
        pytest.param(
            b"20 (a) b (c)) R 1 0 0 0 0 0 0 0 0 0 1 2 0 0 0 0 0 0 3 0", ProcessStat("a) b (c)", 1, 3, 3), id="a name"
        ),
        pytest.param(b"", None, id="gone"),
        pytest.param(b"20 (x) S 7", None, id="cut"),
        pytest.param(b"20 (x) S x 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", None, id="no number"),
    ],
)
def test_parse_stat(text: bytes, stat: ProcessStat | None) -> None:
    assert parse_stat(text) == stat


@pytest.mark.parametrize(
    ("cmdline", "title"),
    [
        pytest.param(UPDATE.encode() + b"\0" * 300, UPDATE, id="padded with nothing"),
        pytest.param(b"ray::IDLE" + b" " * 300 + b"\0", "ray::IDLE", id="padded with blanks"),
        pytest.param(b"VLLM::Worker_TP0\0", "VLLM::Worker_TP0", id="an engine"),
        pytest.param(b"python3\0-m\0ray::x\0", "", id="a word of a command line"),
        pytest.param(b"ray::\xff\xfe\0", "ray::\ufffd\ufffd", id="no text"),
        pytest.param(b"", "", id="gone"),
    ],
)
def test_parse_title(cmdline: bytes, title: str) -> None:
    assert parse_title(cmdline) == title


@given(st.binary(max_size=100))
def test_nothing_raises(noise: bytes) -> None:
    parse_stat(noise)
    parse_stat(b"1 (" + noise + b") S 1 " + noise)
    parse_title(noise)
    parse_title(b"ray::" + noise)


def test_a_new_process_is_seen_within_three_scans(proc: FakeProc) -> None:
    proc.put(20, "ray::WorkerDict", "ray::WorkerDict")
    titles = scanned(proc, 10)
    proc.put(21, "ray::WorkerDict", UPDATE)
    for at in range(11, 11 + LIST_SCANS):
        titles.observe(at)
    assert [(stage, pid) for stage, pid, *_ in stages(titles, 13)] == [("update_actor", 21)]


@pytest.mark.parametrize(
    ("loadavg", "within"),
    [
        pytest.param(["0.1 0.1 0.1 2/300 21\n"], LIST_SCANS, id="a newer number was given"),
        pytest.param(["0.1 0.1 0.1 2/300 20\n"], LIST_ANYWAY_SCANS + LIST_SCANS, id="the number is made up"),
        pytest.param(["0.1 0.1 0.1 0/0 0\n"], LIST_ANYWAY_SCANS + LIST_SCANS, id="there is none"),
        pytest.param([], LIST_SCANS, id="the system does not say"),
    ],
)
def test_processes_are_listed_when_one_may_be_new(proc: FakeProc, loadavg: list[str], within: int) -> None:
    for text in loadavg:
        (proc.root / "loadavg").write_text(text.replace("21", "20"))
    proc.put(20, "ray::WorkerDict", "ray::WorkerDict")
    titles = scanned(proc, 10)
    for text in loadavg:
        (proc.root / "loadavg").write_text(text)
    proc.put(21, "ray::WorkerDict", UPDATE)
    for at in range(11, 11 + within):
        titles.observe(at)
    assert [(stage, pid) for stage, pid, *_ in stages(titles, 11 + within)] == [("update_actor", 21)]


def test_nothing_is_listed_while_nothing_is_new(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    (proc.root / "loadavg").write_text("0.1 0.1 0.1 2/300 20\n")
    proc.put(20, "ray::WorkerDict", UPDATE)
    files = ProcFiles(proc.root)
    listed = Mock(side_effect=files.pids)
    monkeypatch.setattr(titles_module, "ProcFiles", lambda _: files)
    monkeypatch.setattr(files, "pids", listed)
    titles = Titles(proc.root)
    for at in range(10, 10 + 2 * LIST_ANYWAY_SCANS + 1):
        titles.observe(at)
    assert listed.call_count == 3


def test_titles_of_others_do_not_count(proc: FakeProc) -> None:
    """On a whole host, where others have processes of Ray, too."""
    proc.put(20, "ray::WorkerDict", UPDATE)
    proc.put(21, "ray::WorkerDict", SAVE)
    wanted: set[int] = {20}
    titles = Titles(proc.root, ticks_per_second=100, wanted=wanted.__contains__)
    titles.observe(10)
    assert [(stage, pid) for stage, pid, *_ in stages(titles, 10)] == [("update_actor", 20)]
    wanted.clear()
    titles.observe(11)
    assert titles.word(11).known_until == titles.word(11).known_from, "nobody vouches for a job that is not there"
