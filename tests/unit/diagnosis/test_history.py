# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whose the memory peak is that falls between two samples, when the stage changed between them."""

from collections.abc import Iterator, Sequence

import pytest

from tests.unit.diagnosis.pasts import TOTAL_BYTES, history, stage
from verl_gpumonitor.diagnosis.history import History, straddled
from verl_gpumonitor.model.trace import (
    TRACE_FORMAT,
    GpuLine,
    Header,
    MarkLine,
    Record,
    StepLine,
    TaskLine,
    TraceGpu,
    TracePod,
    Workload,
)

USUAL = {
    "gen": stage(peak=0.85),
    "ref": stage(peak=0.40),
    "update_actor": stage(peak=0.70),
    "update_weights": stage(seconds=5, peak=0.55),
}


@pytest.mark.parametrize(
    ("stages", "peak", "whose"),
    [
        pytest.param("update_actor update_weights", 0.98, "update_weights", id="far above the update: the hand-over's"),
        pytest.param("update_actor other update_weights", 0.98, "update_weights", id="with a pause between them"),
        pytest.param("update_weights gen", 0.98, "update_weights", id="above the engine's own share"),
        pytest.param("update_actor update_weights gen", 0.98, "update_weights", id="all of it between two samples"),
        pytest.param("update_weights gen", 0.855, None, id="as the engine's share: nobody knows"),
        pytest.param("update_actor update_weights", 0.72, "update_actor", id="as an update may take: the update's"),
        pytest.param("ref update_actor", 0.78, "update_actor", id="the one of two trained stages that comes so high"),
        pytest.param("ref update_actor", 0.41, None, id="as either takes"),
        pytest.param("other update_actor", 0.75, "update_actor", id="after a pause, and near to what it takes"),
        pytest.param("ref other", 0.98, None, id="no stage takes twice as much from one step to the next"),
        pytest.param("other gen", 0.95, None, id="an engine's reservation is no peak"),
        pytest.param("update_critic update_actor", 0.90, None, id="nobody knows what a stage takes that is new"),
        pytest.param("update_critic update_weights", 0.98, None, id="nor is a hand-over told from it"),
    ],
)
def test_a_peak_between_two_stages_is_the_one_that_is_left(stages: str, peak: float, whose: str | None) -> None:
    gpu = history(("w", [[USUAL] * 3])).gpus["0-0"]
    assert straddled(gpu, frozenset(stages.split()), peak * TOTAL_BYTES, last=stages.split()[-1]) == whose


@pytest.mark.parametrize(
    ("stages", "peak", "whose"),
    [
        pytest.param("update_actor gen", 0.95, "gen", id="above the update and the engine's share: the hand-over's"),
        pytest.param("update_actor other gen", 0.95, "gen", id="with a pause between them"),
        pytest.param("update_actor gen", 0.72, None, id="as the update may take"),
        pytest.param("gen ref", 0.95, None, id="at the end of generation nothing is handed over"),
        pytest.param("update_actor gen", 0.855, "gen", id="as the engine's share, and far above the update"),
        pytest.param("update_critic gen", 0.95, None, id="nobody knows what a stage takes that is new"),
    ],
)
def test_where_no_hand_over_is_told_it_is_inside_generation(stages: str, peak: float, whose: str | None) -> None:
    untold = {name: took for name, took in USUAL.items() if name != "update_weights"}
    gpu = history(("w", [[untold] * 3])).gpus["0-0"]
    assert straddled(gpu, frozenset(stages.split()), peak * TOTAL_BYTES, last=stages.split()[-1]) == whose


def test_a_trainer_whose_engines_are_elsewhere_hands_nothing_over_inside_its_wait() -> None:
    waits = {"gen": stage(busy=0.0, peak=0.3), "update_actor": stage(peak=0.7)}
    gpu = history(("w", [[waits] * 3])).gpus["0-0"]
    assert straddled(gpu, frozenset({"update_actor", "gen"}), 0.75 * TOTAL_BYTES, last="gen") == "update_actor"


def test_nothing_is_said_of_a_gpu_whose_size_is_not_known() -> None:
    gpu = history(("w", [[USUAL] * 3])).gpus["0-0"]
    gpu.total_bytes = None
    assert straddled(gpu, frozenset({"update_actor", "update_weights"}), TOTAL_BYTES, last="update_weights") is None


STEP_SECONDS = 106.0
SPANS = (("generate_sequences", 0.0, 60.0, 60), ("update_actor", 60.0, 100.0, 68), ("update_weights", 100.0, 106.0, 50))
"""Task, begin and end in a step, memory in percent. The hand-over takes 95% in its first second."""


