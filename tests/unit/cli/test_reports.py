# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What reports and comparisons say of whole runs: the guide's worked case, hostile names, records that lack things."""

import json
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tests.scenarios.score import VISIBLE
from tests.unit.cli import logs
from verl_gpumonitor.cli import columns
from verl_gpumonitor.cli.log import row
from verl_gpumonitor.cli.main import main
from verl_gpumonitor.cli.records import open_run
from verl_gpumonitor.cli.reports.charts import stage_class
from verl_gpumonitor.cli.reports.comparison import compare, text
from verl_gpumonitor.cli.reports.gather import Run, gather
from verl_gpumonitor.cli.reports.page import html, verdict_text
from verl_gpumonitor.cli.reports.ticket import markdown
from verl_gpumonitor.model.findings import Scope
from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.vocabulary import STAGES
from verl_gpumonitor.monitor import ResourceMonitor, ResourceSample


def run_of(path: Path) -> Run:
    """Read a run as the commands do."""
    with open_run(str(path)) as recorded:
        return gather(recorded.header, recorded.records, recorded.complaints)


def gpumon(*arguments: str, code: int = 0) -> str:
    """Output of a command."""
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_the_guides_case_before(tmp_path: Path) -> None:
    run = run_of(logs.before(tmp_path))
    assert {tracked.finding.reason for tracked in run.findings} == {"Imbalance", "OOMRisk"}
    assert {tracked.finding.evidence.get("metric") for tracked in run.findings} >= {"memory", "utilization"}
    assert all(tracked.finding.scope.gpus == ("GPU-0",) for tracked in run.findings)
    parameters = {advice.parameter for tracked in run.findings for advice in tracked.finding.advice}
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size" in parameters
    page = html(run)
    assert "OOMRisk+1" in page
    assert "78" in page


GUIDE = {"before": ([0.85, 0.11, 0.10, 0.12], [78, 19, 18, 20]), "after": ([0.62, 0.63, 0.61, 0.64], [37, 38, 39, 40])}


def own_log(path: Path, when: str) -> Path:
    """The guide's case as this library's own programs log it, by the file's name: for 20 minutes, each 5 s."""
    loads, sizes = GUIDE[when]
    monitor = ResourceMonitor(path=path, marks=False) if path.name.startswith("resources") else None
    rows = [columns.head(columns.DEFAULT).encode()] if path.suffix == ".csv" else []
    for unix in range(1_800_000_000, 1_800_001_200, 5):
        gpus = [
            GpuSample(
                uuid=f"GPU-{n}",
                index=n,
                model="NVIDIA A100-SXM4-80GB",
                utilization=load,
                memory_used_bytes=size * 2**30,
                memory_total_bytes=80 * 2**30,
            )
            for n, (load, size) in enumerate(zip(loads, sizes, strict=True))
        ]
        if monitor is not None and monitor._sink is not None:
            monitor._sink.write(ResourceSample(t=unix, pid=1, gpus=tuple(gpus)))
        form = path.suffix.removeprefix(".")
        rows += [row(gpu, columns.DEFAULT, form=form, unix=unix) for gpu in gpus]
    if monitor is None:
        path.write_bytes(b"".join(rows))
    return path


@pytest.mark.parametrize("name", ["gpu.csv", "gpu.jsonl", "resources.csv", "resources.jsonl"])
def test_the_guides_case_in_our_own_logs(tmp_path: Path, name: str) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    before, after = (run_of(own_log(tmp_path / when / name, when)) for when in ("before", "after"))
    assert {tracked.finding.reason for tracked in before.findings} == {"Imbalance", "OOMRisk"}
    assert "balanced" in html(after)
    found = compare(before, after)
    assert (found.helped, found.gone) == (True, ("Imbalance", "OOMRisk"))
    assert "the GPUs are 62% busy, not 29%" in found.summary


def test_the_guides_case_after_is_balanced(tmp_path: Path) -> None:
    run = run_of(logs.after(tmp_path))
    assert run.healthy
    for form in (html(run), markdown(run)):
        assert "balanced" in form


