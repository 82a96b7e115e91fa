# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.stages`: what each source of stages costs and how right it is, on a job with known durations.

Time is virtual, so that the figures depend on the machine only where they say "CPU".
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.unit.stages.fakeray import (
    GEN_SECONDS,
    NODES,
    SERVERS,
    STAGES,
    STEP_SECONDS,
    T0,
    URL,
    WORKERS,
    FakeHead,
    Task,
    verl_job,
)
from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.stages.choice import choose
from verl_gpumonitor.stages.sources.ray_agent import AgentStages, running_names
from verl_gpumonitor.stages.sources.ray_state import RayState
from verl_gpumonitor.stages.sources.titles import Titles

BEGIN = 3.0
STEPS = 60
CHECKED_STEPS = 15
CHECKED_END = BEGIN + CHECKED_STEPS * STEP_SECONDS
TRUTH = {"gen": GEN_SECONDS, **{stage: seconds for stage, _, seconds in STAGES}}


def error_per_step(intervals: Iterable[StageInterval], begin: float, end: float) -> float:
    """Largest difference of a stage's seconds, a step, between what is said of one GPU and the truth."""
    ours = [each for each in intervals if each.local_rank in (None, 0)]
    found: dict[str, float] = defaultdict(float)
    for index in range(int((end - begin) * 20)):
        at = T0 + begin + index / 20
        stage = choose(each for each in ours if each.begin <= at and (each.end is None or each.end > at))
        found["none" if stage is None else stage.stage] += 0.05
    steps = (end - begin) / STEP_SECONDS
    return max(abs(found[stage] / steps - seconds) for stage, seconds in TRUTH.items())


def state(cost: float) -> None:
    """Print how often a head whose answers cost so much is asked, and how right its stages are."""
    head = FakeHead(tasks=verl_job(STEPS), actors=[*WORKERS, *SERVERS], nodes=NODES, cost=cost)
    source = RayState(URL, read=head.read, clock=head.clock, wall=head.wall)
    end = BEGIN + STEPS * STEP_SECONDS
    kept: dict[tuple[str, int | None, float], StageInterval] = {}
    while head.now < end:
        head.now = max(head.now, source.due_at())
        source.ask()
        for each in source.cluster(head.wall()).nodes.get("10.0.0.0", ()):
            kept[(each.stage, each.local_rank, each.begin)] = each
    asked = head.asked.count("/api/v0/tasks")
    share = asked * cost / end
    line = (
        f"State API, {cost * 1000:.0f} ms an answer: asked {asked / end * 60:.1f} times a minute, {share:.2%} of a core"
    )
    if source.trouble is None:
        line += f", stages right to {error_per_step(kept.values(), BEGIN, CHECKED_END):.2f} s a step"
    else:
        line += f" ({source.trouble.reason}: the metrics agent tells the stages)"
    print(line)


def agent() -> None:
    """Print how right the stages are that the metrics agent tells alone, reading and renewal both each 5 s."""
    tasks = [task for task in verl_job(STEPS) if task.node == "n0"]
    source = AgentStages()
    kept: dict[tuple[str, float], StageInterval] = {}
    end = BEGIN + STEPS * STEP_SECONDS
    for number in range(int(end / 5)):
        read_at, renewed_at = number * 5.0, number * 5.0 - 2.1
        source.observe(T0 + read_at, tuple({task.name for task in tasks if task.begin <= renewed_at < task.end}))
        for each in source.word(T0 + read_at).intervals:
            kept[(each.stage, each.begin)] = each
    error = error_per_step(kept.values(), BEGIN, CHECKED_END)
    print(f"metrics agent alone: stages right to {error:.2f} s a step, over {CHECKED_STEPS} steps")


def cpu(what: str, call: Callable[[], object], times: int, every: float) -> None:
    """Print what a call takes of a CPU, and which share of a core that is."""
    call()
    begin = time.process_time()
    for _ in range(times):
        call()
    seconds = (time.process_time() - begin) / times
    print(f"{what}: {seconds * 1000:.2f} ms CPU, {seconds / every:.3%} of a core each {every:.0f} s")


def costs() -> None:
    """Print what the sources cost the sidecar itself."""
    for gpus in (8, 64, 512):
        nodes = [(f"n{index}", f"10.0.{index}.1") for index in range(gpus // 8)]
        kind = "create_colocated_worker_cls.<locals>.WorkerDict"
        actors = [(f"w{i}", kind, f"abcdefWorkerDict_{i // 8}:{i % 8}", f"n{i // 8}") for i in range(gpus)]
        name = "WorkerDict.actor_rollout_ref_update_actor"
        tasks = [Task(name=name, node=f"n{i // 8}", begin=-9, end=1e9, actor=f"w{i}") for i in range(gpus)]
        head = FakeHead(tasks=tasks, actors=actors, nodes=nodes)
        answers = {path: head.read(URL + path) for path in (_TASKS, _ACTORS, _NODES)}
        source = RayState(URL, read=lambda url, answers=answers: answers[url.removeprefix(URL)])  # type: ignore[misc]
        cpu(f"State API, our side, {gpus} GPUs", source.ask, 50, 1)
    running = 'ray_tasks{Name="WorkerDict.x",Source="executor",State="RUNNING",IsRetry="0",Version="2"} 1.0\n'
    other = 'ray_other{Component="core_worker",Version="' + "2" * 180 + '"} 1.0\n'
    page = (running * 30 + other * 1500).encode()
    cpu(f"metrics agent's page of {len(page) // 1000} KB", lambda: running_names(page), 20, 5)
    titles = Titles()
    for at in range(60):
        titles.observe(float(at))
    count = sum(path.name.isdecimal() for path in Path("/proc").iterdir())
    clock = iter(range(100, 10_000))
    cpu(f"titles of this machine's {count} processes", lambda: titles.observe(float(next(clock))), 60, 1)


_TASKS = "/api/v0/tasks?limit=1000&detail=1&filter_keys=state&filter_predicates=%3D&filter_values=RUNNING"
_ACTORS = "/api/v0/actors?limit=4000&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
_NODES = "/api/v0/nodes?limit=4000"


def main() -> None:
    """Print all figures."""
    for cost in (0.005, 0.03, 0.3):
        state(cost)
    agent()
    costs()


if __name__ == "__main__":
    main()
