# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the marks of a pod's processes add up to: intervals, steps, GPUs, host memory. Bounded, and without a clock.

A process vouches for its time from its first mark on, for as long as it has a span open or marked a moment ago: in
between, no interval means that it ran none of its stages. Driver-wide marks hold for every node of the Ray cluster;
they reach this pod's sidecar alone, the one beside the driver, which passes `cluster_word` on.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.model.marks import MAX_OPEN, STAGE_ROLES, STEP, Mark, MarkScope, MarkState
from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.model.vocabulary import UNKNOWN

KEPT_SECONDS: Final = 180.0
"""What ended longer ago is forgotten."""
MAX_INTERVALS: Final = 256
"""Ended intervals kept of one process."""
MAX_PROCESSES: Final = 64
"""The one that has been silent the longest makes room."""
MAX_STEPS: Final = 64
QUIET_SECONDS: Final = 20.0
"""A process with no span open vouches so long after its last one. It may be over, or do what it does not mark."""
OPEN_SECONDS: Final = 6 * 3600.0
"""A span without a word of its process is believed so long: a hang is seen as the stage it is in, and a dead process
is not believed for ever."""
REPLACED_SECONDS: Final = 10.0
"""When a new process begins to mark, open spans of others in its place end, unless they marked so recently: those
were killed. If not, the mark of their end brings the whole span back."""
AHEAD_SECONDS: Final = 5.0
"""Marks from further in the future, by the receiver's clock, are dropped."""
LATE_SECONDS: Final = 120.0
BACK_SECONDS: Final = 2.0
"""A process whose newest mark is so much before one that it sent earlier had its clock set back."""
HOST_SECONDS: Final = 60.0
"""The word on host memory holds so long."""
MAX_SPAN_SECONDS: Final = 30 * 86400.0


class StepSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, as the program marked it."""

    begin: float
    end: float | None = None
    step: int | None = None
    """verl's number; None where it is not known, or not yet."""


class _Span(msgspec.Struct, kw_only=True):
    stage: str
    role: str
    begin: float
    end: float | None = None
    step: int | None = None
    local_rank: int | None = None
    job: str = ""


class _Process:
    """One process that marks."""

    __slots__ = ("first", "heard", "last", "mark", "memory", "open", "over", "seq", "steps")

    def __init__(self, mark: Mark) -> None:
        self.first = _since(mark)
        """Since when it vouches; anew after each silence."""
        self.last = mark.t
        """When a span last began or ended, or a step was numbered: labels alone say nothing of what runs."""
        self.heard = mark.t
        self.mark = mark
        """The newest: whose it is does not change."""
        self.memory: Mark | None = None
        """The newest that told the host memory."""
        self.seq = -1
        self.open: dict[int, _Span] = {}
        self.over: list[_Span] = []
        self.steps: list[_Span] = []

    def until(self, now: float) -> float:
        """Return up to when it vouches."""
        return min(now, self.heard + OPEN_SECONDS if self.open else self.last + QUIET_SECONDS)

    def set_back(self, now: float) -> None:
        """Go on at an earlier time: what was written down of a later one has no place in it."""
        self.first, self.last, self.heard = min(self.first, now), now, now
        self.over = [span for span in self.over if span.end is not None and span.end <= now]
        self.steps = [span for span in self.steps if span.end is None or span.end <= now]
        for span in (*self.open.values(), *self.steps):
            span.begin = min(span.begin, now)
        if self.memory is not None and self.memory.t > now:
            self.memory = None

    def spans(self) -> Iterator[_Span]:
        """Return what it did and does, steps left out."""
        yield from self.over
        yield from (span for span in self.open.values() if span.stage != STEP)


