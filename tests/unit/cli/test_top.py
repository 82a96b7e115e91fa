# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What `gpumon top` shows of given samples, at the width of an ssh session."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from verl_gpumonitor.cli.view import History, frame, sparkline, stage_of, title_of
from verl_gpumonitor.model.samples import GpuProcess, GpuSample, NodeSample
from verl_gpumonitor.model.vocabulary import GpuState

GIB = 2**30
BUSY = GpuSample(
    uuid="GPU-a",
    index=0,
    utilization=0.5,
    memory_used_bytes=78 * GIB,
    memory_total_bytes=80 * GIB,
    temperature_celsius=91.0,
    power_watts=400.0,
    processes=(GpuProcess(pid=41, memory_used_bytes=70 * GIB),),
)
LOST = GpuSample(uuid="GPU-b", index=1, state=GpuState.LOST, error="GPU_IS_LOST")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        pytest.param([0.0, 0.5, None, 1.0], "    ▁▅·█", id="a moment that was not read is no zero"),
        pytest.param([0.1] * 20, "▁" * 8, id="only the newest fit"),
        pytest.param([], " " * 8, id="nothing yet"),
    ],
)
def test_sparkline(values: list[float | None], shown: str) -> None:
    assert sparkline(values, 8) == shown


@pytest.mark.parametrize(
    ("titles", "shown"),
    [
        pytest.param(["ray::WorkerDict.actor_rollout_ref_update_actor"], "update_actor (actor)", id="verl's worker"),
        pytest.param(["python3 train.py"], "", id="any program"),
        pytest.param(["VLLM::Worker_TP0", "ray::WorkerDict"], "", id="an engine does not say whether it runs"),
    ],
)
def test_stage(titles: Sequence[str], shown: str) -> None:
    assert stage_of(titles) == shown


def drawn(
    *gpus: GpuSample, width: int = 80, title: str = "ray::WorkerDict.actor_rollout_ref_update_actor"
) -> list[str]:
    """Lines of a frame. `title`: of process 41."""
    history = History()
    history.add(gpus)
    node = NodeSample(gpus=gpus, visible=len(gpus), driver_version="570.1")
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    with console.file:
        console.print(frame(node, gpus, history, {41: title}, width=width))
        return console.export_text().splitlines()


def test_a_frame_fits_80_columns_and_shows_all_that_matters() -> None:
    lines = drawn(BUSY, LOST)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for word in ("50%", "78.0/80.0", "98%", "91", "400", "update_actor (actor)", "41", "70.0"):
        assert word in text
    assert any(line.split()[:2] == ["1", "lost"] for line in lines)


def test_what_is_too_long_is_cut_and_takes_nothing_from_the_numbers() -> None:
    """A command line of verl's is longer than any terminal is wide."""
    failing = GpuSample(uuid="GPU-c", index=2, state=GpuState.ERROR, error="X" * 200)
    lines = drawn(BUSY, failing, title="python3 -m verl.trainer.main_ppo " + "data.train_batch_size=1024 " * 20)
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[:6] == ["0", "50%", "78.0/80.0", "98%", "91", "400"]
    assert lines[3].split()[:2] == ["2", "error"]
    assert lines[-2].split() == ["GPU", "PID", "GiB", "PROCESS"]
    assert lines[-1].split()[:5] == ["0", "41", "70.0", "python3", "-m"]
    assert all(line.rstrip().endswith("…") for line in (lines[3], lines[-1]))


def test_what_is_unknown_is_a_question_mark() -> None:
    text = "\n".join(drawn(GpuSample(uuid="GPU-c", index=2, memory_total_bytes=80 * GIB)))
    assert "?/80.0" in text
    assert "0%" not in text


def test_a_title_is_read_from_proc_and_a_process_that_is_gone_has_none(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"python3\0-m\0train\0\0\0")
    assert title_of(7, tmp_path) == "python3 -m train"
    assert title_of(8, tmp_path) is None


def test_one_gpu_is_one() -> None:
    assert drawn(BUSY)[0].startswith("1 GPU  driver")
