# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Counters equal those of an undisturbed run, whatever happens to reports on their way."""

import base64
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.controller.builders import GIB, gpu, report
from verl_gpumonitor.model.report import MAX_GPUS, Report, StageCount, StageQuality
from verl_gpumonitor_operator.controller.ledger import MAX_STARTS, PodLedger, StartLedger, total_of
from verl_gpumonitor_operator.controller.ledger_text import MAX_WRITTEN, VERSION, WrittenLedger, read, write
from verl_gpumonitor_operator.controller.totals import (
    MAX_KEYS,
    Peak,
    StageKey,
    StageSum,
    StageSums,
    Totals,
    observed,
    of_gpus,
    summed,
)


@dataclass(frozen=True)
class Run:
    """All reports of one pod, in the order in which they were made."""

    reports: tuple[Report, ...]

    @property
    def last_of_each_start(self) -> set[int]:
        last = {item.start_id: number for number, item in enumerate(self.reports)}
        return set(last.values())


@st.composite
def runs(draw: st.DrawFn) -> Run:
    reports: list[Report] = []
    clock = 1000.0
    for start in range(draw(st.integers(1, 4))):
        started, observed, busy, energy, peak = clock, 0.0, 0.0, 0.0, 1
        stages: dict[StageKey, StageSum] = {}
        for sequence in range(1, draw(st.integers(1, 6)) + 1):
            step = draw(st.floats(0.5, 20.0))
            clock += step
            observed += step
            busy += step * draw(st.floats(0.0, 1.0))
            energy += step * 300.0
            peak = max(peak, draw(st.integers(1, 80)))
            key = StageKey(
                draw(st.sampled_from(["gen", "update_actor", "other"])), "actor", draw(st.sampled_from(["", "j"]))
            )
            stages[key] = stages.get(key, StageSum()).plus(
                StageSum(step, step / 2, step * 300.0, Peak(peak * GIB, 80 * GIB), (81 - peak) * GIB)
            )
            reports.append(
                report(
                    "w-0",
                    start_id=f"start-{start:03d}",
                    sequence=sequence,
                    started_at=started,
                    sent_at=clock,
                    gpus=[
                        gpu(
                            uuid,
                            observed_seconds=observed,
                            busy_seconds=busy,
                            energy_joules=energy,
                            memory_peak_bytes=peak * GIB,
                            stages=counts(stages),
                        )
                        for uuid in ("GPU-0", "GPU-1")
                    ],
                )
            )
        clock += draw(st.floats(0.0, 5.0))
    return Run(tuple(reports))


def counts(stages: Mapping[StageKey, StageSum]) -> list[StageCount]:
    return [
        StageCount(
            key.stage,
            key.role,
            value.observed_seconds,
            value.busy_seconds,
            value.energy_joules,
            value.peak.used_bytes if value.peak else None,
            value.floor_bytes,
            key.job,
        )
        for key, value in stages.items()
    ]


def counted(reports: Sequence[Report]) -> PodLedger:
    ledger = PodLedger()
    for item in reports:
        ledger.count(item)
    return ledger


def same(one: Totals, other: Totals) -> bool:
    return (
        one.gpu_seconds == pytest.approx(other.gpu_seconds)
        and one.busy_seconds == pytest.approx(other.busy_seconds)
        and one.energy_joules == pytest.approx(other.energy_joules)
        and one.peak == other.peak
        and one.lost_starts == other.lost_starts
        and same_stages(one.stages, other.stages)
    )


def same_stages(one: StageSums, other: StageSums, *, within: float = 1e-6) -> bool:
    """`within`: seconds; joules may differ by a few hundred times that."""
    return one.keys() == other.keys() and all(
        value.observed_seconds == pytest.approx(other[key].observed_seconds, abs=within)
        and value.busy_seconds == pytest.approx(other[key].busy_seconds, abs=within)
        and value.energy_joules == pytest.approx(other[key].energy_joules, abs=300 * within)
        and (value.peak, value.floor_bytes) == (other[key].peak, other[key].floor_bytes)
        for key, value in one.items()
    )


@given(run=runs(), data=st.data())
def test_loss_repetition_and_order_do_not_matter(run: Run, data: st.DataObject) -> None:
    """As long as the last report of each start arrives some time, the sums are those of an undisturbed run."""
    numbers = data.draw(st.lists(st.sampled_from(range(len(run.reports))), max_size=3 * len(run.reports)))
    delivered = data.draw(st.permutations([*numbers, *sorted(run.last_of_each_start)]))
    disturbed = counted([run.reports[number] for number in delivered])
    assert same(disturbed.totals(gone=True), counted(run.reports).totals(gone=True))


