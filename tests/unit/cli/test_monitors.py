# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A GPUMonitor from kubectl: read from YAML and JSON, shown as a page, as Markdown, as text; others are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from tests.unit.cli import gpumonitors, logs
from tests.unit.cli.gpumonitors import listed, monitor, write
from verl_gpumonitor.advice.settings import parse_launch
from verl_gpumonitor.cli import monitors
from verl_gpumonitor.cli.main import main
from verl_gpumonitor.cli.reports.monitor_page import NO_TIME_SERIES, html, markdown
from verl_gpumonitor.model.trace import TraceError

REPOSITORY = Path(__file__).parents[3]


def parse(document: object, **options: Any) -> monitors.GPUMonitor:
    return monitors.parse(json.dumps(document).encode(), **options)


def gpumon(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


@pytest.mark.parametrize("absent", ["null", "~", ""])
def test_null_is_absent(absent: str) -> None:
    """Who edits by hand, and who prints what was cleared, leave such fields."""
    text = "apiVersion: gpumonitor.dev/v1alpha1\nkind: GPUMonitor\nmetadata: {name: x}\nstatus:\n" + "".join(
        f"  {key}: {absent}\n" for key in ("findings", "gpus", "utilization", "step", "previousRun")
    )
    found = monitors.parse(text.encode())
    assert (found.status.findings, found.status.step, found.status.utilization.mean) == ([], None, None)
    assert monitors.parse(text.partition("\n  findings")[0].encode() + f" {absent}\n".encode()).status.phase is None


def test_what_powershell_saves_is_read(tmp_path: Path) -> None:
    path = tmp_path / "monitor.yaml"
    path.write_bytes(f"# of today\n{gpumonitors.as_yaml(monitor())}".encode("utf-16"))
    assert gpumon("diagnose", str(path)).exit_code == 0


def test_yaml_and_json_say_the_same() -> None:
    document = monitor()
    by_yaml = monitors.parse(gpumonitors.as_yaml(document).encode())
    assert by_yaml == parse(document)
    assert by_yaml.status.stages[0].seconds_per_step == 58.0
    assert by_yaml.status.recommendations[0].suggested == "16384"
    assert by_yaml.status.findings[0].since == "2026-11-30T10:40:00Z"


def test_the_fields_are_those_of_the_crd() -> None:
    """Each field that is read exists, so that a renamed one is noticed; several are bounded lists of texts."""
    crd = yaml.safe_load((REPOSITORY / "crds" / "gpumonitor.dev_gpumonitors.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]

    def compare(type_: Any, properties: dict[str, Any], path: str) -> None:
        for field in msgspec.structs.fields(type_):
            assert field.encode_name in properties, f"{path}.{field.encode_name}"
            known = properties[field.encode_name]
            inner = _struct_in(field.type)
            if inner is not None:
                within = known.get("items", known)
                compare(inner, within["properties"], f"{path}.{field.encode_name}")

    compare(monitors.Status, schema["status"]["properties"], "status")
    compare(monitors.Spec, schema["spec"]["properties"], "spec")


def _struct_in(type_: Any) -> Any:
    found = [type_, *getattr(type_, "__args__", ())]
    return next((one for one in found if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)


def test_the_command_line_can_be_parsed_again() -> None:
    """Values with quotes and blanks, as Hydra has them."""
    command = parse(monitor()).status.launch.command
    assert command is not None
    launch = parse_launch(command)
    assert launch.overrides["trainer.logger"] == "['console']"
    assert launch.module == "verl.trainer.main_ppo"


def test_the_page_has_verdict_budget_gpus_findings_and_advice() -> None:
    found = parse(monitor())
    for page in (html(found), markdown(found).replace("\\", "")):
        for text in (
            "OOMRisk+1",
            "GPU 3 of pod w-1 reached 76.9 of 79.6 GiB",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
            "Since 2026-11-30T10:40:00Z",
            "Look at the cooling",
            "update_actor",
            "16/16 GPUs reported",
            "GPU_IS_LOST",
            "OptedOut",
            "96.5",
            "ray-state",
            "12 s are missing",
        ):
            assert text in page, text
        assert NO_TIME_SERIES in page


def test_what_is_not_judged_and_what_is_guessed_are_said_so() -> None:
    document = monitor()
    status = document["status"]
    status["launch"] = {"program": "verl.trainer.main_ppo", "verlVersionGuess": "0.8.0 to 0.9.1"}
    unjudged = {"reason": "RolloutMemoryNotReleased", "message": "no list tells"}
    status["dataQuality"]["diagnosis"]["notJudged"] = [unjudged]
    found = parse(document)
    for page in (html(found), markdown(found).replace("\\", "")):
        assert "verl 0.8.0 to 0.9.1 (guessed)" in page
        assert "Not judged is RolloutMemoryNotReleased: no list tells." in page


def test_nothing_is_made_up_where_nothing_is_known() -> None:
    bare = {"apiVersion": "gpumonitor.dev/v1alpha1", "kind": "GPUMonitor", "metadata": {"name": "x"}}
    for page in (html(parse(bare)), markdown(parse(bare))):
        assert "Unknown" in page
        assert "Nothing is known of its GPUs." in page
        assert "0%" not in page.partition("</style>")[2]
        assert "GPU-hours" not in page


def test_names_cannot_write_into_the_page() -> None:
    hostile = "<script>alert(1)</script>"
    found = parse(monitor(name=hostile, findings=[{"reason": hostile, "severity": "warning", "message": hostile}]))
    assert hostile not in html(found)
    assert hostile not in markdown(found)


def test_a_healthy_one_says_so() -> None:
    found = parse(monitor(health="OK", findings=None, recommendations=None))
    assert "Nothing was found." in html(found)
    assert 'class="verdict good"' in html(found)


def test_a_list_is_refused_by_naming_them_and_one_can_be_chosen() -> None:
    document = listed(monitor("a"), monitor("b"), monitor("a", "team-b"), {"kind": "RayJob"})
    with pytest.raises(TraceError, match="3 GPUMonitors: team-a/a, team-a/b, team-b/a; choose one with --name"):
        parse(document)
    assert parse(document, name="b").metadata.name == "b"
    assert parse(document, name="team-b/a").metadata.namespace == "team-b"
    with pytest.raises(TraceError, match="2 GPUMonitors"):
        parse(document, name="a")
    with pytest.raises(TraceError, match="has no GPUMonitor 'c'; there is team-a/a"):
        parse(document, name="c")
    assert parse(listed(monitor("one"))).metadata.name == "one"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("apiVersion: ray.io/v1\nkind: RayJob\n", "is a RayJob, and no GPUMonitor", id="another kind"),
        pytest.param("apiVersion: v1\nitems: []\nkind: List\n", "is a list without a GPUMonitor", id="an empty list"),
        pytest.param("apiVersion: x/v1\nkind: GPUMonitor\n", "and no GPUMonitor", id="a kind of this name by others"),
        pytest.param("apiVersion: v1\n\tkind: [", "is broken YAML", id="broken YAML"),
        pytest.param('{\n "apiVersion": ', "is broken JSON", id="broken JSON"),
        pytest.param("---\n- 1\n", "is no object of Kubernetes", id="a list of numbers"),
        pytest.param(
            "apiVersion: gpumonitor.dev/v1alpha1\nkind: GPUMonitor\nstatus: {step: many}\n",
            "is no GPUMonitor as the operator writes it",
            id="a value of another type",
        ),
    ],
)
def test_what_is_none_is_refused_with_what_it_is(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "it"
    path.write_text(text)
    for command in ("report", "diagnose"):
        done = gpumon(command, str(path))
        assert done.exit_code == 2
        assert said in done.stderr


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_report_reads_it_from_a_pipe_and_a_file(tmp_path: Path, form: str) -> None:
    path = gpumonitors.write(tmp_path, monitor(), form=form)
    by_file = gpumon("report", str(path), "--format", "markdown")
    assert by_file.exit_code == 0, by_file.output
    done = subprocess.run(
        [sys.executable, "-m", "verl_gpumonitor.cli", "report", "-", "--format", "markdown"],
        input=path.read_text(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == by_file.stdout


def test_diagnose_tells_what_the_operator_found(tmp_path: Path) -> None:
    path = str(gpumonitors.write(tmp_path, monitor()))
    text = gpumon("diagnose", path).stdout
    assert "WARNING  OOMRisk in update_actor  since 2026-11-30T10:40:00Z" in text
    assert "-> actor_rollout_ref.actor.ppo_max_token_len_per_gpu: 24576 -> 16384" in text
    assert "Also recommended:" in text
    (first, second) = json.loads(gpumon("diagnose", path, "--json").stdout)["findings"]
    assert first["since"] == "2026-11-30T10:40:00Z"
    assert first["first_seen"] is None
    assert first["advice"][0]["suggested"] == "16384"
    assert second["reason"] == "LowUtilization"
    assert gpumon("diagnose", path, "--fail-on", "warning").exit_code == 1
    assert gpumon("diagnose", path, "--fail-on", "critical").exit_code == 0
    muted = gpumon("diagnose", path, "--fail-on", "warning", "--mute", "OOMRisk")
    assert muted.exit_code == 0
    assert "24576" not in muted.stdout


@pytest.mark.parametrize("command", ["compare", "replay"])
def test_commands_that_want_a_course_of_time_say_what_reads_it(tmp_path: Path, command: str) -> None:
    path = str(gpumonitors.write(tmp_path, monitor()))
    done = gpumon(command, *([path] * (2 if command == "compare" else 1)))
    assert done.exit_code != 0
    assert "gpumon bundle" in done.stderr


def test_without_pyyaml_json_is_read_and_yaml_is_refused(tmp_path: Path) -> None:
    for form, code in (("json", 0), ("yaml", 2)):
        path = gpumonitors.write(tmp_path, monitor(), form=form)
        program = (
            "import sys; sys.modules['yaml'] = None; from verl_gpumonitor.cli.main import main;"
            f" main(['diagnose', {str(path)!r}])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    assert "-o json" in done.stderr


def test_the_library_imports_no_yaml() -> None:
    program = "import sys, verl_gpumonitor, verl_gpumonitor.cli.main; print('yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_gpu_without_a_note_is_explained_by_the_findings_that_name_it() -> None:
    """When a job has ended, its GPUs say nothing any more."""
    document = monitor(phase="Succeeded")
    for gpu in document["status"]["worstGpus"]:
        del gpu["note"]
    found = parse(document)
    assert '<td class="words">OOMRisk</td>' in html(found)
    assert "| OOMRisk |" in markdown(found)


def test_a_report_for_programs_has_the_names_of_a_runs(tmp_path: Path) -> None:
    document = monitor()
    unjudged = {"reason": "RolloutMemoryNotReleased", "message": "no list tells"}
    document["status"]["dataQuality"]["diagnosis"]["notJudged"] = [unjudged]
    path = str(write(tmp_path, document))
    found = json.loads(CliRunner().invoke(main, ["report", path, "--json"]).stdout)
    log = json.loads(CliRunner().invoke(main, ["report", str(logs.after(tmp_path)), "--json"]).stdout)
    assert list(found) == list(log)
    assert list(found["gpus"][0]) == list(log["gpus"][0])
    assert list(found["stages"][0]) == list(log["stages"][0])
    assert (found["verdict"]["health"], found["verdict"]["healthy"]) == ("OOMRisk+1", False)
    assert (found["steps"], found["seconds_per_step"], found["utilization"]) == (42, 96.5, 0.7)
    assert found["gpus"][1] == {
        **dict.fromkeys(found["gpus"][1]),
        "pod": "w-0",
        "uuid": "GPU-9",
        "index": 1,
        "reasons": [],
    }
    assert found["not_judged"] == [unjudged]
    assert (
        "Not judged: RolloutMemoryNotReleased (no list tells)." in CliRunner().invoke(main, ["diagnose", path]).stdout
    )
