# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The engine: a problem's life, what explains what, and that it needs no more than what it was fed."""

from collections.abc import Callable, Iterable

import pytest

from verl_gpumonitor.diagnosis.doctor import COOL_DOWN_SECONDS, Diagnosis
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.diagnosis.hysteresis import Holds
from verl_gpumonitor.diagnosis.rule import Cadence, Case, Open, Rule, Verdict, finding
from verl_gpumonitor.diagnosis.rulebook import RULES
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.trace import (
    TRACE_FORMAT,
    GpuLine,
    Header,
    JobLine,
    NvmlLine,
    Record,
    StepLine,
    TraceGpu,
    TracePod,
    XidLine,
)

GPU = TraceGpu(uuid="GPU-0", index=0, memory_total_bytes=80 * 2**30, power_limit_watts=400)
HEADER = Header(format=TRACE_FORMAT, pods=[TracePod(name="w", group="workers", gpus_requested=1, gpus=[GPU])])


def _rule(
    holds: Callable[[float], bool | None],
    *,
    reason: str = "Imbalance",
    raise_seconds: float = 0.0,
    clear_seconds: float = 0.0,
    cadence: Cadence = Cadence.TICK,
) -> Rule:
    def judge(history: History, _: Thresholds, __: Open) -> Verdict:
        now = holds(history.t)
        if now is None:
            return None
        gpus = history.gpus.values()
        return [Case(key="k", finding=finding(reason, f"at {history.t:g}", gpus=gpus))] if now else []

    hold = Holds(raise_seconds=raise_seconds, clear_seconds=clear_seconds)
    return Rule(reason=reason, judge=judge, cadence=cadence, hold=lambda _: hold)


def _fed(rules: Iterable[Rule], times: Iterable[float]) -> Diagnosis:
    diagnosis = Diagnosis(HEADER, rules=rules)
    for t in times:
        diagnosis.feed(GpuLine(t=t, pod="w", uuid="GPU-0", utilization=0.5))
    return diagnosis


@pytest.mark.parametrize(
    ("holds", "life"),
    [
        pytest.param(lambda t: t >= 100, [(130.0, None)], id="raised when it has held for long enough"),
        pytest.param(lambda t: 100 <= t < 120, [], id="a short moment raises nothing"),
        pytest.param(lambda t: 100 <= t < 200, [(130.0, 220.0)], id="over when it has been away for long enough"),
        pytest.param(lambda t: t >= 100 and not 200 <= t < 210, [(130.0, None)], id="a short pause ends nothing"),
        pytest.param(lambda t: None if t > 200 else t >= 100, [(130.0, None)], id="open while nobody can judge"),
    ],
)
def test_a_problem_is_raised_and_ends_with_hysteresis(
    holds: Callable[[float], bool | None], life: list[tuple[float, float | None]]
) -> None:
    diagnosis = _fed([_rule(holds, raise_seconds=30, clear_seconds=20)], range(0, 400, 2))
    assert [(f.first_seen, f.resolved) for f in diagnosis.findings] == life


def test_a_short_moment_after_the_end_changes_nothing_of_what_is_over() -> None:
    rule = _rule(lambda t: 100 <= t < 200 or 300 <= t < 310, raise_seconds=30, clear_seconds=20)
    (tracked,) = _fed([rule], range(0, 400, 2)).findings
    assert (tracked.first_seen, tracked.last_seen, tracked.resolved) == (130.0, 198.0, 220.0)


def test_problems_that_are_raised_at_once_are_found_in_the_order_of_their_rule() -> None:
    pods = [f"pod-{number}" for number in range(12)]

    def judge(history: History, _: Thresholds, __: Open) -> Verdict:
        return [Case(key=pod, finding=finding("TelemetryUnavailable", pod, pods=[pod])) for pod in pods]

    hold = Holds(raise_seconds=10, clear_seconds=0)
    diagnosis = _fed([Rule(reason="TelemetryUnavailable", judge=judge, hold=lambda _: hold)], range(0, 40, 2))
    assert [tracked.finding.message for tracked in diagnosis.findings] == pods


def test_a_problem_that_comes_back_soon_is_the_same_finding() -> None:
    diagnosis = _fed([_rule(lambda t: t < 100 or t >= 300)], range(0, 400, 2))
    assert [(f.first_seen, f.resolved) for f in diagnosis.findings] == [(0.0, None)]


