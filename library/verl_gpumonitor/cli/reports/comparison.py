# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs beside each other: what was changed, what became of it, and whether it helped. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.advice.settings import parse_launch
from verl_gpumonitor.cli.findings import counted, plain, stage_text
from verl_gpumonitor.cli.times import clock
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .gather import Run
from .page import gib, percent, title_of

NO_STAGES: Final = frozenset(("init", "other", UNKNOWN))
NOTABLE: Final = 0.05
"""A figure that moved by less than this share of itself is called the same: runs differ by that much by themselves."""


_UNLIKE: Final = 5.0
"""Of two records one of which is so many times as long as the other, the shorter may have missed things."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both runs."""

    label: str
    before: str
    after: str
    change: str = ""
    """Such as `-24%`; empty where one of the two is unknown, or nothing moved."""
    better: bool | None = None
    """None: neither, or nobody can say."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison shows."""

    before: str
    after: str
    summary: str
    """One sentence: did it help."""
    helped: bool | None
    """None: in part, or nobody can say."""
    notes: tuple[str, ...]
    """Why the two can be compared in part only."""
    settings: tuple[Row, ...]
    """Keys of the command line that differ."""
    figures: tuple[Row, ...]
    stages: tuple[Row, ...]
    """Seconds a step of each stage."""
    gone: tuple[str, ...]
    """Findings that are no more, as `reason` or `reason in stage`."""
    new: tuple[str, ...]
    kept: tuple[str, ...]


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is said first."""

    helped: bool | None
    words: str
    """How the sentence begins; empty: with the figures."""


def compare(before: Run, after: Run) -> Comparison:
    """Compare two runs."""
    figures, stages = tuple(_figures(before, after)), tuple(_stages(before, after))
    old, new = _problems(before), _problems(after)
    verdict = _verdict(before, after)
    told = "; ".join(_told(before, after)) or "too little is known of one of the two"
    return Comparison(
        before=title_of(before)[1],
        after=title_of(after)[1],
        summary=f"{verdict.words}; {told}." if verdict.words else f"{told[0].upper()}{told[1:]}.",
        helped=verdict.helped,
        notes=tuple(_notes(before, after)),
        settings=tuple(_settings(before, after)),
        figures=figures,
        stages=stages,
        gone=tuple(sorted(old - new)) if after.unjudged is None else (),
        new=tuple(sorted(new - old)) if before.unjudged is None else (),
        kept=tuple(sorted(old & new)),
    )


def _problems(run: Run) -> set[str]:
    """Return what was wrong with the job; that something cannot be seen is no problem of its."""
    findings = (tracked.finding for tracked in run.findings)
    return {f"{one.reason}{stage_text(one.scope.stage)}" for one in findings if not _is_of_sight(one.reason)}


def _is_of_sight(reason: str) -> bool:
    return reason in REASONS and REASONS[reason].condition == "TelemetryAvailable"


def _verdict(before: Run, after: Run) -> _Verdict:
    """Weigh findings and the time of a step: a problem that is gone at the price of longer steps helped in part."""
    for name, run in (("before", before), ("after", after)):
        if run.unjudged is not None:
            return _Verdict(helped=None, words=f"Nobody can say whether it helped: of the run {name}, {run.unjudged}")
    old, new = _problems(before), _problems(after)
    gone, come = old - new, new - old
    slower = _change(before.step_seconds, after.step_seconds)
    longer, shorter = slower is not None and slower >= NOTABLE, slower is not None and slower <= -NOTABLE
    if gone and not new and not longer:
        return _Verdict(helped=True, words=f"It helped: {_are(gone)} gone and nothing new was found")
    if come and not gone and not shorter:
        return _Verdict(helped=False, words=f"It did not help: {_are(come)} new")
    if gone or come:
        parts = [f"{_are(gone)} gone"] if gone else []
        parts += [f"{_are(come)} new"] if come else []
        parts += [f"{_are(old & new)} still there"] if old & new else []
        better = (bool(gone) and not come) or shorter
        return _Verdict(helped=None, words=f"{'It helped in part' if better else 'It changed'}: {', '.join(parts)}")
    if shorter:
        return _Verdict(helped=True, words="It helped: steps are shorter and nothing new was found")
    if longer:
        return _Verdict(helped=False, words="It did not help: steps are longer")
    return _Verdict(helped=None, words="")


def _change(before: float | None, after: float | None) -> float | None:
    return None if not before or after is None else (after - before) / before


def _told(before: Run, after: Run) -> Iterable[str]:
    """Yield what a person would tell another of the change."""
    if before.step_seconds and after.step_seconds:
        yield _moved("a step takes", before.step_seconds, after.step_seconds, "s")
    busy, was_busy = after.whole.utilization, before.whole.utilization
    if busy is not None and was_busy is not None and abs(busy - was_busy) >= NOTABLE:
        yield f"the GPUs are {100 * busy:.0f}% busy, not {100 * was_busy:.0f}%"
    spread_before, spread_after = _spread(before), _spread(after)
    if spread_before is not None and spread_after is not None and abs(spread_before - spread_after) >= 2 * NOTABLE:
        yield f"the busiest and the idlest GPU are {100 * spread_after:.0f} points apart, not {100 * spread_before:.0f}"
    if before.headroom_bytes is not None and after.headroom_bytes is not None:
        left, was = gib(after.headroom_bytes), gib(before.headroom_bytes)
        yield f"the fullest GPU has {left} left" + (", as before" if left == was else f", not {was}")


def _notes(before: Run, after: Run) -> Iterable[str]:
    """Yield in what the two are unlike."""
    if len(before.gpus) != len(after.gpus):
        yield f"There are {counted(len(before.gpus), 'GPU')} before and {len(after.gpus)} after."
    models = [sorted({gpu.model for gpu in run.gpus if gpu.model}) for run in (before, after)]
    if models[0] and models[1] and models[0] != models[1]:
        yield f"The GPUs are others: {', '.join(models[0])} before, {', '.join(models[1])} after."
    kinds = [title_of(run)[0] for run in (before, after)]
    if kinds[0] != kinds[1]:
        yield f"The records are of different kinds: {kinds[0]} before, {kinds[1]} after."
    told = [any(row.stage not in NO_STAGES for row in run.stages) for run in (before, after)]
    if told[0] != told[1]:
        yield f"Only the run {'before' if told[0] else 'after'} tells stages, so that more could be found there."
    settings = [bool(run.header.entrypoint) for run in (before, after)]
    if settings[0] != settings[1]:
        yield f"Only the run {'before' if settings[0] else 'after'} tells its settings."
    for name, run in (("before", before), ("after", after)):
        if any(_is_of_sight(tracked.finding.reason) for tracked in run.findings):
            yield f"Of the run {name}, not all could be read: see its report."
        if run.only_looked:
            yield f"Of the run {name}, {run.only_looked}."
    longest, shortest = max(before.seconds, after.seconds), min(before.seconds, after.seconds)
    if shortest and longest > _UNLIKE * shortest:
        yield f"One is much longer: {clock(before.seconds)} before, {clock(after.seconds)} after."


def _are(words: Iterable[str]) -> str:
    names = sorted(words)
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _moved(what: str, before: float, after: float, unit: str) -> str:
    if abs(after - before) < NOTABLE * before:
        return f"{what} {after:.1f} {unit} as before"
    word = "shorter" if after < before else "longer"
    return f"{what} {after:.1f} {unit} instead of {before:.1f} ({100 * abs(after - before) / before:.0f}% {word})"


def _spread(run: Run) -> float | None:
    known = [gpu.whole.utilization for gpu in run.gpus if gpu.whole.utilization is not None]
    return max(known) - min(known) if len(known) > 1 else None


def _row(label: str, one: float | None, other: float | None, *, text: str, less_is_better: bool | None) -> Row:
    before, after = ("?" if value is None else text.format(value) for value in (one, other))
    if one is None or other is None or not one or abs(other - one) < NOTABLE * abs(one):
        return Row(label=label, before=before, after=after)
    better = None if less_is_better is None else (other < one) == less_is_better
    return Row(label=label, before=before, after=after, change=f"{100 * (other - one) / one:+.0f}%", better=better)


def _figures(before: Run, after: Run) -> Iterable[Row]:
    def per_step(run: Run) -> float | None:
        return None if run.step_seconds is None else run.step_seconds * len(run.gpus) / 3600

    yield _row("Seconds a step", before.step_seconds, after.step_seconds, text="{:.1f}", less_is_better=True)
    yield _row("GPU-hours a step", per_step(before), per_step(after), text="{:.3f}", less_is_better=True)
    busy = (before.whole.utilization, after.whole.utilization)
    yield _row("Busy", *busy, text="{:.0%}", less_is_better=False)
    spread = (_spread(before), _spread(after))
    yield _row("Busiest minus idlest GPU", *spread, text="{:.0%}", less_is_better=True)
    yield _row("Memory peak", before.memory_peak_ratio, after.memory_peak_ratio, text="{:.0%}", less_is_better=None)
    left = tuple(None if run.headroom_bytes is None else run.headroom_bytes / 2**30 for run in (before, after))
    yield _row("Least memory left, GiB", left[0], left[1], text="{:.1f}", less_is_better=False)
    yield _row("GPU-hours recorded", before.gpu_hours, after.gpu_hours, text="{:.2f}", less_is_better=None)


def _stages(before: Run, after: Run) -> Iterable[Row]:
    olds, news = ({row.stage: row for row in run.stages} for run in (before, after))
    for stage in dict.fromkeys((*olds, *news)):
        old, new = olds.get(stage), news.get(stage)
        one, other = (None if row is None else row.seconds_per_step for row in (old, new))
        if one is None and other is None:
            continue
        # Less of what is no stage, or not known, is neither good nor bad.
        row = _row(stage, one, other, text="{:.1f} s", less_is_better=None if stage in NO_STAGES else True)
        busy = " and ".join(f"{percent(x.utilization)}" for x in (old, new) if x is not None)
        yield msgspec.structs.replace(row, label=f"{stage} (busy {busy})" if busy else stage)


def _settings(before: Run, after: Run) -> Iterable[Row]:
    if not before.header.entrypoint or not after.header.entrypoint:
        return  # What a record does not tell may be set all the same.
    olds, news = (dict(parse_launch(run.header.entrypoint or "").overrides) for run in (before, after))
    for key in sorted({*olds, *news}):
        if olds.get(key) != news.get(key):
            yield Row(label=key, before=olds.get(key, "not set"), after=news.get(key, "not set"))


def text(comparison: Comparison) -> str:
    """Return the comparison for a terminal."""
    parts = [comparison.summary, *comparison.notes, ""]
    tables = {"Settings": comparison.settings, "Figures": comparison.figures, "Stages": comparison.stages}
    for title, rows in tables.items():
        if rows:
            parts += [title, *_columns(rows), ""]
    for title, words in (("Gone", comparison.gone), ("Still there", comparison.kept), ("New", comparison.new)):
        if words:
            parts.append(f"{title}: {', '.join(words)}")
    return plain("\n".join(parts).rstrip()) + "\n"


def _columns(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("label", "before", "after")]
    lines = []
    for row in rows:
        cells = f"  {row.label:<{widths[0]}}  {row.before:>{widths[1]}} -> {row.after:<{widths[2]}}  {row.change}"
        verdict = {True: " better", False: " worse", None: ""}[row.better]
        lines.append((cells.rstrip() + verdict).rstrip())
    return lines
