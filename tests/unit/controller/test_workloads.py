# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which pods count for which workload, in whatever order objects arrive."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.controller.builders import gpu, identity, job, owner_of, pod, report
from verl_gpumonitor.model.report import RayNode, Report, StageQuality
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import Phase
from verl_gpumonitor_operator.controller import ledger_text
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.ledger_text import WrittenLedger
from verl_gpumonitor_operator.controller.ports import AcceptResult
from verl_gpumonitor_operator.controller.steps import pace_of
from verl_gpumonitor_operator.controller.totals import Totals
from verl_gpumonitor_operator.controller.workload import Workload
from verl_gpumonitor_operator.controller.workloads import Workloads

NOW = 2000.0
RAY_JOB, RAY_CLUSTER, PYTORCH_JOB = JobKind.RAY_JOB, JobKind.RAY_CLUSTER, JobKind.PYTORCH_JOB


def send(workloads: Workloads, name: str, seconds: float, *, sequence: int = 1, **more: object) -> AcceptResult:
    """Report that one GPU of a pod was observed for so long."""
    item: Report = report(name, sequence=sequence, gpus=[gpu(f"GPU-{name}", observed_seconds=seconds)], **more)  # type: ignore[arg-type]
    return workloads.accept(identity(name), item, NOW)


def of(workloads: Workloads, name: str) -> Workload:
    workload = workloads.get(f"uid-{name}")
    assert workload is not None
    return workload


def names(workload: Workload) -> set[str]:
    return {track.record.name for track in workload.pods()}


STEPS: dict[str, Callable[[Workloads], object]] = {
    "job": lambda w: w.job_seen(job(RAY_JOB, "grpo", ray_cluster="c1"), NOW),
    "cluster": lambda w: w.job_seen(job(RAY_CLUSTER, "c1", owner=owner_of(RAY_JOB, "grpo")), NOW),
    "pod": lambda w: w.pod_seen(pod("w-0", owner_of(RAY_CLUSTER, "c1"))),
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids=" then ".join)
def test_pod_to_cluster_to_job_in_any_order(order: tuple[str, ...]) -> None:
    workloads = Workloads()
    for step in order:
        STEPS[step](workloads)
    assert names(of(workloads, "grpo")) == {"w-0"}
    assert workloads.get("uid-c1") is None, "a RayCluster that a RayJob made is no workload of its own"
    assert send(workloads, "w-0", 10.0) == AcceptResult(accepted=1)
    assert of(workloads, "grpo").totals().gpu_seconds == 10.0


def test_labels_do_not_count() -> None:
    workloads = Workloads()
    workloads.job_seen(job(RAY_CLUSTER, "c1"), NOW)
    workloads.pod_seen(pod("thief", None, labels={"ray.io/cluster": "c1"}))
    workloads.pod_seen(pod("other", owner_of(RAY_CLUSTER, "c2"), labels={"ray.io/cluster": "c1"}))
    assert names(of(workloads, "c1")) == set()


@pytest.mark.parametrize("first", ["thief", "owner"])
def test_a_pod_of_another_namespace_does_not_count(first: str) -> None:
    workloads = Workloads()
    head = {"ray.io/node-type": "head"}
    ours = pod("w-0", owner_of(RAY_CLUSTER, "c1"))
    thief = replace(pod("thief", owner_of(RAY_CLUSTER, "c1"), labels=head, pod_ip="10.0.0.2"), namespace="elsewhere")
    workloads.job_seen(job(RAY_CLUSTER, "c1"), NOW)
    for item in (thief, ours) if first == "thief" else (ours, thief):
        workloads.pod_seen(item)
    send(workloads, "thief", 10.0, ray_nodes=[RayNode(node_ip="10.0.0.1", gpu_uuids=["GPU-false"])])
    assert send(workloads, "w-0", 5.0) == AcceptResult(accepted=1)
    assert names(of(workloads, "c1")) == {"w-0"}
    assert of(workloads, "c1").totals().gpu_seconds == 5.0
    assert workloads.workload_of_pod(thief) is None
    workloads.pod_gone(thief)
    assert of(workloads, "c1").totals().gpu_seconds == 5.0


