# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon bundle` against a cluster of one script: real sidecars behind it, pods that do not answer, and no rights."""

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import simgpu
import yaml

from tests.contract.cli import fake_kubectl
from tests.contract.sidecar.conftest import Start, start  # noqa: F401 - a fixture
from tests.contract.sidecar.test_metrics import all_up
from verl_gpumonitor.cli.bundles.gathering import ROLE
from verl_gpumonitor.cli.traces import open_trace
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.trace import GpuLine, Header, JobLine, MarkLine, PodLine, Record, StepLine

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "gpumonitor.md"
SECTION = PAGE.read_text().partition("\n## A bundle for the desk\n")[2].partition("\n## ")[0]
MONITOR = "/apis/gpumonitor.dev/v1alpha1/namespaces/team-a/gpumonitors/grpo-8b"
PODS = "/api/v1/namespaces/team-a/pods?labelSelector=ray.io%2Fcluster%3Dgrpo-8b-x%2Cray.io%2Fis-ray-node%3Dyes"


class Cluster:
    """What the API server would answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "cluster.json"
        self._answers: dict[str, dict[str, object]] = {}
        self._pods: list[dict[str, object]] = []
        self.kubectl = folder / "kubectl"
        self.kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_kubectl.__file__} "$@"\n')
        self.kubectl.chmod(self.kubectl.stat().st_mode | stat.S_IXUSR)
        self.monitor()

    def monitor(self, **status: object) -> None:
        """A GPUMonitor of a RayJob."""
        known = {
            "phase": "Running",
            "workload": {"rayCluster": "grpo-8b-x"},
            "launch": {
                "program": "verl.trainer.main_ppo",
                "overrides": ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576", "env.HF_TOKEN=***"],
                "overridesLeftOut": 3,
                "verlVersion": "0.5.0",
            },
            **status,
        }
        self._answers[MONITOR] = {
            "body": {
                "apiVersion": "gpumonitor.dev/v1alpha1",
                "kind": "GPUMonitor",
                "metadata": {"name": "grpo-8b", "namespace": "team-a"},
                "spec": {"workloadRef": {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "grpo-8b"}},
                "status": known,
            }
        }

    def pod(self, name: str, answer: dict[str, object] | None, **changes: Any) -> None:
        """A worker; `answer` is what its sidecar's path gives, None: it is not there at all."""
        sidecar = {
            "name": wiring.CONTAINER_NAME,
            "image": "sidecar@sha256:1",
            "env": [{"name": wiring.ENV_GPUS_REQUESTED, "value": "8"}],
            "ports": [{"name": wiring.METRICS_PORT_NAME, "containerPort": 9410}],
            **changes.get("sidecar", {}),
        }
        self._pods.append(
            {
                "metadata": {
                    "name": name,
                    "labels": {"ray.io/node-type": "worker", "ray.io/group": "gpu"},
                    "annotations": changes.get("annotations", {}),
                },
                "spec": {
                    "nodeName": f"node-of-{name}",
                    "containers": [{"name": "ray-worker", "image": "verl:1"}],
                    "initContainers": changes.get("init", [sidecar]),
                },
                "status": {"phase": changes.get("phase", "Running"), "containerStatuses": changes.get("statuses", [])},
            }
        )
        if answer is not None:
            self.answer(f"/api/v1/namespaces/team-a/pods/{name}:9410/proxy/trace", answer)

    def answer(self, path: str, answer: dict[str, object]) -> None:
        self._answers[path] = answer

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`gpumon bundle` in the folder."""
        self._answers.setdefault(PODS, {"body": {"kind": "PodList", "items": self._pods}})
        self._file.write_text(json.dumps(self._answers))
        return subprocess.run(
            [sys.executable, "-m", "verl_gpumonitor.cli", "bundle", *arguments, "--kubectl", str(self.kubectl)],
            cwd=self.folder,
            env={**os.environ, "FAKE_CLUSTER": str(self._file)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def record(
    folder: Path, name: str, *, ahead: float = 0.0, lines: Iterable[dict[str, object]] = (), end: bool = True
) -> dict[str, object]:
    """A pod's record in a file, as a sidecar sends it; `ahead`: of its clock."""
    header = {
        "type": "header",
        "format": "gpumonitor-trace/1",
        "pods": [{"name": name, "gpus_requested": 8, "gpus": [{"uuid": f"GPU-{name}", "memory_total_bytes": 100}]}],
    }
    known = list(lines) or [
        {"type": "gpu", "t": float(t), "pod": name, "uuid": f"GPU-{name}", "utilization": 0.5} for t in range(100)
    ]
    last = [{"type": "end", "t": 99.0, "lines": len(known)}] if end else []
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [header, *known, *last]))
    return {"file": str(path), "ahead": ahead}


