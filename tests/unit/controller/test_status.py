# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a status says, and that it is always within the CRD's bounds."""

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.controller.builders import GIB, gpu, job, report
from verl_gpumonitor.model.figures import percent
from verl_gpumonitor.model.findings import Advice, Scope
from verl_gpumonitor.model.report import StageQuality
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Phase, Severity, Source
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.launch import Command, rendered
from verl_gpumonitor_operator.controller.stages import PoolNow, StageView, rows
from verl_gpumonitor_operator.controller.status import (
    Condition,
    GpuView,
    OpenFinding,
    Picture,
    Urgency,
    merge_patch,
    merged,
    previous_run,
    render,
    urgency,
    worst,
)
from verl_gpumonitor_operator.controller.steps import Pace
from verl_gpumonitor_operator.controller.telemetry import MONITORED, PodSummary, Seen, Telemetry, Verdict
from verl_gpumonitor_operator.controller.totals import Peak, StageSum, Totals

DEFINITION = Path(__file__).parents[3] / "crds" / "gpumonitor.dev_gpumonitors.yaml"
CRD = yaml.load(DEFINITION.read_text(), Loader=yaml.CSafeLoader)
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]


def closed(schema: Any) -> Any:
    """The same schema, in which a field that it does not name is an error and not pruned."""
    if isinstance(schema, dict):
        made = {key: closed(value) for key, value in schema.items()}
        return (
            made | {"additionalProperties": False} if schema.get("type") == "object" and "properties" in made else made
        )
    return [closed(item) for item in schema] if isinstance(schema, list) else schema


CHECK = jsonschema.Draft202012Validator(closed(SCHEMA))
NOW = 2000.0


def view(number: int, **more: Any) -> GpuView:
    values = {"memory_recent_peak_bytes": 40 * GIB, **more}
    return GpuView.of(gpu(f"GPU-{number:03d}", **values), pod=f"w-{number // 8}", node="n", pool="gpu", utilization=0.5)


def summary(name: str, verdict: Verdict = MONITORED) -> PodSummary:
    return PodSummary(name=name, gpus_requested=4, gpus_reported=4, faulty=(), verdict=verdict)


def picture(**more: Any) -> Picture:
    values: dict[str, Any] = {
        "job": job(JobKind.RAY_JOB, "grpo", phase=Phase.RUNNING),
        "phase": Phase.RUNNING,
        "ended": False,
        "completed_at": None,
        "gone_at": None,
        "gpus_requested": 4,
        "most_reported": 4,
        "gpus": [view(number) for number in range(4)],
        "pods": [summary("w-0")],
        "telemetry": [Telemetry.of(report("w-0"), NOW)],
        "totals": Totals(gpu_seconds=100.0, busy_seconds=71.0, energy_joules=5.0, peak=Peak(70 * GIB, 80 * GIB)),
        "conditions": [Condition(type="OOMRisk", status="False", reason="NotDetected", message="Nothing.")],
        "health": "OK",
        "gpu_notes": {},
        "generation": 1,
        **more,
    }
    return Picture(**values)


def test_a_job_that_was_scaled_down_before_its_end_held_what_it_reported() -> None:
    running = render(picture(most_reported=8), before={}, now=NOW)
    assert running["gpus"]["text"] == "4/4"
    ended = render(picture(most_reported=8, ended=True, phase=Phase.SUCCEEDED, gpus=[]), before=running, now=NOW)
    assert ended["gpus"] == {"requested": 8, "reported": 8, "text": "8/8"}


def test_a_running_job_shows_the_present_and_an_ended_one_its_whole_life() -> None:
    running = render(picture(), before={}, now=NOW)
    assert running["utilization"] == {"mean": 0.5, "text": "50%"}
    assert running["memory"]["text"] == "50%"
    ended = render(picture(ended=True, phase=Phase.SUCCEEDED, gpus=[]), before=running, now=NOW)
    assert ended["utilization"] == {"mean": 0.71, "text": "71%"}
    assert ended["memory"]["peakBytes"] == 70 * GIB
    assert ended["gpus"] == running["gpus"]
    assert ended["worstGpus"] == running["worstGpus"]


