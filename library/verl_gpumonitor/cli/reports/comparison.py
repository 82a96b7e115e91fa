# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs beside each other: what was changed, what became of it, and whether it helped. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.advice.settings import parse_launch
from verl_gpumonitor.cli import not_judged
from verl_gpumonitor.cli.findings import plain, stage_text
from verl_gpumonitor.cli.first_look import LOOKED_FOR
from verl_gpumonitor.cli.times import clock
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.model.figures import counted
from verl_gpumonitor.model.findings import Finding
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .gather import Run
from .page import gib, percent, title_of

NO_STAGES: Final = frozenset(("init", "other", UNKNOWN))
NOTABLE: Final = 0.05
"""A size that moved by less than this share of itself, and a share that moved by less than this, is called the same:
runs differ by that much by themselves."""


_NOTABLE_BYTES: Final = 2**29
_TELLING: Final = 3.0
"""A size that became more than four times as large is told by both sizes, not by a percentage."""
_UNLIKE: Final = 5.0
"""Of two records one of which is so many times as long as the other, the shorter may have missed things."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both runs."""

    label: str
    before: str
    after: str
    change: str = ""
    """Such as `-24%` or `+12 points`; empty where one of the two is unknown, nothing moved, or it says nothing."""
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
    not_judged: tuple[str, ...] = ()
    """Findings of one of the two that the other could not have shown, and why: they are neither gone nor new."""


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is said first."""

    helped: bool | None
    words: str
    """How the sentence begins; empty: with the figures."""


class _Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of both, by name."""

    gone: frozenset[str]
    new: frozenset[str]
    kept: frozenset[str]
    lost: Mapping[str, str]
    """Of the run before, that the run after could not have shown -> why."""
    met: Mapping[str, str]
    """Of the run after, that the run before could not have shown -> why."""


def compare(before: Run, after: Run) -> Comparison:
    """Compare two runs."""
    figures, stages = tuple(_figures(before, after)), tuple(_stages(before, after))
    weighed = _weigh(before, after)
    verdict = _verdict(before, after, weighed)
    told = "; ".join(_told(before, after)) or "too little is known of one of the two"
    lost = (f"{name} in the run after: {why}" for name, why in sorted(weighed.lost.items()))
    met = (f"{name} in the run before: {why}" for name, why in sorted(weighed.met.items()))
    return Comparison(
        before=title_of(before)[1],
        after=title_of(after)[1],
        summary=f"{verdict.words}; {told}." if verdict.words else f"{told[0].upper()}{told[1:]}.",
        helped=verdict.helped,
        notes=tuple(_notes(before, after)),
        settings=tuple(_settings(before, after)),
        figures=figures,
        stages=stages,
        gone=tuple(sorted(weighed.gone)),
        new=tuple(sorted(weighed.new)),
        kept=tuple(sorted(weighed.kept)),
        not_judged=(*lost, *met),
    )


def _weigh(before: Run, after: Run) -> _Weighed:
    """Tell what is gone from what could only not be seen."""
    by_stage = before.coverage.stages_told == after.coverage.stages_told
    old, new = _problems(before, by_stage=by_stage), _problems(after, by_stage=by_stage)
    lost = {name: why for name in {*old} - {*new} if (why := _why_not(old[name], before, after)) is not None}
    met = {name: why for name in {*new} - {*old} if (why := _why_not(new[name], after, before)) is not None}
    return _Weighed(
        gone=frozenset(old) - frozenset(new) - frozenset(lost),
        new=frozenset(new) - frozenset(old) - frozenset(met),
        kept=frozenset(old) & frozenset(new),
        lost=lost,
        met=met,
    )


def _problems(run: Run, *, by_stage: bool) -> dict[str, Finding]:
    """Return what was wrong with the job; that something cannot be seen is no problem of its.

    `by_stage` False: only one of the two tells stages, so that a problem is known by its reason alone.
    """
    findings = [tracked.finding for tracked in run.findings]
    return {
        f"{one.reason}{stage_text(one.scope.stage) if by_stage else ''}": one
        for one in findings
        if not _is_of_sight(one.reason)
    }


