# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The simple rules, by tables and by what must hold whatever the numbers are."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.diagnosis import DiagnosisLimits, GpuWindow, ImbalanceLimits, diagnose
from verl_gpumonitor.model.findings import MAX_SCOPE, Finding

GB = 10**9
LIMITS = DiagnosisLimits()


def window(
    number: int,
    utilization: float | None,
    used_gb: float | None,
    *,
    total_gb: float | None = 80,
    pod: str = "w-0",
    pool: str = "workers",
) -> GpuWindow:
    used = None if used_gb is None else int(used_gb * GB)
    return GpuWindow(
        pod=pod,
        uuid=f"GPU-{pod}-{number}",
        index=number,
        pool=pool,
        utilization=utilization,
        memory_used_bytes=used,
        memory_peak_bytes=used,
        memory_total_bytes=None if total_gb is None else int(total_gb * GB),
    )


def windows(*values: tuple[float | None, float | None], pod: str = "w-0", pool: str = "workers") -> list[GpuWindow]:
    return [window(n, load, used, pod=pod, pool=pool) for n, (load, used) in enumerate(values)]


def kinds(findings: Sequence[Finding]) -> set[tuple[str, object]]:
    return {(finding.reason, finding.evidence.get("metric")) for finding in findings}


OOM = ("OOMRisk", None)
MEMORY = ("Imbalance", "memory")
LOAD = ("Imbalance", "utilization")
HOT = (0.85, 78.0)

CASES = [
    pytest.param(windows(HOT, (0.12, 20), (0.10, 18), (0.11, 19)), {OOM, MEMORY, LOAD}, id="the guide's hot GPU 0"),
    pytest.param(windows((0.65, 40), (0.63, 38), (0.62, 37), (0.60, 36)), set(), id="the guide's job after the fix"),
    pytest.param(windows(*[(0.9, 77.6)] * 8), set(), id="a whole job at 97% of memory, as engines preallocate"),
    pytest.param(windows((0.9, 79.2), *[(0.9, 77.6)] * 7), set(), id="99% among 97%"),
    pytest.param(windows(HOT), set(), id="a single GPU has no peers"),
    pytest.param(windows(HOT, (0.11, 19)), {OOM, MEMORY, LOAD}, id="two GPUs: the one that carries more"),
    pytest.param(windows(*[(0.9, 77)] * 4, *[(0.9, 20)] * 4), set(), id="half and half are two kinds of work"),
    pytest.param(windows(HOT, *[(None, None)] * 3), set(), id="peers that nobody can read are no peers"),
    pytest.param(windows((0.85, None), (0.1, 20), (0.1, 18), (0.1, 19)), {LOAD}, id="memory not offered: load alone"),
    pytest.param(windows((None, 78), (None, 20), (None, 18)), {OOM, MEMORY}, id="load not offered (MIG): memory alone"),
    pytest.param(windows((0.02, 40), *[(0.95, 40)] * 7), {LOAD}, id="one idle GPU among busy ones"),
    pytest.param(windows((0.45, 40), *[(0.02, 40)] * 7), set(), id="nobody waits while the job loads"),
    pytest.param(windows(*[(0.9, 50)] * 3, (0.9, 65)), set(), id="the last pipeline stage holds more, as it must"),
    pytest.param(
        [*windows(*[(0.9, 77)] * 4), *windows(*[(0.1, 5)] * 8, pod="head", pool="critics")],
        set(),
        id="pools are not compared with each other",
    ),
    pytest.param([], set(), id="nothing known, nothing found"),
]


@pytest.mark.parametrize(("gpus", "expected"), CASES)
def test_what_is_found(gpus: list[GpuWindow], expected: set[tuple[str, object]]) -> None:
    assert kinds(diagnose(gpus, LIMITS)) == expected


def test_the_odd_gpu_is_named_and_no_other() -> None:
    findings = diagnose(windows((0.12, 20), HOT, (0.10, 18), (0.11, 19)), LIMITS)
    for finding in findings:
        assert finding.scope.gpus == ("GPU-w-0-1",)
        assert finding.scope.pods == ("w-0",)


def test_messages_name_pod_gpu_numbers_and_a_setting_in_one_sentence() -> None:
    for finding in diagnose(windows(HOT, (0.12, 20), (0.10, 18), (0.11, 19)), LIMITS):
        text = finding.message
        assert text.startswith("GPU 0 of pod w-0 ")
        assert ". " not in text
        assert len(text) < 600
        if finding.evidence.get("metric") == "utilization":
            assert "85%" in text
            assert "11%" in text
        else:
            assert "72.6 of 74.5 GiB (98%)" in text
            assert "24%" in text
        assert "actor_rollout_ref.actor." in text or "trainer.balance_batch" in text


