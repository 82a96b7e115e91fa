# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Stages of a cluster from its State API, on virtual time."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.unit.stages.fakeray import (
    GEN_SECONDS,
    NODES,
    SERVERS,
    STAGES,
    STEP_SECONDS,
    T0,
    URL,
    WORKERS,
    FakeHead,
    Task,
    verl_job,
)
from verl_gpumonitor.model.stages import StageInterval, StageSource
from verl_gpumonitor.reading.fetch import FetchError, FetchStatusError
from verl_gpumonitor.stages.choice import choose
from verl_gpumonitor.stages.sources.ray_jobs import RayJobs
from verl_gpumonitor.stages.sources.ray_state import FIRST_LIMIT, RayState

RUNNER = ("runner", "TaskRunner", "", "head")


def verl_head(steps: int = 4, *, cost: float = 0.005) -> FakeHead:
    return FakeHead(
        tasks=verl_job(steps),
        actors=[*WORKERS, *SERVERS, RUNNER],
        nodes=NODES,
        jobs=[{"job_id": "01000000", "submission_id": "raysubmit_1"}],
        cost=cost,
    )


def source(head: FakeHead) -> RayState:
    jobs = RayJobs(URL, read=head.read)
    return RayState(URL, jobs=jobs, read=head.read, clock=head.clock, wall=head.wall)


def drive(head: FakeHead, state: RayState, until: float) -> None:
    while (due := max(head.now, state.due_at())) < until:
        head.now = due
        state.ask()
    head.now = until


def seconds_of(intervals: Iterable[StageInterval], rank: int, begin: float, end: float) -> dict[str, float]:
    """Seconds in which each stage is a GPU's, counted in hundredths."""
    ours = [each for each in intervals if each.local_rank in (None, rank)]
    found: dict[str, float] = defaultdict(float)
    for index in range(int((end - begin) * 100)):
        at = T0 + begin + index / 100
        stage = choose(each for each in ours if each.begin <= at and (each.end is None or each.end > at))
        found["none" if stage is None else stage.stage] += 0.01
    return found


@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_seconds_of_each_stage_are_right_to_a_second_a_step(node: str, rank: int) -> None:
    head = verl_head(steps=4)
    state = source(head)
    drive(head, state, 3 + 4 * STEP_SECONDS)
    intervals = state.cluster(head.wall()).nodes[dict(NODES)[node]]
    for step in range(3):
        begin = 3 + step * STEP_SECONDS
        found = seconds_of(intervals, rank, begin, begin + STEP_SECONDS)
        for stage, seconds in [("gen", GEN_SECONDS), *((stage, seconds) for stage, _, seconds in STAGES)]:
            assert found[stage] == pytest.approx(seconds, abs=0.8), stage


def test_begins_are_exact_and_name_the_job_the_rank_and_the_process() -> None:
    head = verl_head(steps=1)
    state = source(head)
    drive(head, state, 8 + 2.9)
    update = [each for each in state.cluster(head.wall()).nodes["10.0.0.0"] if each.stage == "old_log_prob"]
    assert sorted((each.local_rank or 0, each.begin, each.job) for each in update) == [
        (0, T0 + 8, "raysubmit_1"),
        (1, T0 + 8, "raysubmit_1"),
    ]
    assert all(each.pid is not None and each.resolution_seconds == pytest.approx(1, abs=0.1) for each in update)


def test_a_job_that_another_reader_of_the_list_met_is_known_here() -> None:
    head = verl_head(steps=1)
    listed, head.jobs = head.jobs, []
    jobs = RayJobs(URL, read=head.read)
    state = RayState(URL, jobs=jobs, read=head.read, clock=head.clock, wall=head.wall)
    drive(head, state, 4)
    head.jobs = listed
    jobs.ask()
    drive(head, state, 12)
    ran = state.cluster(head.wall()).nodes["10.0.0.0"]
    assert {each.job for each in ran if each.stage == "old_log_prob"} == {"raysubmit_1"}


