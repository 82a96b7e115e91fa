# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""All rules, in the order in which they are asked: causes before what they explain."""

from typing import Final

from .rule import Rule
from .rules import (
    application_fault,
    foreign_process,
    gpu_fault,
    hang,
    host_memory,
    leftover_memory,
    low_utilization,
    memory_growth,
    oom_risk,
    rollout_memory,
    shared_memory,
    telemetry_partial,
    telemetry_unavailable,
    throttled,
    uneven,
)

RULES: Final[tuple[Rule, ...]] = (
    gpu_fault.RULE,
    application_fault.RULE,
    telemetry_unavailable.RULE,
    telemetry_partial.RULE,
    host_memory.RULE,
    shared_memory.RULE,
    hang.RULE,
    leftover_memory.RULE,
    foreign_process.RULE,
    throttled.RULE,
    oom_risk.RULE,
    rollout_memory.RULE,
    memory_growth.RULE,
    uneven.RULE,
    low_utilization.RULE,
)
