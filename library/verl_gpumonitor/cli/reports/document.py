# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A report for programs: what a page is made of, as JSON (`gpumonitor-report/1`, public). What is unknown is null."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from verl_gpumonitor.cli import monitor_findings
from verl_gpumonitor.cli.findings import finding_json, lacks_json, ordered
from verl_gpumonitor.cli.monitors import GPUMonitor, WorstGpu
from verl_gpumonitor.diagnosis.health import OK
from verl_gpumonitor.diagnosis.health import UNKNOWN as NOT_KNOWN
from verl_gpumonitor.model.vocabulary import UNKNOWN

from . import monitor_page
from .gather import GpuRun, Run, StageRow
from .page import quality, verdict_text

REPORT_FORMAT: Final = "gpumonitor-report/1"


def document(run: Run) -> bytes:
    """Return the report of a run."""
    workload, whole = run.header.workload, run.whole
    return _encoded(
        {
            "format": REPORT_FORMAT,
            "workload": {
                "kind": workload.kind if workload else None,
                "namespace": workload.namespace if workload else None,
                "name": workload.name if workload else None,
            },
            "verdict": {"health": run.verdict, "healthy": run.healthy, "text": verdict_text(run)},
            "part": None if run.part is None else {"begin": round(run.begin, 3), "end": round(run.end, 3)},
            "seconds": round(run.seconds, 3),
            "steps": run.steps if run.coverage.stages_told else None,
            "seconds_per_step": run.step_seconds,
            "gpu_seconds": run.gpu_hours * 3600,
            "utilization": whole.utilization,
            "memory_peak_ratio": run.memory_peak_ratio,
            "headroom_bytes": run.headroom_bytes,
            "power_watts": whole.energy_joules / whole.powered_seconds if whole.powered_seconds else None,
            "stages": [_stage(row) for row in run.stages],
            "gpus": [_gpu(gpu) for gpu in run.gpus],
            "findings": [finding_json(tracked) for tracked in ordered(run.findings)],
            "not_judged": lacks_json(run.coverage.lacks),
            "quality": quality(run),
        }
    )


def _stage(row: StageRow) -> dict[str, Any]:
    known = msgspec.structs.asdict(row)
    return {**known, "role": None if row.role == UNKNOWN else row.role}


def _gpu(gpu: GpuRun) -> dict[str, Any]:
    whole = gpu.whole
    return {
        "pod": gpu.pod,
        "uuid": gpu.uuid,
        "index": gpu.index,
        "model": gpu.model,
        "utilization": whole.utilization,
        "memory_peak_bytes": whole.memory_high_bytes,
        "memory_total_bytes": gpu.memory_total_bytes,
        "memory_peak_ratio": gpu.memory_peak_ratio,
        "temperature_celsius": whole.temperature_celsius,
        "power_watts": whole.energy_joules / whole.powered_seconds if whole.powered_seconds else None,
        "reasons": list(gpu.reasons),
    }


def document_of_monitor(monitor: GPUMonitor) -> bytes:
    """Return the same of a GPUMonitor, as far as a status knows it; its GPUs are those that need a look first."""
    ref, status = monitor.spec.workload_ref, monitor.status
    totals = status.totals
    seconds, joules, busy = totals.gpu_seconds, totals.energy_joules, totals.busy_seconds
    health = status.health or NOT_KNOWN
    return _encoded(
        {
            "format": REPORT_FORMAT,
            "workload": {
                "kind": ref.kind or None,
                "namespace": monitor.metadata.namespace or None,
                "name": ref.name or monitor.metadata.name or None,
            },
            "verdict": {"health": health, "healthy": health == OK, "text": monitor_findings.verdict_text(monitor)},
            "part": None,
            "seconds": None,
            "steps": status.step,
            "seconds_per_step": status.seconds_per_step,
            "gpu_seconds": seconds,
            "utilization": busy / seconds if seconds and busy is not None else None,
            "memory_peak_ratio": status.memory.peak_ratio,
            "headroom_bytes": None,
            "power_watts": joules / seconds if seconds and joules else None,
            "stages": [_stage(row) for row in monitor_page.stage_rows(monitor)],
            "gpus": _worst(status.worst_gpus, monitor),
            "findings": monitor_findings.findings_json(monitor),
            "not_judged": monitor_findings.lacks_json(monitor),
            "quality": monitor_page.quality(monitor),
        }
    )


def _worst(gpus: Sequence[WorstGpu], monitor: GPUMonitor) -> list[dict[str, Any]]:
    return [
        {
            "pod": gpu.pod,
            "uuid": gpu.uuid or None,
            "index": gpu.index,
            "model": gpu.model,
            "utilization": gpu.utilization,
            "memory_peak_bytes": gpu.memory_peak_bytes,
            "memory_total_bytes": gpu.memory_total_bytes,
            "memory_peak_ratio": (
                gpu.memory_peak_bytes / gpu.memory_total_bytes
                if gpu.memory_peak_bytes is not None and gpu.memory_total_bytes
                else None
            ),
            "temperature_celsius": gpu.temperature_celsius,
            "power_watts": gpu.power_watts,
            "reasons": list(
                dict.fromkeys(one.reason for one in monitor.status.findings if gpu.uuid and gpu.uuid in one.gpus)
            ),
        }
        for gpu in gpus
    ]


def _encoded(found: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
