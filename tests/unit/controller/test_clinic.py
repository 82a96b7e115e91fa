# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The stage-aware diagnosis in the controller: from reports of recorded runs to findings, advice and what is told."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from tests.unit.controller.builders import GIB, gpu, job, owner_of, pod, report
from tests.unit.controller.replaying import BEGAN, Sidecars, Told
from verl_gpumonitor.advice import advise, context_of
from verl_gpumonitor.cli.records import open_run
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.findings import Finding, Scope
from verl_gpumonitor.model.report import Report, StageNow, StageQuality, StepGpu, StepReport, StepStage
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.trace import JobLine, PodLine
from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.controller.clinic import (
    ALL_SHARE,
    BUDGET_PIECES,
    DEEP,
    DEEP_SHARE,
    DIVIDED_GPUS,
    SHALLOW,
    STAGES,
    Clinic,
    Found,
    Opinion,
    thresholds_of,
)
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.launch import Command
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState, PodIdentity, PodRecord
from verl_gpumonitor_operator.controller.workload import Workload
from verl_gpumonitor_operator.controller.workloads import Workloads
from verl_gpumonitor_operator.settings import SettingsError

SCENARIOS = Path(__file__).parents[2] / "data" / "scenarios"
INTERVAL = 15.0


@dataclass
class Seen:
    """What came of a run."""

    raised: dict[str, float] = field(default_factory=dict)
    """Reason -> when it was told first, in seconds of the run."""
    told: list[str] = field(default_factory=list)
    found: dict[str, Found] = field(default_factory=dict)
    open: frozenset[str] = frozenset()


def replay(name: str) -> Seen:
    """Have the clinic see a recorded run, with a look each five seconds."""
    with open_run(str(SCENARIOS / f"{name}.jsonl.gz"), interval_seconds=2.0) as run:
        kind = (
            JobKind(run.header.workload.kind) if run.header.workload and run.header.workload.kind else JobKind.RAY_JOB
        )
        command = Command(text=run.header.entrypoint, source="spec") if run.header.entrypoint else None
        pods = {one.name: _record(one.name, kind, one.gpus_requested or 0, one.group) for one in run.header.pods or ()}
        return _watched(Sidecars(run.header, INTERVAL).told(run.records), kind, command, pods)


def _record(name: str, kind: JobKind, gpus: int, group: str | None) -> PodRecord:
    owner = owner_of(JobKind.PYTORCH_JOB if kind is JobKind.PYTORCH_JOB else JobKind.RAY_CLUSTER, "owner")
    labels = {"ray.io/group": group} if group else {}
    return pod(name, owner, gpus=gpus, labels=labels, main=ContainerState(phase=ContainerPhase.RUNNING))


def _watched(told: Iterable[Told], kind: JobKind, command: Command | None, pods: dict[str, PodRecord]) -> Seen:
    clinic = Clinic(interval_seconds=INTERVAL)
    workloads = Workloads(clinic)
    own = JobKind.PYTORCH_JOB if kind is JobKind.PYTORCH_JOB else JobKind.RAY_CLUSTER
    workload = workloads.job_seen(job(own, "owner", gpus_requested=0), BEGAN)
    assert workload is not None
    for record in pods.values():
        workloads.pod_seen(record)
    seen, phase, looked = Seen(), "Running", 0.0
    for t, what in told:
        if isinstance(what, Report):
            workloads.accept(PodIdentity(namespace="train", name=what.pod.name, uid=what.pod.uid), what, BEGAN + t)
        elif isinstance(what, JobLine):
            phase = what.phase or phase
        elif what.pod in pods:
            pods[what.pod] = _changed(pods[what.pod], what)
            workloads.pod_seen(pods[what.pod])
        if t - looked >= 5.0 and phase not in ("Succeeded", "Failed", "Stopped"):
            looked = t
            _note(seen, _look(clinic, workload, command, phase, t), t)
    return seen


def _changed(record: PodRecord, line: PodLine) -> PodRecord:
    state = record.main or ContainerState(phase=ContainerPhase.RUNNING)
    if line.reason is not None or line.exit_code is not None:
        state = replace(state, phase=ContainerPhase.TERMINATED, reason=line.reason, exit_code=line.exit_code or 0)
    return replace(record, phase=line.phase or record.phase, main=state)


def _look(clinic: Clinic, workload: Workload, command: Command | None, phase: str, t: float) -> Opinion:
    return clinic.look(workload, command=command, thresholds=None, phase=phase, now=BEGAN + t)


