# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""From the stage-aware diagnosis to conditions, HEALTH, findings, recommendations and Events of a GPUMonitor."""

from typing import Any

import jsonschema

from tests.unit.controller.builders import GIB
from tests.unit.controller.fakeapi import FakeApi
from tests.unit.controller.test_reconciler import Life, living
from tests.unit.controller.test_status import SCHEMA, closed
from verl_gpumonitor.diagnosis.health import REASONS
from verl_gpumonitor.model.findings import Advice, Scope
from verl_gpumonitor.model.report import StageNow, StageQuality, StepGpu, StepReport, StepStage
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.controller.assessment import open_in
from verl_gpumonitor_operator.controller.clinic import Clinic, Opinion
from verl_gpumonitor_operator.controller.status import OpenFinding, findings, recommendations

STEP_SECONDS = 30.0
COMMAND = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_dynamic_bsz=True"
    " actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 data.max_prompt_length=1024"
    " data.max_response_length=2048 trainer.n_gpus_per_node=4"
)


def clinic() -> Clinic:
    return Clinic(interval_seconds=5.0)


def start(life: Life) -> None:
    """Have a job of four GPUs run, which says how it was started."""
    life.job()
    life.pod()
    for workload in life.workloads.all():
        object.__setattr__(workload.job, "command", COMMAND)


async def steps(life: Life, peaks: list[float], *, first: int = 1) -> None:
    """Let a step of half a minute pass for each peak of `update_actor`, in GiB."""
    for number, peak in enumerate(peaks, start=first):
        for report in range(6):
            stages = [_stage("gen", "rollout", 50.0, life.now), _stage("update_actor", "actor", peak, life.now)]
            whole = StepReport(number=number, step=number, begin=life.now - STEP_SECONDS, end=life.now, stages=stages)
            life.report(
                used=(35, 35, 35, 35),
                stage=StageNow(stage="update_actor", role="actor")
                if report > 3
                else StageNow(stage="gen", role="rollout"),
                stage_quality=StageQuality(source=StageSource.MARKS),
                steps=[whole] if report == 5 else [],
            )
            await life.run(5)


def _stage(stage: str, role: str, peak: float, now: float) -> StepStage:
    gpus = [StepGpu(place, 12.0, 9.0, 5000.0, int(peak * GIB), 20 * GIB) for place in range(4)]
    return StepStage(stage=stage, role=role, begin=now - STEP_SECONDS, seconds=12.0, gpus=gpus)


RISING = [60.0 + 1.5 * number for number in range(12)]


def found(life: Life, reason: str) -> list[dict[str, Any]]:
    """What the status lists of a reason."""
    return [one for one in life.status.get("findings", []) if one["reason"] == reason]


