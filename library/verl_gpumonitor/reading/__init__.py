# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The one place that touches NVML, /proc and Ray's agent. Whatever is unknown is None."""