@given(run=runs(), data=st.data())
def test_a_restart_of_the_controller_does_not_matter(run: Run, data: st.DataObject) -> None:
    """What is counted, written down, read back and counted on equals what is counted in one life."""
    cut = data.draw(st.integers(0, len(run.reports)))
    missed = data.draw(st.integers(0, len(run.reports) - cut))
    first = counted(run.reports[:cut])
    restored = read(write(WrittenLedger(pods={"uid-w-0": first})).text)
    assert restored is not None
    ledger = restored.pods.get("uid-w-0", PodLedger())
    # Reports that fell into the gap are lost, except the last one of each start.
    after = [
        item
        for number, item in enumerate(run.reports)
        if number >= cut + missed or (number >= cut and number in run.last_of_each_start)
    ]
    for item in after:
        ledger.count(item)
    whole, pieced = counted(run.reports).totals(gone=True), ledger.totals(gone=True)
    assert pieced.gpu_seconds == pytest.approx(whole.gpu_seconds, abs=0.1)
    assert pieced.busy_seconds == pytest.approx(whole.busy_seconds, abs=0.1)
    assert pieced.energy_joules == pytest.approx(whole.energy_joules, rel=1e-3, abs=1.0)
    assert pieced.peak == whole.peak
    assert same_stages(pieced.stages, whole.stages, within=1.0)


@given(run=runs())
def test_the_sum_over_stages_is_what_was_observed(run: Run) -> None:
    totals = counted(run.reports).totals(gone=True)
    assert observed(totals.stages) == pytest.approx(totals.gpu_seconds)
    assert sum(value.energy_joules or 0.0 for value in totals.stages.values()) == pytest.approx(totals.energy_joules)


def test_stages_of_a_gpu_that_is_left_out_stay() -> None:
    one, other = (
        counts({StageKey("gen", "rollout"): StageSum(5.0)}),
        counts({StageKey("gen", "rollout"): StageSum(7.0)}),
    )
    ledger = counted(
        [
            report("w-0", sequence=1, gpus=[gpu("GPU-0", stages=one), gpu("GPU-1", stages=other)]),
            report("w-0", sequence=2, gpus=[gpu("GPU-0", stages=one)]),
        ]
    )
    assert ledger.totals(gone=False).stages[StageKey("gen", "rollout")].observed_seconds == 12.0


def test_words_without_end_take_no_memory_without_end() -> None:
    pods = []
    for number in range(40):
        many = counts({StageKey(f"epoch_{number}_{index}", "trainer"): StageSum(1.0) for index in range(32)})
        pods.append(counted([report("w-0", start_id=f"start-{number:03d}", gpus=[gpu(stages=many)])]))
    total = total_of(pods, gone=True)
    assert len(total.stages) <= MAX_KEYS + 1
    assert observed(total.stages) == 40 * 32
    again = read(write(WrittenLedger(folded=total)).text)
    assert again is not None
    assert same_stages(again.folded.stages, total.stages)


def test_what_was_written_of_a_start_counts_until_it_has_said_more() -> None:
    def say(sequence: int, seconds: float) -> Report:
        return report(
            "w-0", sequence=sequence, gpus=[gpu(stages=counts({StageKey("gen", "rollout"): StageSum(seconds)}))]
        )

    restored = read(write(WrittenLedger(pods={"uid-w-0": counted([say(1, 50.0)])})).text)
    assert restored is not None
    pod = restored.pods["uid-w-0"]
    for sequence, seconds, expected in ((2, 40.0, 50.0), (3, 60.0, 60.0)):
        pod.count(say(sequence, seconds))
        assert pod.totals(gone=False).stages[StageKey("gen", "rollout")].observed_seconds == expected


