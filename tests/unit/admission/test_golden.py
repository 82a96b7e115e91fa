# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A whole pod in, the exact patch out.

The files in `golden/` are rewritten with GPUMON_REWRITE_GOLDEN=1; then read the diff.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jsonpatch as independent_jsonpatch
import msgspec
import pytest

from verl_gpumonitor_operator.admission import sidecar
from verl_gpumonitor_operator.admission.facts import (
    Cluster,
    GpuLayout,
    LimitRangeItem,
    Namespace,
    Node,
    Quota,
    RuntimeClass,
    Scope,
    Version,
)
from verl_gpumonitor_operator.admission.mutation import Outcome, Patch, mutate
from verl_gpumonitor_operator.settings import InjectionMode, Settings, Visibility

from . import samples
from .qos_oracle import qos
from .samples import amounts, namespace

GOLDEN = Path(__file__).parent / "golden"
GIB = 2**30 * 10**9


class Case(NamedTuple):
    pod: samples.Pod
    namespace: Namespace = samples.NAMESPACE
    cluster: Cluster = samples.CLUSTER
    settings: Settings = samples.SETTINGS


ISTIO: samples.Pod = {
    "name": "istio-proxy",
    "image": "docker.io/istio/proxyv2:1.27",
    "restartPolicy": "Always",
    "ports": [{"name": "http-envoy-prom", "containerPort": 15090}],
    "resources": samples.resources(cpu="100m", memory="128Mi"),
}
GCSFUSE: samples.Pod = {
    "name": "gke-gcsfuse-sidecar",
    "image": "gke.gcr.io/gcs-fuse-csi-driver-sidecar-mounter:v1",
    "restartPolicy": "Always",
    "resources": samples.resources(cpu="250m", memory="256Mi"),
    "volumeMounts": [{"name": "gke-gcsfuse-tmp", "mountPath": "/gcsfuse-tmp"}],
}
SHARED_GPU = "nvidia.com/gpu.shared"
TOLERATION: samples.Pod = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
BY_CLASS = samples.injection(visibility=Visibility.RUNTIME_CLASS)
DEFAULTS = LimitRangeItem(
    type="Container",
    default=amounts(cpu="500m", memory="512Mi"),
    default_request=amounts(cpu="250m", memory="256Mi"),
)
HALF_REQUESTED: samples.Pod = {
    "limits": {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"},
    "requests": {"cpu": "1", "memory": "8Gi", "nvidia.com/gpu": "1"},
}


def burstable(pod: samples.Pod) -> samples.Pod:
    """The same pod with CPU requests alone."""
    pod = samples.best_effort(pod)
    pod["spec"]["containers"][0]["resources"].setdefault("requests", {})["cpu"] = "1"
    return pod


def limited(**kinds: dict[str, int]) -> Namespace:
    return namespace(limits=(LimitRangeItem(type="Container", **kinds),))


def pod_limited(**kinds: dict[str, int]) -> Namespace:
    return namespace(limits=(LimitRangeItem(type="Pod", **kinds),))


def quota(hard: dict[str, int], used: dict[str, int] | None = None, *scopes: Scope) -> Namespace:
    return namespace(quotas=(Quota(name="team", hard=hard, used=used or {}, scopes=scopes),))


def nodes(*capacities: dict[str, int], free: dict[str, int] | None = None) -> Cluster:
    return samples.cluster(
        nodes=tuple(Node(name=f"node-{i}", capacity=each, free=free) for i, each in enumerate(capacities))
    )


WORKER = samples.ray_worker()
BURSTABLE = burstable(samples.ray_worker())
BEST_EFFORT = samples.best_effort(samples.ray_worker())
HEAD = samples.ray_head()
MASTER = samples.pytorch_pod()

INJECTED = {
    "kuberay worker, guaranteed": Case(WORKER),
    "kuberay worker, burstable": Case(BURSTABLE),
    "kuberay worker, best effort": Case(BEST_EFFORT),
    "kuberay head without gpus in a gpu cluster": Case(HEAD, cluster=samples.cluster(ray_cluster_has_gpus=True)),
    "kuberay head whose cluster cannot be read": Case(HEAD),
    "kuberay head with gpus": Case(samples.ray_head(gpus=4)),
    "pytorchjob master": Case(MASTER),
    "pytorchjob worker": Case(samples.pytorch_pod(role="worker")),
    "pytorchjob whose operator is not named": Case(
        samples.with_labels_removed(MASTER, "training.kubeflow.org/operator-name")
    ),
    "annotations null": Case(samples.with_annotations(WORKER, None)),
    "no volumes": Case(samples.with_spec(MASTER, volumes=None)),
    "init containers empty": Case(samples.with_spec(MASTER, initContainers=[])),
    "istio and gcsfuse as native sidecars": Case(
        samples.with_container(samples.with_container(WORKER, ISTIO, init=True), GCSFUSE, init=True)
    ),
    "host network": Case(samples.with_spec(WORKER, hostNetwork=True)),
    "port 9410 is the job's own": Case(
        samples.with_container(BURSTABLE, {"name": "exporter", "ports": [{"containerPort": 9410}]})
    ),
    "shared process namespace": Case(samples.with_spec(MASTER, shareProcessNamespace=True)),
    "host processes": Case(samples.with_spec(MASTER, hostPID=True)),
    "process namespace shared by setting": Case(MASTER, settings=samples.injection(share_process_namespace=True)),
    "process namespace refused by the pod": Case(
        samples.with_spec(MASTER, shareProcessNamespace=False), settings=samples.injection(share_process_namespace=True)
    ),
    "process namespace never with host processes": Case(
        samples.with_spec(MASTER, hostPID=True), settings=samples.injection(share_process_namespace=True)
    ),
    "restricted pod security": Case(
        WORKER, namespace=namespace(labels={"pod-security.kubernetes.io/enforce": "restricted"})
    ),
    "openshift uid range": Case(
        WORKER, namespace=namespace(annotations={"openshift.io/sa.scc.uid-range": "1000680000/10000"})
    ),
    "openshift uid range and a pod that is root": Case(
        samples.with_spec(WORKER, securityContext={"runAsUser": 0}),
        namespace=namespace(annotations={"openshift.io/sa.scc.uid-range": "1000680000/10000"}),
    ),
    "pod-level resources decide the class": Case(
        samples.with_spec(BEST_EFFORT, resources=samples.resources(cpu="8", memory="64Gi"))
    ),
    "pod-level resources on an old api server beside burstable containers": Case(
        samples.with_spec(BURSTABLE, resources=samples.resources(cpu="8", memory="64Gi")),
        cluster=samples.cluster(api_version=Version(1, 33)),
    ),
    "limit range with defaults": Case(BURSTABLE, namespace=namespace(limits=(DEFAULTS,))),
    "limit range with defaults of disk": Case(
        WORKER, namespace=limited(default=amounts(disk="1Gi"), default_request=amounts(disk="1Gi"))
    ),
    "limit range minimum above zero": Case(BURSTABLE, namespace=limited(min=amounts(cpu="50m", memory="32Mi"))),
    "limit range maximum below the usual limit": Case(BURSTABLE, namespace=limited(max=amounts(cpu="100m"))),
    "limit range ratio": Case(BURSTABLE, namespace=limited(max_ratio={"memory": 2 * 10**9})),
    "limit range for pods with room": Case(WORKER, namespace=pod_limited(max=amounts(cpu="10", memory="65Gi"))),
    "limit range for pods, ratio": Case(
        samples.with_spec(MASTER, containers=[{"name": "pytorch", "resources": HALF_REQUESTED}]),
        namespace=pod_limited(max_ratio={"cpu": 2 * 10**9}),
    ),
    "limit range for claims only": Case(
        WORKER, namespace=namespace(limits=(LimitRangeItem(type="PersistentVolumeClaim", max=amounts(storage="1")),))
    ),
    "quota with room": Case(WORKER, namespace=quota(amounts(limits_cpu="1000", limits_memory="2Ti"))),
    "quota on other things": Case(WORKER, namespace=quota(amounts(pods="1", gpu="4"))),
    "quota on limits with room, burstable": Case(
        burstable(samples.with_spec(WORKER)), namespace=quota(amounts(limits_cpu="100", limits_memory="1Ti"))
    ),
    "quota of another scope": Case(WORKER, namespace=quota(amounts(limits_cpu="8"), None, Scope(name="BestEffort"))),
    "quota of another priority class": Case(
        WORKER,
        namespace=quota(amounts(limits_cpu="8"), None, Scope(name="PriorityClass", operator="In", values=("high",))),
    ),
    "opted in in opt-in mode by namespace": Case(
        WORKER,
        namespace=namespace(labels={"gpumonitor.dev/inject": "enabled"}),
        settings=samples.injection(mode=InjectionMode.OPT_IN),
    ),
    "pod opts in where its namespace opts out": Case(
        samples.with_labels(WORKER, {"gpumonitor.dev/inject": "enabled"}),
        namespace=namespace(labels={"gpumonitor.dev/inject": "disabled"}),
    ),
    "runtime class set": Case(
        WORKER,
        cluster=samples.cluster(runtime_class=RuntimeClass()),
        settings=samples.injection(visibility=Visibility.RUNTIME_CLASS),
    ),
    "runtime class of the pod is kept": Case(
        samples.with_spec(WORKER, runtimeClassName="kata"),
        cluster=samples.cluster(runtime_class=RuntimeClass()),
        settings=samples.injection(visibility=Visibility.RUNTIME_CLASS),
    ),
    "runtime class that asks for what the pod has": Case(
        samples.with_spec(WORKER, nodeSelector={"gpu": "yes"}, tolerations=[TOLERATION]),
        cluster=samples.cluster(runtime_class=RuntimeClass(node_selector={"gpu": "yes"}, tolerations=(TOLERATION,))),
        settings=BY_CLASS,
    ),
    "shared gpus by the name of the resource": Case(
        samples.with_spec(MASTER, containers=[{"name": "pytorch", "resources": {"limits": {SHARED_GPU: "1"}}}]),
        settings=samples.injection(gpu_resources=(r".*/gpu(\.shared)?",)),
    ),
    "gpus that a node may share": Case(
        WORKER, cluster=samples.cluster(gpu_layouts=frozenset([GpuLayout(advertised=16, physical=4)]))
    ),
    "runtime class does not exist": Case(WORKER, settings=samples.injection(visibility=Visibility.RUNTIME_CLASS)),
    "no controller known": Case(WORKER, cluster=samples.cluster(controller_address=None)),
    "controller with an ipv6 address": Case(WORKER, cluster=samples.cluster(controller_address="fd00::7")),
    "amd gpus": Case(
        samples.with_spec(MASTER, containers=[{"name": "pytorch", "resources": {"limits": {"amd.com/gpu": "2"}}}])
    ),
    "a skip reason of an earlier pass goes": Case(
        samples.with_annotations(WORKER, {"gpumonitor.dev/skip-reason": "WouldNotFit: too large"})
    ),
    "ray's metrics port moved": Case(
        samples.with_spec(
            MASTER | {"metadata": WORKER["metadata"]},
            containers=[
                {
                    **WORKER["spec"]["containers"][0],
                    "ports": [{"name": "metrics", "containerPort": 18080}],
                    "volumeMounts": [],
                }
            ],
        )
    ),
    "guaranteed pod on a node whose cpus end before its gpus": Case(
        samples.ray_worker(gpus=1, cpu="40", memory="64Gi"), cluster=nodes(amounts(cpu="80", memory="1000Gi", gpu="8"))
    ),
    "guaranteed head beside others": Case(
        samples.ray_head(cpu="2"),
        cluster=nodes(amounts(cpu="96", memory="1000Gi"), free=amounts(cpu="4", memory="8300Mi")),
    ),
    "guaranteed pod that waits for room": Case(
        samples.ray_worker(cpu="47", memory="64Gi"),
        cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"), free=amounts(cpu="1", memory="1Gi", gpu="0")),
    ),
    "guaranteed pod on a node whose pods were read": Case(
        samples.ray_worker(cpu="95", memory="64Gi"),
        cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"), free=amounts(cpu="95100m", memory="900Gi", gpu="8")),
    ),
    "guaranteed pod on a node with room": Case(
        samples.ray_worker(cpu="47", memory="400Gi"), cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"))
    ),
}

SKIPPED = {
    "kuberay submitter": Case(samples.ray_submitter()),
    "kuberay redis cleanup": Case(samples.redis_cleanup()),
    "mpijob worker": Case(samples.with_labels(MASTER, {"training.kubeflow.org/operator-name": "mpijob-controller"})),
    "kuberay head of a cpu cluster": Case(HEAD, cluster=samples.cluster(ray_cluster_has_gpus=False)),
    "kuberay worker without gpus": Case(samples.ray_worker(gpus=0)),
    "kube-system": Case(WORKER, namespace=Namespace(name="kube-system")),
    "our own namespace": Case(WORKER, namespace=Namespace(name="gpumonitor-system")),
    "excluded namespace": Case(WORKER, settings=samples.injection(excluded_namespaces=("team-a",))),
    "mirror of a static pod": Case(samples.with_annotations(WORKER, {"kubernetes.io/config.mirror": "abc"})),
    "windows": Case(samples.with_spec(WORKER, nodeSelector={"kubernetes.io/os": "windows"})),
    "no containers": Case(samples.with_spec(WORKER, containers=None)),
    "opted out by pod label": Case(samples.with_labels(WORKER, {"gpumonitor.dev/inject": "disabled"})),
    "opted out by pod annotation": Case(samples.with_annotations(WORKER, {"gpumonitor.dev/inject": "disabled"})),
    "opted out by namespace": Case(WORKER, namespace=namespace(labels={"gpumonitor.dev/inject": "disabled"})),
    "opted out wins over opted in": Case(
        samples.with_annotations(
            samples.with_labels(WORKER, {"gpumonitor.dev/inject": "enabled"}), {"gpumonitor.dev/inject": "disabled"}
        )
    ),
    "opt-in mode and nobody did": Case(WORKER, settings=samples.injection(mode=InjectionMode.OPT_IN)),
    "circuit breaker open": Case(WORKER, cluster=samples.cluster(paused="the sidecar's image cannot be pulled")),
    "api server too old": Case(WORKER, cluster=samples.cluster(api_version=Version(1, 28))),
    "oldest node too old": Case(WORKER, cluster=samples.cluster(oldest_kubelet=Version(1, 28))),
    "a node's version is unknown": Case(WORKER, cluster=samples.cluster(oldest_kubelet=None)),
    "container of our name": Case(samples.with_container(BURSTABLE, {"name": "gpumonitor", "image": "x"})),
    "volume of our name": Case(samples.with_spec(WORKER, volumes=[{"name": "gpumonitor-token", "emptyDir": {}}])),
    "port of our name": Case(
        samples.with_container(BURSTABLE, {"name": "a", "ports": [{"name": "gpumon-metrics", "containerPort": 1}]})
    ),
    "limit range minimum of disk that only its default would meet": Case(
        WORKER, namespace=limited(min=amounts(disk="1Gi"), default_request=amounts(disk="1Gi"))
    ),
    "limit range minimum above all we ask": Case(BURSTABLE, namespace=limited(min=amounts(memory="256Mi"))),
    "limit range maximum below all we ask": Case(WORKER, namespace=limited(max=amounts(memory="32Mi", cpu="96"))),
    "limit range defaults for a best effort pod": Case(BEST_EFFORT, namespace=namespace(limits=(DEFAULTS,))),
    "limit range defaults beside pod-level resources": Case(
        samples.with_spec(BEST_EFFORT, resources=samples.resources(cpu="8", memory="64Gi")),
        namespace=namespace(limits=(DEFAULTS,)),
    ),
    "pod-level resources on an old api server beside guaranteed containers": Case(
        samples.with_spec(WORKER, resources=samples.resources(cpu="8", memory="64Gi")),
        cluster=samples.cluster(api_version=Version(1, 33)),
    ),
    "limit range gives gpus": Case(BURSTABLE, namespace=limited(default=amounts(gpu="1"))),
    "limit range for pods without room": Case(WORKER, namespace=pod_limited(max=amounts(cpu="8"))),
    "quota without room for a hundred": Case(WORKER, namespace=quota(amounts(limits_cpu="12"))),
    "quota filled exactly by pods of this size": Case(WORKER, namespace=quota(amounts(requests_cpu="80"))),
    "quota on limits, burstable, no room": Case(BURSTABLE, namespace=quota(amounts(limits_cpu="4"))),
    "quota on limits, best effort": Case(BEST_EFFORT, namespace=quota(amounts(limits_memory="1Ti"))),
    "quota of our scope": Case(WORKER, namespace=quota(amounts(limits_cpu="8"), None, Scope(name="NotBestEffort"))),
    "guaranteed pod that fits a node exactly": Case(
        samples.ray_worker(cpu="96", memory="64Gi"), cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"))
    ),
    "two guaranteed halves of a node": Case(
        samples.ray_worker(cpu="48", memory="64Gi"), cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"))
    ),
    "guaranteed pod on a node whose static pods are not seen": Case(
        samples.ray_worker(cpu="95", memory="64Gi"), cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"))
    ),
    "guaranteed pod that leaves too little memory for what is not seen": Case(
        samples.ray_worker(cpu="64", memory="999Gi"), cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"))
    ),
    "two guaranteed halves that leave too little for what is not seen": Case(
        samples.ray_worker(cpu="47500m", memory="64Gi"), cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"))
    ),
    "guaranteed pod that fits exactly what is free": Case(
        samples.ray_worker(cpu="8", memory="64Gi"),
        cluster=nodes(amounts(cpu="96", memory="1000Gi", gpu="8"), free=amounts(cpu="8020m", memory="900Gi", gpu="8")),
    ),
    "guaranteed pod for nodes that are not there yet": Case(
        samples.ray_worker(), cluster=nodes(amounts(cpu="4", memory="8Gi"))
    ),
    "burstable pod bound to requests by a limit range, exact fit": Case(
        BURSTABLE,
        namespace=limited(min=amounts(cpu="50m")),
        cluster=nodes(amounts(cpu="1", memory="1000Gi", gpu="8")),
    ),
    "runtime class selects other nodes": Case(
        samples.with_spec(WORKER, nodeSelector={"gpu": "no"}),
        cluster=samples.cluster(runtime_class=RuntimeClass(node_selector={"gpu": "yes"})),
        settings=BY_CLASS,
    ),
    "runtime class adds a toleration": Case(
        WORKER, cluster=samples.cluster(runtime_class=RuntimeClass(tolerations=(TOLERATION,))), settings=BY_CLASS
    ),
    "runtime class adds an overhead": Case(
        WORKER, cluster=samples.cluster(runtime_class=RuntimeClass(overhead=amounts(cpu="250m"))), settings=BY_CLASS
    ),
    "pod too large": Case(samples.with_spec(WORKER, hostname="x" * 1_000_000)),
    "annotations too large": Case(samples.with_annotations(WORKER, {"a/b": "x" * (256 * 1024 - 3)})),
}


def outcome_of(case: Case) -> Outcome:
    return mutate(case.pod, namespace=case.namespace, policy=case.settings, cluster=case.cluster)


def written(case: Case, outcome: Outcome) -> dict[str, Any]:
    """What the golden file holds: the pod, unless it is huge, and what came of it."""
    operations = json.loads(msgspec.json.encode(outcome.operations).decode().replace(sidecar.VERSION, "<version>"))
    pod = case.pod if len(json.dumps(case.pod)) < 100_000 else "too large to be kept"
    if isinstance(outcome, Patch):
        return {"pod": pod, "outcome": "Patch", "operations": operations}
    return {"pod": pod, "outcome": "Skip", "reason": outcome.reason, "operations": operations}


@pytest.mark.parametrize("name", [*INJECTED, *SKIPPED])
def test_exact_outcome(name: str) -> None:
    case = {**INJECTED, **SKIPPED}[name]
    actual = written(case, outcome_of(case))
    file = GOLDEN / f"{name.replace(' ', '-').replace(',', '').replace(chr(39), '')}.json"
    if os.environ.get("GPUMON_REWRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(json.dumps(actual, indent=1, sort_keys=True) + "\n")
    assert actual == json.loads(file.read_text())
    assert actual["outcome"] == ("Patch" if name in INJECTED else "Skip")


def test_no_golden_file_is_left_over() -> None:
    assert len(list(GOLDEN.glob("*.json"))) == len(INJECTED) + len(SKIPPED)


@pytest.mark.parametrize("name", INJECTED)
def test_an_independent_patcher_comes_to_a_pod_of_the_same_class(name: str) -> None:
    case = INJECTED[name]
    outcome = outcome_of(case)
    operations = json.loads(msgspec.json.encode(outcome.operations))
    patched = independent_jsonpatch.apply_patch(case.pod, operations)
    assert qos(patched) == qos(case.pod)
    assert patched["spec"]["containers"] == case.pod["spec"]["containers"]
    assert patched["spec"]["initContainers"][-1]["name"] == "gpumonitor"


@pytest.mark.parametrize("name", INJECTED)
def test_a_second_pass_changes_nothing(name: str) -> None:
    case = INJECTED[name]
    operations = json.loads(msgspec.json.encode(outcome_of(case).operations))
    patched = independent_jsonpatch.apply_patch(case.pod, operations)
    assert not outcome_of(case._replace(pod=patched)).operations


@pytest.mark.parametrize("name", SKIPPED)
def test_a_second_pass_of_a_skipped_pod_says_the_same(name: str) -> None:
    case = SKIPPED[name]
    first = outcome_of(case)
    operations = json.loads(msgspec.json.encode(first.operations))
    patched = independent_jsonpatch.apply_patch(case.pod, operations)
    second = outcome_of(case._replace(pod=patched))
    assert independent_jsonpatch.apply_patch(patched, json.loads(msgspec.json.encode(second.operations))) == patched
