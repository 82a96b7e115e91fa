# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The typed history that rules look at: it grows line by line, never looks ahead, and its memory is bounded. Pure.

`workload` holds pods and steps, `pod` what is of one pod, `gpu` what is of one GPU; `attribution` decides which stage
a sample belongs to, and `standstill` adds up when a whole pool does nothing.
"""

from .attribution import RESUME, alarms, straddled
from .gpu import DEPTH, GpuHistory
from .pod import PodHistory
from .workload import GAP_SECONDS, WINDOW_SECONDS, History

__all__ = [
    "DEPTH",
    "GAP_SECONDS",
    "RESUME",
    "WINDOW_SECONDS",
    "GpuHistory",
    "History",
    "PodHistory",
    "alarms",
    "straddled",
]
