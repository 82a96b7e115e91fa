# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of speed and memory, each compared within one run. Nothing here passes or fails."""
