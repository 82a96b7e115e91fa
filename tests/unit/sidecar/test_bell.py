# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A bell wakes one thread."""

import threading
import time

from verl_gpumonitor_sidecar.bell import Bell


def test_it_is_silent_until_it_rings_and_after_it_was_heard() -> None:
    bell = Bell()
    assert not bell.wait(-1.0)
    bell.ring()
    bell.ring()
    assert bell.wait(0.0)
    assert not bell.wait(0.01)


def test_it_wakes_a_thread_that_sleeps() -> None:
    bell = Bell()
    threading.Timer(0.05, bell.ring).start()
    began = time.monotonic()
    assert bell.wait(20.0)
    assert time.monotonic() - began < 10.0
