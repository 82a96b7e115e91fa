# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who holds GPUs, from reports to a GPUMonitor: foreign processes, engines that keep memory, and what is not told."""

from collections.abc import Sequence
from dataclasses import replace

import jsonschema
import pytest

from tests.unit.controller.builders import GIB, gpu, job, report
from tests.unit.controller.test_findings import COMMAND, STEP_SECONDS, clinic
from tests.unit.controller.test_findings import start as start_job
from tests.unit.controller.test_reconciler import Life, living
from tests.unit.controller.test_status import SCHEMA, closed
from verl_gpumonitor.advice.catalogue import EXAMINED
from verl_gpumonitor.advice.present import context_at
from verl_gpumonitor.diagnosis.reported import ENGINE_LISTS, ReportedHistory
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.report import (
    GpuProcesses,
    ProcessReport,
    Report,
    StageNow,
    StageQuality,
    StepEngine,
    StepGpu,
    StepReport,
    StepStage,
)
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuProcess, Header, TraceGpu, TracePod
from verl_gpumonitor_operator.controller.holders import engines_of, holders_of, unlisted
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.launch import Command
from verl_gpumonitor_operator.controller.patient import Follows, Patient
from verl_gpumonitor_operator.controller.workloads import Workloads

RANKS = [GpuProcesses(place, [ProcessReport(100 + place, 30 * GIB, "ray::WorkerDict")]) for place in range(4)]
"""Each rank on its own GPU."""
CONTEXTS = [
    GpuProcesses(0, [RANKS[0].processes[0], *(ProcessReport(100 + n, GIB // 2, "ray::WorkerDict") for n in (1, 2, 3))]),
    *RANKS[1:],
]
"""Three other ranks have contexts on GPU 0."""
STRANGER = [*RANKS[:3], GpuProcesses(3, [RANKS[3].processes[0], ProcessReport(900, 3 * GIB, "python3 evaluate.py")])]
SGLANG = f"{COMMAND} actor_rollout_ref.rollout.name=sglang"
EXACT = StageQuality(source=StageSource.MARKS)


def start(life: Life, command: str = COMMAND) -> None:
    start_job(life)
    for workload in life.workloads.all():
        object.__setattr__(workload.job, "command", command)


def stage(name: str, role: str, now: float, held: float | None) -> StepStage:
    gpus = [StepGpu(place, 12.0, 9.0, 5000.0, 50 * GIB, 20 * GIB) for place in range(4)]
    engines = [] if held is None else [StepEngine(place, int(held * GIB)) for place in range(4)]
    return StepStage(stage=name, role=role, begin=now - STEP_SECONDS, seconds=12.0, gpus=gpus, engines=engines)


async def steps(
    life: Life,
    count: int,
    *,
    lists: Sequence[GpuProcesses] = (),
    first: int = 1,
    awake: float | None = None,
    asleep: float | None = None,
    quality: StageQuality = EXACT,
) -> int:
    """Let steps of half a minute pass, in which an engine holds so many GiB; return the number of the next."""
    for number in range(first, first + count):
        for part in range(6):
            told = [stage("gen", "rollout", life.now, awake), stage("update_actor", "actor", life.now, asleep)]
            whole = StepReport(number=number, step=number, begin=life.now - STEP_SECONDS, end=life.now, stages=told)
            trains = part > 3
            life.report(
                used=(35, 35, 35, 35),
                stage=StageNow(stage="update_actor" if trains else "gen", role="actor" if trains else "rollout"),
                stage_quality=quality,
                steps=[whole] if part == 5 else [],
                gpu_processes=list(lists),
            )
            await life.run(5)
    return first + count


def not_judged(life: Life) -> list[str]:
    jsonschema.validate(life.status, closed(SCHEMA))
    return [one["reason"] for one in life.status["dataQuality"]["diagnosis"].get("notJudged", [])]


def told(life: Life, reason: str) -> list[str]:
    return [kind for kind, what, _ in life.events if what == reason]


@pytest.mark.parametrize(
    ("lists", "says"),
    [(CONTEXTS, "3 processes of other ranks hold 1.5 GiB"), (STRANGER, "'python3 evaluate.py'")],
    ids=["contexts on GPU 0", "a stranger"],
)
async def test_a_foreign_process_is_found_and_over_when_it_has_gone(lists: list[GpuProcesses], says: str) -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        following = await steps(life, 2, lists=RANKS)
        assert life.condition("ForeignGPUMemory") == ("False", "NotDetected")
        following = await steps(life, 3, lists=lists, first=following)
        assert life.condition("ForeignGPUMemory") == ("True", "ForeignProcess")
        jsonschema.validate(life.status, closed(SCHEMA))
        (found,) = [one for one in life.status["findings"] if one["reason"] == "ForeignProcess"]
        assert says in found["message"]
        assert told(life, "ForeignProcess") == ["GPUMonitor", "PyTorchJob"]
        await steps(life, 4, lists=RANKS, first=following)
        assert life.condition("ForeignGPUMemory") == ("False", "NotDetected")
        assert told(life, "ForeignProcessResolved") == ["GPUMonitor", "PyTorchJob"]


SPREAD = [
    GpuProcesses(place, [ProcessReport(100, int(size * GIB), "python3 serve.py")])
    for place, size in enumerate((70.0, 18.0, 18.5, 19.0))
]
"""One process leads all four GPUs, and has most on the first."""
TOUCHED = [RANKS[0], *(GpuProcesses(n, [*RANKS[n].processes, ProcessReport(100, GIB // 2)]) for n in (1, 2, 3))]
"""The first rank has a context on each other's GPU, too."""


@pytest.mark.parametrize(
    ("lists", "found"), [(SPREAD, "False"), (TOUCHED, "True")], ids=["it computes on all", "it has only touched them"]
)
async def test_a_process_on_several_gpus(lists: list[GpuProcesses], found: str) -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        await steps(life, 3, lists=lists)
        assert life.condition("ForeignGPUMemory")[0] == found


async def test_memory_that_no_listed_process_holds_is_nobodys() -> None:
    """35 GiB are in use on each GPU, of which lists explain 30, or none at all."""
    async with living(clinic=clinic()) as life:
        start(life)
        following = await steps(life, 3, lists=RANKS)
        await steps(life, 3, lists=[GpuProcesses(place) for place in range(4)], first=following)
        assert life.condition("ForeignGPUMemory") == ("False", "NotDetected")


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ((), "do not list processes"),
        (RANKS[:3], "on 3 of 4 GPUs"),
        ([GpuProcesses(n, [ProcessReport(100 + n, None, "ray::WorkerDict")]) for n in range(4)], "do not list"),
    ],
    ids=["none", "some", "lists without sizes"],
)
async def test_without_lists_it_is_unknown_whether_anybody_is_foreign(lists: Sequence[GpuProcesses], said: str) -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        await steps(life, 2, lists=lists)
        (condition,) = [one for one in life.status["conditions"] if one["type"] == "ForeignGPUMemory"]
        assert (condition["status"], condition["reason"]) == ("Unknown", "NoProcessLists")
        assert said in condition["message"]


async def test_memory_of_a_job_that_is_met_in_its_middle_is_not_from_before_it() -> None:
    async with living(clinic=clinic()) as life:
        start(life, "torchrun train.py")
        for _ in range(12):
            life.report(used=(35, 35, 35, 35), gpu_processes=RANKS)
            await life.run(5)
        assert life.condition("ForeignGPUMemory") == ("False", "NotDetected")


@pytest.mark.parametrize("listed", [True, False])
async def test_memory_from_before_the_jobs_first_process_is_found_where_lists_are_empty(listed: bool) -> None:
    """Nobody tells stages of a PyTorchJob: an empty list says that nothing of it has begun."""
    async with living(clinic=clinic()) as life:
        start(life, "torchrun train.py")
        for _ in range(8):
            lists = [GpuProcesses(place) for place in range(4)] if listed else []
            idle = [
                gpu(f"GPU-{n}", memory_used_bytes=20 * GIB, utilization=0.0, observed_seconds=life.now)
                for n in range(4)
            ]
            life.report(gpus=idle, gpu_processes=lists)
            await life.run(5)
        found = ("True", "LeftoverMemory") if listed else ("Unknown", "NoProcessLists")
        assert life.condition("ForeignGPUMemory") == found


async def test_when_lists_end_a_finding_is_not_held_up_by_the_last_one() -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        following = await steps(life, 3, lists=CONTEXTS)
        assert life.condition("ForeignGPUMemory")[0] == "True"
        await steps(life, 4, first=following)
        assert life.condition("ForeignGPUMemory") == ("Unknown", "NoProcessLists")


async def test_an_engine_that_keeps_its_memory_is_found_whatever_it_is_called() -> None:
    async with living(clinic=clinic()) as life:
        start(life, SGLANG)
        following = await steps(life, 6, awake=45.0, asleep=26.0)
        assert life.condition("OOMRisk") == ("True", "RolloutMemoryNotReleased")
        assert not_judged(life) == []
        (found,) = [one for one in life.status["findings"] if one["reason"] == "RolloutMemoryNotReleased"]
        assert "26.0 GiB of the 45.0 GiB" in found["message"]
        assert told(life, "RolloutMemoryNotReleased") == ["GPUMonitor", "PyTorchJob"]
        await steps(life, 8, awake=45.0, asleep=4.0, first=following)
        assert life.condition("OOMRisk") == ("False", "NotDetected")
        assert told(life, "RolloutMemoryNotReleasedResolved") == ["GPUMonitor", "PyTorchJob"]


@pytest.mark.parametrize(
    ("command", "awake", "asleep", "quality", "judged"),
    [
        (SGLANG, None, None, EXACT, False),
        (SGLANG, 45.0, 4.0, EXACT, True),
        (SGLANG, 45.0, 40.0, StageQuality(source=StageSource.RAY_AGENT, resolution_seconds=5.0), False),
        (SGLANG, 45.0, 40.0, StageQuality(source=StageSource.RAY_STATE, resolution_seconds=30.0), False),
        (f"{SGLANG} actor_rollout_ref.rollout.free_cache_engine=False", None, None, EXACT, True),
    ],
    ids=["not listed", "listed", "stages to 5 s", "asked each 30 s", "it is to stay awake"],
)
async def test_an_engine_that_cannot_be_judged_is_said_to_be_so(
    command: str, awake: float | None, asleep: float | None, quality: StageQuality, judged: bool
) -> None:
    async with living(clinic=clinic()) as life:
        start(life, command)
        await steps(life, 6, awake=awake, asleep=asleep, quality=quality)
        assert (not_judged(life) == []) is judged
        (condition,) = [one for one in life.status["conditions"] if one["type"] == "OOMRisk"]
        assert condition["status"] == "False"
        assert ("RolloutMemoryNotReleased" in condition["message"]) is not judged


def history(gpus: int = 2) -> ReportedHistory:
    found = ReportedHistory(Header(format=TRACE_FORMAT, pods=[]))
    found.add_pod(
        TracePod(name="w", gpus=[TraceGpu(uuid=f"GPU-{n}", memory_total_bytes=80 * GIB) for n in range(gpus)])
    )
    return found


def test_one_list_from_before_the_engine_slept_is_no_evidence() -> None:
    seen = history()
    for number in range(1, ENGINE_LISTS):
        engines = [("GPU-0", "gen", 45.0), ("GPU-0", "update_actor", 45.0)]
        seen.take_step("w", [], t=number * 60.0, engines=engines)
        assert seen.gpus["GPU-0"].engine_bytes == {"gen": 45.0}
    seen.take_step("w", [], t=600.0, engines=[("GPU-0", "gen", 44.0), ("GPU-0", "update_actor", 5.0)])
    assert seen.gpus["GPU-0"].engine_bytes == {"gen": 45.0, "update_actor": 5.0}


def test_an_engine_that_is_listed_no_more_is_forgotten() -> None:
    seen = history()
    seen.take_step("w", [], t=60.0, engines=[("GPU-0", "gen", 45.0), ("GPU-0", "gen", 40.0)])
    assert seen.gpus["GPU-0"].engine_bytes == {"gen": 45.0}
    for number in range(2, 8):
        seen.take_step("w", [], t=number * 60.0)
    assert seen.gpus["GPU-0"].engine_bytes == {}


def test_what_names_a_gpu_that_is_not_in_the_report_is_left_out() -> None:
    told = report("w", gpus=[gpu("GPU-0")], gpu_processes=[GpuProcesses(0), GpuProcesses(5, RANKS[0].processes)])
    assert holders_of(told) == {"GPU-0": []}
    stages = [StepStage(stage="gen", role="rollout", begin=0.0, seconds=1.0, engines=[StepEngine(7, 5)])]
    step = StepReport(number=1, begin=0.0, end=1.0, stages=stages)
    exact: Report = report("w", gpus=[gpu("GPU-0")], stage_quality=EXACT)
    assert list(engines_of(step, exact)) == []


def test_lists_of_followed_gpus_alone_count() -> None:
    seen = history()
    seen.holders("GPU-9", [], t=1.0)
    for uuid in ("GPU-0", "GPU-1"):
        assert unlisted(seen) is not None
        seen.holders(uuid, [GpuProcess(pid=1, memory_used_bytes=GIB)], t=1.0)
    assert unlisted(seen) is None


def test_what_was_seen_to_run_narrows_the_release_that_advice_is_for() -> None:
    workloads = Workloads()
    workload = workloads.job_seen(job(JobKind.RAY_CLUSTER, "grpo"), 0.0)
    assert workload is not None
    patient = Patient(
        workload, follows=Follows.ALL, depth=16, interval_seconds=15.0, thresholds=Thresholds(), began=0.0
    )
    plain = Command(text="python3 -m verl.trainer.main_ppo", source="spec")
    patient.launched(plain)
    assert context_at(patient.diagnosis, set()).versions.candidates == EXAMINED
    patient.launched(replace(plain, ray_names=("critic_compute_values", "vLLMHttpServer", "sleep")))
    assert context_at(patient.diagnosis, set()).versions.text == "0.6.1 to 0.7.1"
    assert patient.history.sleeps > 0
    patient.launched(replace(plain, verl_version="0.9.0", ray_names=("critic_compute_values",)))
    assert context_at(patient.diagnosis, set()).versions.text == "0.9.0"
