# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Stages on real Ray: what each source tells of a job nobody changed, beside the job's own clock, and in bad times."""

import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster import jobs, monitors, rayclusters
from tests.cluster.conftest import REPOSITORY
from tests.cluster.kubectl import Kubectl, eventually

pytestmark = pytest.mark.usefixtures("release")

TIMERS = monitors.TIMERS


def await_source(kubectl: Kubectl, name: str, namespace: str, source: str, within: float = 90) -> jobs.Object:
    """Wait until a job's stages come from one source; returns the job's status."""

    def look() -> jobs.Object | None:
        now = monitors.status(kubectl, name, namespace)
        return now if now.get("dataQuality", {}).get("stages", {}).get("source") == source else None

    return eventually(look, within=within, what=f"stages of {name} from {source}")


def driven(kubectl: Kubectl, namespace: str, cluster: str, source: str, *, steps: int, within: float) -> None:
    """Run a driver by hand on a RayCluster and compare its stages with its own clock."""
    pod = rayclusters.head(kubectl, cluster, namespace)
    driver = rayclusters.drive(kubectl, pod, namespace, rayclusters.entrypoint(steps=steps))
    try:
        await_source(kubectl, cluster, namespace, source)
        truth = rayclusters.mean_timings(rayclusters.finish(driver))
    finally:
        driver.kill()
    now = monitors.await_steps(kubectl, cluster, namespace, steps)
    monitors.assert_seconds(now, truth, within=within)


def test_without_dashboard_rays_agent_tells_to_five_seconds(kubectl: Kubectl, namespace: str) -> None:
    rayclusters.add_program(kubectl, namespace)
    kubectl.apply(rayclusters.raycluster("undashed", dashboard=False), namespace)
    driven(kubectl, namespace, "undashed", "ray-agent", steps=4, within=5.0)
    quality = monitors.status(kubectl, "undashed", namespace)["dataQuality"]["stages"]
    assert quality["resolutionSeconds"] >= 5
    assert quality["reason"] == "DashboardUnreachable"


def test_a_shared_process_namespace_tells_by_titles_to_a_second(kubectl: Kubectl, namespace: str) -> None:
    rayclusters.add_program(kubectl, namespace)
    kubectl.apply(rayclusters.raycluster("titled", dashboard=False, shared_processes=True), namespace)
    driven(kubectl, namespace, "titled", "titles", steps=4, within=1.0)


def test_a_guarded_dashboard_is_said_and_the_agent_takes_over(kubectl: Kubectl, namespace: str) -> None:
    """With Ray's token mode the dashboard answers 401 to all who lack the token."""
    rayclusters.add_program(kubectl, namespace)
    kubectl.apply(rayclusters.raycluster("guarded", environment=rayclusters.GUARDED), namespace)
    pod = rayclusters.head(kubectl, "guarded", namespace)
    driver = rayclusters.drive(kubectl, pod, namespace, rayclusters.entrypoint(steps=3))
    try:
        now = await_source(kubectl, "guarded", namespace, "ray-agent")
        assert now["dataQuality"]["stages"]["reason"] == "DashboardGuarded"
        rayclusters.finish(driver)
    finally:
        driver.kill()


MARKED = """
import time
from verl_gpumonitor import ResourceMonitor
monitor = ResourceMonitor(interval=1.0)
for step in range(1, 6):
    with monitor.stage("gen", role="rollout", step=step):
        time.sleep(4.0)
    with monitor.stage("update_actor", role="actor", step=step):
        time.sleep(3.0)
    monitor.log(f"after_step_{step}")
print("done", flush=True)
time.sleep(8.0)
"""


def with_library(job: jobs.Object, image: str) -> jobs.Object:
    """Put the library beside the job's Python, as `pip install` would: out of our own image, which has the same."""
    copied = {"name": "library", "mountPath": "/opt/library"}
    copier = {
        "name": "copy-library",
        "image": image,
        "command": ["cp", "-r", "/opt/gpumonitor/lib/.", "/opt/library/"],
        "volumeMounts": [copied],
    }
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        spec = replica["template"]["spec"]
        spec["initContainers"] = [copier]
        spec["volumes"] = [{"name": "library", "emptyDir": {}}]
        main = spec["containers"][0]
        main["volumeMounts"] = [copied]
        main["env"] = [{"name": "PYTHONPATH", "value": "/opt/site:/opt/simgpu:/opt/library"}]
    return job