@pytest.mark.parametrize("kind", [RAY_JOB, PYTORCH_JOB])
def test_a_job_of_another_namespace_gets_no_pods(kind: JobKind) -> None:
    workloads = Workloads()
    workloads.job_seen(job(kind, "victim"), NOW)
    owner = owner_of(kind, "victim")
    if kind is RAY_JOB:
        workloads.job_seen(replace(job(RAY_CLUSTER, "c1", owner=owner), namespace="elsewhere"), NOW)
        owner = owner_of(RAY_CLUSTER, "c1")
    workloads.pod_seen(replace(pod("thief", owner), namespace="elsewhere"))
    assert names(of(workloads, "victim")) == set()


def test_a_cluster_that_outlives_its_job_is_its_own_workload() -> None:
    """As after `kubectl delete rayjob --cascade=orphan`."""
    workloads = Workloads()
    for step in STEPS.values():
        step(workloads)
    send(workloads, "w-0", 10.0)
    workloads.job_seen(job(RAY_CLUSTER, "c1"), NOW)
    workloads.job_gone(RAY_JOB, "uid-grpo", NOW)
    assert names(of(workloads, "grpo")) == {"w-0"}, "the job's until its last status is written"
    workloads.forget("uid-grpo")
    assert names(of(workloads, "c1")) == {"w-0"}
    assert send(workloads, "w-0", 15.0, sequence=2) == AcceptResult(accepted=2)
    assert of(workloads, "c1").totals().gpu_seconds == 15.0


@pytest.mark.parametrize("kind", [RAY_JOB, PYTORCH_JOB])
def test_pods_that_outlive_a_forgotten_job_leave_nothing_behind(kind: JobKind) -> None:
    workloads = Workloads()
    workloads.job_seen(job(kind, "grpo", ray_cluster="c1" if kind is RAY_JOB else None), NOW)
    owner = owner_of(kind, "grpo")
    if kind is RAY_JOB:
        workloads.job_seen(job(RAY_CLUSTER, "c1", owner=owner), NOW)
        owner = owner_of(RAY_CLUSTER, "c1")
    pods = [pod(f"w-{number}", owner) for number in range(3)]
    for item in pods:
        workloads.pod_seen(item)
    workloads.job_gone(kind, "uid-grpo", NOW)
    workloads.forget("uid-grpo")
    workloads.job_gone(RAY_CLUSTER, "uid-c1", NOW)
    for item in pods:
        workloads.pod_gone(item)
    workloads.take_dirty()
    assert not {name: held for name, held in vars(workloads).items() if held}


def test_a_bare_ray_cluster_is_its_own_workload() -> None:
    workloads = Workloads()
    workloads.pod_seen(pod("w-0", owner_of(RAY_CLUSTER, "c1")))
    workloads.job_seen(job(RAY_CLUSTER, "c1"), NOW)
    assert names(of(workloads, "c1")) == {"w-0"}


def test_a_cluster_of_a_ray_service_is_its_own_workload() -> None:
    workloads = Workloads()
    service = owner_of(RAY_JOB, "svc")
    workloads.job_seen(
        job(RAY_CLUSTER, "c1", owner=type(service)(api_version="", kind="RayService", name="svc", uid="uid-svc")), NOW
    )
    assert workloads.get("uid-c1") is not None


def test_a_retry_in_a_new_cluster_counts_on() -> None:
    workloads = Workloads()
    for step in STEPS.values():
        step(workloads)
    send(workloads, "w-0", 10.0)
    workloads.pod_gone(pod("w-0", owner_of(RAY_CLUSTER, "c1")))
    workloads.job_gone(RAY_CLUSTER, "uid-c1", NOW)
    workloads.job_seen(job(RAY_JOB, "grpo", ray_cluster="c2"), NOW)
    workloads.job_seen(job(RAY_CLUSTER, "c2", owner=owner_of(RAY_JOB, "grpo")), NOW)
    workloads.pod_seen(pod("w-1", owner_of(RAY_CLUSTER, "c2")))
    send(workloads, "w-1", 5.0)
    assert names(of(workloads, "grpo")) == {"w-1"}
    assert of(workloads, "grpo").totals().gpu_seconds == 15.0