class MarkBook:
    """Takes marks, and answers what is known of a moment. Used by one thread at a time."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self.taken = 0
        """Marks that were taken in."""
        self.dropped = 0
        """Marks with impossible times."""

    # --- taking marks in ---------------------------------------------------------------------------------------

    def observe(self, mark: Mark, now: float) -> None:
        """Take one mark in. `now`: the receiver's Unix time; what is far from it is dropped."""
        if not _plausible(mark, now):
            self.dropped += 1
            return
        self.taken += 1
        process = self._process(mark)
        if mark.seq > process.seq and mark.t < process.heard - BACK_SECONDS:
            process.set_back(mark.t)
        if mark.t > process.until(mark.t):
            process.first = _since(mark)  # After a silence: what was between is not known.
        process.heard = max(process.heard, mark.t)
        if mark.state is not MarkState.POINT or mark.stage == STEP:
            process.last = max(process.last, mark.t)
        if mark.seq > process.seq:
            process.seq, process.mark = mark.seq, mark
            process.memory = process.memory if mark.memory_used_bytes is None else mark
            _close(process, (span for span in process.open if span not in mark.open and span != mark.span), mark.t)
        if mark.state is MarkState.BEGIN:
            _begin(process, mark)
        elif mark.state is MarkState.END:
            _end(process, mark)
        elif mark.stage == STEP and mark.step is not None:
            _number(process, mark.step)
        _forget_old(process, now)

    def _process(self, mark: Mark) -> _Process:
        process = self._processes.get(mark.process)
        if process is None:
            for other in self._processes.values():
                if _replaces(mark, other.mark) and mark.t - other.heard > REPLACED_SECONDS:
                    _close(other, other.open, mark.t)
            process = self._processes[mark.process] = _Process(mark)
            if len(self._processes) > MAX_PROCESSES:
                del self._processes[min(self._processes, key=lambda name: self._processes[name].heard)]
        return process

    # --- answers -----------------------------------------------------------------------------------------------

    def word(self, now: float) -> StageWord:
        """Return what holds for this pod: of the driver, if it is here, and of ranks that say all they do.

        Nobody vouches: `known_from` and `known_until` are both `now`, and there are no intervals.
        """
        return self._word((MarkScope.DRIVER, MarkScope.RANK), now)

    def cluster_word(self, now: float) -> StageWord:
        """Return what holds for every node of the Ray cluster: the driver's marks alone."""
        return self._word((MarkScope.DRIVER,), now)

    def parts(self, now: float) -> tuple[StageWord, ...]:
        """Return what ranks say that tell some of their stages: a word for each time in which one of them ran."""
        spans = [
            interval
            for process in self._live(now, (MarkScope.PART,))
            for interval in _intervals(process, now - KEPT_SECONDS, alone=False)
        ]
        spans.sort(key=_by_begin)
        words: list[StageWord] = []
        for group in _touching(spans, now):
            end = max(now if span.end is None else span.end for span in group)
            words.append(
                StageWord(
                    source=StageSource.MARKS,
                    known_from=max(group[0].begin, now - KEPT_SECONDS),
                    known_until=min(end, now),
                    intervals=tuple(group),
                )
            )
        return tuple(words)

    def words(self, now: float) -> tuple[StageWord, ...]:
        """Return all that is known of this pod, the best first; empty where nobody marks."""
        whole = self.word(now)
        return (*((whole,) if whole.known_until > whole.known_from else ()), *self.parts(now))

    def steps(self, now: float) -> tuple[StepSpan, ...]:
        """Return the steps of the driver, or of the rank with the lowest number, by begin. The last may still run."""
        stepping = [process for process in self._live(now, tuple(MarkScope)) if process.steps]
        if not stepping:
            return ()
        leader = min(stepping, key=lambda one: (one.mark.scope is not MarkScope.DRIVER, one.mark.rank or 0))
        return tuple(StepSpan(begin=span.begin, end=span.end, step=span.step) for span in leader.steps)

    def own_uuids(self, now: float) -> tuple[str, ...]:
        """Return the GPUs that marking processes name as their container's; empty where none does."""
        named = (process.mark.gpus for process in self._live(now, tuple(MarkScope)))
        return tuple(dict.fromkeys(uuid for gpus in named for uuid in gpus))

    def host(self, now: float) -> Mark | None:
        """Return the newest mark that tells the host memory of its container; None when none did lately."""
        told = [process.memory for process in self._processes.values() if process.memory is not None]
        fresh = (mark for mark in told if now - HOST_SECONDS <= mark.t <= now + AHEAD_SECONDS)
        return max(fresh, key=lambda mark: mark.t, default=None)

    def _live(self, now: float, scopes: Sequence[MarkScope]) -> list[_Process]:
        """Return the processes of these scopes that said something within what is kept, or are in a span."""
        return [
            process
            for process in self._processes.values()
            if process.mark.scope in scopes and process.until(now) > now - KEPT_SECONDS
        ]

    def _word(self, scopes: Sequence[MarkScope], now: float) -> StageWord:
        processes = [process for process in self._live(now, scopes) if process.open or process.over or process.steps]
        if not processes:
            return StageWord(source=StageSource.MARKS, known_from=now, known_until=now)
        places = {process.mark.local_rank for process in processes if process.mark.scope is MarkScope.RANK}
        known_from, known_until = _vouched(processes, now)
        intervals = [
            interval for process in processes for interval in _intervals(process, known_from, alone=len(places) == 1)
        ]
        return StageWord(
            source=StageSource.MARKS,
            known_from=known_from,
            known_until=known_until,
            intervals=tuple(sorted(intervals, key=_by_begin)),
        )