def test_after_the_end_of_the_job_only_what_has_a_name_counts_on() -> None:
    def say(sequence: int, gen: float, other: float, busy: float) -> Report:
        stages = counts({StageKey("gen", "rollout"): StageSum(gen), StageKey("other", "unknown"): StageSum(other)})
        return report(
            "w-0", sequence=sequence, gpus=[gpu(observed_seconds=gen + other, busy_seconds=busy, stages=stages)]
        )

    pod = counted([say(1, 10.0, 5.0, 8.0)])
    pod.count(say(2, 12.0, 20.0, 9.0), after_end=True)
    totals = pod.totals(gone=False)
    assert (totals.gpu_seconds, totals.busy_seconds) == (15.0, 8.0)
    assert {key.stage: value.observed_seconds for key, value in totals.stages.items()} == {"gen": 12.0, "other": 5.0}
    assert pod.count(say(2, 12.0, 20.0, 9.0)).replay, "it is counted as heard"


def test_steps_are_summed_over_starts_and_outlive_a_restart() -> None:
    pod = counted(
        [
            report("w-0", sequence=1, stage_quality=StageQuality(steps=2)),
            report("w-0", sequence=2, stage_quality=StageQuality(steps=3)),
            report("w-0", start_id="start-002", started_at=2000.0, stage_quality=StageQuality(steps=1)),
        ]
    )
    assert pod.steps == 4
    restored = read(write(WrittenLedger(pods={"uid-w-0": pod})).text)
    assert restored is not None
    assert restored.pods["uid-w-0"].steps == 4
    assert pod.lean().steps == 4


def test_a_ledger_of_the_version_before_is_read() -> None:
    old = [[10.5, 5, None, [1, 2], 1.5, 1], [], {"uid-w-0": [{"start-001": [7, 1000, 15, [3.5, 1]]}]}]
    text = "2:" + base64.b64encode(zlib.compress(msgspec.json.encode(old))).decode()
    ledger = read(text)
    assert ledger is not None
    assert ledger.folded == Totals(gpu_seconds=10.5, busy_seconds=5.0, peak=Peak(1, 2), gaps_seconds=1.5, lost_starts=1)
    assert ledger.pods["uid-w-0"].totals(gone=False).gpu_seconds == 3.5


def test_a_replay_is_refused_and_counts_nothing() -> None:
    ledger = PodLedger()
    one = report("w-0", sequence=5, gpus=[gpu(observed_seconds=10.0)])
    assert ledger.count(one) == (5, False, True)
    assert ledger.count(one) == (5, True, False)
    old = report("w-0", sequence=4, gpus=[gpu(observed_seconds=99.0)])
    assert ledger.count(old) == (5, True, False)
    assert ledger.totals(gone=False).gpu_seconds == 10.0


def test_a_replay_from_before_a_restart_of_the_controller_is_refused() -> None:
    ledger = counted([report("w-0", sequence=7)])
    restored = read(write(WrittenLedger(pods={"uid-w-0": ledger})).text)
    assert restored is not None
    assert restored.pods["uid-w-0"].count(report("w-0", sequence=7)).replay
    assert not restored.pods["uid-w-0"].count(report("w-0", sequence=8)).replay


def test_old_starts_are_folded_and_their_reports_are_replays() -> None:
    starts = [
        report("w-0", start_id=f"start-{number:03d}", started_at=1000.0 + number, gpus=[gpu(observed_seconds=1.0)])
        for number in range(MAX_STARTS + 5)
    ]
    ledger = counted(starts)
    assert len(ledger.starts) == MAX_STARTS
    assert ledger.totals(gone=False).gpu_seconds == MAX_STARTS + 5
    assert ledger.count(starts[0]).replay


def test_a_start_without_goodbye_is_lost_and_the_time_between_starts_is_a_gap() -> None:
    ledger = counted(
        [
            report("w-0", start_id="start-001", started_at=1000.0, sent_at=1010.0),
            report("w-0", start_id="start-002", started_at=1025.0, sent_at=1030.0, final=True),
        ]
    )
    live = ledger.totals(gone=False)
    assert (live.lost_starts, live.gaps_seconds) == (1, 15.0)
    assert ledger.totals(gone=True).lost_starts == 1


def test_a_gpu_that_a_later_report_leaves_out_keeps_its_counters() -> None:
    ledger = counted(
        [
            report("w-0", sequence=1, gpus=[gpu("GPU-0", observed_seconds=5.0), gpu("GPU-1", observed_seconds=7.0)]),
            report("w-0", sequence=2, gpus=[gpu("GPU-0", observed_seconds=6.0)]),
        ]
    )
    assert ledger.totals(gone=False).gpu_seconds == 13.0


