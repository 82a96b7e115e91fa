# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The one change that we ever make to a user's pod: another image for the injected container."""

from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import ConflictError

from .ports import PodRecord


class PodImages:
    """A `PodImagePatcher`. The API server's admission policy holds it to just this."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def patch_sidecar_image(self, pod: PodRecord, image: str) -> None:
        """Give init container `gpumonitor` of this very pod another image. Raises KubeError.

        A strategic merge patch finds the container by its name; the uid makes it a conflict (ConflictError) where
        another pod has taken the name meanwhile.
        """
        if not pod.uid:
            raise ConflictError("the pod's uid is not known")
        path = object_path("v1", "pods", namespace=pod.namespace, name=pod.name)
        body = {
            "metadata": {"uid": pod.uid},
            "spec": {"initContainers": [{"name": wiring.CONTAINER_NAME, "image": image}]},
        }
        await self._client.strategic_patch(path, body)
