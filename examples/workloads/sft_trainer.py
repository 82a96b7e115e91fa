# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Stands in for `torchrun -m verl.trainer.sft_trainer` on simulated GPUs: the processes, without a model.

Started plainly, it starts itself once for each GPU, as torchrun does, with RANK, LOCAL_RANK and WORLD_SIZE in the
environment. The training-operator's own variables say which node this is.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping

import simgpu

GIB = 2**30
STEP_SECONDS = 3.0
PAUSE_SECONDS = 0.3
"""Between two steps: reading the next batch."""


def overrides(arguments: list[str]) -> dict[str, str]:
    """Read `key=value` as Hydra does, whose `+` and `++` before a key are dropped."""
    pairs = (argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    return dict(pairs)


def rank_environment(local_rank: int, gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one rank. The operator's RANK and WORLD_SIZE count nodes, torchrun's count GPUs."""
    node, nodes = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    ranks = {"RANK": node * gpus + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": nodes * gpus}
    return {**environment, **{name: str(value) for name, value in ranks.items()}}


def launch(gpus: int) -> int:
    """Start one process for each GPU and wait for all. Returns 0, or 1 if one of them failed."""
    command = [sys.executable, "-u", "-m", "verl.trainer.sft_trainer", *sys.argv[1:]]
    ranks = [subprocess.Popen(command, env=rank_environment(local, gpus, os.environ)) for local in range(gpus)]
    codes = [process.wait() for process in ranks]
    return int(any(codes))


def train(steps: int) -> None:
    """Hold memory on this rank's GPU and be busy, step by step. The first rank writes the console."""
    rank = int(os.environ["RANK"])
    gpu = simgpu.Gpu(int(os.environ["LOCAL_RANK"]))
    gpu.allocate((44 + rank % 3) * GIB)
    for step in range(1, steps + 1):
        with gpu.busy(0.78 + 0.01 * (rank % 4)):
            time.sleep(STEP_SECONDS)
        if rank == 0:
            line = f"step:{step} - train/loss:{2.1 / step**0.5:.3f} - train/time(s):{STEP_SECONDS:.3f}"
            print(line, flush=True)
        time.sleep(PAUSE_SECONDS)


def main() -> int:
    """Be the launcher, or one rank of it."""
    config = overrides(sys.argv[1:])
    if "LOCAL_RANK" not in os.environ:
        return launch(int(config.get("trainer.n_gpus_per_node", "4")))
    train(int(config.get("trainer.total_training_steps", "25")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
