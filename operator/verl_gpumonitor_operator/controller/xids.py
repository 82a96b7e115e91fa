# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Xids of one pod's GPUs, with the time at which each was last counted. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from verl_gpumonitor.model.report import MAX_GPUS, Report

MAX_CODES: Final = 16
"""Codes of one GPU, as its sidecar counts them."""


class XidSeen(NamedTuple):
    """One code of one GPU."""

    times: int
    """Since the start of the sidecar."""
    at: float
    """When a report said that there was one more (Unix seconds of our clock)."""


NO_XIDS: Final[Mapping[int, XidSeen]] = {}


@dataclass(kw_only=True, slots=True)
class PodXids:
    """The Xids of one pod."""

    start_id: str = ""
    gpus: dict[str, dict[int, XidSeen]] = field(default_factory=dict)
    """By UUID; of GPUs that had any."""

    def take(self, report: Report, received_at: float) -> None:
        """Take the counters of a report that was counted. A new start counts from zero again."""
        began = report.start_id != self.start_id
        self.start_id = report.start_id
        for gpu in report.gpus:
            if not gpu.xid_errors or (gpu.uuid not in self.gpus and len(self.gpus) >= MAX_GPUS):
                continue
            held = self.gpus.setdefault(gpu.uuid, {})
            for text, count in gpu.xid_errors.items():
                code, known = int(text), held.get(int(text))
                if known is None and len(held) >= MAX_CODES:
                    continue
                if count > (0 if known is None or began else known.times):
                    held[code] = XidSeen(count, received_at)

    def of(self, uuid: str) -> Mapping[int, XidSeen]:
        """Return the Xids of a GPU by their code."""
        return self.gpus.get(uuid, NO_XIDS)
