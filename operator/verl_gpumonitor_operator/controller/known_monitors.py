# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The GPUMonitors that are believed to exist, by namespace and name. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .jobs import JobSeen
from .monitors import MonitorSeen, chosen, names_of


class KnownMonitors:
    """What was listed and watched of them, and which of them shows a workload."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, MonitorSeen]] = {}
        """By namespace and name."""
        self._made_by_hand: dict[str, set[str]] = {}
        """Names of those that are not ours, by namespace."""

    def __iter__(self) -> Iterator[MonitorSeen]:
        """Yield all; it may be changed meanwhile."""
        return iter([monitor for held in self._held.values() for monitor in held.values()])

    def keep(self, monitor: MonitorSeen) -> bool:
        """Take one as it was seen. True when that is news for its workload: new, deleted, or with another spec."""
        held = self._held.setdefault(monitor.namespace, {})
        before = held.get(monitor.name)
        if before is not None and before.uid == monitor.uid and before.generation > monitor.generation:
            return False
        held[monitor.name] = monitor
        by_hand = self._made_by_hand.setdefault(monitor.namespace, set())
        by_hand.discard(monitor.name) if monitor.managed else by_hand.add(monitor.name)
        spec_same = before is not None and (before.uid, before.generation) == (monitor.uid, monitor.generation)
        return not spec_same or monitor.deleting

    def gone(self, namespace: str, name: str, uid: str) -> MonitorSeen | None:
        """Forget one; returns it, or None when it was not known or is another by now."""
        monitor = self._held.get(namespace, {}).get(name)
        if monitor is None or monitor.uid != uid:
            return None
        del self._held[namespace][name]
        self._made_by_hand[namespace].discard(name)
        if not self._held[namespace]:
            # Namespaces come and go, too.
            del self._held[namespace], self._made_by_hand[namespace]
        return monitor

    def written(self, monitor: MonitorSeen, status: Mapping[str, Any]) -> None:
        """Take note of the status that was written to one, where it is still known."""
        held = self._held.get(monitor.namespace, {})
        if monitor.name in held:
            held[monitor.name] = replace(monitor, status=status)

    def of(self, job: JobSeen) -> MonitorSeen | None:
        """Return the one that shows a workload. Ours are found by their names, others by looking at each."""
        held = self._held.get(job.namespace, {})
        names = {*names_of(kind=job.kind, name=job.name), *self._made_by_hand.get(job.namespace, ())}
        return chosen((held[name] for name in names if name in held), kind=job.kind, name=job.name)

    def in_namespace(self, namespace: str) -> Mapping[str, MonitorSeen]:
        """By name, those of a namespace."""
        return self._held.get(namespace, {})
