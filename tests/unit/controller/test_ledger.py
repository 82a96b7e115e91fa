# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Counters equal those of an undisturbed run, whatever happens to reports on their way."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.controller.builders import GIB, gpu, report
from verl_gpumonitor.model.report import Report
from verl_gpumonitor_operator.controller.ledger import (
    MAX_STARTS,
    Peak,
    PodLedger,
    Totals,
    WrittenLedger,
    read,
    write,
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
        for sequence in range(1, draw(st.integers(1, 6)) + 1):
            step = draw(st.floats(0.5, 20.0))
            clock += step
            observed += step
            busy += step * draw(st.floats(0.0, 1.0))
            energy += step * 300.0
            peak = max(peak, draw(st.integers(1, 80)))
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
                        )
                        for uuid in ("GPU-0", "GPU-1")
                    ],
                )
            )
        clock += draw(st.floats(0.0, 5.0))
    return Run(tuple(reports))


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
    text = write(WrittenLedger(pods={"uid-w-0": first}))
    assert text is not None
    restored = read(text)
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
    restored = read(write(WrittenLedger(pods={"uid-w-0": ledger})) or "")
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


def test_unknown_energy_is_none_and_never_zero() -> None:
    assert counted([report("w-0", gpus=[gpu(observed_seconds=5.0)])]).totals(gone=True).energy_joules is None


@pytest.mark.parametrize(
    "text", ["", "x", "{}", "[]", '{"version":2,"folded":[],"base":[],"pods":{}}', '{"version":1}', "null"]
)
def test_what_is_no_ledger_is_read_as_none(text: str) -> None:
    assert read(text) is None


def test_a_ledger_that_is_too_long_is_not_written() -> None:
    pods = {f"uid-{number}": counted([report(f"w-{number}")]) for number in range(1000)}
    assert write(WrittenLedger(pods=pods)) is None


def test_totals_after_a_base_are_never_negative() -> None:
    base = Totals(gpu_seconds=10.0, busy_seconds=5.0, energy_joules=100.0, lost_starts=2)
    later = Totals(gpu_seconds=12.0, busy_seconds=4.0, energy_joules=90.0, peak=Peak(1, 2))
    assert later.minus(base) == Totals(gpu_seconds=2.0, busy_seconds=0.0, energy_joules=0.0, peak=Peak(1, 2))
