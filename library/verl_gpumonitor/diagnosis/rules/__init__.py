# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One rule a file: what it looks for, why that is a fault and what looks like it and is none."""
