# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What lists say of an engine goes to the stage in which each was read, once, whatever cuts the time into pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.timeline.test_stages import BEGIN, run, state
from verl_gpumonitor.model.samples import GpuCounters
from verl_gpumonitor.timeline.stages import StageTimeline
from verl_gpumonitor.timeline.totals import Share, Totals
from verl_gpumonitor.timeline.words import Voice


def shares_of(lists: dict[float, int], *words: Voice, every: float = 1.0, until: float = 10.0) -> list[Share]:
    """Settle ten seconds of one GPU, whose processes were listed at these times, the engine with so many bytes."""
    timeline = StageTimeline()
    timeline.observe("GPU-0", GpuCounters(), at=BEGIN)
    times = sorted({*(number * every for number in range(1, int(until / every) + 1)), *lists})
    for now in times:
        counters = GpuCounters(observed_seconds=now, busy_seconds=now / 2)
        timeline.observe("GPU-0", counters, at=BEGIN + now, engine_bytes=lists.get(now))
    settled = timeline.settle(words, now=BEGIN + until, patient=False)
    return [*settled.shares, *timeline.finish(words, now=BEGIN + until + 1).shares]


def held(shares: list[Share]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for share in shares:
        if share.engine_bytes is not None:
            found.setdefault(share.part.stage, []).append(share.engine_bytes)
    return found


def test_a_list_goes_to_the_stage_in_which_it_was_read() -> None:
    word = state(0, 11, run("gen", 0, 4.6), run("update_actor", 4.6))
    assert held(shares_of({4.5: 60, 5.0: 8, 9.0: 7}, word)) == {"gen": [60], "update_actor": [8, 7]}


@given(
    lists=st.dictionaries(st.integers(1, 19).map(lambda half: half / 2), st.integers(0, 2**40), max_size=12),
    cuts=st.lists(st.floats(0.1, 9.9), max_size=6, unique=True),
    every=st.sampled_from((0.25, 0.5, 1.0, 2.5)),
    several=st.booleans(),
)
def test_each_list_counts_once_or_is_replaced_by_one_less_than_a_second_later(
    lists: dict[float, int], cuts: list[float], every: float, several: bool
) -> None:
    ends = [0.0, *sorted(cuts), 11.0]
    spans = [
        run("gen" if number % 2 else "ref", begin, end, job=f"job-{number % 2}" if several else "")
        for number, (begin, end) in enumerate(pairwise(ends))
    ]
    found = [size for sizes in held(shares_of(lists, state(0, 11, *spans), every=every)).values() for size in sizes]
    assert len(found) <= len(lists)
    assert set(found) <= set(lists.values())
    if lists:
        assert lists[max(lists)] in found


def test_most_and_least_are_kept_and_joined() -> None:
    one, other, empty = Totals(), Totals(), Totals()
    for size in (60, 8):
        one.list_engine(size)
    other.list_engine(70)
    other.list_engine(None)
    for totals in (other, empty):
        one.join(totals)
    assert (one.engine_peak_bytes, one.engine_floor_bytes) == (70, 8)
    assert (empty.engine_peak_bytes, empty.engine_floor_bytes) == (None, None)