def test_a_finding_names_a_bounded_number_of_gpus() -> None:
    gpus = [*windows(*[(0.9, 78)] * 20), *windows(*[(0.9, 20)] * 60, pod="w-1")]
    for finding in diagnose(gpus, LIMITS):
        assert len(finding.scope.gpus) == MAX_SCOPE
        assert "and 19 more" in finding.message


def test_present_memory_stands_in_for_an_unknown_peak() -> None:
    gpus = [
        msgspec.structs.replace(gpu, memory_peak_bytes=None) for gpu in windows(HOT, (0.1, 20), (0.1, 18), (0.1, 19))
    ]
    assert OOM in kinds(diagnose(gpus, LIMITS))


def test_limits_are_those_that_are_set() -> None:
    limits = DiagnosisLimits(imbalance=ImbalanceLimits(memory_difference=0.9, utilization_difference=0.9))
    assert kinds(diagnose(windows(HOT, (0.12, 20), (0.10, 18), (0.11, 19)), limits)) == {OOM}


def test_limits_are_written_in_camel_case() -> None:
    limits = msgspec.convert({"oomRisk": {"minRatio": 0.8}, "imbalance": {"raiseSeconds": 5}}, DiagnosisLimits)
    assert (limits.oom_risk.min_ratio, limits.imbalance.hold.raise_seconds) == (0.8, 5)


@pytest.mark.parametrize("wrong", [{"oomRisk": {"min_ratio": 0.8}}, {"oomRisk": {"minRatio": 1.5}}, {"other": {}}])
def test_wrong_limits_are_refused(wrong: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, DiagnosisLimits)


# --- properties ---

ratios = st.one_of(st.none(), st.floats(0, 1))
pools = st.lists(st.tuples(ratios, ratios), max_size=24)


def of_ratios(values: Sequence[tuple[float | None, float | None]], total: int, pod: str = "w-0") -> list[GpuWindow]:
    return [
        GpuWindow(
            pod=pod,
            uuid=f"GPU-{pod}-{n}",
            index=n,
            pool="p",
            utilization=load,
            memory_used_bytes=None if memory is None else int(memory * total),
            memory_total_bytes=total,
        )
        for n, (load, memory) in enumerate(values)
    ]


@given(values=pools, factor=st.integers(2, 64))
def test_the_size_of_a_gpu_changes_nothing(values: list[tuple[float | None, float | None]], factor: int) -> None:
    small = of_ratios(values, 2**30)
    large = [
        msgspec.structs.replace(
            gpu,
            memory_used_bytes=None if gpu.memory_used_bytes is None else gpu.memory_used_bytes * factor,
            memory_total_bytes=2**30 * factor,
        )
        for gpu in small
    ]
    found = [(f.reason, f.scope, f.evidence.get("value")) for f in diagnose(small, LIMITS)]
    assert [(f.reason, f.scope, f.evidence.get("value")) for f in diagnose(large, LIMITS)] == found


healthy = st.floats(0.55, 0.85)


@given(job=st.lists(st.tuples(healthy, healthy), max_size=16), added=st.lists(st.tuples(healthy, healthy), max_size=16))
def test_another_healthy_pod_raises_nothing(job: list[tuple[float, float]], added: list[tuple[float, float]]) -> None:
    gpus = of_ratios(job, 2**36)
    assert diagnose(gpus, LIMITS) == []
    assert diagnose([*gpus, *of_ratios(added, 2**36, pod="w-1")], LIMITS) == []


@given(values=pools)
def test_a_gpu_that_nobody_can_read_changes_nothing(values: list[tuple[float | None, float | None]]) -> None:
    gpus = of_ratios(values, 2**36)
    assert diagnose([*gpus, window(99, None, None, total_gb=None, pool="p")], LIMITS) == diagnose(gpus, LIMITS)


@given(values=pools, data=st.data())
def test_the_order_of_gpus_changes_nothing(
    values: list[tuple[float | None, float | None]], data: st.DataObject
) -> None:
    gpus = of_ratios(values, 2**36)
    shuffled = data.draw(st.permutations(gpus))
    assert kinds(diagnose(shuffled, LIMITS)) == kinds(diagnose(gpus, LIMITS))
    assert {f.scope for f in diagnose(shuffled, LIMITS)} == {f.scope for f in diagnose(gpus, LIMITS)}


@given(level=st.floats(0, 1), count=st.integers(1, 64))
def test_a_uniform_job_never_alarms_whatever_its_level(level: float, count: int) -> None:
    assert diagnose(of_ratios([(level, level)] * count, 2**36), LIMITS) == []