def _tasks(step: int) -> Iterator[Record]:
    for name, begin, end, _ in SPANS:
        task = f"WorkerDict.actor_rollout_{name}"
        for t, state in ((begin, "begin"), (end, "end")):
            yield TaskLine(t=step * STEP_SECONDS + t, pod="w", pid=1, local_rank=0, name=task, state=state)
    yield StepLine(t=(step + 1) * STEP_SECONDS, step=step)


def _used(t: float) -> int:
    within = t % STEP_SECONDS
    return 95 if 100 < within < 101 else next(used for _, begin, _, used in reversed(SPANS) if within >= begin)


def _samples(interval: float, until: float) -> Iterator[Record]:
    for number in range(1, int(until / interval)):
        t = number * interval + 0.3
        highest = max(_used(t - back * 0.1) for back in range(int(interval / 0.1)))
        now = min(_used(t), 68)
        yield GpuLine(t=t, pod="w", uuid="GPU-0", memory_used_bytes=now, memory_peak_bytes=highest)


@pytest.mark.parametrize("interval", [1.0, 2.0, 5.0, 10.0])
def test_a_hand_over_shorter_than_two_samples_keeps_its_peak(interval: float) -> None:
    gpu = TraceGpu(uuid="GPU-0", index=0, memory_total_bytes=100)
    made = History(Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=1, gpus=[gpu])]))
    steps = 6
    records = [record for step in range(steps) for record in _tasks(step)]
    records += _samples(interval, steps * STEP_SECONDS)
    for record in sorted(records, key=lambda record: record.t):
        made.feed(record)
    # A span that begins in one step and ends in the next is the next one's.
    known = [piece.peak_bytes for piece in made.gpus["GPU-0"].pieces("update_weights")[1:]]
    assert known.count(95.0) >= 3
    assert {piece.peak_bytes for piece in made.gpus["GPU-0"].pieces("update_actor")} == {68.0}


@pytest.mark.parametrize(
    ("kind", "groups", "pools"),
    [
        pytest.param("PyTorchJob", ("Master", "Worker"), [2], id="the master is rank 0 of the same trainer"),
        pytest.param("PyTorchJob", ("master", "worker"), [2], id="the same, as the labels spell it"),
        pytest.param("PyTorchJob", (None, None), [2], id="the same, as the controller and a bundle have it"),
        pytest.param("RayJob", ("headgroup", "gpus"), [1, 1], id="groups of Ray may do different work"),
        pytest.param("RayJob", ("Master", "Worker"), [1, 1], id="whatever their names are"),
        pytest.param("TrainJob", ("node", "server"), [1, 1], id="so may the jobs of a JobSet"),
    ],
)
def test_which_pods_are_one_pool(kind: str, groups: Sequence[str | None], pools: Sequence[int]) -> None:
    pods = [TracePod(name=f"pod-{n}", group=group, gpus=[TraceGpu(uuid=f"GPU-{n}")]) for n, group in enumerate(groups)]
    made = History(Header(format=TRACE_FORMAT, workload=Workload(kind=kind), pods=pods))
    assert [len(gpus) for gpus in made.pools().values()] == pools


def test_a_master_without_gpus_is_no_member() -> None:
    pods = [
        TracePod(name="m", group="Master", gpus=[]),
        TracePod(name="w", group="Worker", gpus=[TraceGpu(uuid="GPU-0")]),
    ]
    made = History(Header(format=TRACE_FORMAT, workload=Workload(kind="PyTorchJob"), pods=pods))
    assert {pool: [gpu.pod.name for gpu in gpus] for pool, gpus in made.pools().items()} == {"": ["w"]}


@pytest.mark.parametrize(
    ("tells_peaks", "peak"),
    [pytest.param(True, None, id="told, of two stages"), pytest.param(False, 15, id="not told")],
)
def test_what_is_in_use_stands_for_a_peak_only_where_no_line_tells_one(tells_peaks: bool, peak: float | None) -> None:
    """Samples are so far apart that a stage has one alone, whose span began in the stage before."""
    gpu = TraceGpu(uuid="GPU-0", index=0, memory_total_bytes=100)
    made = History(Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=1, gpus=[gpu])]))
    records: list[Record] = [
        GpuLine(t=t, pod="w", uuid="GPU-0", memory_used_bytes=used, memory_peak_bytes=36 if tells_peaks else None)
        for t, used in ((80.0, 30), (90.0, 30), (100.0, 15))
    ]
    for name, t in (("update_actor", 70.0), ("compute_log_prob", 94.0)):
        task = f"WorkerDict.actor_rollout_{name}"
        records.append(TaskLine(t=t, pod="w", pid=1, local_rank=0, name=task, state="begin"))
        records.append(TaskLine(t=t + 23.9, pod="w", pid=1, local_rank=0, name=task, state="end"))
    for record in sorted(records, key=lambda record: record.t):
        made.feed(record)
    assert made.gpus["GPU-0"].now["old_log_prob"].peak_bytes == peak


