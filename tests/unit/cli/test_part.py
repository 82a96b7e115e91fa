# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A part of a record: which times are understood, what of the record it has, and what is said where it has nothing."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli import gpumonitors, logs
from tests.unit.cli.test_reports import gpumon, steps_log
from verl_gpumonitor.cli.part import Part, open_part, part_of, seconds_at
from verl_gpumonitor.cli.records import Began
from verl_gpumonitor.cli.reports.document import document
from verl_gpumonitor.cli.reports.gather import Run, gather
from verl_gpumonitor.cli.reports.page import html
from verl_gpumonitor.cli.reports.ticket import markdown
from verl_gpumonitor.cli.times import began_note, began_unix
from verl_gpumonitor.model.findings import Finding, Scope, TrackedFinding
from verl_gpumonitor.model.vocabulary import Severity

NOON = datetime(2026, 12, 31, 12, tzinfo=UTC).timestamp()
LOG = Began(NOON, UTC)
RANGE = "the record goes from 0:00 to 19:55, 2026-11-30 10:00:00 to 2026-11-30 10:19:55"


def part_run(path: Path, begin: str | None, end: str | None) -> Run:
    """Read a part as `gpumon report` does."""
    with open_part(str(path), begin=begin, end=end, interval_seconds=1.0) as (recorded, part):
        return gather(recorded.header, recorded.records, recorded.complaints, part)


@pytest.mark.parametrize(
    "text",
    [
        *("+10m", "+600", "+0:10:00", "10m", "10:00", "0:10:00", "-50m", "-0:50:00"),
        *("2026-12-31 12:10", "2026-12-31T12:10:00Z", "2026/12/31 12:10:00.000", "2026-12-31T14:10+02:00"),
    ],
)
def test_times_of_ten_minutes_after_the_begin(text: str) -> None:
    assert seconds_at(text, began=LOG, length=3600.0) == pytest.approx(600.0)


def test_a_time_without_a_zone_is_this_machines_where_the_record_has_a_zone() -> None:
    here = datetime.fromtimestamp(NOON + 600).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 - local time is what is meant
    assert seconds_at(here, began=Began(NOON, None), length=None) == 600.0
    assert seconds_at("2026-12-31T12:10Z", began=Began(NOON, None), length=None) == 600.0


@pytest.mark.parametrize("text", ["", "+", "-", "soon", "+soon", "--5m", "+2026-12-31", "2026-13-31", "12:10 tomorrow"])
def test_what_is_no_time_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="is no time: write"):
        seconds_at(text, began=LOG, length=3600.0)


def test_an_hour_cannot_be_found_where_the_record_tells_none() -> None:
    with pytest.raises(ValueError, match="does not tell the hour"):
        seconds_at("2026-12-31 12:10", began=None, length=None)


def test_what_reaches_beyond_the_record_is_the_record() -> None:
    assert part_of("-2h", "+3h", began=None, length=3600.0) == Part(begin=0.0, end=10800.0)
    assert part_of(None, "+5m", began=None, length=None) == Part(begin=0.0, end=300.0)
    assert part_of("+5m", None, began=None, length=None) == Part(begin=300.0)


@pytest.mark.parametrize(
    ("resolved", "held"),
    [
        pytest.param(None, True, id="still open"),
        pytest.param(99.0, False, id="over before"),
        pytest.param(100.0, True, id="over at the begin"),
        pytest.param(150.0, True, id="over within"),
    ],
)
def test_findings_are_those_open_in_it(resolved: float | None, *, held: bool) -> None:
    finding = Finding(reason="Hang", severity=Severity.CRITICAL, scope=Scope(), evidence={}, message="")
    tracked = TrackedFinding(finding=finding, first_seen=10.0, last_seen=90.0, resolved=resolved)
    assert Part(begin=100.0, end=200.0).holds(tracked) is held


def test_a_finding_keeps_since_when_it_is(tmp_path: Path) -> None:
    path = logs.before(tmp_path)
    whole, part = part_run(path, None, None), part_run(path, "+15m", "+18m")
    since = {tracked.finding.reason: tracked.first_seen for tracked in whole.findings}
    assert {tracked.finding.reason: tracked.first_seen for tracked in part.findings} == since
    assert max(since.values()) < 900.0
    assert (part.begin, part.end) == (900.0, 1080.0)
    assert part_run(path, None, "+20").verdict == "Unknown", "what was found later was not known then"


