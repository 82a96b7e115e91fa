# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Property tests, without a time limit for each example: on a machine that others use, it would fail at random.

`make check` tries few examples, so that it stays quick. `make test` sets HYPOTHESIS_PROFILE=thorough, which tries more
and the same ones each time: what fails there is of the change that it tests. `make explore` looks for new ones.
"""

import os

from hypothesis import settings

settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=200, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
