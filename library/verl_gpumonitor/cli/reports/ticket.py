# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A run as Markdown, for tickets and chats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from verl_gpumonitor.cli.findings import grouped

from .gather import Run
from .page import facts, finding_view, gib, numbers, percent, quality, silence, title_of, verdict_text

MAX_GPUS = 16


def markdown(run: Run) -> str:
    """Return the report as Markdown."""
    kind, name = title_of(run)
    lines = [f"# {escaped(name)}", "", f"{escaped(kind)}: {escaped(', '.join(facts(run)))}", ""]
    lines += [f"**{run.verdict}** {escaped(verdict_text(run))}", ""]
    lines += [f"- {label}: {value}" for label, value in numbers(run)]
    lines += ["", "## Findings", "", *_findings(run)]
    if run.stages:
        rows = [
            [
                row.stage,
                row.role,
                percent(row.share),
                "" if row.seconds_per_step is None else f"{row.seconds_per_step:.1f}",
                percent(row.utilization),
                percent(row.memory_peak_ratio),
            ]
            for row in run.stages
        ]
        lines += ["", "## Stages", "", *table(["stage", "role", "share", "s a step", "busy", "memory peak"], rows)]
    worst = sorted(run.gpus, key=lambda gpu: (not gpu.reasons, -(gpu.memory_peak_ratio or 0.0)))[:MAX_GPUS]
    rows = [
        [gpu.name, gpu.pod, percent(gpu.whole.utilization), gib(gpu.whole.memory_high_bytes), ", ".join(gpu.reasons)]
        for gpu in worst
    ]
    lines += ["", "## GPUs", "", *table(["GPU", "pod", "busy", "memory peak", "findings"], rows)]
    lines += ["", "## Data quality", "", *(f"- {escaped(line)}" for line in quality(run)), ""]
    return "\n".join(lines)


def _findings(run: Run) -> Iterable[str]:
    if not run.findings:
        return [silence(run)]
    lines: list[str] = []
    for group in grouped(run.findings):
        view = finding_view(group, run)
        where = f" in {view['stage']}" if view["stage"] else ""
        lines.append(f"- **{view['reason']}**{where} ({view['severity']}). {view['when']}. {escaped(view['message'])}")
        lines += [f"  - {escaped(message)}" for message in group.also]
        lines += advice_lines(view["advice"])
    return lines


def advice_lines(views: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield an item for each piece of advice, as `advice_view` shows it."""
    for view in views:
        change = f"`{view['change'].replace('`', '')}`: " if view["change"] else ""
        price = f" Price: {escaped(view['price'])}." if view["price"] else ""
        yield f"  - {change}{escaped(view['text'])}.{price}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(cell).replace("|", "\\|") for cell in cells) + " |"


def escaped(text: str) -> str:
    """Return a text that Markdown does not take for its own: names come from the job."""
    for mark in ("\\", "*", "_", "<", "[", "`"):
        text = text.replace(mark, "\\" + mark)
    return "".join(sign if sign.isprintable() else " " for sign in text)
