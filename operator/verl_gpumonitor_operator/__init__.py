# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What runs beside the cluster's control plane: the webhook and the controller."""
