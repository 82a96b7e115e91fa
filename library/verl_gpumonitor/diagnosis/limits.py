# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Limits of the rules. All are ratios or seconds, so that none depends on the size of a GPU."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .hysteresis import Holds

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
HoldSeconds = Annotated[float, Meta(ge=0.0, le=86400.0)]


class _Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    raise_seconds: HoldSeconds = 30.0
    """It is raised when it has held for so long."""
    clear_seconds: HoldSeconds = 60.0
    """It is cleared when it has been away for so long."""

    @property
    def hold(self) -> Holds:
        """The two as the state machine takes them."""
        return Holds(raise_seconds=self.raise_seconds, clear_seconds=self.clear_seconds)


class OomRiskLimits(_Limits, frozen=True):
    """When a GPU is nearer to its memory's end than its peers.

    Rollout engines fill all GPUs to 90% and more by design, so that a high value alone means nothing.
    """

    min_ratio: Share = 0.92
    """Share of memory from which a GPU is near the end: 8% of 80 GiB are 6.4 GiB, less than one more micro batch."""
    min_above_peers: Share = 0.15
    """By so much it must be above the median of its pool."""


class ImbalanceLimits(_Limits, frozen=True):
    """When GPUs of one pool differ so much that one of them limits all.

    The last stage of a pipeline holds 25% more than the others, as it must; the differences here are above that.
    """

    memory_difference: Share = 0.35
    """Distance from the pool's median, as a share of the GPU's memory."""
    utilization_difference: Share = 0.40
    """Distance from the pool's median. Stages that begin a moment apart do not last as long as `raiseSeconds`."""
    min_utilization: Share = 0.50
    """The busiest GPU of the pool must reach this, else nobody waits for anybody."""


class DiagnosisLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Limits of all rules."""

    oom_risk: OomRiskLimits = OomRiskLimits()
    imbalance: ImbalanceLimits = ImbalanceLimits()
