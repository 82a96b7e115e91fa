# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks that a pod's processes have given away, from lines of the agent's page."""

import pytest

from verl_gpumonitor.reading.ray_tasks import SubmittedTasks

OWNER = b'ray_tasks{JobId="01",Name="WorkerDict.update_actor",Source="owner",State="SUBMITTED_TO_WORKER"}'


@pytest.mark.parametrize(
    ("page", "names"),
    [
        pytest.param(OWNER + b" 8.0\n", {b"WorkerDict.update_actor"}, id="with a worker"),
        pytest.param(OWNER + b" 0.0\n", set(), id="over"),
        pytest.param(OWNER + b" -1.0\n", set(), id="as Ray counts at times"),
        pytest.param(OWNER.replace(b"owner", b"executor") + b" 1.0\n", set(), id="executed here"),
        pytest.param(OWNER.replace(b"SUBMITTED_TO_WORKER", b"FINISHED") + b" 1.0\n", set(), id="done"),
        pytest.param(OWNER + b" x\n" + OWNER + b"\n", set(), id="no number"),
        pytest.param(OWNER + b" 8.0", set(), id="an unfinished line"),
        pytest.param(b"x" * 20_000 + b"\n" + OWNER + b" 1\n", {b"WorkerDict.update_actor"}, id="after a long line"),
    ],
)
def test_names(page: bytes, names: set[bytes]) -> None:
    for length in (7, 100_000):
        parser = SubmittedTasks()
        for begin in range(0, len(page), length):
            parser.feed(page[begin : begin + length])
        assert parser.names() == names
