# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which stage a moment was in, when several sources speak of it and some speak late. Pure.

Sources are handed in best first. A moment belongs to the best source whose word reaches over it. One that has not
come that far yet, and will, is waited for, at most until the moment is `WATERMARK_SECONDS` old or the source has been
silent for `PATIENCE_SECONDS`; then the next best that does know is taken, and `unknown` when there is none.

Example: a source speaks until t=90, a poorer one until t=100, and it is t=101. What lies before 90 is decided by the
first; the rest waits. At t=135 it is the first one's silence that decides for the second.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.model.vocabulary import UNKNOWN
from verl_gpumonitor.stages.choice import choose

WATERMARK_SECONDS: Final = 60.0
"""No moment waits longer for its stage."""
PATIENCE_SECONDS: Final = 60.0
"""A source that has been silent for longer is not waited for at all, lest everything be a minute late for ever."""
NOW_SECONDS: Final = 6.0
"""A word that is older than this does not tell the present: 5 s, the pace of Ray's agent, and the way to it."""
MAX_INTERVALS: Final = 1024
"""Intervals of one word that are looked at in one span; what comes past them does not count."""
OTHER: Final = "other"


class Voice(msgspec.Struct, frozen=True):
    """A source as it is heard here."""

    word: StageWord
    late: bool = True
    """It speaks some time behind, so that more may come of the time after `known_until`. Not so marks that this very
    pod sends: what they have not said by now they do not say."""


class Span(msgspec.Struct, frozen=True):
    """A time about which one source decides; None: nobody knows."""

    begin: float
    end: float
    word: StageWord | None


class Part(msgspec.Struct, frozen=True):
    """A time in one stage."""

    begin: float
    end: float
    stage: str
    role: str
    job: str = ""
    step: int | None = None
    begun: bool = False
    """Whether the stage was seen to begin at `begin`; not so for one that ran when its source was first heard."""


class Own(msgspec.Struct, frozen=True):
    """Which intervals are a GPU's own. All None: the pod as a whole."""

    local_rank: int | None = None
    pids: frozenset[int] | None = None
    """Processes that hold a context on it, where they are visible."""
    other_pids: frozenset[int] = frozenset()
    """Those of the pod's other GPUs."""
    job: str | None = None
    """Work of this Ray job alone, of several that share the pod; empty: work that no job is named for. None: of any."""
    unused: bool = False
    """It is nobody's, so that no work is its own."""


POD: Final = Own()


def decided(
    voices: Sequence[Voice], begin: float, *, now: float, patient: bool, old: float | None = None
) -> list[Span]:
    """Return who decides from `begin` on, without a hole, up to the first moment that must wait.

    `voices`: best first. `patient`: somebody who knows the past may still come, while nobody speaks at all. `old`: no
    moment before it waits any longer; None means the watermark.
    """
    old = now - WATERMARK_SECONDS if old is None else old
    voices = clean(voices, now)
    spans: list[Span] = []
    at = begin
    while (span := _span(voices, at, now=now, patient=patient, old=old)) is not None:
        spans.append(span)
        at = span.end
    return spans


def narrowed(span: Span) -> Span:
    """Return the span with those intervals of its word alone that are of its time.

    Most of a word is of another, and each GPU's stages are looked for in it.
    """
    word = span.word
    if word is None:
        return span
    begin, end = span.begin, span.end
    found = [
        each for each in word.intervals if each.begin < end and (each.end is None or (begin < each.end > each.begin))
    ]
    return Span(begin, end, msgspec.structs.replace(word, intervals=tuple(found)))


def parts(spans: Iterable[Span], own: Own = POD) -> list[Part]:
    """Return the stages of the spans: in order, without a hole, neighbours unlike each other."""
    found: list[Part] = []
    for span in spans:
        for part in _cut(span, own):
            last = found[-1] if found else None
            if last is not None and _same(last, part):
                found[-1] = msgspec.structs.replace(last, end=part.end)
            else:
                found.append(part)
    return found


def jobs_in(spans: Iterable[Span]) -> tuple[str, ...]:
    """Return the Ray jobs whose work is in the spans, in their order of appearance; empty: where none is named."""
    found: dict[str, None] = {}
    for span in spans:
        for each in span.word.intervals if span.word is not None else ():
            if each.job not in found and _touches(each, span):
                found[each.job] = None
    return tuple(found)


class Present(msgspec.Struct, frozen=True):
    """What the best source says of the present."""

    word: StageWord
    running: tuple[StageInterval, ...]
    """Whatever runs by it, on whichever GPU."""

    def of(self, own: Own) -> StageInterval | None:
        """Return what a GPU, or the pod as a whole, is in; None: in nothing that is known by name."""
        return _choose((each for each in self.running if _concerns(each, own)), self.word)


