# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of each of the pod's own GPUs: present values, what adds up, and what it did in each stage. Pure."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from verl_gpumonitor.model.report import StageCount
from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.vocabulary import UNKNOWN, GpuState

from .exports import Exports
from .exposition import Number, Row, counter, gauge, labels
from .pod_metrics import Pair, shown_as
from .state import OwnGpu, PodState, gauges, is_fresh, recent_peak, role_now

_MAX_CODES: Final = 8
"""Xid codes shown for one GPU; the driver knows some 170, a GPU in trouble shows a handful."""

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


class _Shown(NamedTuple):
    """One GPU, and its labels as text, which are most of what the page is."""

    gpu: OwnGpu
    present: GpuSample
    """Its sample without whatever is too old."""
    place: str
    """Labels of the pod, the index and the UUID."""
    plain: str
    """The same, and the unknown role: of what holds whatever the GPU does."""
    now: str
    """The same, and the role of now."""


def families(shown: Exports, pod: str, *, now: float, now_unix: float) -> Iterable[str]:
    """Yield the families. `pod`: the labels that each series of this sidecar has."""
    gpus = [_shown(gpu, pod, shown.state, now=now, now_unix=now_unix) for gpu in shown.state.gpus]
    yield from _names(gpus, shown, now)
    yield from _present(gpus)
    for name, text, value in _COUNTERS:
        yield counter("gpu_" + name, text, [(f'{each.plain},stage="{UNKNOWN}"', value(each.gpu)) for each in gpus])
    yield from _xids(gpus)
    yield from _stages(gpus, shown.state)


def by_pair(counts: Iterable[StageCount]) -> dict[Pair, StageCount]:
    """Return a GPU's counters by stage and role, all jobs together, at most `MAX_STAGES` of them.

    Which pairs are shown apart follows from the order in which they were first seen, so that no counter ever falls.
    """
    shown: dict[Pair, StageCount] = {}
    for count in counts:
        pair = shown_as((count.stage, count.role), shown)
        before = shown.get(pair)
        shown[pair] = count if before is None else _added(before, count)
    return shown


def _shown(gpu: OwnGpu, pod: str, state: PodState, *, now: float, now_unix: float) -> _Shown:
    sample = gpu.sample
    place = f"{pod},{labels(gpu='' if sample.index is None else str(sample.index), uuid=sample.uuid)}"
    return _Shown(
        gpu=gpu,
        present=gauges(sample, state, now),
        place=place,
        plain=f'{place},role="{UNKNOWN}"',
        now=f"{place},{labels(role=role_now(sample.uuid, state, now_unix))}",
    )


def _names(gpus: list[_Shown], shown: Exports, now: float) -> Iterable[str]:
    """Name and health of each GPU."""
    state = shown.state
    node = labels(driver=state.driver_version or "", node=shown.identity.node)
    yield gauge(
        "gpu_info",
        "Constants of one of the pod's GPUs.",
        [(f"{each.plain},{labels(model=each.gpu.sample.model or '')},{node}", 1) for each in gpus],
    )
    yield gauge(
        "gpu_up",
        "Whether the GPU answers.",
        [(each.plain, int(_answers(each.gpu.sample, state, now))) for each in gpus],
    )
    yield gauge(
        "gpu_state_info",
        "What the GPU answers, with NVML's name of the error.",
        [
            (f"{each.plain},{labels(state=each.gpu.sample.state, error=each.gpu.sample.error or '')}", 1)
            for each in gpus
        ],
    )


def _present(gpus: list[_Shown]) -> Iterable[str]:
    """Present values, with the role that the GPU is in now."""
    for name, text, value in _GAUGES:
        yield gauge("gpu_" + name, text, [(each.now, value(each.present)) for each in gpus])
    yield gauge(
        "gpu_throttled",
        "Reasons for which clocks are held down at the moment.",
        [(f"{each.now},{labels(reason=reason)}", 1) for each in gpus for reason in each.present.throttled or ()],
    )
    yield gauge(
        "gpu_memory_peak_bytes",
        "Highest memory in use since the sidecar's start.",
        [(each.now, each.gpu.counters.memory_peak_bytes) for each in gpus],
    )
    yield gauge(
        "gpu_memory_recent_peak_bytes",
        "Highest memory in use in the last 60 s.",
        [(each.now, recent_peak(each.gpu, each.present)) for each in gpus],
    )


def _xids(gpus: list[_Shown]) -> Iterable[str]:
    yield counter(
        "gpu_xid_errors",
        "Xid events since the sidecar's start.",
        [
            (f'{each.plain},stage="{UNKNOWN}",xid="{code}"', count)
            for each in gpus
            for code, count in sorted(each.gpu.counters.xid_errors.items())[:_MAX_CODES]
        ],
    )
    yield gauge(
        "gpu_xid_last_timestamp_seconds",
        "Unix time of the last event of this Xid.",
        [
            (f'{each.plain},xid="{code}"', unix)
            for each in gpus
            for code, unix in sorted(each.gpu.xid_last_unix.items())[:_MAX_CODES]
        ],
    )


def _stages(gpus: list[_Shown], state: PodState) -> Iterable[str]:
    """What each GPU did in each stage."""
    counts: list[tuple[str, StageCount]] = []
    ends: dict[Pair, str] = {}
    for each in gpus:
        for pair, count in by_pair(state.stages.counts.get(each.gpu.sample.uuid, ())).items():
            if pair not in ends:
                ends[pair] = labels(role=pair[1], stage=pair[0])
            counts.append((f"{each.place},{ends[pair]}", count))
    for name, text, value in _STAGE_COUNTERS:
        yield counter("gpu_" + name, text, [(where, value(count)) for where, count in counts])
    peaks: list[Row] = [(where, count.memory_peak_bytes) for where, count in counts]
    yield gauge("gpu_stage_memory_peak_bytes", "Highest memory in use in a stage since the sidecar's start.", peaks)


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


def _answers(sample: GpuSample, state: PodState, now: float) -> bool:
    return sample.state is GpuState.OK and is_fresh(sample.taken_at, state, now)
