# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Typed values that pass between the parts: samples, reports, findings. Pure: no I/O, no clock."""