def test_the_head_runs_nothing_but_is_vouched_for() -> None:
    head = verl_head(steps=1)
    state = source(head)
    drive(head, state, 10)
    word = state.word(head.wall(), "10.0.0.9")
    assert (word.source, word.intervals) == (StageSource.RAY_STATE, ())
    assert word.known_until - word.known_from == pytest.approx(7.5, abs=1)
    assert state.cluster(head.wall()).known_until == word.known_until


def test_lists_are_asked_for_when_an_id_is_unknown() -> None:
    head = verl_head(steps=4)
    state = source(head)
    drive(head, state, 60)
    assert head.asked.count("/api/v0/tasks") > 50
    for path in ("/api/v0/nodes", "/api/v0/actors", "/api/jobs/"):
        assert head.asked.count(path) <= 2


def test_a_new_actor_is_asked_for_no_more_often_than_each_10_s() -> None:
    head = verl_head(steps=4)
    head.actors = ()
    state = source(head)
    drive(head, state, 60)
    assert 4 <= head.asked.count("/api/v0/actors") <= 7


def test_a_slow_head_is_asked_seldom_and_no_more_than_what_runs_is_said() -> None:
    head = verl_head(steps=20, cost=0.3)
    state = source(head)
    drive(head, state, 300)
    assert head.asked.count("/api/v0/tasks") <= 16
    assert state.ask_seconds == pytest.approx(30, abs=2)
    assert state.trouble is not None
    assert state.trouble.reason == "StateApiSlow"
    word = state.cluster(head.wall())
    assert word.known_from == word.known_until


def test_after_a_hint_a_slow_head_is_asked_at_once() -> None:
    head = verl_head(steps=20, cost=0.3)
    state = source(head)
    drive(head, state, 290)
    asked = head.asked.count("/api/v0/tasks")
    state.hint()
    drive(head, state, 292)
    assert head.asked.count("/api/v0/tasks") == asked + 1


REFUSED = FetchError("127.0.0.1:8265: Connection refused")
REFUSED.__cause__ = ConnectionRefusedError()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(FetchStatusError(401, "the answer is 'HTTP/1.1 401'"), "DashboardGuarded", id="a token is wanted"),
        pytest.param(FetchStatusError(403, "the answer is 'HTTP/1.1 403'"), "DashboardGuarded", id="another token"),
        pytest.param(REFUSED, "DashboardUnreachable", id="nobody listens"),
        pytest.param(FetchError("the answer took too long"), "DashboardUnreachable", id="nobody answers"),
        pytest.param(FetchStatusError(500, "the answer is 'HTTP/1.1 500'"), "StateApiUnusable", id="a failure"),
        pytest.param(FetchStatusError(404, "the answer is 'HTTP/1.1 404'"), "StateApiUnusable", id="no State API"),
    ],
)
def test_a_dashboard_that_is_of_no_use(error: FetchError, reason: str) -> None:
    head = verl_head()
    head.error = error
    state = source(head)
    assert not state.ask()
    assert state.trouble is not None
    assert state.trouble.reason == reason
    assert 0 < len(state.trouble.message) <= 512
    word = state.cluster(head.wall())
    assert (word.known_from, word.known_until, word.nodes) == (head.wall(), head.wall(), {})
    drive(head, state, 600)
    assert 10 <= len(head.asked) <= 70


def test_a_head_that_is_restarted_begins_anew() -> None:
    head = verl_head(steps=4)
    state = source(head)
    drive(head, state, 15)
    head.error = REFUSED
    drive(head, state, 40)
    assert state.cluster(head.wall()).nodes == {}
    head.error = None
    head.nodes = [("head", "10.0.0.9"), ("m0", "10.0.0.0")]
    head.actors = [("z", "WorkerDict", "xxxxxxWorkerDict_0:1", "m0")]
    head.tasks = [Task(name="WorkerDict.ref_compute_log_prob", node="m0", begin=45, end=99, actor="z", job="02000000")]
    drive(head, state, 70)
    word = state.cluster(head.wall())
    assert word.known_from >= T0 + 40
    ((place, (interval,)),) = word.nodes.items()
    assert (place, interval.stage, interval.begin, interval.end) == ("10.0.0.0", "ref", T0 + 45, None)
    assert (interval.local_rank, interval.job) == (1, "")
    assert state.trouble is None


