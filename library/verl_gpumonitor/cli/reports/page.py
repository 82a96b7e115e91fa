# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A run as a page of HTML: one file, no script, nothing from the network, readable on a phone and on paper."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from verl_gpumonitor import __version__
from verl_gpumonitor.cli import not_judged
from verl_gpumonitor.cli.findings import Group, grouped
from verl_gpumonitor.cli.times import clock, extent
from verl_gpumonitor.diagnosis.thresholds import OomRisk
from verl_gpumonitor.model import figures
from verl_gpumonitor.model.figures import counted
from verl_gpumonitor.model.findings import Advice, Evidence
from verl_gpumonitor.model.vocabulary import STAGES, UNKNOWN

from .charts import bar, budget_bar, gpu_chart, heat_map, stage_class
from .gather import GpuRun, Run, StageRow
from .tracks import Bucket

MAX_CHARTS: Final = 16
"""GPUs that get a chart of their own; of more, those that findings name and then the busiest and the idlest."""
MAX_ROWS: Final = 64
BALANCED: Final = 0.15
"""GPUs of one pool are called balanced when load and memory peaks lie within so much of the whole."""
ROOM: Final = OomRisk().safe_ratio
"""GPUs have room when none was ever fuller."""


def percent(ratio: float | None) -> str:
    """Return a ratio for a person; `?` for what is unknown."""
    return "?" if ratio is None else figures.percent(ratio)


def gib(size: float | None) -> str:
    """Return bytes for a person."""
    return "?" if size is None else figures.gib(size)


def heat_styles() -> str:
    """Return the classes of the ten shades."""
    return "\n".join(f".heat-{level} {{ fill: rgba(var(--heat), {0.05 + 0.1 * level:.2f}); }}" for level in range(10))


def stage_styles() -> str:
    """Return the classes of the stages' colours, for shapes and for keys."""
    return "\n".join(f".stage-{stage} {{ fill: var(--{stage}); background: var(--{stage}); }}" for stage in STAGES)


