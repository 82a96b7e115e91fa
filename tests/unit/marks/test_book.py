# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What marks add up to, also when some are lost, late, stale or hostile."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.marks import STEP, Mark, MarkScope, MarkState
from verl_gpumonitor.stages.choice import choose
from verl_gpumonitor.stages.sources.mark_book import (
    KEPT_SECONDS,
    MAX_INTERVALS,
    MAX_PROCESSES,
    OPEN_SECONDS,
    QUIET_SECONDS,
    REPLACED_SECONDS,
    MarkBook,
    StepSpan,
)

T = 1_764_000_000.0
DRIVER = "d" * 16


class Program:
    """A process that marks, as the sender does. Marks that were not lost are in `sent`."""

    def __init__(
        self,
        process: str = DRIVER,
        *,
        scope: MarkScope = MarkScope.DRIVER,
        local_rank: int | None = None,
        gpus: Sequence[str] = (),
        pid: int = 0,
    ) -> None:
        self._process = process
        self._pid = pid or 1 + int(process, 16) % 30000
        self._scope = scope
        self._local_rank = local_rank
        self._gpus = list(gpus)
        self._seq = 0
        self._open: dict[int, tuple[str, float, int | None]] = {}

    def _mark(
        self,
        state: MarkState,
        stage: str,
        t: float,
        *,
        span: int = 0,
        begin: float | None = None,
        step: int | None = None,
        memory: int | None = None,
    ) -> Mark:
        self._seq += 1
        return Mark(
            state=state,
            stage=stage,
            t=T + t,
            process=self._process,
            pid=self._pid,
            seq=self._seq,
            span=span,
            begin=begin,
            open=list(self._open),
            scope=self._scope,
            step=step,
            local_rank=self._local_rank,
            gpus=self._gpus,
            memory_used_bytes=memory,
        )

    def begin(self, stage: str, t: float, step: int | None = None) -> Mark:
        self._seq += 1
        span = self._seq
        self._open[span] = (stage, T + t, step)
        return self._mark(MarkState.BEGIN, stage, t, span=span, step=step)

    def end(self, t: float) -> Mark:
        """End what began last."""
        span, (stage, begin, step) = list(self._open.items())[-1]
        del self._open[span]
        return self._mark(MarkState.END, stage, t, span=span, begin=begin, step=step)

    def point(self, label: str, t: float, *, step: int | None = None, memory: int | None = None) -> Mark:
        return self._mark(MarkState.POINT, label, t, step=step, memory=memory)


def book_of(*marks: Mark) -> MarkBook:
    book = MarkBook()
    for mark in marks:
        book.observe(mark, mark.t)
    return book


def spans(book: MarkBook, now: float) -> list[tuple[str, float, float | None]]:
    """Return stage, begin and end of what the book says of the pod, in seconds after T."""
    return [
        (i.stage, round(i.begin - T, 3), None if i.end is None else round(i.end - T, 3))
        for i in book.word(T + now).intervals
    ]


def known(book: MarkBook, now: float) -> tuple[float, float]:
    word = book.word(T + now)
    return round(word.known_from - T, 3), round(word.known_until - T, 3)


def test_nobody_marks_so_nothing_is_vouched_for() -> None:
    word = MarkBook().word(T)
    assert (word.known_from, word.known_until, word.intervals) == (T, T, ())
    assert MarkBook().words(T) == ()


def test_stages_one_after_another() -> None:
    run = Program()
    book = book_of(run.begin("gen", 0), run.end(5), run.begin("update_actor", 6), run.end(9), run.begin("adv", 9))
    assert spans(book, 10) == [("gen", 0, 5), ("update_actor", 6, 9), ("adv", 9, None)]
    assert known(book, 10) == (0, 10)
    assert [i.role for i in book.word(T + 10).intervals] == ["rollout", "actor", "driver"]


def test_the_innermost_of_nested_stages_holds() -> None:
    run = Program()
    book = book_of(run.begin("testing", 0), run.begin("gen", 2), run.end(4), run.end(6))
    word = book.word(T + 7)

    def at(t: float) -> str | None:
        running = [i for i in word.intervals if i.begin <= T + t and (i.end is None or T + t < i.end)]
        chosen = choose(running, nested=True)
        return None if chosen is None else chosen.stage

    assert [at(1), at(3), at(5), at(6.5)] == ["testing", "gen", "testing", None]


def test_a_lost_end_is_repaired_by_the_next_mark() -> None:
    run = Program()
    first = run.begin("gen", 0)
    run.end(5)
    book = book_of(first, run.begin("ref", 5.5))
    assert spans(book, 6) == [("gen", 0, 5.5), ("ref", 5.5, None)]


def test_a_lost_begin_is_repaired_by_the_end() -> None:
    run = Program()
    run.begin("gen", 0)
    book = book_of(run.end(5))
    assert spans(book, 6) == [("gen", 0, 5)]
    assert known(book, 6) == (0, 6)


