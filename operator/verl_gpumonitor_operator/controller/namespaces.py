# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What namespaces say of injection, by their label, and what the settings make of it.

The webhook is not called for those that are opted out or excluded.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from verl_gpumonitor.model import wiring
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.reflector import Decoded, Reflector
from verl_gpumonitor_operator.settings import ALWAYS_EXCLUDED_NAMESPACES, InjectionMode, Settings

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


class Choice:
    """Whose pods get a sidecar without anybody's saying so."""

    def __init__(self, namespaces: Namespaces, settings: Settings) -> None:
        self._namespaces = namespaces
        self._mode = settings.injection.mode
        self._excluded = {*ALWAYS_EXCLUDED_NAMESPACES, settings.namespace, *settings.injection.excluded_namespaces}

    def excludes(self, namespace: str) -> bool:
        """Whether a namespace is left alone, whatever its labels say."""
        return namespace in self._excluded

    def waits_for_word(self, namespace: str) -> bool:
        """Whether a pod there must say itself that it is to get a sidecar."""
        return self._mode is InjectionMode.OPT_IN and self._namespaces.inject(namespace) != ENABLED

    def why_not(self, namespace: str) -> str | None:
        """Say why a pod there has no sidecar, though the webhook said nothing of it; None: it should have one."""
        if self.excludes(namespace):
            return (
                "The namespace is left alone: it is GPUMonitor's own, Kubernetes' or in injection.excludedNamespaces."
            )
        if self._namespaces.inject(namespace) == DISABLED:
            return f"The namespace has the label {wiring.INJECT}: disabled."
        if self.waits_for_word(namespace):
            return (
                f"With injection.mode optIn, a pod gets a sidecar where it or its namespace has {wiring.INJECT}: "
                "enabled; the namespace has not."
            )
        return None


def decode(raw: msgspec.Raw | bytes) -> Decoded[NamespaceSeen]:
    """Read a namespace. Raises msgspec.DecodeError."""
    meta = msgspec.json.decode(raw, type=_Namespace).metadata
    item = NamespaceSeen(name=meta.name, inject=(meta.labels or {}).get(wiring.INJECT))
    return Decoded(uid=meta.uid, resource_version=meta.resource_version, item=item)


def reflector(client: KubeClient, namespaces: Namespaces) -> Reflector[NamespaceSeen]:
    """Return the reflector that keeps them up to date; to be run as a task."""
    return Reflector(client=client, path="/api/v1/namespaces", query={}, decode=decode, mirror=namespaces)
