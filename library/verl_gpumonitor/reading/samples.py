# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The values that a reading yields. They are pure and live in the model; readers and their callers meet them here."""

from verl_gpumonitor.model.samples import (
    GpuCounters,
    GpuProcess,
    GpuSample,
    HostSample,
    NodeSample,
    RayAgentSample,
    ReadingHealth,
)

__all__ = ["GpuCounters", "GpuProcess", "GpuSample", "HostSample", "NodeSample", "RayAgentSample", "ReadingHealth"]
