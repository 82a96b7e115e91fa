# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""HostMemoryRisk: a pod's host memory is likely to reach its limit.

Offloaded weights, the driver's batches and loader workers live in the pod's cgroup, and at its limit the kernel kills
(verl-project/verl#2950). It is a risk very near the limit, or when the highest values of successive minutes rise to
meet it soon; loading at the start rises as well, so that a rise counts only after the first step, or where no step is
told after ten minutes. The working set contains file cache that was read lately: where the processes and /dev/shm
together once made up most of it and now hold a much smaller part, the rest is cache, and the kernel drops it before it
kills. A list that never did is a short one, as that of a head which names the driver alone, and proves nothing. A
container that was `OOMKilled` proves it, also without any sign before; our own container is not the job's.
"""

import math
from collections.abc import Sequence
from typing import Final

from verl_gpumonitor.diagnosis.history import History, PodHistory
from verl_gpumonitor.diagnosis.minutes import BUCKET_SECONDS
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Unjudged, Verdict, duration, finding, fit
from verl_gpumonitor.diagnosis.thresholds import HostMemory, Thresholds
from verl_gpumonitor.model.figures import gib, percent
from verl_gpumonitor.model.findings import Evidence
from verl_gpumonitor.model.vocabulary import Severity

REASON = "HostMemoryRisk"
OWN_CONTAINER: Final = "gpumonitor"
_SETTLED_SECONDS = 600.0
_RSS_SECONDS = 180.0
_LISTED: Final = 0.5
"""A list that never made up so much of what is in use is a short one."""
_LESS_LISTED: Final = 0.15
"""So much smaller must its part have become: what is never listed stays, cache comes."""
_STEPS: Final = 6
"""Whole steps that must show a rise of their highest values."""


def host_memory(history: History, thresholds: Thresholds, open_now: Open) -> Verdict:
    """Report each pod whose host memory is at risk, or was exceeded."""
    cases: list[Case | Unjudged] = []
    for pod in history.pods.values():
        if any(line.reason == "OOMKilled" and line.container != OWN_CONTAINER for line in pod.ends):
            cases.append(_killed(pod))
        elif history.over or pod.ended:
            continue
        elif pod.last_host is not None and pod.last_host.memory_used_bytes is None:
            cases.append(Unjudged(pod.name))
        else:
            case = _at_risk(history, pod, thresholds.host_memory, is_open=pod.name in open_now)
            cases += [case] if case is not None else []
    return cases


def _killed(pod: PodHistory) -> Case:
    container = next(line.container for line in reversed(pod.ends) if line.reason == "OOMKilled")
    evidence: Evidence = {"killed": 1, **_sizes(pod)}
    message = (
        f"Container {container} of pod {pod.name} was killed because the pod reached its host memory limit"
        f"{_of_limit(pod)}; give it more memory, or keep less there (offload, loader workers, batches in the driver)"
    )
    return Case(
        key=pod.name,
        finding=finding(REASON, message, pods=(pod.name,), evidence=evidence, severity=Severity.CRITICAL),
        since=float("-inf"),
    )


def _of_limit(pod: PodHistory) -> str:
    limit = limit_of(pod)
    return "" if limit is None else f" of {gib(limit)}"


def limit_of(pod: PodHistory) -> float | None:
    """Return what its memory may come to, bytes; None where it has no limit, or nobody tells it."""
    line = pod.last_host
    said = None if line is None else line.memory_limit_bytes
    return said or pod.memory_limit_bytes


def _sizes(pod: PodHistory) -> Evidence:
    sizes: Evidence = {}
    limit, line = limit_of(pod), pod.last_host
    if limit is not None:
        sizes["host_limit_bytes"] = round(limit)
    if line is not None and line.memory_used_bytes is not None:
        sizes["host_used_bytes"] = round(line.memory_used_bytes)
    if line is not None and line.shm_used_bytes is not None:
        sizes["shm_used_bytes"] = round(line.shm_used_bytes)
    sizes["gpus_requested"] = pod.gpus_requested
    return sizes


def _at_risk(history: History, pod: PodHistory, limits: HostMemory, *, is_open: bool) -> Case | None:
    limit, line = limit_of(pod), pod.last_host
    if limit is None or line is None or line.memory_used_bytes is None or not pod.host_buckets:
        return None
    ratio = line.memory_used_bytes / limit
    if _mostly_cache(pod, limits):
        return None
    left = _seconds_left(history, pod, limit, limits)
    near = ratio >= limits.near_ratio - (0.01 if is_open else 0.0) or _fast(pod, ratio, limits)
    if not near and left is None:
        return None
    used, up_to = float(line.memory_used_bytes), ""
    highest = max(value for _, value in [*pod.host_buckets][-limits.rising_minutes :])
    if left is not None and highest > 1.02 * used:
        # What meets the limit is the highest of a step, whatever is in use at this moment.
        used, up_to = highest, "up to "
    evidence: Evidence = {**_sizes(pod), "host_used_bytes": round(used)}
    evidence["missing_bytes"] = max(0, round(used - 0.9 * limit))
    message = f"Pod {pod.name} uses {up_to}{gib(used)} of its {gib(limit)} of host memory ({percent(used / limit)})"
    if left is not None:
        evidence["seconds_left"] = round(left)
        message += f" and rises; full in about {duration(left)}"
    severity = Severity.CRITICAL if ratio >= limits.critical_ratio else Severity.WARNING
    found = finding(REASON, message, pods=(pod.name,), evidence=evidence, severity=severity)
    return Case(key=pod.name, finding=found)


def _seconds_left(history: History, pod: PodHistory, limit: float, limits: HostMemory) -> float | None:
    """Return when the rise meets the limit; None if there is no steady rise that meets it soon.

    Offloads and checkpoints fill and free host memory in each step: where the minutes go up and down with it, the
    highest values of whole steps are looked at.
    """
    settled = history.step >= 1 if history.stages_told else history.t - (pod.first_host_t or 0.0) >= _SETTLED_SECONDS
    if not settled:
        return None
    # The newest minute is not over, and its highest value may yet come.
    minutes = [value / limit for _, value in pod.host_buckets]
    highest = minutes[-1]
    left = _meets(minutes[:-1][-limits.rising_minutes :], highest, limits, least=limits.rising_minutes)
    step = math.ceil((history.usual_step_seconds() or 0.0) / BUCKET_SECONDS)
    if left is None and step > 1:
        whole = [max(minutes[place - step : place]) for place in range(len(minutes) - 1, step - 1, -step)][::-1]
        steps = _meets(whole, highest, limits, least=_STEPS)
        left = None if steps is None else steps * step
    seconds = None if left is None else left * BUCKET_SECONDS
    return seconds if seconds is not None and seconds <= limits.seconds_left else None


def _meets(values: Sequence[float], highest: float, limits: HostMemory, *, least: int) -> float | None:
    """Return after how many more of them the line through these shares of the limit meets it; None if there is none."""
    if len(values) < least:
        return None
    line = fit(values)
    newest = max(values[-1], highest)
    if line.correlation < limits.correlation or line.slope <= 0 or newest < limits.rising_from_ratio:
        return None
    slope = min(line.slope, (values[-1] - values[-4]) / 3)
    return max(0.0, (1.0 - newest) / slope) if slope > 0 else None


def _fast(pod: PodHistory, ratio: float, limits: HostMemory) -> bool:
    """Say whether a pod that is nearly full will be full within moments."""
    if ratio < limits.fast_from_ratio or pod.host_slope is None or pod.host_slope <= 0:
        return False
    limit = limit_of(pod) or 1.0
    return (1.0 - ratio) * limit / pod.host_slope <= limits.fast_seconds_left


def _mostly_cache(pod: PodHistory, limits: HostMemory) -> bool:
    """Say whether a good part of a full pod is file cache, as far as its processes are known to be listed."""
    line = pod.last_host
    if line is None or pod.rss is None or line.t - pod.rss[0] > _RSS_SECONDS or not line.memory_used_bytes:
        return False
    listed = (pod.rss[1] + float(line.shm_used_bytes or 0)) / line.memory_used_bytes
    once = pod.listed_ratio >= _LISTED and listed <= pod.listed_ratio - _LESS_LISTED
    return once and listed < limits.cache_ratio


RULE = Rule(reason=REASON, judge=host_memory, hold=lambda thresholds: thresholds.host_memory.hold, after_end=True)
