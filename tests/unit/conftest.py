# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Property tests without a time limit for each example: on a machine that others use, it would fail at random."""

from hypothesis import settings

settings.register_profile("gpumonitor", deadline=None)
settings.load_profile("gpumonitor")
