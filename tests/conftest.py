# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: how signals are taken, and the order where several processes share them.

Those that wait run beside those that compute.
"""

import os
import signal
import threading
from pathlib import Path

import pytest

WAITING = Path(__file__).parent / "contract"
"""Tests of real processes and servers: they wait more than they compute."""


def pytest_configure() -> None:
    """Take Ctrl-C and the loss of a terminal as a program in front does, for the programs that the tests start.

    In the background of a shell and under nohup they are ignored, by whatever is started there as well: a program that
    gets one would then go on, and its test wait for ever.
    """
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put one half of those that wait before the first half of the others, and one half before their second.

    Of an even number of processes, which get equal parts of the list one after the other, every second one then begins
    with tests that wait, and no long wait is left for the end. One process keeps the order of the files.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        waiting = [item for item in items if WAITING in item.path.parents]
        computing = [item for item in items if WAITING not in item.path.parents]
        items[:] = [item for half in (0, 1) for some in (waiting, computing) for item in _half(some, half)]


def _half(items: list[pytest.Item], which: int) -> list[pytest.Item]:
    """Return the first or second half. The module at the middle is whole in one of them, as it has things in common."""
    middle = len(items) // 2
    while 0 < middle < len(items) and items[middle].path == items[middle - 1].path:
        middle += 1
    return items[middle:] if which else items[:middle]
