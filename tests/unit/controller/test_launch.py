# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is shown of a job's command line, and that no secret is."""

import msgspec
import pytest

from tests.unit.controller.builders import GPUS, job, metadata
from verl_gpumonitor.model.report import RayJobInfo
from verl_gpumonitor_operator.controller.jobs import JobKind, JobSeen, from_object
from verl_gpumonitor_operator.controller.launch import MAX_OVERRIDES, MAX_TEXT, Command, Launches, command_of, rendered

PPO = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=5 trainer.project_name=x trainer.nnodes=2"


def info(submission_id: str, entrypoint: str, **more: object) -> RayJobInfo:
    return RayJobInfo(submission_id=submission_id, entrypoint=entrypoint, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "listed", "expected"),
    [
        pytest.param(
            job(JobKind.RAY_JOB, "a", command=PPO, ray_job_id="j1"),
            [info("j1", "other", verl_version="0.9.1", ray_names=["TaskRunnerV1"])],
            Command(text=PPO, source="spec", verl_version="0.9.1", ray_names=("TaskRunnerV1",)),
            id="a RayJob says it itself, Ray adds the version and what runs",
        ),
        pytest.param(
            job(JobKind.RAY_JOB, "a", ray_job_id="j1"),
            [info("j2", "x"), info("j1", PPO)],
            Command(text=PPO, source="ray-jobs"),
            id="a RayJob without entrypoint, by its id",
        ),
        pytest.param(
            job(JobKind.RAY_JOB, "a", ray_job_id="j1"), [info("j2", PPO)], None, id="another job's is not its own"
        ),
        pytest.param(job(JobKind.RAY_JOB, "a"), [info("", PPO)], None, id="a job without id has nobody's"),
        pytest.param(
            job(JobKind.RAY_CLUSTER, "a"),
            [
                info("j1", "old", status="SUCCEEDED", started_at=5.0),
                info("j2", PPO, status="RUNNING", started_at=3.0),
                info("j3", "older", status="RUNNING", started_at=2.0),
            ],
            Command(text=PPO, source="ray-jobs"),
            id="of a bare cluster the newest that runs",
        ),
        pytest.param(job(JobKind.RAY_CLUSTER, "a"), [], None, id="nothing runs"),
        pytest.param(
            job(JobKind.PYTORCH_JOB, "a", command="torchrun x.py"),
            [],
            Command(text="torchrun x.py", source="pod-template"),
            id="a PyTorchJob by its template",
        ),
    ],
)
def test_where_the_command_line_is_found(seen: JobSeen, listed: list[RayJobInfo], expected: Command | None) -> None:
    assert command_of(seen, listed) == expected


def test_settings_that_matter_come_first() -> None:
    shown = rendered(Command(text=PPO, source="spec"))
    assert shown["program"] == "verl.trainer.main_ppo"
    assert shown["overrides"] == ["actor_rollout_ref.rollout.n=5", "trainer.nnodes=2", "trainer.project_name=x"]


def test_what_is_shown_is_bounded() -> None:
    many = " ".join(f"data.key_{number}={'x' * 2000}" for number in range(100))
    shown = rendered(Command(text=f"python3 -m verl.trainer.main_ppo {many}", source="spec"))
    assert len(shown["overrides"]) == MAX_OVERRIDES
    assert all(len(line) <= MAX_TEXT for line in shown["overrides"])
    assert shown["overridesLeftOut"] > 0


def test_a_command_line_is_read_once() -> None:
    launches = Launches()
    first = launches.of("u", Command(text=PPO, source="spec"))
    assert launches.of("u", Command(text=PPO, source="spec")) is first
    assert launches.of("u", Command(text=PPO + " a.b=1", source="spec")) is not first
    launches.forget("u")
    assert vars(launches) == {"_known": {}}
    assert launches.of("u", None) is None


SECRETS = ["hf_abcdefghijklmnopqrstuvwxyz", "sk-verysecretverysecret", "hunter2hunter2"]
LINE = (
    f"HF_TOKEN={SECRETS[0]} WANDB_API_KEY={SECRETS[1]} python3 -m verl.trainer.main_ppo trainer.nnodes=1 "
    f"+ray_kwargs.ray_init.runtime_env.env_vars.DB_PASSWORD={SECRETS[2]}"
)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        pytest.param(JobKind.RAY_JOB, {"entrypoint": LINE}, id="RayJob"),
        pytest.param(
            JobKind.PYTORCH_JOB,
            {
                "pytorchReplicaSpecs": {
                    "Master": {
                        "template": {
                            "spec": {"containers": [{"name": "pytorch", "command": ["bash", "-c"], "args": [LINE]}]}
                        }
                    }
                }
            },
            id="PyTorchJob",
        ),
    ],
)
def test_no_secret_is_kept_or_shown(kind: JobKind, spec: dict[str, object]) -> None:
    seen = from_object(kind, {"metadata": metadata("a"), "spec": spec}, GPUS)
    assert seen is not None
    command = command_of(seen, [])
    assert command is not None
    shown = rendered(command)
    assert shown["program"] == "verl.trainer.main_ppo"
    text = repr(seen) + msgspec.json.encode(shown).decode()
    assert not [secret for secret in SECRETS if secret in text]


def test_the_container_of_a_pytorch_job_is_the_one_named_so() -> None:
    containers = [{"name": "proxy", "command": ["envoy"]}, {"name": "pytorch", "args": ["torchrun", "a b.py"]}]
    spec = {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": {"containers": containers}}}}}
    seen = from_object(JobKind.PYTORCH_JOB, {"metadata": metadata("a"), "spec": spec}, GPUS)
    assert seen is not None
    assert seen.command == "torchrun 'a b.py'"


@pytest.mark.parametrize(
    ("command", "guessed"),
    [
        (Command(text=PPO, source="spec"), None),
        (Command(text=PPO, source="spec", ray_names=("AgentLoopWorkerTQ",)), "0.8.0 to 0.9.1"),
        (Command(text=PPO, source="spec", ray_names=("AsyncSGLangServer",)), "0.5.0"),
        (Command(text=f"{PPO} trainer.use_v1=True", source="spec"), "0.9.0 to 0.9.1"),
        (Command(text=PPO, source="spec", verl_version="0.8.0", ray_names=("AgentLoopWorkerTQ",)), None),
    ],
    ids=["nothing tells", "a class of some releases", "of one release", "a new key", "the release is known"],
)
def test_releases_that_it_can_be_are_said_where_the_release_is_not(command: Command, guessed: str | None) -> None:
    shown = rendered(command)
    assert shown["verlVersionGuess"] == guessed
    assert shown["verlVersion"] == command.verl_version


def test_what_runs_is_taken_up_when_it_is_seen() -> None:
    launches = Launches()
    before = launches.of("u", Command(text=PPO, source="spec"))
    after = launches.of("u", Command(text=PPO, source="spec", ray_names=("TaskRunnerV1",)))
    assert before is not None and after is not None
    assert (before["verlVersionGuess"], after["verlVersionGuess"]) == (None, "0.9.0 to 0.9.1")
