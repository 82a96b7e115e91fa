# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A run in fast motion: what changes when, how keys move it, and what the screen shows at 80 columns."""

from collections.abc import Iterable, Sequence
from io import StringIO

import pytest
from rich.console import Console

from verl_gpumonitor.cli.keyboard import names
from verl_gpumonitor.cli.playback import Change, Playback, common_stage
from verl_gpumonitor.cli.replay import MOST_SPEED, Projector, Reel, line, screen
from verl_gpumonitor.model.trace import (
    TRACE_FORMAT,
    GpuLine,
    GpuProcess,
    Header,
    JobLine,
    NvmlLine,
    Record,
    StepLine,
    TaskLine,
    TraceGpu,
    TracePod,
    XidLine,
)

GIB = 2**30
UPDATE = "WorkerDict.actor_rollout_ref_update_actor"


def header(*pods: str, gpus: int = 2) -> Header:
    return Header(
        format=TRACE_FORMAT,
        pods=[
            TracePod(
                name=pod, gpus=[TraceGpu(uuid=f"{pod}-{n}", index=n, memory_total_bytes=80 * GIB) for n in range(gpus)]
            )
            for pod in pods
        ],
    )


def gpu(t: float, uuid: str, *processes: GpuProcess, load: float | None = 0.9) -> GpuLine:
    return GpuLine(
        t=t,
        pod=uuid.rpartition("-")[0],
        uuid=uuid,
        utilization=load,
        memory_used_bytes=40 * GIB,
        processes=list(processes) or None,
    )


def task(t: float, state: str, pid: int = 5) -> TaskLine:
    return TaskLine(t=t, pod="w", pid=pid, name=UPDATE, state=state)


def played(playback: Playback, records: Iterable[Record]) -> list[Change]:
    return [change for record in records for change in playback.feed(record)]


def test_stage_step_and_job_are_told_when_they_change() -> None:
    playback = Playback(header("w"))
    records: list[Record] = [
        JobLine(t=0.0, phase="Running"),
        *(gpu(t, f"w-{n}") for t in (1.0, 3.0) for n in (0, 1)),
        task(4.0, "begin"),
        gpu(6.0, "w-0"),
        task(8.0, "end"),
        StepLine(t=9.0, step=1),
        gpu(10.0, "w-0"),
        JobLine(t=11.0, phase="Succeeded", message="done"),
    ]
    told = [(change.t, change.kind, change.text) for change in played(playback, records)]
    assert told == [
        (0.0, "job", "Running"),
        (4.0, "stage", "update_actor (actor)"),
        (8.0, "stage", "other"),
        (9.0, "step", "step 1 ended after 9 s"),
        (11.0, "job", "Succeeded: done"),
    ]


def test_a_finding_is_raised_when_it_would_have_been_and_resolved() -> None:
    playback = Playback(header("w"))
    records: list[Record] = [gpu(float(t), f"w-{n}") for t in range(0, 20, 2) for n in (0, 1)]
    records += [NvmlLine(t=20.0, pod="w", uuid="w-1", error="GPU_IS_LOST")]
    records += [gpu(float(t), "w-0") for t in range(20, 60, 2)]
    records += [NvmlLine(t=60.0, pod="w", uuid="w-1")]
    records += [gpu(float(t), f"w-{n}") for t in range(60, 400, 2) for n in (0, 1)]
    changes = [change for change in played(playback, records) if change.finding is not None]
    assert [(c.kind, c.finding.finding.reason) for c in changes if c.finding] == [
        ("raised", "GPUFault"),
        ("resolved", "GPUFault"),
    ]
    assert 20.0 <= changes[0].t <= 24.0
    assert changes[1].t >= 60.0
    assert line(changes[0]).startswith("    0:20  raised    GPUFault (critical)")
    assert " after " in line(changes[1])


def test_a_lost_gpu_shows_its_error_and_no_values() -> None:
    playback = Playback(header("w"))
    played(playback, [gpu(1.0, "w-0"), gpu(1.0, "w-1"), NvmlLine(t=2.0, pod="w", uuid="w-1", error="GPU_IS_LOST")])
    first, second = playback.gpus()
    assert (first.state, first.utilization) == ("ok", 0.9)
    assert (second.state, second.error, second.utilization) == ("lost", "GPU_IS_LOST", None)


