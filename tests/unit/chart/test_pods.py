# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The operator's own pods and what stands around them."""

import pytest

from tests.unit.chart.rendering import REGISTRY, RELEASE, Chart, Object, Rendered

COMPONENTS = ("controller", "webhook")


@pytest.mark.parametrize("component", COMPONENTS)
def test_restricted_pod_security_admits_it(default: Rendered, component: str) -> None:
    """Each control of the restricted standard, version 1.36, that our pods touch."""
    pod = default.pod(component)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] != 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(set(volume) - {"name"} <= {"configMap", "emptyDir"} for volume in pod["volumes"])
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in container["ports"])


@pytest.mark.parametrize("component", COMPONENTS)
def test_it_is_started_and_probed_as_the_programs_expect(default: Rendered, component: str) -> None:
    container = default.pod(component)["containers"][0]
    assert container["command"] == [
        f"/opt/gpumonitor/bin/gpumon-{component}",
        "--settings",
        "/etc/gpumonitor/settings.json",
    ]
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]}
    assert fields == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert "limits" in container["resources"]


@pytest.mark.parametrize(
    ("component", "ports"),
    [
        pytest.param("controller", {"report": (8443, 8443), "metrics": (8081, 8081)}, id="controller"),
        pytest.param("webhook", {"webhook": (443, 9443), "metrics": (8081, 8081)}, id="webhook"),
    ],
)
def test_ports(default: Rendered, component: str, ports: dict[str, tuple[int, int]]) -> None:
    """Port of the Service, and of the container behind it, by name."""
    inside = {one["name"]: one["containerPort"] for one in default.pod(component)["containers"][0]["ports"]}
    service = default.get("Service", f"{RELEASE}-{component}")["spec"]
    assert {one["name"]: (one["port"], inside[one["targetPort"]]) for one in service["ports"]} == ports
    labels = default.get("Deployment", f"{RELEASE}-{component}")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()


