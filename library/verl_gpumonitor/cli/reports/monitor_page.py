# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A GPUMonitor as a page of HTML and as Markdown: what its status knows, a summary without values over time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup

from verl_gpumonitor.cli.monitor_findings import advice_of, verdict_text, with_advice
from verl_gpumonitor.cli.monitors import GPUMonitor, StageQuality, StatusFinding, WorstGpu
from verl_gpumonitor.diagnosis.health import OK
from verl_gpumonitor.diagnosis.health import UNKNOWN as NOT_KNOWN
from verl_gpumonitor.model.findings import Advice
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .charts import bar, budget_bar
from .gather import StageRow
from .page import advice_view, environment, gib, percent, stage_view
from .ticket import advice_lines, escaped, table

NO_TIME_SERIES: Final = (
    "A GPUMonitor is a summary and has no values over time. gpumon bundle brings those of the last half hour,"
    " Prometheus those of longer."
)


def html(monitor: GPUMonitor) -> str:
    """Return the page of a GPUMonitor."""
    return environment().get_template("monitor.html.j2").render(_context(monitor))


def _context(monitor: GPUMonitor) -> Mapping[str, Any]:
    status, rows = monitor.status, stage_rows(monitor)
    kind, title = title_of(monitor)
    return {
        "kind": kind,
        "title": title,
        "facts": facts(monitor),
        "healthy": status.health == OK,
        "ended": monitor.has_ended,
        "verdict": status.health or NOT_KNOWN,
        "verdict_text": verdict_text(monitor),
        "numbers": numbers(monitor),
        "findings": [finding_view(monitor, finding, given) for finding, given in with_advice(monitor)],
        "advice": [advice_view(advice) for advice in advice_of(monitor, None)],
        "stages": [stage_view(row) for row in rows],
        "budget": Markup(budget_bar(rows)),  # noqa: S704 - escaped in charts
        "gpus": gpu_views(monitor),
        "gpus_text": gpus_text(monitor),
        "unmonitored": status.unmonitored_pods,
        "conditions": status.conditions,
        "command": status.launch.command,
        "quality": quality(monitor),
    }


def title_of(monitor: GPUMonitor) -> tuple[str, str]:
    """Return kind and name of the workload."""
    ref, meta = monitor.spec.workload_ref, monitor.metadata
    where = f" in {meta.namespace}" if meta.namespace else ""
    return f"{ref.kind or 'Workload'}{where}", ref.name or meta.name or "A workload without a name"


def facts(monitor: GPUMonitor) -> list[str]:
    """Return what a reader wants to know first."""
    status = monitor.status
    found = [status.phase or "phase not known"]
    if status.gpus.text:
        found.append(f"{status.gpus.text} GPUs reported")
    found += sorted({gpu.model for gpu in status.worst_gpus if gpu.model})
    if status.stage and status.stage != UNKNOWN:
        found.append(f"now in {status.stage}")
    if status.workload.start_time:
        found.append(f"since {status.workload.start_time}")
    if status.workload.completion_time:
        found.append(f"until {status.workload.completion_time}")
    if status.launch.verl:
        found.append(status.launch.verl)
    return found


def numbers(monitor: GPUMonitor) -> list[tuple[str, str]]:
    """Return it in a few figures; what is not known is left out."""
    status, totals = monitor.status, monitor.status.totals
    seconds = totals.gpu_seconds
    lately = "" if monitor.has_ended else ", last minute"
    found: list[tuple[str, str | None]] = [
        ("GPU-hours", None if seconds is None else f"{seconds / 3600:.2f}"),
        (f"Busy{lately}", _percent(status.utilization.mean)),
        ("Busy, whole life", _percent(totals.busy_seconds / seconds if seconds and totals.busy_seconds else None)),
        (f"Memory peak{lately}", _percent(status.memory.peak_ratio)),
        ("Step", None if status.step is None else str(status.step)),
        ("Seconds a step", None if status.seconds_per_step is None else f"{status.seconds_per_step:.1f}"),
        (
            "Mean power of a GPU",
            f"{totals.energy_joules / seconds:.0f} W" if seconds and totals.energy_joules else None,
        ),
    ]
    return [(label, text) for label, text in found if text is not None]


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else percent(ratio)