async def test_a_course_becomes_a_condition_a_finding_advice_and_one_event_each() -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        await steps(life, RISING)
        status = life.status
        jsonschema.validate(status, closed(SCHEMA))
        assert life.condition("OOMRisk") == ("True", "OOMRisk")
        assert status["health"].startswith("OOMRisk")
        found = next(one for one in status["findings"] if one["reason"] == "OOMRisk")
        assert (found["stage"], found["role"]) == ("update_actor", "actor")
        advice = {one["parameter"]: one for one in status["recommendations"] if "parameter" in one}
        tokens = advice["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
        assert tokens["current"] == "24576"
        assert int(tokens["suggested"]) < 24576
        assert tokens["reason"] == "OOMRisk"
        assert tokens["evidence"]
        told = [(kind, reason, count) for kind, reason, count in life.events if reason == "OOMRisk"]
        assert told == [("GPUMonitor", "OOMRisk", 1), ("PyTorchJob", "OOMRisk", 1)]
        (note, *_) = [one["note"] for one in life.api.of("events").values() if one["reason"] == "OOMRisk"]
        assert "update_actor" in note
        assert "ppo_max_token_len_per_gpu" in note
        assert len(note.encode()) <= 1024


async def test_it_is_over_when_its_cause_is_gone_and_says_so_once() -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        await steps(life, [*RISING, *[45.0] * 14])
        assert life.condition("OOMRisk") == ("False", "NotDetected")
        assert life.status["health"] == "OK"
        assert "recommendations" not in life.status
        assert [event for event in life.events if event[1] == "OOMRiskResolved"] == [
            ("GPUMonitor", "OOMRiskResolved", 1),
            ("PyTorchJob", "OOMRiskResolved", 1),
        ]


async def test_a_restarted_controller_goes_on_with_what_is_open_and_tells_it_no_second_time() -> None:
    api = FakeApi()
    async with living(api, clinic=clinic()) as before:
        start(before)
        await steps(before, RISING)
        then = before.now
        assert before.condition("OOMRisk")[0] == "True"
        (known,) = found(before, "OOMRisk")
        advice = before.status["recommendations"]
    async with living(api, start=then + 5.0, clinic=clinic()) as life:
        start(life)
        life.reconciler.restore()
        life.reconciler.listening()
        await steps(life, [77.0], first=13)
        (waiting,) = found(life, "OOMRisk")
        assert waiting == known
        assert life.status["recommendations"] == advice
        await steps(life, [78.5] * 9, first=14)
        (judged,) = found(life, "OOMRisk")
        assert judged["message"] != known["message"]
        assert judged["since"] == known["since"]
        assert life.condition("OOMRisk") == ("True", "OOMRisk")
        assert [count for _, reason, count in life.events if reason == "OOMRisk"] == [1, 1]
        assert not [reason for _, reason, _ in life.events if reason == "OOMRiskResolved"]


async def test_every_reason_of_the_table_has_its_condition_and_what_cannot_be_judged_says_why() -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        await steps(life, [50.0] * 5)
        found = {one["type"]: (one["status"], one["reason"]) for one in life.status["conditions"]}
        assert set(found) == {info.condition for info in REASONS.values()}
        assert found["Hung"] == ("False", "NotDetected")
        assert found["Underutilized"] == ("False", "NotDetected")
        assert found["HostMemoryRisk"] == ("Unknown", "NoHostMemory")
        assert found["Throttled"] == ("Unknown", "NotMeasured")
        assert found["ForeignGPUMemory"] == ("Unknown", "NoProcessLists")
        assert life.status["dataQuality"]["diagnosis"]["gpus"] == 4


async def test_a_spec_may_mute_and_set_thresholds_and_is_told_what_cannot_be() -> None:
    async with living(clinic=clinic()) as life:
        start(life)
        await life.run(2)
        life.monitor["spec"]["thresholds"] = {"oomRisk": {"nearRatio": 2}}
        life.monitor["metadata"]["generation"] = 2
        await steps(life, [50.0] * 2)
        assert life.condition("SpecAccepted") == ("False", "InvalidThresholds")
        life.monitor["spec"]["thresholds"] = {"oomRisk": {"nearRatio": 0.5, "risingFromRatio": 0.5}}
        life.monitor["spec"]["mutedReasons"] = ["OOMRisk", "MemoryGrowth"]
        life.monitor["metadata"]["generation"] = 3
        await steps(life, RISING, first=3)
        assert life.condition("SpecAccepted") == ("True", "Accepted")
        assert life.condition("OOMRisk") == ("False", "NotDetected")
        assert not [event for event in life.events if event[1] == "OOMRisk"]


async def test_simple_findings_of_a_job_whose_stages_are_not_told_yet_are_taken_over() -> None:
    """It began with one full GPU, and stages are told from some later time on: one problem, one Event."""
    async with living(clinic=clinic()) as life:
        start(life)
        await life.reporting(120, used=(78, 19, 19, 19))
        assert life.condition("OOMRisk") == ("True", "OOMRisk")
        (simple,) = found(life, "OOMRisk")
        await steps(life, [78.0] * 5)
        (staged,) = found(life, "OOMRisk")
        assert staged["message"] != simple["message"]
        assert staged["since"] == simple["since"]
        await steps(life, [50.0] * 4)
        assert life.condition("OOMRisk") == ("True", "OOMRisk") or [
            reason for _, reason, _ in life.events if reason == "OOMRiskResolved"
        ]
        assert [count for _, reason, count in life.events if reason == "OOMRisk"] == [1, 1]


def without_none(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a status is written: what is unknown has no key."""
    return [{key: value for key, value in item.items() if value is not None} for item in items]


def _open(reason: str, **more: Any) -> OpenFinding:
    return OpenFinding(reason=reason, severity=Severity.WARNING, message="m" * 2000, **more)


def test_lists_of_a_status_are_bounded() -> None:
    scope = Scope(pods=("p" * 300,) * 16, gpus=("g" * 300,) * 16, stage="s" * 300, role="r" * 300)
    advice = [
        Advice(parameter=f"{number}" * 300, current="c" * 300, suggested="s" * 300, text="t" * 2000, price="p" * 900)
        for number in range(1, 10)
    ]
    wide = [
        _open("OOMRisk", since=1.0, scope=scope, advice=tuple(advice)),
        _open("Hang", since=2.0, advice=(advice[-1],)),
    ]
    jsonschema.validate(
        {"findings": without_none(findings(wide)), "recommendations": without_none(recommendations(wide))},
        closed(SCHEMA),
    )
    assert len(recommendations(wide)) == 8
    assert recommendations(wide)[0]["reason"] == "Hang"
    many = [_open("Imbalance", since=float(number)) for number in range(40)] + [_open("Hang")]
    shown = findings(many)
    assert len(shown) == 16
    assert shown[0]["reason"] == "Hang"
    assert len(shown[0]["message"]) == 1024
    assert recommendations(many) == []
    assert Opinion().open == ()


ODD: dict[str, Any] = {
    "findings": [
        {"reason": "OOMRisk", "severity": "critical", "stage": 7, "gpus": ["GPU-a"], "since": "2026-01-01T00:00:00Z"},
        {"reason": "OOMRisk", "severity": "dire", "pods": "w-0", "since": "yesterday", "message": "full"},
        {"reason": "GPUFault"},
        {"reason": ["Hang"]},
        "Hang",
    ],
    "conditions": [
        {"type": "OOMRisk", "status": "True", "reason": "OOMRisk", "message": "of the condition"},
        {"type": "Hung", "status": "True", "reason": "Hang", "lastTransitionTime": "2026-01-01T00:01:00Z"},
        {"type": "Imbalanced", "status": "False", "reason": "NotDetected"},
    ],
    "recommendations": [
        {"reason": "OOMRisk", "parameter": "a.b", "suggested": "1"},
        {"reason": "OOMRisk", "parameter": None, "text": "do it", "evidence": 5},
    ],
}


def test_what_is_open_in_a_status_is_read_whatever_somebody_wrote_there() -> None:
    first, second, third = open_in(ODD, now=5.0)
    assert (first.reason, first.finding.severity, first.finding.scope) == (
        "OOMRisk",
        Severity.CRITICAL,
        Scope(gpus=("GPU-a",)),
    )
    assert (first.since, first.finding.message) == (1767225600.0, "of the condition")
    assert first.finding.advice == (Advice(parameter=None, text="do it"),)
    assert (second.finding.severity, second.since, second.finding.message) == (Severity.WARNING, 5.0, "full")
    assert second.finding.advice == ()
    assert (third.reason, third.since, third.finding.message) == ("Hang", 1767225660.0, "")
    bare: list[dict[str, Any]] = [{}, {"findings": None, "conditions": {}, "recommendations": 3}]
    for nothing in bare:
        assert open_in(nothing, now=5.0) == []
