# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is written for the cluster: configurations, CDI specifications, keys, versions."""

import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import addons, build, containerd, gpus, images, kube, network, node, versions
from devcluster.command import write_aside
from devcluster.errors import ClusterError
from devcluster.layout import Layout, default_layout
from devcluster.progress import Progress, about, clock

LAYOUT = default_layout()


def with_package(tmp_path: Path) -> Layout:
    """Return a layout whose package has one tool of two files."""
    folder = tmp_path / "devcluster" / "tools" / "helm"
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module x\n")
    (folder / "go.sum").write_text("")
    return Layout(repository=tmp_path, cache=tmp_path / "cache")


def test_a_tools_key_follows_its_pinned_modules(tmp_path: Path) -> None:
    layout = with_package(tmp_path)
    before = build.key(build.HELM, package=layout.package)
    assert build.key(build.HELM, package=layout.package) == before
    (layout.package / "tools" / "helm" / "go.sum").write_text("something else\n")
    assert build.key(build.HELM, package=layout.package) != before


@pytest.mark.parametrize(
    ("tool", "requirement"),
    [
        (build.KUBERNETES, f"k8s.io/kubernetes v{versions.KUBERNETES}"),
        (build.ETCD, f"go.etcd.io/etcd/server/v3 v{versions.ETCD}"),
        (build.HELM, f"helm.sh/helm/v4 v{versions.HELM}"),
        (build.KUBERAY, f"github.com/ray-project/kuberay/ray-operator v{versions.KUBERAY}"),
        (build.TRAINING_OPERATOR, f"github.com/kubeflow/training-operator v{versions.TRAINING_OPERATOR}"),
        (build.METRICS_SERVER, f"sigs.k8s.io/metrics-server v{versions.METRICS_SERVER}"),
    ],
    ids=lambda value: value.name if isinstance(value, build.Tool) else "",
)
def test_pinned_versions_are_those_of_the_modules(tool: build.Tool, requirement: str) -> None:
    assert requirement in (LAYOUT.package / tool.folder / "go.mod").read_text()


@pytest.mark.parametrize("tool", build.ALL, ids=lambda tool: tool.name)
def test_each_module_is_pinned_by_checksums_and_replaces_nothing(tool: build.Tool) -> None:
    folder = LAYOUT.package / tool.folder
    assert (folder / "go.sum").stat().st_size > 0
    assert not re.search(r"^replace\b", (folder / "go.mod").read_text(), re.MULTILINE)


def test_ray_is_the_pinned_one() -> None:
    assert f"\nray=={versions.RAY} " in (LAYOUT.package / "requirements" / "ray.txt").read_text()


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26)),
        ("go version go1.27rc1 linux/amd64", (1, 27)),
        ("go: not here", (0, 0)),
    ],
)
def test_go_version(said: str, version: tuple[int, int]) -> None:
    assert build.go_version(said) == version