def test_a_pod_that_outlives_its_cluster_counts_on() -> None:
    workloads = Workloads()
    for step in STEPS.values():
        step(workloads)
    workloads.job_gone(RAY_CLUSTER, "uid-c1", NOW)
    send(workloads, "w-0", 10.0)
    assert of(workloads, "grpo").totals().gpu_seconds == 10.0


def test_pytorch_pods_count_by_uid_although_names_come_back() -> None:
    workloads = Workloads()
    workloads.job_seen(job(PYTORCH_JOB, "sft"), NOW)
    first = pod("sft-master-0", owner_of(PYTORCH_JOB, "sft"))
    workloads.pod_seen(first)
    send(workloads, "sft-master-0", 10.0)
    workloads.pod_gone(first)
    again = pod("sft-master-0", owner_of(PYTORCH_JOB, "sft"), uid="uid-again")
    workloads.pod_seen(again)
    stale = report("sft-master-0", sequence=2)
    workloads.accept(identity("sft-master-0"), stale, NOW)
    assert of(workloads, "sft").totals().gpu_seconds == 10.0


def borrowing(phase: Phase) -> Callable[[Workloads], object]:
    return lambda w: w.job_seen(job(RAY_JOB, "tune", ray_cluster="shared", borrows_cluster=True, phase=phase), NOW)


def shared_cluster() -> Workloads:
    workloads = Workloads()
    workloads.job_seen(job(RAY_CLUSTER, "shared"), NOW)
    workloads.pod_seen(pod("w-0", owner_of(RAY_CLUSTER, "shared")))
    send(workloads, "w-0", 100.0)
    return workloads


def test_a_borrowed_cluster_counts_for_the_job_while_it_runs() -> None:
    workloads = shared_cluster()
    borrowing(Phase.RUNNING)(workloads)
    send(workloads, "w-0", 130.0, sequence=2)
    assert names(of(workloads, "tune")) == {"w-0"}
    assert of(workloads, "tune").totals().gpu_seconds == 30.0
    borrowing(Phase.SUCCEEDED)(workloads)
    send(workloads, "w-0", 200.0, sequence=3)
    assert of(workloads, "tune").totals().gpu_seconds == 30.0
    assert of(workloads, "shared").totals().gpu_seconds == 200.0
    assert names(of(workloads, "tune")) == set()


def test_a_borrower_that_comes_before_the_cluster_is_joined_later() -> None:
    workloads = Workloads()
    borrowing(Phase.RUNNING)(workloads)
    workloads.pod_seen(pod("w-0", owner_of(RAY_CLUSTER, "shared")))
    workloads.job_seen(job(RAY_CLUSTER, "shared"), NOW)
    assert names(of(workloads, "tune")) == {"w-0"}


def test_two_borrowers_are_known_to_share() -> None:
    workloads = shared_cluster()
    borrowing(Phase.RUNNING)(workloads)
    workloads.job_seen(job(RAY_JOB, "other", ray_cluster="shared", borrows_cluster=True, phase=Phase.RUNNING), NOW)
    group = of(workloads, "tune").borrowed
    assert group is not None
    assert group.borrowers == {"uid-tune", "uid-other"}


def test_a_new_run_of_the_same_name_is_another_workload() -> None:
    workloads = Workloads()
    workloads.job_seen(job(RAY_JOB, "grpo"), NOW)
    workloads.job_seen(job(RAY_JOB, "grpo", uid="uid-second"), NOW + 1)
    named = workloads.named(RAY_JOB, "train", "grpo")
    assert named is not None
    assert named.job.uid == "uid-second"
    assert of(workloads, "grpo").gone_at == NOW + 1


def test_an_old_list_does_not_bring_a_deleted_job_back() -> None:
    workloads = Workloads()
    workloads.job_seen(job(RAY_JOB, "grpo"), NOW)
    workloads.job_gone(RAY_JOB, "uid-grpo", NOW + 1)
    workloads.job_seen(job(RAY_JOB, "grpo", message="x"), NOW + 2)
    assert of(workloads, "grpo").gone_at == NOW + 1