def test_compare_names_the_gain(tmp_path: Path) -> None:
    found = compare(run_of(logs.before(tmp_path)), run_of(logs.after(tmp_path)))
    assert found.summary.startswith("It helped: Imbalance, OOMRisk are gone")
    assert set(found.gone) == {"Imbalance", "OOMRisk"}
    assert not found.new
    busy = next(row for row in found.figures if row.label == "Busy")
    assert busy.better
    assert "better" in text(found)
    back = compare(run_of(logs.after(tmp_path)), run_of(logs.before(tmp_path)))
    assert back.summary.startswith("It did not help")


def test_a_minute_of_the_guides_case_gets_a_first_look(tmp_path: Path) -> None:
    """Who logs a minute wants an answer; and it is said that it is a first one."""
    short, fixed = (
        logs.guide_log(tmp_path / f"{name}.csv", loads, used, rounds=12)
        for name, loads, used in (("a", [85, 11, 10, 12], [78, 19, 18, 20]), ("b", [62, 63, 61, 64], [37, 38, 39, 40]))
    )
    run = run_of(short)
    assert {tracked.finding.reason for tracked in run.findings} == {"Imbalance", "OOMRisk"}
    assert all(tracked.finding.scope.gpus == ("GPU-0",) and tracked.finding.advice for tracked in run.findings)
    assert "a first look" in html(run)
    assert "balanced" in html(run_of(fixed))
    found = compare(run, run_of(fixed))
    assert found.helped
    assert any("a first look" in note for note in found.notes)
    assert "OOMRisk" in gpumon("diagnose", str(short))
    assert "OOMRisk" not in gpumon("diagnose", str(short), "--mute", "OOMRisk")


def test_a_few_seconds_say_nothing_and_are_no_health(tmp_path: Path) -> None:
    path = logs.guide_log(tmp_path / "few.csv", [85, 11, 10, 12], [78, 19, 18, 20], rounds=3)
    run = run_of(path)
    assert (run.findings, run.healthy, run.verdict) == ((), False, "Unknown")
    for form in (html(run), markdown(run), gpumon("diagnose", str(path))):
        assert "Nothing can be said yet" in form
        assert "Nothing was found" not in form
        assert "balanced" not in form
    whole = run_of(logs.before(tmp_path))
    for found in (compare(whole, run), compare(run, whole)):
        assert found.helped is None
        assert found.summary.startswith("Nobody can say whether it helped")
        assert (found.gone, found.new) == ((), ())


def uneven_log(path: Path, *, rounds: int) -> Path:
    """GPU 0 holds 20 GiB more than the others: the rules find it, a first look, which asks for more, does not."""
    return logs.guide_log(path, [60, 61, 60, 62], [56, 36, 36, 36], rounds=rounds)


def test_what_the_run_after_is_too_short_to_show_is_not_gone(tmp_path: Path) -> None:
    """The same GPUs twice, once for ten minutes and once for one: nothing has helped."""
    long, short = (uneven_log(tmp_path / f"{rounds}.csv", rounds=rounds) for rounds in (120, 10))
    found = compare(run_of(long), run_of(short))
    assert (found.helped, found.gone) == (None, ())
    assert found.summary.startswith(
        "Nobody can say whether it helped: Imbalance could not be judged in the run after; "
    )
    assert found.not_judged == (
        "Imbalance in the run after: needs 6 min where no stages are told, and 45 s are recorded",
    )
    assert "Not judged: Imbalance in the run after: needs 6 min" in text(found)
    back = compare(run_of(short), run_of(long))
    assert (back.helped, back.new) == (None, ())
    assert "Imbalance could not be judged in the run before" in back.summary


def test_a_rise_is_not_gone_where_too_few_steps_are_seen() -> None:
    """Twelve steps show that memory rises; three show neither that it does nor that it does not."""
    run = run_of(VISIBLE / "actor-peak-grows.jsonl.gz")
    (rising,) = [t for t in run.findings if t.finding.reason == "OOMRisk" and t.finding.evidence["cause"] == "rising"]
    covered = msgspec.structs.replace(run.coverage, steps=4, stage_steps=dict.fromkeys(run.coverage.stage_steps, 4))
    found = compare(run, msgspec.structs.replace(run, findings=(), coverage=covered))
    assert found.helped is None
    assert any(
        line.startswith(f"OOMRisk in {rising.finding.scope.stage} in the run after") for line in found.not_judged
    )