def test_pods_that_end_one_after_the_other_do_not_make_a_job_smaller() -> None:
    half = render(picture(gpus=[view(0), view(1)]), before={}, now=NOW)
    assert half["gpus"]["text"] == "2/4"
    ended = render(picture(ended=True, gpus=[], gpus_requested=0), before=half, now=NOW)
    assert ended["gpus"]["text"] == "4/4"


def test_what_is_unknown_has_no_key() -> None:
    bare = gpu(utilization=None, memory_used_bytes=None, memory_total_bytes=None)
    unknown = GpuView.of(bare, pod="w", node=None, pool="", utilization=None)
    status = render(picture(gpus=[unknown], totals=Totals(), telemetry=[]), before={}, now=NOW)
    assert status["gpus"]["reported"] == 0
    assert {"utilization", "memory", "totals"} & status.keys() == set()
    assert status["worstGpus"] == [{"pod": "w", "uuid": "GPU-0", "state": "ok"}]


def test_zero_is_a_value() -> None:
    idle = GpuView.of(gpu(utilization=0.0, memory_used_bytes=0), pod="w", node=None, pool="", utilization=0.0)
    status = render(picture(gpus=[idle]), before={}, now=NOW)
    assert status["utilization"] == {"mean": 0.0, "text": "0%"}
    assert status["memory"]["text"] == "0%"


def test_the_mean_counts_only_gpus_that_are_there() -> None:
    lost = GpuView.of(gpu("GPU-9", state=GpuState.LOST), pod="w", node=None, pool="", utilization=None)
    status = render(picture(gpus=[view(0), lost]), before={}, now=NOW)
    assert status["utilization"]["mean"] == 0.5
    assert status["gpus"]["text"] == "1/4"


def test_the_worst_come_first() -> None:
    gpus = [view(0), view(1, memory_recent_peak_bytes=79 * GIB), view(2), view(3, state=GpuState.LOST)]
    found = worst(gpus, {"GPU-002": "Imbalance"})
    assert [item.report.uuid for item in found] == ["GPU-003", "GPU-002", "GPU-001", "GPU-000"]


@pytest.mark.parametrize("left", [4, 1, 0], ids=["all pods report once more", "one reports", "all are gone"])
def test_an_ended_job_says_still_why_a_gpu_was_shown(left: int) -> None:
    running = render(picture(gpu_notes={"GPU-003": "OOMRisk"}), before={}, now=NOW)
    rest = [view(number) for number in range(4 - left, 4)]
    ended = render(picture(ended=True, phase=Phase.FAILED, gpus=rest), before=running, now=NOW)
    again = render(picture(ended=True, phase=Phase.FAILED, gpus=rest), before=ended, now=NOW)
    for status in (ended, again):
        assert next((item["uuid"], item.get("note")) for item in status["worstGpus"]) == ("GPU-003", "OOMRisk")


def test_a_finding_that_is_over_leaves_no_note_on_a_running_job() -> None:
    before = render(picture(gpu_notes={"GPU-003": "OOMRisk"}), before={}, now=NOW)
    assert not any("note" in item for item in render(picture(), before=before, now=NOW)["worstGpus"])


@pytest.mark.parametrize("used", [97_496, 97_499, 97_494, 96_500, 99_996, 49_996], ids=str)
def test_a_peak_is_the_same_percent_in_each_place(used: int) -> None:
    peak = Peak(used, 100_000)
    pairs = {("update_actor", "actor"): StageSum(10.0, 5.0, peak=peak)}
    full = view(0, memory_recent_peak_bytes=used, memory_total_bytes=100_000)
    status = render(picture(gpus=[full], stages=StageView(rows=rows(pairs, Pace()))), before={}, now=NOW)
    said = status["memory"]["text"]
    assert status["stageTable"][1].split()[-2] == said
    assert percent(peak.ratio) == percent(status["memory"]["peakRatio"]) == said


