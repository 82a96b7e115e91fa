# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the operator may do: all rights are pinned here, so that each new one is seen in review."""

import pytest

from tests.unit.chart.rendering import NAMESPACE, RELEASE, Chart, Object, Rendered
from verl_gpumonitor_operator import settings
from verl_gpumonitor_operator.controller import ledgers

READ = "get list watch"
FOLLOW = "list watch"
CONTROLLER_EVERYWHERE = {
    "ray.io/rayjobs": FOLLOW,
    "ray.io/rayclusters": FOLLOW,
    "kubeflow.org/pytorchjobs": FOLLOW,
    "trainer.kubeflow.org/trainjobs": FOLLOW,
    "/namespaces": FOLLOW,
    "/pods": FOLLOW + " patch",
    "apiextensions.k8s.io/customresourcedefinitions": FOLLOW,
    "gpumonitor.dev/gpumonitors": READ + " create delete",
    "gpumonitor.dev/gpumonitors/status": "patch",
    "events.k8s.io/events": "get create patch",
    "metrics.k8s.io/pods": "list",
    "authentication.k8s.io/tokenreviews": "create",
    "authorization.k8s.io/selfsubjectaccessreviews": "create",
    f"admissionregistration.k8s.io/mutatingwebhookconfigurations/{RELEASE}": "get patch",
}
CONTROLLER_AT_HOME = {
    "/secrets": "create",
    "/configmaps": "create",
    "coordination.k8s.io/leases": "create",
    f"/secrets/{RELEASE}-certificates": "get update",
    f"/secrets/{RELEASE}-certificates-ca": "get update",
    f"/configmaps/{RELEASE}-breaker": "get patch",
    **{f"/configmaps/{name}": "get patch" for name in ledgers.names(RELEASE)},
    f"coordination.k8s.io/leases/{RELEASE}-controller": "get update",
    f"apps/deployments/{RELEASE}-controller": "get",
}
WEBHOOK_EVERYWHERE = {
    "/namespaces": "get",
    "/limitranges": "list",
    "/resourcequotas": "list",
    "/nodes": "list",
    "/pods": "list",
    "apps/daemonsets": "list",
    "ray.io/rayclusters": "get",
}
WEBHOOK_AT_HOME = {
    f"/secrets/{RELEASE}-certificates": "get",
    f"/configmaps/{RELEASE}-breaker": "get",
    f"/services/{RELEASE}-controller": "get",
    f"coordination.k8s.io/leases/{RELEASE}-controller": "get",
}


def rights(role: Object) -> dict[str, str]:
    """Rules of a role as group/resource(/name) -> verbs."""
    found: dict[str, list[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    found.setdefault(f"{group}/{resource}/{name}".rstrip("/"), []).extend(rule["verbs"])
    return {key: " ".join(verbs) for key, verbs in found.items()}


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        pytest.param("ClusterRole", "controller", CONTROLLER_EVERYWHERE, id="the controller, everywhere"),
        pytest.param("Role", "controller", CONTROLLER_AT_HOME, id="the controller, in its namespace"),
        pytest.param("ClusterRole", "webhook", WEBHOOK_EVERYWHERE, id="the webhook, everywhere"),
        pytest.param("Role", "webhook", WEBHOOK_AT_HOME, id="the webhook, in its namespace"),
    ],
)
def test_the_rights_are_just_these(default: Rendered, kind: str, name: str, expected: dict[str, str]) -> None:
    found = rights(default.get(kind, f"{RELEASE}-{name}"))
    assert {key: set(verbs.split()) for key, verbs in found.items()} == {
        key: set(verbs.split()) for key, verbs in expected.items()
    }


def test_every_role_is_bound_to_its_own_account_alone(default: Rendered) -> None:
    for binding in default.of("ClusterRoleBinding") + default.of("RoleBinding"):
        account = {"kind": "ServiceAccount", "name": binding["metadata"]["name"], "namespace": NAMESPACE}
        assert binding["subjects"] == [account]
        assert binding["roleRef"]["name"] == binding["metadata"]["name"]
    assert len(default.of("ClusterRoleBinding")) == len(default.of("RoleBinding")) == 2


def test_nobody_but_the_controller_reads_the_keys_of_the_ca(default: Rendered) -> None:
    secret = settings.decode(default.settings).authority_secret
    readers = set()
    for role in default.of("ClusterRole") + default.of("Role"):
        for right in rights(role):
            kind, _, name = right.removeprefix("/").partition("/")
            if kind in ("secrets", "*") and name in ("", secret) and rights(role)[right] != "create":
                readers.add((role["kind"], role["metadata"]["name"]))
    assert readers == {("Role", f"{RELEASE}-controller")}


def test_the_names_are_those_that_the_programs_use(default: Rendered) -> None:
    known = settings.decode(default.settings)
    for secret in (known.certificates_secret, known.authority_secret):
        assert f"/secrets/{secret}" in CONTROLLER_AT_HOME
    assert f"/secrets/{known.certificates_secret}" in WEBHOOK_AT_HOME
    assert f"/configmaps/{known.breaker_config_map}" in WEBHOOK_AT_HOME
    assert default.get("MutatingWebhookConfiguration", known.webhook_configuration)
    for name in (known.controller_name, known.webhook_name):
        assert default.get("Deployment", name)
        assert default.get("Service", name)
        assert default.get("ServiceAccount", name)


@pytest.mark.parametrize(
    ("values", "arguments", "expected"),
    [
        pytest.param({}, (), True, id="where the policy's API is served"),
        pytest.param({}, ("--kube-version", "1.29.0"), False, id="not before 1.30"),
        pytest.param({"rescue": {"mode": "disabled"}}, (), False, id="not where it is disabled"),
        pytest.param(
            {},
            ("--kube-version", "1.29.0", "--api-versions", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"),
            True,
            id="where a list of APIs names it",
        ),
    ],
)
def test_pods_may_be_patched_only_under_the_policy(
    chart: Chart, values: Object, arguments: tuple[str, ...], expected: bool
) -> None:
    rendered = chart.render(values, *arguments)
    may_patch = "patch" in rights(rendered.get("ClusterRole", f"{RELEASE}-controller"))["/pods"].split()
    assert may_patch is expected
    assert len(rendered.of("ValidatingAdmissionPolicy")) == int(expected)
    assert len(rendered.of("ValidatingAdmissionPolicyBinding")) == int(expected)


def test_the_policy_binds_our_account_and_names_our_images(default: Rendered) -> None:
    policy = default.get("ValidatingAdmissionPolicy", f"{RELEASE}-pod-images")["spec"]
    images = settings.decode(default.settings).images
    account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-controller"
    assert policy["failurePolicy"] == "Fail"
    assert account in policy["matchConditions"][0]["expression"]
    ours = next(one["expression"] for one in policy["variables"] if one["name"] == "ours")
    assert ours == f'["{images.sidecar}","{images.operator}"]'
    binding = default.get("ValidatingAdmissionPolicyBinding", f"{RELEASE}-pod-images")["spec"]
    assert binding == {"policyName": f"{RELEASE}-pod-images", "validationActions": ["Deny"]}


def test_users_see_monitors_and_never_write_a_status(default: Rendered) -> None:
    edit = rights(default.get("ClusterRole", f"{RELEASE}-edit"))
    assert set(edit) == {"gpumonitor.dev/gpumonitors"}
    view = default.get("ClusterRole", f"{RELEASE}-view")
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert set(" ".join(rights(view).values()).split()) == set(READ.split())
