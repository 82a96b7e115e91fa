# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""An API server for GPUMonitors and Events in memory: what the controller's writes would find on a real one."""

import copy
from collections.abc import Mapping
from typing import Any

import msgspec

from verl_gpumonitor_operator.kube.errors import ConflictError, KubeError, NotFoundError


class FakeApi:
    """Objects by their path. Has the methods of `KubeClient` that writers use."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes: list[tuple[str, str]] = []
        self.failures: list[KubeError] = []
        self.pruned: set[str] = set()
        """Status fields that this server's CRD does not know."""
        self._uids = 0

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._write("POST", path)
        key = f"{path}/{body['metadata']['name']}"
        if key in self.objects:
            raise ConflictError("exists", status=409)
        self._uids += 1
        made = copy.deepcopy(dict(body))
        made["metadata"] |= {
            "uid": f"made-{self._uids}",
            "generation": 1,
            "creationTimestamp": "1970-01-01T00:30:00Z",
        }
        self.objects[key] = made
        return msgspec.json.encode(made)

    async def get(self, path: str) -> bytes:
        if path not in self.objects:
            raise NotFoundError("gone", status=404)
        return msgspec.json.encode(self.objects[path])

    async def merge_patch(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._write("PATCH", path)
        key = path.removesuffix("/status")
        if key not in self.objects:
            raise NotFoundError("gone", status=404)
        self.objects[key] = _merged(self.objects[key], copy.deepcopy(dict(body)))
        for name in self.pruned:
            self.objects[key].get("status", {}).pop(name, None)
        return msgspec.json.encode(self.objects[key])

    async def delete(self, path: str, *, uid: str | None = None) -> bytes:
        self._write("DELETE", path)
        if path not in self.objects:
            raise NotFoundError("gone", status=404)
        if uid is not None and self.objects[path]["metadata"]["uid"] != uid:
            raise ConflictError("another uid", status=409)
        del self.objects[path]
        return b"{}"

    def _write(self, verb: str, path: str) -> None:
        self.writes.append((verb, path))
        if self.failures:
            raise self.failures.pop(0)

    def of(self, plural: str) -> dict[str, dict[str, Any]]:
        """Objects of a kind, by name."""
        return {key.rsplit("/", 1)[1]: value for key, value in self.objects.items() if key.rsplit("/", 2)[1] == plural}


def _merged(target: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, Mapping):
            inner = target.get(key)
            target[key] = _merged(inner if isinstance(inner, dict) else {}, value)
        else:
            target[key] = value
    return target
