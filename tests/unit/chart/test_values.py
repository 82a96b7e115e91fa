# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a person writes into values: misspelt or impossible ones are refused, with a sentence that helps."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml

from tests.unit.chart.rendering import CHART, REGISTRY, Chart, Object
from verl_gpumonitor_operator import settings

FREE = {"podSecurityContext", "containerSecurityContext", "dashboards.labels"}
"""Values whose content the chart hands on."""


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param({}, "image.registry is not set", id="no registry"),
        pytest.param({"imge": {}}, "imge", id="a misspelt name"),
        pytest.param({"injection": {"modus": "optIn"}}, "modus", id="a misspelt name below"),
        pytest.param({"injection": {"mode": "opt-in"}}, "mode", id="a mode that is none"),
        pytest.param({"image": {"registry": "https://x.example"}}, "registry", id="a registry with scheme"),
        pytest.param({"image": {"registry": REGISTRY, "pullPolicy": "Sometimes"}}, "pullPolicy", id="a pull policy"),
        pytest.param({"image": {"registry": REGISTRY, "sidecar": {"digest": "abc"}}}, "digest", id="half a digest"),
        pytest.param({"report": {"intervalSeconds": 0}}, "intervalSeconds", id="no pause between reports"),
        pytest.param({"controller": {"replicas": 2}}, "replicas", id="a second controller"),
        pytest.param({"webhook": {"timeoutSeconds": 30}}, "timeoutSeconds", id="a webhook that holds pods up"),
        pytest.param(
            {"injection": {"sidecarResources": {"guaranteed": {"cpu": "much", "memory": "1Gi"}}}},
            "cpu",
            id="a quantity",
        ),
        *(
            pytest.param(
                {"injection": {"sidecarResources": {"guaranteed": {"cpu": amount, "memory": "64Mi"}}}},
                "'/injection/sidecarResources/guaranteed/cpu'",
                id=f"{amount} of CPU, which is no part of one",
            )
            for amount in ("1", "2000m", "0", "0.0", "0m", "64Mi")
        ),
        *(
            pytest.param(
                {"image": {"registry": "r.example"}, "injection": {"sidecarResources": {which: resources}}},
                "memory",
                id=f"{resources['memory']} as {which}, with which no sidecar could start",
            )
            for which in ("guaranteed", "burstableLimits")
            for resources in ({"cpu": "50m", "memory": amount} for amount in ("50m", "64", "64Ki", "16Mi", "0Mi"))
        ),
        pytest.param(
            {"image": {"registry": REGISTRY}, "breaker": {"coolDownSeconds": 90, "maxCoolDownSeconds": 60}},
            "breaker.maxCoolDownSeconds is below",
            id="a cool-down above its bound",
        ),
        *(
            pytest.param(
                {"image": {"registry": REGISTRY}, "webhook": webhook},
                "webhook.port and webhook.metricsPort are the same",
                id=f"one port for both, {webhook}",
            )
            for webhook in ({"port": 8081}, {"metricsPort": 9443}, {"port": 10555, "metricsPort": 10555})
        ),
        *(
            pytest.param(
                {"image": {"registry": REGISTRY}, "webhook": {port: number}}, port, id=f"{number} as webhook.{port}"
            )
            for port in ("port", "metricsPort")
            for number in (443, 1023, 65536)
        ),
        pytest.param(
            {"webhook": {"podDisruptionBudget": {"maxUnavailable": -1}}}, "maxUnavailable", id="fewer pods than none"
        ),
        *(
            pytest.param(
                {"webhook": {"podDisruptionBudget": {"maxUnavailable": none}}},
                "maxUnavailable",
                id=f"a budget of {none}, with which no node could be drained",
            )
            for none in (0, "0%")
        ),
    ],
)
def test_nonsense_is_refused(chart: Chart, values: Object, says: str) -> None:
    assert says in chart.refusal(values)


REGISTERED = {"image": {"registry": REGISTRY}}
SELECTED = "app.kubernetes.io/instance"


