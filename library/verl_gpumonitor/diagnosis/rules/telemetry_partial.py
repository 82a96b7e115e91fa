# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""TelemetryPartial: something is seen of a pod's GPUs, and not all that there should be.

Fewer GPUs than asked for, one of several that went silent or answers with an error, utilisation or memory that cannot
be read (MIG has no utilisation: NVIDIA/dcgm-exporter#353), a pod of which host values came and come no more. Signals
that not every GPU or driver offers, such as SM activity, process lists and titles, raise nothing, nor does a power that
MIG does not give.
"""

from verl_gpumonitor.diagnosis.history import GpuHistory, History, PodHistory
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, duration, finding, subject
from verl_gpumonitor.diagnosis.thresholds import Telemetry, Thresholds
from verl_gpumonitor.diagnosis.xids import LOST

from .telemetry_unavailable import blind, interval_of

REASON = "TelemetryPartial"


def telemetry_partial(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report, for each pod of which something is known, what is missing."""
    limits = thresholds.telemetry
    cases = []
    for pod in history.pods.values():
        if pod.ended or pod.phase == "Pending" or blind(history, pod, limits) is not None:
            continue
        if _silent(history, pod) > max(limits.silent_seconds / 4, 3 * interval_of(pod)):
            # It has just gone silent, and is not judged by what it said last.
            continue
        cases += _of_pod(history, pod, limits)
    return [*cases, *_sources_gone(history, limits)]


def _sources_gone(history: History, limits: Telemetry) -> list[Case]:
    """Report values of the host, and words of stages, that came and come no more while GPUs are still heard."""
    cases = []
    for pod in history.pods.values():
        host = pod.last_host
        if host is None or pod.ended or pod.last_gpu_t is None or history.t - pod.last_gpu_t > 30.0:
            continue
        if history.t - host.t >= 3 * limits.silent_seconds:
            text = f"Pod {pod.name}: values of its host memory came and come no more"
            cases.append(_case(pod, "host", text, [], {"missing": "host memory"}))
    step = history.usual_step_seconds()
    if history.told_t is None or step is None or history.over:
        return cases
    working = [gpu for gpu in history.gpus.values() if gpu.worked_t is not None and history.t - gpu.worked_t < 30.0]
    if working and history.t - history.told_t >= max(limits.stages_silent_seconds, 8 * step):
        pod = working[0].pod
        text = f"Nobody has told for {duration(history.t - history.told_t)} which stage runs, while GPUs go on working"
        cases.append(_case(pod, "stages", text, [], {"missing": "stages"}))
    return cases


def _silent(history: History, pod: PodHistory) -> float:
    return history.listened - history.heard.get(pod.name, history.listened)


def _of_pod(history: History, pod: PodHistory, limits: Telemetry) -> list[Case]:
    cases = []
    heard = [gpu for gpu in pod.gpus.values() if gpu.last is not None]
    missing = pod.gpus_requested - len(heard)
    first = min((gpu.first_t for gpu in heard if gpu.first_t is not None), default=None)
    if missing > 0 and first is not None and history.t - first >= limits.unreadable_seconds:
        text = f"Pod {pod.name} asked for {pod.gpus_requested} GPUs and only {len(heard)} of them are seen"
        cases.append(_case(pod, "missing", text, [], {"gpus_requested": pod.gpus_requested, "gpus_seen": len(heard)}))
    for what, gpus in _unreadable(history, heard, limits).items():
        if gpus:
            text = f"{subject(gpus)}: {what} cannot be read{_why(gpus)}"
            cases.append(_case(pod, what, text, gpus, {"missing": what, "gpus": len(gpus)}))
    return cases


def _unreadable(history: History, heard: list[GpuHistory], limits: Telemetry) -> dict[str, list[GpuHistory]]:
    lost = [gpu for gpu in heard if gpu.error is not None and gpu.error not in (*LOST, "NOT_SUPPORTED")]
    lost += [
        gpu
        for gpu in heard
        if gpu.error is None
        and gpu.last is not None
        and history.t - gpu.last.t >= max(limits.silent_seconds / 2, 6 * gpu.interval)
        and history.t - (gpu.pod.last_gpu_t or 0.0) < max(limits.silent_seconds / 4, 2 * gpu.interval)
    ]
    others = [gpu for gpu in heard if gpu not in lost and gpu.error not in LOST]
    return {
        "its answer": lost,
        "utilisation": [g for g in others if _stale(g, g.utilization_t, limits)],
        "memory": [g for g in others if _stale(g, g.memory_t, limits)],
    }


def _stale(gpu: GpuHistory, t: float | None, limits: Telemetry) -> bool:
    """Say whether lines come and this value has not been in them for a while."""
    assert gpu.last is not None and gpu.first_t is not None  # noqa: S101 - callers pass GPUs that were heard
    return gpu.last.t - (gpu.first_t if t is None else t) >= max(limits.unreadable_seconds, 3 * gpu.interval)


def _why(gpus: list[GpuHistory]) -> str:
    error = gpus[0].error
    if error is not None:
        return f", NVML says {error}"
    model = next((g.model for g in gpus if g.model), "") or ""
    return ", as MIG does not offer it" if "MIG" in model else ""


def _case(
    pod: PodHistory, key: str, text: str, gpus: list[GpuHistory], evidence: dict[str, str | int | float | list[float]]
) -> Case:
    return Case(key=f"{pod.name}/{key}", finding=finding(REASON, text, gpus=gpus, pods=(pod.name,), evidence=evidence))


RULE = Rule(reason=REASON, judge=telemetry_partial, hold=lambda thresholds: thresholds.telemetry.hold)