@pytest.mark.parametrize(
    ("sources", "shown"),
    [
        pytest.param([Source.NVML, Source.NVML], "nvml", id="all by NVML"),
        pytest.param([Source.NVML, Source.RAY_AGENT], "ray-agent", id="the weakest is shown"),
        pytest.param([Source.NONE, Source.NVML], "none", id="one sees nothing"),
        pytest.param([], None, id="nobody has reported"),
    ],
)
def test_source(sources: list[Source], shown: str | None) -> None:
    heard = [Telemetry.of(report("w", source=source), NOW) for source in sources]
    assert render(picture(telemetry=heard), before={}, now=NOW)["dataQuality"].get("source") == shown


def test_transition_time_changes_with_the_status_alone() -> None:
    one = [Condition(type="OOMRisk", status="True", reason="OOMRisk", message="78 GiB")]
    first = merged([], one, 1, NOW)
    other = [Condition(type="OOMRisk", status="True", reason="MemoryGrowth", message="79 GiB")]
    second = merged(first, other, 1, NOW + 60)
    assert second[0]["lastTransitionTime"] == first[0]["lastTransitionTime"]
    assert second[0]["message"] == "79 GiB"
    cleared = [Condition(type="OOMRisk", status="False", reason="NotDetected", message="")]
    assert merged(second, cleared, 1, NOW + 60)[0]["lastTransitionTime"] != first[0]["lastTransitionTime"]


def test_conditions_of_a_later_version_stay() -> None:
    other = {"type": "Hung", "status": "True", "reason": "Hang", "message": "", "lastTransitionTime": "x"}
    assert [item["type"] for item in merged([other], picture().conditions, 1, NOW)] == ["Hung", "OOMRisk"]


def test_previous_run_sums_up_a_status() -> None:
    status = render(picture(ended=True, phase=Phase.FAILED, completed_at=1500.0), before={}, now=NOW)
    assert previous_run(status) == {
        "uid": "uid-grpo",
        "phase": "Failed",
        "startTime": "1970-01-01T00:16:40Z",
        "completionTime": "1970-01-01T00:25:00Z",
        "utilization": 0.71,
        "memoryPeakRatio": 0.875,
        "health": "OK",
    }
    assert previous_run({}) is None


def changed(**more: Any) -> dict[str, Any]:
    return render(picture(**more), before={}, now=NOW)