def test_a_start_keeps_no_more_gpus_than_a_pod_has() -> None:
    pod = PodLedger()
    for sequence in range(1, 101):
        new = [gpu(f"GPU-{sequence}-{index}", observed_seconds=1.0) for index in range(MAX_GPUS)]
        assert pod.count(report("w", sequence=sequence, gpus=new)) == (sequence, False, sequence == 1)
    pod.count(report("w", sequence=101, gpus=[gpu("GPU-1-0", observed_seconds=5.0)]))
    [start] = pod.starts.values()
    assert len(start.gpus) == MAX_GPUS
    assert pod.totals(gone=False).gpu_seconds == MAX_GPUS + 4.0


def test_unknown_energy_is_none_and_never_zero() -> None:
    assert counted([report("w-0", gpus=[gpu(observed_seconds=5.0)])]).totals(gone=True).energy_joules is None


def packed(document: object) -> str:
    return VERSION + base64.b64encode(zlib.compress(msgspec.json.encode(document))).decode()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="none"),
        pytest.param("x", id="a word"),
        pytest.param('{"version":1,"folded":[],"base":[],"pods":{}}', id="another version"),
        pytest.param(VERSION, id="the version alone"),
        pytest.param(VERSION + "!!!", id="no base64"),
        pytest.param(VERSION + "AAAA", id="nothing that was compressed"),
        pytest.param(packed({}), id="no array"),
        pytest.param(packed([[], []]), id="too short an array"),
        pytest.param(packed([[], [], {"uid": [{"start": ["x"]}]}]), id="no number"),
        pytest.param(packed([[], [], {}])[:-6], id="cut off"),
        pytest.param(packed([[0, 0, None, None, 0, 0, [[3, 1.0]]], [], {}, []]), id="a stage without a name"),
        pytest.param(VERSION + base64.b64encode(zlib.compress(b" " * 2**24)).decode(), id="a great deal of nothing"),
    ],
)
def test_what_is_no_ledger_is_read_as_none(text: str) -> None:
    assert read(text) is None


def uid_of(number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, str(number)))


STAGES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "other")


def crowd(number: int, *, restarted: bool, final: bool = False, staged: bool = False) -> dict[str, PodLedger]:
    """Pods as they are, with random uids and start ids; the later ones have counted more."""
    pods = {}
    for index in range(number):
        pod = PodLedger()
        for start in range(2 if restarted else 1):
            item = report(
                f"w-{index}",
                start_id=uuid.UUID(uid_of(1000 * index + start)).hex,
                started_at=1000.0 + 100 * start,
                sent_at=1090.123 + 100 * start,
                gpus=[
                    gpu(
                        observed_seconds=80.25 + index,
                        busy_seconds=8.125,
                        energy_joules=123456.7,
                        stages=counts(
                            {
                                StageKey(name, "actor"): StageSum(
                                    7.0 * place + index,
                                    3.0 + place,
                                    321.0 * index,
                                    Peak(60 * GIB + index, 80 * GIB),
                                    GIB,
                                )
                                for place, name in enumerate(STAGES if staged else ())
                            }
                        ),
                    )
                ],
                final=final,
            )
            pod.count(item)
        pods[uid_of(index)] = pod
    return pods


def all_of(ledger: WrittenLedger) -> Totals:
    return ledger.folded.plus(total_of(ledger.pods.values(), gone=False))


