# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Running tasks of a cluster: which node and which GPU is in what stage."""

from collections.abc import Sequence

import pytest

from verl_gpumonitor.stages.cluster import ClusterMap, RayActor, RayHost, RayTask, running

WORKER = "create_colocated_worker_cls.<locals>.WorkerDict"
HOSTS = [RayHost(node_id="h", ip="10.0.0.9", has_gpus=False)] + [
    RayHost(node_id=f"n{index}", ip=f"10.0.0.{index}", has_gpus=True) for index in range(3)
]


def actor(actor_id: str, name: str, node: str, class_name: str = WORKER, job: str = "01") -> RayActor:
    return RayActor(actor_id=actor_id, class_name=class_name, name=name, node_id=node, job_id=job)


def task(name: str, actor_id: str = "", node: str = "n0", job: str = "01", begin: float | None = 5.0) -> RayTask:
    return RayTask(
        task_id=f"{name}/{actor_id}/{node}", name=name, node_id=node, actor_id=actor_id, job_id=job, begin=begin
    )


UPDATE = "WorkerDict.actor_rollout_ref_update_actor"
POOL = [actor("w0", "abcdefWorkerDict_0:0", "n0"), actor("w1", "abcdefWorkerDict_1:1", "n1")]
SERVERS = [
    actor("s0", "vllm_server_0_0", "n0", "vLLMHttpServer"),
    actor("s1", "vllm_server_0_1", "n1", "vLLMHttpServer"),
    actor("s2", "vllm_server_1_0", "n2", "vLLMHttpServer"),
]
REWARDS = [actor("r0", "vllm_server_reward_0_0", "n2", "vLLMHttpServer")]
Seen = tuple[str, int | None, str, str]


@pytest.mark.parametrize(
    ("actors", "tasks", "expected"),
    [
        pytest.param(POOL, [], [], id="nothing runs"),
        pytest.param(
            POOL,
            [task(UPDATE, "w0"), task(UPDATE, "w1", "n1")],
            [("10.0.0.0", 0, "update_actor", "actor"), ("10.0.0.1", 1, "update_actor", "actor")],
            id="workers by the rank in their actor's name",
        ),
        pytest.param(
            [], [task(UPDATE, "w0")], [("10.0.0.0", None, "update_actor", "actor")], id="an actor that is not listed"
        ),
        pytest.param(
            [],
            [task("klmIFKWorkerDict_0:3:WorkerDict.__init__", "new")],
            [("10.0.0.0", 3, "init", "unknown")],
            id="a constructor tells its own place",
        ),
        pytest.param(
            [actor("a", "abcdefWorkerDict_0:0", "n0"), actor("b", "ghijklWorkerDict_0:0", "n0")],
            [task(UPDATE, "a"), task("WorkerDict.rollout_generate_sequences", "b")],
            [("10.0.0.0", None, "gen", "rollout"), ("10.0.0.0", None, "update_actor", "actor")],
            id="two pools on a node that both count from 0 are of no rank",
        ),
        pytest.param(
            POOL + SERVERS,
            [task("vLLMHttpServer.generate", "s0")],
            [("10.0.0.0", None, "gen", "rollout"), ("10.0.0.1", None, "gen", "rollout")],
            id="a server says what all nodes of its replica do",
        ),
        pytest.param(
            POOL + SERVERS,
            [task("AgentLoopWorker.generate_sequences", "l0", "h")],
            [(f"10.0.0.{node}", None, "gen", "rollout") for node in range(3)],
            id="an agent loop says that the nodes with servers generate",
        ),
        pytest.param(
            [*POOL, SERVERS[2]],
            [task("AgentLoopWorker.generate_sequences", "l0", "n0"), task(UPDATE, "w0")],
            [("10.0.0.0", 0, "update_actor", "actor"), ("10.0.0.2", None, "gen", "rollout")],
            id="and not the nodes of another pool",
        ),
        pytest.param(
            POOL,
            [task("AgentLoopWorkerTQ.generate_sequences", "l0", "h")],
            [("10.0.0.0", None, "gen", "rollout"), ("10.0.0.1", None, "gen", "rollout")],
            id="without a server, the nodes of its job's workers",
        ),
        pytest.param(
            [],
            [task("AgentLoopWorker.generate_sequences", "l0", "h")],
            [(f"10.0.0.{node}", None, "gen", "rollout") for node in range(3)],
            id="with nothing known, all nodes with GPUs",
        ),
        pytest.param(
            POOL + SERVERS,
            [task("vLLMHttpServer.generate", "s2", "n2"), task("AgentLoopWorker.generate_sequences", "l0", "n2")],
            [(f"10.0.0.{node}", None, "gen", "rollout") for node in range(3)],
            id="loop and server are one thing",
        ),
        pytest.param(
            POOL + SERVERS,
            [task("RewardLoopWorker.compute_score", "c", "h")],
            [("10.0.0.0", None, "reward", "reward"), ("10.0.0.1", None, "reward", "reward")],
            id="scores on CPU are what the job's workers wait for",
        ),
        pytest.param(
            POOL + REWARDS,
            [task("RewardLoopWorker.compute_score", "c", "h"), task("vLLMHttpServer.generate", "r0", "n2")],
            [("10.0.0.2", None, "reward", "reward")],
            id="scores by a reward model are its own pool's",
        ),
        pytest.param(
            POOL,
            [task("TaskRunner.run", "t", "h"), task("MyActor.step", "m"), task("WorkerDict", "w0"), task("f", "")],
            [],
            id="drivers, others' tasks and idle actors are nothing",
        ),
        pytest.param(
            [actor("x", "qrstuvWorkerDict_0:0", "n2", job="02"), *POOL],
            [task("AgentLoopWorker.generate_sequences", "l", "h", job="02")],
            [("10.0.0.2", None, "gen", "rollout")],
            id="a helper speaks for its own job",
        ),
        pytest.param(POOL, [task(UPDATE, "w0", "gone")], [], id="a node that is not listed"),
    ],
)
def test_running(actors: Sequence[RayActor], tasks: Sequence[RayTask], expected: list[Seen]) -> None:
    things = running(tasks, ClusterMap(HOSTS, actors))
    seen = [(thing.place, thing.local_rank, thing.stage, thing.role) for thing in things]
    assert sorted(seen, key=str) == sorted(expected, key=str)


def test_a_node_generates_since_the_first_call() -> None:
    calls = [task("vLLMHttpServer.generate", "s2", "n2", begin=begin) for begin in (7.0, 3.0, None)]
    (thing,) = running(calls, ClusterMap(HOSTS, SERVERS, {"01": "raysubmit_1"}))
    assert (thing.begin, thing.job, thing.pid) == (3.0, "raysubmit_1", None)


def test_attempts_of_a_task_follow_each_other_in_its_actor() -> None:
    (thing,) = running([task(UPDATE, "w0")], ClusterMap(HOSTS, POOL, {"01": "raysubmit_1"}))
    assert (thing.lane, thing.job) == ("w0", "raysubmit_1")
