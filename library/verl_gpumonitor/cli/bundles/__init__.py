# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A trace of a job on a cluster, from what its sidecars keep: who is asked, and how their answers become one."""
