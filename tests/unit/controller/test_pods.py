# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Pods as the API server sends them, read into small records, and the directory that keeps them."""

import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.unit.controller.builders import GIB, GPUS, owner_of, pod
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.pods import PodStore, decode
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState, PodRecord

HUGE = "x" * 300_000
BODY: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "namespace": "train",
        "name": "grpo-worker-0",
        "uid": "uid-1",
        "resourceVersion": "42",
        "creationTimestamp": "1970-01-01T00:01:00Z",
        "labels": {"ray.io/cluster": "grpo-c", "ray.io/group": "gpu", "ray.io/node-type": "worker", "app": "verl"},
        "annotations": {"gpumonitor.dev/injected": "0.1.0", "other": "x"},
        "managedFields": [{"manager": "x", "fieldsV1": {"f:metadata": {}}}],
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": "no", "uid": "no"},
            {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "grpo-c", "uid": "uid-c", "controller": True},
        ],
    },
    "spec": {
        "nodeName": "node-1",
        "initContainers": [
            {"name": "wait-gcs-ready", "image": "user/verl:1"},
            {"name": "gpumonitor", "image": "gpumonitor/sidecar:1", "restartPolicy": "Always"},
        ],
        "containers": [
            {
                "name": "ray-worker",
                "image": "user/verl:1",
                "resources": {"limits": {"nvidia.com/gpu": "4", "cpu": "8"}, "requests": {"nvidia.com/gpu": 4}},
            },
            {"name": "log", "image": "fluent:1"},
        ],
    },
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "hostIP": "192.168.0.1",
        "initContainerStatuses": [
            {
                "name": "gpumonitor",
                "restartCount": 2,
                "imageID": "gpumonitor/sidecar@sha256:1",
                "state": {"running": {"startedAt": "1970-01-01T00:02:00Z"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            }
        ],
        "containerStatuses": [
            {"name": "log", "state": {"waiting": {"reason": "ContainerCreating"}}},
            {"name": "ray-worker", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "died"}}},
        ],
    },
}


def read(body: dict[str, Any]) -> PodRecord:
    return decode(msgspec.json.encode(body), GPUS).item


def test_a_pod_is_read_in_whole() -> None:
    found = decode(msgspec.json.encode(BODY), GPUS)
    assert (found.uid, found.resource_version) == ("uid-1", "42")
    record = found.item
    assert record.owner is not None
    assert (record.owner.kind, record.owner.uid) == ("RayCluster", "uid-c")
    assert record.labels == {"ray.io/cluster": "grpo-c", "ray.io/group": "gpu", "ray.io/node-type": "worker"}
    assert (record.gpus_requested, record.gpu_containers, record.memory_limit_bytes) == (4, ("ray-worker",), None)
    assert record.created_at == 60.0
    assert (record.injected, record.skip_reason, record.deleting, record.live) == ("0.1.0", None, False, True)
    assert (record.images, record.sidecar_image) == (("user/verl:1", "fluent:1"), "gpumonitor/sidecar:1")
    assert record.sidecar == ContainerState(
        phase=ContainerPhase.RUNNING,
        started_at=120.0,
        restart_count=2,
        image_id="gpumonitor/sidecar@sha256:1",
        last_reason="OOMKilled",
        last_exit_code=137,
    )
    assert record.main == ContainerState(phase=ContainerPhase.TERMINATED, reason="Error", message="died", exit_code=1)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param(["64Gi"], 64 * GIB, id="one container"),
        pytest.param(["64Gi", "32Gi"], 96 * GIB, id="two"),
        pytest.param(["64Gi", None], None, id="one of two has none"),
        pytest.param([68719476736], 64 * GIB, id="a number"),
        pytest.param(["much"], None, id="no quantity"),
        pytest.param(["99999999E"], None, id="more than any host has"),
        pytest.param([], None, id="no container with GPUs"),
    ],
)
def test_the_memory_limit_is_that_of_the_containers_with_gpus(
    limits: list[str | int | None], expected: int | None
) -> None:
    body = copy.deepcopy(BODY)
    with_gpus = [
        {"name": f"c{number}", "resources": {"limits": {"nvidia.com/gpu": 1, **({"memory": limit} if limit else {})}}}
        for number, limit in enumerate(limits)
    ]
    sidecar = {"name": "istio", "resources": {"limits": {"memory": "1Gi"}}}
    body["spec"]["containers"] = [sidecar, *with_gpus]
    record = read(body)
    assert record.memory_limit_bytes == expected
    assert record.gpu_containers == tuple(one["name"] for one in with_gpus)


