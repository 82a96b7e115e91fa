# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of the pod as a whole: the sidecar itself, what it can see, its reports, host memory, stages. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from verl_gpumonitor.model.samples import HostSample
from verl_gpumonitor.model.vocabulary import UNKNOWN, Ownership
from verl_gpumonitor.timeline.words import OTHER

from .exports import Exports
from .exposition import Number, counter, gauge, labels
from .state import is_present

MAX_STAGES: Final = 16
"""Pairs of stage and role shown apart: 4 series each. A verl job has some ten; what is first seen after them is shown
together, as `other`."""
_HOST_FRESH_SECONDS: Final = 60.0
"""Host memory is read each 15 s where nothing else is wanted from Ray's agent."""

Pair = tuple[str, str]
"""Stage and role."""

_HOST: Final[tuple[tuple[str, str, Callable[[HostSample], Number]], ...]] = (
    ("memory_used_bytes", "Memory in use by the job's container.", lambda h: h.memory_used_bytes),
    ("memory_limit_bytes", "Memory that the job's container may use.", lambda h: h.memory_limit_bytes),
    ("shm_used_bytes", "Used part of the pod's /dev/shm.", lambda h: h.shm_used_bytes),
    ("shm_size_bytes", "Size of the pod's /dev/shm.", lambda h: h.shm_size_bytes),
)


def families(shown: Exports, pod: str, *, now: float, now_unix: float) -> Iterable[str]:
    """Yield the families. `pod`: the labels that each series of this sidecar has."""
    yield from _sidecar(shown, pod)
    yield from _availability(shown, pod)
    yield from _collection(shown, pod)
    yield from _reports(shown, pod)
    yield from _host(shown, pod, now)
    yield from _stages(shown, pod, now_unix)


def shown_as(pair: Pair, shown: Mapping[Pair, object]) -> Pair:
    """Return the pair itself, or `other` once so many are shown apart: by order of appearance, so no counter falls."""
    return pair if pair in shown or len(shown) < MAX_STAGES - 1 else (OTHER, UNKNOWN)


def _sidecar(shown: Exports, pod: str) -> Iterable[str]:
    who = shown.identity
    start = labels(node=who.node, version=who.version, start_id=who.start_id)
    yield gauge(
        "sidecar_info",
        "The sidecar of this pod; start_id names the start that the counters belong to.",
        [(f"{pod},{start}", 1)],
    )
    yield gauge("sidecar_start_time_seconds", "Unix time of its start.", [(pod, who.started_unix or None)])
    yield counter("sidecar_cpu_seconds", "CPU time of the sidecar.", [(pod, shown.use.cpu_seconds)])
    yield gauge("sidecar_resident_memory_bytes", "Its resident memory.", [(pod, shown.use.resident_bytes)])
    yield gauge(
        "sidecar_setting_broken",
        "A setting that is not usable: the sidecar waits and reads nothing; its stderr says more.",
        [
            (f"{pod},{labels(variable=variable)}", 1)
            for variable in sorted({_variable(problem) for problem in shown.settings_problems})
        ],
    )


def _availability(shown: Exports, pod: str) -> Iterable[str]:
    state = shown.state
    if not state.started:
        return
    yield gauge("source_info", "Who reads the GPU values.", [(f"{pod},{labels(source=state.source)}", 1)])
    yield gauge(
        "ownership_info",
        "How it is known which GPUs are the pod's own.",
        [(f"{pod},{labels(ownership=state.ownership)}", 1)],
    )
    if state.ownership is not Ownership.NONE_REQUESTED:
        yield gauge(
            "telemetry_available",
            "1 while values of the pod's own GPUs are read, 0 with the reason while not.",
            [(f"{pod},{labels(reason=state.unavailable or '')}", 0 if state.unavailable else 1)],
        )
    yield gauge("gpus_requested", "GPUs that the pod asks for.", [(pod, state.gpus_requested)])
    yield gauge("gpus_visible", "GPUs that the sidecar sees, whosever they are.", [(pod, state.gpus_visible)])


def _collection(shown: Exports, pod: str) -> Iterable[str]:
    state, health = shown.state, shown.state.health
    success = None if state.success is None else int(state.success)
    yield gauge("collect_success", "Whether the newest attempt to read GPU values succeeded.", [(pod, success)])
    yield gauge(
        "collect_last_success_timestamp_seconds",
        "Unix time at which GPU values were last read.",
        [(pod, state.last_success_unix)],
    )
    yield gauge("collect_duration_seconds", "Time of the newest pass.", [(pod, health.last_pass_seconds)])
    yield counter("collections", "Passes over all GPUs that came to their end.", [(pod, health.collections)])
    yield counter("collect_failures", "Passes in which NVML could not be used.", [(pod, health.failures)])
    yield counter("collect_timeouts", "Calls into NVML that hung.", [(pod, health.timeouts)])
    for name, text, label, counts in (
        ("unsupported_readings", "Readings that driver or GPU do not offer.", "field", health.unsupported),
        ("implausible_readings", "Readings thrown away as impossible.", "field", health.implausible),
        ("nvml_errors", "Calls that ended in this error of NVML.", "error", health.failed),
    ):
        yield counter(name, text, [(f"{pod},{labels(**{label: key})}", value) for key, value in sorted(counts.items())])


def _reports(shown: Exports, pod: str) -> Iterable[str]:
    reports = shown.reports
    if not reports.enabled:
        return
    yield counter(
        "reports",
        "Attempts to report, by HTTP status, or by what kept an answer away.",
        [(f"{pod},{labels(code=code)}", count) for code, count in sorted(reports.by_code.items())],
    )
    yield counter("reports_dropped", "Reports superseded undelivered.", [(pod, reports.dropped)])
    yield gauge(
        "report_last_success_timestamp_seconds",
        "Unix time of the last report that was accepted.",
        [(pod, reports.last_success_unix)],
    )


def _host(shown: Exports, pod: str, now: float) -> Iterable[str]:
    host = shown.state.host
    if host is None:
        return
    if host.taken_at is None or now - host.taken_at > _HOST_FRESH_SECONDS:
        host = msgspec.structs.replace(host, memory_used_bytes=None, memory_limit_bytes=None)
    for name, text, value in _HOST:
        yield gauge("host_" + name, text, [(pod, value(host))])


def _stages(shown: Exports, pod: str, now_unix: float) -> Iterable[str]:
    """What is known of the pod's stages, and who tells them."""
    state = shown.state
    if not state.started or state.ownership is Ownership.NONE_REQUESTED:
        return
    stages, seconds = state.stages, dict[Pair, float]()
    for (_, stage, role), spent in stages.pod_seconds.items():
        pair = shown_as((stage, role), seconds)
        seconds[pair] = seconds.get(pair, 0.0) + spent
    yield counter(
        "stage_seconds",
        "Wall time of the pod in a stage.",
        [(f"{pod},{labels(stage=stage, role=role)}", spent) for (stage, role), spent in seconds.items()],
    )
    present = stages.now if is_present(state, now_unix) else None
    yield gauge(
        "stage_info",
        "The stage that runs now in the pod, or in most of it.",
        [(f"{pod},{labels(stage=present.stage, role=present.role)}", 1)] if present else [],
    )
    quality = stages.quality
    yield gauge(
        "stage_source_info",
        "Who tells the stages, and why nobody better does.",
        [(f"{pod},{labels(source=quality.source, reason=quality.reason or '')}", 1)],
    )
    yield counter("steps", "Whole training steps that ended.", [(pod, quality.steps)])


def _variable(problem: str) -> str:
    return problem.replace("=", " ").split(" ", 1)[0]
