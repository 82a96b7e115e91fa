# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who decides about a moment, and what it was in."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.timeline.words import POD, Own, Part, Span, Voice, decided, narrowed, parts, present

NOW = 1000.0


def word(source: StageSource, known_from: float, known_until: float, *intervals: StageInterval) -> Voice:
    return Voice(StageWord(source=source, known_from=known_from, known_until=known_until, intervals=intervals))


def run(stage: str, begin: float, end: float | None = None, **values: object) -> StageInterval:
    return StageInterval(stage=stage, role="actor", begin=begin, end=end, **values)  # type: ignore[arg-type]


def marks(begin: float, end: float) -> Voice:
    return word(StageSource.MARKS, begin, end)


def state(begin: float, end: float) -> Voice:
    return word(StageSource.RAY_STATE, begin, end)


def agent(begin: float, end: float) -> Voice:
    return word(StageSource.RAY_AGENT, begin, end)


Row = tuple[float, float, str | None]


@pytest.mark.parametrize(
    ("words", "begin", "expected"),
    [
        pytest.param([marks(900, 1000), agent(900, 1000)], 950, [(950, 1000, "marks")], id="the best one decides"),
        pytest.param([state(900, 980), agent(900, 1000)], 950, [(950, 980, "ray-state")], id="then it is waited for"),
        pytest.param(
            [state(900, 940), agent(900, 1000)],
            930,
            [(930, 940, "ray-state"), (940, 1000, "ray-agent")],
            id="one that was silent for long is not waited for",
        ),
        pytest.param(
            [state(980, 1000), agent(900, 1000)],
            970,
            [(970, 980, "ray-agent"), (980, 1000, "ray-state")],
            id="before it vouches, the next one does",
        ),
        pytest.param([state(980, 1000)], 970, [(970, 980, None), (980, 1000, "ray-state")], id="or nobody"),
        pytest.param([], 900, [(900, 940, None)], id="without any, all waits for the watermark"),
        pytest.param([agent(900, 940)], 930, [(930, 940, "ray-agent")], id="the last one's silence waits for it too"),
        pytest.param([state(900, 990)], 800, [(800, 900, None), (900, 990, "ray-state")], id="long past is nobody's"),
        pytest.param([state(900, 2000)], 990, [(990, 1000, "ray-state")], id="nobody vouches for the future"),
        pytest.param([state(990, 980), state(float("nan"), 1000)], 930, [(930, 940, None)], id="broken words are none"),
        pytest.param([state(900, 1000)], 1000, [], id="nothing to decide"),
    ],
)
def test_who_decides(words: Sequence[Voice], begin: float, expected: list[Row]) -> None:
    spans = decided(words, begin, now=NOW, patient=True)
    assert [(span.begin, span.end, span.word and span.word.source.value) for span in spans] == expected


def test_a_source_that_is_never_late_is_not_waited_for() -> None:
    here = Voice(marks(900, 980).word, late=False)
    spans = decided([here, agent(900, 990)], 970, now=NOW, patient=True)
    assert [(span.end, span.word and span.word.source.value) for span in spans] == [(980, "marks"), (990, "ray-agent")]


def test_where_nobody_can_come_nothing_waits() -> None:
    assert [(span.begin, span.end) for span in decided([], 900, now=NOW, patient=False)] == [(900, NOW)]


def cut(*intervals: StageInterval, own: Own = Own()) -> list[tuple[float, float, str]]:  # noqa: B008 - frozen
    spans = decided([word(StageSource.RAY_STATE, 0, 10, *intervals)], 0, now=10, patient=True)
    return [(part.begin, part.end, part.stage) for part in parts(spans, own)]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        pytest.param([], [(0, 10, "other")], id="seen, and nothing ran"),
        pytest.param([run("gen", 2, 5)], [(0, 2, "other"), (2, 5, "gen"), (5, 10, "other")], id="one of them"),
        pytest.param([run("gen", -5)], [(0, 10, "gen")], id="what runs covers all"),
        pytest.param([run("gen", 2, 2), run("gen", 7, 3)], [(0, 10, "other")], id="no length is no time"),
        pytest.param(
            [run("init", 0), run("gen", 2, 5)],
            [(0, 2, "init"), (2, 5, "gen"), (5, 10, "init")],
            id="a stage beats init",
        ),
        pytest.param([run("ref", 0, 6), run("ref", 4, 10)], [(0, 10, "ref")], id="neighbours alike are one"),
    ],
)
def test_cuts(intervals: Sequence[StageInterval], expected: list[tuple[float, float, str]]) -> None:
    assert cut(*intervals) == expected


def test_a_gpu_has_the_intervals_of_its_rank_and_of_its_processes() -> None:
    ranks = (run("ref", 0, 4, local_rank=0), run("ref", 0, 6, local_rank=1))
    assert cut(*ranks, own=Own(local_rank=0)) == [(0, 4, "ref"), (4, 10, "other")]
    assert cut(*ranks, own=Own(local_rank=2)) == [(0, 10, "other")]
    pids = (run("ref", 0, 4, pid=7), run("gen", 4, 10, pid=9))
    assert cut(*pids, own=Own(pids=frozenset({8}), other_pids=frozenset({7}))) == [(0, 4, "other"), (4, 10, "gen")]


def test_a_part_says_whether_its_begin_was_seen() -> None:
    told = word(StageSource.RAY_STATE, 100, 110, run("gen", 90, 103), run("ref", 103))
    assert parts(decided([told], 101, now=110, patient=True)) == [
        Part(101, 103, "gen", "actor"),
        Part(103, 110, "ref", "actor", begun=True),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param([word(StageSource.RAY_STATE, 0, 999, run("gen", 900))], "gen", id="fresh"),
        pytest.param([word(StageSource.RAY_STATE, 0, 990, run("gen", 900))], None, id="too old"),
        pytest.param(
            [word(StageSource.RAY_STATE, 0, 990, run("gen", 900)), word(StageSource.RAY_AGENT, 0, 999, run("ref", 1))],
            "ref",
            id="the next one is fresh",
        ),
        pytest.param([word(StageSource.RAY_STATE, 0, 999, run("gen", 900, 950))], None, id="over"),
    ],
)
def test_the_present(words: Sequence[Voice], expected: str | None) -> None:
    found = present(words, NOW)
    running = found.of(POD) if found is not None else None
    assert (running and running.stage) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from(["gen", "ref"]), st.integers(80, 130), st.none() | st.integers(0, 30)), max_size=8
    )
)
def test_what_is_not_of_a_spans_time_changes_nothing(drawn: list[tuple[str, int, int | None]]) -> None:
    intervals = [
        StageInterval(stage=stage, role="actor", begin=begin, end=None if length is None else begin + length)
        for stage, begin, length in drawn
    ]
    span = Span(90.0, 110.0, word(StageSource.RAY_STATE, 0, 120, *intervals).word)
    assert parts([narrowed(span)]) == parts([span])
