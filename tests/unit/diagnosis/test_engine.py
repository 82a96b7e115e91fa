# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Findings over their life."""

from collections.abc import Sequence

from verl_gpumonitor.diagnosis import DiagnosisLimits, DiagnosisState, GpuWindow, Judgement, judge, resume

from .test_rules import HOT, windows

LIMITS = DiagnosisLimits()
BAD = windows(HOT, (0.12, 20), (0.10, 18), (0.11, 19))
GOOD = windows((0.65, 40), (0.63, 38), (0.62, 37), (0.60, 36))


def run(
    state: DiagnosisState, steps: Sequence[tuple[float, Sequence[GpuWindow]]]
) -> tuple[DiagnosisState, list[Judgement]]:
    judgements = []
    for t, gpus in steps:
        judgements.append(judge(state, gpus, t=t, limits=LIMITS))
        state = judgements[-1].state
    return state, judgements


def reasons(judgements: list[Judgement], what: str) -> list[str]:
    return sorted(tracked.finding.reason for judgement in judgements for tracked in getattr(judgement, what))


def test_a_problem_is_raised_once_and_resolved_once() -> None:
    steps = [*[(t, BAD) for t in range(0, 600, 15)], *[(t, GOOD) for t in range(600, 900, 15)]]
    state, judgements = run(DiagnosisState(), steps)
    assert reasons(judgements, "raised") == ["Imbalance", "Imbalance", "OOMRisk"]
    assert reasons(judgements, "resolved") == ["Imbalance", "Imbalance", "OOMRisk"]
    assert state.open == []
    assert state.tracks == {}


def test_times_of_a_finding() -> None:
    state, _ = run(DiagnosisState(), [(t, BAD) for t in range(0, 120, 15)])
    tracked = state.open[0]
    assert (tracked.first_seen, tracked.last_seen, tracked.resolved) == (30, 105, None)
    state, judgements = run(state, [(t, GOOD) for t in range(120, 240, 15)])
    resolved = [tracked for judgement in judgements for tracked in judgement.resolved]
    assert {(t.first_seen, t.last_seen, t.resolved) for t in resolved} == {(30, 105, 180)}


def test_a_spike_raises_nothing() -> None:
    _, judgements = run(DiagnosisState(), [(0, BAD), (15, BAD), (20, GOOD), (35, BAD), (50, GOOD)])
    assert reasons(judgements, "raised") == []


def test_two_pools_have_their_own_findings() -> None:
    both = [*BAD, *windows(HOT, (0.1, 20), (0.1, 18), (0.1, 19), pod="c-0", pool="critics")]
    _, judgements = run(DiagnosisState(), [(0, both), (30, both)])
    assert reasons(judgements, "raised").count("OOMRisk") == 2


def test_missing_values_neither_resolve_nor_raise() -> None:
    unknown = windows(*[(None, None)] * 4)
    state, _ = run(DiagnosisState(), [(0, BAD), (30, BAD)])
    state, judgements = run(state, [(t, unknown) for t in range(45, 300, 15)])
    assert reasons(judgements, "resolved") == []
    assert len(state.open) == 3
    state, judgements = run(state, [(330, [])])
    assert len(judgements[0].resolved) == 3, "after five minutes nobody can claim that it still holds"


def test_a_restart_raises_nothing_again() -> None:
    state = resume({"OOMRisk": "as it was", "Imbalance": "as it was", "Nonsense": ""}, t=0)
    assert sorted(tracked.finding.reason for tracked in state.open) == ["Imbalance", "OOMRisk"]
    state, judgements = run(state, [(5, []), (20, BAD), (35, BAD), (50, BAD)])
    assert reasons(judgements, "raised") == []
    assert reasons(judgements, "resolved") == []
    assert sorted(tracked.finding.reason for tracked in state.open) == ["Imbalance", "Imbalance", "OOMRisk"]
    assert all("GPU 0 of pod w-0" in tracked.finding.message for tracked in state.open)


def test_what_ended_during_a_restart_is_resolved() -> None:
    state = resume({"OOMRisk": "as it was"}, t=0)
    state, judgements = run(state, [(t, GOOD) for t in range(0, 120, 15)])
    assert reasons(judgements, "resolved") == ["OOMRisk"]
    assert state.open == []


def test_memory_that_stays_at_90_percent_for_two_hours_never_alarms() -> None:
    """Engines preallocate (vllm#235)."""
    full = windows(*[(0.9, 72)] * 8)
    state, judgements = run(DiagnosisState(), [(t, full) for t in range(0, 7200, 15)])
    assert reasons(judgements, "raised") == []
    assert state.tracks == {}


def test_load_that_alternates_by_stage_never_alarms() -> None:
    """97% in training and 47% in rollout, and pods that report a moment apart (verl#2181)."""
    steps = []
    for t in range(0, 3600, 5):
        first, second = (0.97 if (t - shift) // 60 % 2 else 0.47 for shift in (0, 15))
        gpus = [*windows(*[(first, 40)] * 4), *windows(*[(second, 40)] * 4, pod="w-1")]
        steps.append((float(t), gpus))
    _, judgements = run(DiagnosisState(), steps)
    assert reasons(judgements, "raised") == []
