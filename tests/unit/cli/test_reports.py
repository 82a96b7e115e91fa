# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What reports and comparisons say of whole runs: the guide's worked case, hostile names, records that lack things."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.scenarios.score import VISIBLE
from tests.unit.cli import logs
from verl_gpumonitor.cli.main import main
from verl_gpumonitor.cli.records import open_run
from verl_gpumonitor.cli.reports.comparison import compare, text
from verl_gpumonitor.cli.reports.gather import Run, gather
from verl_gpumonitor.cli.reports.page import html
from verl_gpumonitor.cli.reports.ticket import markdown


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


def hostile_trace(folder: Path) -> Path:
    """A record whose names try to be HTML and Markdown."""
    name = '<script>alert(1)</script>"|*x*'
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
