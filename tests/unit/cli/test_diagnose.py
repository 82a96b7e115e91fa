# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon diagnose`: what it prints is public, and so are its exit codes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.scenarios.score import VISIBLE
from tests.unit.cli import logs
from verl_gpumonitor.cli.main import main

TRACE = str(VISIBLE / "xid31-program.jsonl.gz")
HEALTHY = str(VISIBLE / "seed-after-fix.jsonl.gz")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["diagnose", *arguments])


def test_json_has_the_fields_of_the_format() -> None:
    result = _run(TRACE, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["format"] == "gpumonitor-findings/1"
    finding = document["findings"][0]
    assert list(finding) == [
        "reason", "severity", "first_seen", "last_seen", "resolved", "scope", "evidence", "message", "advice",
    ]  # fmt: skip
    assert set(finding["scope"]) == {"pods", "gpus", "stage", "role", "ranks"}
    assert (finding["reason"], finding["severity"], finding["resolved"]) == ("ApplicationFault", "warning", None)
    assert set(finding["advice"][0]) == {"parameter", "current", "suggested", "text", "reason", "price", "confidence"}


def test_the_report_names_what_where_and_since_when() -> None:
    result = _run(TRACE)
    assert result.exit_code == 0
    assert "RayJob grpo-7b-x in rl" in result.stdout
    assert "WARNING  ApplicationFault in ref  since 17:07" in result.stdout


def test_a_healthy_job_has_a_word_too() -> None:
    result = _run(HEALTHY, "--fail-on", "info")
    assert (result.exit_code, "Nothing was found." in result.stdout) == (0, True)


@pytest.mark.parametrize(("severity", "status"), [("critical", 0), ("warning", 1), ("info", 1)])
def test_a_finding_as_grave_as_asked_for_is_the_status(severity: str, status: int) -> None:
    assert _run(TRACE, "--fail-on", severity).exit_code == status


def test_a_muted_reason_is_left_out() -> None:
    assert json.loads(_run(TRACE, "--json", "--mute", "ApplicationFault").stdout)["findings"] == []


def test_a_reason_that_does_not_exist_cannot_be_muted() -> None:
    result = _run(TRACE, "--mute", "Boredom")
    assert (result.exit_code, "ApplicationFault" in result.stderr) == (2, True)


def test_a_file_that_is_no_trace_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    result = _run(str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "notes.txt" in result.stderr


def test_broken_lines_are_named_and_the_rest_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"type":"header","format":"gpumonitor-trace/1"}\nnonsense\n{"type":"step","t":1}\n')
    result = _run(str(path))
    assert (result.exit_code, "line 2" in result.stderr) == (0, True)


def test_what_could_not_be_judged_is_said_with_what_it_needs(tmp_path: Path) -> None:
    """A bare `Nothing was found.` of a short log would be read as health."""
    even = str(logs.guide_log(tmp_path / "even.csv", [60, 61], [30, 31], rounds=20))
    said = " ".join(_run(even).stdout.split())
    assert "A first look found nothing." in said
    assert "Nothing was found" not in said
    assert "OOMRisk (needs 4 min), Imbalance (6 min)" in said
    assert "HostMemoryRisk (nobody tells the pods' host memory)" in said
    listed = {one["reason"]: one["message"] for one in json.loads(_run(even, "--json").stdout)["not_judged"]}
    assert listed["Imbalance"] == "needs 6 min where no stages are told, and 95 s are recorded"
    assert "Imbalance (" not in _run(even, "--mute", "Imbalance").stdout


def test_a_long_record_with_all_values_has_nothing_that_is_not_judged() -> None:
    document = json.loads(_run(str(VISIBLE / "actor-peak-grows.jsonl.gz"), "--json").stdout)
    assert document["not_judged"] == []