def test_a_problem_that_comes_back_late_is_another_finding() -> None:
    late = 100 + COOL_DOWN_SECONDS + 100
    diagnosis = _fed([_rule(lambda t: t < 100 or t >= late)], range(0, int(late) + 20, 2))
    assert [(f.first_seen, f.resolved) for f in diagnosis.findings] == [(0.0, 100.0), (late, None)]


def test_a_consequence_is_left_out_and_the_cause_says_so() -> None:
    cause = _rule(lambda t: t >= 50, reason="Hang")
    effect = _rule(lambda t: t >= 60, reason="LowUtilization")
    diagnosis = _fed([cause, effect], range(0, 100, 2))
    assert [f.finding.reason for f in diagnosis.findings] == ["Hang"]
    assert diagnosis.findings[0].finding.evidence["explains"] == "LowUtilization"


def test_a_consequence_that_was_there_first_ends_with_its_cause() -> None:
    cause = _rule(lambda t: t >= 60, reason="Hang")
    effect = _rule(lambda t: t >= 20, reason="LowUtilization")
    diagnosis = _fed([cause, effect], range(0, 100, 2))
    assert [(f.finding.reason, f.resolved) for f in diagnosis.findings] == [("LowUtilization", 60.0), ("Hang", None)]


def test_nothing_new_is_found_when_the_job_has_ended() -> None:
    diagnosis = Diagnosis(HEADER, rules=[_rule(lambda t: t > 10)])
    diagnosis.feed(JobLine(t=5, phase="Succeeded"))
    diagnosis.feed(StepLine(t=20))
    assert diagnosis.findings == []


def test_a_rule_of_steps_is_asked_after_a_step() -> None:
    asked: list[float] = []

    def seen(t: float) -> bool:
        asked.append(t)
        return False

    diagnosis = Diagnosis(HEADER, rules=[_rule(seen, cadence=Cadence.STEP)])
    lines: list[Record] = [GpuLine(t=t, pod="w", uuid="GPU-0") for t in range(0, 40, 2)]
    for line in [*lines[:10], StepLine(t=19.5), *lines[10:]]:
        diagnosis.feed(line)
    assert asked == [19.5]


def test_a_muted_reason_is_not_judged() -> None:
    diagnosis = Diagnosis(HEADER, muted=["GPUFault"])
    diagnosis.feed(XidLine(t=1, pod="w", uuid="GPU-0", code=79))
    assert diagnosis.findings == []


def test_every_reason_has_one_rule() -> None:
    assert sorted(rule.reason for rule in RULES) == sorted(REASONS)


@pytest.mark.parametrize(
    ("codes", "reasons"),
    [
        pytest.param([(1, 79)], {"GPUFault"}, id="fell off the bus"),
        pytest.param([(1, 31)], {"ApplicationFault"}, id="an illegal access"),
        pytest.param([(1, 63)], set(), id="a row was remapped, as it should be"),
        pytest.param([(1, 48), (3, 45)], {"GPUFault"}, id="the driver clears up after hardware"),
        pytest.param([(1, 45), (500, 48)], {"ApplicationFault", "GPUFault"}, id="two that have nothing in common"),
        pytest.param([(1, 99999)], set(), id="nobody knows what it means"),
    ],
)
def test_xids(codes: list[tuple[float, int]], reasons: set[str]) -> None:
    diagnosis = Diagnosis(HEADER)
    for t, code in codes:
        diagnosis.feed(XidLine(t=t, pod="w", uuid="GPU-0", code=code))
    assert {f.finding.reason for f in diagnosis.findings} == reasons


def test_a_lost_gpu_that_answers_again_is_over() -> None:
    diagnosis = Diagnosis(HEADER)
    diagnosis.feed(NvmlLine(t=1, pod="w", uuid="GPU-0", error="GPU_IS_LOST"))
    diagnosis.feed(NvmlLine(t=100, pod="w", uuid="GPU-0"))
    assert [(f.finding.reason, f.first_seen, f.resolved) for f in diagnosis.findings] == [("GPUFault", 1.0, 100.0)]


def test_lines_of_pods_and_gpus_that_nobody_named_do_no_harm() -> None:
    diagnosis = Diagnosis(Header(format=TRACE_FORMAT))
    for t in range(5):
        diagnosis.feed(GpuLine(t=t, pod="ghost", uuid="GPU-9", utilization=1.0))
        diagnosis.feed(NvmlLine(t=t, pod="ghost", error="UNKNOWN"))
    assert diagnosis.findings == []
