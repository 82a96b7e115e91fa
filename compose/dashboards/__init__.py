# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Grafana's dashboards as code: `python -m compose.dashboards` writes their JSON, which chart and compose read."""
