# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Each right of the chart is there for a request in the code, and each request in the code has its right.

`CONTROLLER` and `WEBHOOK` say what each place in the code that speaks to the API server asks for. The places are found
in the source, so that a new one is missed here; the rights are those that the chart renders.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

import verl_gpumonitor_operator
from tests.unit.chart.rendering import RELEASE, Chart, Object, Rendered
from tests.unit.chart.test_rights import rights
from verl_gpumonitor_operator.controller import ledgers, watch

SOURCES: Final = Path(verl_gpumonitor_operator.__file__).parent
SPEAKERS: Final = ("kube", "admission/kubeapi.py")
"""What sends requests for others; all else goes through these."""
CLIENTS: Final = ("client", "_client", "_guarded", "_api", "api")
"""Names under which the code holds a client."""
VERBS: Final[Mapping[str, str]] = {
    "get": "get",
    "get_bytes": "get",
    "get_or_none": "get",
    "listed": "list",
    "pages": "list",
    "list_all": "list",
    "Reflector": "list watch",
    "stream": "watch",
    "post": "create",
    "put": "update",
    "merge_patch": "patch",
    "strategic_patch": "patch",
    "json_patch": "patch",
    "delete": "delete",
}
"""What each method, or function, of a client means to the API server."""

HOME: Final = "home "
"""In our own namespace alone."""
OPEN: Final = ""
"""Versions and discovery, which everybody may read."""
CONFIG_MAPS: Final = (f"{RELEASE}-breaker", *ledgers.names(RELEASE))
JOBS: Final = ("ray.io/rayjobs", "ray.io/rayclusters", "kubeflow.org/pytorchjobs", "trainer.kubeflow.org/trainjobs")
MONITORS: Final = "gpumonitor.dev/gpumonitors"
SECRET: Final = f"{HOME}/secrets/{RELEASE}-certificates"
AUTHORITY: Final = f"{HOME}/secrets/{RELEASE}-certificates-ca"
LEASE: Final = f"{HOME}coordination.k8s.io/leases/{RELEASE}-controller"
WEBHOOK_CONFIGURATION: Final = f"admissionregistration.k8s.io/mutatingwebhookconfigurations/{RELEASE}"

Calls = Mapping[str, Mapping[str, tuple[str, ...]]]

CONTROLLER: Final[Calls] = {
    "controller/certificates.py CaPublisher._bundles": {"get": (WEBHOOK_CONFIGURATION,)},
    "controller/certificates.py CaPublisher.publish": {"json_patch": (WEBHOOK_CONFIGURATION,)},
    "controller/documents.py Deployment._find": {"get": (f"{HOME}apps/deployments/{RELEASE}-controller",)},
    "controller/documents.py ConfigMapEntries.load": {"get": tuple(f"{HOME}/configmaps/{one}" for one in CONFIG_MAPS)},
    "controller/documents.py ConfigMapEntries.save": {
        "merge_patch": tuple(f"{HOME}/configmaps/{one}" for one in CONFIG_MAPS),
        "post": (f"{HOME}/configmaps",),
    },
    "controller/documents.py SecretDocument.load": {"get": (SECRET, AUTHORITY)},
    "controller/documents.py SecretDocument.save": {"post": (f"{HOME}/secrets",), "put": (SECRET, AUTHORITY)},
    "controller/events.py EventRecorder._do": {
        "post": ("events.k8s.io/events",),
        "get": ("events.k8s.io/events",),
        "merge_patch": ("events.k8s.io/events",),
    },
    "controller/lease.py Lease.release": {"get": (LEASE,)},
    "controller/lease.py Lease._claim": {"get": (LEASE,), "post": (f"{HOME}coordination.k8s.io/leases",)},
    "controller/lease.py Lease._put": {"put": (LEASE,)},
    "controller/main.py Controller._works": {"list": (*JOBS, MONITORS)},
    "controller/namespaces.py reflector": {"Reflector": ("/namespaces",)},
    "controller/pod_images.py PodImages.patch_sidecar_image": {"strategic_patch": ("/pods",)},
    "controller/pods.py reflectors": {"Reflector": ("/pods",)},
    "controller/podusage.py PodUsage._list": {"list_all": ("metrics.k8s.io/pods",)},
    "controller/reviews.py Reviews._status": {
        "post": ("authentication.k8s.io/tokenreviews", "authorization.k8s.io/selfsubjectaccessreviews")
    },
    "controller/sweep.py Sweeper._each": {"list_all": (*JOBS, MONITORS)},
    "controller/sweep.py Sweeper._is_served": {"get": (OPEN,)},
    "controller/writer.py StatusWriter._write": {"merge_patch": (f"{MONITORS}/status",)},
    "controller/writer.py StatusWriter._create": {"post": (MONITORS,), "get": (MONITORS,)},
    "controller/writer.py StatusWriter.delete": {"delete": (MONITORS,)},
}
KOPF: Final = {
    **{f"{one.group}/{one.plural}": "list watch" for one in watch.RESOURCES.values()},
    "apiextensions.k8s.io/customresourcedefinitions": "list watch",
}
"""What kopf does by itself: it follows what it is told to, and the definitions, to see kinds that come later."""
WEBHOOK: Final[Calls] = {
    "admission/preflight.py Preflight._read_namespace": {
        "get": ("/namespaces",),
        "listed": ("/limitranges", "/resourcequotas"),
    },
    "admission/preflight.py Preflight._ray_cluster_has_gpus": {"get": ("ray.io/rayclusters",)},
    "admission/preflight.py Preflight._runtime_class": {"get_or_none": ("node.k8s.io/runtimeclasses/nvidia",)},
    "admission/preflight.py Preflight._read_free_room": {"listed": ("/pods",)},
    "admission/preflight.py Preflight.which_are_there": {"pages": ("/pods",)},
    "admission/preflight.py Preflight._keep_warm": {"get_bytes": (OPEN,)},
    "admission/preflight.py Preflight._read_standing": {"get": (OPEN,), "pages": ("/nodes",)},
    "admission/preflight.py Preflight._daemon_sets": {"listed": ("apps/daemonsets",)},
    "admission/preflight.py Preflight._read_controller": {"get_or_none": (f"{HOME}/services/{RELEASE}-controller",)},
    "admission/preflight.py Preflight._read_breaker": {"get_or_none": (f"{HOME}/configmaps/{RELEASE}-breaker",)},
    "admission/preflight.py Preflight._read_lease": {"get_or_none": (LEASE,)},
    "admission/preflight.py Preflight._read_certificates": {"get_or_none": (SECRET,)},
}
LISTS_BY_GET: Final = {"controller/main.py Controller._works"}
"""Where a plain GET is of a list."""


