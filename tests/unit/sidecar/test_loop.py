# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The loop's turn with sources of a few lines and a virtual clock."""

import json
import os

import pytest

from verl_gpumonitor.model.report import ReportAnswer
from verl_gpumonitor.model.samples import GpuProcess, GpuSample, NodeSample, RayAgentSample, ReadingHealth
from verl_gpumonitor.model.vocabulary import Ownership, Source
from verl_gpumonitor_sidecar.join import Terms
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.loop import Loop
from verl_gpumonitor_sidecar.ray_watch import RayView


class World:
    """A node of GPUs, a Ray, and what the loop made of them."""

    def __init__(self, *, requested: int = 1, shared_processes: bool = False) -> None:
        self.now = 100.0
        self.node = NodeSample()
        self.view = RayView()
        self.needed: list[bool] = []
        self.urgent = 0
        self.lines: list[dict[str, object]] = []
        self.fault: Exception | None = None
        self.loop = Loop(
            Terms(gpus_requested=requested),
            node=_Node(self),
            ray=_Ray(self),
            shared_processes=shared_processes,
            journal=Journal(lambda line: self.lines.append(json.loads(line))),
            urgent=self.hurry,
            clock=lambda: self.now,
            unix_clock=lambda: 1e9 + self.now,
        )

    def hurry(self) -> None:
        self.urgent += 1

    def see(self, *gpus: GpuSample) -> None:
        """Let NVML show these."""
        health = ReadingHealth(collections=1, last_success_at=self.now)
        self.node = NodeSample(source=Source.NVML, gpus=gpus, visible=len(gpus), health=health)

    def gpu(self, uuid: str, used: int = 1, *, pid: int | None = None) -> GpuSample:
        return GpuSample(
            uuid=uuid,
            taken_at=self.now,
            memory_taken_at=self.now,
            memory_used_bytes=used,
            memory_total_bytes=100,
            processes=() if pid is None else (GpuProcess(pid=pid),),
        )


class _Node:
    def __init__(self, world: World) -> None:
        self._world = world

    def latest(self) -> NodeSample:
        if self._world.fault:
            raise self._world.fault
        return self._world.node


class _Ray:
    def __init__(self, world: World) -> None:
        self._world = world

    def latest(self) -> RayView:
        return self._world.view

    def set_needed(self, needed: bool) -> None:
        self._world.needed.append(needed)


def test_a_turn_publishes_a_picture_and_says_it_once() -> None:
    world = World()
    for _ in range(3):
        world.see(world.gpu("a"))
        world.loop.turn()
        world.now += 1
    assert [own.sample.uuid for own in world.loop.state.gpus] == ["a"]
    assert [line["message"] for line in world.lines] == ["source of GPU values", "state of a GPU"]


def test_ray_is_needed_until_all_gpus_are_known_and_nvml_reads_them() -> None:
    world = World()
    world.loop.turn()
    world.see(world.gpu("a"))
    world.loop.turn()
    world.node = NodeSample()
    world.view = RayView(agent=RayAgentSample(gpus=(world.gpu("a"),)), agent_at=world.now)
    world.loop.turn()
    assert world.needed == [True, False, True]


def test_what_the_controller_relays_names_the_gpus() -> None:
    world = World()
    world.see(world.gpu("a"), world.gpu("b"))
    world.loop.turn()
    assert world.loop.state.ownership is Ownership.UNKNOWN
    world.loop.take_answer(ReportAnswer(accepted=1))
    world.loop.take_answer(ReportAnswer(accepted=2, gpu_uuids=["b"]))
    world.loop.turn()
    assert [own.sample.uuid for own in world.loop.state.gpus] == ["b"]


@pytest.mark.parametrize(
    ("shared", "pid", "own"),
    [
        pytest.param(True, os.getpid(), ["b"], id="a process of this namespace"),
        pytest.param(True, 2**22 + 7, [], id="a pid that is not in our /proc"),
        pytest.param(False, os.getpid(), [], id="no shared namespace: the pid may be anybody's"),
    ],
)
def test_processes_show_whose_a_gpu_is(shared: bool, pid: int, own: list[str]) -> None:
    world = World(shared_processes=shared)
    world.see(world.gpu("a"), world.gpu("b", pid=pid))
    world.loop.turn()
    assert [gpu.sample.uuid for gpu in world.loop.state.gpus] == own


def test_news_are_passed_on() -> None:
    world = World()
    world.see(world.gpu("a", used=50))
    world.loop.turn()
    assert world.urgent == 0
    world.see(world.gpu("a", used=96))
    world.loop.turn()
    assert world.urgent == 1


def test_a_fault_of_ours_stops_no_turn() -> None:
    world = World()
    world.see(world.gpu("a"))
    world.loop.turn()
    world.fault = RuntimeError("x")
    world.now += 60
    world.loop.turn()
    assert world.loop.healthy()
    assert world.lines[-1]["message"] == "a turn failed for a fault of ours"
    assert [own.sample.uuid for own in world.loop.state.gpus] == ["a"]


def test_a_loop_that_does_not_turn_is_not_healthy() -> None:
    world = World()
    world.now += 29
    assert world.loop.healthy()
    world.now += 1
    assert not world.loop.healthy()
