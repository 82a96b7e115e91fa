# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which stage a sample of a GPU belongs to.

A sample speaks for the span since the one before. Of a span that saw several stages, each gets its seconds; load and
power, which NVML measures over the last moment, are the last stage's, and the memory peak belongs to one of them: the
one that is left when no other ever came near it (`straddled`); where several did, it is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from verl_gpumonitor.diagnosis.work import GEN, OTHER
from verl_gpumonitor.model.history import IDLE_UTILIZATION, Piece
from verl_gpumonitor.model.trace import GpuLine
from verl_gpumonitor.model.vocabulary import UNKNOWN, held_down

from .gpu import GpuHistory

SETTLED_SECONDS: Final = 1.0
"""A stage that began less ago may find load and memory of the one before."""
SKEW_SECONDS: Final = 3.0
"""So far the clocks of whoever tells stages and whoever samples may be apart, and a sample more."""
ALARM_RATIOS: Final = (0.965, 0.985)
"""A stage that passes one of these within a step is looked at before the step ends."""
RESUME: Final = "update_weights"
"""In it trained and served weights share the GPU."""
TRAINED: Final = frozenset(("old_log_prob", "ref", "values", "update_critic", "update_actor", "reward"))
TRAINED_APART: Final = 0.03
"""What a training stage takes differs from step to step by so much of a GPU's memory, and is not surely another's."""
ENGINE_APART: Final = 0.015
"""The same of a stage that takes its memory beforehand."""
USUAL_RISE: Final = 0.15
"""No stage takes so much more from one step to the next that nothing else could have taken it."""
_USUAL_STEPS: Final = 5


def attribute(gpu: GpuHistory, line: GpuLine, *, begin: float, step: int) -> int:
    """Share the span since the last line among the stages it saw. Return the alarms: see `alarms`."""
    spans = list(_spans(gpu, begin, line.t))
    whole = len(spans) == 1
    for since, until, stage, role in spans:
        piece = gpu.now.get(stage)
        if piece is None:
            piece = Piece(stage=stage, role=role, step=step)
            gpu.now[stage] = piece
        elif piece.role == UNKNOWN:
            piece.role = role
        piece.seconds += until - since
    found = 0
    if whole or line.t - gpu.stage_since >= SETTLED_SECONDS:
        piece = gpu.now[spans[-1][2]]
        _add_load(piece, line, spans[-1][1] - spans[-1][0])
        found += _add_memory(gpu, line, piece, peak_bytes=_peak_of(gpu, line, whole=whole))
    if not whole and line.memory_peak_bytes is not None:
        stages = frozenset(span[2] for span in spans)
        whose = straddled(gpu, stages, line.memory_peak_bytes, last=spans[-1][2])
        if whose is not None:
            piece = gpu.now[whose]
            before = piece.peak_bytes
            piece.peak_bytes = max(line.memory_peak_bytes, before or 0.0)
            found += alarms(gpu, before, piece)
    return found


def alarms(gpu: GpuHistory, before: float | None, piece: Piece) -> int:
    """Count it where a stage's peak, which was `before` bytes, came near the end."""
    total, now = gpu.total_bytes or 0.0, piece.peak_bytes or 0.0
    return int(any((before or 0.0) < ratio * total <= now for ratio in ALARM_RATIOS))


def _peak_of(gpu: GpuHistory, line: GpuLine, *, whole: bool) -> float | None:
    """Return the peak of a line's span; None where it may be another stage's.

    What is in use at the moment of a line stands for it only where no line tells peaks: else, in a short stage, one
    GPU's peak would be compared with another's level between two micro batches.
    """
    if line.memory_peak_bytes is None:
        return None if gpu.tells_peaks else line.memory_used_bytes
    gpu.tells_peaks = True
    return line.memory_peak_bytes if whole else None


def _add_memory(gpu: GpuHistory, line: GpuLine, piece: Piece, *, peak_bytes: float | None) -> int:
    """Give a stage the memory of a sample; that of its first one only when the next does not take it back.

    Whoever tells stages and whoever samples may have clocks that are a second or two apart. A training stage that
    begins with what the engine held, and has lost it a sample later, never had it.
    """
    used, before, waits = line.memory_used_bytes, piece.peak_bytes, gpu.carried
    if used is not None and _carries(gpu, line, piece):
        if waits is not None and waits[0] is piece:
            used, peak_bytes = max(used, waits[1]), max(peak_bytes or 0.0, waits[2] or 0.0) or None
        gpu.carried = piece, used, peak_bytes
        return 0
    if waits is not None:
        gpu.carried = None
        if used is None or waits[1] - used <= USUAL_RISE * (gpu.total_bytes or 0.0):
            waits[0].add_memory(waits[1], waits[2])
        else:
            # It was let go of since, so that the peak of this span is as much the stage before's.
            peak_bytes = None if gpu.tells_peaks else used
    piece.add_memory(used, peak_bytes)
    return alarms(gpu, before, piece)