@pytest.mark.parametrize("restrict", [True, False])
def test_containerd_is_told_whether_it_may_lower_oom_scores(restrict: bool) -> None:
    document = tomllib.loads(containerd.configuration(LAYOUT, restrict_oom_score=restrict))
    cri = document["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is restrict
    assert set(cri["containerd"]["runtimes"]) == {"runc", *containerd.GPU_HANDLERS}
    assert cri["containerd"]["default_runtime_name"] == "runc"


def test_the_kubelet_never_removes_images() -> None:
    configuration = node.kubelet_configuration(LAYOUT)
    assert configuration["imageGCHighThresholdPercent"] == 100
    assert configuration["imageMaximumGCAge"] == "0s"
    assert configuration["evictionHard"] == {"memory.available": "100Mi"}, "no threshold for the disk"


def test_uuids_are_those_that_the_simulated_library_has() -> None:
    assert gpus.uuid(0) == "GPU-00000000-5eed-4a00-8000-000000000000"
    assert gpus.uuid(7) == "GPU-00000007-5eed-4a00-8000-000000000007"


@pytest.mark.parametrize("with_all", [True, False])
def test_cdi_names_each_gpu_twice_and_all_of_them_where_wanted(with_all: bool) -> None:
    document: dict[str, Any] = gpus.cdi_spec(LAYOUT, with_all=with_all)
    names = [device["name"] for device in document["devices"]]
    numbers = [str(index) for index in range(8)]
    assert sorted(names) == sorted([*numbers, *map(gpus.uuid, range(8)), *(["all"] if with_all else [])])
    by_name = {device["name"]: device["containerEdits"]["env"] for device in document["devices"]}
    assert by_name["3"] == by_name[gpus.uuid(3)] == ["FAKENVML_GPU_3=1"]
    assert yaml.safe_load(yaml.safe_dump(document)) == document


def test_runtime_configuration_that_refuses_the_environment() -> None:
    text = gpus.runtime_configuration(specs=Path("/specs"), envvar=False, volume_mounts=True, runc="/usr/sbin/runc")
    document = tomllib.loads(text)
    assert document["accept-nvidia-visible-devices-envvar-when-unprivileged"] is False
    assert document["accept-nvidia-visible-devices-as-volume-mounts"] is True
    assert document["nvidia-container-runtime"]["modes"]["cdi"]["spec-dirs"] == ["/specs"]


def test_cni_configuration_is_one_bridge_with_host_ports() -> None:
    document = json.loads(network.cni_configuration(LAYOUT))
    assert [plugin["type"] for plugin in document["plugins"]] == ["bridge", "portmap"]


TARGETS = """http://example.org/debian bookworm-updates main
http://example.org/other bookworm contrib
http://example.org/debian bookworm main
http://example.org/debian-security bookworm-security main
"""


def test_mirror_is_the_one_apt_has_for_the_distribution() -> None:
    assert images.mirror(TARGETS, "bookworm") == "http://example.org/debian"
    with pytest.raises(ClusterError, match="trixie"):
        images.mirror(TARGETS, "trixie")


def deployment(*, generation: int = 2, observed: int = 2, updated: int = 1, available: int = 1) -> dict[str, Any]:
    """Return a Deployment of one replica."""
    status = {"observedGeneration": observed, "replicas": 1, "updatedReplicas": updated, "availableReplicas": available}
    return {"metadata": {"generation": generation}, "spec": {"replicas": 1}, "status": status}


@pytest.mark.parametrize(
    ("given", "available"),
    [
        pytest.param(deployment(), True, id="all pods new and ready"),
        pytest.param(deployment(observed=1), False, id="the change was not seen yet"),
        pytest.param(deployment(updated=0), False, id="the pod is still of the old version"),
        pytest.param(deployment(available=0), False, id="the pod is not ready"),
        pytest.param({"metadata": {"generation": 1}, "spec": {}}, False, id="nothing happened yet"),
    ],
)
def test_deployment_available(given: dict[str, Any], available: bool) -> None:
    assert kube.deployment_available(given) is available


def test_manifests_take_their_values() -> None:
    objects = kube.manifest(LAYOUT, "coredns.yaml", image="an/image:1", service_ip="10.97.0.10")
    kinds = [document["kind"] for document in objects]
    assert kinds.count("Deployment") == 1
    assert "an/image:1" in json.dumps(objects)


def test_the_training_operator_gets_our_images() -> None:
    container = {
        "image": "elsewhere/training-operator",
        "command": ["/manager"],
        "readinessProbe": {"periodSeconds": 15},
    }
    given = {"kind": "Deployment", "spec": {"template": {"spec": {"containers": [container]}}}}
    adapted = addons.adapted_training(given)["spec"]["template"]["spec"]["containers"][0]
    assert adapted["image"] == images.TRAINING_OPERATOR.reference
    assert f"--pytorch-init-container-image={images.BASE.reference}" in adapted["args"]


def test_the_training_operators_ca_is_its_own_affair() -> None:
    webhook = {"name": "validator", "clientConfig": {"caBundle": "Cg==", "service": {"name": "training-operator"}}}
    adapted = addons.adapted_training({"kind": "ValidatingWebhookConfiguration", "webhooks": [webhook]})
    assert adapted["webhooks"][0]["clientConfig"] == {"service": {"name": "training-operator"}}


def test_namespaces_are_made_first() -> None:
    objects = [{"kind": "Service"}, {"kind": "Namespace"}, {"kind": "Deployment"}]
    assert [document["kind"] for document in addons.namespaces_first(objects)] == ["Namespace", "Service", "Deployment"]


def test_a_file_is_written_whole_and_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert write_aside(path, "one", mode=0o600)
    assert not write_aside(path, "one", mode=0o600)
    assert write_aside(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (130, "2:10"), (3600, "60:00")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(8, "a few seconds"), (45, "about 40 s"), (360, "about 6 min")])
def test_about(seconds: float, shown: str) -> None:
    assert about(seconds) == shown


def test_progress_tells_number_estimate_and_outcome() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream)
    with progress.part("first", 360) as part:
        part.note = "built before"
    with pytest.raises(ValueError, match="no"), progress.part("second"):
        raise ValueError("no")
    assert stream.getvalue().splitlines() == [
        "[1/2] first … about 6 min",
        "[1/2] first … built before (0:00)",
        "[2/2] second … failed (0:00)",
    ]