@pytest.fixture(scope="module")
def beside(kubectl: Kubectl, release: str, values: dict[str, dict[str, str]]) -> Iterator[str]:
    """Two PyTorchJobs at the same time on half of the node each, one with marks and one without. Their namespace."""
    namespace = "test-pytorchjobs"
    kubectl.delete("namespace", namespace)
    kubectl.run("create", "namespace", namespace)
    image = f"{values['image']['registry']}/sidecar:{values['image']['tag']}"
    job = jobs.pytorchjob("marked", command=["python3", "-c", MARKED], gpus=4, shared_processes=True)
    kubectl.apply([with_library(job, image), *sft_alone(kubectl)], namespace)
    yield namespace
    kubectl.delete("namespace", namespace, wait=False)


def sft_alone(kubectl: Kubectl) -> list[jobs.Object]:
    """The example of fine-tuning, without its second pod."""
    rendered = kubectl.run("kustomize", str(REPOSITORY / "examples" / "pytorchjob-sft"))
    objects = list(yaml.safe_load_all(rendered))
    for each in objects:
        if each["kind"] == "PyTorchJob":
            del each["spec"]["pytorchReplicaSpecs"]["Worker"]
    return objects


def test_sft_is_a_trainer_and_no_stage_is_invented(kubectl: Kubectl, beside: str) -> None:
    """Whatever the job beside it on the same node marks."""

    def told() -> jobs.Object | None:
        now, marked = (monitors.status(kubectl, name, beside) for name in ("verl-sft", "marked"))
        return now if now.get("role") == "trainer" and marked.get("stage") in ("gen", "update_actor") else None

    now = eventually(told, within=120, what="role trainer beside a stage")
    assert now["stage"] == "other"
    assert now.get("step") is None

    def table() -> dict[str, jobs.Object]:
        return monitors.stage_table(monitors.status(kubectl, "verl-sft", beside))

    assert eventually(table, within=120, what="stages of verl-sft").keys() <= {"other", "unknown"}


def test_marks_of_the_program_are_exact(kubectl: Kubectl, beside: str) -> None:
    await_source(kubectl, "marked", beside, "marks", within=120)
    monitors.await_steps(kubectl, "marked", beside, 5)
    now = monitors.await_phase(kubectl, "marked", beside, "Succeeded")
    table = monitors.stage_table(now)
    assert abs(table["gen"]["secondsPerStep"] - 4.0) <= 1.0
    assert abs(table["update_actor"]["secondsPerStep"] - 3.0) <= 1.0
    assert table["gen"]["role"] == "rollout"
    sft = monitors.status(kubectl, "verl-sft", beside)
    assert {row["stage"] for row in sft["stages"]} <= {"other", "unknown"}


@pytest.fixture(scope="module")
def shared(kubectl: Kubectl, release: str) -> Iterator[tuple[str, str]]:
    """A RayCluster that several tests use one after another: (name, namespace). It holds half the node to the end."""
    namespace, name = "test-stages", "shared"
    kubectl.delete("namespace", namespace)
    kubectl.run("create", "namespace", namespace)
    rayclusters.add_program(kubectl, namespace)
    kubectl.apply(rayclusters.raycluster(name), namespace)
    rayclusters.head(kubectl, name, namespace)
    yield name, namespace
    kubectl.delete("namespace", namespace, wait=False)


def test_two_rayjobs_on_one_cluster_are_told_apart(kubectl: Kubectl, shared: tuple[str, str]) -> None:
    """Each on two of the cluster's four GPUs at the same time, with other numbers of steps."""
    cluster, namespace = shared
    selector = {"ray.io/cluster": cluster}
    for name, steps in (("one", 3), ("other", 5)):
        command = rayclusters.entrypoint(steps=steps, gpus=2)
        kubectl.apply(rayclusters.rayjob(name, command=command, selector=selector), namespace)
    for name, steps in (("one", 3), ("other", 5)):
        monitors.await_phase(kubectl, name, namespace, "Succeeded", within=240)
        now = monitors.await_steps(kubectl, name, namespace, steps)
        assert {"gen", "update_actor"} <= {row["stage"] for row in now["stages"]}