def _spans(gpu: GpuHistory, begin: float, end: float) -> Iterator[tuple[float, float, str, str]]:
    """Cut a span by the stages that the GPU was in: since, until, stage, role.

    A change at the very end of it was told before the sample, and belongs to the next.
    """
    changes: Sequence[tuple[float, str, str]] = () if gpu.changes is None else gpu.changes
    inside = [change for change in changes if begin < change[0] < end]
    stage, role = gpu.stage, gpu.role
    if inside or (changes and begin < changes[-1][0]):
        earlier = [change for change in changes if change[0] <= begin]
        stage, role = earlier[-1][1:] if earlier else (UNKNOWN, UNKNOWN)
    since = begin
    for t, next_stage, next_role in inside:
        if next_stage == stage:
            continue
        yield since, t, stage, role
        since, stage, role = t, next_stage, next_role
    yield since, end, stage, role


def straddled(gpu: GpuHistory, stages: frozenset[str], peak_bytes: float, *, last: str) -> str | None:
    """Return whose peak it is that fell into a span of several stages; None where that cannot be told.

    The window in which the rollout resumes is short, and begins with its peak, the highest of a step: mostly that lies
    in such a span. It is the hand-over's where each other stage is known and stays well below; else that of the one
    training stage which alone comes as high. Example: of 78 GiB between `ref`, never above 40, and `update_actor`,
    which reaches 70, the latter's. Releases that hand over inside generation (up to 0.7.0) tell no window, and the
    begin of generation stands for it: `last` says which stage the span ends in.
    """
    total = gpu.total_bytes
    if not total:
        return None
    highest = {stage: _highest(gpu, stage) for stage in stages}
    resumes = GEN if last == GEN and RESUME not in stages and _resumes_inside(gpu) else RESUME
    if resumes in stages and highest[resumes] is not None and _below(highest, resumes, peak_bytes, total):
        return resumes
    trained = {stage: known for stage in sorted(stages) if stage in TRAINED and (known := highest[stage]) is not None}
    if not trained:
        return None
    most = max(trained, key=lambda stage: trained[stage])
    # One peak that was put down wrongly must not draw the others of its kind after it.
    alone = stages <= TRAINED or peak_bytes <= _usual_of(gpu, most, trained[most]) + USUAL_RISE * total
    return most if alone and _below(highest, most, peak_bytes, total) else None


def _resumes_inside(gpu: GpuHistory) -> bool:
    """Say whether weights are handed over inside generation: no window was ever told, and the GPU generates itself."""
    return RESUME not in gpu.past and any((p.utilization or 0.0) >= IDLE_UTILIZATION for p in gpu.pieces(GEN, 3))


def _highest(gpu: GpuHistory, stage: str) -> float | None:
    """Return the highest known peak of a stage; None before one of its steps is over."""
    past, now = gpu.past.get(stage), gpu.now.get(stage)
    if past is None:
        return None
    known = [peak for peak in past.peaks if peak is not None]
    return max([*known, (now.peak_bytes if now is not None else None) or 0.0])


def _usual_of(gpu: GpuHistory, stage: str, highest: float) -> float:
    """Return what a stage usually takes on a GPU, or on most GPUs of its pod where that is more.

    Where samples fall so that a GPU's peak of each step lies between two stages, its peers tell what it may be.
    """
    peers = sorted(usual for peer in gpu.pod.gpus.values() if (usual := _usual(peer, stage)) is not None)
    return max(_usual(gpu, stage) or highest, peers[(len(peers) - 1) // 2] if peers else 0.0)


def _usual(gpu: GpuHistory, stage: str) -> float | None:
    """Return the median of a stage's last peaks; None where none is known."""
    past = gpu.past.get(stage)
    known = sorted(peak for peak in (past.peaks if past is not None else ())[-_USUAL_STEPS:] if peak is not None)
    return known[len(known) // 2] if known else None


def _below(highest: Mapping[str, float | None], one: str, peak_bytes: float, total: float) -> bool:
    """Say whether all stages but one stay so far below a peak that it cannot be theirs."""
    for stage, known in highest.items():
        # What runs between stages takes no memory of its own, but for a hand-over that nobody tells.
        if stage in (one, OTHER, UNKNOWN):
            continue
        apart = TRAINED_APART if stage in TRAINED else ENGINE_APART
        if known is None or peak_bytes < known + apart * total:
            return False
    return True


def _carries(gpu: GpuHistory, line: GpuLine, piece: Piece) -> bool:
    """Say whether a training stage has only begun, and finds the memory that was in use before."""
    used, before, total = line.memory_used_bytes, gpu.used_before, gpu.total_bytes
    if used is None or before is None or not total or piece.stage not in TRAINED:
        return False
    return line.t - gpu.stage_since <= SKEW_SECONDS and abs(used - before) <= TRAINED_APART * total


def _add_load(piece: Piece, line: GpuLine, seconds: float) -> None:
    if line.utilization is not None:
        piece.known_seconds += seconds
        piece.busy_seconds += seconds * line.utilization
        piece.idle_seconds += seconds if line.utilization < IDLE_UTILIZATION else 0.0
    if line.power_watts is not None:
        piece.powered_seconds += seconds
        piece.energy_joules += seconds * line.power_watts
    if line.throttled is not None:
        piece.throttle_known_seconds += seconds
        piece.throttled_seconds += seconds_throttled(line, seconds)


def seconds_throttled(line: GpuLine, seconds: float) -> float:
    """Return the seconds of a sample if heat or a power brake held the clocks down in it, else 0."""
    return seconds if held_down(line.throttled or ()) else 0.0
