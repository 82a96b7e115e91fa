# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs beside each other: what was changed, what became of it, and whether it helped. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.advice.settings import parse_launch
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .gather import Run
from .page import gib, percent, title_of

NO_STAGES: Final = frozenset(("init", "other", UNKNOWN))
NOTABLE: Final = 0.05
"""A figure that moved by less than this share of itself is called the same: runs differ by that much by themselves."""


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
    settings: tuple[Row, ...]
    """Keys of the command line that differ."""
    figures: tuple[Row, ...]
    stages: tuple[Row, ...]
    """Seconds a step of each stage."""
    gone: tuple[str, ...]
    """Findings that are no more, as `reason` or `reason in stage`."""
    new: tuple[str, ...]
    kept: tuple[str, ...]


def compare(before: Run, after: Run) -> Comparison:
    """Compare two runs."""
    figures, stages = tuple(_figures(before, after)), tuple(_stages(before, after))
    old, new = _problems(before), _problems(after)
    return Comparison(
        before=title_of(before)[1],
        after=title_of(after)[1],
        summary=_summary(before, after),
        settings=tuple(_settings(before, after)),
        figures=figures,
        stages=stages,
        gone=tuple(sorted(old - new)),
        new=tuple(sorted(new - old)),
        kept=tuple(sorted(old & new)),
    )


def _problems(run: Run) -> set[str]:
    findings = (tracked.finding for tracked in run.findings)
    return {
        one.reason if one.scope.stage in (None, UNKNOWN) else f"{one.reason} in {one.scope.stage}" for one in findings
    }


def _summary(before: Run, after: Run) -> str:
    parts: list[str] = []
    if before.step_seconds and after.step_seconds:
        parts.append(_moved("a step takes", before.step_seconds, after.step_seconds, "s"))
    spread_before, spread_after = _spread(before), _spread(after)
    if spread_before is not None and spread_after is not None and spread_before - spread_after >= 0.1:
        parts.append(
            f"the busiest and the idlest GPU are {100 * spread_after:.0f} points apart, not {100 * spread_before:.0f}"
        )
    if before.headroom_bytes is not None and after.headroom_bytes is not None:
        left, was = gib(after.headroom_bytes), gib(before.headroom_bytes)
        parts.append(f"the fullest GPU has {left} left" + (", as before" if left == was else f", not {was}"))
    told = "; ".join(parts) or "too little is known of one of the two"
    old, new = _problems(before), _problems(after)
    if old and not new:
        return f"It helped: {_list(old)} {'is' if len(old) == 1 else 'are'} gone and nothing new was found; {told}."
    if not old and new:
        return f"It did not help: {_list(new)} {'is' if len(new) == 1 else 'are'} new; {told}."
    if old - new and not new - old:
        return f"It helped in part: {_list(old - new)} is gone, {_list(old & new)} is still there; {told}."
    return f"{told[0].upper()}{told[1:]}."


def _list(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


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
    olds, news = (dict(parse_launch(run.header.entrypoint or "").overrides) for run in (before, after))
    for key in sorted({*olds, *news}):
        if olds.get(key) != news.get(key):
            yield Row(label=key, before=olds.get(key, "not set"), after=news.get(key, "not set"))


def text(comparison: Comparison) -> str:
    """Return the comparison for a terminal."""
    parts = [comparison.summary, ""]
    tables = {"Settings": comparison.settings, "Figures": comparison.figures, "Stages": comparison.stages}
    for title, rows in tables.items():
        if rows:
            parts += [title, *_columns(rows), ""]
    for title, words in (("Gone", comparison.gone), ("Still there", comparison.kept), ("New", comparison.new)):
        if words:
            parts.append(f"{title}: {', '.join(words)}")
    return "\n".join(parts).rstrip() + "\n"


def _columns(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("label", "before", "after")]
    lines = []
    for row in rows:
        cells = f"  {row.label:<{widths[0]}}  {row.before:>{widths[1]}} -> {row.after:<{widths[2]}}  {row.change}"
        verdict = {True: " better", False: " worse", None: ""}[row.better]
        lines.append((cells.rstrip() + verdict).rstrip())
    return lines
