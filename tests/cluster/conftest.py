# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The cluster that the tests share: guarded by its mark, with our chart installed once, a namespace for each test."""

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import product
from devcluster.layout import MARK_NAME, MARK_NAMESPACE, default_layout
from tests.cluster.kubectl import Kubectl, eventually

REPOSITORY = Path(__file__).resolve().parents[2]
FAST = {
    "report": {"intervalSeconds": 3},
    "controller": {
        "notReportingSeconds": 20,
        "statusMinIntervalSeconds": 1,
        "leaseSeconds": 6,
    },
    "breaker": {"coolDownSeconds": 15, "maxCoolDownSeconds": 60},
}
"""Settings of the tests: the same logic, sooner."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what breaks shared parts last, in the order in which it stands."""
    items.sort(key=lambda item: item.get_closest_marker("disturbing") is not None)


@pytest.fixture(scope="session")
def access() -> product.Access:
    """The local cluster's kubeconfig. No other cluster can hold these tests: they need its simulated GPUs."""
    if os.environ.get("CLUSTER", "devcluster") != "devcluster":
        pytest.exit("the tests of tests/cluster break things on purpose and run on the devcluster alone", returncode=3)
    found = product.local_access(default_layout())
    if found.kubeconfig is None or not found.kubeconfig.exists():
        pytest.exit("no local cluster: run `make cluster-up` first", returncode=3)
    return found


@pytest.fixture(scope="session")
def kubectl(access: product.Access) -> Kubectl:
    """kubectl of a cluster that carries the devcluster's mark."""
    client = Kubectl(program=access.kubectl, kubeconfig=str(access.kubeconfig))
    if client.get("configmap", MARK_NAME, MARK_NAMESPACE) is None:
        pytest.exit(
            f"the cluster lacks ConfigMap {MARK_NAMESPACE}/{MARK_NAME}: not a devcluster, nothing was touched",
            returncode=3,
        )
    return client


@pytest.fixture(scope="session")
def values(kubectl: Kubectl) -> dict[str, object]:
    """Chart values of the tests, with images built from this checkout."""
    return {"image": product.build_images(default_layout()), **FAST}


@pytest.fixture(scope="session")
def release(access: product.Access, kubectl: Kubectl, values: dict[str, object]) -> str:
    """The chart, installed once for all tests and left there for a look afterwards. Its namespace."""
    product.install(access, chart=REPOSITORY / "charts" / "gpumonitor", values=values)
    wait_for_injection(kubectl)
    return product.NAMESPACE


def wait_for_injection(kubectl: Kubectl) -> None:
    """Wait until the webhook is trusted, and served by the pods of the last installation alone."""

    def trusted() -> bool:
        found = kubectl.get("mutatingwebhookconfiguration", product.RELEASE) or {"webhooks": []}
        return bool(found["webhooks"]) and all(hook["clientConfig"].get("caBundle") for hook in found["webhooks"])

    def settled() -> bool:
        pods = kubectl.list("pod", product.NAMESPACE, selector="app.kubernetes.io/component=webhook")
        return len(pods) == 2 and all("deletionTimestamp" not in pod["metadata"] for pod in pods)

    eventually(trusted, within=60, what="caBundle of the webhook configuration")
    eventually(settled, within=60, what="the two webhook pods alone")


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, gone afterwards."""
    readable = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    name = f"{readable}-{uuid.uuid4().hex[:6]}"
    kubectl.run("create", "namespace", name)
    yield name
    kubectl.delete("namespace", name, wait=False)
