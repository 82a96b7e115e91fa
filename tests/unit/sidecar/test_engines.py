# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who holds GPUs, from NVML's lists to a report: processes by size, and what an engine held in each stage of a step."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sidecar.test_reports import SENDER, TURN
from tests.unit.sidecar.test_staging import START, STEP, World
from verl_gpumonitor.model.report import (
    MAX_BYTES,
    MAX_GPUS,
    MAX_PROCESSES,
    MAX_REPORT_BYTES,
    GpuProcesses,
    StepEngine,
    decode_report,
    encode,
)
from verl_gpumonitor.model.samples import GpuCounters, GpuProcess, GpuSample
from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.model.vocabulary import GpuState, Source
from verl_gpumonitor_sidecar.reports import build
from verl_gpumonitor_sidecar.staging import engine_bytes
from verl_gpumonitor_sidecar.state import OwnGpu, PodState

GIB = 2**30
PROGRAMS = {7: "ray::WorkerDict", 8: "VLLM::Worker_TP0", 9: "sglang::scheduler_TP0", 10: ""}


def state(*gpus: GpuSample, programs: dict[int, str] | None) -> PodState:
    own = tuple(OwnGpu(sample=gpu, counters=GpuCounters()) for gpu in gpus)
    return PodState(gpus_requested=len(gpus), source=Source.NVML, gpus=own, programs=programs)


def sample(uuid: str, *sizes: tuple[int, int | None], at: float = 99.5) -> GpuSample:
    processes = tuple(GpuProcess(pid=pid, memory_used_bytes=size) for pid, size in sizes)
    return GpuSample(uuid=uuid, taken_at=at, processes=processes)


def told(*gpus: GpuSample, programs: dict[int, str] | None) -> list[GpuProcesses]:
    report = build(SENDER, state(*gpus, programs=programs), TURN)
    assert decode_report(encode(report)) == report
    return report.gpu_processes


def test_processes_are_told_by_size_with_their_programs() -> None:
    full = sample("GPU-a", (7, 2 * GIB), (8, 60 * GIB), (10, None), (99, GIB))
    (listed,) = told(full, programs=PROGRAMS)
    assert msgspec.to_builtins(listed) == [
        0,
        [[8, 60 * GIB, "VLLM::Worker_TP0"], [7, 2 * GIB, "ray::WorkerDict"], [99, GIB, ""], [10, None, ""]],
        0,
    ]


def test_of_many_the_largest_are_named_and_the_others_counted() -> None:
    crowd = sample("GPU-a", *((pid, pid * GIB) for pid in range(1, MAX_PROCESSES + 4)))
    (listed,) = told(crowd, programs=PROGRAMS)
    assert len(listed.processes) == MAX_PROCESSES
    assert listed.processes[0].pid == MAX_PROCESSES + 3
    assert listed.more == 3


def test_an_empty_list_is_told_and_one_that_cannot_be_had_is_not() -> None:
    silent = GpuSample(uuid="GPU-b", taken_at=99.5)
    lost = msgspec.structs.replace(sample("GPU-c", (7, GIB)), state=GpuState.LOST)
    old = sample("GPU-d", (7, GIB), at=50.0)
    listed = told(sample("GPU-a"), silent, lost, old, programs=PROGRAMS)
    assert [each.gpu for each in listed] == [0]
    assert listed[0].processes == []


def test_lists_that_cannot_be_believed_are_not_told() -> None:
    assert told(sample("GPU-a", (7, GIB)), programs=None) == []


def test_the_longest_lists_of_the_largest_node_leave_room_for_the_rest() -> None:
    crowd = [sample(f"GPU-{n}", *((n * 100 + pid, 2**37) for pid in range(1, 41))) for n in range(MAX_GPUS)]
    programs = dict.fromkeys(range(100 * MAX_GPUS), "x" * 64)
    report = build(SENDER, state(*crowd, programs=programs), TURN)
    assert len(report.gpu_processes) == MAX_GPUS
    assert len(encode(report)) < MAX_REPORT_BYTES / 3


@given(
    sizes=st.lists(st.tuples(st.integers(1, 2**22), st.none() | st.integers(-5, 2**63)), max_size=40),
    programs=st.dictionaries(st.integers(1, 40), st.text(max_size=100), max_size=20),
)
def test_whatever_is_listed_the_report_is_taken(sizes: list[tuple[int, int | None]], programs: dict[int, str]) -> None:
    (listed,) = told(sample("GPU-a", *sizes), programs=programs)
    assert len(listed.processes) + listed.more == len(sizes)
    assert all(each.memory_used_bytes is None or each.memory_used_bytes <= MAX_BYTES for each in listed.processes)


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ([(7, 30 * GIB)], None),
        ([(7, 30 * GIB), (8, 9 * GIB), (9, GIB)], 10 * GIB),
        ([(8, 9 * GIB), (9, None)], None),
        ([], None),
    ],
    ids=["no engine", "two of its processes", "one does not tell", "nobody"],
)
def test_what_an_engine_holds(sizes: list[tuple[int, int | None]], held: int | None) -> None:
    assert engine_bytes(sample("GPU-a", *sizes).processes or (), PROGRAMS) == held


class Colocated(World):
    """Its engine has 60 GiB while it generates and some seconds on, then what is kept; it is listed each 5 s."""

    def __init__(self, kept_bytes: int) -> None:
        super().__init__()
        self.kept_bytes = kept_bytes
        self.listed: tuple[GpuProcess, ...] = ()

    def state(self, **values: object) -> PodState:
        if self.now % 5 == 0:
            awake = any(self._awake(each) for each in self.truth)
            held = 60 * GIB if awake else self.kept_bytes
            trainer = GpuProcess(pid=7, memory_used_bytes=20 * GIB)
            self.listed = (trainer, GpuProcess(pid=8, memory_used_bytes=held))
        return msgspec.structs.replace(super().state(processes=self.listed, **values), programs=PROGRAMS)

    def _awake(self, each: StageInterval) -> bool:
        end = each.end or 0.0
        return each.stage == "gen" and each.begin <= START + self.now <= end + 2.0


@pytest.mark.parametrize("kept_bytes", [4 * GIB, 26 * GIB])
def test_steps_say_what_the_engine_held_in_each_stage(kept_bytes: int) -> None:
    world = Colocated(kept_bytes)
    world.run(10 + 4 * 43 + 40, relay_each=15)
    steps = build(SENDER, msgspec.structs.replace(world.state(), stages=world.picture), TURN).steps
    assert len(steps) == 3
    held = [{stage.stage: stage.engines for stage in step.stages} for step in steps]
    assert all(each["gen"] == [StepEngine(0, 60 * GIB), StepEngine(1, 60 * GIB)] for each in held)
    assert all(each["update_actor"] == [StepEngine(0, kept_bytes), StepEngine(1, kept_bytes)] for each in held)
    listed = {stage: sum(bool(each[stage]) for each in held) for stage, _, _ in STEP}
    assert listed["update_weights"] < 3, "a stage that is shorter than the time between two lists is not always met"


def test_without_lists_steps_say_nothing_of_an_engine() -> None:
    world = World()
    world.run(10 + 4 * 43 + 40, relay_each=15)
    steps = build(SENDER, msgspec.structs.replace(world.state(), stages=world.picture), TURN).steps
    assert steps and not any(stage.engines for step in steps for stage in step.stages)
    assert b"engines" not in encode(build(SENDER, msgspec.structs.replace(world.state(), stages=world.picture), TURN))
