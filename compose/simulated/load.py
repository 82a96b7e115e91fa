# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A job of verl's shape on simulated GPUs, for dashboards and examples: its stages are marked, its GPUs kept busy.

GPU 0 holds more memory than the others, and the last one is the last to end its answers in `gen`: what people come to
look for. Runs until it is ended, or for so many steps.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

import simgpu

from verl_gpumonitor import ResourceMonitor

GIB: Final = 2**30


class Stage(NamedTuple):
    """One stage of a step."""

    name: str
    role: str
    share: float
    """Of the time of a step."""
    load: float
    memory_bytes: int
    """What the usual GPU holds in it."""
    ragged: bool = False
    """The GPUs end one after another, and wait for the last."""


STEP: Final = (
    Stage("gen", "rollout", 0.5, 0.85, 56 * GIB, ragged=True),
    Stage("old_log_prob", "actor", 0.1, 0.75, 40 * GIB),
    Stage("ref", "ref", 0.1, 0.7, 40 * GIB),
    Stage("update_actor", "actor", 0.25, 0.95, 62 * GIB),
    Stage("update_weights", "actor", 0.05, 0.3, 34 * GIB),
)
MORE_ON_FIRST_BYTES: Final = 12 * GIB
SHORTEST: Final = 0.4
"""Part of a ragged stage for which the first GPU to end works."""


def hold(gpu: simgpu.Gpu, size_bytes: int) -> None:
    """Allocate or free until this process holds so much."""
    more = size_bytes - gpu.allocated_bytes
    if more > 0:
        gpu.allocate(more)
    else:
        gpu.free(-more)


def work_seconds(index: int, gpus: int, stage: Stage, seconds: float) -> float:
    """Return how long a GPU works in a stage."""
    if not stage.ragged or gpus < 2:
        return seconds
    return seconds * (SHORTEST + (1.0 - SHORTEST) * index / (gpus - 1))


def run_step(gpus: list[simgpu.Gpu], monitor: ResourceMonitor, *, step: int, seconds: float) -> None:
    """Run one training step."""
    with monitor.stage("step", step=step):
        for stage in STEP:
            with monitor.stage(stage.name, role=stage.role, step=step):
                lasts = stage.share * seconds
                for index, gpu in enumerate(gpus):
                    hold(gpu, stage.memory_bytes + (0 if index else MORE_ON_FIRST_BYTES))
                    gpu.busy(stage.load, seconds=work_seconds(index, len(gpus), stage, lasts))
                time.sleep(lasts)


def main() -> None:
    """Make the GPUs, unless they are there, and train on them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--step-seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="0: until it is ended")
    arguments = parser.parse_args()
    path = Path(os.environ["FAKENVML_STATE"])
    if not path.exists():
        simgpu.init(path, gpus=arguments.gpus)
    monitor = ResourceMonitor(interval=60)
    gpus = [simgpu.Gpu(index) for index in simgpu.visible_gpus()]
    step = 0
    while not arguments.steps or step < arguments.steps:
        step += 1
        run_step(gpus, monitor, step=step, seconds=arguments.step_seconds)


if __name__ == "__main__":
    main()