def test_the_launch_is_shown_without_its_secrets(kubectl: Kubectl, shared: tuple[str, str]) -> None:
    """A driver started by hand: its command line comes from Ray's own list of jobs."""
    cluster, namespace = shared
    pod = rayclusters.head(kubectl, cluster, namespace)
    more = ["+trainer.wandb_api_key=abcdef0123456789abcdef0123456789abcdef01"]
    driver = rayclusters.drive(kubectl, pod, namespace, rayclusters.entrypoint(steps=3, more=more))
    try:
        launch = eventually(
            lambda: monitors.status(kubectl, cluster, namespace).get("launch"), within=60, what="the launch"
        )
        assert launch["program"] == rayclusters.PROGRAM
        assert "abcdef0123456789" not in kubectl.run("get", "gpumonitor", cluster, "-n", namespace, "-o", "yaml")
        rayclusters.finish(driver)
    finally:
        driver.kill()


def test_a_worker_that_is_replaced_is_followed(kubectl: Kubectl, shared: tuple[str, str]) -> None:
    """Its pod dies under the job, a new one comes, and the next job's stages are told as before."""
    cluster, namespace = shared
    pod = rayclusters.head(kubectl, cluster, namespace)
    await_idle(kubectl, cluster, namespace)
    driver = rayclusters.drive(kubectl, pod, namespace, rayclusters.entrypoint(steps=20))
    try:
        await_running_stage(kubectl, cluster, namespace)
        assert monitors.status(kubectl, cluster, namespace)["dataQuality"]["stages"]["source"] == "ray-state"
        old = rayclusters.pods(kubectl, cluster, namespace, "worker")[0]["metadata"]["name"]
        kubectl.run("delete", "pod", old, "-n", namespace, "--grace-period=1")
        driver.communicate(timeout=180)
        assert driver.returncode
    finally:
        driver.kill()
    await_idle(kubectl, cluster, namespace)
    again = drive_when_it_can(kubectl, pod, namespace, rayclusters.entrypoint(steps=3))
    try:
        await_running_stage(kubectl, cluster, namespace)
        rayclusters.finish(again)
    finally:
        again.kill()


def await_idle(kubectl: Kubectl, name: str, namespace: str) -> None:
    """Wait until no real stage is in the STAGE column: what ran before is over, and that was noticed."""
    eventually(
        lambda: monitors.status(kubectl, name, namespace).get("stage") not in TIMERS,
        within=120,
        what=f"no stage of {name} while nothing runs",
    )


def await_running_stage(kubectl: Kubectl, name: str, namespace: str) -> str:
    """Wait until a real stage is in the STAGE column."""

    def look() -> str | None:
        stage = monitors.status(kubectl, name, namespace).get("stage")
        return stage if stage in TIMERS else None

    return eventually(look, within=120, what=f"a stage of {name}")


def test_a_head_that_restarts_is_followed(kubectl: Kubectl, shared: tuple[str, str]) -> None:
    """Ray's head dies with its job; the workers join the new head, and stages are told again."""
    cluster, namespace = shared
    pod = rayclusters.head(kubectl, cluster, namespace)
    await_idle(kubectl, cluster, namespace)
    driver = rayclusters.drive(kubectl, pod, namespace, rayclusters.entrypoint(steps=20))
    await_running_stage(kubectl, cluster, namespace)
    kubectl.run("delete", "pod", pod, "-n", namespace, "--grace-period=1")
    driver.communicate(timeout=120)
    eventually(lambda: rayclusters.head(kubectl, cluster, namespace) != pod, within=180, what="another head")
    await_idle(kubectl, cluster, namespace)
    new = rayclusters.head(kubectl, cluster, namespace)
    again = drive_when_it_can(kubectl, new, namespace, rayclusters.entrypoint(steps=3))
    try:
        await_running_stage(kubectl, cluster, namespace)
        rayclusters.finish(again)
    finally:
        again.kill()


def drive_when_it_can(kubectl: Kubectl, pod: str, namespace: str, command: str) -> "subprocess.Popen[str]":
    """Start a driver once the workers are back: a new head is ready before they are."""

    def joined() -> bool:
        text = kubectl.exec(pod, namespace, "ray", "status", container="ray-head")
        return "/4.0 GPU" in text

    eventually(joined, within=180, what="workers at the new head", every=2)
    return rayclusters.drive(kubectl, pod, namespace, command)
