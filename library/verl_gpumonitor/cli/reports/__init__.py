# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Reports of recorded runs: a page of HTML, Markdown for tickets, and two runs beside each other."""