def _note(seen: Seen, opinion: Opinion, t: float) -> None:
    for one in opinion.raised:
        seen.raised.setdefault(one.reason, t)
        seen.told.append(one.reason)
    seen.found.update({one.reason: one for one in opinion.open})
    seen.open = frozenset(one.reason for one in opinion.open)


BY_REPORTS: tuple[tuple[str, set[str]], ...] = (
    ("actor-peak-grows", {"OOMRisk"}),
    ("critic-peak-old-keys", {"OOMRisk"}),
    ("encoder-cache-leak", {"MemoryGrowth"}),
    ("gen-frozen-2min", {"LowUtilization"}),
    ("healthy-checkpoints", set()),
    ("healthy-ppo-critic", set()),
    ("healthy-pp-last-stage", set()),
    ("healthy-sft-plain", set()),
    ("host-4x56g", {"HostMemoryRisk"}),
    ("leftover-20g", {"LeftoverMemory"}),
    ("mig-no-utilisation", set()),
    # Beside the memory, load differs as well; that is seen two rollouts later than the idle GPUs, which it explains.
    ("seed-hot-gpu0", {"Imbalance", "LowUtilization", "OOMRisk"}),
    ("seed-after-fix", set()),
    ("shm-64m", {"SharedMemoryRisk"}),
    ("spin-at-100", {"Hang"}),
    # Faults are judged from all GPUs' reports elsewhere, and only explain here.
    ("xid79-fell-off", set()),
    ("xid31-program", set()),
    ("sleep-keeps-26g", {"RolloutMemoryNotReleased"}),
    ("hot-gpu-throttles", {"Throttled"}),
    ("contexts-on-gpu0", {"ForeignProcess"}),
)
"""Recorded runs, and what is found of them by reports; `gpumon diagnose` says the same but for what is noted here."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reasons"), BY_REPORTS)
def test_a_recorded_run_is_judged_by_its_reports(name: str, reasons: set[str]) -> None:
    assert set(replay(name).raised) == reasons


def test_advice_names_the_settings_of_the_jobs_own_command_line() -> None:
    found = replay("actor-peak-grows").found["OOMRisk"].finding
    assert found.scope.stage == "update_actor"
    changes = {one.parameter: (one.current, one.suggested) for one in found.advice if one.suggested is not None}
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in changes
    current, suggested = changes["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
    assert current is not None and suggested is not None
    assert int(suggested) < int(current)


class Course:
    """A job of two pods whose update takes more memory with each step, in the test's hand."""

    def __init__(
        self, clinic: Clinic, *, peaks: Iterable[float], gpus: int = 2, step_seconds: float = 4 * INTERVAL
    ) -> None:
        self.clinic, self.gpus, self.step_seconds = clinic, gpus, step_seconds
        self.command: Command | None = None
        self.workloads = Workloads(clinic)
        owner = owner_of(JobKind.RAY_CLUSTER, "grpo")
        self.pods = [
            pod(
                name,
                owner,
                gpus=gpus,
                labels={"ray.io/group": "workers"},
                main=ContainerState(phase=ContainerPhase.RUNNING),
            )
            for name in ("a", "b")
        ]
        workload = self.workloads.job_seen(job(JobKind.RAY_CLUSTER, "grpo", gpus_requested=2 * gpus), BEGAN)
        assert workload is not None
        self.workload = workload
        for record in self.pods:
            self.workloads.pod_seen(record)
        self.peaks = list(peaks)
        self.now = BEGAN
        self.opinions: list[Opinion] = []

    def run(self) -> None:
        """Go through all steps, each with four reports of each pod."""
        for number, peak in enumerate(self.peaks, start=1):
            for quarter in range(4):
                self.now += self.step_seconds / 4
                for record in self.pods:
                    self._report(record, number, peak, last=quarter == 3)
                self.look(command=self.command)

    def look(self, *, command: Command | None = None, thresholds: Thresholds | None = None) -> Opinion:
        opinion = self.clinic.look(self.workload, command=command, thresholds=thresholds, phase="Running", now=self.now)
        self.opinions.append(opinion)
        return opinion

    def _report(self, record: PodRecord, number: int, peak: float, *, last: bool) -> None:
        seconds = self.now - BEGAN
        gpus = [
            gpu(
                f"{record.name}-{place}",
                index=place,
                memory_used_bytes=int(30 * GIB),
                observed_seconds=seconds,
                busy_seconds=seconds * 0.7,
                energy_joules=seconds * 400.0,
            )
            for place in range(self.gpus)
        ]
        stages = [
            StepStage(
                stage=stage,
                role=role,
                begin=self.now - self.step_seconds,
                seconds=self.step_seconds / 3,
                gpus=[
                    StepGpu(place, self.step_seconds / 3, self.step_seconds / 4, 8000.0, int(high * GIB), 20 * GIB)
                    for place in range(self.gpus)
                ],
            )
            for stage, role, high in (("gen", "rollout", 50.0), ("update_actor", "actor", peak))
        ]
        step = StepReport(number=number, step=number, begin=self.now - self.step_seconds, end=self.now, stages=stages)
        item = report(
            record.name,
            sequence=int(self.now),
            gpus=gpus,
            sent_at=self.now,
            started_at=BEGAN,
            stage=StageNow(stage="update_actor" if last else "gen", role="actor" if last else "rollout"),
            stage_quality=StageQuality(source=StageSource.RAY_STATE),
            steps=[step] if last else [],
        )
        self.workloads.accept(PodIdentity(namespace="train", name=record.name, uid=record.uid), item, self.now)


TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


@pytest.mark.parametrize("step_seconds", [20.0, 60.0])
def test_advice_is_sized_by_the_evidence_beside_it(step_seconds: float) -> None:
    """As the desk would size it now: within one step of its values, whatever the steps of the job last."""
    course = Course(
        Clinic(interval_seconds=INTERVAL), peaks=[55.0 + 2.0 * n for n in range(12)], step_seconds=step_seconds
    )
    course.command = Command(
        text=f"python3 -m verl.trainer.main_ppo {TOKENS}=24576 actor_rollout_ref.actor.use_dynamic_bsz=true",
        source="spec",
    )
    course.run()
    shown = [
        (one.finding, {tip.suggested for tip in one.finding.advice if tip.parameter == TOKENS})
        for opinion in course.opinions
        for one in opinion.open
        if one.reason == "OOMRisk"
    ]
    values = []
    context = context_of(course.command.text, kind="RayCluster", gpus=4, gpus_per_pod=2, memory_total_bytes=80 * GIB)
    for finding, (suggested,) in shown:
        fresh = advise(replace_fields(finding, advice=()), context)
        (value,) = (tip.suggested for tip in fresh if tip.parameter == TOKENS)
        values.append((int(suggested or 0), int(value or 0)))
    assert len({value for _, value in values}) >= 3
    assert all(abs(one - other) <= 1024 for one, other in values), values


RISING = [60.0 + 1.5 * number for number in range(12)]
CALM = [60.0] * 12


def _told(course: Course) -> list[str]:
    return [one.reason for opinion in course.opinions for one in opinion.raised]


def test_a_course_is_told_once_and_is_over_when_its_cause_is_gone() -> None:
    course = Course(Clinic(interval_seconds=INTERVAL), peaks=[*RISING, *[50.0] * 14])
    course.run()
    assert _told(course).count("OOMRisk") == 1
    assert any(one.reason == "OOMRisk" for opinion in course.opinions for one in opinion.open)
    assert "OOMRisk" not in {one.reason for one in course.opinions[-1].open}


def test_what_lasts_is_counted_again_each_half_hour() -> None:
    course = Course(Clinic(interval_seconds=INTERVAL), peaks=[*RISING, *[77.5] * 70])
    course.run()
    repeated = [one.reason for opinion in course.opinions for one in opinion.repeated]
    assert _told(course).count("OOMRisk") == 1
    assert repeated.count("OOMRisk") == 2


def _known(reason: str) -> Found:
    finding = Finding(reason=reason, severity=Severity.WARNING, scope=Scope(), message="as it was")
    return Found(key=(reason, ""), finding=finding, since=BEGAN - 60.0)


def test_after_a_restart_what_is_still_there_is_not_told_again() -> None:
    clinic = Clinic(interval_seconds=INTERVAL)
    clinic.resume("uid-grpo", [_known("OOMRisk")])
    course = Course(clinic, peaks=RISING)
    course.run()
    assert "OOMRisk" not in _told(course)
    assert all("OOMRisk" in {one.reason for one in opinion.open} for opinion in course.opinions)