@pytest.mark.parametrize(
    ("path", "key"),
    [
        pytest.param("commonLabels", SELECTED, id="a label that selects"),
        pytest.param("commonLabels", "app.kubernetes.io/component", id="another one"),
        pytest.param("commonLabels", "helm.sh/chart", id="the chart's name"),
        pytest.param("commonLabels", "gpumonitor.dev/inject", id="a word to the webhook"),
        pytest.param("commonLabels", "ray.io/is-ray-node", id="what makes a pod one of a job"),
        pytest.param("podMonitor.labels", "app.kubernetes.io/name", id="of the pod monitors"),
        pytest.param("controller.podLabels", SELECTED, id="of the controller's pods"),
        pytest.param("webhook.podLabels", "training.kubeflow.org/job-name", id="of the webhook's pods"),
        pytest.param("controller.podAnnotations", "checksum/settings", id="an annotation"),
        pytest.param("webhook.podAnnotations", "gpumonitor.dev/injected", id="an annotation of ours"),
        pytest.param("webhook.serviceAccountAnnotations", "gpumonitor.dev/x", id="of a service account"),
    ],
)
def test_names_of_ours_are_refused(chart: Chart, path: str, key: str) -> None:
    values: Object = {key: "x"}
    for part in reversed(path.split(".")):
        values = {part: values}
    assert f"{path} may not contain {key}: " in chart.refusal(REGISTERED | values)


@pytest.mark.parametrize("component", ["controller", "webhook"])
def test_variables_of_ours_are_refused(chart: Chart, component: str) -> None:
    values = {component: {"extraEnv": [{"name": "TZ", "value": "UTC"}, {"name": "POD_UID", "value": "x"}]}}
    assert f"{component}.extraEnv may not contain POD_UID: " in chart.refusal(REGISTERED | values)


def test_a_label_of_all_objects_may_be_another_on_some(chart: Chart) -> None:
    rendered = chart.render(
        {
            "commonLabels": {"team": "a", "cost": "1"},
            "webhook": {"podLabels": {"team": "b"}},
            "podMonitor": {"mode": "enabled", "labels": {"team": "c"}},
        }
    )
    pod = rendered.get("Deployment", "gpumonitor-webhook")["spec"]["template"]["metadata"]["labels"]
    assert (pod["team"], pod["cost"], pod[SELECTED]) == ("b", "1", "gpumonitor")
    assert {one["metadata"]["labels"]["team"] for one in rendered.of("PodMonitor")} == {"c"}
    assert rendered.get("Deployment", "gpumonitor-controller")["metadata"]["labels"]["team"] == "a"


def paths(document: Object, above: str = "") -> Iterator[str]:
    """Dotted names of all values that a person can set one by one."""
    for key, value in document.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value and path not in FREE:
            yield from paths(value, f"{path}.")
        else:
            yield path


def schema_paths(schema: Object, definitions: Object, above: str = "") -> Iterator[str]:
    """Dotted names of all values that the schema knows."""
    for key, found in schema.get("properties", {}).items():
        path = f"{above}{key}"
        one = definitions[found["$ref"].rsplit("/", 1)[-1]] if "$ref" in found else found
        if one.get("properties") and path not in FREE:
            yield from schema_paths(one, definitions, f"{path}.")
        else:
            yield path


def test_schema_and_values_know_the_same_names() -> None:
    values: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    schema: Any = json.loads((CHART / "values.schema.json").read_text())
    known = set(schema_paths(schema, schema["definitions"])) - {"global"}
    given = {re.sub(r"(resources\.(requests|limits))\..*", r"\1", path) for path in paths(values)}
    assert (
        given | {f"{name}.resources.{part}" for name in ("controller", "webhook") for part in ("requests", "limits")}
        == known
    )


def test_every_object_of_the_schema_is_closed() -> None:
    """Where names are ours, a name that is not there is an error."""
    schema: Any = json.loads((CHART / "values.schema.json").read_text())

    def check(one: Object, path: str) -> None:
        if "properties" in one:
            assert one.get("additionalProperties") is False or path.endswith("extraEnv[]"), path
        for name, inner in one.get("properties", {}).items():
            check(inner, f"{path}.{name}")
        if isinstance(one.get("items"), dict):
            check(one["items"], f"{path}[]")

    check(schema, "")


OPTIONAL = FREE | {"controller.resources", "webhook.resources"}
"""Values that have a default, and that a person may do without."""


def defaults(document: Object, above: str = "") -> Iterator[tuple[str, bool]]:
    """Dotted name of each value and section, and whether it may be left out: it is empty, or optional."""
    for key, value in document.items():
        path = f"{above}{key}"
        yield path, path in OPTIONAL or value in ("", [], {})
        if isinstance(value, dict) and path not in OPTIONAL:
            yield from defaults(value, f"{path}.")