def test_a_stage_that_only_one_of_two_names_makes_no_problem_new(tmp_path: Path) -> None:
    run = run_of(logs.before(tmp_path))
    told = msgspec.structs.replace(run.coverage, stages_told=True, stage_steps={"update_actor": 9})
    staged = tuple(
        msgspec.structs.replace(
            t, finding=msgspec.structs.replace(t.finding, scope=Scope(gpus=("GPU-0",), stage="update_actor"))
        )
        for t in run.findings
    )
    found = compare(run, msgspec.structs.replace(run, findings=staged, coverage=told))
    assert (found.gone, found.new, set(found.kept)) == ((), (), {"Imbalance", "OOMRisk"})
    assert found.summary.startswith("No finding changed: Imbalance, OOMRisk are still there; ")


def test_changes_are_told_in_words_that_say_something(tmp_path: Path) -> None:
    """Shares in points, memory in GiB, and no percentage of next to nothing."""
    found = compare(run_of(logs.before(tmp_path)), run_of(logs.after(tmp_path)))
    changes = {row.label: row.change for row in found.figures}
    assert changes["Busy"] == "+33 points"
    assert changes["Busiest minus idlest GPU"].endswith(" points")
    assert changes["Least memory left"] == "+38.0 GiB"
    assert changes["GPU-hours recorded"] == ""
    assert "Seconds a step" not in changes, "unknown of both"
    stages = compare(*(run_of(steps_log(tmp_path, f"{s}.jsonl", seconds=s)) for s in (20, 200))).stages
    assert [(row.change, row.better) for row in stages if row.label.startswith("update_actor")] == [("", False)]


def test_the_stages_of_a_step_add_up_to_it() -> None:
    """What lies before the first step ends, such as the start, and after the last one ended, is in no whole step."""
    run = run_of(VISIBLE / "seed-after-fix.jsonl.gz")
    assert run.step_seconds is not None
    assert sum(row.seconds_per_step or 0.0 for row in run.stages) == pytest.approx(run.step_seconds, rel=0.01)
    assert [row.seconds_per_step for row in run.stages if row.stage == "init"] == [None]


def test_settings_of_a_command_that_nobody_can_read_are_not_missing() -> None:
    run = run_of(VISIBLE / "seed-after-fix.jsonl.gz")
    hidden = msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, entrypoint="bash run.sh"))
    found = compare(run, hidden)
    assert found.settings == ()
    assert "Only the run before tells its settings." in found.notes


@pytest.mark.parametrize(
    ("loads", "used", "says"),
    [
        pytest.param([60, 61], [30, 31], "Nothing was found: the GPUs are balanced and have room.", id="even"),
        pytest.param([60, 61], [76, 76], "the GPUs are balanced; the fullest has 4.0 GiB left.", id="even and full"),
        pytest.param([75, 45], [30, 31], "the GPUs are 45% to 75% busy and have room.", id="uneven load"),
        pytest.param(
            [60, 61], [30, 43], "the GPUs are at their peak 38% to 54% full and have room.", id="uneven memory"
        ),
    ],
)
def test_balance_and_room_are_claimed_only_where_they_were_measured(
    loads: list[int], used: list[float], says: str, tmp_path: Path
) -> None:
    """No rule fires for any of these, and yet they are not alike."""
    run = run_of(logs.guide_log(tmp_path / "a.csv", loads, used, rounds=120))
    assert run.healthy
    assert ("balanced" in says) == ("balanced" in verdict_text(run))
    assert says in verdict_text(run)
    assert "Too short to judge LowUtilization (needs 14 min)" in html(run)


