# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Stages of a workload as its status shows them: what runs now, how far it is, and a table of all it did. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.report import StageNow, StageQuality
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .jobs import JobKind, JobSeen
from .podtrack import PodTrack
from .steps import Pace, Pair, pace_of
from .totals import OTHER, StageSum, StageSums
from .workload import Workload

MAX_ROWS: Final = 16
MAX_POOLS: Final = 8
WEAKEST_FIRST: Final = (
    StageSource.NONE,
    StageSource.LAUNCH,
    StageSource.RAY_AGENT,
    StageSource.RAY_STATE,
    StageSource.TITLES,
    StageSource.MARKS,
)
HEAD_SILENT: Final = "HeadSilent"
"""What a sidecar says that hears its own Ray agent alone."""
SHARED: Final = "SharedRayCluster"
SHARED_MESSAGE: Final = (
    "Several RayJobs run in this RayCluster, and the source of its stages does not tell whose work it is."
)
NAMELESS: Final = (OTHER, UNKNOWN)
TRAINING: Final[Pair] = (OTHER, "trainer")
SFT: Final = ("sft_trainer", "fsdp_sft_trainer")
"""Last part of the modules of verl that train and do nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNow:
    """What a pool of pods does now."""

    name: str
    stage: str
    role: str
    gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One stage over the whole life of a job."""

    stage: str
    role: str
    sums: StageSum
    share: float
    """Of all GPU time that was observed and whose stage was decided; 0 to 1."""
    seconds_per_step: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageView:
    """All that is shown of stages."""

    stage: str | None = None
    """None while no pod's report is fresh; `unknown` where none of them knows."""
    role: str | None = None
    step: int | None = None
    seconds_per_step: float | None = None
    pools: Sequence[PoolNow] = ()
    """Where there is more than one."""
    rows: Sequence[Row] = ()
    quality: StageQuality | None = None
    """Of the pods with the weakest source; None while no pod's report is fresh."""


NOTHING_SEEN: Final = StageView()


def view(workload: Workload, fresh: Sequence[PodTrack], stages: StageSums, *, trainer_alone: bool = False) -> StageView:
    """Put together what pods say. `fresh`: those with GPUs whose report is of now; `stages`: the workload's sums.

    `trainer_alone`: the job's program is one that only trains, so that what has no name is that.
    """
    pace = _pace(workload)
    now = _most(_votes(workload, fresh))
    pairs = by_pair(stages)
    if trainer_alone:
        now = TRAINING if now is not None and now[0] in NAMELESS else now
        pairs = _as_training(pairs)
    return StageView(
        stage=now[0] if now else None,
        role=now[1] if now else None,
        step=workload.step(pace.cycles),
        seconds_per_step=pace.seconds_per_step,
        pools=_pools(workload, fresh),
        rows=rows(pairs, pace),
        quality=_quality(workload, fresh),
    )


def _as_training(pairs: Mapping[Pair, StageSum]) -> dict[Pair, StageSum]:
    """Give what has no name to the trainer."""
    found: dict[Pair, StageSum] = {}
    for pair, value in pairs.items():
        key = TRAINING if pair in ((OTHER, UNKNOWN), (UNKNOWN, UNKNOWN)) else pair
        found[key] = found[key].plus(value) if key in found else value
    return found


def trains_alone(job: JobSeen, program: str | None) -> bool:
    """Whether a job's pods do nothing but train: supervised fine-tuning by torchrun, where there is no Ray to ask."""
    return job.kind is JobKind.PYTORCH_JOB and program is not None and program.rpartition(".")[2] in SFT


def _votes(workload: Workload, pods: Iterable[PodTrack]) -> Counter[Pair]:
    """Count GPUs by the stage that their pod is in."""
    votes: Counter[Pair] = Counter()
    for track in pods:
        now = _now(workload, track)
        pair = (now.stage, now.role) if now is not None else (UNKNOWN, UNKNOWN)
        votes[pair] += track.record.gpus_requested
    return votes


def _now(workload: Workload, track: PodTrack) -> StageNow | None:
    """Return the stage that the workload is in on a pod, which it may share with others; None while it is not known."""
    if track.telemetry is None or track.telemetry.stage is None:
        return None
    told = (track.telemetry.stage, *track.telemetry.other_stages)
    return next((now for now in told if workload.counts(now.job)), None)


def _most(votes: Counter[Pair]) -> Pair | None:
    """Return the stage of most GPUs, of those whose stage is known; None if there are none at all."""
    known = {pair: gpus for pair, gpus in votes.items() if pair[0] != UNKNOWN}
    if not known:
        return (UNKNOWN, UNKNOWN) if votes else None
    # A stage with a name of its own tells more than `other`.
    return max(known, key=lambda pair: (known[pair], pair[0] != OTHER, pair))


def _pools(workload: Workload, fresh: Sequence[PodTrack]) -> list[PoolNow]:
    names = sorted({track.pool for track in fresh})
    if len(names) < 2:
        return []
    found = []
    for name in names[:MAX_POOLS]:
        votes = _votes(workload, (track for track in fresh if track.pool == name))
        stage, role = _most(votes) or (UNKNOWN, UNKNOWN)
        found.append(PoolNow(name=name, stage=stage, role=role, gpus=votes.total()))
    return found


def _pace(workload: Workload) -> Pace:
    return pace_of(workload.pools())


