# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Imbalance: GPUs of one pool, role and stage differ in memory, utilisation or time.

The fullest GPU sets everybody's batch, and the slowest everybody's pace. Compared are only GPUs that do the same work:
of one pool, in the same stage and role, and never across pools, pipeline stages (the last one holds the output layer
and 25% more, as it must), between those that train and those that only generate, or with a GPU that the workers of
this stage do not have. Half and half are two kinds of work, unless all of them train the same, and some are left
without work in each rollout (engines that got no requests, or died) or hold far more in each step (a second model lies
on them). Answers differ in length, so that in
any one rollout some GPUs work longer; only those that are odd in several steps in a row are odd. Time is that of each
rank's own work in a stage: where ranks wait for each other inside it, they all take as long.
Source: the project's worked case (GPU 0 at 85% and 78 GB, the others near 11% and 19 GB); verl's `balance_batch`.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from verl_gpumonitor.diagnosis.alike import GENERATES, alike, trains
from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.rule import (
    TRAINING,
    Cadence,
    Case,
    Open,
    Rule,
    Verdict,
    duration,
    few,
    finding,
    in_stage,
    median,
    subject,
)
from verl_gpumonitor.diagnosis.thresholds import Imbalance, Thresholds
from verl_gpumonitor.diagnosis.work import GEN
from verl_gpumonitor.model.figures import gib, percent
from verl_gpumonitor.model.findings import Evidence, Finding
from verl_gpumonitor.model.history import Piece

REASON = "Imbalance"
MEMORY, UTILIZATION, TIME = "memory", "utilization", "time"
_LEAST_SECONDS = 5.0
"""A shorter stage cannot be compared."""
_LEAST_SAMPLES = 2.5
"""Nor can the load of one that has fewer samples."""
_COMPARED = TRAINING | {GEN, "other", "unknown"}


