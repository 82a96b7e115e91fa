# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the chart tells the operator: a settings file that it can read, with the values that a person gave."""

from typing import Any

import msgspec
import pytest

from tests.unit.chart.rendering import CHART, NAMESPACE, REGISTRY, RELEASE, Chart, Rendered
from verl_gpumonitor import __version__
from verl_gpumonitor.diagnosis.limits import DiagnosisLimits
from verl_gpumonitor_operator import settings

DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_the_charts_defaults_are_the_programs_defaults(default: Rendered) -> None:
    images = settings.Images(sidecar=f"{REGISTRY}/sidecar:{__version__}", operator=f"{REGISTRY}/operator:{__version__}")
    expected = settings.Settings(release=RELEASE, namespace=NAMESPACE, images=images)
    found = settings.decode(default.settings)
    assert msgspec.structs.replace(found, diagnosis=expected.diagnosis) == expected


def test_the_charts_limits_are_the_librarys(default: Rendered) -> None:
    """And all of them, so that none is out of reach."""
    given = msgspec.json.decode(default.settings)["diagnosis"]
    assert given == {**msgspec.to_builtins(DiagnosisLimits()), "thresholds": {}}


def test_every_setting_can_be_given_as_a_value(default: Rendered) -> None:
    """No field of the settings is out of the chart's reach, at any depth."""

    def names(kind: Any) -> set[str]:
        found = set()
        for field in msgspec.structs.fields(kind):
            found.add(field.encode_name)
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                found |= {f"{field.encode_name}.{name}" for name in names(field.type)}
        return found

    def keys(document: dict[str, Any]) -> set[str]:
        found = set()
        for key, value in document.items():
            found.add(key)
            if isinstance(value, dict):
                found |= {f"{key}.{name}" for name in keys(value)}
        return found

    given = msgspec.json.decode(default.settings)
    given["diagnosis"] = dict.fromkeys(given["diagnosis"])
    assert keys(given) == names(settings.Settings)


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        pytest.param({"injection": {"mode": "optIn"}}, "injection.mode", "optIn", id="injection mode"),
        pytest.param({"report": {"intervalSeconds": 3}}, "report.interval_seconds", 3.0, id="report interval"),
        pytest.param({"controller": {"retentionSeconds": 0}}, "controller.retention_seconds", 0.0, id="no retention"),
        pytest.param(
            {"controller": {"retentionSeconds": 31536000}}, "controller.retention_seconds", 31536000.0, id="a year"
        ),
        pytest.param({"breaker": {"coolDownSeconds": 1.5}}, "breaker.cool_down_seconds", 1.5, id="a fraction"),
        pytest.param(
            {"injection": {"gpuResources": ["a.example/<gpu>&"]}},
            "injection.gpu_resources",
            ("a.example/<gpu>&",),
            id="what JSON writers escape",
        ),
    ],
)
def test_a_value_reaches_the_program(chart: Chart, values: dict[str, Any], path: str, expected: object) -> None:
    found: Any = settings.decode(chart.render(values).settings)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == expected


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        pytest.param({}, f"{REGISTRY}/sidecar:{__version__}", id="the chart's version"),
        pytest.param({"tag": "t"}, f"{REGISTRY}/sidecar:t", id="a tag for both"),
        pytest.param({"tag": "t", "sidecar": {"tag": "s"}}, f"{REGISTRY}/sidecar:s", id="a tag of its own"),
        pytest.param({"sidecar": {"tag": "s", "digest": DIGEST}}, f"{REGISTRY}/sidecar@{DIGEST}", id="a digest wins"),
        pytest.param({"sidecar": {"repository": "x/y"}}, f"{REGISTRY}/x/y:{__version__}", id="another name"),
        pytest.param({"registry": "localhost:5000/"}, f"localhost:5000/sidecar:{__version__}", id="a port and a slash"),
    ],
)
def test_the_sidecars_reference(chart: Chart, image: dict[str, Any], expected: str) -> None:
    rendered = chart.render({"image": {"registry": REGISTRY, **image}})
    assert settings.decode(rendered.settings).images.sidecar == expected


def test_both_processes_run_the_operator_image_of_the_settings(default: Rendered) -> None:
    image = settings.decode(default.settings).images.operator
    assert {default.pod(name)["containers"][0]["image"] for name in ("controller", "webhook")} == {image}


def test_a_changed_setting_restarts_the_pods(chart: Chart, default: Rendered) -> None:
    changed = chart.render({"report": {"intervalSeconds": 3}})
    for name in ("gpumonitor-controller", "gpumonitor-webhook"):
        before, after = (
            one.get("Deployment", name)["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
            for one in (default, changed)
        )
        assert before != after


def test_the_version_of_chart_and_programs_is_one() -> None:
    assert f"\nappVersion: {__version__}\n" in (CHART / "Chart.yaml").read_text()


def test_two_releases_share_no_name(chart: Chart) -> None:
    """Cluster-wide objects of another release are others; the CRD alone is one for all."""
    names = {
        release: {
            (one["kind"], one["metadata"]["name"])
            for one in chart.render({"fullnameOverride": release}).objects
            if one["kind"] != "CustomResourceDefinition"
        }
        for release in ("one", "two")
    }
    assert not names["one"] & names["two"]
