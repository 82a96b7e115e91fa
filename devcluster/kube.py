# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Speaking to the cluster, by the kubectl that was built with it."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml

from devcluster.command import output
from devcluster.errors import ClusterError
from devcluster.layout import Layout

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader in C, where PyYAML has it: megabytes of CRDs take the other one half a minute."""


def kubectl(layout: Layout, *arguments: str | Path, text: str | None = None) -> str:
    """Run kubectl as administrator and return its output; `text` is its input. Raises ClusterError."""
    return output([layout.program("kubectl"), f"--kubeconfig={layout.kubeconfig}", *arguments], text=text)


def apply(layout: Layout, documents: Iterable[Mapping[str, Any]]) -> None:
    """Apply objects on the server's side: large CRDs do not fit into the annotation of the other way.

    Without validation by kubectl, for which the server would have to render all its schemas: half a minute on a busy
    machine.
    """
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})
    kubectl(layout, "apply", "--server-side", "--force-conflicts", "--validate=false", "--filename", "-", text=text)


def delete(layout: Layout, documents: Iterable[Mapping[str, Any]]) -> None:
    """Delete objects, and wait until they are gone; those that are not there are fine."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})
    kubectl(layout, "delete", "--ignore-not-found", "--wait=true", "--timeout=120s", "--filename", "-", text=text)


def documents(text: str, **values: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest, after putting in the values for `${name}`."""
    filled = Template(text).substitute(values) if values else text
    return [document for document in yaml.load_all(filled, Loader=_LOADER) if document]


def manifest(layout: Layout, name: str, **values: str) -> list[dict[str, Any]]:
    """Return the objects of a file in `manifests/`."""
    return documents((layout.package / "manifests" / name).read_text(), **values)


def wait_for(what: str, holds: Callable[[], bool], *, seconds: float, advice: str = "") -> None:
    """Wait until something holds. Raises ClusterError that says what did not come true."""
    deadline = time.monotonic() + seconds
    while not _holds(holds):
        if time.monotonic() > deadline:
            raise ClusterError(f"After {seconds:.0f} s still not: {what}.", advice)
        time.sleep(0.3)


def wait_available(layout: Layout, namespace: str, deployment: str, *, seconds: float = 120) -> None:
    """Wait until a Deployment has all its pods ready, in the version last applied."""

    def available() -> bool:
        found = json.loads(kubectl(layout, "get", "deployment", deployment, f"--namespace={namespace}", "-ojson"))
        return deployment_available(found)

    advice = f"Look at: kubectl --namespace {namespace} describe pods"
    wait_for(f"deployment {namespace}/{deployment} available", available, seconds=seconds, advice=advice)


def deployment_available(deployment: Mapping[str, Any]) -> bool:
    """Tell from a Deployment's status whether all its pods are of the present version and ready."""
    wanted = deployment["spec"].get("replicas", 1)
    status = deployment.get("status", {})
    seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    counts = [status.get(count, 0) for count in ("updatedReplicas", "availableReplicas", "replicas")]
    return seen and all(count == wanted for count in counts)


def node_ready(layout: Layout, node: str) -> bool:
    """Tell whether the node is Ready."""
    found = json.loads(kubectl(layout, "get", "node", node, "-ojson"))
    conditions = found["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def allocatable_gpus(layout: Layout, node: str) -> int:
    """Return how many GPUs the node offers."""
    found = json.loads(kubectl(layout, "get", "node", node, "-ojson"))
    return int(found["status"].get("allocatable", {}).get("nvidia.com/gpu", "0"))


def _holds(holds: Callable[[], bool]) -> bool:
    """Errors count as no: the API server may just be starting, or the object not be there yet."""
    try:
        return holds()
    except ClusterError:
        return False