def test_only_a_head_of_the_same_cluster_names_gpus_of_others() -> None:
    workloads = Workloads()
    cluster = owner_of(RAY_CLUSTER, "c1")
    head = {"ray.io/node-type": "head"}
    workloads.pod_seen(pod("head", cluster, gpus=0, labels=head, pod_ip="10.0.0.9"))
    workloads.pod_seen(pod("w-0", cluster, pod_ip="10.0.0.1"))
    workloads.pod_seen(pod("w-1", cluster, pod_ip="10.0.0.2"))
    workloads.pod_seen(pod("foreign", owner_of(RAY_CLUSTER, "c2"), labels=head, pod_ip="10.0.0.3"))
    nodes = [RayNode(node_ip="10.0.0.1", gpu_uuids=["GPU-0", "GPU-1"])]
    lies = [RayNode(node_ip="10.0.0.1", gpu_uuids=["GPU-9"])]
    workloads.accept(identity("w-1"), report("w-1", ray_nodes=lies), NOW)
    workloads.accept(identity("foreign"), report("foreign", ray_nodes=lies), NOW)
    assert send(workloads, "w-0", 1.0).gpu_uuids is None
    workloads.accept(identity("head"), report("head", ray_nodes=nodes), NOW)
    assert send(workloads, "w-0", 1.0, sequence=2).gpu_uuids == ("GPU-0", "GPU-1")
    assert workloads.accept(identity("w-1"), report("w-1", sequence=2), NOW).gpu_uuids is None


def test_pods_that_share_an_ip_are_not_told_apart() -> None:
    workloads = Workloads()
    cluster = owner_of(RAY_CLUSTER, "c1")
    workloads.pod_seen(pod("head", cluster, gpus=0, labels={"ray.io/node-type": "head"}, pod_ip="10.0.0.9"))
    for name in ("w-0", "w-1"):
        workloads.pod_seen(pod(name, cluster, pod_ip="10.0.0.1"))
    nodes = [RayNode(node_ip="10.0.0.1", gpu_uuids=["GPU-0"])]
    workloads.accept(identity("head"), report("head", ray_nodes=nodes), NOW)
    assert send(workloads, "w-0", 1.0).gpu_uuids is None


def test_a_report_of_a_pod_that_nobody_owns_is_accepted_and_counts_for_nobody() -> None:
    assert Workloads().accept(identity("w-0"), report("w-0", sequence=3), NOW) == AcceptResult(accepted=3)


def test_counters_survive_a_restart_of_the_controller() -> None:
    before = Workloads()
    for step in STEPS.values():
        step(before)
    gone, live = pod("w-gone", owner_of(RAY_CLUSTER, "c1")), pod("w-ends", owner_of(RAY_CLUSTER, "c1"))
    before.pod_seen(gone)
    before.pod_seen(live)
    for name, seconds in (("w-0", 10.0), ("w-gone", 20.0), ("w-ends", 40.0)):
        send(before, name, seconds)
    before.pod_gone(gone)
    written = ledger_text.read(ledger_text.write(of(before, "grpo").ledger()).text)
    assert written is not None

    after = Workloads()
    STEPS["cluster"](after)
    STEPS["job"](after)
    after.restore("uid-grpo", written)
    STEPS["pod"](after)
    assert of(after, "grpo").totals().gpu_seconds == 70.0
    after.fold_restored()
    assert of(after, "grpo").totals().gpu_seconds == 70.0, "a pod that ended meanwhile keeps its last sum"
    assert send(after, "w-0", 10.0).replay, "what was counted before the restart is not counted again"
    send(after, "w-0", 25.0, sequence=2)
    assert of(after, "grpo").totals().gpu_seconds == 85.0


