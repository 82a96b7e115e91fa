# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Several things run at one moment for one GPU: which of them is its stage. Pure."""

from collections.abc import Iterable
from typing import Final

from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.model.vocabulary import UNKNOWN

_TRAINING: Final = frozenset(
    {"old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "save_checkpoint"}
)
_IDLE: Final = frozenset({"other", UNKNOWN, "init"})
_WEIGHT: Final = {UNKNOWN: 0, "other": 1, "init": 2, "reward": 4, "testing": 5, "gen": 6}
_OWN_WORD: Final = 3
_TRAINS: Final = 7


def choose(intervals: Iterable[StageInterval], *, nested: bool = False) -> StageInterval | None:
    """Return the one of some intervals, all of one moment and one GPU, that says what the GPU does; None of none.

    A stage beats `init` and `other`. A process known to be the GPU's beats what holds for the whole pod. Then what
    only a process on the GPU does (an update, log-probabilities) beats generation, which a server or a helper may be
    busy with for another pool, and that beats a reward, mostly computed on CPU. Then the later begin.

    `nested`: of marks, where a stage is inside another by intent and the innermost, the one that began last, holds.
    """
    return max(intervals, key=_innermost if nested else _weight, default=None)


def _weight(interval: StageInterval) -> tuple[bool, bool, int, float, str, str]:
    stage = interval.stage
    weight = _TRAINS if stage in _TRAINING else _WEIGHT.get(stage, _OWN_WORD)
    # The last two settle a tie, so that the order of the intervals does not matter.
    return stage not in _IDLE, interval.local_rank is not None, weight, interval.begin, stage, interval.role


def _innermost(interval: StageInterval) -> tuple[float, bool, bool, int, float, str, str]:
    return interval.begin, *_weight(interval)
