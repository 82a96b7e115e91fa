# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Renders the newest state for Prometheus: the health of the reading always, a value only where it is known.

Nothing here reads a GPU: a scrape looks at what the loop left. The number of series follows from the number of the
pod's own GPUs and from fixed lists alone; processes come and go without adding one.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from verl_gpumonitor.model.report import StageCount
from verl_gpumonitor.model.samples import GpuSample, HostSample, ReadingHealth
from verl_gpumonitor.model.vocabulary import UNKNOWN, GpuState, Ownership
from verl_gpumonitor.timeline.words import OTHER

from .state import OwnGpu, PodState, gauges, is_fresh, is_present, recent_peak, role_now

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_POD: Final = ("namespace", "pod")
_GPU: Final = (*_POD, "gpu", "uuid", "role")
_COUNTER: Final = (*_GPU, "stage")
_MAX_CODES: Final = 8
"""Xid codes shown for one GPU; the driver knows some 170, a GPU in trouble shows a handful."""
MAX_STAGES: Final = 16
"""Pairs of stage and role shown apart: 4 series each. A verl job has some ten; what is first seen after them is shown
together, as `other`."""

Number = float | int | None
Pair = tuple[str, str]
"""Stage and role."""

_GAUGES: Final[tuple[tuple[str, str, Callable[[GpuSample], Number]], ...]] = (
    ("utilization_ratio", "Share of the last sample period in which a kernel was resident.", lambda g: g.utilization),
    (
        "memory_bandwidth_utilization_ratio",
        "Share of the last sample period in which memory was read or written; says nothing about memory in use.",
        lambda g: g.memory_bandwidth_utilization,
    ),
    ("memory_used_bytes", "Memory held by processes.", lambda g: g.memory_used_bytes),
    ("memory_reserved_bytes", "Memory held by the driver itself.", lambda g: g.memory_reserved_bytes),
    ("memory_total_bytes", "Memory of the GPU.", lambda g: g.memory_total_bytes),
    ("power_watts", "Power of the board.", lambda g: g.power_watts),
    ("power_limit_watts", "Power limit in force.", lambda g: g.power_limit_watts),
    ("temperature_celsius", "Temperature of the chip.", lambda g: g.temperature_celsius),
    ("memory_temperature_celsius", "Temperature of the memory.", lambda g: g.memory_temperature_celsius),
    (
        "throttle_reasons",
        "Reasons for which clocks are held down at the moment; gpumonitor_gpu_throttled names them.",
        lambda g: None if g.throttled is None else len(g.throttled),
    ),
)
"""Name after `gpumonitor_gpu_`, help, value of the present sample."""

_STAGE_COUNTERS: Final[tuple[tuple[str, str, Callable[[StageCount], Number]], ...]] = (
    ("observed_seconds", "Time covered by utilisation samples.", lambda s: s.observed_seconds),
    ("busy_seconds", "Integral of utilisation over the observed time.", lambda s: s.busy_seconds),
    ("energy_joules", "Energy since the sidecar's start.", lambda s: s.energy_joules),
)
"""By stage: what is settled. The last seconds wait for their stage, a minute at most."""

_COUNTERS: Final[tuple[tuple[str, str, Callable[[OwnGpu], Number]], ...]] = (
    ("pcie_sent_bytes", "Bytes that the GPU sent over PCIe.", lambda g: g.sample.pcie_sent_bytes),
    ("pcie_received_bytes", "Bytes that the GPU received over PCIe.", lambda g: g.sample.pcie_received_bytes),
    ("nvlink_sent_bytes", "Bytes that the GPU sent over NVLink.", lambda g: g.sample.nvlink_sent_bytes),
    ("nvlink_received_bytes", "Bytes that the GPU received over NVLink.", lambda g: g.sample.nvlink_received_bytes),
    (
        "ecc_uncorrected_errors",
        "Uncorrected memory errors since the driver was loaded.",
        lambda g: g.sample.ecc_uncorrected_errors,
    ),
)

