# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Flight records with what must and what must not be found in them, and how a diagnosis is scored by them."""
