# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs, clusters and pods that come and go in any order: nothing raises, and of what is gone nothing stays."""

from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.controller.builders import gpu, identity, job, owner_of, pod, report
from verl_gpumonitor.model.vocabulary import Phase
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.ports import PodRecord
from verl_gpumonitor_operator.controller.workloads import Workloads

RAY_JOB, RAY_CLUSTER, PYTORCH_JOB = JobKind.RAY_JOB, JobKind.RAY_CLUSTER, JobKind.PYTORCH_JOB
OWNERS = {"c": RAY_CLUSTER, "p": PYTORCH_JOB}
PHASES = st.sampled_from([Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED])
FEW = st.integers(min_value=0, max_value=2)


class World:
    """A few objects of each kind, and what the controller believes of them."""

    def __init__(self) -> None:
        self.workloads = Workloads()
        self.jobs: dict[str, JobKind] = {}
        self.pods: dict[str, PodRecord] = {}
        self.sequence = 0

    def see(self, kind: JobKind, name: str, **more: Any) -> None:
        self.workloads.job_seen(job(kind, name, **more), 1.0)
        self.jobs[f"uid-{name}"] = kind

    def ray_job(self, number: int, phase: Phase) -> None:
        self.see(RAY_JOB, f"j{number}", ray_cluster=f"c{number}", phase=phase)

    def borrower(self, number: int, cluster: int, phase: Phase) -> None:
        self.see(RAY_JOB, f"b{number}", ray_cluster=f"c{cluster}", borrows_cluster=True, phase=phase)

    def cluster(self, number: int, *, owned: bool) -> None:
        self.see(RAY_CLUSTER, f"c{number}", owner=owner_of(RAY_JOB, f"j{number}") if owned else None)

    def pytorch_job(self, number: int, phase: Phase) -> None:
        self.see(PYTORCH_JOB, f"p{number}", phase=phase)

    def pod(self, owner: str, number: int, index: int) -> None:
        made = pod(f"{owner}{number}-{index}", owner_of(OWNERS[owner], f"{owner}{number}"))
        self.pods[made.uid] = made
        self.workloads.pod_seen(made)

    def pod_gone(self, number: int) -> None:
        if self.pods:
            self.workloads.pod_gone(self.pods.pop(sorted(self.pods)[number % len(self.pods)]))

    def job_gone(self, number: int) -> None:
        if self.jobs:
            uid = sorted(self.jobs)[number % len(self.jobs)]
            self.workloads.job_gone(self.jobs[uid], uid, 2.0)

    def report(self, number: int) -> None:
        if self.pods:
            name = self.pods[sorted(self.pods)[number % len(self.pods)]].name
            self.sequence += 1
            item = report(name, sequence=self.sequence, gpus=[gpu(f"GPU-{name}", observed_seconds=self.sequence)])
            self.workloads.accept(identity(name), item, 3.0)

    def told_all(self, number: int) -> None:
        found = sorted(self.workloads.all(), key=lambda one: one.job.uid)
        if found:
            self.workloads.told_all(found[number % len(found)])

    def forget(self, number: int) -> None:
        gone = sorted(one.job.uid for one in self.workloads.all() if one.gone_at is not None)
        if gone:
            self.workloads.forget(gone[number % len(gone)])

    def end(self) -> None:
        for uid, kind in self.jobs.items():
            self.workloads.job_gone(kind, uid, 9.0)
        for workload in list(self.workloads.all()):
            self.workloads.forget(workload.job.uid)
        for record in self.pods.values():
            self.workloads.pod_gone(record)
        self.workloads.take_dirty()


Step = Callable[[World], None]


def step(method: Callable[..., None], *arguments: Any, **more: Any) -> Step:
    return lambda world: method(world, *arguments, **more)


MANY = st.integers(min_value=0, max_value=8)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(step, st.just(World.ray_job), FEW, PHASES),
    st.builds(step, st.just(World.borrower), FEW, FEW, PHASES),
    st.builds(step, st.just(World.cluster), FEW, owned=st.booleans()),
    st.builds(step, st.just(World.pytorch_job), FEW, PHASES),
    st.builds(step, st.just(World.pod), st.sampled_from(sorted(OWNERS)), FEW, FEW),
    *(
        st.builds(step, st.just(method), MANY)
        for method in (World.pod_gone, World.job_gone, World.report, World.told_all, World.forget)
    ),
)
BORROWED_AGAIN: list[Step] = [
    step(World.cluster, 0, owned=False),
    step(World.borrower, 0, 0, Phase.RUNNING),
    step(World.job_gone, 0),
    step(World.cluster, 0, owned=True),
    step(World.forget, 0),
    step(World.borrower, 1, 0, Phase.RUNNING),
]
"""A RayJob is deleted while it runs in a borrowed cluster, which changes before the job is forgotten."""


@given(st.lists(STEPS, max_size=40))
@example(BORROWED_AGAIN)
def test_whatever_comes_and_goes_nothing_raises_and_nothing_stays(steps: list[Step]) -> None:
    world = World()
    for one in steps:
        one(world)
    world.end()
    assert not {name: held for name, held in vars(world.workloads).items() if held}
