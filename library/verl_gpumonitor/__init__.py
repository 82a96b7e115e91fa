# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs, training stages and verl, without Kubernetes: the library that every other part stands on."""

__version__ = "0.1.0"