def test_load_is_judged_over_a_minute_of_counters() -> None:
    workloads = Workloads()
    workloads.job_seen(job(PYTORCH_JOB, "sft"), NOW)
    workloads.pod_seen(pod("m", owner_of(PYTORCH_JOB, "sft")))
    busy = 0.0
    for number in range(20):
        busy += 15.0 if number >= 10 else 0.0
        counters = gpu("GPU-0", observed_seconds=15.0 * (number + 1), busy_seconds=busy)
        item = report("m", sequence=number + 1, gpus=[counters], sent_at=1000.0 + 15 * (number + 1))
        workloads.accept(identity("m"), item, NOW + 15 * number)
    (track,) = of(workloads, "sft").pods()
    assert track.utilization("GPU-0") == pytest.approx(1.0)
    assert len(track.history) <= 6
    assert track.utilization("GPU-9") is None


def test_a_young_sidecar_has_a_load_at_once_and_one_met_late_has_none_yet() -> None:
    workloads = Workloads()
    workloads.job_seen(job(PYTORCH_JOB, "sft"), NOW)
    for name in ("young", "old"):
        workloads.pod_seen(pod(name, owner_of(PYTORCH_JOB, "sft")))
    counters = [gpu("GPU-0", observed_seconds=10.0, busy_seconds=4.0)]
    workloads.accept(identity("young"), report("young", gpus=counters, sent_at=1015.0), NOW)
    workloads.accept(identity("old"), report("old", gpus=counters, sent_at=5000.0), NOW)
    loads = {track.record.name: track.utilization("GPU-0") for track in of(workloads, "sft").pods()}
    assert loads == {"young": pytest.approx(0.4), "old": None}


def test_nothing_is_left_of_what_is_forgotten() -> None:
    workloads = Workloads()
    for number in range(50):
        name = f"job-{number}"
        workloads.job_seen(job(RAY_JOB, name), NOW)
        workloads.job_seen(job(RAY_CLUSTER, f"c-{number}", owner=owner_of(RAY_JOB, name)), NOW)
        record = pod(f"w-{number}", owner_of(RAY_CLUSTER, f"c-{number}"))
        workloads.pod_seen(record)
        send(workloads, f"w-{number}", 1.0)
        workloads.job_gone(RAY_CLUSTER, f"uid-c-{number}", NOW)
        workloads.job_gone(RAY_JOB, f"uid-{name}", NOW)
        workloads.pod_gone(record)
        workloads.forget(f"uid-{name}")
    workloads.take_dirty()
    left = {name: value for name, value in vars(workloads).items() if value}
    assert left == {}


def test_a_job_that_has_ended_takes_no_more_time() -> None:
    """A GPU that waits for its pod's end would make the mean load of the job fall from second to second."""
    workloads = Workloads()
    workloads.job_seen(job(PYTORCH_JOB, "sft", phase=Phase.RUNNING), NOW)
    workloads.pod_seen(pod("m", owner_of(PYTORCH_JOB, "sft")))

    def tell(sequence: int, at: float, *, observed: float, busy: float, final: bool = False) -> Totals:
        counters = [gpu("GPU-0", observed_seconds=observed, busy_seconds=busy)]
        workloads.accept(identity("m"), report("m", sequence=sequence, gpus=counters, final=final), at)
        return of(workloads, "sft").totals()

    assert tell(1, NOW, observed=100.0, busy=80.0).utilization == 0.8
    end = NOW + 5
    workloads.job_seen(job(PYTORCH_JOB, "sft", phase=Phase.SUCCEEDED, completed_at=end), end + 1)
    totals = tell(2, end + 10, observed=115.0, busy=84.0)
    assert (totals.gpu_seconds, totals.busy_seconds) == (105.0, 84.0)
    assert tell(3, end + 25, observed=130.0, busy=84.0) == totals
    assert tell(4, end + 30, observed=135.0, busy=84.0, final=True) == totals
    workloads.pod_gone(pod("m", owner_of(PYTORCH_JOB, "sft")))
    assert of(workloads, "sft").totals() == totals, "its goodbye was heard"


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        pytest.param(20.0, 80.0, id="reports had come before the end was known"),
        pytest.param(3600.0, 100.0, id="an end an hour ago says nothing of the last report"),
    ],
)
def test_an_end_that_is_told_late(late: float, expected: float) -> None:
    workloads = Workloads()
    workloads.job_seen(job(PYTORCH_JOB, "sft", phase=Phase.RUNNING), NOW)
    workloads.pod_seen(pod("m", owner_of(PYTORCH_JOB, "sft")))
    workloads.accept(identity("m"), report("m", gpus=[gpu(observed_seconds=100.0, busy_seconds=10.0)]), NOW)
    workloads.job_seen(job(PYTORCH_JOB, "sft", phase=Phase.SUCCEEDED, completed_at=NOW - late), NOW + 1)
    assert of(workloads, "sft").totals().gpu_seconds == expected