def test_an_answer_of_nobody_knows_ends_nothing() -> None:
    head = verl_head(steps=1)
    state = source(head)
    drive(head, state, 6)
    head.error = FetchError("the answer took too long")
    head.now += 1
    state.ask()
    head.error = None
    drive(head, state, 9.2)
    gens = [each for each in state.cluster(head.wall()).nodes["10.0.0.0"] if each.stage == "gen"]
    assert [(each.begin, each.end is None) for each in gens] == [(T0 + 3, False)]


def test_a_crowd_of_calls_hides_no_worker() -> None:
    """Thousands of calls to the servers run beside the workers of another pool."""
    crowd = [
        Task(name="vLLMHttpServer.generate", node="n0", begin=2, end=50, actor="s0") for _ in range(3 * FIRST_LIMIT)
    ]
    update = Task(name="WorkerDict.actor_update_actor", node="n1", begin=4, end=20, actor="w10")
    head = verl_head()
    head.tasks = [*crowd, update]
    state = source(head)
    drive(head, state, 30)
    nodes = state.cluster(head.wall()).nodes
    assert [(each.stage, each.begin, each.end) for each in nodes["10.0.0.0"]] == [("gen", T0 + 2, None)]
    ((stage, begin, end),) = [(each.stage, each.begin, each.end) for each in nodes["10.0.0.1"]]
    assert (stage, begin) == ("update_actor", T0 + 4)
    assert end == pytest.approx(T0 + 20, abs=1)


def test_what_an_answer_cannot_hold_has_not_ended() -> None:
    workers = [
        Task(name="WorkerDict.actor_update_actor", node="n1", begin=number / 1000, end=50, actor=f"w{number}")
        for number in range(6 * FIRST_LIMIT)
    ]
    head = verl_head()
    head.tasks = workers
    state = source(head)
    drive(head, state, 8)
    assert all(each.end is None for each in state.cluster(head.wall()).nodes["10.0.0.1"])


@pytest.mark.parametrize("ahead", [40.0, -40.0])
def test_times_of_a_node_are_by_its_own_clock(ahead: float) -> None:
    head = verl_head(steps=3)
    head.ahead = {"n1": ahead}
    state = source(head)
    drive(head, state, 3 + 3 * STEP_SECONDS)
    intervals = state.cluster(head.wall()).nodes["10.0.0.1"]
    for step in range(1, 2):
        begin = 3 + step * STEP_SECONDS + ahead
        found = seconds_of(intervals, 0, begin, begin + STEP_SECONDS)
        for stage, _, seconds in STAGES:
            assert found[stage] == pytest.approx(seconds, abs=1.0), stage


def test_an_interval_that_lasts_is_kept_however_long() -> None:
    head = verl_head()
    head.tasks = [Task(name="WorkerDict.actor_update_actor", node="n0", begin=5, end=1e9, actor="w00")]
    state = source(head)
    drive(head, state, 2000)
    (interval,) = state.cluster(head.wall()).nodes["10.0.0.0"]
    assert (interval.begin, interval.end) == (T0 + 5, None)


@pytest.mark.parametrize(("lora", "stages"), [(True, ["old_log_prob", "ref"]), (False, ["old_log_prob"] * 2)])
def test_the_second_log_prob_of_a_lora_job_is_the_references(lora: bool, stages: list[str]) -> None:
    head = verl_head()
    entrypoint = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_rank={16 * lora}"
    head.jobs = [{"job_id": "01000000", "submission_id": "raysubmit_1", "entrypoint": entrypoint}]
    name = "WorkerDict.actor_rollout_compute_log_prob"
    head.tasks = [Task(name=name, node="n0", begin=begin, end=begin + 3, actor="w00") for begin in (5.0, 8.0)]
    state = source(head)
    drive(head, state, 15)
    intervals = state.cluster(head.wall()).nodes["10.0.0.0"]
    assert [each.stage for each in intervals] == stages
    assert intervals[0].end == intervals[1].begin