_HOST: Final[tuple[tuple[str, str, Callable[[HostSample], Number]], ...]] = (
    ("memory_used_bytes", "Memory in use by the job's container.", lambda h: h.memory_used_bytes),
    ("memory_limit_bytes", "Memory that the job's container may use.", lambda h: h.memory_limit_bytes),
    ("shm_used_bytes", "Used part of the pod's /dev/shm.", lambda h: h.shm_used_bytes),
    ("shm_size_bytes", "Size of the pod's /dev/shm.", lambda h: h.shm_size_bytes),
)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What every series of this sidecar carries, and what its info series tell."""

    namespace: str
    pod: str
    node: str = ""
    version: str = ""
    start_id: str = ""
    started_unix: float = 0.0


class ReportCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How the reports fared so far."""

    enabled: bool = False
    by_code: Mapping[str, int] = {}
    """HTTP status, or `error`, `timeout`, `tls`, `token` where no answer came -> attempts."""
    dropped: int = 0
    last_success_unix: float | None = None


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the sidecar itself takes; None where /proc does not say."""

    cpu_seconds: float | None = None
    resident_bytes: int | None = None


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rendering shows."""

    identity: Identity
    state: PodState
    reports: ReportCounts = ReportCounts()
    use: ProcessUse = ProcessUse()
    settings_problems: tuple[str, ...] = ()
    """Sentences of SettingsError; each names its variable first."""


