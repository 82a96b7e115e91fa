# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUMonitor objects as they were seen, and which of them belongs to which workload. Pure.

The controller makes one for each workload, named like it. One that a person made for the same workload is used instead,
whatever its name. An object of ours is told by its label; only those are ever deleted.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from verl_gpumonitor.model.kubernetes import unix_seconds

from .documents import MANAGED_BY
from .jobs import KINDS, JobKind, JsonObject

GROUP: Final = "gpumonitor.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "GPUMonitor"
PLURAL: Final = "gpumonitors"
MAX_NAME: Final = 253
"""Longest name of an object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSeen:
    """One GPUMonitor."""

    namespace: str
    name: str
    uid: str
    generation: int
    created_at: float | None
    kind: JobKind
    """Of its workload."""
    workload_name: str
    managed: bool
    """Made by the controller."""
    deleting: bool = False
    muted_reasons: frozenset[str] = frozenset()
    thresholds: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Group -> its thresholds, as they were written; whether they can be is not checked here."""
    retention_seconds: float | None = None
    """None: the controller's own setting."""
    status: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """As it was last read."""

    @property
    def workload_uid(self) -> str | None:
        """Run that its status speaks of; None before the first status."""
        workload = self.status.get("workload")
        uid = workload.get("uid") if isinstance(workload, Mapping) else None
        return uid if isinstance(uid, str) else None

    @property
    def completed_at(self) -> float | None:
        """When the run of its status ended (Unix seconds); None while it runs, or that is not known."""
        return self._time_of("completionTime")

    @property
    def deleted_at(self) -> float | None:
        """When the object of that run was seen to be gone (Unix seconds); None while it is there."""
        return self._time_of("deletionTime")

    def is_of(self, kind: JobKind, workload_name: str) -> bool:
        """Whether its workload is this one, or one that had this name before."""
        return self.kind is kind and self.workload_name == workload_name

    def shows(self, kind: JobKind, workload_name: str) -> bool:
        """Whether it can show this workload: one that is being deleted cannot."""
        return self.is_of(kind, workload_name) and not self.deleting

    def _time_of(self, key: str) -> float | None:
        workload = self.status.get("workload")
        return unix_seconds(workload.get(key)) if isinstance(workload, Mapping) else None


def from_object(body: JsonObject) -> MonitorSeen | None:
    """Read one object. None when it has no identity, or refers to nothing that can be a workload."""
    metadata, spec, status = (_mapping(body, key) for key in ("metadata", "spec", "status"))
    reference = _mapping(spec, "workloadRef")
    try:
        kind = JobKind(str(reference.get("kind")))
    except ValueError:
        return None
    namespace, name, uid = (metadata.get(key) for key in ("namespace", "name", "uid"))
    workload_name = reference.get("name")
    if not all(isinstance(value, str) and value for value in (namespace, name, uid, workload_name)):
        return None
    labels, retention, muted = _mapping(metadata, "labels"), spec.get("retentionSeconds"), spec.get("mutedReasons")
    return MonitorSeen(
        namespace=str(namespace),
        name=str(name),
        uid=str(uid),
        generation=_whole(metadata.get("generation")),
        created_at=unix_seconds(metadata.get("creationTimestamp")),
        kind=kind,
        workload_name=str(workload_name),
        managed=all(labels.get(key) == value for key, value in MANAGED_BY.items()),
        deleting=metadata.get("deletionTimestamp") is not None,
        muted_reasons=frozenset(str(reason) for reason in muted) if isinstance(muted, list) else frozenset(),
        thresholds=_mapping(spec, "thresholds"),
        retention_seconds=float(retention) if isinstance(retention, int) and retention >= 0 else None,
        status=status,
    )


def chosen(monitors: Iterable[MonitorSeen], *, kind: JobKind, name: str) -> MonitorSeen | None:
    """Return the one that shows this workload, of those of its namespace: a hand-made one first, then the oldest."""
    fitting = [item for item in monitors if item.shows(kind, name)]
    return min(fitting, key=lambda item: (item.managed, item.created_at or 0.0, item.name), default=None)


def name_for(*, kind: JobKind, name: str, taken: Mapping[str, MonitorSeen]) -> str:
    """Name for a new one: the first of a workload's names that no other workload's has."""
    *others, last = names_of(kind=kind, name=name)
    return next((one for one in others if one not in taken or taken[one].is_of(kind, name)), last)


def names_of(*, kind: JobKind, name: str) -> tuple[str, ...]:
    """Names that a workload's GPUMonitor may have, best first: its own, with its kind, and one that nobody else has.

    The second may well be that of another job: of `a-pytorchjob` beside two kinds of `a`.
    """
    digest = hashlib.sha256(f"{kind}/{name}".encode()).hexdigest()[:10]
    return name, _with_suffix(name, kind.lower()), _with_suffix(name, f"{kind.lower()}-{digest}")


def _with_suffix(name: str, suffix: str) -> str:
    # No dot may stand before the dash, where the name is cut.
    return f"{name[: MAX_NAME - 1 - len(suffix)].rstrip('.-')}-{suffix}"


def new_object(*, kind: JobKind, namespace: str, name: str, workload_name: str) -> dict[str, Any]:
    """Return the GPUMonitor to create. No ownerReference: it outlives the job."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace, "labels": dict(MANAGED_BY)},
        "spec": {
            "workloadRef": {"apiVersion": KINDS[kind].api_version, "kind": kind.value, "name": workload_name},
        },
    }


def _mapping(body: JsonObject, key: str) -> Mapping[str, Any]:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
