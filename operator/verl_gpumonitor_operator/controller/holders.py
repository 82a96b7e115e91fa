# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who holds GPUs, by the reports: processes for the rules, what engines held, and what cannot be told without. Pure."""

from collections.abc import Iterable, Mapping
from sys import intern
from typing import Final

from verl_gpumonitor.diagnosis.reported import ReportedHistory
from verl_gpumonitor.model.report import GpuProcesses, Report, StageQuality, StepReport
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.trace import GpuProcess

EXACT: Final = frozenset((StageSource.MARKS, StageSource.TITLES, StageSource.RAY_STATE))
"""Sources that tell a list's stage: others are right to some seconds, and an engine falls asleep in one."""
EXACT_SECONDS: Final = 2.0
NOT_LISTED: Final = "NoProcessLists"
_HOW: Final = (
    "the pod must share its process namespace (spec.shareProcessNamespace) and the driver be 565 or later; without, "
    "only memory from before the job can be seen"
)


def holders_of(report: Report) -> Mapping[str, list[GpuProcess]]:
    """Return UUID -> processes of the GPUs whose lists are told."""
    return {
        report.gpus[listed.gpu].uuid: [
            GpuProcess(
                pid=process.pid,
                title=intern(process.program) if process.program else None,
                memory_used_bytes=process.memory_used_bytes,
            )
            for process in listed.processes
        ]
        for listed in report.gpu_processes
        if listed.gpu < len(report.gpus) and _told(listed)
    }


def _told(listed: GpuProcesses) -> bool:
    """Say whether a list says anything: one whose sizes are all missing is no list."""
    return not listed.processes or any(process.memory_used_bytes is not None for process in listed.processes)


def engines_of(step: StepReport, report: Report) -> Iterable[tuple[str, str, float]]:
    """Yield what engines held in a step (UUID, stage, bytes), where its stages are known exactly enough."""
    if not _exact(report.stage_quality):
        return
    for stage in step.stages:
        for engine in stage.engines:
            if engine.gpu < len(report.gpus):
                yield report.gpus[engine.gpu].uuid, stage.stage, float(engine.memory_used_bytes)


def _exact(quality: StageQuality) -> bool:
    seconds = quality.resolution_seconds
    return quality.source in EXACT and (seconds is None or seconds <= EXACT_SECONDS)


def unlisted(history: ReportedHistory) -> tuple[str, str] | None:
    """Return reason and message where processes of the followed GPUs are not listed; None where all are."""
    missing = sum(gpu.processes_t is None for gpu in history.gpus.values())
    if not missing and history.gpus:
        return None
    if missing == len(history.gpus):
        return NOT_LISTED, f"The reports do not list processes: {_HOW}."
    return NOT_LISTED, f"Processes are listed on {len(history.gpus) - missing} of {len(history.gpus)} GPUs: {_HOW}."