def set_to_none(paths: Iterable[str]) -> Object:
    """Values in which these are null, as with a section whose lines are all commented out."""
    values: Object = {}
    for path in paths:
        *above, last = path.split(".")
        section = values
        for part in above:
            section = section.setdefault(part, {})
        section[last] = None
    return values


def test_a_value_that_is_needed_cannot_be_taken_away() -> None:
    """Helm takes null for "none at all": a webhook without `timeoutSeconds` would hold each pod up for ten seconds."""
    values: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    schema: Any = json.loads((CHART / "values.schema.json").read_text())
    required = set(required_paths(schema, schema["definitions"]))
    assert required == {path for path, optional in defaults(values) if not optional}


def required_paths(schema: Object, definitions: Object, above: str = "") -> Iterator[str]:
    """Dotted names of all values that the schema wants to be there."""
    yield from (f"{above}{name}" for name in schema.get("required", ()))
    for key, found in schema.get("properties", {}).items():
        yield from required_paths(found, definitions, f"{above}{key}.")


@pytest.mark.parametrize("path", ["webhook", "webhook.timeoutSeconds", "report", "rescue.mode", "image.pullPolicy"])
def test_null_for_what_is_needed_is_named(chart: Chart, path: str) -> None:
    values = set_to_none([path])
    values["image"] = {**values.get("image", {}), "registry": REGISTRY}
    assert f"missing property '{path.rsplit('.', 1)[-1]}'" in chart.refusal(values)


def test_null_for_all_that_may_be_empty_is_a_release_that_works(chart: Chart) -> None:
    given: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    values = set_to_none(path for path, optional in defaults(given) if optional)
    values["image"]["registry"] = REGISTRY
    rendered = chart.render(values)
    assert settings.decode(rendered.settings).release == "gpumonitor"
    assert rendered.pod("webhook")["containers"][0]["image"].startswith(REGISTRY)


@pytest.mark.parametrize("name", ["my.monitor", "1st"])
def test_a_name_that_no_service_can_have_is_refused_before_anything_is_installed(chart: Chart, name: str) -> None:
    assert f"would be named {name}-gpumonitor" in chart.refusal(REGISTERED, release=name)


HANDED_ON = {"image": ("registry", "tag", "digest", "repository"), "resources": ("requests", "limits")}
"""Values that a template reads below one that it was given whole."""
WHOLE = ("injection", "report", "diagnosis", "breaker", "podSecurityContext", "containerSecurityContext")
"""Sections that go into an object as they are: every value of them is used."""


def read_by_templates() -> set[str]:
    """Dotted names of values that templates read, by `.Values` or, of both components, by `.values`."""
    found: set[str] = set()
    for file in sorted((CHART / "templates").iterdir()):
        # Comments name files and methods as well.
        text = re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", "", file.read_text(), flags=re.DOTALL)
        found |= set(re.findall(r"\.Values\.([A-Za-z][A-Za-z.]*[A-Za-z])", text))
        for name in re.findall(r"\.values\.([A-Za-z]+)", text):
            found |= {f"controller.{name}", f"webhook.{name}"}
        for names in re.findall(r"pick \.Values\.controller((?:\s+\"[A-Za-z]+\")+)", text):
            found |= {f"controller.{name}" for name in re.findall(r"[A-Za-z]+", names)}
    return found


def test_every_value_that_a_template_reads_is_known_and_every_known_one_is_read() -> None:
    schema: Any = json.loads((CHART / "values.schema.json").read_text())
    known = set(schema_paths(schema, schema["definitions"])) - {"global"}
    sections = {path.rsplit(".", depth)[0] for path in known for depth in range(1, path.count(".") + 1)}
    read = read_by_templates()
    assert read <= known | sections | set(WHOLE), "a value that nobody can set"
    below = {path for path in known if path.split(".")[0] in WHOLE}
    of_images = {path for path in known if path.split(".")[-1] in HANDED_ON["image"] and path.startswith("image.")}
    of_resources = {path for path in known if path.rsplit(".", 1)[0] in read and ".resources." in path}
    assert known - read - below - of_images - of_resources == set(), "a value that does nothing"