@pytest.mark.parametrize(
    ("after", "matters"),
    [
        pytest.param(changed(), Urgency.NONE, id="nothing differs"),
        pytest.param(changed(totals=Totals(gpu_seconds=200.0, energy_joules=5.0)), Urgency.DRIFT, id="counters grow"),
        pytest.param(
            changed(gpus=[view(number, memory_recent_peak_bytes=41 * GIB) for number in range(4)]),
            Urgency.DRIFT,
            id="memory moves by one point",
        ),
        pytest.param(
            changed(gpus=[view(number, memory_recent_peak_bytes=43 * GIB) for number in range(4)]),
            Urgency.CHANGE,
            id="memory moves by three points",
        ),
        pytest.param(changed(gpus=[]), Urgency.CHANGE, id="values vanish"),
        pytest.param(changed(phase=Phase.FAILED), Urgency.PHASE, id="the phase changes"),
        pytest.param(changed(stages=StageView(stage="gen", role="rollout")), Urgency.PROGRESS, id="another stage"),
        pytest.param(changed(stages=StageView(step=7)), Urgency.PROGRESS, id="another step"),
        pytest.param(changed(stages=StageView(step=7), health="OOMRisk"), Urgency.CHANGE, id="a step and a finding"),
        pytest.param(changed(stages=StageView(seconds_per_step=7.0)), Urgency.DRIFT, id="seconds of a step"),
        pytest.param(
            changed(stages=StageView(quality=StageQuality(source=StageSource.RAY_STATE))),
            Urgency.CHANGE,
            id="somebody tells stages",
        ),
        pytest.param(changed(launch={"program": "x"}), Urgency.CHANGE, id="the command line is known"),
        pytest.param(changed(health="OOMRisk"), Urgency.CHANGE, id="health changes"),
        pytest.param(changed(gpus_requested=8), Urgency.CHANGE, id="it grows"),
        pytest.param(
            changed(conditions=[Condition(type="OOMRisk", status="False", reason="NotDetected", message="Other.")]),
            Urgency.DRIFT,
            id="a message alone drifts",
        ),
        pytest.param(
            changed(pods=[summary("w-0", Verdict(seen=Seen.UNMONITORED, reason="NotInjected", message="x"))]),
            Urgency.CHANGE,
            id="a pod is not seen",
        ),
    ],
)
def test_urgency(after: dict[str, Any], matters: Urgency) -> None:
    assert urgency(changed() | {"ledger": "{}"}, after) is matters


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        pytest.param({}, {"a": 1}, {"a": 1}, id="a new key"),
        pytest.param({"a": 1}, {}, {"a": None}, id="a key that is gone"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": {"c": 3}}, id="an inner change"),
        pytest.param({"a": {"b": 1}}, {"a": {"c": 1}}, {"a": {"b": None, "c": 1}}, id="an inner exchange"),
        pytest.param({"a": [1, 2]}, {"a": [1]}, {"a": [1]}, id="lists are replaced whole"),
        pytest.param({"a": {"b": 1}}, {"a": {"b": 1}}, {}, id="nothing"),
    ],
)
def test_merge_patch(before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]) -> None:
    assert merge_patch(before, after) == patch


@pytest.mark.parametrize(("ratio", "text"), [(0.0, "0%"), (0.714, "71%"), (0.995, "100%"), (1.0, "100%")])
def test_percent(ratio: float, text: str) -> None:
    assert percent(ratio) == text


@given(ratio=st.floats(0.0, 1.0))
def test_a_ratio_that_was_written_down_is_the_same_percent(ratio: float) -> None:
    assert percent(round(ratio, 4)) == percent(ratio)


