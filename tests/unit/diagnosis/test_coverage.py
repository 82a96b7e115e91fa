# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a record could not show: each length that is told is the one from which on the rules do find it."""

from collections.abc import Iterator
from typing import Any

import pytest

from verl_gpumonitor.diagnosis.coverage import Coverage, coverage, least_steps
from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.diagnosis.rule import Cadence
from verl_gpumonitor.diagnosis.rulebook import RULES
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.findings import Evidence, Finding, Scope
from verl_gpumonitor.model.trace import (
    TRACE_FORMAT,
    GpuLine,
    Header,
    HostLine,
    MarkLine,
    Record,
    StepLine,
    TraceGpu,
    TracePod,
)
from verl_gpumonitor.model.vocabulary import Severity

GIB = 2**30


def header(gpus: int = 2) -> Header:
    found = [TraceGpu(uuid=f"GPU-{n}", index=n, memory_total_bytes=80 * GIB) for n in range(gpus)]
    return Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus=found)])


def samples(t: float, **values: Any) -> Iterator[GpuLine]:
    """GPU 0 does all, GPU 1 nothing."""
    for n, (load, used) in enumerate([(0.9, 78), (0.1, 20)]):
        known = {"utilization": load, "memory_used_bytes": used * GIB, "power_watts": 300.0, **values}
        yield GpuLine(t=t, pod="w", uuid=f"GPU-{n}", **known)


def untold(seconds: int) -> Iterator[Record]:
    for t in range(0, seconds + 1, 5):
        yield from samples(float(t))


def told(steps: int) -> Iterator[Record]:
    for step in range(steps):
        t = 40.0 * step
        yield MarkLine(t=t, pod="w", stage="update_actor", state="begin", step=step)
        for at in range(1, 39):
            yield from samples(t + at)
        yield MarkLine(t=t + 39, pod="w", stage="update_actor", state="end", step=step)
        yield StepLine(t=t + 39.5, step=step)


def judged(records: Iterator[Record], gpus: int = 2) -> tuple[set[str], Coverage]:
    """Reasons that were found, and what could not be."""
    diagnosis = Diagnosis(header(gpus))
    for record in records:
        diagnosis.feed(record)
    return {tracked.finding.reason for tracked in diagnosis.findings}, coverage(diagnosis.history)


def lacking(covered: Coverage) -> dict[str, str | None]:
    return {lack.reason: lack.needs for lack in covered.lacks}


@pytest.mark.parametrize(("reason", "seconds", "needs"), [("OOMRisk", 240, "4 min"), ("Imbalance", 360, "6 min")])
def test_a_length_that_is_told_is_the_one_that_finds(reason: str, seconds: int, needs: str) -> None:
    found, covered = judged(untold(seconds - 5))
    assert (reason in found, lacking(covered).get(reason)) == (False, needs)
    found, covered = judged(untold(seconds))
    assert (reason in found, reason in lacking(covered)) == (True, False)


def test_steps_that_are_told_are_those_that_find() -> None:
    found, covered = judged(told(2))
    assert ("Imbalance" in found, lacking(covered)["Imbalance"]) == (False, "3 steps")
    found, covered = judged(told(3))
    assert ("Imbalance" in found, "Imbalance" in lacking(covered)) == (True, False)
    assert lacking(covered)["MemoryGrowth"] == "8 steps"


def test_why_is_a_clause_with_both_lengths() -> None:
    _, covered = judged(untold(45))
    why = {lack.reason: lack.message for lack in covered.lacks}
    assert why["Imbalance"] == "needs 6 min where no stages are told, and 45 s are recorded"
    _, covered = judged(told(1))
    assert {lack.reason: lack.message for lack in covered.lacks}["Imbalance"] == (
        "needs 3 whole steps, and 1 whole step is recorded"
    )


def test_what_nobody_tells_is_not_judged_however_long_it_is() -> None:
    without = (line for t in range(0, 2000, 5) for line in samples(float(t), memory_used_bytes=None, power_watts=None))
    _, covered = judged(without)
    assert {reason for reason, needs in lacking(covered).items() if needs is None} == {
        *("OOMRisk", "MemoryGrowth", "RolloutMemoryNotReleased", "Hang", "Throttled", "ForeignProcess"),
        *("HostMemoryRisk", "SharedMemoryRisk"),
    }
    assert "Imbalance" not in lacking(covered)


@pytest.mark.parametrize(
    ("used", "limit", "why"),
    [
        pytest.param(None, 64 * GIB, "nobody tells the pods' host memory", id="a limit, and not what is in use"),
        pytest.param(GIB, None, "nobody tells a limit of the pods' host memory", id="in use, and no limit"),
        pytest.param(GIB, 64 * GIB, None, id="both"),
    ],
)
def test_host_memory_is_judged_against_a_limit(used: int | None, limit: int | None, why: str | None) -> None:
    _, covered = judged(iter([HostLine(t=1.0, pod="w", memory_used_bytes=used, memory_limit_bytes=limit)]))
    assert {lack.reason: lack.message for lack in covered.lacks}.get("HostMemoryRisk") == why


def test_one_gpu_has_no_peers_to_miss() -> None:
    alone = (line for line in untold(60) if isinstance(line, GpuLine) and line.uuid == "GPU-0")
    _, covered = judged(alone, gpus=1)
    assert "Imbalance" not in lacking(covered)


def finding(reason: str, *, stage: str | None = "update_actor", evidence: Evidence | None = None) -> Finding:
    return Finding(
        reason=reason, severity=Severity.WARNING, scope=Scope(stage=stage), message="", evidence=evidence or {}
    )


@pytest.mark.parametrize(
    ("case", "steps", "could"),
    [
        pytest.param(finding("OOMRisk", evidence={"cause": "near"}), 2, True, id="two steps show a level"),
        pytest.param(finding("OOMRisk", evidence={"cause": "rising"}), 4, False, id="four show no rise"),
        pytest.param(finding("OOMRisk", evidence={"cause": "rising"}), 5, True, id="five show one"),
        pytest.param(finding("OOMRisk", stage="gen", evidence={"cause": "rising"}), 5, False, id="not of an engine"),
        pytest.param(finding("Imbalance", stage="gen", evidence={"metric": "utilization"}), 4, False, id="noise"),
        pytest.param(finding("Imbalance", stage="gen", evidence={"metric": "memory"}), 3, True, id="memory does not"),
        pytest.param(finding("GPUFault", stage=None), 0, True, id="events need no steps"),
    ],
)
def test_a_finding_of_another_record_needs_what_its_kind_needs(case: Finding, steps: int, could: bool) -> None:
    covered = Coverage(steps=steps, stages_told=True, stage_steps={"update_actor": steps, "gen": steps})
    assert (covered.why_not(case) is None) == could


def test_a_stage_seen_in_fewer_steps_is_judged_by_those() -> None:
    covered = Coverage(steps=20, stages_told=True, stage_steps={"testing": 2})
    assert covered.why_not(finding("Imbalance", stage="testing")) is not None
    assert covered.why_not(finding("Imbalance", stage="update_critic")) is None, (
        "a stage that is no more has no problem"
    )


def test_every_rule_of_steps_says_how_many() -> None:
    """A rule that is added, and waits for steps, must be in the table."""
    waiting = {rule.reason for rule in RULES if rule.cadence is Cadence.STEP}
    assert waiting <= set(least_steps(Thresholds(), stages_told=True)) <= set(REASONS)
