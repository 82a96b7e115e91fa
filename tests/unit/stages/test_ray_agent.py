# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What runs in a pod, by the page of Ray's metrics agent."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.stages.sources.ray_agent import MAX_NAMES, AgentStages, RunningNames, running_names

RECORDED = Path(__file__).parents[1] / "reading" / "ray-2.60" / "agent-metrics.txt"
SESSION = 'SessionName="session_1",Version="2.60.0"'


def tasks(name: str, value: float = 1.0, *, state: str = "RUNNING", source: str = "executor") -> str:
    labels = f'Component="core_worker",IsRetry="0",JobId="01",Name="{name}",{SESSION},Source="{source}",State="{state}"'
    return f"ray_tasks{{{labels}}} {value}"


def title(text: str, value: float = 1e8, *, metric: str = "ray_component_rss_bytes") -> str:
    return f'{metric}{{Component="{text}",{SESSION},ip="10.0.0.1",pid=""}} {value}'


def page(*lines: str) -> bytes:
    return ("# HELP ray_tasks Number of tasks.\n" + "\n".join(lines) + "\n").encode()


UPDATE = "WorkerDict.actor_rollout_ref_update_actor"
REF = "WorkerDict.actor_rollout_ref_compute_ref_log_prob"


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        pytest.param([], (), id="nothing"),
        pytest.param([tasks(UPDATE)], (UPDATE,), id="a task that runs"),
        pytest.param([tasks(UPDATE, state="RUNNING_IN_RAY_GET")], (UPDATE,), id="one that waits for another"),
        pytest.param([tasks(UPDATE, 0.0)], (), id="one that is over"),
        pytest.param([tasks(UPDATE, -1.0, state="SUBMITTED_TO_WORKER")], (), id="one that is handed over"),
        pytest.param([tasks(UPDATE, source="owner")], (), id="one that runs elsewhere"),
        pytest.param([title(f"ray::{UPDATE}")], (f"ray::{UPDATE}",), id="a title"),
        pytest.param([title(f"ray::{UPDATE}", metric="ray_component_rss_mb")], (f"ray::{UPDATE}",), id="an older one"),
        pytest.param([title(f"ray::{UPDATE}", 0.0), title("raylet")], (), id="a title that is over; no title"),
        pytest.param(
            [tasks(REF), title(f"ray::{UPDATE}")], (f"ray::{UPDATE}",), id="titles of workers are newer than tasks"
        ),
        pytest.param([tasks(REF), title("ray::WorkerDict")], ("ray::WorkerDict",), id="also when a worker is idle"),
        pytest.param(
            [tasks("vLLMHttpServer.generate", 150), title("ray::vLLMHttpServer"), title("ray::WorkerDict")],
            ("ray::vLLMHttpServer", "ray::WorkerDict", "vLLMHttpServer.generate"),
            id="a server's calls are in the tasks alone",
        ),
        pytest.param([tasks(UPDATE).replace(" 1.0", " nonsense")], (), id="no number"),
        pytest.param([tasks('say \\"hi\\"\\\\ ')], ('say "hi"\\ ',), id="an escaped name"),
        pytest.param([tasks("x" * 9000)], (), id="a name of any length"),
    ],
)
def test_running_names(lines: list[str], names: tuple[str, ...]) -> None:
    assert running_names(page(*lines)) == names


def test_the_page_comes_in_pieces_of_any_size() -> None:
    text = page(tasks(UPDATE), "y" * 20_000, title("ray::vLLMHttpServer.generate"), tasks("z", 2))
    for size in (1, 7, 100, 8192, 10**6):
        parser = RunningNames()
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
        assert parser.names() == running_names(text) == ("ray::vLLMHttpServer.generate", UPDATE, "z")


def test_a_recorded_page_names_ray_itself_alone() -> None:
    assert set(running_names(RECORDED.read_bytes())) == {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


def test_names_are_bounded() -> None:
    assert len(running_names(page(*(tasks(f"t{number}") for number in range(2000))))) == MAX_NAMES


@given(st.binary(max_size=200))
def test_nothing_raises(noise: bytes) -> None:
    for text in (noise, b"ray_tasks{" + noise + b"\n", b'ray_tasks{Source="executor",State="RUNNING' + noise + b"\n"):
        running_names(text)


def test_pages_become_intervals_of_the_pod() -> None:
    stages = AgentStages()
    assert stages.word(0).intervals == ()
    for at, name in [(0, UPDATE), (5, UPDATE), (10, REF), (15, "WorkerDict"), (20, "vLLMHttpServer.generate")]:
        stages.observe(at, (f"ray::{name}", "ray::DashboardAgent", "TaskRunner.run"))
    word = stages.word(20)
    assert (word.source, word.known_from, word.known_until) == (StageSource.RAY_AGENT, 0, 20)
    assert [(each.stage, each.role, each.begin, each.end) for each in word.intervals] == [
        ("update_actor", "actor", 0, 5),
        ("ref", "ref", 5, 10),
        ("gen", "rollout", 15, None),
    ]
    assert {each.resolution_seconds for each in word.intervals} == {5.0}


def test_pages_that_stay_away_end_the_word() -> None:
    stages = AgentStages()
    stages.observe(0, (UPDATE,))
    stages.observe(5, (UPDATE,))
    stages.observe(30, (UPDATE,))
    word = stages.word(31)
    assert (word.known_from, word.known_until) == (30, 30)
    assert [(each.begin, each.end) for each in word.intervals] == [(0, None)]