@pytest.mark.parametrize("seconds", [1, 5])
def test_charts_of_a_short_log_have_lines_and_no_empty_columns(seconds: int, tmp_path: Path) -> None:
    rows = [f"{seconds * at},{index},50,40960,81920" for at in range(120) for index in range(2)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["timestamp,index,utilization.gpu,memory.used,memory.total", *rows]) + "\n")
    page = html(run_of(path))
    assert page.count("<polyline") == 4
    assert "<circle" not in page
    (load_map,) = re.findall(r'<svg[^>]*aria-label="Load of each GPU over time">(.*?)</svg>', page)
    spans = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', load_map)]
    assert len(spans) > 10
    assert all(x + width == pytest.approx(after, abs=0.3) for (x, width), (after, _) in pairwise(spans))


def test_a_time_without_samples_counts_nowhere_and_is_said(tmp_path: Path) -> None:
    """Ten minutes of work, an hour of nothing, ten minutes of work: two GPUs worked a third of an hour each."""
    rows = [f"{t},{gpu},80,100,1000" for t in (*range(0, 600, 5), *range(4200, 4800, 5)) for gpu in range(2)]
    path = tmp_path / "gap.csv"
    path.write_text("\n".join(["timestamp,index,utilization.gpu,memory.used,memory.total", *rows]) + "\n")
    run = run_of(path)
    assert run.gpu_hours == pytest.approx(2 * 1200 / 3600, rel=0.02)
    assert run.gap_seconds == pytest.approx(2 * 3600, rel=0.01)
    assert "No samples came for 2:00:" in html(run)
    assert run_of(logs.before(tmp_path)).gap_seconds == 0


def test_only_what_is_known_is_called_balanced(tmp_path: Path) -> None:
    """Without memory nobody knows whether there is room, and of one GPU nobody whether it is balanced."""
    rows = [f"{5 * at},{index},50" for at in range(12) for index in range(2)]
    path = tmp_path / "load.csv"
    path.write_text("\n".join(["timestamp,index,utilization.gpu", *rows]) + "\n")
    assert "balanced in load." in html(run_of(path))
    path.write_text("\n".join(["timestamp,index,utilization.gpu", *rows[::2]]) + "\n")
    assert "balanced" not in html(run_of(path))
    path.write_text("\n".join(["timestamp,index,utilization.gpu", *(f"{row[:-2]}[N/A]" for row in rows)]) + "\n")
    assert run_of(path).verdict == "Unknown"


def steps_log(folder: Path, name: str, *, seconds: float, model: str = "A", gpus: int = 2) -> Path:
    """A record of twelve steps of so many seconds."""
    header = {
        "type": "header",
        "format": "gpumonitor-trace/1",
        "entrypoint": "python3 -m verl.trainer.main_ppo",
        "pods": [
            {
                "name": "w",
                "gpus": [
                    {"uuid": f"GPU-{n}", "index": n, "model": model, "memory_total_bytes": 80 * 2**30}
                    for n in range(gpus)
                ],
            }
        ],
    }
    values = {"utilization": 0.9, "memory_used_bytes": 40 * 2**30, "power_watts": 400}
    lines: list[dict[str, object]] = []
    for step in range(12):
        for at in range(int(seconds)):
            t = step * seconds + at
            if at == 0:
                lines += [{"type": "mark", "t": t, "pod": "w", "stage": "update_actor", "state": "begin", "step": step}]
            lines += [{"type": "gpu", "t": t, "pod": "w", "uuid": f"GPU-{n}", **values} for n in range(gpus)]
        end = (step + 1) * seconds - 0.5
        lines += [{"type": "mark", "t": end, "pod": "w", "stage": "update_actor", "state": "end", "step": step}]
        lines += [{"type": "step", "t": end + 0.1, "step": step}]
    path = folder / name
    path.write_text("\n".join(json.dumps(line) for line in [header, *lines]) + "\n")
    return path


def test_shorter_steps_alone_are_a_gain_and_longer_ones_none(tmp_path: Path) -> None:
    slow, fast = (run_of(steps_log(tmp_path, f"{s}.jsonl", seconds=s)) for s in (40, 20))
    assert not (slow.findings or fast.findings)
    gain, loss = compare(slow, fast), compare(fast, slow)
    assert (gain.helped, gain.summary[:35]) == (True, "It helped: steps are shorter and no")
    assert (loss.helped, loss.summary[:34]) == (False, "It did not help: steps are longer;")
    assert compare(slow, slow).helped is None


