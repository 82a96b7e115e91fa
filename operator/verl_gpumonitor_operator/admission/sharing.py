# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Reads that several requests share: the pods of a job come at once, and all want to know the same of their namespace.

This is no cache. What is shared is a read that is under way, and that began a moment ago: its answer is as new as that
of a read which waits behind it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final, TypeVar

T = TypeVar("T")

SHARED_SECONDS: Final = 0.1
"""A read that began longer ago is not waited for: a server that slow may have looked long before it answers."""


class _Read:
    """One read under way."""

    __slots__ = ("began", "task", "waiting")

    def __init__(self, task: asyncio.Task[Any], began: float) -> None:
        self.task = task
        self.began = began
        self.waiting = 0


class SharedReads:
    """Reads under way, by what is read. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[Hashable, _Read] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def read(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `begin` reads, or what a read of the same key that is under way brings. Raises what it raises.

        A read ends when nobody waits for it any more; whoever gives up does not end it for the others.
        """
        read = self._under_way.get(key)
        if read is None or self._clock() - read.began > SHARED_SECONDS:
            read = self._begin(key, begin)
        read.waiting += 1
        try:
            result: T = await asyncio.shield(read.task)
            return result
        finally:
            read.waiting -= 1
            if not read.waiting:
                self._end(key, read)

    def _begin(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> _Read:
        read = self._under_way[key] = _Read(asyncio.create_task(begin()), self._clock())
        # Without this a read is joined for as long as those that waited for it have not had their turn.
        read.task.add_done_callback(lambda _: self._forget(key, read))
        return read

    def _end(self, key: Hashable, read: _Read) -> None:
        read.task.cancel()
        self._forget(key, read)

    def _forget(self, key: Hashable, read: _Read) -> None:
        if self._under_way.get(key) is read:
            del self._under_way[key]