def calls_in(folder: str) -> dict[str, set[str]]:
    """Methods of clients that the code of a process calls, by file and function."""
    found: dict[str, set[str]] = {}
    for file in sorted((SOURCES / folder).rglob("*.py")):
        path = file.relative_to(SOURCES).as_posix()
        if not path.startswith(SPEAKERS):
            for where, method in _calls(ast.parse(file.read_text()), ()):
                found.setdefault(f"{path} {where}", set()).add(method)
    return found


def _calls(node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        method = _method(child)
        if method is not None:
            yield ".".join(within), method
        yield from _calls(child, (*within, child.name) if named else within)  # type: ignore[attr-defined] # so named


def _method(node: ast.AST) -> str | None:
    """The method of a client that a call is of; None for all other code."""
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    if isinstance(called, ast.Name):
        return called.id if called.id in ("list_all", "Reflector") else None
    if not isinstance(called, ast.Attribute) or called.attr not in VERBS:
        return None
    return called.attr if ast.unparse(called.value).split(".")[-1] in CLIENTS else None


@pytest.mark.parametrize(
    ("folder", "known"),
    [pytest.param("controller", CONTROLLER, id="controller"), pytest.param("admission", WEBHOOK, id="webhook")],
)
def test_every_place_that_asks_is_known(folder: str, known: Calls) -> None:
    expected = {
        where: {"get" if where in LISTS_BY_GET else method for method in methods} for where, methods in known.items()
    }
    assert calls_in(folder) == expected


def test_nobody_else_speaks_to_the_api_server() -> None:
    """Nor does the code of both processes, where it is shared."""
    speaking = {
        file.relative_to(SOURCES).as_posix()
        for file in SOURCES.rglob("*.py")
        if any(word in file.read_text() for word in ("ClientSession(", "ApiClient(", "urlopen(", "HTTPSConnection("))
    }
    assert speaking == {"kube/client.py", "admission/kubeapi.py"}
    assert not {where for where in calls_in("") if not where.startswith(("controller/", "admission/"))}


def needed(calls: Calls, *, home: bool) -> dict[str, set[str]]:
    """Verbs by resource that calls ask for, in our namespace or everywhere."""
    found: dict[str, set[str]] = {}
    for methods in calls.values():
        for method, resources in methods.items():
            for resource in resources:
                if resource != OPEN and resource.startswith(HOME) is home:
                    verbs = VERBS.get(method, method).split()
                    found.setdefault(resource.removeprefix(HOME), set()).update(verbs)
    return found


def given(role: Object) -> dict[str, set[str]]:
    """Verbs by resource that a role grants."""
    return {resource: set(verbs.split()) for resource, verbs in rights(role).items()}


def test_the_controller_may_do_what_it_does_and_no_more(default: Rendered) -> None:
    everywhere = needed(CONTROLLER, home=False)
    for resource, verbs in KOPF.items():
        everywhere.setdefault(resource, set()).update(verbs.split())
    assert given(default.get("ClusterRole", f"{RELEASE}-controller")) == everywhere
    assert given(default.get("Role", f"{RELEASE}-controller")) == needed(CONTROLLER, home=True)


def test_the_webhook_may_do_what_it_does_and_no_more(chart: Chart, default: Rendered) -> None:
    with_class = chart.render({"injection": {"visibility": "runtimeClass"}})
    everywhere = needed(WEBHOOK, home=False)
    assert given(with_class.get("ClusterRole", f"{RELEASE}-webhook")) == everywhere
    assert given(with_class.get("Role", f"{RELEASE}-webhook")) == needed(WEBHOOK, home=True)
    del everywhere["node.k8s.io/runtimeclasses/nvidia"]
    assert given(default.get("ClusterRole", f"{RELEASE}-webhook")) == everywhere


def test_kopf_looks_for_kinds_that_come_later() -> None:
    """Else it would need no right to definitions."""
    assert watch.settings().scanning.disabled is False