def test_a_pod_that_is_merely_accepted_is_read() -> None:
    record = read({"metadata": {"namespace": "train", "name": "p", "uid": "u"}, "spec": {"containers": []}})
    assert (record.phase, record.gpus_requested, record.sidecar, record.main) == ("Unknown", 0, None, None)
    assert record.live


def test_an_annotation_without_a_sidecar_injects_nothing() -> None:
    """Somebody copies annotations from pod to template; the container tells the truth."""
    body = {**BODY, "spec": {**BODY["spec"], "initContainers": []}}
    assert read(body).injected is None


def test_a_skip_reason_is_kept() -> None:
    metadata = {**BODY["metadata"], "annotations": {"gpumonitor.dev/skip-reason": "OptedOut: By label."}}
    assert read({**BODY, "metadata": metadata}).skip_reason == "OptedOut: By label."


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"metadata": 1}', b"x", b""])
def test_what_is_no_pod_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(body, GPUS)


class Told:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gone: list[str] = []

    def pod_seen(self, pod: PodRecord) -> None:
        self.seen.append(pod.uid)

    def pod_gone(self, pod: PodRecord) -> None:
        self.gone.append(pod.uid)


def test_the_directory_finds_by_uid_and_tells_changes_alone() -> None:
    store, told = PodStore(lambda: True), Told()
    store.watch(told)
    record = pod("w-0", owner_of(JobKind.RAY_CLUSTER, "c"))
    store.seen(record)
    store.seen(replace(record))
    assert told.seen == ["uid-w-0"]
    assert store.find("train", "w-0", "uid-w-0") == record
    assert store.find("train", "w-0", "another") is None
    assert store.find("other", "w-0", "uid-w-0") is None


def test_another_pod_of_the_same_name_ends_the_one_before() -> None:
    store, told = PodStore(lambda: True), Told()
    store.watch(told)
    store.seen(pod("m", None))
    store.seen(pod("m", None, uid="uid-2"))
    assert told.gone == ["uid-m"]
    store.gone(pod("m", None))
    assert told.gone == ["uid-m"], "a late word of the first pod's end does not end the second"
    assert len(store) == 1


def test_who_comes_later_is_told_what_is_there() -> None:
    store, told = PodStore(lambda: True), Told()
    store.seen(pod("m", None))
    store.watch(told)
    assert told.seen == ["uid-m"]


def test_what_a_pod_says_as_it_likes_takes_little_memory() -> None:
    """An annotation has up to 256 KiB, an image or an owner's name as much as the object may be large."""
    body = copy.deepcopy(BODY)
    body["metadata"]["annotations"] = {"gpumonitor.dev/injected": HUGE, "gpumonitor.dev/skip-reason": HUGE}
    body["metadata"]["ownerReferences"][1]["apiVersion"] = HUGE
    body["spec"]["initContainers"][1]["image"] = HUGE
    body["spec"]["containers"] += [{"name": f"c{number}", "image": HUGE} for number in range(1000)]
    waiting = {"waiting": {"reason": HUGE, "message": HUGE}}
    body["status"]["initContainerStatuses"][0] |= {"imageID": HUGE, "state": waiting}
    body["status"]["initContainerStatuses"][0]["lastState"]["terminated"]["reason"] = HUGE
    record = decode(msgspec.json.encode(body), GPUS).item
    assert len(msgspec.json.encode(record)) < 10_000
    assert record.images == ("user/verl:1", "fluent:1")


@pytest.mark.parametrize("key", ["kind", "name", "uid"])
def test_an_owner_that_cannot_be_is_none(key: str) -> None:
    body = copy.deepcopy(BODY)
    body["metadata"]["ownerReferences"][1][key] = HUGE
    assert decode(msgspec.json.encode(body), GPUS).item.owner is None


def test_an_observer_that_fails_keeps_no_pod_from_the_others() -> None:
    class Failing:
        def pod_seen(self, pod: PodRecord) -> None:
            raise KeyError(pod.uid)

        def pod_gone(self, pod: PodRecord) -> None:
            raise KeyError(pod.uid)

    store, heard = PodStore(lambda: True), Told()
    store.seen(pod("early", None))
    for observer in (Failing(), heard):
        store.watch(observer)
    store.seen(pod("late", None))
    store.gone(pod("early", None))
    assert (heard.seen, heard.gone) == (["uid-early", "uid-late"], ["uid-early"])


@pytest.mark.parametrize(("policy", "native"), [("Always", True), (None, False), ("OnFailure", False)])
def test_a_sidecar_without_its_restart_policy_is_none(policy: str | None, native: bool) -> None:
    body = copy.deepcopy(BODY)
    body["spec"]["initContainers"][1]["restartPolicy"] = policy
    assert decode(msgspec.json.encode(body), GPUS).item.native is native