def _why_not(finding: Finding, run: Run, other: Run) -> str | None:
    """Say why the other run could not have shown a run's finding; None where it could.

    Of two short records the first look measures both alike.
    """
    if run.only_looked and other.only_looked and finding.reason in LOOKED_FOR:
        return None
    return other.coverage.why_not(finding)


def _is_of_sight(reason: str) -> bool:
    return reason in REASONS and REASONS[reason].condition == "TelemetryAvailable"


def _verdict(before: Run, after: Run, weighed: _Weighed) -> _Verdict:
    """Weigh findings and the time of a step: a problem that is gone at the price of longer steps helped in part."""
    if before.unjudged is not None or after.unjudged is not None:
        name, why = ("before", before.unjudged) if before.unjudged is not None else ("after", after.unjudged)
        return _Verdict(helped=None, words=f"Nobody can say whether it helped: of the run {name}, {why}")
    gone, come, open_questions = weighed.gone, weighed.new, {*weighed.lost, *weighed.met}
    slower = _change(before.step_seconds, after.step_seconds)
    longer, shorter = slower is not None and slower >= NOTABLE, slower is not None and slower <= -NOTABLE
    if come and not gone and not shorter:
        return _Verdict(helped=False, words=f"It did not help: {_are(come)} new")
    if open_questions:
        return _Verdict(helped=None, words=_in_doubt(weighed, shorter=shorter))
    if gone and not come and not weighed.kept and not longer:
        return _Verdict(helped=True, words=f"It helped: {_are(gone)} gone and nothing new was found")
    if gone or come:
        better = (bool(gone) and not come) or shorter
        parts = ", ".join(_parts(weighed))
        return _Verdict(helped=None, words=f"{'It helped in part' if better else 'It changed'}: {parts}")
    if shorter:
        return _Verdict(helped=True, words="It helped: steps are shorter and nothing new was found")
    if longer:
        return _Verdict(helped=False, words="It did not help: steps are longer")
    return _Verdict(helped=None, words=f"No finding changed: {', '.join(_parts(weighed))}" if weighed.kept else "")


def _in_doubt(weighed: _Weighed, *, shorter: bool) -> str:
    """Say what can be said where one of the two could not have shown a problem of the other."""
    better = (bool(weighed.gone) and not weighed.new) or shorter
    begin = "It may have helped" if better else "Nobody can say whether it helped"
    return f"{begin}: {', '.join(_parts(weighed))}"


def _parts(weighed: _Weighed) -> Iterable[str]:
    """Yield what became of the findings."""
    for names, what in ((weighed.gone, "gone"), (weighed.new, "new"), (weighed.kept, "still there")):
        if names:
            yield f"{_are(names)} {what}"
    for lost, side in ((weighed.lost, "after"), (weighed.met, "before")):
        if lost:
            yield f"{', '.join(sorted(lost))} could not be judged in the run {side}"


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
        apart = counted(round(100 * spread_after), "point")
        yield f"the busiest and the idlest GPU are {apart} apart, not {100 * spread_before:.0f}"
    if before.headroom_bytes is not None and after.headroom_bytes is not None:
        left, was = gib(after.headroom_bytes), gib(before.headroom_bytes)
        same = abs(after.headroom_bytes - before.headroom_bytes) < _NOTABLE_BYTES
        yield f"the fullest GPU has {left} left" + (", as before" if same else f", not {was}")


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
    settings = [parse_launch(run.header.entrypoint).known for run in (before, after)]
    if settings[0] != settings[1]:
        yield f"Only the run {'before' if settings[0] else 'after'} tells its settings."
    for name, run in (("before", before), ("after", after)):
        if any(_is_of_sight(tracked.finding.reason) for tracked in run.findings):
            yield f"Of the run {name}, not all could be read: see its report."
        if run.only_looked:
            yield f"Of the run {name}, {run.only_looked}."
    yield from _short(before, after)
    longest, shortest = max(before.seconds, after.seconds), min(before.seconds, after.seconds)
    if shortest and longest > _UNLIKE * shortest:
        yield f"One is much longer: {clock(before.seconds)} before, {clock(after.seconds)} after."


