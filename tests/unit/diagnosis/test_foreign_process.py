# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who is foreign on a GPU: contexts of other ranks and strangers, and not a program that works on several GPUs."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.rules import foreign_process
from verl_gpumonitor.model.findings import Finding
from verl_gpumonitor.model.trace import TRACE_FORMAT, GpuLine, GpuProcess, Header, TraceGpu, TracePod, Workload

GIB = 2**30
GPUS = 8
Sizes = Mapping[int, Mapping[int, float]]
"""Process -> GPU's index -> GiB."""


def found(sizes: Sizes, titles: Mapping[int, str] = {}, *, pods: Sequence[str] = ("w",)) -> list[Finding]:
    """Let processes lie where they do for a minute, in each pod."""
    gpus = {
        pod: [TraceGpu(uuid=f"{pod}-{n}", index=n, memory_total_bytes=80 * GIB) for n in range(GPUS)] for pod in pods
    }
    header = Header(
        format=TRACE_FORMAT,
        workload=Workload(kind="RayJob", name="one"),
        entrypoint="python3 train.py",
        pods=[TracePod(name=pod, node_role="worker", gpus=own) for pod, own in gpus.items()],
    )
    diagnosis = Diagnosis(header, rules=[foreign_process.RULE])
    for t in range(0, 62, 2):
        for pod in pods:
            for index in range(GPUS):
                listed = [
                    GpuProcess(pid=pid, title=titles.get(pid), memory_used_bytes=int(places[index] * GIB))
                    for pid, places in sizes.items()
                    if index in places
                ]
                used = sum(process.memory_used_bytes or 0 for process in listed)
                diagnosis.feed(GpuLine(t=t, pod=pod, uuid=f"{pod}-{index}", memory_used_bytes=used, processes=listed))
    return sorted((tracked.finding for tracked in diagnosis.findings), key=lambda one: (one.scope.pods, one.scope.gpus))


RANKS: Sizes = {100 + n: {n: 40.0} for n in range(GPUS)}
CONTEXTS: Sizes = {100 + n: {n: 40.0, 0: 0.5} if n else {0: 40.0} for n in range(GPUS)}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(
            {1: {0: 72.0, **dict.fromkeys(range(1, 8), 30.0)}}, id="one program works on eight GPUs, unevenly"
        ),
        pytest.param({1: {0: 72.0, **dict.fromkeys(range(1, 8), 0.6)}}, id="one program opened contexts on eight GPUs"),
        pytest.param({1: {0: 60.0, 1: 14.0}}, id="one program with its model on two GPUs"),
        pytest.param({n: {2 * n: 50.0, 2 * n + 1: 14.0} for n in range(4)}, id="four programs with two GPUs each"),
        pytest.param({**RANKS, 1: {0: 20.0, 1: 9.0, 2: 9.0}}, id="a reward model over three GPUs beside the ranks"),
        pytest.param({**RANKS, 1: {0: 30.0, 7: 12.0}}, id="a reward model over two GPUs beside the ranks"),
        pytest.param({**RANKS, **{200 + n: {n: 20.0} for n in range(GPUS)}}, id="an engine beside each rank"),
        pytest.param(RANKS, id="each rank on its own"),
    ],
)
def test_who_works_on_a_gpu_is_not_foreign(sizes: Sizes) -> None:
    assert found(sizes) == []


@pytest.mark.parametrize(
    ("sizes", "gpus", "words"),
    [
        pytest.param(CONTEXTS, ["w-0"], "7 processes of other ranks hold 3.5 GiB on GPU 0 of pod w:", id="contexts"),
        pytest.param(
            {**RANKS, 103: {3: 40.0, 5: 0.6}},
            ["w-5"],
            "A process of another rank holds 0.6 GiB on GPU 5 of pod w:",
            id="one rank on a neighbour's",
        ),
        pytest.param(
            {**RANKS, **{100 + n: {n: 40.0, 0: 5.0} for n in range(1, 8)}},
            ["w-0"],
            "7 processes of other ranks hold 35.0 GiB on GPU 0 of pod w:",
            id="ranks that load their checkpoints on GPU 0",
        ),
        pytest.param(
            {**RANKS, 100: {0: 40.0, **dict.fromkeys(range(1, 8), 0.5)}},
            [f"w-{n}" for n in range(1, 8)],
            "A process of another rank holds up to 0.5 GiB on GPU 1 of pod w and 6 more:",
            id="one rank on all the others'",
        ),
    ],
)
def test_contexts_of_other_ranks_are_one_finding_that_names_the_gpus(sizes: Sizes, gpus: list[str], words: str) -> None:
    (one,) = found(sizes)
    assert list(one.scope.gpus) == gpus
    assert one.message.startswith(words)
    assert one.evidence["gpus"] == len(gpus)


def test_strangers_are_one_finding_beside_that_of_the_contexts() -> None:
    titles = dict.fromkeys(RANKS, "python3 train.py") | {7: "python3 serve.py", 8: "python3 other.py"}
    one, other = found({**CONTEXTS, 7: {4: 6.0, 5: 3.0}, 8: {5: 1.0}}, titles)
    assert "other ranks" in one.message
    assert other.message.startswith("'python3 serve.py' and 1 more, which are none of the job's, hold up to 6.0 GiB on")
    assert list(other.scope.gpus) == ["w-4", "w-5"]


def test_each_pod_has_its_own() -> None:
    assert [one.scope.pods for one in found(CONTEXTS, pods=("a", "b"))] == [("a",), ("b",)]


@given(main=st.floats(1.0, 79.0), rest=st.floats(0.1, 79.0), count=st.integers(1, GPUS))
def test_a_program_alone_is_nobodys_guest(main: float, rest: float, count: int) -> None:
    assert found({1: {0: main, **dict.fromkeys(range(1, count), rest)}}) == []
