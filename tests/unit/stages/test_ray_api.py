# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Answers of a real dashboard, of older ones, and of nobody's."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.report import MAX_ENTRYPOINT
from verl_gpumonitor.reading.fetch import FetchError
from verl_gpumonitor.stages.cluster import ClusterMap, RayTask, running
from verl_gpumonitor.stages.sources.ray_api import (
    RayApiError,
    RayJobEntry,
    parse_actors,
    parse_hosts,
    parse_jobs,
    parse_tasks,
)
from verl_gpumonitor.stages.sources.ray_jobs import MAX_JOBS, RayJobs

RECORDED = Path(__file__).parent / "ray-2.60"


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


def listing(result: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"result": True, "msg": "", "data": {"result": {"result": result, **more}}}).encode()


def test_a_recorded_cluster() -> None:
    cluster = ClusterMap(parse_hosts(recorded("nodes.json")).items, parse_actors(recorded("actors.json")).items)
    tasks = parse_tasks(recorded("tasks.json"))
    assert tasks.whole
    seen = [(thing.place, thing.stage, thing.local_rank, thing.pid) for thing in running(tasks.items, cluster)]
    assert sorted(seen, key=str) == [
        ("192.0.2.2", "gen", None, None),
        ("192.0.2.2", "update_actor", 0, 21750),
        ("192.0.2.2", "update_actor", 1, 21825),
    ]
    assert {task.begin for task in tasks.items if "update" in task.name} == {1796074098.188, 1796074097.138}


def test_a_recorded_jobs_list() -> None:
    assert parse_jobs(recorded("jobs.json")) == [
        RayJobEntry(
            job_id="01000000",
            status="RUNNING",
            entrypoint="python3 -m verl.trainer.main_ppo trainer.nnodes=1",
            started_at=1796074096.694,
        )
    ]


@pytest.mark.parametrize(
    ("raw", "task"),
    [
        pytest.param(
            {"task_id": "t", "name": "n", "node_id": "h", "worker_pid": "7", "start_time_ms": "1796074098188"},
            RayTask(task_id="t#0", name="n", node_id="h", pid=7, begin=1796074098.188),
            id="numbers as text",
        ),
        pytest.param(
            {"task_id": "t", "func_or_class_name": "n", "node_id": "h", "attempt_number": 2, "start_time_ms": 0},
            RayTask(task_id="t#2", name="n", node_id="h"),
            id="no begin, another attempt, no name but the function's",
        ),
        pytest.param({"task_id": "t", "name": "n", "node_id": None}, None, id="not placed yet"),
        pytest.param({"task_id": "t", "node_id": "h"}, None, id="without any name"),
        pytest.param({}, None, id="without anything"),
        pytest.param(
            {"task_id": "t", "name": "n", "node_id": "h", "worker_pid": -1, "start_time_ms": 1e300},
            RayTask(task_id="t#0", name="n", node_id="h"),
            id="numbers that cannot be",
        ),
    ],
)
def test_a_task(raw: dict[str, Any], task: RayTask | None) -> None:
    assert parse_tasks(listing([raw])).items == (() if task is None else (task,))


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        pytest.param(listing([{}], num_filtered=1), True, id="all of it"),
        pytest.param(listing([{}], num_filtered=2), False, id="cut by the limit"),
        pytest.param(listing([{}]), True, id="not told"),
    ],
)
def test_whether_a_list_is_whole(body: bytes, whole: bool) -> None:
    assert parse_tasks(body).whole is whole


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"<html>", id="another server"),
        pytest.param(b"[" * 100_000, id="too deep"),
        pytest.param(b'{"result": false, "msg": "failed"}', id="a failure"),
        pytest.param(b'{"data": {}}', id="no list"),
        pytest.param(listing([{"node_id": 3}]), id="another type"),
        pytest.param(listing([], warnings=["Failed to query data from GCS"]), id="an empty list for want of an answer"),
    ],
)
def test_what_is_no_answer(body: bytes) -> None:
    for parse in (parse_tasks, parse_actors, parse_hosts):
        with pytest.raises(RayApiError):
            parse(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["data", "result", "name", "node_id", "task_id", "worker_pid", "start_time_ms", "warnings"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.binary(max_size=50) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_no_answer_raises_anything_else(body: bytes) -> None:
    for parse in (parse_tasks, parse_actors, parse_hosts, parse_jobs):
        with contextlib.suppress(RayApiError):
            parse(body)


def jobs_of(*entries: dict[str, Any]) -> RayJobs:
    jobs = RayJobs("http://127.0.0.1:8265/", read=lambda _: json.dumps(list(entries)).encode())
    jobs.ask()
    return jobs


def test_jobs_are_told_without_secrets_and_by_submission_id() -> None:
    jobs = jobs_of(
        {"job_id": "01", "submission_id": "raysubmit_1", "entrypoint": "HF_TOKEN=hf_abcdefghijkl python3 -m x a.b=1"},
        {"job_id": "02", "submission_id": None, "entrypoint": "python3 x.py", "start_time": 1796074096694},
        {"job_id": None, "submission_id": "raysubmit_2", "status": "PENDING"},
    )
    assert jobs.submissions == {"01": "raysubmit_1"}
    assert jobs.job_ids == {"01", "02", ""}
    (first,) = [info for info in jobs.infos if info.submission_id == "raysubmit_1"]
    assert first.entrypoint == "HF_TOKEN=*** python3 -m x a.b=1"


def test_of_many_jobs_the_newest_are_told() -> None:
    jobs = jobs_of(*({"job_id": str(n), "start_time": 1796074096694 + 1000 * n} for n in range(40)))
    assert len(jobs.infos) == MAX_JOBS
    assert [info.started_at for info in jobs.infos[:2]] == [1796074135.694, 1796074134.694]


def test_a_long_command_line_is_cut() -> None:
    assert len(jobs_of({"entrypoint": "x" * 100_000}).infos[0].entrypoint) == MAX_ENTRYPOINT


def test_what_is_known_stays_when_the_list_cannot_be_read() -> None:
    answers: list[bytes | FetchError] = [b'[{"job_id": "01", "submission_id": "s"}]', FetchError("gone"), b"nothing"]

    def read(url: str) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, FetchError):
            raise answer
        return answer

    jobs = RayJobs("http://127.0.0.1:8265", read=read)
    jobs.ask()
    for error in (FetchError, RayApiError):
        with pytest.raises(error):
            jobs.ask()
    assert jobs.submissions == {"01": "s"}