def read(path: Path) -> tuple[Header, list[Record]]:
    with open_trace(str(path)) as trace:
        records = list(trace.records())
        assert not trace.problems
        return trace.header, records


def test_the_commands_of_the_page(cluster: Cluster, tmp_path: Path) -> None:
    """Each line of the section, by a shell, in its order."""
    cluster.pod("w-0", record(tmp_path, "w-0"))
    cluster.run("team-a/grpo-8b", "-o", "first.jsonl")  # Writes down what the cluster answers.
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "FAKE_CLUSTER": str(tmp_path / "cluster.json"), "FAKE_MONITOR": MONITOR, "PATH": path}
    (block,) = re.findall(r"^```console\n(\$ gpumon bundle.*?)^```", SECTION, flags=re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, env=environ, capture_output=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr)
        written = re.search(r"-o (\S+\.\S+)$", line)
        assert (tmp_path / written[1]).stat().st_size > 0 if written else done.stdout, line


def test_the_role_of_the_page_is_the_one_that_is_asked_for() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", SECTION, flags=re.MULTILINE | re.DOTALL)
    assert block == ROLE.replace("NAMESPACE", "team-a")
    assert yaml.safe_load(block)["rules"][-1] == {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}


def test_two_sidecars_become_one_trace(
    cluster: Cluster,
    library: Path,
    start: Start,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    simgpu.init(tmp_path / "gpus", gpus=8)
    sidecars = {name: start(**{wiring.ENV_POD_NAME: name}) for name in ("w-0", "w-1")}
    for name, sidecar in sidecars.items():
        sidecar.wait(all_up)
        cluster.pod(name, {"url": f"http://127.0.0.1:{sidecar.port}{wiring.TRACE_PATH}"})
    done = cluster.run("team-a/grpo-8b", "-o", "run.jsonl.gz")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 pods, 16 GPUs" in done.stderr
    header, records = read(tmp_path / "run.jsonl.gz")
    assert [(pod.name, pod.node, pod.group, len(pod.gpus or ())) for pod in header.pods or []] == [
        ("w-0", "node-of-w-0", "gpu", 8),
        ("w-1", "node-of-w-1", "gpu", 8),
    ]
    assert header.workload is not None
    assert (header.workload.kind, header.workload.namespace, header.workload.name) == ("RayJob", "team-a", "grpo-8b")
    assert header.frameworks is not None
    assert header.frameworks.verl == "0.5.0"
    assert header.entrypoint == (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 'env.HF_TOKEN=***'"
    )
    assert {record.pod for record in records if isinstance(record, GpuLine)} == {"w-0", "w-1"}
    assert [record.phase for record in records if isinstance(record, JobLine)] == ["Running"]
    for command in ("diagnose", "report", "replay"):
        process = subprocess.run(
            [sys.executable, "-m", "verl_gpumonitor.cli", command, str(tmp_path / "run.jsonl.gz")],
            capture_output=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr


def test_pods_that_do_not_answer_are_said_and_the_others_are_there(cluster: Cluster, tmp_path: Path) -> None:
    cluster.pod("w-0", record(tmp_path, "w-0"))
    cluster.pod("w-1", {"error": "(ServiceUnavailable): error trying to reach service: connection refused"})
    cluster.pod("w-2", None, init=[], annotations={wiring.ANNOTATION_SKIP_REASON: "OptedOut: by a label"})
    cluster.pod("w-3", None, sidecar={"image": "verl:1"})
    cluster.pod("w-4", None, phase="Pending")
    cluster.pod("w-5", None, sidecar={"ports": []})
    cluster.pod("w-6", {"error": "(NotFound): the server could not find the requested resource"})
    cluster.pod("w-7", {"body": "hello"})
    done = cluster.run("grpo-8b", "-n", "team-a", "-o", "run.jsonl")
    assert done.returncode == 0, done.stderr
    header, _ = read(tmp_path / "run.jsonl")
    notes = "\n".join(header.notes or [])
    for pod, said in {
        "w-1": "did not answer",
        "w-2": "has no sidecar (OptedOut: by a label)",
        "w-3": "was replaced",
        "w-4": "it is Pending, and its sidecar has not begun",
        "w-5": "free port",
        "w-6": "earlier version",
        "w-7": "cannot be used",
    }.items():
        (line,) = [line for line in notes.splitlines() if line.startswith(f"{pod} ")]
        assert said in line
        assert line in done.stderr
    assert "1 of 8 pods, 1 GPU," in done.stderr
    assert "3 settings of the command line" in notes
    report = subprocess.run(
        [sys.executable, "-m", "verl_gpumonitor.cli", "report", str(tmp_path / "run.jsonl"), "--format", "markdown"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "w-3 is not in it" in report.stdout


def test_clocks_that_differ_are_put_right_and_steps_come_from_one_pod(cluster: Cluster, tmp_path: Path) -> None:
    def lines(name: str) -> list[dict[str, object]]:
        return [
            {"type": "mark", "t": 10.0, "pod": name, "stage": "gen", "role": "rollout", "state": "begin"},
            {"type": "step", "t": 50.0, "step": 1},
        ]

    for name, ahead in (("w-0", 0.0), ("w-1", 0.4), ("w-2", -40.0)):
        cluster.pod(name, record(tmp_path, name, ahead=ahead, lines=lines(name)))
    done = cluster.run("team-a/grpo-8b", "-o", "run.jsonl")
    assert done.returncode == 0, done.stderr
    header, records = read(tmp_path / "run.jsonl")
    (note,) = [note for note in header.notes or [] if "clock" in note]
    told = re.match(r"the clock of w-2 is ([\d.]+) s behind the others", note)
    assert told is not None
    assert float(told[1]) == pytest.approx(40.0, abs=2.0)
    begins = {record.pod: record.t for record in records if isinstance(record, MarkLine)}
    assert max(begins.values()) - min(begins.values()) < 3.0
    assert len([record for record in records if isinstance(record, StepLine)]) == 1


def test_a_pod_speaks_for_itself_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Whoever serves on its port: lines of other pods, of the job, and nonsense are not taken."""
    hostile: list[dict[str, object]] = [
        {"type": "gpu", "t": 1.0, "pod": "w-1", "uuid": "GPU-w-1", "utilization": 1.0},
        {"type": "job", "t": 2.0, "phase": "Failed"},
        {"type": "pod", "t": 2.0, "pod": "w-1", "phase": "Failed", "reason": "OOMKilled"},
        {"type": "task", "t": 2.0, "pod": "w-1", "name": "x", "state": "begin"},
        {"type": "gpu", "t": 3.0, "pod": "w-0", "uuid": "GPU-w-0", "utilization": 77},
    ]
    cluster.pod("w-0", record(tmp_path, "w-0", lines=hostile, end=False))
    cluster.pod("w-1", record(tmp_path, "w-1"))
    assert cluster.run("team-a/grpo-8b", "-o", "run.jsonl").returncode == 0
    header, records = read(tmp_path / "run.jsonl")
    assert [type(record).__name__ for record in records if getattr(record, "pod", "") == "w-0"] == [
        "PodLine",
        "GpuLine",
    ]
    assert [record.phase for record in records if isinstance(record, JobLine)] == ["Running"]
    assert any(note.startswith("w-0 answered in part") for note in header.notes or [])


def test_ends_of_containers_are_in_it_and_older_ones_are_notes(cluster: Cluster, tmp_path: Path) -> None:
    def killed(at: float) -> list[dict[str, object]]:
        finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": finished}
        return [{"name": "ray-worker", "restartCount": 1, "lastState": {"terminated": ended}, "state": {"running": {}}}]

    cluster.pod("w-0", record(tmp_path, "w-0"), statuses=killed(time.time() - 30))
    cluster.pod("w-1", record(tmp_path, "w-1"), statuses=killed(time.time() - 86400))
    assert cluster.run("team-a/grpo-8b", "-o", "run.jsonl").returncode == 0
    header, records = read(tmp_path / "run.jsonl")
    ends = [record for record in records if isinstance(record, PodLine) and record.reason]
    assert [(end.pod, end.exit_code, 60 < end.t < 80) for end in ends] == [("w-0", 137, True)]
    assert any("ray-worker of w-1 ended before" in note for note in header.notes or [])


def test_a_job_that_has_ended_and_whose_pods_are_there_has_its_end(cluster: Cluster, tmp_path: Path) -> None:
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 40))
    cluster.monitor(phase="Failed", workload={"rayCluster": "grpo-8b-x", "completionTime": finished, "message": "no"})
    cluster.pod("w-0", record(tmp_path, "w-0"))
    assert cluster.run("team-a/grpo-8b", "-o", "run.jsonl").returncode == 0
    _, records = read(tmp_path / "run.jsonl")
    phases = [(record.phase, 50 < record.t < 70) for record in records if isinstance(record, JobLine)]
    assert phases == [("Running", False), ("Failed", True)]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        pytest.param(
            {MONITOR: {"error": '(NotFound): gpumonitors.gpumonitor.dev "grpo-8b" not found'}},
            ["there is no GPUMonitor grpo-8b in namespace team-a", "kubectl get gpumonitors -A"],
            id="no such GPUMonitor",
        ),
        pytest.param(
            {MONITOR: {"error": "(NotFound): the server could not find the requested resource"}},
            ["knows no GPUMonitor", "chart"],
            id="a cluster without us",
        ),
        pytest.param(
            {MONITOR: {"error": '(Forbidden): gpumonitors is forbidden: User "ann" cannot get'}},
            ['User "ann" cannot get', "kind: Role", "pods/proxy", "namespace: team-a"],
            id="no right to the GPUMonitor",
        ),
        pytest.param(
            {"/api/v1/namespaces/team-a/pods/w-0:9410/proxy/trace": {"error": '(Forbidden): cannot get "pods/proxy"'}},
            ['cannot get "pods/proxy"', '{apiGroups: [""], resources: [pods/proxy], verbs: [get]}'],
            id="no right to pods/proxy",
        ),
        pytest.param({PODS: {"body": {"items": []}}}, ["its pods are gone", "gpumon report -"], id="no pods"),
        pytest.param({PODS: {"body": ["x"]}}, ["list of pods cannot be read"], id="nonsense for a list"),
        pytest.param(
            {"/api/v1/namespaces/team-a/pods/w-0:9410/proxy/trace": {"error": "(NotFound): x"}},
            ["no pod of team-a/grpo-8b has a record", "earlier version"],
            id="nobody answers",
        ),
    ],
)
def test_what_cannot_be_done_is_said_with_what_to_do(
    cluster: Cluster, tmp_path: Path, answers: dict[str, dict[str, object]], said: list[str]
) -> None:
    cluster.pod("w-0", record(tmp_path, "w-0"))
    for path, answer in answers.items():
        cluster.answer(path, answer)
    done = cluster.run("team-a/grpo-8b", "-o", "run.jsonl")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr
    assert not (tmp_path / "run.jsonl").exists()


def test_an_ended_job_without_pods_says_what_is_left(cluster: Cluster) -> None:
    cluster.monitor(phase="Succeeded")
    done = cluster.run("team-a/grpo-8b")
    assert done.returncode == 1
    assert "the job has ended (Succeeded)" in done.stderr
    assert "kubectl get gpumonitor grpo-8b -n team-a -o yaml | gpumon report -" in done.stderr


def test_without_kubectl_it_says_so(cluster: Cluster) -> None:
    cluster.kubectl.unlink()
    done = cluster.run("team-a/grpo-8b")
    assert done.returncode == 1
    assert "install kubectl" in done.stderr


def test_the_users_own_choice_of_cluster_is_handed_on(cluster: Cluster, tmp_path: Path) -> None:
    cluster.pod("w-0", record(tmp_path, "w-0"))
    done = cluster.run("grpo-8b", "--context", "prod", "--kubeconfig", "other.yaml")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "grpo-8b.jsonl.gz").exists()
    assert all(call[:4] == ["--kubeconfig", "other.yaml", "--context", "prod"] for call in cluster.calls())
    assert [call[4:6] for call in cluster.calls()] == [["config", "view"], *[["get", "--raw"]] * 3]