def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the templates; everything that is put in is escaped."""
    made = Environment(loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.globals["version"] = __version__
    made.globals["style"] = Markup("\n".join((_source("style.css"), stage_styles(), heat_styles())))  # noqa: S704 - our own
    return made


def title_of(run: Run) -> tuple[str, str]:
    """Return kind and name of the workload."""
    workload = run.header.workload
    if workload is None or workload.name is None:
        return "Recorded run", "A run without a name"
    return f"{workload.kind or 'Workload'}{f' in {workload.namespace}' if workload.namespace else ''}", workload.name


def facts(run: Run) -> list[str]:
    """Return what a reader wants to know first."""
    pods = run.header.pods or []
    models = {gpu.model for gpu in run.gpus if gpu.model}
    frameworks = run.header.frameworks
    found = [f"{counted(len(run.gpus), 'GPU')} in {counted(len(pods), 'pod')}", *sorted(models)]
    found.append(extent(run.end, begin=None if run.part is None else run.begin))
    if frameworks and frameworks.verl:
        found.append(f"verl {frameworks.verl}")
    return found


def numbers(run: Run) -> list[tuple[str, str]]:
    """Return the run in a few figures."""
    whole = run.whole
    found = [("GPU-hours", f"{run.gpu_hours:.2f}"), ("Busy", percent(whole.utilization))]
    found += [("Memory peak", percent(run.memory_peak_ratio)), ("Least memory left", gib(run.headroom_bytes))]
    if run.step_seconds is not None:
        found += [("Steps", str(run.steps)), ("Seconds a step", f"{run.step_seconds:.1f}")]
    if whole.powered_seconds:
        found.append(("Mean power of a GPU", f"{whole.energy_joules / whole.powered_seconds:.0f} W"))
    return found


def verdict_text(run: Run) -> str:
    """Return the verdict in words."""
    if not run.gpus:
        return "No GPU is in this record."
    if run.healthy:
        return f"{silence(run).rstrip('.')}{_balance(run)}."
    if not run.findings:
        return f"Nothing can be said yet: {run.unjudged or 'neither load nor memory of a GPU is known'}."
    still = [tracked for tracked in run.findings if tracked.resolved is None]
    first = (still or list(run.findings))[0]
    return first.finding.message


def silence(run: Run) -> str:
    """Return what is said where there are no findings."""
    if not run.healthy:
        return "Nothing can be said yet."
    return "Nothing was found." if run.only_looked is None else "A first look found nothing."


def _balance(run: Run) -> str:
    """Return what may be said of a run without findings, as it was measured: that no rule fires is not yet balance."""
    loads = _measured(run, lambda gpu: gpu.whole.utilization)
    memories = _measured(run, lambda gpu: gpu.memory_peak_ratio)
    if len(loads.values) < 2:
        return ""
    words = []
    if loads.apart > BALANCED:
        words.append(f"{loads.text} busy")
    if memories.apart > BALANCED:
        words.append(f"at their peak {memories.text} full")
    if not words:
        words.append("balanced" if memories.values else "balanced in load")
    return f": the GPUs are {', '.join(words)}{_room(run)}"


def _room(run: Run) -> str:
    full = run.memory_peak_ratio
    if full is None:
        return ""
    return " and have room" if full <= ROOM else f"; the fullest has {gib(run.headroom_bytes)} left"


class _Measured(NamedTuple):
    """One figure of all GPUs."""

    values: Sequence[float]
    apart: float
    """Between the highest and the lowest of those that do the same work."""

    @property
    def text(self) -> str:
        """Such as `13% to 91%`."""
        return f"{percent(min(self.values))} to {percent(max(self.values))}"


def _measured(run: Run, value: Callable[[GpuRun], float | None]) -> _Measured:
    pools: dict[str, list[float]] = {}
    for gpu in run.gpus:
        known = value(gpu)
        if known is not None:
            pools.setdefault(gpu.pool, []).append(known)
    return _Measured(
        [known for pool in pools.values() for known in pool],
        max((max(pool) - min(pool) for pool in pools.values()), default=0.0),
    )


def finding_view(group: Group, run: Run) -> dict[str, Any]:
    """Return a finding, or several that are alike, as the template shows it."""
    tracked = group.first
    finding = tracked.finding
    whole = "record" if run.part is None else "part"
    end = f"until {clock(tracked.resolved)}" if tracked.resolved is not None else f"to the end of the {whole}"
    return {
        "severity": str(finding.severity),
        "reason": finding.reason,
        "stage": finding.scope.stage if finding.scope.stage not in (None, UNKNOWN) else "",
        "when": f"From {clock(tracked.first_seen)} {end}",
        "message": finding.message,
        "also": group.also,
        "advice": [advice_view(advice) for advice in finding.advice],
        "evidence": evidence_view(finding.evidence),
    }


def advice_view(advice: Advice) -> dict[str, str]:
    """Return one piece of advice: the change as one types it, why, and what it costs."""
    change = ""
    if advice.parameter and advice.suggested is not None:
        change = f"{advice.parameter}={advice.suggested}"
        change += f"   (now {advice.current})" if advice.current is not None else ""
    elif advice.parameter:
        change = advice.parameter
    return {"change": change, "text": advice.text, "price": advice.price}


def evidence_view(evidence: Evidence) -> list[tuple[str, str]]:
    """Return evidence for a person: bytes as GiB, ratios as they are."""
    return [(key.removesuffix("_bytes").replace("_", " "), _value(key, value)) for key, value in evidence.items()]


def _value(key: str, value: str | int | float | list[float]) -> str:
    if isinstance(value, list):
        return ", ".join(_value(key, item) for item in value)
    if isinstance(value, str):
        return value
    return gib(value) if "_bytes" in key else f"{value:.4g}"


def stage_view(row: StageRow) -> dict[str, Any]:
    """Return a row of the stage table."""
    return {
        "key": stage_class(row.stage),
        "stage": row.stage,
        "role": row.role if row.role != "unknown" else "",
        "share": percent(row.share),
        "seconds": "" if row.seconds_per_step is None else f"{row.seconds_per_step:.1f}",
        "busy": percent(row.utilization),
        "busy_bar": Markup(bar(row.utilization, f"{row.stage} busy")),  # noqa: S704 - escaped in charts
        "peak": percent(row.memory_peak_ratio),
        "power": "?" if row.power_watts is None else f"{row.power_watts:.0f} W",
    }


def gpu_view(gpu: GpuRun) -> dict[str, Any]:
    """Return a row of the balance table."""
    heat = gpu.whole.temperature_celsius
    return {
        "name": gpu.name,
        "pod": gpu.pod,
        "busy": percent(gpu.whole.utilization),
        "busy_bar": Markup(bar(gpu.whole.utilization, f"{gpu.name} busy")),  # noqa: S704
        "memory": f"{gib(gpu.whole.memory_high_bytes)} ({percent(gpu.memory_peak_ratio)})",
        "memory_bar": Markup(bar(gpu.memory_peak_ratio, f"{gpu.name} memory peak")),  # noqa: S704
        "temperature": "?" if heat is None else f"{heat:.0f} °C",
        "reasons": ", ".join(gpu.reasons),
    }


def charted(run: Run) -> Sequence[GpuRun]:
    """Return the GPUs that get a chart: all if they are few, else those worth a look, in their order."""
    if len(run.gpus) <= MAX_CHARTS:
        return run.gpus
    by_load = sorted(run.gpus, key=lambda gpu: gpu.whole.utilization or 0.0)
    wanted = [gpu for gpu in run.gpus if gpu.reasons][: MAX_CHARTS - 4]
    for gpu in (by_load[0], by_load[-1], by_load[1], by_load[-2], *by_load[len(by_load) // 2 :]):
        if len(wanted) < MAX_CHARTS and gpu not in wanted:
            wanted.append(gpu)
    chosen = {gpu.uuid for gpu in wanted}
    return [gpu for gpu in run.gpus if gpu.uuid in chosen]


def quality(run: Run) -> list[str]:
    """Return what is not known, and what could not be read."""
    found = [] if run.part is None else [run.part.sentence(run.end)]
    found += [f"{text[0].upper()}{text[1:]}." for text in (run.unjudged, run.only_looked) if text]
    found += not_judged.sentences(run.coverage, {tracked.finding.reason for tracked in run.findings})
    whole = run.whole
    if not any(stage.stage not in ("unknown", "other") for stage in run.stages):
        found.append("The record tells no stages: whatever depends on them was not judged.")
    if whole.seconds and whole.known_seconds < 0.98 * whole.seconds:
        found.append(f"Load is known for {percent(whole.known_seconds / whole.seconds)} of the GPU time.")
    if run.gap_seconds:
        found.append(f"No samples came for {clock(run.gap_seconds)} of the GPU time between the first and the last.")
    if any(gpu.memory_total_bytes is None for gpu in run.gpus):
        found.append("The size of some GPUs' memory is not in the record, so their peaks have no percentage.")
    if not whole.powered_seconds:
        found.append("The record has no power: a GPU that spins cannot be told from one that works.")
    if run.width_seconds > 1:
        found.append(f"Each point of the charts stands for {clock(run.width_seconds)}.")
    found += [f"Noted in the record: {note}." for note in run.header.notes or ()]
    found += [f"Passed over: {line}" for line in run.complaints]
    return found or ["Everything that was looked for is in the record."]


def _maps(run: Run) -> dict[str, Markup]:
    def load(_: GpuRun, bucket: Bucket) -> float | None:
        return bucket.utilization

    def memory(gpu: GpuRun, bucket: Bucket) -> float | None:
        high, total = bucket.memory_high_bytes, gpu.memory_total_bytes
        return None if high is None or not total else high / total

    def drawn(value: Callable[[GpuRun, Bucket], float | None], label: str) -> Markup:
        gpus = run.gpus[:MAX_ROWS]
        svg = heat_map(gpus, value, seconds=run.seconds, width_seconds=run.width_seconds, begin=run.begin, label=label)
        return Markup(svg)  # noqa: S704 - escaped in charts

    return {
        "load_map": drawn(load, "Load of each GPU over time"),
        "memory_map": drawn(memory, "Memory of each GPU over time"),
    }


def chart_views(run: Run) -> list[dict[str, str]]:
    """Return the charts of single GPUs with what they are of."""
    return [
        {
            "caption": f"{gpu.name} of {gpu.pod}",
            "svg": Markup(gpu_chart(gpu, seconds=run.seconds, width_seconds=run.width_seconds, begin=run.begin)),  # noqa: S704
        }
        for gpu in charted(run)
    ]


def run_context(run: Run) -> Mapping[str, Any]:
    """Return all that the page of one run needs."""
    kind, title = title_of(run)
    more = len(run.gpus) - MAX_ROWS
    return {
        "kind": kind,
        "title": title,
        "facts": facts(run),
        "healthy": run.healthy,
        "verdict": run.verdict,
        "verdict_text": verdict_text(run),
        "numbers": numbers(run),
        "silence": silence(run),
        "findings": [finding_view(group, run) for group in grouped(run.findings)],
        "stages": [stage_view(row) for row in run.stages] if len(run.stages) > 1 or run.steps else [],
        "budget": Markup(budget_bar(run.stages)),  # noqa: S704
        "gpus": [gpu_view(gpu) for gpu in run.gpus[:MAX_ROWS]],
        "more_gpus": f"{more} more GPUs are not in this table." if more > 0 else "",
        "charts": chart_views(run),
        "legend": [(stage_class(row.stage), row.stage) for row in run.stages],
        "quality": quality(run),
        **_maps(run),
    }


def html(run: Run) -> str:
    """Return the page of a run."""
    return environment().get_template("run.html.j2").render(run_context(run))
