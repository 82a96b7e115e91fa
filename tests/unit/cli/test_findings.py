# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Findings as a person reads them: nothing twice, and no present value that nobody told."""

from typing import Final

import pytest

from verl_gpumonitor.cli.findings import MAX_ALSO, advice_lines, grouped
from verl_gpumonitor.model.findings import Advice, Finding, Scope, TrackedFinding
from verl_gpumonitor.model.vocabulary import Severity

KEY: Final = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("current", "suggested", "line"),
    [
        pytest.param("2", "1", f"  -> {KEY}: 2 -> 1", id="both"),
        pytest.param(None, "1", f"  -> {KEY}=1", id="nobody knows what it is now"),
        pytest.param("2", None, f"  -> {KEY}: now 2", id="what to set hangs on what cannot be seen"),
        pytest.param(None, None, f"  -> {KEY}", id="neither"),
    ],
)
def test_a_present_value_that_is_not_known_is_no_default(current: str | None, suggested: str | None, line: str) -> None:
    advice = Advice(parameter=KEY, current=current, suggested=suggested, text="why")
    assert next(iter(advice_lines(advice))) == line


def tracked(message: str, *, pod: str = "w", reason: str = "ForeignProcess", advice: str = "end it") -> TrackedFinding:
    scope = Scope(pods=(pod,), gpus=(f"GPU-{pod}",))
    finding = Finding(
        reason=reason,
        severity=Severity.WARNING,
        scope=scope,
        message=message,
        advice=(Advice(parameter=None, text=advice, reason=message),),
    )
    return TrackedFinding(finding=finding, first_seen=1.0, last_seen=2.0)


def test_findings_that_differ_in_their_gpu_only_are_one() -> None:
    (group,) = grouped(tracked(f"GPU {n} of pod w-{n}x: 2.{n} GiB are held", pod=f"w-{n}x") for n in range(3))
    assert group.first.finding.message == "GPU 0 of pod w-0x: 2.0 GiB are held"
    assert group.also == ("GPU 1 of pod w-1x: 2.1 GiB are held", "GPU 2 of pod w-2x: 2.2 GiB are held")


def test_of_many_the_rest_are_counted() -> None:
    (group,) = grouped(tracked(f"GPU {n} of pod w: held") for n in range(40))
    assert len(group.also) == MAX_ALSO
    assert group.also[-1] == "... and 32 more like these"


def test_what_is_said_of_others_stays_apart() -> None:
    groups = grouped([tracked("GPU 0 of pod w is full"), tracked("GPU 0 of pod w is hot")])
    assert [group.also for group in groups] == [(), ()]


def test_the_same_advice_is_given_once() -> None:
    found = [tracked("a", reason=reason) for reason in ("OOMRisk", "Imbalance", "Throttled")]
    said = [[advice.text for advice in group.first.finding.advice] for group in grouped(found)]
    assert said == [["end it"], ["As said above: end it"], ["As said above: end it"]]