def _plausible(mark: Mark, now: float) -> bool:
    if not now - LATE_SECONDS <= mark.t <= now + AHEAD_SECONDS:
        return False
    return mark.begin is None or mark.t - MAX_SPAN_SECONDS <= mark.begin <= mark.t


def _since(mark: Mark) -> float:
    """Return from when on a process is known that was not before."""
    return mark.t if mark.begin is None else mark.begin


def _vouched(processes: Iterable[_Process], now: float) -> tuple[float, float]:
    """Return the newest time without a gap for which one or another of the processes vouches.

    Not so one whose time is ahead: it marked before the clock was set back, and no more since.
    """
    spans = sorted(((process.until(now), process.first) for process in processes if process.first <= now), reverse=True)
    known_until, known_from = spans[0] if spans else (now, now)
    for until, first in spans:
        if until >= known_from:
            known_from = min(known_from, first)
    return min(known_until, max(known_from, now - KEPT_SECONDS)), known_until


def _replaces(mark: Mark, other: Mark) -> bool:
    """Say whether a new process has another's place in the job. One process may have several senders."""
    place = (mark.scope, mark.rank, mark.local_rank, mark.job)
    return mark.pid != other.pid and place == (other.scope, other.rank, other.local_rank, other.job)


def _span(mark: Mark, begin: float) -> _Span:
    return _Span(
        stage=mark.stage,
        role=mark.role or STAGE_ROLES.get(mark.stage, UNKNOWN),
        begin=begin,
        step=mark.step,
        local_rank=None if mark.scope is MarkScope.DRIVER else mark.local_rank,
        job=mark.job,
    )


def _begin(process: _Process, mark: Mark) -> None:
    if len(process.open) >= MAX_OPEN or mark.span in process.open:
        return
    span = process.open[mark.span] = _span(mark, mark.t)
    if mark.stage == STEP:
        process.steps.append(span)


def _end(process: _Process, mark: Mark) -> None:
    """End a span. Its begin may be lost, or it may have been closed too early: the mark tells it anew."""
    begin = _since(mark)
    book = process.steps if mark.stage == STEP else process.over
    span = process.open.pop(mark.span, None)
    if span is None:
        span = next((old for old in book if old.begin == begin and old.stage == mark.stage), None)
    if span is None:
        span = _span(mark, begin)
    if not any(span is old for old in book):
        book.append(span)
    span.end = mark.t
    if span.step is None:
        span.step = mark.step


def _close(process: _Process, spans: Iterable[int], at: float) -> None:
    """End spans whose own end was lost."""
    for number in list(spans):
        span = process.open.pop(number)
        span.end = max(at, span.begin)
        process.last = max(process.last, span.end)
        if span.stage != STEP:
            process.over.append(span)


def _number(process: _Process, step: int) -> None:
    """Give the step that ended its number, and all that ran in it: the program may know it only then."""
    if not process.steps:
        return
    ended = process.steps[-1]
    if ended.step == step:
        return
    ended.step = step
    for span in process.spans():
        if span.begin >= ended.begin:
            span.step = step


def _forget_old(process: _Process, now: float) -> None:
    oldest = now - KEPT_SECONDS
    process.over = [span for span in process.over if span.end is None or span.end > oldest][-MAX_INTERVALS:]
    process.steps = [span for span in process.steps if span.end is None or span.end > oldest][-MAX_STEPS:]


def _intervals(process: _Process, oldest: float, *, alone: bool) -> Iterator[StageInterval]:
    """Return a process's stages since `oldest`. `alone`: it is the only rank that marks, so it speaks for its pod."""
    for span in process.spans():
        if span.end is None or span.end > oldest:
            yield StageInterval(
                stage=span.stage,
                role=span.role,
                begin=span.begin,
                end=span.end,
                local_rank=None if alone else span.local_rank,
                pid=process.mark.pid,
                step=span.step,
                job=span.job,
            )


def _by_begin(interval: StageInterval) -> tuple[float, int]:
    return interval.begin, -1 if interval.local_rank is None else interval.local_rank


def _touching(spans: Sequence[StageInterval], now: float) -> Iterator[list[StageInterval]]:
    """Return the spans, by begin, in groups that overlap or touch."""
    group: list[StageInterval] = []
    end = 0.0
    for span in spans:
        if group and span.begin > end:
            yield group
            group = []
        end = max(end, now if span.end is None else span.end) if group else (now if span.end is None else span.end)
        group.append(span)
    if group:
        yield group
