# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whom the API server asks us about, and what it does when we do not answer."""

import pytest

from tests.unit.chart.rendering import NAMESPACE, RELEASE, Chart, Object, Rendered

RAY = {"ray.io/is-ray-node": "yes", "ray.io/cluster": "c"}


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Decide as the API server does whether a label selector fits."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for one in selector.get("matchExpressions", []):
        has = one["key"] in labels
        fits = {
            "Exists": has,
            "NotIn": labels.get(one["key"]) not in one.get("values", []),
        }[one["operator"]]
        if not fits:
            return False
    return True


@pytest.fixture(scope="module")
def entries(default: Rendered) -> list[Object]:
    """Both entries of the configuration."""
    found: list[Object] = default.get("MutatingWebhookConfiguration", RELEASE)["webhooks"]
    return found


def test_nothing_of_ours_can_refuse_a_pod(entries: list[Object]) -> None:
    assert len(entries) == 2
    for entry in entries:
        assert entry["failurePolicy"] == "Ignore"
        assert entry["timeoutSeconds"] == 3
        assert entry["sideEffects"] == "None"
        assert entry["reinvocationPolicy"] == "IfNeeded"
        assert entry["matchPolicy"] == "Equivalent"
        assert entry["admissionReviewVersions"] == ["v1"]
        assert entry["rules"] == [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }
        ]


def test_the_bundle_is_the_controllers_to_write(entries: list[Object]) -> None:
    """A caBundle in the chart, were it only an empty one, would erase the real one at each upgrade."""
    service = {"name": f"{RELEASE}-webhook", "namespace": NAMESPACE, "path": "/mutate", "port": 443}
    assert [entry["clientConfig"] for entry in entries] == [{"service": service}] * 2


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        pytest.param(RAY, 1, id="a Ray pod"),
        pytest.param({**RAY, "ray.io/node-type": "head"}, 1, id="a Ray head"),
        pytest.param({**RAY, "ray.io/node-type": "redis-cleanup"}, 0, id="the Job that cleans Redis up"),
        pytest.param({"ray.io/originated-from-crd": "RayJob"}, 0, id="a RayJob's submitter"),
        pytest.param({"training.kubeflow.org/job-name": "j"}, 1, id="a PyTorchJob's pod"),
        pytest.param({}, 0, id="any other pod"),
    ],
)
def test_pods_that_are_asked_about(entries: list[Object], labels: dict[str, str], count: int) -> None:
    assert sum(selects(entry["objectSelector"], labels) for entry in entries) == count


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param({"kubernetes.io/metadata.name": "team"}, True, id="a user's"),
        pytest.param({"kubernetes.io/metadata.name": "kube-system"}, False, id="kube-system"),
        pytest.param({"kubernetes.io/metadata.name": "kube-public"}, False, id="kube-public"),
        pytest.param({"kubernetes.io/metadata.name": "kube-node-lease"}, False, id="kube-node-lease"),
        pytest.param({"kubernetes.io/metadata.name": NAMESPACE}, False, id="our own"),
        pytest.param({"kubernetes.io/metadata.name": "left-out"}, False, id="one that the values leave out"),
        pytest.param({"kubernetes.io/metadata.name": "t", "gpumonitor.dev/inject": "disabled"}, False, id="opted out"),
        pytest.param({"kubernetes.io/metadata.name": "t", "gpumonitor.dev/inject": "enabled"}, True, id="opted in"),
    ],
)
def test_namespaces_that_are_asked_about(chart: Chart, labels: dict[str, str], expected: bool) -> None:
    rendered = chart.render({"injection": {"excludedNamespaces": ["left-out"]}})
    for entry in rendered.get("MutatingWebhookConfiguration", RELEASE)["webhooks"]:
        assert selects(entry["namespaceSelector"], labels) is expected