def _quality(workload: Workload, fresh: Sequence[PodTrack]) -> StageQuality | None:
    said = [track.telemetry.stage_quality for track in fresh if track.telemetry is not None]
    if not said:
        return None
    weakest = min(said, key=lambda quality: WEAKEST_FIRST.index(quality.source))
    if workload.shared and weakest.source is StageSource.RAY_AGENT:
        return StageQuality(source=StageSource.NONE, reason=SHARED, message=SHARED_MESSAGE)
    reason, message = _why(workload, weakest)
    known = [item.resolution_seconds for item in said if item.resolution_seconds is not None]
    return StageQuality(
        source=weakest.source,
        resolution_seconds=max(known) if known and weakest.source is not StageSource.NONE else None,
        reason=reason,
        message=message,
    )


def _why(workload: Workload, weakest: StageQuality) -> tuple[str | None, str | None]:
    """Return why no better source is in use: where pods only know that their head is silent, in the head's words."""
    if weakest.source not in (StageSource.NONE, StageSource.RAY_AGENT) or weakest.reason not in (None, HEAD_SILENT):
        return weakest.reason, weakest.message
    heads = [track.telemetry.stage_quality for track in workload.pods() if track.is_head and track.telemetry]
    found = next((quality for quality in heads if quality.reason), weakest)
    return found.reason, found.message


def by_pair(stages: StageSums) -> dict[Pair, StageSum]:
    """Sum by stage and role, whatever the job."""
    pairs: dict[Pair, StageSum] = {}
    for key, value in stages.items():
        pair = (key.stage, key.role)
        pairs[pair] = pairs[pair].plus(value) if pair in pairs else value
    return pairs


def rows(pairs: Mapping[Pair, StageSum], pace: Pace) -> list[Row]:
    """Return the table: at most `MAX_ROWS`, by their share, those without a name last. What is too much is `other`."""
    whole = sum(value.observed_seconds for value in pairs.values())
    if whole <= 0:
        return []
    ranked = sorted(pairs, key=lambda pair: (pair[0] in NAMELESS, -pairs[pair].observed_seconds, pair))
    kept = dict(pairs)
    if len(ranked) > MAX_ROWS:
        rest = (OTHER, UNKNOWN)
        smallest = sorted((pair for pair in ranked if pair != rest), key=lambda pair: pairs[pair].observed_seconds)
        for pair in smallest[: len(ranked) - MAX_ROWS + (rest not in kept)]:
            kept[rest] = kept[rest].plus(kept[pair]) if rest in kept else kept[pair]
            del kept[pair]
        ranked = sorted(kept, key=lambda pair: (pair[0] in NAMELESS, -kept[pair].observed_seconds, pair))
    return [
        Row(
            stage=pair[0],
            role=pair[1],
            sums=kept[pair],
            share=kept[pair].observed_seconds / whole,
            seconds_per_step=pace.stages.get(pair),
        )
        for pair in ranked
    ]


# As the status writes it


def numbers(row: Row) -> Mapping[str, Any]:
    """Return one item of `status.stages`."""
    sums, peak = row.sums, row.sums.peak
    return {
        "stage": row.stage[:64],
        "role": row.role[:64],
        "share": round(row.share, 4),
        "seconds": round(sums.observed_seconds, 1),
        "secondsPerStep": None if row.seconds_per_step is None else round(row.seconds_per_step, 2),
        "utilization": None if sums.utilization is None else round(sums.utilization, 4),
        "memoryPeakBytes": peak.used_bytes if peak else None,
        "memoryPeakRatio": round(peak.ratio, 4) if peak else None,
        "memoryFloorBytes": sums.floor_bytes,
        "powerWatts": None if sums.power_watts is None else round(sums.power_watts, 1),
        "energyJoules": None if sums.energy_joules is None else round(sums.energy_joules, 1),
    }


HEADER: Final = ("STAGE", "ROLE", "SHARE", "S/STEP", "UTIL", "MEM-PEAK", "POWER")
_WIDEST: Final = 24


def table(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `status.stageTable`: the numbers as lines of text, which `kubectl describe` prints as they are."""
    if not items:
        return []
    cells = [HEADER, *(_cells(item) for item in items)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cells(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(item["stage"])[:_WIDEST],
        str(item["role"])[:_WIDEST],
        _percent(item.get("share")),
        _short(item.get("secondsPerStep"), ""),
        _percent(item.get("utilization")),
        _percent(item.get("memoryPeakRatio")),
        _short(item.get("powerWatts"), "W"),
    )


def _percent(ratio: float | None) -> str:
    """A small share is not nothing: `<1%`."""
    if ratio is None:
        return "-"
    return "<1%" if 0 < ratio < 0.005 else percent(ratio)


def _short(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}{unit}" if value < 100 and not unit else f"{round(value)}{unit}"


def pool(item: PoolNow) -> Mapping[str, Any]:
    """Return one item of `status.pools`."""
    return {"name": item.name[:253], "stage": item.stage[:64], "role": item.role[:64], "gpus": item.gpus}


def quality(said: StageQuality) -> Mapping[str, Any]:
    """Return `status.dataQuality.stages`."""
    return {
        "source": said.source.value,
        "resolutionSeconds": None if said.resolution_seconds is None else round(said.resolution_seconds, 1),
        "reason": said.reason,
        "message": said.message,
    }