@pytest.mark.parametrize(
    ("begins", "peaks", "peak"),
    [
        pytest.param(99.9, (80, 80, 80, 30, 30), 30, id="it begins before the sample"),
        pytest.param(100.0, (80, 80, 80, 30, 30), 30, id="just then"),
        pytest.param(100.1, (80, 80, 80, 30, 30), 30, id="after it"),
        pytest.param(97.0, (80, 80, 80, 30, 30), 30, id="it is told two seconds early"),
        pytest.param(97.0, (80, 80, 80, 78, 79), 80, id="it has what was there before"),
        pytest.param(97.0, (40, 40, 80, 30, 30), 80, id="it takes it itself, for a moment"),
    ],
)
def test_a_stage_has_not_the_memory_that_the_one_before_left_to_its_first_sample(
    begins: float, peaks: tuple[int, ...], peak: int
) -> None:
    gpu = TraceGpu(uuid="GPU-0", index=0, memory_total_bytes=100)
    made = History(Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=1, gpus=[gpu])]))
    made.feed(TaskLine(t=50.0, pod="w", pid=1, local_rank=0, name="WorkerDict.init_model", state="begin"))
    records: list[Record] = [
        GpuLine(t=t, pod="w", uuid="GPU-0", memory_used_bytes=used, memory_peak_bytes=used)
        for t, used in zip((96.0, 98.0, 100.0, 102.0, 104.0), peaks, strict=True)
    ]
    name = "WorkerDict.actor_rollout_compute_log_prob"
    begin = TaskLine(t=begins, pod="w", pid=1, local_rank=0, name=name, state="begin")
    for record in sorted([begin, *records], key=lambda record: record.t):
        made.feed(record)
    assert made.gpus["GPU-0"].now["old_log_prob"].peak_bytes == peak


@pytest.mark.parametrize("seconds", [1.0, 2.5, 30.0])
def test_a_short_stage_at_the_end_of_a_step_has_the_memory_that_stays(seconds: float) -> None:
    """Memory is the same all the time, and the step ends before another sample of its last stage."""
    gpu = TraceGpu(uuid="GPU-0", index=0, memory_total_bytes=100)
    made = History(Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=1, gpus=[gpu])]))
    records: list[Record] = [
        GpuLine(t=0.5 * number, pod="w", uuid="GPU-0", memory_used_bytes=90, memory_peak_bytes=90)
        for number in range(160)
    ]
    for number in range(4):
        begin = number * (4.0 + seconds)
        for name, state, t in (
            ("gen", "begin", begin),
            ("gen", "end", begin + 4.0),
            ("update_actor", "begin", begin + 4.0),
            ("update_actor", "end", begin + 4.0 + seconds),
        ):
            records.append(MarkLine(t=t + 0.1, pod="w", rank=0, stage=name, role="actor", state=state))
    for record in sorted(records, key=lambda record: record.t):
        made.feed(record)
    pieces = made.gpus["GPU-0"].pieces("update_actor", 2)
    assert [piece.peak_bytes for piece in pieces] == [90, 90]


def test_what_a_stage_takes_on_most_gpus_of_a_pod_it_may_take_on_one() -> None:
    unlucky = {**USUAL, "ref": stage(peak=0.25)}
    made = history(("w", [[USUAL] * 3, [unlucky] * 3, [USUAL] * 3]))
    took = {
        gpu.uuid: straddled(gpu, frozenset({"other", "ref"}), 0.42 * TOTAL_BYTES, last="ref")
        for gpu in made.gpus.values()
    }
    assert took == dict.fromkeys(made.gpus, "ref")


def test_one_peak_put_down_wrongly_draws_no_others_after_it() -> None:
    wrong = {**USUAL, "ref": stage(peak=0.80)}
    gpu = history(("w", [[USUAL, USUAL, wrong]])).gpus["0-0"]
    assert straddled(gpu, frozenset({"other", "ref"}), 0.85 * TOTAL_BYTES, last="ref") is None