def stage_rows(monitor: GPUMonitor) -> list[StageRow]:
    """Return the stage table."""
    return [
        StageRow(
            stage=stage.stage,
            role=stage.role,
            gpu_seconds=stage.seconds or 0.0,
            share=min(1.0, max(0.0, stage.share or 0.0)),
            seconds_per_step=stage.seconds_per_step,
            utilization=stage.utilization,
            memory_peak_ratio=stage.memory_peak_ratio,
            power_watts=stage.power_watts,
        )
        for stage in monitor.status.stages
    ]


def finding_view(monitor: GPUMonitor, finding: StatusFinding, given: Sequence[Advice]) -> dict[str, Any]:
    """Return a finding as the template shows it."""
    evidence = [("pods", ", ".join(finding.pods)), ("GPUs", ", ".join(finding.gpus))]
    evidence += [
        (recommendation.parameter or "evidence", recommendation.evidence)
        for recommendation in monitor.status.recommendations
        if recommendation.reason == finding.reason and recommendation.evidence
    ]
    return {
        "severity": str(finding.severity),
        "reason": finding.reason,
        "stage": finding.stage if finding.stage not in (None, UNKNOWN) else "",
        "when": f"Since {finding.since}" if finding.since else "Since when is not known",
        "message": finding.message,
        "also": (),
        "advice": [advice_view(advice) for advice in given],
        "evidence": [(key, value) for key, value in evidence if value],
    }


def gpu_views(monitor: GPUMonitor) -> list[dict[str, Any]]:
    """Return the rows of the table of GPUs, each with why it is there: its own note, else the findings that name it."""
    why: dict[str, list[str]] = {}
    for finding in monitor.status.findings:
        for uuid in finding.gpus:
            why.setdefault(uuid, []).append(finding.reason)
    return [
        gpu_view(gpu, note=gpu.note or ", ".join(dict.fromkeys(why.get(gpu.uuid, ()))))
        for gpu in monitor.status.worst_gpus
    ]


def gpu_view(gpu: WorstGpu, *, note: str) -> dict[str, Any]:
    """Return a row of the table of GPUs."""
    name = f"GPU {gpu.index}" if gpu.index is not None else gpu.uuid
    used = gpu.memory_peak_bytes if gpu.memory_peak_bytes is not None else gpu.memory_used_bytes
    ratio = used / gpu.memory_total_bytes if used is not None and gpu.memory_total_bytes else None
    return {
        "name": name,
        "pod": gpu.pod or "",
        "node": gpu.node or "",
        "state": gpu.state or "?",
        "busy": percent(gpu.utilization),
        "busy_bar": Markup(bar(gpu.utilization, f"{name} of {gpu.pod} busy")),  # noqa: S704 - escaped in charts
        "memory": gib(used) if ratio is None else f"{gib(used)} ({percent(ratio)})",
        "memory_bar": Markup(bar(ratio, f"{name} of {gpu.pod} memory peak")),  # noqa: S704
        "temperature": "?" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} °C",
        "power": "?" if gpu.power_watts is None else f"{gpu.power_watts:.0f} W",
        "note": note,
    }


def gpus_text(monitor: GPUMonitor) -> str:
    """Say how many of the job's GPUs the table has."""
    shown, requested = len(monitor.status.worst_gpus), monitor.status.gpus.requested
    of = f" of {requested}" if requested else ""
    return f"{shown}{of} GPUs: a status names those that need a look, and never all of a large job."


def quality(monitor: GPUMonitor) -> list[str]:
    """Return how far the numbers can be trusted, and what is not there."""
    return [NO_TIME_SERIES, *_known_quality(monitor)]


def _known_quality(monitor: GPUMonitor) -> Iterator[str]:
    known = monitor.status.data_quality
    if known.source:
        owners = f"; whose GPUs they are, by: {known.ownership}" if known.ownership else ""
        yield f"GPU values come from: {known.source}{owners}."
    else:
        yield "Nobody reads GPU values, or nobody said so yet."
    yield from _stage_quality(known.stages)
    if known.pods_monitored is not None:
        yield f"Pods that are monitored: {known.pods_monitored}; that are not: {known.pods_unmonitored or 0}."
    if known.diagnosis.gpus is not None:
        yield f"The diagnosis follows {known.diagnosis.gpus} GPUs and has seen {known.diagnosis.steps or 0} steps."
    for one in known.diagnosis.not_judged:
        yield f"Not judged is {one.reason}: {one.message or 'what is missing was not said'}."
    if known.gaps_seconds:
        yield f"{known.gaps_seconds:.0f} s are missing between two starts of sidecars."
    if known.lost_starts:
        yield f"Starts of sidecars that ended without a last report: {known.lost_starts}."
    yield from (text for text in (known.diagnosis.message, known.message) if text)
    before = monitor.status.previous_run
    if before is not None:
        yield f"The run before under this name: {before.phase or 'unknown'}, HEALTH {before.health or NOT_KNOWN}."


def _stage_quality(stages: StageQuality) -> Iterator[str]:
    if stages.source:
        fine = f", to {stages.resolution_seconds:g} s" if stages.resolution_seconds else ""
        yield f"Stages are told by: {stages.source}{fine}."
    if stages.message or stages.reason:
        yield f"No better source of stages: {stages.message or stages.reason}."


def markdown(monitor: GPUMonitor) -> str:
    """Return the report as Markdown."""
    kind, name = title_of(monitor)
    status = monitor.status
    lines = [f"# {escaped(name)}", "", f"{escaped(kind)}: {escaped(', '.join(facts(monitor)))}", ""]
    lines += [f"**{escaped(status.health or NOT_KNOWN)}** {escaped(verdict_text(monitor))}", ""]
    lines += [f"- {label}: {value}" for label, value in numbers(monitor)]
    lines += ["", "## Findings", "", *_findings(monitor)]
    rows = [
        [view["stage"], view["role"], view["share"], view["seconds"], view["busy"], view["peak"]]
        for view in map(stage_view, stage_rows(monitor))
    ]
    if rows:
        lines += ["", "## Stages", "", *table(["stage", "role", "share", "s a step", "busy", "memory peak"], rows)]
    views = gpu_views(monitor)
    if views:
        keys = ("name", "pod", "state", "busy", "memory", "note")
        head = ["GPU", "pod", "state", "busy", "memory peak", "why"]
        lines += [
            "",
            "## GPUs that need a look first",
            "",
            *table(head, [[view[key] for key in keys] for view in views]),
        ]
        lines += ["", gpus_text(monitor)]
    if status.unmonitored_pods:
        pods = [[pod.name, pod.reason or "", pod.message or ""] for pod in status.unmonitored_pods]
        lines += ["", "## Pods without telemetry", "", *table(["pod", "reason", "what to do"], pods)]
    lines += ["", "## Data quality", "", *(f"- {escaped(line)}" for line in quality(monitor)), ""]
    return "\n".join(lines)


def _findings(monitor: GPUMonitor) -> Iterator[str]:
    for finding, given in with_advice(monitor):
        view = finding_view(monitor, finding, given)
        where = f" in {escaped(view['stage'])}" if view["stage"] else ""
        what = f"**{escaped(view['reason'])}**{where} ({view['severity']}). {escaped(view['when'])}"
        yield f"- {what}. {escaped(view['message'])}"
        yield from advice_lines(view["advice"])
    if not monitor.status.findings:
        yield "Nothing is open."
    rest = [advice_view(advice) for advice in advice_of(monitor, None)]
    if rest:
        yield from ("", "Also recommended:", "")
        yield from advice_lines(rest)