def test_an_end_that_comes_after_the_repair_tells_the_truth() -> None:
    run = Program()
    first = run.begin("gen", 0)
    late = run.end(5)
    book = book_of(first, run.begin("ref", 5.5))
    book.observe(late, T + 6)
    assert spans(book, 6) == [("gen", 0, 5), ("ref", 5.5, None)]


def test_a_mark_of_another_thread_that_arrives_late_closes_nothing() -> None:
    run = Program()
    first, second = run.begin("gen", 0), run.begin("ref", 0)
    book = book_of(second, first)
    assert sorted(span[0] for span in spans(book, 1)) == ["gen", "ref"]


def test_a_program_between_two_stages_is_believed_for_a_while() -> None:
    run = Program()
    book = book_of(run.begin("gen", 0), run.end(5))
    assert known(book, 5 + QUIET_SECONDS - 1) == (0, 5 + QUIET_SECONDS - 1)
    assert known(book, 5 + QUIET_SECONDS + 30) == (0, 5 + QUIET_SECONDS)


def test_after_a_silence_it_vouches_anew() -> None:
    run = Program()
    book = book_of(run.begin("gen", 0), run.end(5), run.point("a label", 50), run.begin("gen", 100))
    assert known(book, 101) == (100, 101)
    assert spans(book, 101) == [("gen", 100, None)]


def test_a_hang_is_seen_as_its_stage_but_not_for_ever() -> None:
    book = book_of(Program().begin("update_actor", 0))
    assert spans(book, 3600) == [("update_actor", 0, None)]
    assert known(book, 3600) == (3600 - KEPT_SECONDS, 3600)
    assert spans(book, OPEN_SECONDS + KEPT_SECONDS + 1) == []


def test_a_new_driver_ends_what_a_killed_one_left_open() -> None:
    killed, new = Program(), Program("e" * 16)
    book = book_of(killed.begin("update_actor", 0), new.begin("gen", 60))
    assert spans(book, 61) == [("update_actor", 0, 60), ("gen", 60, None)]


def test_two_senders_of_one_process_leave_each_other_alone() -> None:
    """The plugin is in a long stage when the program's own monitor speaks for the first time."""
    plugin, monitor = Program(pid=7), Program("e" * 16, pid=7)
    book = book_of(plugin.begin("gen", 0), monitor.point("after_rollout", 60))
    assert spans(book, 61) == [("gen", 0, None)]


def test_a_second_live_driver_gets_its_span_back() -> None:
    one, two = Program(), Program("e" * 16)
    book = book_of(one.begin("gen", 0), two.begin("ref", REPLACED_SECONDS + 1), two.end(13), one.end(20))
    assert spans(book, 21) == [("gen", 0, 20), ("ref", 11, 13)]


def test_drivers_speak_for_the_cluster_and_ranks_for_their_pod() -> None:
    driver = Program()
    ranks = [Program(f"{n:016x}", scope=MarkScope.RANK, local_rank=n) for n in range(2)]
    book = book_of(driver.begin("gen", 0), *(rank.begin("train", 1) for rank in ranks))
    assert [i.stage for i in book.cluster_word(T + 2).intervals] == ["gen"]
    assert [(i.stage, i.local_rank) for i in book.word(T + 2).intervals] == [("gen", None), ("train", 0), ("train", 1)]


def test_ranks_alone_say_nothing_of_the_cluster() -> None:
    book = book_of(Program(scope=MarkScope.RANK, local_rank=0).begin("gen", 0))
    word = book.cluster_word(T + 1)
    assert (word.known_from, word.known_until, word.intervals) == (T + 1, T + 1, ())


def test_the_only_rank_that_marks_speaks_for_its_pod() -> None:
    book = book_of(Program(scope=MarkScope.RANK, local_rank=0).begin("epoch_3", 0))
    assert [(i.stage, i.role, i.local_rank) for i in book.word(T + 1).intervals] == [("epoch_3", "unknown", None)]


def test_a_rank_that_tells_some_of_its_stages_vouches_for_these_alone() -> None:
    ranks = [Program(f"{n:016x}", scope=MarkScope.PART, local_rank=n) for n in range(2)]
    book = book_of(
        *(rank.begin("ref", n) for n, rank in enumerate(ranks)),
        *(rank.end(5 + n) for n, rank in enumerate(ranks)),
        *(rank.begin("update_actor", 20) for rank in ranks),
    )
    words = book.words(T + 22)
    assert [(w.known_from - T, w.known_until - T, len(w.intervals)) for w in words] == [(0, 6, 2), (20, 22, 2)]
    assert book.word(T + 22).intervals == ()


def test_steps_get_the_number_that_is_told_at_their_end() -> None:
    run = Program()
    book = book_of(
        run.begin(STEP, 0), run.begin("gen", 1), run.end(4), run.end(8), run.begin("testing", 8), run.end(9),
        run.point(STEP, 9, step=41), run.begin(STEP, 10, 42), run.begin("gen", 10, 42),
    )  # fmt: skip
    assert book.steps(T + 11) == (
        StepSpan(begin=T, end=T + 8, step=41),
        StepSpan(begin=T + 10, end=None, step=42),
    )
    assert [(i.stage, i.step) for i in book.word(T + 11).intervals] == [("gen", 41), ("testing", 41), ("gen", 42)]


