# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Our own small objects in our own namespace: ConfigMaps with texts, and the Secrets of the certificates.

They carry an ownerReference to the controller's Deployment, so that uninstalling takes them along.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import ConflictError, ForbiddenError, NotFoundError

MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "gpumonitor"}
STATE_KEY: Final = "state"


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class _Object(msgspec.Struct, frozen=True):
    metadata: _Meta = _Meta()
    data: dict[str, str] | None = None


_decoder = msgspec.json.Decoder(_Object)


class Deployment:
    """Our own Deployment, which owns what is made at run time."""

    def __init__(self, client: KubeClient, *, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._uid: str | None = None

    async def metadata(self, name: str) -> dict[str, Any]:
        """Return the metadata of an object that we create. Without owner where no such Deployment runs (tests)."""
        metadata: dict[str, Any] = {"name": name, "namespace": self._namespace, "labels": dict(MANAGED_BY)}
        self._uid = self._uid or await self._find()
        if self._uid is None:
            return metadata
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": self._name, "uid": self._uid}
        return {**metadata, "ownerReferences": [owner]}

    async def _find(self) -> str | None:
        path = object_path("apps/v1", "deployments", namespace=self._namespace, name=self._name)
        try:
            return _decoder.decode(await self._client.get(path)).metadata.uid or None
        except (NotFoundError, ForbiddenError):
            return None


class ConfigMapEntries:
    """Many small texts in one ConfigMap, of which some are written at a time."""

    def __init__(self, client: KubeClient, owner: Deployment, *, namespace: str, name: str) -> None:
        self._client = client
        self._owner = owner
        self._name = name
        self._list = object_path("v1", "configmaps", namespace=namespace)
        self._path = object_path("v1", "configmaps", namespace=namespace, name=name)

    async def load(self) -> dict[str, str]:
        """Return all texts; none if the object does not exist. Raises KubeError."""
        try:
            found = _decoder.decode(await self._client.get(self._path))
        except NotFoundError:
            return {}
        return found.data or {}

    async def save(self, changes: Mapping[str, str | None]) -> bool:
        """Write some texts, None to remove one. True: the object had to be made, so it holds these alone.

        Raises KubeError.
        """
        try:
            await self._client.merge_patch(self._path, {"data": dict(changes)})
        except NotFoundError:
            metadata = await self._owner.metadata(self._name)
            data = {key: text for key, text in changes.items() if text is not None}
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            try:
                await self._client.post(self._list, body)
            except ConflictError:
                await self._client.merge_patch(self._path, {"data": dict(changes)})
            return True
        return False


class ConfigMapDocument:
    """One document in a ConfigMap. A `StateStore`."""

    def __init__(self, client: KubeClient, owner: Deployment, *, namespace: str, name: str) -> None:
        self._entries = ConfigMapEntries(client, owner, namespace=namespace, name=name)

    async def load(self) -> str | None:
        """Return the document; None if there is none yet. Raises KubeError."""
        return (await self._entries.load()).get(STATE_KEY)

    async def save(self, document: str) -> None:
        """Write it, creating the object where needed. Raises KubeError."""
        await self._entries.save({STATE_KEY: document})


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretData:
    """A Secret as it was read."""

    resource_version: str
    data: Mapping[str, bytes]


class SecretDocument:
    """One Secret, written with optimistic locking."""

    def __init__(self, client: KubeClient, owner: Deployment, *, namespace: str, name: str) -> None:
        self._client = client
        self._owner = owner
        self._namespace = namespace
        self._name = name
        self._list = object_path("v1", "secrets", namespace=namespace)
        self._path = object_path("v1", "secrets", namespace=namespace, name=name)

    async def load(self) -> SecretData | None:
        """Return its data; None if it does not exist. A value that is no base64 is left out. Raises KubeError."""
        try:
            found = _decoder.decode(await self._client.get(self._path))
        except NotFoundError:
            return None
        data = {key: decoded for key, value in (found.data or {}).items() if (decoded := _decoded(value)) is not None}
        return SecretData(resource_version=found.metadata.resource_version, data=data)

    async def save(self, data: Mapping[str, bytes], *, resource_version: str | None) -> None:
        """Replace all data. `resource_version`: what was read, None to create. Raises ConflictError if it changed."""
        metadata = await self._owner.metadata(self._name)
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": encoded}
        if resource_version is None:
            await self._client.post(self._list, body)
        else:
            metadata["resourceVersion"] = resource_version
            await self._client.put(self._path, body)


def _decoded(value: str) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        return None
