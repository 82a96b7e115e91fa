# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What can be said of a record that is too short for the rules: they wait for several steps, or minutes. Pure.

Who logs one minute wants an answer. Where nobody tells stages, the GPUs' means over all of a short record are compared
by the simple rules, which need no steps. Where even that is too little, it is said: silence is no health.
"""

from collections.abc import Iterable
from typing import Final

from verl_gpumonitor.diagnosis import DiagnosisLimits, GpuWindow
from verl_gpumonitor.diagnosis import diagnose as compared
from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.thresholds import Imbalance
from verl_gpumonitor.model.findings import TrackedFinding
from verl_gpumonitor.model.history import Piece

from .times import clock

STEPS: Final = Imbalance().steps
"""Steps, or windows that stand for them, from which on GPUs are compared by the rules."""
LOOKED_FOR: Final = frozenset(("Imbalance", "OOMRisk"))
"""Reasons of the simple rules."""
LEAST_SECONDS: Final = DiagnosisLimits().imbalance.raise_seconds
"""A shorter record says nothing: what differs for so long may be chance."""


def first_look(diagnosis: Diagnosis) -> list[TrackedFinding]:
    """Return what the simple rules find in a record that is long enough for them and too short for the others."""
    history = diagnosis.history
    if history.stages_told or history.step >= STEPS or history.listened < LEAST_SECONDS:
        return []
    known = {(tracked.finding.reason, tracked.finding.evidence.get("metric")) for tracked in diagnosis.findings}
    found = compared([_window(gpu) for gpu in history.gpus.values()], DiagnosisLimits())
    return [
        TrackedFinding(finding=finding, first_seen=history.t, last_seen=history.t)
        for finding in found
        if (finding.reason, finding.evidence.get("metric")) not in known
    ]


def _window(gpu: GpuHistory) -> GpuWindow:
    pieces = list(_pieces(gpu))
    known = sum(piece.known_seconds for piece in pieces)
    return GpuWindow(
        pod=gpu.pod.name,
        uuid=gpu.uuid,
        index=gpu.index,
        pool=gpu.pool,
        utilization=sum(piece.busy_seconds for piece in pieces) / known if known > 0 else None,
        memory_peak_bytes=None if gpu.memory_t is None else round(gpu.highest_bytes),
        memory_total_bytes=round(gpu.total_bytes) if gpu.total_bytes else None,
    )


def _pieces(gpu: GpuHistory) -> Iterable[Piece]:
    yield from gpu.now.values()
    for stage in gpu.past:
        yield from gpu.pieces(stage)


def unjudged(history: History) -> str | None:
    """Say why nothing can be found in a record; None where something can."""
    if history.stages_told:
        if history.step >= STEPS:
            return None
        many = "1 whole step" if history.step == 1 else f"{history.step} whole steps"
        return f"the record has {many}, and GPUs are compared from {STEPS} on"
    if history.listened < LEAST_SECONDS:
        return f"{clock(history.listened)} was recorded, and GPUs are compared from {clock(LEAST_SECONDS)} on"
    return None


def only_looked(history: History) -> str | None:
    """Say that a record was too short for more than a first look; None where it was not, or not even for that."""
    if history.stages_told or history.step >= STEPS or history.listened < LEAST_SECONDS:
        return None
    return f"{clock(history.listened)} was recorded: a first look was taken at the GPUs' means over all of it"


def silence(history: History) -> str:
    """Return what is to be said where nothing was found."""
    why = unjudged(history)
    if why is not None:
        return f"Nothing can be said yet: {why}."
    return "Nothing was found." if only_looked(history) is None else "A first look found nothing."