class StateCollector(Collector):
    """Turns the present state into metric families at each scrape."""

    def __init__(
        self,
        current: Callable[[], Exports],
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._current = current
        self._clock = clock
        self._unix_clock = unix_clock

    def collect(self) -> Iterable[Metric]:
        """Yield the families; those without a known value have no sample and are left out."""
        for family in _families(self._current(), self._clock(), self._unix_clock()):
            if family.samples:
                yield family


def _families(shown: Exports, now: float, now_unix: float) -> Iterable[Metric]:
    yield from _sidecar(shown)
    yield from _availability(shown)
    yield from _collection(shown)
    yield from _reports(shown)
    yield from _host(shown, now)
    yield from _stages(shown, now_unix)
    yield from _gpus(shown, now, now_unix)
    yield from _gpu_stages(shown)


def _gauge(name: str, text: str, labels: Iterable[str], rows: Iterable[tuple[Iterable[str], Number]]) -> Metric:
    family = GaugeMetricFamily("gpumonitor_" + name, text, labels=list(labels))
    for values, number in rows:
        if number is not None and math.isfinite(number):
            family.add_metric(list(values), number)
    return family


def _counter(name: str, text: str, labels: Iterable[str], rows: Iterable[tuple[Iterable[str], Number]]) -> Metric:
    family = CounterMetricFamily("gpumonitor_" + name, text, labels=list(labels))
    for values, number in rows:
        if number is not None and math.isfinite(number) and number >= 0:
            family.add_metric(list(values), number)
    return family


def _sidecar(shown: Exports) -> Iterable[Metric]:
    who, pod = shown.identity, _pod(shown)
    yield _gauge(
        "sidecar_info",
        "The sidecar of this pod; start_id names the start that the counters belong to.",
        (*_POD, "node", "version", "start_id"),
        [((*pod, who.node, who.version, who.start_id), 1)],
    )
    yield _gauge("sidecar_start_time_seconds", "Unix time of its start.", _POD, [(pod, who.started_unix or None)])
    yield _counter("sidecar_cpu_seconds", "CPU time of the sidecar.", _POD, [(pod, shown.use.cpu_seconds)])
    yield _gauge("sidecar_resident_memory_bytes", "Its resident memory.", _POD, [(pod, shown.use.resident_bytes)])
    yield _gauge(
        "sidecar_setting_broken",
        "A setting that is not usable: the sidecar waits and reads nothing; its stderr says more.",
        (*_POD, "variable"),
        [((*pod, variable), 1) for variable in sorted({_variable(p) for p in shown.settings_problems})],
    )


def _availability(shown: Exports) -> Iterable[Metric]:
    state, pod = shown.state, _pod(shown)
    if not state.started:
        return
    yield _gauge("source_info", "Who reads the GPU values.", (*_POD, "source"), [((*pod, state.source), 1)])
    yield _gauge(
        "ownership_info",
        "How it is known which GPUs are the pod's own.",
        (*_POD, "ownership"),
        [((*pod, state.ownership), 1)],
    )
    if state.ownership is not Ownership.NONE_REQUESTED:
        yield _gauge(
            "telemetry_available",
            "1 while values of the pod's own GPUs are read, 0 with the reason while not.",
            (*_POD, "reason"),
            [((*pod, state.unavailable or ""), 0 if state.unavailable else 1)],
        )
    yield _gauge("gpus_requested", "GPUs that the pod asks for.", _POD, [(pod, state.gpus_requested)])
    yield _gauge("gpus_visible", "GPUs that the sidecar sees, whosever they are.", _POD, [(pod, state.gpus_visible)])


def _collection(shown: Exports) -> Iterable[Metric]:
    state, pod = shown.state, _pod(shown)
    health: ReadingHealth = state.health
    success = None if state.success is None else int(state.success)
    yield _gauge("collect_success", "Whether the newest attempt to read GPU values succeeded.", _POD, [(pod, success)])
    yield _gauge(
        "collect_last_success_timestamp_seconds",
        "Unix time at which GPU values were last read.",
        _POD,
        [(pod, state.last_success_unix)],
    )
    yield _gauge("collect_duration_seconds", "Time of the newest pass.", _POD, [(pod, health.last_pass_seconds)])
    yield _counter("collections", "Passes over all GPUs that came to their end.", _POD, [(pod, health.collections)])
    yield _counter("collect_failures", "Passes in which NVML could not be used.", _POD, [(pod, health.failures)])
    yield _counter("collect_timeouts", "Calls into NVML that hung.", _POD, [(pod, health.timeouts)])
    for name, text, label, counts in (
        ("unsupported_readings", "Readings that driver or GPU do not offer.", "field", health.unsupported),
        ("implausible_readings", "Readings thrown away as impossible.", "field", health.implausible),
        ("nvml_errors", "Calls that ended in this error of NVML.", "error", health.failed),
    ):
        yield _counter(name, text, (*_POD, label), [((*pod, key), value) for key, value in sorted(counts.items())])


def _reports(shown: Exports) -> Iterable[Metric]:
    reports, pod = shown.reports, _pod(shown)
    if not reports.enabled:
        return
    yield _counter(
        "reports",
        "Attempts to report, by HTTP status, or by what kept an answer away.",
        (*_POD, "code"),
        [((*pod, code), count) for code, count in sorted(reports.by_code.items())],
    )
    yield _counter("reports_dropped", "Reports superseded undelivered.", _POD, [(pod, reports.dropped)])
    yield _gauge(
        "report_last_success_timestamp_seconds",
        "Unix time of the last report that was accepted.",
        _POD,
        [(pod, reports.last_success_unix)],
    )


def _host(shown: Exports, now: float) -> Iterable[Metric]:
    host = shown.state.host
    if host is None:
        return
    if host.taken_at is None or now - host.taken_at > _HOST_FRESH_SECONDS:
        host = msgspec.structs.replace(host, memory_used_bytes=None, memory_limit_bytes=None)
    for name, text, value in _HOST:
        yield _gauge("host_" + name, text, _POD, [(_pod(shown), value(host))])


_HOST_FRESH_SECONDS: Final = 60.0
"""Host memory is read each 15 s where nothing else is wanted from Ray's agent."""


def _stages(shown: Exports, now_unix: float) -> Iterable[Metric]:
    """What is known of the pod's stages, and who tells them."""
    pod, state = _pod(shown), shown.state
    if not state.started or state.ownership is Ownership.NONE_REQUESTED:
        return
    stages, seconds = state.stages, dict[Pair, float]()
    for (_, stage, role), spent in stages.pod_seconds.items():
        pair = _shown_as((stage, role), seconds)
        seconds[pair] = seconds.get(pair, 0.0) + spent
    yield _counter(
        "stage_seconds",
        "Wall time of the pod in a stage.",
        (*_POD, "stage", "role"),
        [((*pod, *pair), spent) for pair, spent in seconds.items()],
    )
    present = stages.now if is_present(state, now_unix) else None
    yield _gauge(
        "stage_info",
        "The stage that runs now in the pod, or in most of it.",
        (*_POD, "stage", "role"),
        [((*pod, present.stage, present.role), 1)] if present else [],
    )
    quality = stages.quality
    yield _gauge(
        "stage_source_info",
        "Who tells the stages, and why nobody better does.",
        (*_POD, "source", "reason"),
        [((*pod, quality.source, quality.reason or ""), 1)],
    )
    yield _counter("steps", "Whole training steps that ended.", _POD, [(pod, quality.steps)])


def by_pair(counts: Iterable[StageCount]) -> dict[Pair, StageCount]:
    """Return a GPU's counters by stage and role, all jobs together, at most `MAX_STAGES` of them.

    Which pairs are shown apart follows from the order in which they were first seen, so that no counter ever falls.
    """
    shown: dict[Pair, StageCount] = {}
    for count in counts:
        pair = _shown_as((count.stage, count.role), shown)
        before = shown.get(pair)
        shown[pair] = count if before is None else _added(before, count)
    return shown


def _shown_as(pair: Pair, shown: Mapping[Pair, object]) -> Pair:
    return pair if pair in shown or len(shown) < MAX_STAGES - 1 else (OTHER, UNKNOWN)


def _added(one: StageCount, other: StageCount) -> StageCount:
    energies = [count.energy_joules for count in (one, other) if count.energy_joules is not None]
    peaks = [count.memory_peak_bytes for count in (one, other) if count.memory_peak_bytes is not None]
    return StageCount(
        one.stage,
        one.role,
        one.observed_seconds + other.observed_seconds,
        one.busy_seconds + other.busy_seconds,
        sum(energies) if energies else None,
        max(peaks, default=None),
    )


def _gpu_stages(shown: Exports) -> Iterable[Metric]:
    """What each GPU did in each stage."""
    pairs = [
        (_place(shown, gpu), pair, count)
        for gpu in shown.state.gpus
        for pair, count in by_pair(shown.state.stages.counts.get(gpu.sample.uuid, ())).items()
    ]
    for name, text, value in _STAGE_COUNTERS:
        rows = [((*place, role, stage), value(count)) for place, (stage, role), count in pairs]
        yield _counter("gpu_" + name, text, _COUNTER, rows)
    yield _gauge(
        "gpu_stage_memory_peak_bytes",
        "Highest memory in use in a stage since the sidecar's start.",
        _COUNTER,
        [((*place, role, stage), count.memory_peak_bytes) for place, (stage, role), count in pairs],
    )


def _gpus(shown: Exports, now: float, now_unix: float) -> Iterable[Metric]:
    """Name, health and what adds up go without a role: they hold whatever the GPU does. Gauges have that of now."""
    state = shown.state
    fresh = [(gpu, gauges(gpu.sample, state, now), _gpu(shown, gpu)) for gpu in state.gpus]
    roles = [(*_place(shown, gpu), role_now(gpu.sample.uuid, state, now_unix)) for gpu in state.gpus]
    present = [(gpu, sample, labels) for (gpu, sample, _), labels in zip(fresh, roles, strict=True)]
    yield _gauge(
        "gpu_info",
        "Constants of one of the pod's GPUs.",
        (*_GPU, "model", "driver", "node"),
        [
            ((*labels, gpu.sample.model or "", state.driver_version or "", shown.identity.node), 1)
            for gpu, _, labels in fresh
        ],
    )
    yield _gauge(
        "gpu_up",
        "Whether the GPU answers.",
        _GPU,
        [(labels, int(_answers(gpu.sample, state, now))) for gpu, _, labels in fresh],
    )
    yield _gauge(
        "gpu_state_info",
        "What the GPU answers, with NVML's name of the error.",
        (*_GPU, "state", "error"),
        [((*labels, gpu.sample.state, gpu.sample.error or ""), 1) for gpu, _, labels in fresh],
    )
    for name, text, value in _GAUGES:
        yield _gauge("gpu_" + name, text, _GPU, [(labels, value(sample)) for _, sample, labels in present])
    yield _gauge(
        "gpu_throttled",
        "Reasons for which clocks are held down at the moment.",
        (*_GPU, "reason"),
        [((*labels, reason), 1) for _, sample, labels in present for reason in sample.throttled or ()],
    )
    yield _gauge(
        "gpu_memory_peak_bytes",
        "Highest memory in use since the sidecar's start.",
        _GPU,
        [(labels, gpu.counters.memory_peak_bytes) for gpu, _, labels in present],
    )
    yield _gauge(
        "gpu_memory_recent_peak_bytes",
        "Highest memory in use in the last 60 s.",
        _GPU,
        [(labels, recent_peak(gpu, sample)) for gpu, sample, labels in present],
    )
    for name, text, count in _COUNTERS:
        yield _counter("gpu_" + name, text, _COUNTER, [((*labels, UNKNOWN), count(gpu)) for gpu, _, labels in fresh])
    yield from _xids([(gpu, labels) for gpu, _, labels in fresh])


def _xids(gpus: list[tuple[OwnGpu, tuple[str, ...]]]) -> Iterable[Metric]:
    yield _counter(
        "gpu_xid_errors",
        "Xid events since the sidecar's start.",
        (*_COUNTER, "xid"),
        [
            ((*labels, UNKNOWN, str(code)), count)
            for gpu, labels in gpus
            for code, count in sorted(gpu.counters.xid_errors.items())[:_MAX_CODES]
        ],
    )
    yield _gauge(
        "gpu_xid_last_timestamp_seconds",
        "Unix time of the last event of this Xid.",
        (*_GPU, "xid"),
        [
            ((*labels, str(code)), unix)
            for gpu, labels in gpus
            for code, unix in sorted(gpu.xid_last_unix.items())[:_MAX_CODES]
        ],
    )


def _answers(sample: GpuSample, state: PodState, now: float) -> bool:
    return sample.state is GpuState.OK and is_fresh(sample.taken_at, state, now)


def _pod(shown: Exports) -> tuple[str, ...]:
    return shown.identity.namespace, shown.identity.pod


def _place(shown: Exports, gpu: OwnGpu) -> tuple[str, ...]:
    index = "" if gpu.sample.index is None else str(gpu.sample.index)
    return (*_pod(shown), index, gpu.sample.uuid)


def _gpu(shown: Exports, gpu: OwnGpu) -> tuple[str, ...]:
    return (*_place(shown, gpu), UNKNOWN)


def _variable(problem: str) -> str:
    return problem.replace("=", " ").split(" ", 1)[0]


def plain_text(open_metrics: bytes) -> bytes:
    """Turn the OpenMetrics text of counters and gauges into the older text format, which every reader knows.

    The two differ in the names of counters' HELP and TYPE lines, and in the end mark. The renderer of the older
    format is no choice: its module loads http.server and urllib.request (`lean`).
    """
    lines = open_metrics.decode().splitlines()
    counters = {line.split(" ")[2] for line in lines if line.startswith("# TYPE ") and line.endswith(" counter")}
    return "".join(_plain_line(line, counters) + "\n" for line in lines if line != "# EOF").encode()


def _plain_line(line: str, counters: set[str]) -> str:
    if not line.startswith("# "):
        return line
    mark, keyword, name, rest = line.split(" ", 3)
    return f"{mark} {keyword} {name}_total {rest}" if name in counters else line


class Page:
    """The text of /metrics, rendered at most once a second, whoever asks and however often."""

    def __init__(
        self,
        current: Callable[[], Exports],
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        keep_seconds: float = 1.0,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(StateCollector(current, clock, unix_clock))
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._rendered_at: float | None = None
        self._text = b""
        self.renderings = 0
        """How often it was rendered."""

    def text(self) -> bytes:
        """Return the page. Called by one thread. Never raises: what breaks a rendering is shown instead of it."""
        now = self._clock()
        if self._rendered_at is None or not 0 <= now - self._rendered_at < self._keep_seconds:
            self.renderings += 1
            self._rendered_at = now
            self._text = self._render()
        return self._text

    def _render(self) -> bytes:
        try:
            # Our names need no escaping; that setting spares the renderer a look at each of their characters.
            return plain_text(generate_latest(self._registry, ALLOWUTF8))  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - a scrape that fails would hide every value there is
            name = type(error).__name__
            return (
                "# HELP gpumonitor_export_error The page could not be rendered, for a fault of ours.\n"
                "# TYPE gpumonitor_export_error gauge\n"
                f'gpumonitor_export_error{{error="{name}"}} 1\n'
            ).encode()
