# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which stage a pod's GPUs are in while others work."""

import pytest

from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.diagnosis.work import Worker
from verl_gpumonitor.model.trace import TRACE_FORMAT, Header, MarkLine, StepLine, TaskLine, TraceGpu, TracePod

WORKS = "WorkerDict.actor_rollout_update_actor"


def _stage(calls: list[tuple[str, str]], *, pools: tuple[str, str] = ("g", "g")) -> str:
    """Return the trainer's stage after calls, each a pod and a method of its server, while answers are generated."""
    header = Header(
        format=TRACE_FORMAT,
        pods=[
            TracePod(name=name, group=pool, gpus_requested=1, gpus=[TraceGpu(uuid=name)])
            for name, pool in zip(("trainer", "rollout"), pools, strict=True)
        ],
    )
    history = History(header)
    calls = [("trainer", WORKS), *calls]
    for t, (pod, method) in enumerate(calls):
        name = method if "." in method else f"vLLMHttpServer.{method}"
        for state in ("begin", "end"):
            history.feed(TaskLine(t=float(t), pod=pod, pid=100 + len(method), local_rank=None, name=name, state=state))
    helper = "AgentLoopWorkerTQ.generate_sequences"
    history.feed(TaskLine(t=99.0, pod="rollout", pid=7, local_rank=None, name=helper, state="begin"))
    return history.gpus["trainer"].stage


@pytest.mark.parametrize(
    ("calls", "stage"),
    [
        pytest.param([], "gen", id="nobody has servers"),
        pytest.param([("trainer", "launch_server"), ("rollout", "generate")], "gen", id="both are awake"),
        pytest.param([("trainer", "sleep"), ("rollout", "generate")], "other", id="the trainer's sleep"),
        pytest.param([("trainer", "sleep"), ("rollout", "generate"), ("trainer", "wake_up")], "gen", id="they woke up"),
        pytest.param(
            [("trainer", "sleep"), ("rollout", "generate"), ("trainer", "generate")],
            "gen",
            id="they generate, and nobody saw them wake up",
        ),
        pytest.param([("trainer", "sleep"), ("rollout", "sleep")], "gen", id="all sleep: that they woke up was lost"),
    ],
)
def test_engines_that_sleep_beside_others_do_not_generate(calls: list[tuple[str, str]], stage: str) -> None:
    assert _stage(calls) == stage


def _marked(ranks: tuple[int | None, ...], *, gpus: int = 2) -> History:
    """Return a pod whose ranks begin a log-prob at 10, of which the first has ended it at 20."""
    pod = TracePod(name="w", gpus_requested=gpus, gpus=[TraceGpu(uuid=f"GPU-{n}", index=n) for n in range(gpus)])
    history = History(Header(format=TRACE_FORMAT, pods=[pod]))
    for t, rank, state in [*((10.0, rank, "begin") for rank in ranks), (20.0, ranks[0], "end")]:
        history.feed(MarkLine(t=t, pod="w", rank=rank, stage="old_log_prob", role="actor", state=state))
    return history


@pytest.mark.parametrize(
    ("ranks", "gpus", "stages"),
    [
        pytest.param((8, 9), 2, ["other", "old_log_prob"], id="a rank for each GPU: the one is done"),
        pytest.param((9, 8), 2, ["old_log_prob", "other"], id="in whatever order they come"),
        pytest.param((8, 9), 4, ["old_log_prob"] * 4, id="not all are heard: it holds for the pod"),
        pytest.param((None,), 2, ["other", "other"], id="the driver's holds for all"),
        pytest.param((8, 9, None), 2, ["old_log_prob"] * 2, id="the driver says that it goes on"),
    ],
)
def test_a_mark_of_a_rank_is_of_its_gpu(ranks: tuple[int | None, ...], gpus: int, stages: list[str]) -> None:
    history = _marked(ranks, gpus=gpus)
    assert [gpu.stage for gpu in history.gpus.values()] == stages


def test_what_a_rank_took_is_told_by_its_marks() -> None:
    history = _marked((8, 9))
    history.feed(MarkLine(t=55.0, pod="w", rank=9, stage="old_log_prob", role="actor", state="end"))
    history.feed(StepLine(t=60.0, step=1))
    pod = history.pods["w"]
    took = {worker: seconds for (_, worker), seconds in history.rank_times[-1]["", "old_log_prob"].items()}
    assert took == {Worker(rank=8): 10.0, Worker(rank=9): 45.0}
    assert [gpu.uuid for worker in took if (gpu := pod.gpu_of(worker)) is not None] == ["GPU-0", "GPU-1"]
    assert pod.rank_of(pod.gpus["GPU-1"]) == 9
