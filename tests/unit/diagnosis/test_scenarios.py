# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Recorded and simulated jobs: what must be found is found in time, what must not be is not; however it was recorded.

A quick run takes a part of them; `HYPOTHESIS_PROFILE=thorough` takes all.
"""

import os
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scenarios import transforms
from tests.scenarios.cases import CASES, Built, build
from tests.scenarios.naive import naive
from tests.scenarios.score import VISIBLE, judged, load, ours
from tests.scenarios.simulate import Job
from verl_gpumonitor.cli.diagnose import advised
from verl_gpumonitor.cli.traces import TraceReader
from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.model.findings import TrackedFinding

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "quick") != "quick"
NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in VISIBLE.glob("*.jsonl.gz"))
QUICK = ("critic-peak-old-keys", "healthy-checkpoints", "mig-no-utilisation", "shm-64m", "spin-at-100", "xid31-program")
RECORDED = NAMES if THOROUGH else QUICK
SIMULATED = CASES if THOROUGH else CASES[::9]
SHORT_CASES = [case for case in CASES if case.__name__ in ("deadlock", "cached_host")]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_job_is_judged_as_expected(name: str) -> None:
    scenario = load(name)
    _, faults = judged(scenario.expectation, ours(scenario.lines))
    assert faults == []


@pytest.mark.parametrize("case", SIMULATED, ids=lambda case: case.__name__)
def test_a_simulated_job_is_judged_as_expected(case: Callable[[], Built]) -> None:
    scenario = build(case)
    _, faults = judged(scenario.expectation, ours(scenario.lines))
    assert faults == []


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("part", [0.3, 0.7])
def test_a_job_fed_in_two_calls_is_judged_as_in_one(name: str, part: float) -> None:
    """Asking in between, for findings and for advice, changes nothing."""
    scenario = load(name)
    reader = TraceReader(scenario.lines)
    records = list(reader.records())
    cut = int(part * len(records))
    diagnosis = Diagnosis(reader.header)
    for some in (records[:cut], records[cut:]):
        for record in some:
            diagnosis.feed(record)
        found = advised(diagnosis)
    assert found == ours(scenario.lines)


TRANSFORMS: dict[str, tuple[Callable[[Sequence[bytes]], list[bytes]], float]] = {
    "lines come twice": (transforms.doubled, 2.0),
    "lines are out of order by two seconds": (transforms.shuffled, 2.0),
    # A gap may hide the peak that decides; the next step has it again, and steps take up to three minutes here.
    "samples are missing for a while": (transforms.with_gaps, 90.0),
    "samples come each second": (transforms.denser, 2.0),
    "samples come each four seconds": (lambda lines: transforms.resampled(lines, seconds=4), 4.0),
    "samples come each ten seconds": (lambda lines: transforms.resampled(lines, seconds=10), 10.0),
}


def _raised(findings: Sequence[TrackedFinding]) -> dict[tuple[str, str | None, object], float]:
    return {
        (f.finding.reason, f.finding.scope.stage, f.finding.evidence.get("metric")): f.first_seen
        for f in findings
        if f.finding.reason != "TelemetryPartial"
    }


@pytest.mark.parametrize("name", RECORDED if THOROUGH else QUICK[2:4])
@pytest.mark.parametrize("transform", TRANSFORMS if THOROUGH else list(TRANSFORMS)[1::4])
def test_a_job_recorded_otherwise_is_judged_alike(name: str, transform: str) -> None:
    scenario = load(name)
    change, interval = TRANSFORMS[transform]
    findings = ours(change(scenario.lines))
    assert judged(scenario.expectation, findings)[1] == []
    before, after = _raised(ours(scenario.lines)), _raised(findings)
    assert set(after) == set(before)
    late = {key: (before[key], t) for key, t in after.items() if abs(t - before[key]) > 2 * interval}
    assert late == {}


def _healthy(*, gpus: int, pods: int, total_gib: float, stretch: float, seed: int, steps: int = 5) -> list[bytes]:
    job = Job("healthy", seed=seed, gpus=gpus, pods=pods, total_gib=total_gib, stretch=stretch, interval=4.0)
    job.start()
    for step in range(steps):
        job.usual_step(step)
    job.finish()
    return job.record()


@settings(max_examples=40 if THOROUGH else 3)
@given(
    gpus=st.sampled_from([1, 2, 4, 8]),
    total_gib=st.sampled_from([24.0, 40.0, 80.0, 141.0, 192.0]),
    stretch=st.floats(0.5, 8.0 if THOROUGH else 2.0),
    seed=st.integers(0, 2**16),
)
def test_a_healthy_job_stays_healthy_on_other_gpus_and_with_longer_steps(
    gpus: int, total_gib: float, stretch: float, seed: int
) -> None:
    lines = _healthy(gpus=gpus, pods=1, total_gib=total_gib, stretch=stretch, seed=seed)
    assert [(f.finding.reason, f.finding.message) for f in ours(lines)] == []


@settings(max_examples=15 if THOROUGH else 2)
@given(pods=st.integers(2, 3), seed=st.integers(0, 2**16))
def test_one_more_healthy_pod_raises_nothing(pods: int, seed: int) -> None:
    lines = _healthy(gpus=2, pods=pods, total_gib=80.0, stretch=1.0, seed=seed)
    assert [(f.finding.reason, f.finding.message) for f in ours(lines)] == []


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.__name__)
def test_a_healthy_pod_beside_changes_no_reason(case: Callable[[], Built]) -> None:
    job, _, _ = case()
    alone = {f.finding.reason for f in ours(job.record())}
    job, _, _ = case()
    beside = job.add_pod("beside", 2)
    end, job.clock = job.clock, 0.0
    while job.clock < end:
        job.pause(4, 30, pods=[beside])
    job.clock = end
    for gpu in beside.gpus:
        for place, span in enumerate(gpu.spans):
            busy = type(span.load)(busy=0.9, power=0.7, memory=30)
            gpu.spans[place] = type(span)(begin=span.begin, end=span.end, load=busy)
    assert {f.finding.reason for f in ours(job.record())} == alone


def test_thresholds_alone_call_a_full_rollout_engine_a_risk() -> None:
    scenario = load("healthy-grpo-97")
    score, _ = judged(scenario.expectation, naive(scenario.lines))
    assert score.false > 0
