# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a person is told at the end of an installation.

Helm renders it in an installation alone, so it is made an object here.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.chart.rendering import CHART, REGISTRY, helm_program

AS_OBJECT = '{{ dict "notes" (tpl (.Files.Get "files/NOTES.txt") .) | toYaml }}\n'


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the chart whose only object are its notes."""
    chart = tmp_path_factory.mktemp("notes") / "gpumonitor"
    shutil.copytree(CHART, chart)
    templates = chart / "templates"
    shutil.move(templates / "NOTES.txt", chart / "files" / "NOTES.txt")
    for one in templates.glob("*.yaml"):
        one.unlink()
    (templates / "notes.yaml").write_text(AS_OBJECT)
    return chart


def notes(chart: Path, *, version: str = "1.36.0", **values: object) -> str:
    command = [helm_program(), "template", "gpumonitor", str(chart), "--values", "-", "--kube-version", version]
    given = json.dumps({"image": {"registry": REGISTRY}, **values})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: str = yaml.safe_load(done.stdout)["notes"]
    return said


@pytest.mark.parametrize(
    ("version", "mode", "because"),
    [
        pytest.param("1.36.0", "disabled", "rescue.mode is disabled", id="switched off"),
        pytest.param("1.29.4", "auto", "Kubernetes v1.29.4 does not serve ValidatingAdmissionPolicy v1", id="too old"),
        pytest.param("1.30.0", "auto", None, id="the first with it"),
    ],
)
def test_injection_without_rescue_is_said(copied: Path, version: str, mode: str, because: str | None) -> None:
    said = notes(copied, version=version, rescue={"mode": mode})
    assert ("WITHOUT RESCUE" in said) is (because is not None)
    if because is not None:
        assert f"WITHOUT RESCUE ({because}" in said
        assert f"{REGISTRY}/sidecar:" in said


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        pytest.param(0, "WARNING: webhook.replicas is 0", id="none"),
        pytest.param(1, "NOTE: webhook.replicas is 1", id="one alone"),
        pytest.param(2, None, id="two"),
    ],
)
def test_what_fewer_webhooks_mean_is_said(copied: Path, replicas: int, says: str | None) -> None:
    said = notes(copied, webhook={"replicas": replicas})
    assert ("webhook.replicas" in said) is (says is not None)
    assert says is None or says in said


@pytest.mark.parametrize("on", [True, False])
def test_what_the_nodes_network_asks_for_is_said(copied: Path, on: bool) -> None:
    said = " ".join(notes(copied, webhook={"hostNetwork": on, "port": 10555, "metricsPort": 10556}).split())
    for asked in ("Pod Security *privileged*", "reach port 10555 of the nodes", "ports 10555 and 10556 are free"):
        assert (asked in said) is on
