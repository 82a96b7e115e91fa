# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The controller's one way to the API server: requests, lists and watches, decoded by msgspec. No decisions."""