@given(cut=st.floats(1.0, 239.0))
def test_two_parts_make_the_whole(cut: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """GPU time, load and energy of two parts add up, wherever a record is cut in two."""
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    steps_log(path.parent, path.name, seconds=20)
    at = f"{cut:.3f}"
    whole, one, other = (part_run(path, *ends) for ends in ((None, None), (None, at), (at, None)))
    # Of the time between two samples, what lies before the cut is told by the sample after it: it is in neither.
    lost = 2 * 1.0
    assert one.whole.seconds + other.whole.seconds == pytest.approx(whole.whole.seconds, abs=lost)
    assert one.whole.seconds + other.whole.seconds <= whole.whole.seconds + 1e-6
    assert one.whole.energy_joules + other.whole.energy_joules == pytest.approx(
        whole.whole.energy_joules, abs=400 * lost
    )
    assert one.steps + other.steps == whole.steps
    for run in (one, other):
        assert sum(row.gpu_seconds for row in run.stages) == pytest.approx(run.whole.seconds)
        assert all(0.0 <= t < run.seconds for gpu in run.gpus for t, _ in gpu.points)


def test_a_step_that_began_before_it_is_not_a_whole_one(tmp_path: Path) -> None:
    run = part_run(steps_log(tmp_path, "run.jsonl", seconds=20), "+65", "+125")
    assert run.steps == 3, "those that ended in it"
    assert run.step_seconds == pytest.approx(20.0), "of the two that it has from end to end"


def test_all_forms_say_which_part_they_show(tmp_path: Path) -> None:
    run = part_run(logs.before(tmp_path), "2026-11-30 10:15", "-1:55")
    assert run.part is not None
    for form in (html(run), markdown(run)):
        assert "15:00 to 18:00 of the record" in form
        assert run.part.sentence(run.end) in form
        assert "to the end of the part" in form
        assert "end of the record" not in form
    assert ">16:00</text>" in html(run), "axes have the record's own time"
    assert json.loads(document(run))["part"] == {"begin": 900.0, "end": 1080.0}
    said = gpumon("diagnose", str(tmp_path / "before.csv"), "--from", "+15m", "--to", "+18m")
    assert "15:00 to 18:00 of the record" in said
    assert "Only 15:00 to 18:00" in said


def test_nothing_is_read_beyond_its_end(tmp_path: Path) -> None:
    path = steps_log(tmp_path, "run.jsonl", seconds=20)
    path.write_text(path.read_text() + "{broken\n")
    assert part_run(path, None, None).complaints
    assert not part_run(path, None, "+60").complaints


@pytest.mark.parametrize("command", ["report", "diagnose"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--from", "+30m"], "nothing was recorded in --from +30m", id="after the record"),
        pytest.param(["--to", "2026-11-30 09:00"], "nothing was recorded in --to 2026-11-30 09:00", id="before it"),
        pytest.param(["--from", "+10m1", "--to", "+10m2"], "--from +10m1 --to +10m2", id="between two samples"),
        pytest.param(["--from", "10m", "--to", "5m"], "--from 10m is not before --to 5m", id="from after to"),
        pytest.param(["--from", "-5m", "--to", "-5m"], "--from -5m is not before --to -5m", id="of no length"),
        pytest.param(["--from", "soon"], "'soon' is no time", id="no time"),
    ],
)
def test_what_the_record_does_not_have_is_said_in_a_line(
    tmp_path: Path, command: str, arguments: list[str], words: str
) -> None:
    said = gpumon(command, str(logs.before(tmp_path)), *arguments, code=2)
    assert words in said
    assert said.endswith(f"; {RANGE}\n")
    assert said.count("\n") == 1


def test_standard_input_has_no_end_to_count_from(tmp_path: Path) -> None:
    assert "cannot be read twice" in gpumon("report", "-", "--from", "-5m", code=2)
    given_monitor = str(gpumonitors.write(tmp_path, gpumonitors.monitor()))
    assert "no values over time" in gpumon("report", given_monitor, "--from", "+5m", code=2)


def test_a_note_tells_the_hour() -> None:
    assert began_unix(["another note", began_note(NOON)]) == NOON
    assert began_unix(["0:00 of it is not known"]) is None
    assert began_unix([]) is None
