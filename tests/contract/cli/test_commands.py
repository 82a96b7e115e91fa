# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon list` and `gpumon log` on simulated GPUs: what they print, how they end, what they say in bad times."""

import csv
import io
import json
import signal
import time
from pathlib import Path

import pytest
import simgpu
from pynvml import NVML_ERROR_NOT_SUPPORTED

from tests.contract.cli.conftest import Host

HEAD = ",".join(
    [
        "timestamp,index,name,temperature.gpu,utilization.gpu [%],utilization.memory [%]",
        "memory.used [MiB],memory.total [MiB]",
    ]
)


def rows(text: str) -> list[dict[str, str]]:
    """A CSV text as dictionaries."""
    return list(csv.DictReader(io.StringIO(text)))


def test_list_names_each_gpu_with_its_uuid(host: Host) -> None:
    done = host.run("list")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(simgpu.uuid_of(index) in line for index, line in enumerate(lines))


def test_list_as_json_is_an_object_a_line_in_base_units(host: Host) -> None:
    simgpu.set_values(2, file=host.file, gpu_utilization_percent=50)
    found = [json.loads(line) for line in host.run("list", "--json").stdout.splitlines()]
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    assert found[2]["utilization"] == 0.5
    assert found[0]["memory_total_bytes"] > 2**33