def test_there_is_never_a_second_controller(default: Rendered) -> None:
    spec = default.get("Deployment", f"{RELEASE}-controller")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_there_is_always_a_webhook(default: Rendered) -> None:
    spec = default.get("Deployment", f"{RELEASE}-webhook")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert default.get("PodDisruptionBudget", f"{RELEASE}-webhook")["spec"]["maxUnavailable"] == 1
    assert default.pod("webhook")["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_webhook_may_be_on_the_nodes_network(chart: Chart, replicas: int) -> None:
    """On as many nodes as replicas: a surplus pod would wait for ever for a port that no old one gives up."""
    webhook = {"hostNetwork": True, "port": 10555, "metricsPort": 10556, "replicas": replicas}
    rendered = chart.render({"image": {"registry": REGISTRY}, "webhook": webhook})
    pod = rendered.pod("webhook")
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    container = pod["containers"][0]
    assert {one["name"]: one["containerPort"] for one in container["ports"]} == {"webhook": 10555, "metrics": 10556}
    assert container["args"] == ["--port=10555", "--health-port=10556"]
    assert rendered.get("Deployment", f"{RELEASE}-webhook")["spec"]["strategy"]["rollingUpdate"] == {
        "maxUnavailable": 1,
        "maxSurge": 0,
    }
    service = rendered.get("Service", f"{RELEASE}-webhook")["spec"]
    assert {one["targetPort"] for one in service["ports"]} == {"webhook", "metrics"}
    assert "hostNetwork" not in rendered.pod("controller")


PLACED: Object = {
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}


@pytest.mark.parametrize(("component", "other"), [COMPONENTS, COMPONENTS[::-1]], ids=COMPONENTS)
def test_what_a_person_adds_reaches_the_pods_of_that_component_alone(chart: Chart, component: str, other: str) -> None:
    values: Object = {
        "image": {"registry": REGISTRY, "pullSecrets": [{"name": "login"}]},
        component: {
            **PLACED,
            "podAnnotations": {"x": "y"},
            "podLabels": {"team": "z"},
            "serviceAccountAnnotations": {"who": "me"},
            "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "3", "memory": "5Gi"}},
            "extraEnv": [{"name": "E", "value": "1"}],
        },
    }
    rendered = chart.render(values)
    pod, unplaced = rendered.pod(component), rendered.pod(other)
    assert {key: pod[key] for key in PLACED} == PLACED
    assert not PLACED.keys() & unplaced.keys()
    container = pod["containers"][0]
    assert {"name": "E", "value": "1"} in container["env"]
    assert container["resources"]["limits"] == {"cpu": "3", "memory": "5Gi"}
    assert container["resources"]["requests"]["cpu"] == "2"
    assert container["resources"] != unplaced["containers"][0]["resources"]
    assert pod["imagePullSecrets"] == unplaced["imagePullSecrets"] == [{"name": "login"}], "one registry for both"
    metadata = rendered.get("Deployment", f"{RELEASE}-{component}")["spec"]["template"]["metadata"]
    assert metadata["annotations"]["x"] == "y"
    assert metadata["labels"]["team"] == "z"
    account = rendered.get("ServiceAccount", f"{RELEASE}-{component}")
    assert account["metadata"]["annotations"] == {"who": "me"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_node_can_be_drained_with_any_number_of_replicas(chart: Chart, replicas: int) -> None:
    """A budget by `minAvailable`, or of none, would hold the drain of the last replica's node up for ever."""
    rendered = chart.render({"webhook": {"replicas": replicas}})
    budgets = rendered.of("PodDisruptionBudget")
    assert [budget["spec"]["maxUnavailable"] for budget in budgets] == [1]
    assert not any("minAvailable" in budget["spec"] for budget in budgets)
    assert budgets[0]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budgets[0]["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "webhook"


def test_an_upgrade_changes_nothing_that_cannot_be_changed(default: Rendered, chart: Chart) -> None:
    """Selectors of Deployments, and the role that a binding names: whatever the values, they are those of before."""
    other = chart.render(
        {
            "image": {"registry": REGISTRY, "tag": "another"},
            "commonLabels": {"team": "a"},
            "controller": {"podLabels": {"tier": "b"}},
            "webhook": {"podLabels": {"tier": "b"}, "replicas": 3},
            "rescue": {"mode": "disabled"},
        }
    )
    for before in default.of("Deployment"):
        name = before["metadata"]["name"]
        assert other.get("Deployment", name)["spec"]["selector"] == before["spec"]["selector"]
        assert before["spec"]["selector"]["matchLabels"] == {
            "app.kubernetes.io/name": "gpumonitor",
            "app.kubernetes.io/instance": RELEASE,
            "app.kubernetes.io/component": name.removeprefix(f"{RELEASE}-"),
        }
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        assert [one["roleRef"] for one in other.of(kind)] == [one["roleRef"] for one in default.of(kind)]


def test_network_policies_let_in_what_is_needed(default: Rendered, chart: Chart) -> None:
    for component, port in (("controller", "report"), ("webhook", "webhook")):
        spec = default.get("NetworkPolicy", f"{RELEASE}-{component}")["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == [port, "metrics"]
        assert not any("from" in rule for rule in spec["ingress"])
    scraper = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    narrowed = chart.render({"networkPolicy": {"metricsFrom": scraper}})
    rules = narrowed.get("NetworkPolicy", f"{RELEASE}-webhook")["spec"]["ingress"]
    assert [rule.get("from") for rule in rules] == [None, scraper]
    assert not chart.render({"networkPolicy": {"enabled": False}}).of("NetworkPolicy")


def test_pod_monitors_wait_for_their_api(default: Rendered, chart: Chart) -> None:
    assert not default.of("PodMonitor")
    served = chart.render({}, "--api-versions", "monitoring.coreos.com/v1/PodMonitor").of("PodMonitor")
    forced = chart.render({"podMonitor": {"mode": "enabled"}}).of("PodMonitor")
    assert served == forced
    assert len(forced) == 4


def test_no_pod_can_write_anothers_series(chart: Chart) -> None:
    rendered = chart.render({"podMonitor": {"mode": "enabled", "labels": {"release": "prom"}}})
    for family in ("ray", "kubeflow"):
        monitor = rendered.get("PodMonitor", f"{RELEASE}-{family}")
        assert monitor["metadata"]["labels"]["release"] == "prom"
        assert monitor["spec"]["namespaceSelector"] == {"any": True}
        endpoint = monitor["spec"]["podMetricsEndpoints"][0]
        assert endpoint["port"] == "gpumon-metrics"
        assert endpoint["honorLabels"] is False
        assert endpoint["metricRelabelings"][0]["action"] == "labeldrop"
    own = rendered.get("PodMonitor", f"{RELEASE}-controller")["spec"]["podMetricsEndpoints"][0]
    assert own["honorLabels"] is True


@pytest.mark.parametrize("word", ["true", "123", "1e3", "null", "0x10"])
def test_words_that_yaml_takes_for_something_else_stay_words(chart: Chart, word: str) -> None:
    values = {"nameOverride": word, "fullnameOverride": "gpumonitor", "webhook": {"priorityClassName": word}}
    rendered = chart.render(values, release=word)
    deployment = rendered.get("Deployment", "gpumonitor-webhook")
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert (labels["app.kubernetes.io/name"], labels["app.kubernetes.io/instance"]) == (word, word)
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == word


def test_an_address_of_digits_stays_one(chart: Chart) -> None:
    """YAML 1.1 takes digits between colons for a number to base sixty."""
    address = "2001:10:20:30:40:50:1:2"
    rendered = chart.render({"controller": {"clusterIP": address}})
    assert rendered.get("Service", f"{RELEASE}-controller")["spec"]["clusterIP"] == address