def _short(before: Run, after: Run) -> Iterable[str]:
    """Yield for what the records are too short; what both are too short for is said once."""
    sides = {
        name: not_judged.too_short(run.coverage, {tracked.finding.reason for tracked in run.findings})
        for name, run in (("the run before", before), ("the run after", after))
    }
    said: dict[str, list[str]] = {}
    for name, text in sides.items():
        if text is not None:
            said.setdefault(text, []).append(name)
    for text, names in said.items():
        who = "Both runs" if len(names) > 1 else f"{names[0][0].upper()}{names[0][1:]}"
        yield f"{who}: {text[0].lower()}{text[1:]}"


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
    """Return a row of a size: what moved is told as a part of what it was, where that says something."""
    before, after = ("?" if value is None else text.format(value) for value in (one, other))
    moved = _change(one, other)
    if moved is None or one is None or other is None or abs(moved) < NOTABLE or before == after:
        return Row(label=label, before=before, after=after)
    better = None if less_is_better is None else (other < one) == less_is_better
    telling = other > 0 and abs(moved) <= _TELLING
    return Row(label=label, before=before, after=after, change=f"{100 * moved:+.0f}%" if telling else "", better=better)


def _share_row(label: str, one: float | None, other: float | None, *, less_is_better: bool | None) -> Row:
    """Return a row of shares, which are told apart in points: 4% of 2% more would be nothing."""
    before, after = (percent(value) for value in (one, other))
    if one is None or other is None or abs(other - one) < NOTABLE:
        return Row(label=label, before=before, after=after)
    better = None if less_is_better is None else (other < one) == less_is_better
    points = round(100 * (other - one))
    return Row(label=label, before=before, after=after, change=f"{points:+d} points", better=better)


def _room_row(before: Run, after: Run) -> Row:
    """Return the row of what the fullest GPU has left, where the difference says more than its share."""
    one, other = before.headroom_bytes, after.headroom_bytes
    row = Row(label="Least memory left", before=gib(one), after=gib(other))
    if one is None or other is None or abs(other - one) < _NOTABLE_BYTES:
        return row
    sign = "+" if other > one else "-"
    return msgspec.structs.replace(row, change=f"{sign}{gib(abs(other - one))}", better=other > one)


def _figures(before: Run, after: Run) -> Iterable[Row]:
    """Yield the figures that are known of one of the two at least."""
    return (row for row in _all_figures(before, after) if (row.before, row.after) != ("?", "?"))


def _all_figures(before: Run, after: Run) -> Iterable[Row]:
    def per_step(run: Run) -> float | None:
        return None if run.step_seconds is None else run.step_seconds * len(run.gpus) / 3600

    yield _row("Seconds a step", before.step_seconds, after.step_seconds, text="{:.1f}", less_is_better=True)
    yield _row("GPU-hours a step", per_step(before), per_step(after), text="{:.3f}", less_is_better=True)
    yield _share_row("Busy", before.whole.utilization, after.whole.utilization, less_is_better=False)
    yield _share_row("Busiest minus idlest GPU", _spread(before), _spread(after), less_is_better=True)
    yield _share_row("Memory peak", before.memory_peak_ratio, after.memory_peak_ratio, less_is_better=None)
    yield _room_row(before, after)
    # How long one has recorded says nothing of the change.
    yield Row(label="GPU-hours recorded", before=f"{before.gpu_hours:.2f}", after=f"{after.gpu_hours:.2f}")


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
    launches = [parse_launch(run.header.entrypoint) for run in (before, after)]
    if not all(launch.known for launch in launches):
        return  # What a record does not tell may be set all the same.
    olds, news = (launch.overrides for launch in launches)
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
    parts += [f"Not judged: {text}" for text in comparison.not_judged]
    return plain("\n".join(parts).rstrip()) + "\n"


def _columns(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("label", "before", "after")]
    lines = []
    for row in rows:
        cells = f"  {row.label:<{widths[0]}}  {row.before:>{widths[1]}} -> {row.after:<{widths[2]}}  {row.change}"
        verdict = {True: " better", False: " worse", None: ""}[row.better]
        lines.append((cells.rstrip() + verdict).rstrip())
    return lines
