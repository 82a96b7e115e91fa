# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which log-probabilities of a LoRA job are the reference's. Pure.

With LoRA the reference is the actor without its adapter, and from verl 0.8 on its pass is a task of the same name as
the policy's. In a step the policy's comes first: of two in a row in one process, the second is the reference's. Where
the policy's pass is left out (`rollout_correction.bypass_mode`) there is one alone, which stays `old_log_prob`.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from .cluster import RayTask
from .names import classify
from .tables import OTHER, Kind

MAX_PROCESSES: Final = 8192
_LOG_PROB: Final = "_compute_log_prob"


class _Last(msgspec.Struct, frozen=True):
    task_id: str
    log_prob: bool
    reference: bool


class ReferencePasses:
    """Follows the tasks of each worker."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}

    def look(self, tasks: Iterable[RayTask]) -> frozenset[str]:
        """Take the tasks of LoRA jobs that run now; returns the ids of those that are the reference's passes."""
        found = set()
        for task in tasks:
            said = classify(task.name)
            if not task.actor_id or said is None or said.kind is not Kind.WORKER or said.stage == OTHER:
                continue
            last = self._last.get(task.actor_id)
            if last is None or last.task_id != task.task_id:
                log_prob = said.stage == "old_log_prob" and task.name.endswith(_LOG_PROB)
                second = log_prob and last is not None and last.log_prob and not last.reference
                last = _Last(task.task_id, log_prob, second)
                if len(self._last) < MAX_PROCESSES or task.actor_id in self._last:
                    self._last[task.actor_id] = last
            if last.reference:
                found.add(task.task_id)
        return frozenset(found)

    def forget(self) -> None:
        """Say that tasks may have been missed."""
        self._last.clear()
