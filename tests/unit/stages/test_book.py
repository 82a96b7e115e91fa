# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Looks at what runs become intervals."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.stages import StageInterval, StageSource
from verl_gpumonitor.stages.book import MAX_ENDED, MAX_RUNNING, Book, Manner, Running

EVERY_SECOND = Manner(gap_seconds=3.0)
Look = tuple[float, list[Running]]


def run(key: str, begin: float | None = None, *, lane: str = "", place: str = "") -> Running:
    return Running(key=key, stage=key, role="actor", begin=begin, lane=lane, place=place)


def looked(looks: Sequence[Look], manner: Manner = EVERY_SECOND) -> Book:
    book = Book(manner)
    for at, running in looks:
        book.look(at, running)
    return book


def spans(book: Book, now: float, place: str = "") -> list[tuple[str, float, float | None]]:
    return [(each.stage, each.begin, each.end) for each in book.intervals(now, place)]


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        pytest.param([], [], id="nobody looked"),
        pytest.param([(10, [])], [], id="nothing runs"),
        pytest.param([(10, [run("gen")])], [("gen", 10, None)], id="what ran before the first look begins with it"),
        pytest.param([(10, [run("gen", 7)])], [("gen", 7, None)], id="unless it tells its begin"),
        pytest.param([(10, []), (12, [run("gen")])], [("gen", 11, None)], id="an untold begin is in the middle"),
        pytest.param([(10, [run("gen", 7)]), (12, [])], [("gen", 7, 11)], id="an end is in the middle"),
        pytest.param(
            [(10, [run("gen", 7)]), (12, [run("ref", 10.2)])],
            [("gen", 7, 10.2), ("ref", 10.2, None)],
            id="or where the next begins",
        ),
        pytest.param(
            [(10, [run("gen", 7, lane="a")]), (12, [run("ref", 10.2, lane="b")])],
            [("gen", 7, 11), ("ref", 10.2, None)],
            id="but not that of another process",
        ),
        pytest.param(
            [(10, [run("gen", 7, place="n1")]), (12, [run("ref", 10.2, place="n2")])],
            [],
            id="other places are not this one",
        ),
        pytest.param(
            [(10, [run("gen", 7)]), (20, [run("ref", 15)])],
            [("ref", 15, None)],
            id="what ended in a time in which nobody looked is left out",
        ),
        pytest.param([(10, [run("gen", 7)]), (9, [])], [("gen", 7, None)], id="a look back in time is passed over"),
        pytest.param(
            [(10, [run("gen", 7)]), (2, [run("ref")])], [("ref", 2, None)], id="unless the clock was set back"
        ),
        pytest.param([(10, [run("gen", 12)])], [("gen", 10, None)], id="nothing begins in the future"),
    ],
)
def test_intervals(looks: list[Look], expected: list[tuple[str, float, float | None]]) -> None:
    book = looked(looks)
    assert spans(book, looks[-1][0] if looks else 0) == expected


def test_what_is_late_is_taken_off_but_the_word_is_never_taken_back() -> None:
    manner = Manner(gap_seconds=11.0, lag_seconds=2.5)
    assert spans(looked([(10, []), (15, [run("gen")]), (20, [])], manner), 20) == [("gen", 10, 15)]
    assert spans(looked([(10, []), (11, [run("gen")])], manner), 11) == [("gen", 10, None)]


def test_the_word_begins_anew_after_a_gap() -> None:
    book = looked([(10, [run("gen")]), (12, [])])
    assert book.known == (10, 12)
    book.look(20, [])
    assert book.known == (20, 20)
    assert book.word(StageSource.TITLES, 20).intervals == ()


def test_the_word_ends_where_begins_may_still_be_found() -> None:
    assert looked([(10, []), (12, [])], Manner(gap_seconds=3.0, settle_seconds=1.5)).known == (10, 10.5)
    assert looked([(10, [])], Manner(gap_seconds=3.0, settle_seconds=1.5)).known == (10, 10)


def test_an_interrupted_source_knows_nothing() -> None:
    book = looked([(10, [run("gen", 7)]), (12, [run("gen", 7)])])
    book.interrupt()
    assert book.known is None
    word = book.word(StageSource.RAY_STATE, 13)
    assert (word.known_from, word.known_until, word.intervals) == (13, 13, ())
    book.look(14, [run("gen", 7)])
    assert book.known == (14, 14)
    assert spans(book, 14) == [("gen", 7, None)]


def test_what_is_missing_from_a_part_has_not_ended() -> None:
    book = looked([(10, [run("gen", 7)])])
    assert not book.look(11, [], whole=False)
    assert spans(book, 11) == [("gen", 7, None)]


def test_a_source_that_stopped_says_nothing_of_the_present() -> None:
    book = looked([(10, [run("gen", 7)])])
    assert spans(book, 12) == [("gen", 7, None)]
    assert spans(book, 14) == [("gen", 7, 10)]


def test_a_look_says_whether_anything_changed() -> None:
    book = Book(EVERY_SECOND)
    assert book.look(1, [run("gen")])
    assert not book.look(2, [run("gen")])
    assert book.look(3, [])


def test_a_book_is_bounded() -> None:
    book = Book(EVERY_SECOND)
    for at in range(3 * MAX_ENDED):
        book.look(at * 0.1, [run(f"t{at}", lane=f"{at}")])
    assert len(book.intervals(MAX_ENDED * 0.3)) == MAX_ENDED + 1
    book.look(1000, [run(f"x{number}") for number in range(2 * MAX_RUNNING)])
    assert len(book.intervals(1000)) == MAX_RUNNING
    book.look(2000, [])
    assert book.places() == []


_RUNNING = st.lists(
    st.builds(
        run,
        st.sampled_from("abc"),
        st.one_of(st.none(), st.floats(-50, 300)),
        lane=st.sampled_from(["", "l", "m"]),
        place=st.sampled_from(["", "p"]),
    ),
    max_size=5,
)


@given(st.lists(st.tuples(st.floats(0, 300), _RUNNING, st.booleans()), max_size=20), st.floats(0, 400))
def test_whatever_the_looks_intervals_are_ordered_and_end_after_their_begin(
    looks: list[tuple[float, list[Running], bool]], now: float
) -> None:
    book = Book(Manner(gap_seconds=20.0, lag_seconds=0.3, settle_seconds=1.5))
    for at, running, whole in looks:
        book.look(at, running, whole=whole)
        known = book.known
        assert known is not None
        assert known[0] <= known[1]
    for place in ("", "p"):
        intervals: tuple[StageInterval, ...] = book.intervals(now, place)
        assert [each.begin for each in intervals] == sorted(each.begin for each in intervals)
        assert all(each.end is None or each.begin <= each.end for each in intervals)


@given(st.lists(st.tuples(st.floats(0.1, 3), _RUNNING), max_size=20))
def test_nothing_new_begins_or_ends_in_what_was_vouched_for(looks: list[tuple[float, list[Running]]]) -> None:
    """But for begins that a source tells later than it said it would."""
    book = Book(Manner(gap_seconds=20.0, lag_seconds=2.5, settle_seconds=1.5))
    at, until = 0.0, float("-inf")
    before: set[tuple[str, str, float]] = set()
    for seconds, running in looks:
        at += seconds
        untold = [run(thing.key, None, lane=thing.lane, place=thing.place) for thing in running]
        book.look(at, untold)
        seen = {(place, each.stage, each.begin) for place in book.places() for each in book.intervals(at, place)}
        assert all(begin >= until for _, _, begin in seen - before)
        known = book.known
        assert known is not None
        before, until = seen, known[1] if known[0] < known[1] else until
