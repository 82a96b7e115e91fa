# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The process in the user's pod: reads, exports, reports, and never disturbs."""