def test_a_step_is_no_stage_but_time_of_the_program() -> None:
    book = book_of(Program().begin(STEP, 0))
    assert spans(book, 100) == []
    assert known(book, 100) == (0, 100)


def test_labels_alone_vouch_for_nothing() -> None:
    run = Program()
    book = book_of(run.point("after_rollout", 0), run.point("after_training", 5))
    assert book.words(T + 6) == ()


def test_gpus_and_host_memory_that_the_program_names() -> None:
    ranks = [Program(f"{n:016x}", scope=MarkScope.RANK, local_rank=n, gpus=["GPU-a", "GPU-b"]) for n in range(2)]
    book = book_of(ranks[0].point("start", 0, memory=5), ranks[1].begin("gen", 1), ranks[0].begin("gen", 2))
    assert book.own_uuids(T + 3) == ("GPU-a", "GPU-b")
    told = book.host(T + 3)
    assert told is not None
    assert told.memory_used_bytes == 5
    assert book.host(T + 100) is None


@pytest.mark.parametrize("t", [-300.0, 10.0, 1e6], ids=["long ago", "ahead", "far ahead"])
def test_impossible_times_are_dropped(t: float) -> None:
    book = MarkBook()
    book.observe(Program().begin("gen", t), T)
    assert (book.taken, book.dropped) == (0, 1)


def test_an_end_before_its_begin_is_dropped() -> None:
    book = MarkBook()
    run = Program()
    run.begin("gen", 5)
    book.observe(run.end(4), T + 5)
    assert book.dropped == 1


@pytest.mark.parametrize("back", [5.0, 50.0, 3600.0, 1e6])
def test_a_clock_that_is_set_back_silences_nobody(back: float) -> None:
    """What goes on is believed from its next mark on, whatever was said in the time that was taken back."""
    run = Program()
    book = book_of(
        run.begin(STEP, 0), run.begin("gen", 1), run.end(40), run.begin("adv", 41), run.point("x", 42, memory=5)
    )
    for mark in (run.begin("ref", 43 - back), run.point("x", 44 - back, memory=7)):
        book.observe(mark, mark.t)
    now = 45 - back
    assert spans(book, now)[-2:] == [("adv", min(41, 43 - back), None), ("ref", 43 - back, None)]
    assert known(book, now)[0] <= 43 - back
    assert known(book, now)[1] == now
    told = book.host(T + now)
    assert told is not None
    assert told.memory_used_bytes == 7


def test_a_process_that_marked_before_the_clock_was_set_back_alone_silences_no_other() -> None:
    old, new = Program("1" * 16, pid=1), Program("2" * 16, pid=2)
    book = book_of(old.begin("gen", 0), old.point("x", 1, memory=5))
    for mark in (new.begin("ref", -3600), new.point("x", -3599, memory=7)):
        book.observe(mark, mark.t)
    assert known(book, -3590) == (-3600, -3590)
    told = book.host(T - 3590)
    assert told is not None
    assert told.memory_used_bytes == 7


def test_a_flood_of_processes_and_spans_is_bounded() -> None:
    book = MarkBook()
    for n in range(500):
        run = Program(f"{n:016x}")
        for mark in (run.begin("gen", n / 1000), run.end(n / 1000)):
            book.observe(mark, T + 1)
    run = Program()
    for n in range(1000):
        book.observe(run.begin("gen", 1), T + 1)
        if n % 3:
            book.observe(run.end(1), T + 1)
    assert len(book.word(T + 1).intervals) <= MAX_PROCESSES + MAX_INTERVALS + 16


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "end"]), st.sampled_from(["gen", "ref", STEP]), st.floats(0.001, 5), st.booleans()
        ),
        max_size=40,
    )
)
def test_whatever_is_lost_intervals_lie_within_what_ran(events: list[tuple[str, str, float, bool]]) -> None:
    """Times never run back, no end is before its begin, and without losses every span is exact."""
    run, book, t = Program(), MarkBook(), 0.0
    truth: dict[int, tuple[str, float, float | None]] = {}
    depth: list[int] = []
    lossless = all(arrives for *_, arrives in events)
    for number, (what, stage, gap, arrives) in enumerate(events):
        t += gap
        if what == "begin" and len(depth) < 16:
            mark = run.begin(stage, t)
            truth[number] = (stage, mark.t, None)
            depth.append(number)
        elif what == "end" and depth:
            mark = run.end(t)
            begun = depth.pop()
            truth[begun] = (truth[begun][0], truth[begun][1], mark.t)
        else:
            continue
        if arrives:
            book.observe(mark, mark.t)
    now = T + t
    word = book.word(now)
    assert word.known_from <= word.known_until <= now
    for interval in word.intervals:
        assert interval.end is None or interval.begin <= interval.end <= now
    if lossless:
        ran = sorted((b, s, e) for s, b, e in truth.values() if s != STEP and (e is None or e > word.known_from))
        assert sorted((i.begin, i.stage, i.end) for i in word.intervals) == ran