@pytest.mark.parametrize("number", [200, 900, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_sums_of_what_has_ended_are_kept_however_many_pods_there_are(
    number: int, restarted: bool, staged: bool
) -> None:
    """After a restart of the controller each live pod's newest start reports anew; then nothing is missing."""
    gone = Totals(gpu_seconds=7e6, busy_seconds=5e6, energy_joules=3e9, peak=Peak(70 * GIB, 80 * GIB), lost_starts=3)
    base = Totals(gpu_seconds=11.0)
    pods = crowd(number, restarted=restarted, staged=staged)
    before = WrittenLedger(folded=gone, base=base, pods=pods)
    text, left_out = write(before)
    assert len(text) <= MAX_WRITTEN
    assert (left_out > 0) == (number > 300)
    after = read(text)
    assert after is not None
    assert after.base == base
    assert len(after.pods) == number - left_out
    restored = dict(after.pods)
    for uid, pod in pods.items():
        start_id, newest = max(pod.starts.items(), key=lambda item: item[1].started_at)
        again = restored.setdefault(uid, PodLedger())
        [last] = newest.gpus.values()
        again.starts[start_id] = StartLedger(
            sequence=2, started_at=newest.started_at, sent_at=newest.sent_at, gpus={"GPU-0": last}, steps=newest.steps
        )
    assert same(all_of(WrittenLedger(folded=after.folded, pods=restored)), all_of(before))
    assert all_of(WrittenLedger(folded=after.folded, pods=restored)).gaps_seconds == pytest.approx(
        all_of(before).gaps_seconds, rel=0.01
    )


def test_pods_that_have_counted_least_are_left_out_first() -> None:
    pods = crowd(900, restarted=False)
    after = read(write(WrittenLedger(pods=pods)).text)
    assert after is not None
    assert set(after.pods) == set(list(pods)[-len(after.pods) :])


def test_a_start_that_said_goodbye_is_never_left_out_of_the_sums() -> None:
    before = WrittenLedger(pods=crowd(900, restarted=False, final=True))
    after = read(write(before).text)
    assert after is not None
    assert same(all_of(after), all_of(before))


def test_a_ledger_with_stages_has_room_for_a_usual_job() -> None:
    text, left_out = write(WrittenLedger(pods=crowd(90, restarted=False, staged=True)))
    assert left_out == 0
    again = read(text)
    assert again is not None
    assert len(again.pods) == 90
    assert all(pod.totals(gone=False).stages for pod in again.pods.values()), len(text)


def test_a_ledger_is_short() -> None:
    """It stands among what people read: at most 110 characters a pod, of which 64 are the two random uids."""
    assert len(write(WrittenLedger(pods=crowd(8, restarted=False))).text) < 8 * 110


def test_totals_after_a_base_are_never_negative() -> None:
    base = Totals(gpu_seconds=10.0, busy_seconds=5.0, energy_joules=100.0, lost_starts=2)
    later = Totals(gpu_seconds=12.0, busy_seconds=4.0, energy_joules=90.0, peak=Peak(1, 2))
    assert later.minus(base) == Totals(gpu_seconds=2.0, busy_seconds=0.0, energy_joules=0.0, peak=Peak(1, 2))


@given(
    gpus=st.lists(
        st.tuples(
            st.lists(
                st.builds(
                    StageCount,
                    st.sampled_from(["gen", "ref", "other"]),
                    st.sampled_from(["actor", "unknown"]),
                    st.floats(0, 1e6),
                    st.floats(0, 1e6),
                    st.none() | st.floats(0, 1e6),
                    st.none() | st.integers(0, 2**37),
                    st.none() | st.integers(0, 2**37),
                    st.sampled_from(["", "j1"]),
                ),
                max_size=8,
            ),
            st.none() | st.integers(1, 2**37),
        ),
        max_size=8,
    )
)
def test_the_fast_sum_is_the_sum(gpus: list[tuple[list[StageCount], int | None]]) -> None:
    pairs = (
        (
            StageKey(count.stage, count.role, count.job),
            StageSum(
                count.observed_seconds,
                count.busy_seconds,
                count.energy_joules,
                Peak(count.memory_peak_bytes, total) if total and count.memory_peak_bytes is not None else None,
                count.memory_floor_bytes,
            ),
        )
        for counts, total in gpus
        for count in counts
    )
    assert same_stages(of_gpus(gpus), summed(pairs))


def test_of_earlier_starts_the_sums_alone_are_kept() -> None:
    ledger = PodLedger()
    stages = [StageCount(stage="gen", role="actor", observed_seconds=4.0, busy_seconds=1.0)]
    for start in range(10):
        gpus = [gpu(f"GPU-{number}", observed_seconds=5.0, busy_seconds=2.0, stages=stages) for number in range(8)]
        item = report(
            "w-0", start_id=f"start-{start:03d}", started_at=1000.0 + start, sent_at=1000.5 + start, gpus=gpus
        )
        ledger.count(item)
    assert [len(start.gpus) for start in ledger.starts.values()] == [0] * 9 + [8]
    totals = ledger.totals(gone=False)
    assert (totals.gpu_seconds, totals.busy_seconds) == (400.0, 160.0)
    assert totals.stages[StageKey("gen", "actor")].observed_seconds == 320.0
    late = report("w-0", start_id="start-003", sequence=2, gpus=[gpu("GPU-0", observed_seconds=50.0)])
    assert not ledger.count(late).replay
    assert ledger.totals(gone=False).gpu_seconds == 410.0, "a late one says all of its start"
