# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Where stage names come from: marks, process titles, Ray. Each yields intervals with a stated resolution."""
