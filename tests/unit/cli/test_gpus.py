# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The first look at a host's GPUs: what a command waits for, and when it gives up."""

from collections.abc import Sequence
from typing import cast

import pytest

from verl_gpumonitor.cli.gpus import NoGpuError, await_first
from verl_gpumonitor.model.samples import GpuSample, NodeSample, ReadingHealth
from verl_gpumonitor.model.vocabulary import UnavailableReason
from verl_gpumonitor.reading.sampler import Sampler

SEEN = NodeSample(gpus=(GpuSample(uuid="GPU-a", index=0),), visible=1, health=ReadingHealth(collections=1, timeouts=1))
HUNG = NodeSample(unavailable=UnavailableReason.NOT_RESPONDING, health=ReadingHealth(timeouts=1))


def showing(*pictures: NodeSample) -> Sampler:
    """A sampler that shows each picture once, and the last for good."""

    class Shown:
        def __init__(self) -> None:
            self.left = list(pictures)

        def latest(self) -> NodeSample:
            return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    return cast("Sampler", Shown())


@pytest.mark.parametrize("before", [[], [NodeSample()], [HUNG], [NodeSample(), HUNG, HUNG]])
def test_a_hang_before_the_first_pass_is_not_yet_the_whole_answer(before: Sequence[NodeSample]) -> None:
    assert await_first(showing(*before, SEEN), within=5.0) is SEEN


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (NodeSample(unavailable=UnavailableReason.NO_LIBRARY), "no NVIDIA driver"),
        (NodeSample(unavailable=UnavailableReason.NO_LIBRARY, health=ReadingHealth(failures=1)), "no NVIDIA driver"),
        (
            NodeSample(unavailable=UnavailableReason.NOT_RESPONDING, health=ReadingHealth(failures=1, timeouts=1)),
            "does not answer",
        ),
        (NodeSample(visible=0, health=ReadingHealth(collections=1)), "shows no GPU"),
    ],
)
def test_what_is_settled_is_said_at_once(last: NodeSample, words: str) -> None:
    with pytest.raises(NoGpuError, match=words):
        await_first(showing(NodeSample(), last), within=3600.0)


@pytest.mark.parametrize("last", [NodeSample(), HUNG])
def test_who_never_answers_is_given_up(last: NodeSample) -> None:
    with pytest.raises(NoGpuError, match="does not answer"):
        await_first(showing(last), within=0.1)
