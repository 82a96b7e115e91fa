# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From windows of GPUs to findings: one rule a file, an engine with hysteresis. Pure: no I/O, no clock."""

from verl_gpumonitor.model.findings import Finding, GpuWindow, TrackedFinding

from .engine import DiagnosisState, Judgement, diagnose, judge, resume
from .health import REASONS, health_text, highest
from .limits import DiagnosisLimits, ImbalanceLimits, OomRiskLimits

__all__ = [
    "REASONS",
    "DiagnosisLimits",
    "DiagnosisState",
    "Finding",
    "GpuWindow",
    "ImbalanceLimits",
    "Judgement",
    "OomRiskLimits",
    "TrackedFinding",
    "diagnose",
    "health_text",
    "highest",
    "judge",
    "resume",
]
