# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which stage a pod's GPUs are in while others work."""

import pytest

from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.model.trace import TRACE_FORMAT, Header, TaskLine, TraceGpu, TracePod

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
