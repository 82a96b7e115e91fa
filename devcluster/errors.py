# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The one exception of this package: what went wrong, and what a person can do about it."""


class ClusterError(Exception):
    """Something that stops the present command. `advice` says what to do; empty where there is nothing to say."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice
