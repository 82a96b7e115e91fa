# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Stands in for `python3 -m verl.trainer.main_ppo` on simulated GPUs: verl's shape on real Ray, without a model.

What a monitor sees of a verl job is as verl has it: a driver with Hydra overrides on its command line, a TaskRunner
actor, one placement group per node, WorkerDict actors with a third of a GPU each and verl's method names, a rollout
server per node, and verl's console line after each step. Instead of training, each stage holds simulated GPU memory
and keeps the GPUs busy for a while.

`SCENARIO` in the environment of the workers: `balanced`; `hot-gpu0`, where one GPU does nearly all the work;
`oom-course`, where `update_actor` takes more memory with each step, until somebody mends it after nine of them; `hang`,
where in the fourth update one rank stands still and all others spin for it, for `HANG_SECONDS` (120), or until the file
/tmp/hang-is-over is there.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray  # type: ignore[import-not-found,unused-ignore]
import simgpu
from ray.util.placement_group import PlacementGroup, placement_group  # type: ignore[import-not-found,unused-ignore]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # type: ignore[import-not-found,unused-ignore]

GIB = 2**30
WORKERS_PER_GPU = 3
"""verl's `max_colocate_count`: each worker takes this part of a GPU, as Ray counts them."""
PREFIX = "kq3vTz"
"""verl begins the names of its workers with six random characters."""

STAGES = (
    ("old_log_prob", "actor_rollout_ref_compute_log_prob", 2.0),
    ("ref", "actor_rollout_ref_compute_ref_log_prob", 1.5),
    ("update_actor", "actor_rollout_ref_update_actor", 5.0),
    ("update_weights", "actor_rollout_ref_update_weights", 1.5),
)
"""Stages of the workers in their order: verl's timer, verl's method, seconds."""
GEN_SECONDS = 5.0
ADV_SECONDS = 0.2

# Shares of a GPU's peak. The sum is highest in update_actor.
ROLLOUT_ASLEEP, ROLLOUT_AWAKE = 0.03, 0.55
COURSE_FIRST_GIB, COURSE_MORE_GIB, COURSE_STEPS = 60, 2, 9
"""The course of memory: what the first update holds, how much more each next one, and after how many it is mended."""
HANGING_RANK, HANGING_UPDATE = 1, 4
SPIN_WATTS, STILL_WATTS = 130.0, 70.0
"""Power of a GPU that waits for a peer in a collective, and of one that does nothing."""
HANG_IS_OVER = Path("/tmp/hang-is-over")  # noqa: S108 - in the job's own container
ACTOR_RESIDENT, ACTOR_LOG_PROB, ACTOR_UPDATE = 0.35, 0.60, 0.97


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one GPU is given to do: its utilisation in the heavy stages, and the peak of its memory."""

    utilization: float
    peak_bytes: int


def scenario() -> str:
    """Return the scenario of the worker that asks: as a constant, Ray would bring it the driver's."""
    return os.environ.get("SCENARIO", "balanced")


def course_bytes(update: int) -> int:
    """Return what an update holds in the course of memory: more with each, and little again once it is mended."""
    if update > COURSE_STEPS:
        return COURSE_FIRST_GIB * GIB * 3 // 4
    return (COURSE_FIRST_GIB + COURSE_MORE_GIB * (update - 1)) * GIB


def work_of(rank: int) -> Work:
    """Return the work of a rank, as the scenario shares it out."""
    if scenario() != "hot-gpu0":
        return Work(utilization=(60 + rank % 6) / 100, peak_bytes=(36 + rank % 5) * GIB)
    if rank == 0:
        return Work(utilization=0.85, peak_bytes=78 * GIB)
    return Work(utilization=(10 + rank % 3) / 100, peak_bytes=(18 + rank % 3) * GIB)


def hold(gpu: simgpu.Gpu, size_bytes: int) -> None:
    """Allocate or free until this process holds so much of the GPU."""
    more = size_bytes - gpu.allocated_bytes
    if more > 0:
        gpu.allocate(more)
    else:
        gpu.free(-more)


def create_colocated_worker_cls() -> type:
    """Make the class in which verl joins all roles that share a GPU; Ray shows its name as verl's."""

    class WorkerDict:
        """One process on one GPU, actor and reference in turn."""

        def __init__(self, rank: int) -> None:
            self._rank = rank
            self._work = work_of(rank)
            self._gpu = simgpu.Gpu.cuda()
            self._updates = 0

        def actor_rollout_ref_init_model(self, seconds: float) -> None:
            hold(self._gpu, int(ACTOR_RESIDENT * self._work.peak_bytes))
            time.sleep(seconds)

        def actor_rollout_ref_compute_log_prob(self, seconds: float) -> None:
            self._run(seconds, memory=ACTOR_LOG_PROB)

        def actor_rollout_ref_compute_ref_log_prob(self, seconds: float) -> None:
            self._run(seconds, memory=ACTOR_LOG_PROB)

        def actor_rollout_ref_update_actor(self, seconds: float) -> None:
            self._updates += 1
            if scenario() == "oom-course":
                hold(self._gpu, course_bytes(self._updates))
            if scenario() == "hang" and self._updates == HANGING_UPDATE:
                self._hang(float(os.environ.get("HANG_SECONDS", "120")))
            self._run(seconds, memory=max(ACTOR_UPDATE, self._gpu.allocated_bytes / self._work.peak_bytes))

        def actor_rollout_ref_update_weights(self, seconds: float) -> None:
            self._run(seconds, memory=ACTOR_RESIDENT)

        def _run(self, seconds: float, *, memory: float) -> None:
            """Be busy for a stage, with a share of the peak in memory, then give back all but the weights."""
            hold(self._gpu, int(memory * self._work.peak_bytes))
            with self._gpu.busy(self._work.utilization):
                time.sleep(seconds)
            hold(self._gpu, int(ACTOR_RESIDENT * self._work.peak_bytes))

        def _hang(self, seconds: float) -> None:
            """Wait in a collective: resident, at low power, and one of all not even that."""
            still = self._rank == HANGING_RANK
            until = time.monotonic() + seconds
            with self._gpu.busy(0.0 if still else 1.0, power_watts=STILL_WATTS if still else SPIN_WATTS):
                while time.monotonic() < until and not HANG_IS_OVER.exists():
                    time.sleep(0.5)
            self._gpu.power(None)

    return WorkerDict