def test_what_two_runs_have_not_in_common_is_said(tmp_path: Path) -> None:
    one = run_of(steps_log(tmp_path, "one.jsonl", seconds=20))
    other = run_of(steps_log(tmp_path, "other.jsonl", seconds=20, model="B", gpus=1))
    log = run_of(logs.after(tmp_path))
    assert [note.split(":")[0] for note in compare(one, other).notes] == [
        "There are 2 GPUs before and 1 after.",
        "The GPUs are others",
    ]
    notes = " ".join(compare(log, one).notes)
    assert "Only the run after tells stages" in notes
    assert "Only the run after tells its settings" in notes
    assert compare(log, one).settings == ()


def test_what_cannot_be_seen_is_no_problem_that_a_change_could_solve(tmp_path: Path) -> None:
    blind = tmp_path / "blind.csv"
    blind.write_text("timestamp,index,utilization.gpu\n" + "".join(f"{5 * at},0,62\n" for at in range(100)))
    found = compare(run_of(blind), run_of(logs.after(tmp_path)))
    assert (found.helped, found.gone) == (None, ())
    assert "Of the run before, not all could be read: see its report." in found.notes


def test_names_of_the_job_move_no_cursor(tmp_path: Path) -> None:
    """What is printed on a terminal, or goes into a ticket, has no escape sequences of a job's name."""
    path = hostile_trace(tmp_path, name="\x1b]0;owned\x07\x1b[2J\rOK")
    for form in (gpumon("diagnose", str(path)), gpumon("compare", str(path), str(path)), markdown(run_of(path))):
        assert not {"\x1b", "\x07", "\r"} & set(form)


def test_each_stage_has_a_colour_by_day_and_by_night(tmp_path: Path) -> None:
    page = html(run_of(logs.before(tmp_path)))
    for stage in STAGES:
        assert page.count(f"--{stage}: #") == 2, stage
        assert f".stage-{stage} {{" in page
    assert [stage_class(stage) for stage in ("gen", "later")] == ["stage-gen", "stage-unknown"]


def test_a_record_of_a_hundred_years_has_few_ticks(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text("timestamp,index,utilization.gpu\n0,0,50\n5,0,50\n3000000000,0,50\n")
    assert len(html(run_of(path))) < 100_000


def test_a_stages_peak_is_the_moments_and_no_other_stages() -> None:
    """The finding names 79.6 GiB in update_actor: so must the table, and no stage that does not reach it."""
    run = run_of(VISIBLE / "actor-peak-grows.jsonl.gz")
    peaks = {row.stage: row.memory_peak_ratio or 0.0 for row in run.stages}
    assert peaks["update_actor"] > 0.99
    assert peaks["ref"] < 0.6
    assert peaks["update_weights"] < 0.7


def test_a_run_beside_itself_is_the_same(tmp_path: Path) -> None:
    run = run_of(logs.after(tmp_path))
    assert all(row.better is None and not row.change for row in compare(run, run).figures)


def hostile_trace(folder: Path, *, name: str = '<script>alert(1)</script>"|*x*') -> Path:
    """A record whose names try to be HTML and Markdown."""
    header = {
        "type": "header",
        "format": "gpumonitor-trace/1",
        "workload": {"kind": "RayJob", "name": name},
        "entrypoint": f"python3 -m verl.trainer.main_ppo trainer.project_name={name}",
        "pods": [{"name": name, "gpus": [{"uuid": name, "index": 0, "model": name}]}],
    }
    rows = [{"type": "gpu", "t": t, "pod": name, "uuid": name, "utilization": 0.5} for t in range(20)]
    path = folder / "hostile.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")
    return path


def test_names_of_the_job_are_never_markup(tmp_path: Path) -> None:
    run = run_of(hostile_trace(tmp_path))
    page = html(run)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\n# \\<script" in "\n" + markdown(run)


