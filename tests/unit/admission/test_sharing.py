# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Reads under way are shared, and no answer is older than it would be without that."""

import asyncio

import pytest

from verl_gpumonitor_operator.admission.sharing import SHARED_SECONDS, SharedReads


class Source:
    """Answers when the test lets it, each time with another number."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.cancelled = 0
        self.open = asyncio.Event()
        self.failure: Exception | None = None

    async def read(self) -> int:
        self.begun += 1
        number = self.begun
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        self.ended += 1
        return number


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_who_come_meanwhile_share_one_read() -> None:
    reads, source = SharedReads(Clock()), Source()
    waiting = [asyncio.create_task(reads.read("a", source.read)) for _ in range(3)]
    await settle()
    source.open.set()
    assert await asyncio.gather(*waiting) == [1, 1, 1]
    assert len(reads) == 0


async def test_nothing_is_kept_after_the_answer() -> None:
    reads, source = SharedReads(Clock()), Source()
    source.open.set()
    assert [await reads.read("a", source.read) for _ in range(2)] == [1, 2]


async def test_other_keys_are_other_reads() -> None:
    reads, source = SharedReads(Clock()), Source()
    source.open.set()
    assert sorted(await asyncio.gather(reads.read("a", source.read), reads.read("b", source.read))) == [1, 2]


async def test_a_read_that_began_long_ago_is_not_waited_for() -> None:
    clock = Clock()
    reads, source = SharedReads(clock), Source()
    first = asyncio.create_task(reads.read("a", source.read))
    await settle()
    clock.now = SHARED_SECONDS + 0.01
    second = asyncio.create_task(reads.read("a", source.read))
    third = asyncio.create_task(reads.read("a", source.read))
    await settle()
    source.open.set()
    assert list(await asyncio.gather(first, second, third)) == [1, 2, 2]
    assert len(reads) == 0


async def test_who_gives_up_takes_nothing_from_the_others() -> None:
    reads, source = SharedReads(Clock()), Source()
    hasty, patient = (asyncio.create_task(reads.read("a", source.read)) for _ in range(2))
    await settle()
    hasty.cancel()
    await settle()
    source.open.set()
    assert await patient == 1
    assert source.cancelled == 0


async def test_a_read_for_which_nobody_waits_ends() -> None:
    reads, source = SharedReads(Clock()), Source()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await reads.read("a", source.read)
    await settle()
    assert (source.cancelled, len(reads)) == (1, 0)


async def test_a_failure_is_everybodys() -> None:
    reads, source = SharedReads(Clock()), Source()
    source.failure = ValueError("refused")
    waiting = [asyncio.create_task(reads.read("a", source.read)) for _ in range(2)]
    source.open.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in found] == ["refused", "refused"]
    assert len(reads) == 0
