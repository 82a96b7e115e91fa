# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Property tests without a time limit for each example: on a machine that others use, it would fail at random.

`make check` tries few examples, so that it stays quick; `make test` sets HYPOTHESIS_PROFILE=thorough.
"""

import os

from hypothesis import settings

settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
