# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is installed into the running cluster: its name service, KubeRay, the training-operator, metrics-server."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster import build, images, kube
from devcluster.command import write_aside
from devcluster.errors import ClusterError
from devcluster.layout import DNS_SERVICE_IP, MARK_NAME, MARK_NAMESPACE, Layout

Documents = list[dict[str, Any]]
_INIT_CONTAINER_FILE = "/etc/training-operator/init-container.yaml"


@dataclass(frozen=True, kw_only=True)
class Addon:
    """Something that can be applied and deleted as a whole.

    `definitions`: its CRDs, which go first and come away last. `deployment`: namespace and name of what must be
    available in the end.
    """

    name: str
    tool: build.Tool
    image: images.Recipe
    definitions: Callable[[Layout], Documents]
    objects: Callable[[Layout], Documents]
    deployment: tuple[str, str]
    extra_images: tuple[images.Recipe, ...] = ()


def _coredns(layout: Layout) -> Documents:
    return kube.manifest(layout, "coredns.yaml", image=images.COREDNS.reference, service_ip=DNS_SERVICE_IP)


def _kuberay(layout: Layout) -> Documents:
    return kube.manifest(layout, "kuberay.yaml", image=images.KUBERAY.reference)


def _kuberay_definitions(layout: Layout) -> Documents:
    folder = build.folder(layout, build.KUBERAY)
    return _kept(folder / "definitions.json", lambda: _read_all(folder / "crds"))


def _training_rendered(layout: Layout) -> Documents:
    folder = build.folder(layout, build.TRAINING_OPERATOR)
    overlay = folder / "manifests" / "overlays" / "standalone"
    return _kept(folder / "rendered.json", lambda: kube.documents(kube.kubectl(layout, "kustomize", overlay)))


def _training_definitions(layout: Layout) -> Documents:
    return [document for document in _training_rendered(layout) if document["kind"] == "CustomResourceDefinition"]


def _training_objects(layout: Layout) -> Documents:
    rendered = _training_rendered(layout)
    return [adapted_training(document) for document in rendered if document["kind"] != "CustomResourceDefinition"]


def adapted_training(document: dict[str, Any]) -> dict[str, Any]:
    """Return an object of the training-operator's own manifests with our images in it, and what follows from them.

    The CA of its webhook is left out: the operator writes it itself, and applying ours again would take it away.
    """
    for webhook in document.get("webhooks", []):
        webhook["clientConfig"].pop("caBundle", None)
    if document["kind"] != "Deployment":
        return document
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["image"] = images.TRAINING_OPERATOR.reference
    container["command"] = ["/training-operator"]
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 2}  # theirs is seen after 25 s
    container["args"] = [
        f"--pytorch-init-container-image={images.BASE.reference}",
        f"--pytorch-init-container-template-file={_INIT_CONTAINER_FILE}",
    ]
    return document


def _metrics_server(layout: Layout) -> Documents:
    return kube.manifest(layout, "metrics-server.yaml", image=images.METRICS_SERVER.reference)


def _no_documents(_: Layout) -> Documents:
    return []


COREDNS = Addon(
    name="coredns",
    tool=build.COREDNS,
    image=images.COREDNS,
    definitions=_no_documents,
    objects=_coredns,
    deployment=("kube-system", "coredns"),
)
KUBERAY = Addon(
    name="kuberay",
    tool=build.KUBERAY,
    image=images.KUBERAY,
    definitions=_kuberay_definitions,
    objects=_kuberay,
    deployment=("kuberay-system", "kuberay-operator"),
    extra_images=(images.RAY_BASE, images.RAY),
)
TRAINING_OPERATOR = Addon(
    name="training-operator",
    tool=build.TRAINING_OPERATOR,
    image=images.TRAINING_OPERATOR,
    definitions=_training_definitions,
    objects=_training_objects,
    deployment=("kubeflow", "training-operator"),
)
METRICS_SERVER = Addon(
    name="metrics-server",
    tool=build.METRICS_SERVER,
    image=images.METRICS_SERVER,
    definitions=_no_documents,
    objects=_metrics_server,
    deployment=("kube-system", "metrics-server"),
)
OPTIONAL = (KUBERAY, TRAINING_OPERATOR, METRICS_SERVER)
"""What `up --without` may leave out."""