def test_a_job_that_goes_on_after_all_counts_on() -> None:
    workloads = Workloads()
    workloads.job_seen(job(PYTORCH_JOB, "sft", phase=Phase.FAILED, completed_at=NOW - 10), NOW)
    workloads.pod_seen(pod("m", owner_of(PYTORCH_JOB, "sft")))
    send(workloads, "m", 100.0)
    workloads.job_seen(job(PYTORCH_JOB, "sft", phase=Phase.RUNNING), NOW)
    send(workloads, "m", 150.0, sequence=2)
    assert of(workloads, "sft").totals().gpu_seconds == 150.0


def with_steps(workloads: Workloads, name: str, sequence: int, steps: int) -> None:
    """Let a pod report how many whole steps it has seen."""
    quality = StageQuality(source=StageSource.RAY_STATE, steps=steps)
    workloads.accept(identity(name), report(name, sequence=sequence, stage_quality=quality), NOW)


def shown_step(workloads: Workloads, name: str) -> int | None:
    workload = of(workloads, name)
    return workload.step(pace_of(workload.pools()).cycles)


@pytest.mark.parametrize("between", [None, "c1"], ids=["no cluster named between attempts", "from one to the next"])
def test_a_retry_begins_its_steps_anew_while_its_former_pods_end(between: str | None) -> None:
    workloads = Workloads()
    for step in STEPS.values():
        step(workloads)
    with_steps(workloads, "w-0", 1, 7)
    assert shown_step(workloads, "grpo") == 7
    workloads.job_seen(job(RAY_JOB, "grpo", ray_cluster=between), NOW)
    assert shown_step(workloads, "grpo") == 7
    workloads.job_seen(job(RAY_CLUSTER, "c2", owner=owner_of(RAY_JOB, "grpo")), NOW)
    workloads.job_seen(job(RAY_JOB, "grpo", ray_cluster="c2"), NOW)
    workloads.pod_seen(pod("w-1", owner_of(RAY_CLUSTER, "c2"), pod_ip="10.0.0.2"))
    with_steps(workloads, "w-0", 2, 8)
    assert names(of(workloads, "grpo")) == {"w-1"}, "the former attempt's pod still lives, and is shown no more"
    assert shown_step(workloads, "grpo") is None
    with_steps(workloads, "w-1", 1, 1)
    assert shown_step(workloads, "grpo") == 1


def test_a_worker_that_comes_late_does_not_stop_the_steps() -> None:
    workloads = Workloads()
    for step in STEPS.values():
        step(workloads)
    with_steps(workloads, "w-0", 1, 7)
    assert shown_step(workloads, "grpo") == 7
    late = [pod(f"w-{number}", owner_of(RAY_CLUSTER, "c1"), pod_ip=f"10.0.0.{number}") for number in (2, 3)]
    for each in late:
        workloads.pod_seen(each)
        with_steps(workloads, each.name, 1, 0)
    with_steps(workloads, "w-0", 2, 9)
    assert shown_step(workloads, "grpo") == 9, "whatever the late ones have seen of them"
    workloads.pod_gone(pod("w-0", owner_of(RAY_CLUSTER, "c1")))
    for each in late:
        with_steps(workloads, each.name, 2, 3)
    assert shown_step(workloads, "grpo") == 10, "they go on where they came in"


def test_a_restart_between_two_attempts_begins_the_steps_anew() -> None:
    workloads = Workloads()
    workloads.job_seen(job(RAY_JOB, "grpo", ray_cluster="c2"), NOW)
    workloads.restore("uid-grpo", WrittenLedger(folded=Totals(), base=Totals(), pods={}), steps=7, ray_cluster="c1")
    assert shown_step(workloads, "grpo") is None
