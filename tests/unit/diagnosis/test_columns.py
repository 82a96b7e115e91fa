# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The past of a pod's GPUs in columns: it says what the past of each by itself says, and takes little memory."""

import gc
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.diagnosis.reported import ReportedHistory, piece_of
from verl_gpumonitor.model.columns import PodColumns, rows_of
from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.history import OwnPast, Past, Piece
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, Header, TraceGpu, TracePod

FIGURES = ("seconds", "known_seconds", "busy_seconds", "powered_seconds", "energy_joules", "peak_bytes", "floor_bytes")
THROTTLED = ("throttled_seconds", "throttle_known_seconds")
SIZES = st.none() | st.integers(min_value=0, max_value=192 * GIB)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """What a sidecar may tell of a stage."""
    seconds = draw(st.floats(min_value=0.1, max_value=20_000.0))
    observed = draw(st.sampled_from((0.0, seconds)))
    return piece_of(
        stage="gen",
        role="rollout",
        seconds=seconds,
        observed_seconds=observed,
        busy_seconds=observed * draw(st.floats(min_value=0.0, max_value=1.0)),
        energy_joules=draw(st.none() | st.floats(min_value=0.0, max_value=1500.0).map(lambda watts: watts * seconds)),
        peak_bytes=draw(SIZES),
        floor_bytes=draw(SIZES),
        throttled_seconds=draw(st.none() | st.floats(min_value=0.0, max_value=1.0).map(lambda part: part * observed)),
    )


def _alike(piece: Piece, other: Piece) -> bool:
    """Seven digits of sizes and seconds; shares to a ten-thousandth of the stage, power to a tenth of a watt."""
    for name in (*FIGURES, *THROTTLED):
        one, two = getattr(piece, name), getattr(other, name)
        if (one is None) != (two is None):
            return False
        rough = 0.06 * piece.seconds if name == "energy_joules" else 1e-4 * piece.seconds
        if one is not None and two != pytest.approx(one, rel=1e-6, abs=rough if "bytes" not in name else 1.0):
            return False
    return (piece.step, piece.stage, piece.role) == (other.step, other.stage, other.role)


@given(
    st.lists(st.tuples(st.none() | pieces(), st.none() | pieces()), max_size=9),
    st.integers(min_value=1, max_value=6),
)
def test_columns_say_what_each_gpu_by_itself_says(steps: list[tuple[Piece | None, Piece | None]], depth: int) -> None:
    columns = PodColumns(depth)
    places = columns.place(), columns.place()
    own: list[list[Piece]] = [[], []]
    for step, told in enumerate(steps):
        known = [(place, piece) for place, piece in zip(places, told, strict=True) if piece is not None]
        for place, piece in known:
            piece.step = step
            own[place].append(piece)
        columns.append(step, rows_of(known, columns.width))
    # A step that one GPU alone had takes room of both.
    kept = [step for step, told in enumerate(steps) if told != (None, None)][-depth:]
    for place in places:
        want = [piece for piece in own[place] if piece.step in kept]
        past = columns.past(place).get("gen")
        assert (past is None) is (not want)
        if past is not None:
            _same(past, want)


def _same(past: Past, want: list[Piece]) -> None:
    assert list(past.steps) == [piece.step for piece in want]
    assert [peak is None for peak in past.peaks] == [piece.peak_bytes is None for piece in want]
    assert list(past.seconds) == pytest.approx([piece.seconds for piece in want], rel=1e-6)
    assert past.last(1)[0].step == want[-1].step
    assert all(_alike(piece, other) for piece, other in zip(want, past, strict=True))
    for piece in want:
        assert past.at(piece.step) is past.last(len(past))[want.index(piece)]
        assert past.seconds_at(piece.step) == pytest.approx(piece.seconds, rel=1e-6)
    assert past.at(want[-1].step + 1) is None
    assert past.seconds_at(want[0].step - 1) == 0.0


@given(st.lists(pieces(), min_size=1, max_size=9), st.integers(min_value=1, max_value=6))
def test_one_gpu_by_itself_keeps_the_newest(told: list[Piece], depth: int) -> None:
    past = OwnPast("gen", depth)
    for step, piece in enumerate(told):
        piece.step = step
        past.append(piece)
    _same(past, told[-depth:])
    assert past.longest_seconds == max(piece.seconds for piece in told)


def _piece(peak_gib: float, seconds: float = 10.0) -> Piece:
    return piece_of(
        stage="gen",
        role="rollout",
        seconds=seconds,
        observed_seconds=seconds,
        busy_seconds=seconds,
        energy_joules=400.0 * seconds,
        peak_bytes=int(peak_gib * GIB),
        floor_bytes=None,
    )


def test_a_gpu_that_joins_has_no_past_and_takes_none_of_the_others() -> None:
    columns = PodColumns(4)
    first = columns.place()
    columns.append(0, rows_of([(first, _piece(10))], columns.width))
    waiting = rows_of([(first, _piece(20))], columns.width)
    second = columns.place()
    columns.append(1, waiting)
    columns.append(2, rows_of([(first, _piece(30)), (second, _piece(40))], columns.width))
    assert [list(columns.past(place)["gen"].peaks) for place in (first, second)] == [
        [10 * GIB, 20 * GIB, 30 * GIB],
        [40 * GIB],
    ]


def test_usual_power_is_that_of_steps_in_which_the_gpu_worked() -> None:
    columns = PodColumns(8)
    place = columns.place()
    for step, (watts, load) in enumerate(((400.0, 0.9), (410.0, 0.8), (120.0, 0.9), (700.0, 0.1), (420.0, 0.9))):
        piece = _piece(10)
        piece.busy_seconds, piece.energy_joules = 10 * load, 10 * watts
        columns.append(step, rows_of([(place, piece)], columns.width))
    assert columns.stages["gen"].usual_watts(place) == pytest.approx(410.0, abs=0.1)


STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "other", "testing")


PODS = ("w-0", "w-1", "w-2", "w-3")


def _history() -> ReportedHistory:
    history = ReportedHistory(Header(format=TRACE_FORMAT, pods=[]), depth=16)
    for pod in PODS:
        gpus = [TraceGpu(uuid=f"{pod}/{place}", index=place, memory_total_bytes=80 * GIB) for place in range(8)]
        history.add_pod(TracePod(name=pod, gpus_requested=8, gpus=gpus))
    return history


def _live(history: ReportedHistory, steps: int) -> None:
    for number in range(steps):
        t = 200.0 * (number + 1)
        for name, pod in history.pods.items():
            history.present(name, STAGES[number % 10], "actor", t=t)
            for gpu in pod.gpus:
                history.feed(
                    GpuLine(t=t, pod=name, uuid=gpu, utilization=0.1 * (number % 9), power_watts=300.5 + number)
                )
            told = [(gpu, _piece(10 + number / 7, 20.0)) for gpu in pod.gpus for _ in STAGES]
            for place, (_, piece) in enumerate(told):
                piece.stage = STAGES[place % 10]
            history.take_step(name, told, t=t)
        history.pack()


def test_a_gpu_takes_less_than_six_kibibytes() -> None:
    _live(_history(), 2)
    gc.collect()
    tracemalloc.start()
    try:
        history = _history()
        _live(history, 40)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert history.step == 40
    assert [len(past) for past in history.gpus["w-0/0"].past.values()] == [16] * 10
    assert taken / len(history.gpus) < 6 * 1024