def present(voices: Sequence[Voice], now: float) -> Present | None:
    """Return what the best word that tells the present says of it; None while nobody does."""
    for voice in clean(voices, now):
        word = voice.word
        if now - word.known_until <= NOW_SECONDS:
            at = word.known_until
            running = [each for each in word.intervals if each.begin <= at and (each.end is None or each.end >= at)]
            return Present(word, tuple(running))
    return None


def speaker(voices: Sequence[Voice], now: float) -> StageWord | None:
    """Return the word of the best source that is heard at all these days; None while there is none."""
    return next((voice.word for voice in clean(voices, now) if now - voice.word.known_until < PATIENCE_SECONDS), None)


def clean(voices: Iterable[Voice], now: float) -> list[Voice]:
    """Return the voices without what cannot be: a word reaches not into the future, nor back before its begin."""
    clean: list[Voice] = []
    for voice in voices:
        word = voice.word
        until = min(word.known_until, now)
        if word.source is not StageSource.NONE and math.isfinite(word.known_from) and word.known_from < until:
            known = word if until == word.known_until else msgspec.structs.replace(word, known_until=until)
            clean.append(voice if known is word else Voice(known, voice.late))
    return clean


def _span(voices: Sequence[Voice], at: float, *, now: float, patient: bool, old: float) -> Span | None:
    """Return who decides from this moment on; None when it must wait."""
    end = max(now, old)
    if at >= end:
        return None
    for voice in voices:
        word = voice.word
        if at < word.known_from:
            end = min(end, word.known_from)
        elif at < word.known_until:
            return Span(at, min(end, word.known_until), word)
        elif _goes_on(voice, now):
            if at >= old:
                return None
            end = min(end, old)
    if patient and not any(_goes_on(voice, now) for voice in voices):
        end = min(end, old)
    return Span(at, end, None) if at < end else None


def _goes_on(voice: Voice, now: float) -> bool:
    """Say whether more of this source is to be waited for."""
    return voice.late and now - voice.word.known_until < PATIENCE_SECONDS


def _same(one: Part, other: Part) -> bool:
    return (one.stage, one.role, one.job, one.step) == (other.stage, other.role, other.job, other.step)


def _cut(span: Span, own: Own) -> Iterable[Part]:
    """Cut a span where intervals begin and end."""
    if span.word is None:
        yield Part(span.begin, span.end, UNKNOWN, UNKNOWN)
        return
    intervals = [each for each in span.word.intervals if _touches(each, span) and _concerns(each, own)]
    intervals = sorted(intervals, key=lambda each: each.begin)[-MAX_INTERVALS:]
    edges = sorted({span.begin, span.end, *_edges(intervals, span)})
    active: list[StageInterval] = []
    coming = 0
    for begin, end in pairwise(edges):
        active = [each for each in active if each.end is None or each.end > begin]
        while coming < len(intervals) and intervals[coming].begin <= begin:
            active.append(intervals[coming])
            coming += 1
        yield _part(begin, end, _choose(active, span.word), span.word)


def _choose(intervals: Iterable[StageInterval], word: StageWord) -> StageInterval | None:
    return choose(intervals, nested=word.source is StageSource.MARKS)


def _touches(interval: StageInterval, span: Span) -> bool:
    """Say whether some of the interval lies in the span. One that has no length lies nowhere."""
    if interval.end is not None and (interval.end <= span.begin or interval.end <= interval.begin):
        return False
    return interval.begin < span.end


def _concerns(interval: StageInterval, own: Own) -> bool:
    """Say whether an interval is about this GPU. Whatever names no GPU is about all of the pod's."""
    if own.unused or (own.job is not None and interval.job != own.job):
        return False
    if own.pids is not None and interval.pid is not None:
        return interval.pid in own.pids or interval.pid not in own.other_pids
    return own.local_rank is None or interval.local_rank is None or interval.local_rank == own.local_rank


def _edges(intervals: Iterable[StageInterval], span: Span) -> Iterable[float]:
    for each in intervals:
        if span.begin < each.begin < span.end:
            yield each.begin
        if each.end is not None and span.begin < each.end < span.end:
            yield each.end


def _part(begin: float, end: float, chosen: StageInterval | None, word: StageWord) -> Part:
    if chosen is None:
        return Part(begin, end, OTHER, UNKNOWN)
    exact = word.source is StageSource.MARKS or chosen.begin > word.known_from
    return Part(
        begin,
        end,
        chosen.stage[:64] or OTHER,
        chosen.role[:64] or UNKNOWN,
        chosen.job[:128],
        chosen.step,
        exact and chosen.begin >= begin,
    )
