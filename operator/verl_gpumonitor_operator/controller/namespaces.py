# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What namespaces say of injection, by their label. The webhook is not called for those that are opted out."""

from dataclasses import dataclass
from typing import Final

import msgspec

from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.reflector import Decoded, Reflector

ENABLED: Final = "enabled"
DISABLED: Final = "disabled"


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str
    resource_version: str = ""
    labels: dict[str, str] | None = None


class _Namespace(msgspec.Struct, frozen=True):
    metadata: _Meta


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceSeen:
    """A namespace and its label `gpumonitor.dev/inject`; None where it has none."""

    name: str
    inject: str | None


class Namespaces:
    """The labels of all namespaces that have one. A mirror for a reflector."""

    def __init__(self) -> None:
        self._inject: dict[str, str] = {}

    def seen(self, item: NamespaceSeen) -> None:
        """Take a namespace."""
        if item.inject is None:
            self._inject.pop(item.name, None)
        else:
            self._inject[item.name] = item.inject

    def gone(self, item: NamespaceSeen) -> None:
        """Forget a namespace."""
        self._inject.pop(item.name, None)

    def inject(self, name: str) -> str | None:
        """Return the label's value; None where there is none, or it is not known yet."""
        return self._inject.get(name)


def decode(raw: msgspec.Raw | bytes) -> Decoded[NamespaceSeen]:
    """Read a namespace. Raises msgspec.DecodeError."""
    meta = msgspec.json.decode(raw, type=_Namespace).metadata
    item = NamespaceSeen(name=meta.name, inject=(meta.labels or {}).get(wiring.INJECT))
    return Decoded(uid=meta.uid, resource_version=meta.resource_version, item=item)


def reflector(client: KubeClient, namespaces: Namespaces) -> Reflector[NamespaceSeen]:
    """Return the reflector that keeps them up to date; to be run as a task."""
    return Reflector(client=client, path="/api/v1/namespaces", query={}, decode=decode, mirror=namespaces)
