# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Names -> stage and role. Pure, but for the subpackage of sources."""