def test_after_a_restart_what_is_gone_is_over_after_some_steps() -> None:
    clinic = Clinic(interval_seconds=INTERVAL)
    clinic.resume("uid-grpo", [_known("OOMRisk"), _known("Hang")])
    course = Course(clinic, peaks=CALM)
    course.run()
    assert {one.reason for one in course.opinions[0].open} == {"OOMRisk", "Hang"}
    assert course.opinions[-1].open == ()


def test_where_there_is_no_room_a_job_is_followed_in_part_or_not_at_all() -> None:
    for budget, gpus in ((10_000, 8), (1_000, 4), (100, 0)):
        course = Course(Clinic(interval_seconds=INTERVAL, budget_pieces=budget), peaks=CALM[:2], gpus=4)
        course.run()
        coverage = course.opinions[-1].coverage
        assert coverage is not None
        assert coverage["gpus"] == gpus
        assert (coverage["message"] is None) == (budget == 10_000)
    assert course.opinions[-1].unknown["Hung"][0] == "NotFollowed"


def test_there_is_room_for_fifteen_thousand_gpus() -> None:
    deep = DEEP_SHARE * BUDGET_PIECES / (STAGES * DEEP)
    shallow = (ALL_SHARE - DEEP_SHARE) * BUDGET_PIECES / (STAGES * SHALLOW)
    assert deep + shallow >= 15_000


class CourseInParts(Course):
    """The same; the next reports come while rules are asked."""

    parts: Sequence[int] = ()

    def look(self, *, command: Command | None = None, thresholds: Thresholds | None = None) -> Opinion:
        judging = self.clinic.judging(
            self.workload, command=command, thresholds=thresholds, phase="Running", now=self.now
        )
        number = 0
        for number, _ in enumerate(judging, start=1):
            if number == 3:
                self._report(self.pods[0], 0, 50.0, last=False)
        self.parts = (*self.parts, number)
        self.opinions.append(self.clinic.opinion(self.workload.job.uid))
        return self.opinions[-1]


def test_a_large_job_is_judged_in_parts_to_the_same_end() -> None:
    peaks, gpus = [*RISING, *[50.0] * 14], DIVIDED_GPUS // 2
    course = CourseInParts(Clinic(interval_seconds=INTERVAL), peaks=peaks, gpus=gpus)
    whole = Course(Clinic(interval_seconds=INTERVAL), peaks=peaks, gpus=gpus)
    course.run()
    whole.run()
    assert max(course.parts) > 10
    assert _told(course) == _told(whole)
    assert {one.key for one in course.opinions[-1].open} == {one.key for one in whole.opinions[-1].open}


def test_a_small_job_is_judged_at_one_go() -> None:
    course = CourseInParts(Clinic(interval_seconds=INTERVAL), peaks=CALM[:4])
    course.run()
    assert max(course.parts) == 0


def test_room_is_given_back() -> None:
    clinic = Clinic(interval_seconds=INTERVAL)
    course = Course(clinic, peaks=CALM[:2])
    course.run()
    assert clinic.pieces > 0
    clinic.forget(course.workload.job.uid)
    assert clinic.pieces == 0


def test_thresholds_may_be_others_for_one_job() -> None:
    patient = thresholds_of({"oomRisk": {"risingLeast": 0.9, "nearRatio": 1.0, "risingSteps": 20}})
    course = Course(Clinic(interval_seconds=INTERVAL, thresholds=patient), peaks=RISING)
    course.run()
    assert "OOMRisk" not in _told(course)
    course.now += 60.0
    course._report(course.pods[0], 99, 77.0, last=True)
    course._report(course.pods[1], 99, 77.0, last=True)
    assert "OOMRisk" in {one.reason for one in course.look(thresholds=Thresholds()).open}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hang": {"spinSeconds": -1}}, "spinSeconds"),
        ({"hang": {"spinSecond": 10}}, "spinSecond"),
        ({"hnag": {}}, "hnag"),
        ({"hang": 3}, "hang"),
    ],
)
def test_thresholds_that_cannot_be_are_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        thresholds_of(given)


def test_a_container_that_was_killed_for_its_memory_is_told_without_a_report() -> None:
    course = Course(Clinic(interval_seconds=INTERVAL), peaks=CALM[:4])
    course.run()
    killed = ContainerState(phase=ContainerPhase.TERMINATED, reason="OOMKilled", exit_code=137)
    course.workloads.pod_seen(replace(course.pods[0], main=killed))
    course.now += 30.0
    assert [one.finding.severity for one in course.look().raised if one.reason == "HostMemoryRisk"] == ["critical"]
