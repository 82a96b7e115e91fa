# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Wakes a thread that sleeps until something is due."""

import threading
from contextlib import suppress


class Bell:
    """Rings until the thread has heard it. One thread waits, any thread may ring.

    A lock that is held while the bell is silent. threading.Event makes a new lock and runs forty lines of Python at
    each wait, which is felt where a thread wakes up each second to do next to nothing.
    """

    def __init__(self) -> None:
        """It is silent."""
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the thread, or keep it from falling asleep the next time."""
        with suppress(RuntimeError):  # It rings already.
            self._silent.release()

    def wait(self, seconds: float) -> bool:
        """Sleep that long, or until it rings; say whether it did. It is silent again."""
        return self._silent.acquire(timeout=max(0.0, seconds))