class vLLMHttpServer:  # noqa: N801 - verl's own name, which Ray shows
    """The rollout engine of one node: asleep while the workers train, and all of its GPUs busy in `generate`."""

    def __init__(self, node_rank: int, gpus_per_node: int) -> None:
        self._gpus = [simgpu.Gpu(index) for index in range(gpus_per_node)]
        self._works = [work_of(node_rank * gpus_per_node + index) for index in range(gpus_per_node)]
        self.sleep()

    def wake_up(self) -> None:
        """Take the memory for weights and KV cache."""
        self._hold(ROLLOUT_AWAKE)

    def generate(self, seconds: float) -> None:
        """Keep all GPUs of the node busy."""
        for gpu, work in zip(self._gpus, self._works, strict=True):
            gpu.busy(work.utilization, seconds=seconds)
        time.sleep(seconds)

    def sleep(self) -> None:
        """Give the memory to the workers."""
        self._hold(ROLLOUT_ASLEEP)

    def _hold(self, share: float) -> None:
        for gpu, work in zip(self._gpus, self._works, strict=True):
            hold(gpu, int(share * work.peak_bytes))


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Place an actor on one bundle of a node's placement group, which is one GPU."""
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


class TaskRunner:
    """verl's own driver: an actor of its own that starts the workers and runs the steps."""

    def run(self, config: dict[str, str]) -> None:
        """Place servers and workers, then train for so many steps as `config`, the overrides, says."""
        nodes = int(config.get("trainer.nnodes", "1"))
        gpus = int(config.get("trainer.n_gpus_per_node", "4"))
        groups = [placement_group([{"GPU": 1, "CPU": WORKERS_PER_GPU}] * gpus, "STRICT_PACK") for _ in range(nodes)]
        ray.get([group.ready() for group in groups])
        self._servers = [self._start_server(node, gpus, group) for node, group in enumerate(groups)]
        self._workers = [
            self._start_worker(node, local_rank, gpus, group)
            for node, group in enumerate(groups)
            for local_rank in range(gpus)
        ]
        self._all("actor_rollout_ref_init_model", 2.0)
        for step in range(1, int(config.get("trainer.total_training_steps", "12")) + 1):
            print(console_line(step, self._step()), flush=True)

    def _start_worker(self, node: int, local_rank: int, gpus: int, group: PlacementGroup) -> ray.actor.ActorHandle:
        options = {
            "name": f"{PREFIX}WorkerDict_{node}:{local_rank}",
            "num_cpus": 1,
            "num_gpus": 1 / WORKERS_PER_GPU,
            "scheduling_strategy": in_bundle(group, local_rank),
        }
        return ray.remote(create_colocated_worker_cls()).options(**options).remote(node * gpus + local_rank)

    def _start_server(self, node: int, gpus: int, group: PlacementGroup) -> ray.actor.ActorHandle:
        options = {
            "name": f"vllm_server_{node}_0",
            "num_cpus": 1,
            "max_concurrency": 4,
            "scheduling_strategy": in_bundle(group, 0),
        }
        return ray.remote(vLLMHttpServer).options(**options).remote(node, gpus)

    def _all(self, method: str, seconds: float) -> None:
        ray.get([getattr(worker, method).remote(seconds) for worker in self._workers])

    def _rollout(self) -> None:
        ray.get([server.generate.remote(GEN_SECONDS) for server in self._servers])
        ray.get([server.sleep.remote() for server in self._servers])

    def _step(self) -> dict[str, float]:
        """Run one step of GRPO. Returns seconds by verl's timer names, in their order."""
        begin = time.monotonic()
        ray.get([server.wake_up.remote() for server in self._servers])
        seconds = {}
        at = time.monotonic()
        self._rollout()
        seconds["gen"] = time.monotonic() - at
        for stage, method, duration in STAGES:
            if stage == "update_actor":
                time.sleep(ADV_SECONDS)
                seconds["adv"] = ADV_SECONDS
            at = time.monotonic()
            self._all(method, duration)
            seconds[stage] = time.monotonic() - at
        seconds["step"] = time.monotonic() - begin
        return seconds


def console_line(step: int, seconds: dict[str, float]) -> str:
    """Write a step as verl's console logger does."""
    timings = [f"timing_s/{stage}:{value:.3f}" for stage, value in seconds.items()]
    return " - ".join([f"step:{step}", *timings, f"training/global_step:{step}"])


def overrides(arguments: list[str]) -> dict[str, str]:
    """Read `key=value` as Hydra does, whose `+` and `++` before a key are dropped."""
    pairs = (argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    return dict(pairs)


def main() -> None:
    """Start Ray's client and run the trainer in its own actor, as verl does."""
    ray.init()
    runner = ray.remote(TaskRunner).options(num_cpus=1).remote()
    ray.get(runner.run.remote(overrides(sys.argv[1:])))


if __name__ == "__main__":
    main()
