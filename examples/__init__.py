# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Manifests of verl-shaped jobs, their programs, and the demo that runs them."""
