# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which GPUs of one pool do the same work. Pure.

A pool is a group of pods, and an asynchronous trainer may lay its trained ranks and its rollout engines in one group,
even in one pod: GPUs of the one never generate, those of the other never train. To compare them, or to take the mean
of both, tells nothing.
"""

from collections.abc import Sequence
from typing import Final

from .history import GpuHistory
from .rule import TRAINING
from .work import GEN

GENERATES: Final = 0.1
"""Load in a rollout of a GPU that takes part in it: tools and long tails leave it low."""
_ROLLOUTS: Final = 3


def trains(gpu: GpuHistory) -> bool:
    """Say whether a training stage was ever seen on it."""
    return any(stage in TRAINING for stage in gpu.past)


def generates(gpu: GpuHistory) -> bool:
    """Say whether it worked in one of the last rollouts."""
    return any((piece.utilization or 0.0) >= GENERATES for piece in gpu.pieces(GEN, _ROLLOUTS))


def alike(gpus: Sequence[GpuHistory]) -> list[Sequence[GpuHistory]]:
    """Cut a pool into GPUs that do the same work: one part, or those that train and those that only generate.

    A GPU that does neither is left where the rollout is: there it is missed.
    """
    trained = [gpu for gpu in gpus if trains(gpu)]
    if not trained or len(trained) == len(gpus):
        return [gpus]
    others = [gpu for gpu in gpus if not trains(gpu)]
    serving = dict.fromkeys(gpu for gpu in others if generates(gpu))
    if not serving:
        return [gpus]
    if not any(generates(gpu) for gpu in trained):
        return [trained, others]
    return [[gpu for gpu in gpus if gpu not in serving], [*serving]]
