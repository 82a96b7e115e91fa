# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""SharedMemoryRisk: /dev/shm is likely to run out.

A container's /dev/shm has 64 MiB unless an emptyDir of medium Memory is mounted there. Loader workers, NCCL and Ray's
object store write into it, and a write past its end is a bus error (signal 7), not an exception
(vllm-project/vllm#789). Ray's store spills to disk on its own at 80% of its part, so that a large /dev/shm that is
three quarters full and stays so is well.
"""

from verl_gpumonitor.diagnosis.history import History, PodHistory
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, duration, finding, fit
from verl_gpumonitor.diagnosis.thresholds import SharedMemory, Thresholds
from verl_gpumonitor.model.figures import gib, percent
from verl_gpumonitor.model.findings import Evidence

REASON = "SharedMemoryRisk"
_SMALL = 2**30
"""A /dev/shm below this was not made for a job, and one more loader worker fills it."""


def shared_memory(history: History, thresholds: Thresholds, open_now: Open) -> Verdict:
    """Report each pod whose /dev/shm is nearly full, or will soon be."""
    cases = []
    for pod in history.pods.values():
        case = None if pod.ended else _at_risk(pod, thresholds.shared_memory, is_open=pod.name in open_now)
        cases += [case] if case is not None else []
    return cases


def _at_risk(pod: PodHistory, limits: SharedMemory, *, is_open: bool) -> Case | None:
    line = pod.last_host
    if line is None or line.shm_used_bytes is None or not line.shm_size_bytes:
        return None
    ratio = line.shm_used_bytes / line.shm_size_bytes
    small = line.shm_size_bytes < _SMALL
    near = (limits.small_near_ratio if small else limits.near_ratio) - (0.02 if is_open else 0.0)
    rising_from = limits.small_rising_from_ratio if small else limits.rising_from_ratio
    left = _seconds_left(pod, float(line.shm_size_bytes), limits, rising_from)
    if ratio < near and left is None:
        return None
    message = (
        f"Pod {pod.name}: /dev/shm holds {gib(line.shm_used_bytes)} of {gib(line.shm_size_bytes)} ({percent(ratio)})"
    )
    evidence: Evidence = {"shm_used_bytes": round(line.shm_used_bytes), "shm_size_bytes": round(line.shm_size_bytes)}
    if left is not None:
        evidence["seconds_left"] = round(left)
        message += f" and rises; full in about {duration(left)}"
    message += "; past its end a process dies of a bus error. Mount an emptyDir of medium Memory at /dev/shm"
    return Case(key=pod.name, finding=finding(REASON, message, pods=(pod.name,), evidence=evidence))


def _seconds_left(pod: PodHistory, size: float, limits: SharedMemory, rising_from: float) -> float | None:
    minutes = [value / size for _, value in pod.shm_buckets][:-1][-limits.rising_minutes :]
    if len(minutes) < limits.rising_minutes:
        return None
    line = fit(minutes)
    newest = max(minutes[-1], pod.shm_buckets[-1][1] / size)
    if line.slope <= 0 or line.correlation < limits.correlation or newest < rising_from:
        return None
    left = 60.0 * (1.0 - newest) / line.slope
    return max(0.0, left) if left <= limits.seconds_left else None


RULE = Rule(reason=REASON, judge=shared_memory, hold=lambda thresholds: thresholds.shared_memory.hold)
