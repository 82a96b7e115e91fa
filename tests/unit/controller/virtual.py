# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A clock of the running event loop that jumps to what is due next, so that minutes of it take no time."""

import asyncio
from typing import Any

import pytest


class VirtualClock:
    """The running loop's clock from now on; `now` is its time in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        loop: Any = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        select = loop._selector.select

        def jump(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        monkeypatch.setattr(loop._selector, "select", jump)
