# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Rules and dashboards as the chart hands them to Prometheus' operator and to Grafana."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.chart.rendering import CHART, NAMESPACE, RELEASE, REPOSITORY, Chart, Object, Rendered

SERVED = ("--api-versions", "monitoring.coreos.com/v1/PrometheusRule")
BASE = "https://git.example.com/gpumonitor/blob/main"
FILES = sorted((CHART / "files" / "dashboards").glob("*.json"))


def rule(rendered: Rendered) -> Object:
    return rendered.get("PrometheusRule", RELEASE)


def test_rules_wait_for_their_api(default: Rendered, chart: Chart) -> None:
    assert not default.of("PrometheusRule")
    served = chart.render({}, *SERVED)
    assert rule(served) == rule(chart.render({"prometheusRule": {"mode": "enabled"}}))
    assert not chart.render({"prometheusRule": {"mode": "disabled"}}, *SERVED).of("PrometheusRule")


def test_rules_are_those_of_the_file(chart: Chart, tmp_path: Path) -> None:
    spec = rule(chart.render({}, *SERVED))["spec"]
    assert spec == yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(spec))
    promtool = shutil.which("promtool") or str(REPOSITORY / ".cache" / "tools" / "promtool")
    subprocess.run([promtool, "check", "rules", rules], check=True, capture_output=True)


@pytest.mark.parametrize("base", [BASE, BASE + "/"])
def test_alerts_link_to_where_the_runbook_is_read(chart: Chart, base: str) -> None:
    spec = rule(chart.render({"prometheusRule": {"mode": "enabled", "runbookBase": base}}))["spec"]
    links = [one["annotations"]["runbook_url"] for group in spec["groups"] for one in group["rules"] if "alert" in one]
    assert links
    for link in links:
        assert link.startswith(BASE + "/docs/runbook/")
        assert (REPOSITORY / link.removeprefix(BASE + "/")).is_file()


def test_each_dashboard_is_in_a_config_map_that_grafana_finds(default: Rendered) -> None:
    found = {one["metadata"]["name"]: one for one in default.of("ConfigMap") if "dashboard" in one["metadata"]["name"]}
    assert set(found) == {f"{RELEASE}-dashboard-{path.stem}" for path in FILES}
    for path in FILES:
        one = found[f"{RELEASE}-dashboard-{path.stem}"]
        assert one["metadata"]["namespace"] == NAMESPACE
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert {name: json.loads(text) for name, text in one["data"].items()} == {
            f"gpumonitor-{path.name}": json.loads(path.read_text())
        }
        # `kubectl apply` keeps a copy in an annotation, which may have 256 KiB.
        assert len(json.dumps(one)) < 200_000


def test_dashboards_can_be_left_out(chart: Chart) -> None:
    rendered = chart.render({"dashboards": {"enabled": False}})
    assert not [one for one in rendered.of("ConfigMap") if "dashboard" in one["metadata"]["name"]]


def test_labels_are_a_persons_choice(chart: Chart) -> None:
    labels = {"release": "prom"}
    rendered = chart.render({"prometheusRule": {"mode": "enabled", "labels": labels}, "dashboards": {"labels": labels}})
    assert rule(rendered)["metadata"]["labels"]["release"] == "prom"
    (first, *_) = [one for one in rendered.of("ConfigMap") if "dashboard" in one["metadata"]["name"]]
    assert first["metadata"]["labels"]["release"] == "prom"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param({"prometheusRule": {"mode": "on"}}, "mode", id="a mode that is none"),
        pytest.param({"prometheusRule": {"runbookBase": "docs"}}, "runbookBase", id="an address without scheme"),
        pytest.param({"dashboards": {"folder": "x"}}, "folder", id="a misspelt name"),
        pytest.param(
            {"image": {"registry": "x.example"}, "prometheusRule": {"labels": {"helm.sh/chart": "x"}}},
            "prometheusRule.labels",
            id="a label of the chart's own on the rules",
        ),
        pytest.param(
            {"image": {"registry": "x.example"}, "dashboards": {"labels": {"app.kubernetes.io/name": "x"}}},
            "dashboards.labels",
            id="a label of the chart's own on the dashboards",
        ),
    ],
)
def test_nonsense_is_refused(chart: Chart, values: Object, says: str) -> None:
    assert says in chart.refusal(values)