class Odd(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that differ from the rest in one stage, in several steps in a row."""

    metric: str
    stage: str
    role: str
    gpus: Sequence[GpuHistory]
    """The oddest first."""
    value: float
    middle: float
    seconds: float
    """Of the stage in a step: of several stages that show it the longest is named."""
    compared: int


def uneven(history: History, thresholds: Thresholds, open_now: Open) -> Verdict:
    """Report, for each pool and metric, the GPUs that are odd, in the longest stage that shows it."""
    limits = thresholds.imbalance
    cases = []
    for pool, gpus in history.pools().items():
        mapped = [gpu for gpu in gpus if _works_as_all(gpu)]
        stages = sorted({stage for gpu in mapped for stage in gpu.past} & _COMPARED)
        if not history.stages_told:
            stages = [stage for stage in stages if stage in ("other", "unknown")]
        else:
            stages = [stage for stage in stages if stage not in ("other", "unknown")]
        odd = [
            o
            for part in alike(mapped)
            for stage in stages
            for o in (_memory(history, part, stage, limits), _load(part, stage, limits))
        ]
        odd += [_time(history, pool, stage, limits) for stage in stages]
        for metric in (MEMORY, UTILIZATION, TIME):
            found = [o for o in odd if o is not None and o.metric == metric]
            if found:
                key = f"{pool}/{metric}"
                told = [o for o in found if o.stage == open_now.get(key)]
                longest = max(told or found, key=lambda o: (o.seconds, o.stage))
                cases.append(Case(key=key, finding=_finding(longest)))
    return cases


def _works_as_all(gpu: GpuHistory) -> bool:
    """Say whether a GPU takes part in its pod's work: where ranks are fewer than GPUs, it must be one's."""
    ranks = gpu.pod.work.ranks
    if not ranks or len(set(ranks.values())) >= len(gpu.pod.gpus):
        return True
    return any(gpu.pod.work.homes.get(pid) == gpu.uuid for pid in ranks)


def _columns(
    gpus: Sequence[GpuHistory], stage: str, value: Callable[[GpuHistory, Piece], float | None], steps: int
) -> Sequence[Mapping[GpuHistory, float]]:
    """Return, for each of the last steps that had this stage, the known values; fewer than asked for are none."""
    by_step: dict[int, dict[GpuHistory, float]] = {}
    for gpu in gpus:
        for piece in gpu.pieces(stage, steps + 1):
            known = value(gpu, piece) if piece.seconds >= _LEAST_SECONDS else None
            if known is not None:
                by_step.setdefault(piece.step, {})[gpu] = known
    last = [by_step[step] for step in sorted(by_step)][-steps:]
    return last if len(last) == steps and all(len(column) >= 2 for column in last) else []


def _always_odd(
    columns: Sequence[Mapping[GpuHistory, float]], odd: Callable[[float, float], bool]
) -> tuple[list[GpuHistory], float] | None:
    """Return the GPUs that are odd in each of these steps, the farthest first, and the pool's usual value."""
    always: set[GpuHistory] | None = None
    for column in columns:
        middle = median(column.values())
        assert middle is not None  # noqa: S101 - columns have values
        now = {gpu for gpu, known in column.items() if odd(known, middle)}
        if not few(list(now), list(column)):
            return None
        always = now if always is None else always & now
    if not always:
        return None
    last, usual = columns[-1], median(columns[-1].values()) or 0.0
    return sorted(always, key=lambda gpu: (-abs(last[gpu] - usual), gpu.uuid)), usual


def _seconds(gpu: GpuHistory, stage: str) -> float:
    return median(piece.seconds for piece in gpu.pieces(stage)) or 0.0


def _role(gpu: GpuHistory, stage: str) -> str:
    return gpu.past[stage].role


def _memory(history: History, gpus: Sequence[GpuHistory], stage: str, limits: Imbalance) -> Odd | None:
    apart = limits.memory_difference
    if history.pipeline_stages > 1 and stage != GEN:
        apart = limits.pipeline_memory_difference
    columns = _columns(gpus, stage, _peak_ratio, limits.steps)
    if not columns:
        return None
    found = _always_odd(columns, lambda value, middle: abs(value - middle) >= apart)
    if found is None and _same_work(history, gpus):
        found = _always_fuller(columns, apart)
    return None if found is None else _odd(MEMORY, stage, found, columns)


def _same_work(history: History, gpus: Sequence[GpuHistory]) -> bool:
    """Say whether all of these GPUs surely do the same: an actor's and a critic's may lie in one pod.

    Of two pipeline stages each has half of the GPUs; that there are none is known only of settings that can be seen.
    """
    if history.pipeline_stages > 1 or "actor_rollout_ref." not in history.entrypoint:
        return False
    return len({frozenset(stage for stage in gpu.past if stage in TRAINING) for gpu in gpus}) == 1


def _always_fuller(
    columns: Sequence[Mapping[GpuHistory, float]], apart: float
) -> tuple[list[GpuHistory], float] | None:
    """Return the fuller of two groups into which a pool falls, always the same, with nothing between them.

    Up to half of a pool: more of it are too many to be odd by themselves, as where a second model lies on four of
    eight GPUs. 0.75, 0.74, 0.41, 0.40 give the first two; 0.66, 0.58, 0.52, 0.45 are one group that is spread.
    """
    fuller: set[GpuHistory] | None = None
    for column in columns:
        ordered = sorted(column, key=lambda gpu: column[gpu])
        place = max(range(1, len(ordered)), key=lambda n: column[ordered[n]] - column[ordered[n - 1]])
        low, high = ordered[:place], ordered[place:]
        spread = max(column[part[-1]] - column[part[0]] for part in (low, high))
        if column[high[0]] - column[low[-1]] < apart or spread > apart / 2 or len(high) > len(low) or len(high) < 2:
            return None
        if fuller is not None and fuller != set(high):
            return None
        fuller = set(high)
    last = columns[-1]
    usual = median(known for gpu, known in last.items() if gpu not in (fuller or ()))
    return sorted(fuller or (), key=lambda gpu: (-last[gpu], gpu.uuid)), usual or 0.0


def _peak_ratio(gpu: GpuHistory, piece: Piece) -> float | None:
    return piece.peak_bytes / gpu.total_bytes if piece.peak_bytes is not None and gpu.total_bytes else None


def _load(gpus: Sequence[GpuHistory], stage: str, limits: Imbalance) -> Odd | None:
    apart = limits.utilization_difference
    if stage != GEN:
        return _load_in(gpus, stage, limits, limits.steps, lambda value, middle: abs(value - middle) >= apart)
    # The last long answers keep some GPU busy after the others; that one is left without work is another thing.
    idle = _load_in(gpus, stage, limits, limits.steps, lambda value, middle: middle - value >= apart)
    idle = idle or _left_out(gpus, stage, limits)
    return idle or _load_in(gpus, stage, limits, limits.gen_steps, lambda value, middle: value - middle >= apart)


def _left_out(gpus: Sequence[GpuHistory], stage: str, limits: Imbalance) -> Odd | None:
    """Look for GPUs that train as all and are without work worth the name in each rollout, however many they are."""
    columns = _columns([gpu for gpu in gpus if trains(gpu)], stage, _utilization, limits.steps)
    if not columns:
        return None
    idle = [{gpu for gpu, load in column.items() if load < GENERATES} for column in columns]
    always = set.intersection(*idle)
    busy = [median(load for gpu, load in column.items() if gpu not in always) for column in columns]
    if not always or any(load is None or load < limits.utilization_busy for load in busy):
        return None
    found = sorted(always, key=lambda gpu: gpu.uuid)
    return _odd(UTILIZATION, stage, (found, busy[-1] or 0.0), columns)


def _utilization(gpu: GpuHistory, piece: Piece) -> float | None:
    """Return the piece's load, if it had samples enough to tell it."""
    return piece.utilization if piece.known_seconds >= _LEAST_SAMPLES * gpu.interval else None


def _load_in(
    gpus: Sequence[GpuHistory], stage: str, limits: Imbalance, steps: int, odd: Callable[[float, float], bool]
) -> Odd | None:
    columns = _columns(gpus, stage, _utilization, steps)
    if not columns or min(max(column.values()) for column in columns) < limits.utilization_busy:
        return None
    found = _always_odd(columns, odd)
    return None if found is None else _odd(UTILIZATION, stage, found, columns)


def _odd(
    metric: str,
    stage: str,
    found: tuple[list[GpuHistory], float],
    columns: Sequence[Mapping[GpuHistory, float]],
) -> Odd:
    gpus, middle = found
    value = columns[-1][gpus[0]]
    return Odd(
        metric=metric,
        stage=stage,
        role=_role(gpus[0], stage) if stage in gpus[0].past else "unknown",
        gpus=gpus,
        value=value,
        middle=middle,
        seconds=_seconds(gpus[0], stage),
        compared=len(columns[-1]),
    )


def _time(history: History, pool: str, stage: str, limits: Imbalance) -> Odd | None:
    """Compare what the ranks' own tasks and marks took."""
    columns: list[dict[GpuHistory, float]] = []
    for times in list(history.rank_times)[-limits.steps :]:
        column: dict[GpuHistory, float] = {}
        for (pod, worker), seconds in times.get((pool, stage), {}).items():
            gpu = history.pods[pod].gpu_of(worker) if pod in history.pods else None
            if gpu is not None:
                column[gpu] = max(seconds, column.get(gpu, 0.0))
        columns.append(column)
    if len(columns) < limits.steps or min(len(column) for column in columns) < 2:
        return None

    def slow(value: float, middle: float) -> bool:
        return value >= limits.time_factor * middle and value - middle >= limits.time_seconds

    found = _always_odd(columns, slow) or _slow_pods(columns, slow)
    return None if found is None else _odd(TIME, stage, found, columns)


def _slow_pods(
    columns: Sequence[Mapping[GpuHistory, float]], slow: Callable[[float, float], bool]
) -> tuple[list[GpuHistory], float] | None:
    """Compare whole pods, as a slow node slows all its ranks: too many to be odd by themselves."""
    always: set[str] | None = None
    for column in columns:
        by_pod: dict[str, list[float]] = {}
        for gpu, seconds in column.items():
            by_pod.setdefault(gpu.pod.name, []).append(seconds)
        typical = {pod: median(times) or 0.0 for pod, times in by_pod.items()}
        middle = median(typical.values()) or 0.0
        now = {pod for pod, seconds in typical.items() if slow(seconds, middle)}
        if not few(list(now), list(typical)):
            return None
        always = now if always is None else always & now
    last = columns[-1]
    gpus = [gpu for gpu in last if gpu.pod.name in (always or ())]
    usual = median(seconds for gpu, seconds in last.items() if gpu not in gpus)
    return (sorted(gpus, key=lambda gpu: (-last[gpu], gpu.uuid)), usual or 0.0) if gpus else None


def _finding(odd: Odd) -> Finding:
    evidence: Evidence = {
        "metric": odd.metric,
        "value": round(odd.value, 4),
        "pool_value": round(odd.middle, 4),
        "gpus_compared": odd.compared,
    }
    total = odd.gpus[0].total_bytes
    if odd.metric == MEMORY and total:
        evidence["memory_total_bytes"] = total
        evidence["peak_bytes"] = round(odd.value * total)
        evidence["pool_peak_bytes"] = round(odd.middle * total)
    return finding(REASON, _message(odd), gpus=odd.gpus, stage=odd.stage, role=odd.role, evidence=evidence)


def _message(odd: Odd) -> str:
    who = subject(odd.gpus)
    if odd.metric == MEMORY:
        total = odd.gpus[0].total_bytes or 0
        where = in_stage(odd.stage)
        told = f"holds {gib(odd.value * total)}{where} while its pool's usual is {gib(odd.middle * total)}"
        return (
            f"{who} {told}: {'the fullest GPU sets the batch of all' if odd.value > odd.middle else 'it carries less'}"
        )
    if odd.metric == TIME:
        told = f"takes {duration(odd.value)} for {odd.stage} while its pool's usual is {duration(odd.middle)}"
        return f"{who} {told}: the others wait for it"
    told = f"is {percent(odd.value)} busy{in_stage(odd.stage)} while its pool's usual is {percent(odd.middle)}"
    return f"{who} {told}: {'the others wait for it' if odd.value > odd.middle else 'it waits for the others'}"


RULE = Rule(reason=REASON, judge=uneven, cadence=Cadence.STEP)