LONG = st.text(min_size=0, max_size=400) | st.just("x" * 5000)
BYTES = st.none() | st.integers(0, 2**50)
RATIO = st.none() | st.floats(0.0, 1.0)
VIEWS = st.builds(
    GpuView.of,
    pod=st.text(min_size=1, max_size=253),
    node=st.none() | st.text(min_size=1, max_size=253),
    pool=st.just(""),
    report=st.builds(
        gpu,
        st.text(min_size=1, max_size=96),
        state=st.sampled_from(GpuState),
        error=st.none() | st.text(max_size=128),
        index=st.none() | st.integers(0, 1024),
        model=st.none() | st.text(max_size=256),
        utilization=RATIO,
        memory_used_bytes=BYTES,
        memory_total_bytes=BYTES,
        memory_recent_peak_bytes=BYTES,
        temperature_celsius=st.none() | st.floats(-50, 250),
        power_watts=st.none() | st.floats(0, 5000),
    ),
    utilization=RATIO,
)
VERDICTS = st.builds(
    Verdict,
    seen=st.sampled_from(Seen),
    reason=st.none() | st.from_regex(r"[A-Z][A-Za-z]{0,300}", fullmatch=True),
    message=st.none() | LONG,
)
PODS = st.builds(
    PodSummary,
    name=st.text(min_size=1, max_size=253),
    gpus_requested=st.integers(0, 1024),
    gpus_reported=st.integers(0, 1024),
    faulty=st.just(()),
    verdict=VERDICTS,
)
TELEMETRY = st.builds(
    lambda source, ownership: Telemetry.of(report("w", source=source, ownership=ownership), NOW),
    st.sampled_from(Source),
    st.sampled_from(Ownership),
)
TOTALS = st.builds(
    Totals,
    gpu_seconds=st.floats(0, 1e12),
    busy_seconds=st.floats(0, 1e12),
    energy_joules=st.none() | st.floats(0, 1e18),
    peak=st.none() | st.builds(Peak, st.integers(0, 2**50), st.integers(1, 2**50)),
    gaps_seconds=st.floats(0, 1e9),
    lost_starts=st.integers(0, 10**9),
)
SUMS = st.builds(
    StageSum,
    st.floats(0, 1e12),
    st.floats(0, 1e12),
    st.none() | st.floats(0, 1e18),
    st.none() | st.builds(Peak, st.integers(0, 2**50), st.integers(1, 2**50)),
    st.none() | st.integers(0, 2**50),
)
STAGE_VIEWS = st.builds(
    StageView,
    stage=st.none() | LONG,
    role=st.none() | LONG,
    step=st.none() | st.integers(0, 2**53),
    seconds_per_step=st.none() | st.floats(0, 1e10),
    pools=st.lists(st.builds(PoolNow, name=LONG, stage=LONG, role=LONG, gpus=st.integers(0, 10**5)), max_size=8),
    rows=st.dictionaries(st.tuples(LONG, LONG), SUMS, max_size=20).map(lambda pairs: rows(pairs, Pace())),
    quality=st.none()
    | st.builds(
        StageQuality,
        source=st.sampled_from(StageSource),
        resolution_seconds=st.none() | st.floats(0, 3600),
        reason=st.none() | st.text(max_size=64),
        message=st.none() | st.text(max_size=512),
    ),
)
LAUNCHES = st.sampled_from(
    [
        None,
        rendered(Command(text="", source="spec")),
        rendered(
            Command(
                text="python -m verl.x " + " ".join(f"a.k{n}={'v' * 999}" for n in range(99)),
                source="ray-jobs",
                verl_version="v" * 32,
            )
        ),
    ]
)
FINDINGS = st.builds(
    OpenFinding,
    reason=st.from_regex(r"[A-Z][A-Za-z]{0,100}", fullmatch=True),
    severity=st.sampled_from(Severity),
    message=LONG,
    since=st.none() | st.floats(0, 4e9),
    scope=st.builds(
        Scope,
        pods=st.lists(LONG, max_size=6).map(tuple),
        gpus=st.lists(LONG, max_size=6).map(tuple),
        stage=st.none() | LONG,
        role=st.none() | LONG,
    ),
    advice=st.lists(
        st.builds(
            Advice,
            parameter=st.none() | LONG,
            current=st.none() | LONG,
            suggested=st.none() | LONG,
            text=LONG,
            reason=LONG,
            price=LONG,
            confidence=LONG,
        ),
        max_size=3,
    ).map(tuple),
)
CONDITIONS = st.lists(
    st.builds(
        Condition,
        type=st.from_regex(r"[A-Z][A-Za-z]{0,30}", fullmatch=True),
        status=st.sampled_from(["True", "False", "Unknown"]),
        reason=st.text(max_size=300) | st.from_regex(r"[A-Za-z0-9_,:]{1,200}", fullmatch=True),
        message=LONG,
    ),
    max_size=40,
)
PICTURES = st.builds(
    picture,
    findings=st.lists(FINDINGS, max_size=20),
    stages=STAGE_VIEWS,
    launch=LAUNCHES,
    job=st.builds(
        lambda message, cluster: job(JobKind.RAY_JOB, "grpo", message=message, ray_cluster=cluster),
        st.none() | LONG,
        st.none() | LONG,
    ),
    phase=st.sampled_from(Phase),
    ended=st.booleans(),
    completed_at=st.none() | st.floats(0, 4e9),
    gpus_requested=st.integers(0, 10**6),
    most_reported=st.integers(0, 10**6),
    gpus=st.lists(VIEWS, max_size=24),
    pods=st.lists(PODS, max_size=24),
    telemetry=st.lists(TELEMETRY, max_size=8),
    totals=TOTALS,
    conditions=CONDITIONS,
    health=LONG,
    gpu_notes=st.dictionaries(st.text(max_size=8), LONG, max_size=3),
    generation=st.none() | st.integers(0, 2**40),
    message=st.none() | LONG,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(one=PICTURES, other=PICTURES)
def test_every_status_is_within_the_bounds_of_the_crd(one: Picture, other: Picture) -> None:
    first = render(one, before={}, now=NOW)
    second = render(other, before=first | {"previousRun": previous_run(first)}, now=NOW)
    for status in (first, second):
        errors = [f"{list(error.path)}: {error.message[:200]}" for error in CHECK.iter_errors(status)]
        assert errors == []


def test_a_reason_that_is_no_word_does_not_cost_the_status() -> None:
    """It may stand in an annotation of somebody's pod."""
    strange = ["9", "two words", "", "Nl\n", "x" * 200, "Good", "a,", "ü"]
    given = [Condition(type=f"T{n}", status="False", reason=reason, message="m") for n, reason in enumerate(strange)]
    status = render(picture(conditions=given), before={}, now=NOW)
    assert [error.message for error in CHECK.iter_errors(status)] == []
    said = {one["type"]: one["reason"] for one in status["conditions"]}
    assert said == {
        **{f"T{n}": "Other" for n in (0, 1, 2, 3, 6, 7)},
        "T4": "x" * 128,
        "T5": "Good",
    }


def paths(value: Any, above: str = "") -> set[str]:
    """Paths of all fields of a document."""
    if isinstance(value, dict):
        return {f"{above}.{key}" for key in value} | {
            path for key, item in value.items() for path in paths(item, f"{above}.{key}")
        }
    return {path for item in value for path in paths(item, f"{above}[]")} if isinstance(value, list) else set()


def schema_paths(schema: dict[str, Any], above: str = "") -> set[str]:
    """Paths of all fields that a schema knows."""
    found: set[str] = set()
    for key, one in schema.get("properties", {}).items():
        found |= {f"{above}.{key}"} | schema_paths(one, f"{above}.{key}")
    return found | (schema_paths(schema["items"], f"{above}[]") if "items" in schema else set())


def test_every_field_of_the_schema_is_written_and_no_other() -> None:
    """What the schema does not know, the API server drops without a word; what nobody writes, nobody finds."""
    advice = Advice(parameter="a.b", current="1", suggested="2", text="t", reason="r", price="p")
    scope = Scope(pods=("w-0",), gpus=("GPU-0",), stage="gen", role="rollout")
    warning = OpenFinding(
        reason="OOMRisk", severity=Severity.WARNING, message="m", since=NOW, scope=scope, advice=(advice,)
    )
    told = "python -m verl.trainer.main_ppo --config-name=mine trainer.use_v1=True " + " ".join(
        f"a.k{n}=1" for n in range(99)
    )
    # Either the release is known, or it is guessed by what runs.
    commands = [
        rendered(Command(text=told, source="ray-jobs", verl_version="0.9.1")),
        rendered(Command(text=told, source="ray-jobs")),
    ]
    pairs = {("gen", "rollout"): StageSum(10.0, 5.0, 3.0, Peak(70 * GIB, 80 * GIB), GIB)}
    pace = Pace()
    note = {"reason": "OOMRisk", "message": "m"}
    known: set[str] = set()
    for launch in commands:
        whole = picture(
            job=job(JobKind.RAY_JOB, "grpo", message="m", ray_cluster="c", phase=Phase.RUNNING),
            gpus=[view(0, error="e", index=0, model="H100", temperature_celsius=50.0, power_watts=300.0)],
            pods=[summary("w-0", Verdict(seen=Seen.UNMONITORED, reason="R", message="m"))],
            completed_at=NOW,
            gone_at=NOW,
            message="m",
            host_memory={"marks"},
            launch=launch,
            findings=[warning],
            diagnosis={"gpus": 1, "steps": 1, "message": "m", "notJudged": [note]},
            stages=StageView(
                stage="gen",
                role="rollout",
                step=3,
                seconds_per_step=1.5,
                pools=[PoolNow(name="g", stage="gen", role="rollout", gpus=8)],
                rows=rows(pairs, pace),
                quality=StageQuality(source=StageSource.RAY_AGENT, resolution_seconds=5.0, reason="r", message="m"),
            ),
        )
        first = render(whole, before={}, now=NOW)
        before = first | {"previousRun": previous_run(first), "stages": [{**first["stages"][0], "secondsPerStep": 2.0}]}
        status = render(whole, before=before, now=NOW)
        assert [error.message for error in CHECK.iter_errors(status)] == []
        known |= paths(status)
    # The ledger is added where it is not kept elsewhere: see test_ledgers.
    assert known | {".ledger"} == schema_paths(SCHEMA)


def test_the_largest_status_is_small_enough_for_the_api_server_and_for_us() -> None:
    """At most 64 KiB, whatever the job: every list full, every text as long as it may be."""
    many = [view(number, error="e" * 128, model="m" * 256) for number in range(2000)]
    unseen = Verdict(seen=Seen.UNMONITORED, reason="R" * 128, message="m" * 900)
    wide = {
        (f"stage-{number:058d}", "r" * 64): StageSum(1e9, 1e8, 1e12, Peak(70 * GIB, 80 * GIB), GIB)
        for number in range(40)
    }
    command = Command(text="python -m verl.x " + " ".join(f"a.k{n}={'v' * 999}" for n in range(99)), source="spec")
    full = picture(
        gpus=many,
        pods=[summary("p" * 253, unseen) for _ in range(100)],
        gpu_notes={f"GPU-{number:03d}": "n" * 400 for number in range(2000)},
        conditions=[Condition(type=f"T{n}", status="True", reason="R", message="m" * 700) for n in range(12)],
        message="m" * 1024,
        launch=rendered(command),
        stages=StageView(
            stage="s" * 64,
            role="r" * 64,
            step=2**53,
            pools=[PoolNow(name="p" * 253, stage="s" * 64, role="r" * 64, gpus=8)] * 8,
            rows=rows(wide, Pace()),
            quality=StageQuality(source=StageSource.RAY_AGENT, reason="r" * 64, message="m" * 512),
        ),
    )
    status = render(full, before={}, now=NOW)
    assert len(msgspec.json.encode(status)) < 64 * 1024
    assert [error.message for error in CHECK.iter_errors(status)] == []


def test_seconds_of_a_step_stay_until_they_are_known_anew() -> None:
    pairs = {("gen", "rollout"): StageSum(10.0, 5.0)}
    known = Pace(cycles=1, seconds_per_step=8.0, stages={("gen", "rollout"): 3.5})
    first = render(picture(stages=StageView(seconds_per_step=8.0, rows=rows(pairs, known))), before={}, now=NOW)
    later = render(picture(stages=StageView(rows=rows(pairs, Pace()))), before=first, now=NOW)
    assert later["secondsPerStep"] == 8.0
    assert later["stages"][0]["secondsPerStep"] == 3.5
    assert "3.5" in later["stageTable"][1]


def test_an_ended_job_has_no_stage_and_keeps_its_table_and_step() -> None:
    pairs = {("gen", "rollout"): StageSum(10.0, 5.0)}
    running = picture(stages=StageView(stage="gen", role="rollout", step=7, rows=rows(pairs, Pace())))
    first = render(running, before={}, now=NOW)
    assert (first["stage"], first["role"], first["step"]) == ("gen", "rollout", 7)
    ended = render(picture(ended=True, phase=Phase.SUCCEEDED, gpus=[]), before=first, now=NOW)
    assert {"stage", "role", "pools"} & ended.keys() == set()
    assert ended["step"] == 7
    assert (ended["stages"], ended["stageTable"]) == (first["stages"], first["stageTable"])