def test_a_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    page = html(run_of(logs.before(tmp_path)))
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script|https?://""", page)


def test_what_the_record_lacks_is_said(tmp_path: Path) -> None:
    run = run_of(hostile_trace(tmp_path))
    page = html(run)
    assert "no stages" in page
    assert "no power" in page
    assert "Memory peak" in page
    assert run.memory_peak_ratio is None


def test_commands_write_what_they_are_asked(tmp_path: Path) -> None:
    before, after = str(logs.before(tmp_path)), str(logs.after(tmp_path))
    page, ticket = tmp_path / "report.html", tmp_path / "report.md"
    assert gpumon("report", before, "-o", str(page)) == ""
    assert page.read_text().startswith("<!DOCTYPE html>")
    gpumon("report", before, "-o", str(ticket))
    assert ticket.read_text().startswith("# host")
    assert gpumon("compare", before, after, "-o", str(page)).startswith("It helped")
    assert "It helped" in page.read_text()
    assert json.loads(gpumon("compare", before, after, "--json"))["gone"] == ["Imbalance", "OOMRisk"]
    assert "OOMRisk" in gpumon("diagnose", before)


@pytest.mark.parametrize("command", ["report", "diagnose"])
@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01", b"a,b\n1,2\n", b"{}\n"], ids=["empty", "binary", "table", "json"]
)
def test_a_file_that_is_no_run_gets_an_answer_that_helps(command: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert "gpumon log" in gpumon(command, str(path), code=2)
    assert "cannot be read" in gpumon(command, str(tmp_path / "none"), code=2)


def test_a_log_without_stages_names_none(tmp_path: Path) -> None:
    """`reached 78.0 GiB in unknown` helps nobody."""
    for form in (html, markdown):
        assert "in unknown" not in form(run_of(logs.before(tmp_path)))
    said = gpumon("diagnose", str(logs.before(tmp_path)))
    assert "in unknown" not in said
    assert "its default" not in said


def test_a_report_for_programs_has_what_the_page_has(tmp_path: Path) -> None:
    """Its names are public."""
    found = json.loads(gpumon("report", str(logs.before(tmp_path)), "--json"))
    assert list(found) == [
        *("format", "workload", "verdict", "part", "seconds", "steps", "seconds_per_step", "gpu_seconds"),
        *(
            "utilization",
            "memory_peak_ratio",
            "headroom_bytes",
            "power_watts",
            "stages",
            "gpus",
            "findings",
            "not_judged",
            "quality",
        ),
    ]
    assert found["format"] == "gpumonitor-report/1"
    assert found["part"] is None
    assert found["verdict"]["health"] == "OOMRisk+1"
    assert (found["steps"], found["seconds_per_step"]) == (None, None), "a log tells no steps"
    assert list(found["stages"][0]) == [
        *("stage", "role", "gpu_seconds", "share", "seconds_per_step", "utilization", "memory_peak_ratio"),
        "power_watts",
    ]
    assert list(found["gpus"][0]) == [
        *("pod", "uuid", "index", "model", "utilization", "memory_peak_bytes", "memory_total_bytes"),
        *("memory_peak_ratio", "temperature_celsius", "power_watts", "reasons"),
    ]
    assert found["gpus"][0]["utilization"] == pytest.approx(0.85, abs=0.01)
    assert set(found["gpus"][0]["reasons"]) == {"Imbalance", "OOMRisk"}
    assert found["findings"][0]["advice"]
    assert {"reason", "message"} == set(found["not_judged"][0])
    staged = json.loads(gpumon("report", str(VISIBLE / "seed-after-fix.jsonl.gz"), "--format", "json"))
    assert staged["steps"] == 12
    assert sum(stage["seconds_per_step"] or 0 for stage in staged["stages"]) == pytest.approx(
        staged["seconds_per_step"], rel=0.01
    )
    gpumon("report", str(tmp_path / "before.csv"), "-o", str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text()) == found
    assert "only one of them" in gpumon("report", str(tmp_path / "before.csv"), "--json", "--format", "html", code=2)
