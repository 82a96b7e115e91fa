# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""TelemetryUnavailable: of a pod that asked for GPUs, nothing can be read.

Either NVML itself answers with an error there, or the pod runs and no line of its GPUs comes, or lines come with
neither utilisation nor memory. A pod without GPUs is not judged, whatever its NVML says: CUDA images set
NVIDIA_VISIBLE_DEVICES in heads that have none. A hole in the whole record is no fault of one pod, so that silence is
counted only while others are heard. Source: NVIDIA/nvidia-container-toolkit#48 (a daemon-reload takes containers'
GPUs away).
"""

from verl_gpumonitor.diagnosis.history import History, PodHistory
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, duration, finding
from verl_gpumonitor.diagnosis.thresholds import Telemetry, Thresholds

REASON = "TelemetryUnavailable"


def telemetry_unavailable(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report each pod with GPUs of which nothing is known."""
    cases = []
    for pod in history.pods.values():
        why = blind(history, pod, thresholds.telemetry)
        if why is not None:
            cases.append(Case(key=pod.name, finding=finding(REASON, why, pods=(pod.name,), evidence=_evidence(pod))))
    return cases


def blind(history: History, pod: PodHistory, limits: Telemetry) -> str | None:
    """Say in a sentence why nothing is known of a pod's GPUs; None if something is, or need not be."""
    if not pod.gpus_requested or pod.ended or pod.phase == "Pending":
        return None
    if pod.library_error is not None and (pod.last_gpu_t is None or pod.last_gpu_t <= pod.library_error_t + 1.0):
        return f"Pod {pod.name}: NVML answers {pod.library_error}, so that its {pod.gpus_requested} GPUs cannot be seen"
    if pod.last_gpu_t is None:
        running = history.listened if pod.phase == "Running" or pod.phase is None else 0.0
        if running < limits.never_seconds:
            return None
        return f"Pod {pod.name} asked for {pod.gpus_requested} GPUs and none of them has been heard of"
    silent = history.listened - history.heard.get(pod.name, 0.0)
    if silent >= max(limits.silent_seconds, 6 * interval_of(pod)):
        return f"Pod {pod.name}: nothing has come of its GPUs for {duration(silent)}"
    if all(gpu.last is not None for gpu in pod.gpus.values()) and _unreadable(pod, limits):
        return f"Pod {pod.name}: its GPUs answer, but neither utilisation nor memory can be read"
    return None


def interval_of(pod: PodHistory) -> float:
    """Return the usual seconds between two lines of a pod's GPUs, of the slowest."""
    return max((gpu.interval for gpu in pod.gpus.values()), default=2.0)


def _unreadable(pod: PodHistory, limits: Telemetry) -> bool:
    """Say whether lines come and nothing is in them. Where none come it is silence, which has a time of its own."""
    newest = max((gpu.last.t for gpu in pod.gpus.values() if gpu.last is not None), default=0.0)

    def known(t: float | None, since: float | None) -> bool:
        last = t if t is not None else since
        return last is not None and newest - last < limits.unreadable_seconds

    return bool(pod.gpus) and not any(
        known(gpu.utilization_t, gpu.first_t) or known(gpu.memory_t, gpu.first_t) for gpu in pod.gpus.values()
    )


def _evidence(pod: PodHistory) -> dict[str, str | int | float | list[float]]:
    evidence: dict[str, str | int | float | list[float]] = {"gpus_requested": pod.gpus_requested}
    if pod.library_error is not None:
        evidence["nvml_error"] = pod.library_error
    return evidence


RULE = Rule(reason=REASON, judge=telemetry_unavailable, hold=lambda thresholds: thresholds.telemetry.hold)
