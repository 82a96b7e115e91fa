# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What names of Ray's tasks tell of verl's release, and that nothing else of them is passed on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.stages.fakeray import URL
from tests.unit.stages.test_ray_state import drive, verl_head
from verl_gpumonitor.advice.catalogue import EXAMINED
from verl_gpumonitor.model.report import MAX_RAY_NAMES
from verl_gpumonitor.stages.releases import RELEASES, SLEEP, telling
from verl_gpumonitor.stages.sources.ray_jobs import RayJobs
from verl_gpumonitor.stages.sources.ray_state import RayState


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WorkerDict.actor_rollout_ref_update_weights", ("actor_rollout_ref_update_weights",)),
        ("WorkerDict.wake_up", ("WorkerDict.wake_up",)),
        ("vLLMHttpServer.wake_up", ("vLLMHttpServer",)),
        ("SGLangHttpServer.sleep", ("SGLangHttpServer", SLEEP)),
        ("ray::critic_compute_values()", ("critic_compute_values",)),
        ("main_task", ("main_task",)),
        ("MyJudge.score_with_hf_abcdefghijkl", ()),
        ("x" * 300 + ".sleep", ()),
        ("", ()),
    ],
)
def test_a_name_tells(name: str, words: tuple[str, ...]) -> None:
    assert telling(name) == words


@given(name=st.text() | st.lists(st.sampled_from([*RELEASES, SLEEP, "mine"])).map(".".join))
def test_nothing_but_known_words_is_told(name: str) -> None:
    assert set(telling(name)) <= RELEASES.keys() | {SLEEP}


def test_all_words_have_room_in_a_report_and_name_examined_releases() -> None:
    assert len(RELEASES) + 1 <= MAX_RAY_NAMES
    for first, last in RELEASES.values():
        assert EXAMINED.index(first) <= EXAMINED.index(last)


def test_a_head_tells_of_each_job_what_its_tasks_tell() -> None:
    head = verl_head(steps=2)
    head.jobs = [*head.jobs, {"job_id": "02000000", "submission_id": "raysubmit_2"}]
    jobs = RayJobs(URL, read=head.read)
    state = RayState(URL, jobs=jobs, read=head.read, clock=head.clock, wall=head.wall)
    drive(head, state, 40)
    jobs.ask()
    told = {info.submission_id: info.ray_names for info in jobs.infos}
    assert told["raysubmit_1"]
    assert set(told["raysubmit_1"]) <= RELEASES.keys() | {SLEEP}
    assert told["raysubmit_2"] == []


def test_names_of_many_tasks_and_jobs_are_bounded() -> None:
    jobs = RayJobs(URL, read=lambda _: b"[]")
    for number in range(30):
        jobs.saw((f"{number}-{n}", f"vLLMHttpServer.call{n}") for n in range(1000))
    assert len(jobs._names) <= 512
    assert len(jobs._seen) <= 5096
