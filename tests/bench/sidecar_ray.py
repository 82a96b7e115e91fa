# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A verl job as a sidecar meets it: Ray's agent and dashboard, processes with titles, marks, and a head's word.

Stages change each five seconds, so that nothing that a sidecar reads is as it was a moment ago.
"""

import json
import os
import socket
import threading
import time

from tests.contract.sidecar.ray import Ray, agent_page
from verl_gpumonitor.model.marks import Mark, MarkState, encode
from verl_gpumonitor.model.report import PodStages, RayStage, Report, ReportAnswer
from verl_gpumonitor.model.stages import StageSource

STAGE_SECONDS = 5.0
METHODS = (
    ("gen", "rollout", "vLLMHttpServer.generate"),
    ("old_log_prob", "actor", "WorkerDict.actor_rollout_ref_compute_log_prob"),
    ("ref", "ref", "WorkerDict.actor_rollout_ref_compute_ref_log_prob"),
    ("update_actor", "actor", "WorkerDict.actor_rollout_ref_update_actor"),
    ("update_weights", "actor", "WorkerDict.actor_rollout_ref_update_weights"),
)
IP = "10.0.0.9"
WORKER_PAGE_BYTES = 72_000
HEAD_PAGE_BYTES = 370_000
OTHER_TASKS = 20
"""Running tasks of others on the cluster."""
IDLE_WORKERS = 16
OTHER_PROCESSES = 24
"""In a worker's pod: Ray's own and forked children, loaders of data, compilers."""


def stage_at(at: float) -> tuple[str, str, str, float]:
    """Return stage, role and method of a moment, and when it began."""
    number = int(at / STAGE_SECONDS)
    return (*METHODS[number % len(METHODS)], number * STAGE_SECONDS)


def answer(report: Report) -> ReportAnswer:
    """Answer as a controller does that heard the head up to ten seconds ago."""
    until = time.time() - 10.0
    begins = [until - back - until % STAGE_SECONDS for back in range(0, 90, int(STAGE_SECONDS))][::-1]
    intervals = []
    for begin in begins:
        stage, role, _, _ = stage_at(begin)
        end = begin + STAGE_SECONDS
        intervals += [RayStage(stage, role, begin, end if end < until else None, rank) for rank in range(8)]
    told = PodStages(source=StageSource.RAY_STATE, known_from=until - 90, known_until=until, intervals=intervals)
    return ReportAnswer(accepted=report.sequence, stages=told)


class Job:
    """The job beside one sidecar."""

    def __init__(self, gpus: int, *, head: bool = False, marks_port: int | None = None) -> None:
        """`marks_port`: where the job marks its stages; None: it does not."""
        self._gpus = gpus
        self._head = head
        self._marks = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._marks_port = marks_port
        self._seq = 0
        self._stop = threading.Event()
        self._marked: tuple[str, float] | None = None
        self.ray = Ray()
        self._turn()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """End."""
        self._stop.set()
        self.ray.close()
        self._marks.close()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self._turn()

    def _turn(self) -> None:
        now = time.time()
        stage, _, method, begin = stage_at(now)
        self.ray.pages["/metrics"] = self._page(method)
        if self._head:
            self.ray.pages |= {
                "/api/v0/tasks": _listing(self._tasks(method, begin)),
                "/api/v0/actors": _listing([]),
                "/api/v0/nodes": _listing([{"node_id": "n0", "node_ip": IP, "resources_total": {"GPU": 8.0}}]),
                "/api/jobs/": json.dumps([_JOB]).encode(),
            }
        if self._marks_port is not None and (self._marked is None or self._marked[0] != stage):
            if self._marked is not None:
                self._mark(MarkState.END, *self._marked)
            self._marked = (stage, now)
            self._mark(MarkState.BEGIN, *self._marked)

    def _page(self, method: str) -> bytes:
        labels = f'Name="{method}",State="RUNNING",Source="executor",NodeAddress="{IP}"'
        tasks = f"ray_tasks{{{labels}}} 8.0\n".encode()
        titles = b"".join(
            f'ray_component_rss_bytes{{Component="ray::{name}",pid="1"}} {float(name == method)}\n'.encode()
            for _, _, name in METHODS
        )
        page = agent_page(list(range(self._gpus))) + tasks + titles
        filler = b'ray_component_uss_bytes{Component="ray::WorkerDict",NodeAddress="10.0.0.9",pid="1"} 1.0\n'
        size = HEAD_PAGE_BYTES if self._head else WORKER_PAGE_BYTES
        return filler * ((size - len(page)) // len(filler)) + page

    def _tasks(self, method: str, begin: float) -> list[dict[str, object]]:
        names = [method] * self._gpus + ["Other.work"] * OTHER_TASKS
        return [
            {
                "task_id": f"{name}-{number}-{begin}",
                "name": name,
                "state": "RUNNING",
                "node_id": "n0",
                "actor_id": "",
                "job_id": "01000000",
                "worker_pid": 1000 + number,
                "start_time_ms": int(begin * 1000),
                "runtime_env_info": {"serialized_runtime_env": "x" * 1400},
            }
            for number, name in enumerate(names)
        ]

    def _mark(self, state: MarkState, stage: str, begin: float) -> None:
        self._seq += 1
        begins, span = state is MarkState.BEGIN, int(begin * 10) % 2**31
        mark = Mark(
            state=state,
            stage=stage,
            t=begin if begins else time.time(),
            process="9f3c01d2a4b5e677",
            pid=1,
            seq=self._seq,
            span=span,
            begin=None if begins else begin,
            open=[span] if begins else [],
        )
        self._marks.sendto(encode(mark) or b"", ("127.0.0.1", self._marks_port))


_JOB = {
    "job_id": "01000000",
    "submission_id": "raysubmit_1",
    "status": "RUNNING",
    "entrypoint": "python3 -m verl.trainer.main_ppo " + " ".join(f"actor.key_{n}=value_{n}" for n in range(80)),
    "start_time": 1_764_537_600_000,
}


def _listing(result: list[dict[str, object]]) -> bytes:
    return json.dumps({"result": True, "msg": "", "data": {"result": {"result": result, "warnings": None}}}).encode()


def in_a_pod(command: list[str], workers: int) -> list[str]:
    """Return a command that runs another in a process namespace of its own, beside those that a Ray worker's pod has.

    These are `workers` that train, workers of Ray that wait for tasks, and others. It is the first child's child.
    """
    script = f"""
        for _ in {{1..{workers}}}; do (exec -a ray::WorkerDict.actor_rollout_ref_update_actor sleep 1000) & done
        for _ in {{1..{IDLE_WORKERS}}}; do (exec -a ray::IDLE sleep 1000) & done
        for _ in {{1..{OTHER_PROCESSES}}}; do sleep 1000 & done
        exec "$@"
    """
    own = ["--pid", "--fork", "--mount-proc", "--kill-child"]
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *rights, *own, "bash", "-c", script, "pod", *command]