def test_log_has_the_columns_of_nvidia_smi(host: Host) -> None:
    done = host.run("log", "-l", "0.2", "--count", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == HEAD
    found = rows(done.stdout)
    assert [row["index"] for row in found] == ["0", "1", "2", "3"] * 2
    assert all(int(row["memory.total [MiB]"]) > 8000 for row in found)


def test_what_cannot_be_read_is_an_empty_cell(host: Host) -> None:
    simgpu.fail(NVML_ERROR_NOT_SUPPORTED, gpu=1, function="nvmlDeviceGetUtilizationRates", file=host.file)
    found = rows(host.run("log", "--count", "1", "-i", "1").stdout)
    assert [row["utilization.gpu [%]"] for row in found] == [""]
    assert found[0]["memory.used [MiB]"] != ""


def test_a_lost_gpu_keeps_its_name_and_says_what_became_of_it(host: Host) -> None:
    process = host.popen("log", "--format", "jsonl", "-l", "0.2", "-i", "2,3")
    assert process.stdout is not None
    whole = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [(one["index"], "utilization" in one) for one in whole] == [(2, True), (3, True)]
    simgpu.lose(3, file=host.file)
    found = (json.loads(line) for line in process.stdout)
    lost = next(one for one in found if one["index"] == 3 and "utilization" not in one)
    assert (lost["name"], lost["state"]) == (whole[1]["name"], "lost GPU_IS_LOST")
    assert "utilization" in next(one for one in found if one["index"] == 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("arguments", [["list"], ["log", "--count", "1"]])
def test_a_gpu_that_was_lost_before_is_not_left_out_in_silence(host: Host, arguments: list[str]) -> None:
    simgpu.lose(3, file=host.file)
    done = host.run(*arguments)
    assert done.returncode == 0
    assert simgpu.uuid_of(3) not in done.stdout
    assert done.stderr == "gpumon: 1 of 4 GPUs that the driver counts cannot be read: look for Xid in dmesg\n"


def test_more_fields_and_one_gpu(host: Host) -> None:
    done = host.run("log", "--fields", "+power.draw,+uuid", "-i", simgpu.uuid_of(1), "--count", "1")
    (row,) = rows(done.stdout)
    assert row["uuid"] == simgpu.uuid_of(1)
    assert float(row["power.draw [W]"]) > 0


def test_a_signal_ends_it_at_once_with_whole_lines(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    process = host.popen("log", "-l", "0.1", "-o", str(path))
    end = time.monotonic() + 20
    while not (path.exists() and path.read_text().count("\n") > 8):
        assert time.monotonic() < end, process.poll()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=5)
    assert (process.returncode, err) == (0, "")
    assert path.read_text().endswith("\n")
    assert all(len(row) == 8 and None not in row.values() for row in rows(path.read_text()))


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_it_and_under_nohup_it_goes_on(host: Host, tmp_path: Path) -> None:
    lines = "gpumon log -l 0.1 -c 40 -o {path} & pid=$!; sleep 2; pkill -HUP -P $pid; wait $pid; wc -l < {path}"
    ended = host.shell(lines.format(path=tmp_path / "ended.csv"))
    went_on = host.shell("trap '' HUP; " + lines.format(path=tmp_path / "whole.csv"))
    assert int(ended.stdout) < 1 + 40 * 4
    assert (tmp_path / "ended.csv").read_text().endswith("\n")
    assert (went_on.returncode, int(went_on.stdout)) == (0, 1 + 40 * 4)


RUN = "timestamp,index,utilization.gpu,memory.used,memory.total\n" + "".join(
    f"{5 * at},{gpu},{[85, 11, 10][gpu]},{[900, 200, 190][gpu]},1000\n" for at in range(120) for gpu in range(3)
)
COMMANDS = (
    "list",
    "log -c 1",
    "top",
    "diagnose run.csv",
    "report run.csv",
    "compare run.csv run.csv",
    "replay run.csv",
    "--help",
    "--version",
    "log --help",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_standard_output_is_there_is_no_traceback(host: Host, tmp_path: Path, command: str) -> None:
    (tmp_path / "run.csv").write_text(RUN)
    go = f"cd {tmp_path}; gpumon {command}"
    closed, full = host.shell(f"{go} >&-"), host.shell(f"{go} >/dev/full")
    assert (closed.returncode, "Traceback" in closed.stderr) == (0, False), closed.stderr
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1].endswith("standard output: No space left on device"), full.stderr
    assert host.shell(f"{go} | head -1").stderr.count("\n") <= 1
    ascii_only = host.shell(go, PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0, ascii_only.stderr
    assert ascii_only.stdout.isascii() or command.startswith("report"), "a page says itself that it is UTF-8"


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command", ["top", "replay"])
def test_a_live_view_gives_the_terminal_back_whatever_ends_it(
    host: Host, tmp_path: Path, command: str, ends: signal.Signals
) -> None:
    (tmp_path / "run.csv").write_text(RUN)
    arguments = [command] if command == "top" else [command, str(tmp_path / "run.csv")]
    code, shown = host.in_terminal(*arguments, ends=ends, after=b"UTIL")
    assert code == 0
    assert b"\x1b[?1049l" in shown, "the screen of before"
    assert shown.rindex(b"\x1b[?25h") > shown.index(b"\x1b[?25l"), "the cursor"


def test_a_pipe_that_is_closed_ends_it_quietly(host: Host) -> None:
    process = host.popen("log", "-l", "0.1")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == HEAD
    process.stdout.close()
    assert process.wait(timeout=10) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_file_is_continued_and_one_of_other_columns_is_kept_aside(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    for _ in range(2):
        assert host.run("log", "--count", "1", "-i", "0", "-o", str(path)).returncode == 0
    assert len(rows(path.read_text())) == 2
    assert host.run("log", "--count", "1", "-i", "0", "--fields", "index", "-o", str(path)).returncode == 0
    assert path.read_text() == "index\n0\n"
    assert len(rows((tmp_path / "gpu.csv.1").read_text())) == 2


def test_without_a_driver_it_says_so_with_a_code_of_its_own(bare_host: Host, tmp_path: Path) -> None:
    never = tmp_path / "never.csv"
    for arguments in (["list"], ["log"], ["log", "-o", str(never)], ["top", "--once"]):
        done = bare_host.run(*arguments)
        assert done.returncode == 3
        assert "no NVIDIA driver" in done.stderr
        assert done.stdout == ""
    assert not never.exists()


@pytest.mark.slow
@pytest.mark.parametrize("function", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_hangs_is_not_one_that_shows_no_gpu(host: Host, function: str) -> None:
    fault = simgpu.hang(function=function, file=host.file)
    done = host.run("list")
    simgpu.clear_fault(fault, file=host.file)
    assert (done.returncode, done.stdout) == (3, "")
    assert "does not answer" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("hung", [[2], [0, 3]])
def test_gpus_that_hang_are_named_and_the_others_are_shown(host: Host, hung: list[int]) -> None:
    faults = [simgpu.hang(gpu=gpu, function="nvmlDeviceGetMemoryInfo", file=host.file) for gpu in hung]
    done = host.run("list")
    for fault in faults:
        simgpu.clear_fault(fault, file=host.file)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [index for index, line in enumerate(lines) if "not-responding" in line] == hung
    assert len(lines) == 4


def test_bad_words_get_an_answer_that_helps(host: Host) -> None:
    unknown_field = host.run("log", "--fields", "power")
    assert unknown_field.returncode == 2
    assert "power.draw" in unknown_field.stderr
    unknown_gpu = host.run("log", "-i", "9")
    assert unknown_gpu.returncode == 2
    assert simgpu.uuid_of(0) in unknown_gpu.stderr
    assert host.run("log", "-o", "-", "--count", "1", "-i", "0").stdout.count("\n") == 2
    nowhere = host.run("log", "-o", "/nonexistent/gpu.csv", "--count", "1")
    assert nowhere.returncode == 1
    assert "/nonexistent/gpu.csv" in nowhere.stderr
