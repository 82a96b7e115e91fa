# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A RayJob whose Ray cluster changes: tried again on a new one, then with more workers, and with fewer."""

from collections.abc import Iterator

import pytest

from tests.cluster import jobs, monitors, rayclusters
from tests.cluster.kubectl import Kubectl, eventually

pytestmark = pytest.mark.usefixtures("release")

NAME, NAMESPACE = "again", "test-again"
STEPS = 8
"""Of each attempt, if it is let: long enough for a worker to come and go in the second one."""
Run = tuple[jobs.Object, str]
"""What the GPUMonitor said of the first attempt, and the RayCluster of the second."""


@pytest.fixture(scope="module")
def second_run(kubectl: Kubectl, release: str) -> Iterator[Run]:
    """A RayJob in its second attempt: the driver of the first one died in its second step."""
    kubectl.delete("namespace", NAMESPACE)
    kubectl.run("create", "namespace", NAMESPACE)
    rayclusters.add_program(kubectl, NAMESPACE)
    job = rayclusters.rayjob(NAME, command=rayclusters.entrypoint(steps=STEPS))
    job["spec"].update(backoffLimit=1, submissionMode="HTTPMode")
    del job["spec"]["submitterPodTemplate"]
    kubectl.apply(job, NAMESPACE)
    first = monitors.await_steps(kubectl, NAME, NAMESPACE, 2, within=240)
    before = cluster_of(kubectl)
    kill_driver(kubectl, before)
    yield first, eventually(lambda: another(kubectl, before), within=120, what="another RayCluster")
    kubectl.delete("namespace", NAMESPACE, wait=False)


def cluster_of(kubectl: Kubectl) -> str:
    """Name of the RayCluster that the job runs in now; empty while there is none."""
    return str((kubectl.get("rayjob", NAME, NAMESPACE) or {}).get("status", {}).get("rayClusterName", ""))


def another(kubectl: Kubectl, before: str) -> str | None:
    """Name of the job's RayCluster once it is another one."""
    now = cluster_of(kubectl)
    return now if now not in ("", before) else None


def kill_driver(kubectl: Kubectl, cluster: str) -> None:
    """Let the driver on the head end as one that is out of memory does."""
    pod = rayclusters.pods(kubectl, cluster, NAMESPACE, "head")[0]["metadata"]["name"]
    kubectl.exec(pod, NAMESPACE, "pkill", "-KILL", "-f", f"python3 -m {rayclusters.PROGRAM}", container="ray-head")


def counted(now: jobs.Object) -> dict[str, float]:
    """GPU seconds by stage, and in all."""
    return {row["stage"]: row["seconds"] for row in now["stages"]} | {"all": now["totals"]["gpuSeconds"]}


def test_a_job_that_is_tried_again_counts_on(kubectl: Kubectl, second_run: Run) -> None:
    """One GPUMonitor through both: steps begin anew, counters go on, and nothing is shown of the cluster before."""
    first, cluster = second_run
    seen: list[jobs.Object] = []

    def second_step() -> bool:
        now = monitors.status(kubectl, NAME, NAMESPACE)
        if now["workload"].get("rayCluster") == cluster:
            seen.append(now)
        return bool(seen) and (seen[-1].get("step") or 0) >= 2

    eventually(second_step, within=240, what="step 2 of the second attempt", every=1)
    for now in seen:
        assert now["phase"] in ("Pending", "Running"), now["phase"]
        assert now["gpus"]["reported"] <= now["gpus"]["requested"] == 4, now["gpus"]
        if now["phase"] == "Pending":
            assert now.get("stage") not in monitors.TIMERS, "nothing runs yet"
    assert seen[0].get("step") is None and any(now.get("step") == 1 for now in seen), "steps begin anew"
    now = seen[-1]
    before, after = counted(first), counted(now)
    assert all(after[stage] >= seconds for stage, seconds in before.items()), (before, after)
    assert len(kubectl.list("gpumonitor", NAMESPACE)) == 1
    assert now["dataQuality"]["stages"]["source"] == "ray-state"
    print(kubectl.run("get", "gpumonitors", "-n", NAMESPACE))


def gpus_seen(kubectl: Kubectl, text: str, within: float = 120) -> jobs.Object:
    """Wait until the GPUS column shows `text`. What it shows until then is never more than the job holds."""

    def look() -> jobs.Object | None:
        now = monitors.status(kubectl, NAME, NAMESPACE)
        assert now["gpus"]["reported"] <= now["gpus"]["requested"] <= 8, now["gpus"]
        return now if now["gpus"]["text"] == text else None

    return eventually(look, within=within, what=f"GPUS {text} of {NAME}")


def test_workers_may_come_and_go(kubectl: Kubectl, second_run: Run) -> None:
    """The cluster's group gets a second worker, as from Ray's autoscaler, with work of its own, and loses it again."""
    _, cluster = second_run
    old = {pod["metadata"]["name"] for pod in rayclusters.pods(kubectl, cluster, NAMESPACE, "worker")}
    before = monitors.status(kubectl, NAME, NAMESPACE)
    scale(kubectl, cluster, replicas=2)
    gpus_seen(kubectl, "8/8")
    (new,) = {pod["metadata"]["name"] for pod in rayclusters.pods(kubectl, cluster, NAMESPACE, "worker")} - old
    monitors.owned(kubectl, new, NAMESPACE, 4)
    print(kubectl.run("get", "gpumonitors", "-n", NAMESPACE))
    idle = stages_of(kubectl, new)
    assert idle <= {"other", "unknown"}, "no work was given to it yet"
    head = rayclusters.pods(kubectl, cluster, NAMESPACE, "head")[0]["metadata"]["name"]
    driver = rayclusters.drive(kubectl, head, NAMESPACE, rayclusters.entrypoint(steps=1))
    try:
        eventually(lambda: stages_of(kubectl, new) & set(monitors.TIMERS), within=60, what=f"stages of {new}")
    finally:
        driver.kill()
        driver.communicate()
    scale(kubectl, cluster, replicas=1, without=new)
    gpus_seen(kubectl, "4/4")
    print(kubectl.run("get", "gpumonitors", "-n", NAMESPACE))
    now = monitors.await_phase(kubectl, NAME, NAMESPACE, "Succeeded", within=240)
    assert now["totals"]["gpuSeconds"] > before["totals"]["gpuSeconds"]
    monitors.await_steps(kubectl, NAME, NAMESPACE, STEPS, within=60)
    print(kubectl.run("get", "gpumonitors", "-n", NAMESPACE))


def scale(kubectl: Kubectl, cluster: str, *, replicas: int, without: str | None = None) -> None:
    """Set the group's replicas in the RayCluster, and name the pod that is to go, as Ray's autoscaler does."""
    group = (kubectl.get("raycluster", cluster, NAMESPACE) or {})["spec"]["workerGroupSpecs"][0]
    strategy = {"workersToDelete": [without]} if without else {}
    group |= {"replicas": replicas, "minReplicas": 1, "maxReplicas": 2, "scaleStrategy": strategy}
    kubectl.patch("raycluster", cluster, NAMESPACE, {"spec": {"workerGroupSpecs": [group]}})


def stages_of(kubectl: Kubectl, pod: str) -> set[str]:
    """Stages that a pod's own sidecar has counted."""
    series = monitors.sidecar_metrics(kubectl, pod, NAMESPACE)
    return {dict(labels)["stage"] for name, labels in series if name == "gpumonitor_stage_seconds_total"}