def named(name: str) -> Addon:
    """Return an optional add-on. Raises ClusterError that lists the names."""
    for addon in OPTIONAL:
        if addon.name == name:
            return addon
    raise ClusterError(f"There is no add-on «{name}».", f"The add-ons: {', '.join(addon.name for addon in OPTIONAL)}")


def ensure(layout: Layout, addon: Addon) -> str:
    """Install an add-on unless the present version of it is there; return what was found or done."""
    if _applied_key(layout, addon) == key(layout, addon) and _is_there(layout, addon):
        kube.wait_available(layout, *addon.deployment)
        return "there already"
    apply(layout, addon)
    return "available"


def key(layout: Layout, addon: Addon) -> str:
    """Return a hash of all that decides what an add-on's objects are."""
    parts = [build.key(addon.tool, package=layout.package), images.key(layout, addon.image)]
    sources = [layout.package / "addons.py", *sorted((layout.package / "manifests").iterdir())]
    digest = hashlib.sha256("".join(parts).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def apply(layout: Layout, addon: Addon) -> None:
    """Install an add-on and wait until it is available. Its program must be built."""
    for image in (addon.image, *addon.extra_images):
        if image.kubernetes:
            images.ensure_loaded(layout, image)
    definitions = addon.definitions(layout)
    if definitions:
        kube.apply(layout, definitions)
        _wait_established(layout, definitions)
    kube.apply(layout, namespaces_first(addon.objects(layout)))
    kube.wait_available(layout, *addon.deployment)
    _note_applied(layout, addon, key(layout, addon))


def delete(layout: Layout, addon: Addon) -> None:
    """Remove an add-on with its CRDs, and so every object of its kinds.

    Its operator goes last: it must still take its finalizers off those objects.
    """
    _note_applied(layout, addon, "")
    kube.delete(layout, addon.definitions(layout))
    kube.delete(layout, addon.objects(layout))


def namespaces_first(documents: Iterable[dict[str, Any]]) -> Documents:
    """Return the objects in an order in which each can be made."""
    return sorted(documents, key=lambda document: document["kind"] != "Namespace")


def _is_there(layout: Layout, addon: Addon) -> bool:
    """Tell whether the deployment and all CRDs exist. Reading the CRDs' names is cheap, applying them is not."""
    namespace, deployment = addon.deployment
    try:
        kube.kubectl(layout, "get", "deployment", deployment, f"--namespace={namespace}", "-oname")
        found = kube.kubectl(layout, "get", "customresourcedefinitions", "-oname").split()
    except ClusterError:
        return False
    wanted = {definition["metadata"]["name"] for definition in addon.definitions(layout)}
    return wanted <= {name.partition("/")[2] for name in found}


def _applied_key(layout: Layout, addon: Addon) -> str:
    """Return the key under which an add-on was applied last; empty if it was not."""
    mark = ("get", "configmap", MARK_NAME, f"--namespace={MARK_NAMESPACE}", "-ojson")
    data: dict[str, str] = json.loads(kube.kubectl(layout, *mark)).get("data", {})
    return data.get(addon.name, "")


def _note_applied(layout: Layout, addon: Addon, applied: str) -> None:
    patch = json.dumps({"data": {addon.name: applied}})
    mark = ("patch", "configmap", MARK_NAME, f"--namespace={MARK_NAMESPACE}", "--type=merge", f"--patch={patch}")
    kube.kubectl(layout, *mark)


def _wait_established(layout: Layout, definitions: Documents) -> None:
    names = [f"customresourcedefinition/{definition['metadata']['name']}" for definition in definitions]
    kube.kubectl(layout, "wait", "--for=condition=Established", "--timeout=60s", *names)


def _kept(path: Path, make: Callable[[], Documents]) -> Documents:
    """Return objects from a file beside the programs they belong to, made once: megabytes of YAML take seconds."""
    if not path.exists():
        write_aside(path, json.dumps(make()))
    kept: Documents = json.loads(path.read_text())
    return kept


def _read_all(folder: Path) -> Documents:
    return [document for path in sorted(folder.glob("*.yaml")) for document in kube.documents(path.read_text())]
