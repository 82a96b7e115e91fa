# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the cluster of a Ray head has GPUs: asked of the API server, and remembered for a while."""

from typing import Any, cast

import msgspec
import pytest

from verl_gpumonitor_operator.admission import preflight as module
from verl_gpumonitor_operator.admission.kubeapi import ApiError, KubeApi
from verl_gpumonitor_operator.admission.preflight import RAY_CACHE_SECONDS, Preflight

from . import samples


class Clusters:
    """An API server that knows RayClusters by their path."""

    def __init__(self) -> None:
        self.gpus: dict[str, int] = {}
        self.asked = 0

    async def get(self, path: str, kind: type[Any]) -> Any:
        self.asked += 1
        if path not in self.gpus:
            raise ApiError(path, status=404)
        limits = {"nvidia.com/gpu": self.gpus[path]} if self.gpus[path] else {}
        template = {"spec": {"containers": [{"resources": {"limits": limits}}]}}
        return msgspec.convert({"spec": {"workerGroupSpecs": [{"template": template}]}}, kind)


class Rig:
    def __init__(self) -> None:
        self.api, self.now = Clusters(), 0.0
        self.preflight = Preflight(
            cast(KubeApi, self.api), samples.SETTINGS, on_certificates=lambda _: True, monotonic=lambda: self.now
        )

    def cluster(self, gpus: int) -> None:
        self.api.gpus["/apis/ray.io/v1/namespaces/team-a/rayclusters/grpo-8b-x7k2p"] = gpus

    async def answer(self) -> bool | None:
        return await self.preflight._ray_cluster_has_gpus(samples.ray_head(), "team-a")


async def test_a_cluster_with_gpus_is_remembered_for_a_while() -> None:
    rig = Rig()
    rig.cluster(4)
    assert [await rig.answer(), await rig.answer()] == [True, True]
    assert rig.api.asked == 1
    rig.now += RAY_CACHE_SECONDS
    rig.cluster(0)
    assert await rig.answer() is False


async def test_a_cluster_that_follows_one_of_its_name_without_gpus_is_asked_for() -> None:
    rig = Rig()
    assert await rig.answer() is None, "it cannot be read yet"
    rig.cluster(0)
    assert await rig.answer() is False
    rig.cluster(8)
    assert await rig.answer() is True


async def test_memory_of_clusters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RAY_CACHE_SIZE", 3)
    rig = Rig()
    for number in range(10):
        head = samples.ray_head()
        head["metadata"]["labels"]["ray.io/cluster"] = f"c{number}"
        rig.api.gpus[f"/apis/ray.io/v1/namespaces/team-a/rayclusters/c{number}"] = 1
        assert await rig.preflight._ray_cluster_has_gpus(head, "team-a") is True
    assert len(rig.preflight._with_gpus) == 3
