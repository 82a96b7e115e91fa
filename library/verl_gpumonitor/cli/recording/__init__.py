# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Making a trace of this host: lines from what is looked at, in order of time, into a file that survives a kill."""
