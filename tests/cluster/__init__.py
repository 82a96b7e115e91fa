# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Behaviour on a real cluster: real API server, kubelet, containers, KubeRay, Ray; only the GPU is simulated."""