def test_gpus_of_several_pods_are_told_apart() -> None:
    playback = Playback(header("group-worker-aaaaa", "group-worker-bbbbb", gpus=1))
    assert list(playback.names().values()) == ["worker-aaaaa/0", "worker-bbbbb/0"]
    assert Playback(header("w")).names() == {}


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        pytest.param([], "", id="no GPU"),
        pytest.param(["gen", "gen", "ref"], "gen", id="what most do"),
        pytest.param(["", ""], "", id="nothing is known"),
    ],
)
def test_common_stage(stages: Sequence[str], expected: str) -> None:
    assert common_stage(stages) == expected


def test_time_passes_at_the_speed_and_stands_still_when_paused() -> None:
    projector = Projector(speed=60.0, begin=10.0, end=100.0)
    assert projector.advance(1.0) == 70.0
    projector.press(" ")
    assert projector.advance(1.0) == 70.0
    projector.press(" ")
    projector.press("left")
    assert (projector.advance(0.5), projector.over) == (85.0, False)
    assert (projector.advance(60.0), projector.over) == (100.0, True)


def test_keys() -> None:
    projector = Projector(speed=60.0, begin=0.0, end=None)
    assert [projector.press(key) for key in ("+", "right", "x", "q")] == [False, False, False, True]
    assert projector.speed == 240.0
    for _ in range(20):
        projector.press("up")
    assert projector.speed == MOST_SPEED


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        pytest.param(b"q", ["q"], id="a letter"),
        pytest.param(b"\x1b[C\x1bOD+ ", ["right", "left", "+", " "], id="arrows in both forms"),
        pytest.param(b"Q\xc3\xa4\r", ["q"], id="what is no key of ours"),
        pytest.param(b"\x1b", [], id="escape"),
        pytest.param(b"\x1b[", [], id="a sequence that was cut"),
    ],
)
def test_key_names(raw: bytes, found: list[str]) -> None:
    assert names(raw) == found


def test_a_reel_stops_when_its_time_is_up() -> None:
    playback = Playback(header("w"))
    reel = Reel(playback, iter([gpu(float(t), "w-0") for t in range(100)]))
    reel.play(50.0, within=0.0)
    assert (reel.behind, playback.t) == (True, 0.0)
    reel.play(50.0, within=60.0)
    assert (reel.behind, reel.over, playback.t) == (False, False, 50.0)
    reel.play(1000.0, within=60.0)
    assert reel.over


def shown(playback: Playback, newest: list[Change], *, width: int = 80, height: int = 30) -> list[str]:
    console = Console(width=width, record=True, file=StringIO())
    projector = Projector(speed=60.0, begin=0.0, end=None)
    console.print(screen(playback, projector, newest, name="a/run.jsonl.gz", width=width, height=height))
    return console.export_text().splitlines()


def test_the_screen_fits_and_shows_what_matters() -> None:
    playback = Playback(header("w"))
    hostile = GpuProcess(pid=5, title="ray::[/bold]\x1b[2J", memory_used_bytes=30 * GIB)
    changes = played(
        playback,
        [
            task(0.5, "begin"),
            gpu(1.0, "w-0", hostile),
            gpu(1.0, "w-1", load=None),
            XidLine(t=2.0, pod="w", uuid="w-1", code=79),
            gpu(4.0, "w-0"),
        ],
    )
    lines = shown(playback, changes[-3:])
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    for word in ("run.jsonl.gz", "0:04", "x60", "step 1", "update_actor (actor)", "40.0/80.0", "90%", "GPUFault", "?"):
        assert word in text
    assert "[/bold]" in text
    assert "\x1b" not in text


def test_gpus_that_do_not_fit_are_counted() -> None:
    playback = Playback(header("w", gpus=64))
    lines = shown(playback, [], height=24)
    assert len(lines) <= 24
    assert any("GPUs more" in line for line in lines)
