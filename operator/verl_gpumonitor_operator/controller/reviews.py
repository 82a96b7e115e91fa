# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Questions to the API server about rights: whose a token is, and what this process may do."""

from collections.abc import Mapping
from typing import Any

import msgspec

from verl_gpumonitor_operator.kube.client import KubeClient


class _Reviewed(msgspec.Struct, frozen=True):
    status: dict[str, Any] = {}


class Reviews:
    """A `TokenReviewer`, and the permission question for kinds."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def review_token(self, token: str, audience: str) -> Mapping[str, object]:
        """Return `status` of a TokenReview. Raises KubeError."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        return await self._status("/apis/authentication.k8s.io/v1/tokenreviews", body)

    async def may(self, verb: str, *, group: str, resource: str) -> bool:
        """Whether this process may do that in all namespaces. Raises KubeError."""
        attributes = {"verb": verb, "group": group, "resource": resource}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        status = await self._status("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        return status.get("allowed") is True

    async def _status(self, path: str, body: Mapping[str, Any]) -> Mapping[str, object]:
        return msgspec.json.decode(await self._client.post(path, body), type=_Reviewed).status
