# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The order of the tests where several processes share them: those that wait run beside those that compute."""

import os
from pathlib import Path

import pytest

WAITING = Path(__file__).parent / "contract"
"""Tests of real processes and servers: they wait more than they compute."""


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
