# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m devcluster COMMAND`."""

import sys

from devcluster.cli import main

sys.exit(main())
