# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Pods that another policy refuses for their sidecar: what follows from repeated requests, and what does not."""

from collections.abc import Sequence

import pytest

from tests.unit.admission import samples
from verl_gpumonitor_operator.admission import refusals
from verl_gpumonitor_operator.admission.pods import Json
from verl_gpumonitor_operator.admission.refusals import PodKind, Refusals, There, kind_of

WORKERS = PodKind("team-a", "uid-1", (("ray.io/cluster", "grpo"), ("ray.io/group", "gpu-workers")))
BACKOFF = [0.005 * 2**number for number in range(13)]
"""Pauses of a controller between its tries, in seconds: 40 s in all."""


class Cluster:
    """An API server that refuses pods, the controller that asks for one, and the webhook's memory between them."""

    def __init__(self, *, takes_injected: bool = True, takes_bare: bool = True) -> None:
        self.takes_injected = takes_injected
        self.takes_bare = takes_bare
        self.now = 1000.0
        self.refusals = Refusals(clock=lambda: self.now)
        self.pods: list[bool] = []
        """Whether each has the sidecar."""
        self.looks = 0

    def there(self) -> There:
        self.looks += 1
        if any(self.pods):
            return There.INJECTED
        return There.BARE if self.pods else There.NONE

    def create(self, kind: PodKind = WORKERS) -> bool:
        """Ask for one pod; whether it was let in."""
        if self.refusals.ask(kind):
            self.refusals.look(kind, self.there())
        injected = not self.refusals.is_refused(kind)
        taken = self.takes_injected if injected else self.takes_bare
        if taken:
            self.pods.append(injected)
        return taken

    def until_created(self, pauses: Sequence[float] = BACKOFF) -> float | None:
        """Ask until a pod is let in; seconds that it took, None if it never was."""
        began = self.now
        for pause in pauses:
            if self.create():
                return self.now - began
            self.now += pause
        return None


def test_a_pod_that_is_refused_for_its_sidecar_starts_without_within_seconds() -> None:
    cluster = Cluster(takes_injected=False)
    took = cluster.until_created()
    assert took is not None
    assert took < 6.0
    assert cluster.pods == [False]


def test_the_next_pods_of_its_kind_start_at_once_for_an_hour() -> None:
    cluster = Cluster(takes_injected=False)
    cluster.until_created()
    for _ in range(20):
        cluster.now += 60.0
        assert cluster.create()
    looks = cluster.looks
    for _ in range(20):
        cluster.now += 60.0
        assert cluster.create()
    assert cluster.looks == looks
    cluster.takes_injected = True
    cluster.now += refusals.REST_SECONDS
    assert cluster.create()
    assert cluster.pods[-1] is True


def test_a_full_quota_is_no_refusal_of_the_sidecar() -> None:
    """Nothing is let in for a long time: few tries are without the sidecar, and once there is room it comes along."""
    cluster = Cluster(takes_injected=False, takes_bare=False)
    assert cluster.until_created() is None
    asked = []
    for _ in range(200):
        cluster.now += 16.0
        cluster.create()
        asked.append(cluster.refusals.is_refused(WORKERS))
    assert sum(asked) < 0.15 * len(asked)
    cluster.takes_injected = cluster.takes_bare = True
    cluster.now += refusals.FORGET_SECONDS
    assert cluster.create()
    assert cluster.pods == [True]


@pytest.mark.parametrize("pause", [0.0, 0.01, 1.0, 10.0, 100.0])
def test_many_pods_that_are_let_in_all_get_the_sidecar_at_the_cost_of_one_look(pause: float) -> None:
    cluster = Cluster()
    for _ in range(300):
        assert cluster.create()
        cluster.now += pause
    assert cluster.pods == [True] * 300
    assert cluster.looks <= 1 + 300 * pause / refusals.REST_SECONDS


def test_one_kind_says_nothing_of_another() -> None:
    cluster = Cluster(takes_injected=False)
    cluster.until_created()
    assert cluster.refusals.is_refused(WORKERS)
    for other in (
        WORKERS._replace(owner="uid-2"),
        WORKERS._replace(namespace="team-b"),
        WORKERS._replace(labels=(("ray.io/cluster", "grpo"), ("ray.io/node-type", "head"))),
    ):
        assert not cluster.refusals.is_refused(other)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MAX_KINDS", 10)
    held = Refusals(clock=lambda: 0.0)
    for number in range(1000):
        held.ask(WORKERS._replace(owner=str(number)))
        held.look(WORKERS._replace(owner=str(number)), There.NONE)
    assert [number for number in range(1000) if held.is_refused(WORKERS._replace(owner=str(number)))] == [
        *range(990, 1000)
    ]
    held.look(WORKERS, There.BARE)
    assert not held.is_refused(WORKERS)


def owned(pod: Json, *owners: Json) -> Json:
    return {**pod, "metadata": {**pod["metadata"], "ownerReferences": [*owners]}}


OWNER: Json = {"uid": "u-1", "kind": "RayCluster", "controller": True}


def test_the_kind_of_a_pod_is_its_owner_and_its_group() -> None:
    kind = kind_of(owned(samples.ray_worker(), {"uid": "other"}, OWNER), "team-a")
    assert kind is not None
    assert (kind.namespace, kind.owner) == ("team-a", "u-1")
    assert kind.selector == "ray.io/cluster=grpo-8b-x7k2p,ray.io/node-type=worker,ray.io/group=gpu-workers"


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(samples.ray_worker(), id="no owner"),
        pytest.param(owned(samples.ray_worker(), {"uid": "u-1"}), id="no controller among its owners"),
        pytest.param(owned(samples.ray_worker(), {"uid": 7, "controller": True}), id="a uid that is none"),
        pytest.param(owned({"metadata": {}}, OWNER), id="no labels of a job"),
        pytest.param({"metadata": {"ownerReferences": "x", "labels": 3}}, id="nonsense"),
        pytest.param({}, id="nothing"),
    ],
)
def test_pods_that_no_controller_asks_for_again_have_none(pod: Json) -> None:
    assert kind_of(pod, "team-a") is None
