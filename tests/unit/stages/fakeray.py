# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A Ray head on virtual time: tasks with known begins and ends, answered as late and as slowly as a real one does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from verl_gpumonitor.reading.fetch import FetchError

URL = "http://127.0.0.1:8265"
T0 = 1_800_000_000.0
"""Unix time at which virtual time begins."""


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    node: str
    begin: float
    """Seconds of virtual time, by the head's clock."""
    end: float
    actor: str = ""
    job: str = "01000000"


@dataclass(kw_only=True)
class FakeHead:
    """Its `read` takes the place of a request. `now` is virtual time, which requests move on."""

    tasks: Sequence[Task] = ()
    actors: Sequence[tuple[str, str, str, str]] = ()
    """Id, class, name, node."""
    nodes: Sequence[tuple[str, str]] = ()
    """Id and IP; all but `head` have GPUs."""
    jobs: Sequence[dict[str, Any]] = ()
    cost: float = 0.005
    lag: float = 0.3
    ahead: dict[str, float] = field(default_factory=dict)
    """How far the clocks of nodes are ahead."""
    error: FetchError | None = None
    now: float = 0.0
    asked: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return T0 + self.now

    def read(self, url: str) -> bytes:
        assert url.startswith(URL)
        parts = urlsplit(url.removeprefix(URL))
        self.asked.append(parts.path)
        if self.error is not None:
            raise self.error
        query = parse_qsl(parts.query)
        answer: Any
        if parts.path == "/api/v0/tasks":
            answer = self._tasks(query)
            self.now += self.cost
        elif parts.path == "/api/v0/actors":
            keys = ("actor_id", "class_name", "name", "node_id")
            answer = _listing([{**dict(zip(keys, row, strict=True)), "job_id": "01000000"} for row in self.actors])
        elif parts.path == "/api/v0/nodes":
            answer = _listing(
                [
                    {"node_id": node, "node_ip": ip, "resources_total": {} if node == "head" else {"GPU": 4.0}}
                    for node, ip in self.nodes
                ]
            )
        else:
            assert parts.path == "/api/jobs/"
            answer = list(self.jobs)
        self.now += 0.003
        return json.dumps(answer).encode()

    def _tasks(self, query: list[tuple[str, str]]) -> Any:
        limit = int(dict(query)["limit"])
        keys, signs, values = ([value for key, value in query if key == f"filter_{what}"] for what in _FILTERS)
        filters = list(zip(keys, signs, values, strict=True))
        assert filters[0] == ("state", "=", "RUNNING")
        left_out = {value for key, sign, value in filters[1:] if (key, sign) == ("name", "!=")}
        seen = self.now - self.lag
        running = [
            (number, task)
            for number, task in enumerate(self.tasks)
            if task.begin <= seen < task.end and task.name not in left_out
        ]
        return _listing([self._record(number, task) for number, task in running][:limit], num_filtered=len(running))

    def _record(self, number: int, task: Task) -> dict[str, Any]:
        began = T0 + task.begin + self.ahead.get(task.node, 0.0)
        return {
            "task_id": f"t{number}",
            "attempt_number": 0,
            "name": task.name,
            "state": "RUNNING",
            "job_id": task.job,
            "actor_id": task.actor,
            "node_id": task.node,
            "worker_pid": 1000 + number,
            "start_time_ms": round(began * 1000),
        }


_FILTERS = ("keys", "predicates", "values")


def _listing(result: list[Any], **more: Any) -> Any:
    return {"result": True, "msg": "", "data": {"result": {"result": result, "warnings": None, **more}}}


NODES = [("head", "10.0.0.9"), ("n0", "10.0.0.0"), ("n1", "10.0.0.1")]
WORKERS = [
    (f"w{node}{rank}", "create_colocated_worker_cls.<locals>.WorkerDict", f"kq3vTzWorkerDict_{node}:{rank}", f"n{node}")
    for node in range(2)
    for rank in range(2)
]
SERVERS = [(f"s{node}", "vLLMHttpServer", f"vllm_server_{node}_0", f"n{node}") for node in range(2)]
STAGES = (
    ("old_log_prob", "compute_log_prob", 2.0),
    ("ref", "compute_ref_log_prob", 1.5),
    ("update_actor", "update_actor", 5.0),
    ("update_weights", "update_weights", 1.5),
)
GEN_SECONDS = 5.0
ADV_SECONDS = 0.2
STEP_SECONDS = GEN_SECONDS + ADV_SECONDS + sum(seconds for _, _, seconds in STAGES)


def verl_job(steps: int, *, begin: float = 3.0, calls: int = 3) -> list[Task]:
    """Tasks of a colocated job on two nodes with two GPUs each, whose stages last known times."""
    tasks = [Task(name="TaskRunner.run", node="head", begin=begin - 1, end=1e9, actor="runner")]
    at = begin
    for _ in range(steps):
        tasks += [
            Task(name="vLLMHttpServer.generate", node=f"n{node}", begin=at + 0.01 * call, end=end, actor=f"s{node}")
            for node in range(2)
            for call in range(calls)
            for end in [at + GEN_SECONDS - 0.02 * call]
        ]
        at += GEN_SECONDS
        for stage, method, seconds in STAGES:
            at += ADV_SECONDS if stage == "update_actor" else 0.0
            name = f"WorkerDict.actor_rollout_ref_{method}"
            tasks += [
                Task(name=name, node=node, begin=at, end=at + seconds, actor=actor) for actor, _, _, node in WORKERS
            ]
            at += seconds
    return tasks
