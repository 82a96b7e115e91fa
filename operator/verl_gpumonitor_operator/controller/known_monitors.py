# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The GPUMonitors that are believed to exist, by namespace and name. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .jobs import JobKind, JobSeen
from .monitors import MonitorSeen, chosen, names_of


class KnownMonitors:
    """What was listed and watched of them, and which of them shows a workload."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, MonitorSeen]] = {}
        """By namespace and name."""
        self._made_by_hand: dict[tuple[str, JobKind, str], set[str]] = {}
        """Names of those that are not ours, by namespace, kind and name of their workload."""

    def __iter__(self) -> Iterator[MonitorSeen]:
        """Yield all; it may be changed meanwhile."""
        return iter([monitor for held in self._held.values() for monitor in held.values()])

    def keep(self, monitor: MonitorSeen) -> bool:
        """Take one as it was seen. True when that is news for its workload: new, deleted, or with another spec."""
        before = self._held.get(monitor.namespace, {}).get(monitor.name)
        if before is not None and before.uid == monitor.uid and before.generation > monitor.generation:
            return False
        if before is not None:
            self._drop(before)
        self._held.setdefault(monitor.namespace, {})[monitor.name] = monitor
        if not monitor.managed:
            self._made_by_hand.setdefault(_workload_of(monitor), set()).add(monitor.name)
        spec_same = before is not None and (before.uid, before.generation) == (monitor.uid, monitor.generation)
        return not spec_same or monitor.deleting

    def gone(self, namespace: str, name: str, uid: str) -> MonitorSeen | None:
        """Forget one; returns it, or None when it was not known or is another by now."""
        monitor = self._held.get(namespace, {}).get(name)
        if monitor is None or monitor.uid != uid:
            return None
        self._drop(monitor)
        return monitor

    def _drop(self, monitor: MonitorSeen) -> None:
        """Take one out, and whatever is empty then: namespaces come and go, too."""
        held, workload = self._held[monitor.namespace], _workload_of(monitor)
        del held[monitor.name]
        if not held:
            del self._held[monitor.namespace]
        names = self._made_by_hand.get(workload, set())
        names.discard(monitor.name)
        if not names:
            self._made_by_hand.pop(workload, None)

    def written(self, monitor: MonitorSeen, status: Mapping[str, Any]) -> None:
        """Take note of the status that was written to one, where it is still known."""
        held = self._held.get(monitor.namespace, {})
        if monitor.name in held:
            held[monitor.name] = replace(monitor, status=status)

    def of(self, job: JobSeen) -> MonitorSeen | None:
        """Return the one that shows a workload. Ours are found by their names, others by what they refer to."""
        held = self._held.get(job.namespace, {})
        by_hand = self._made_by_hand.get((job.namespace, job.kind, job.name), ())
        names = {*names_of(kind=job.kind, name=job.name), *by_hand}
        return chosen((held[name] for name in names if name in held), kind=job.kind, name=job.name)

    def in_namespace(self, namespace: str) -> Mapping[str, MonitorSeen]:
        """By name, those of a namespace."""
        return self._held.get(namespace, {})


def _workload_of(monitor: MonitorSeen) -> tuple[str, JobKind, str]:
    return monitor.namespace, monitor.kind, monitor.workload_name
