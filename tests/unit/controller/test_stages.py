# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is shown of stages: the present one, the table, and who says so."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.controller.builders import GIB, gpu, identity, job, owner_of, pod, report
from verl_gpumonitor.model.kubernetes import REPLICA_TYPE
from verl_gpumonitor.model.report import StageCount, StageNow, StageQuality, StepReport, StepStage
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor.model.vocabulary import Phase
from verl_gpumonitor_operator.controller import stages
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.podtrack import PodTrack
from verl_gpumonitor_operator.controller.steps import Pace
from verl_gpumonitor_operator.controller.totals import Peak, StageKey, StageSum
from verl_gpumonitor_operator.controller.workload import Workload
from verl_gpumonitor_operator.controller.workloads import Workloads

NOW = 3000.0
GROUP = "ray.io/group"


def now(stage: str, role: str = "actor", **more: object) -> StageNow:
    return StageNow(stage=stage, role=role, **more)  # type: ignore[arg-type]


class Cluster:
    """A RayCluster of its own, or one that RayJobs borrow."""

    def __init__(self, *pods: tuple[str, int, StageNow | None], quality: Sequence[StageQuality] = ()) -> None:
        """Each pod: its group, its GPUs, what it says."""
        self.workloads = Workloads()
        self.workloads.job_seen(job(JobKind.RAY_CLUSTER, "c"), NOW)
        self.sequence = 0
        for number, (group, gpus, said) in enumerate(pods):
            self.workloads.pod_seen(
                pod(f"w-{number}", owner_of(JobKind.RAY_CLUSTER, "c"), gpus=gpus, labels={GROUP: group})
            )
            self.say(number, said, quality=quality[number] if quality else StageQuality())

    def say(self, number: int, said: StageNow | None, **more: object) -> None:
        self.sequence += 1
        more.setdefault("stage_quality", more.pop("quality", StageQuality(source=StageSource.MARKS)))
        item = report(f"w-{number}", sequence=self.sequence, stage=said, **more)  # type: ignore[arg-type]
        self.workloads.accept(identity(f"w-{number}"), item, NOW)

    def borrow(self, name: str, ray_job: str | None) -> None:
        self.workloads.job_seen(
            job(
                JobKind.RAY_JOB,
                name,
                ray_cluster="c",
                borrows_cluster=True,
                phase=Phase.RUNNING,
                ray_job_id=ray_job,
            ),
            NOW,
        )

    def of(self, name: str = "c") -> Workload:
        workload = self.workloads.get(f"uid-{name}")
        assert workload is not None
        return workload

    def view(self, name: str = "c") -> stages.StageView:
        workload = self.of(name)
        return stages.view(workload, list(workload.pods()), workload.totals().stages)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([], (None, None), id="nobody reports"),
        pytest.param([("g", 8, None)], ("unknown", "unknown"), id="the one that reports does not know"),
        pytest.param([("g", 8, now("gen", "rollout")), ("g", 8, None)], ("gen", "rollout"), id="what is known wins"),
        pytest.param(
            [("g", 4, now("gen", "rollout")), ("g", 8, now("update_actor"))],
            ("update_actor", "actor"),
            id="most GPUs win",
        ),
        pytest.param(
            [("g", 4, now("gen", "rollout")), ("g", 4, now("other", "unknown"))],
            ("gen", "rollout"),
            id="of equals the one with a name",
        ),
        pytest.param(
            [("g", 4, now("gen", "rollout")), ("g", 8, now("other", "unknown"))],
            ("other", "unknown"),
            id="other is a stage",
        ),
        pytest.param([("g", 8, now("epoch_3", "trainer"))], ("epoch_3", "trainer"), id="a word of the user's own"),
    ],
)
def test_the_present_stage(
    pods: list[tuple[str, int, StageNow | None]], expected: tuple[str | None, str | None]
) -> None:
    view = Cluster(*pods).view()
    assert (view.stage, view.role) == expected


def test_pools_are_shown_apart() -> None:
    view = Cluster(
        ("rollout", 8, now("gen", "rollout")), ("trainer", 8, now("update_actor")), ("trainer", 8, None)
    ).view()
    assert [(item.name, item.stage, item.role, item.gpus) for item in view.pools] == [
        ("rollout", "gen", "rollout", 8),
        ("trainer", "update_actor", "actor", 16),
    ]
    assert Cluster(("g", 8, now("gen"))).view().pools == []


def test_master_and_workers_of_a_pytorchjob_are_one_pool() -> None:
    owner = owner_of(JobKind.PYTORCH_JOB, "p")
    tracks = [PodTrack(record=pod(role, owner, labels={REPLICA_TYPE: role})) for role in ("master", "worker")]
    assert len({track.pool for track in tracks}) == 1


@pytest.mark.parametrize(
    ("said", "shared", "source", "resolution", "reason"),
    [
        pytest.param([StageQuality()], False, "none", None, None, id="nobody"),
        pytest.param(
            [
                StageQuality(source=StageSource.RAY_STATE, resolution_seconds=1.0),
                StageQuality(source=StageSource.RAY_AGENT, resolution_seconds=5.0, reason="DashboardUnreachable"),
            ],
            False,
            "ray-agent",
            5.0,
            "DashboardUnreachable",
            id="the weakest is shown with its reason",
        ),
        pytest.param(
            [StageQuality(source=StageSource.RAY_AGENT)],
            True,
            "none",
            None,
            "SharedRayCluster",
            id="shared, not told apart",
        ),
        pytest.param(
            [StageQuality(source=StageSource.RAY_STATE, resolution_seconds=1.5)],
            True,
            "ray-state",
            1.5,
            None,
            id="shared, told apart",
        ),
    ],
)
def test_who_says_so(
    said: list[StageQuality], shared: bool, source: str, resolution: float | None, reason: str | None
) -> None:
    cluster = Cluster(*(("g", 4, None) for _ in said), quality=said)
    cluster.borrow("one", "raysubmit_1")
    if shared:
        cluster.borrow("two", "raysubmit_2")
    quality = cluster.view("one").quality
    assert quality is not None
    assert (quality.source.value, quality.resolution_seconds, quality.reason) == (source, resolution, reason)


def counts(**jobs: float) -> list[StageCount]:
    """Seconds of `gen` by job; `nobody` has no name."""
    return [
        StageCount("gen", "rollout", seconds, 0.0, job="" if name == "nobody" else name)
        for name, seconds in jobs.items()
    ]


def test_jobs_that_share_a_cluster_show_their_own_work_alone() -> None:
    cluster = Cluster(("g", 1, None))
    cluster.say(0, None, gpus=[gpu(stages=counts(nobody=10.0, old=5.0))])
    cluster.borrow("one", "j1")
    cluster.say(0, now("gen", "rollout", job="j1", step=7), gpus=[gpu(stages=counts(nobody=14.0, old=5.0, j1=20.0))])
    assert {key: value.observed_seconds for key, value in cluster.of("one").totals().stages.items()} == {
        StageKey("gen", "rollout", ""): 4.0,
        StageKey("gen", "rollout", "j1"): 20.0,
    }
    cluster.borrow("two", "j2")
    steps = [
        StepReport(
            number=1,
            begin=0.0,
            end=9.0,
            job="j2",
            stages=[StepStage(stage="gen", role="rollout", begin=0.0, seconds=4.0)],
        )
    ]
    cluster.say(
        0,
        now("gen", "rollout", job="j1", step=8),
        gpus=[gpu(stages=counts(nobody=16.0, old=5.0, j1=25.0, j2=3.0))],
        steps=steps,
    )
    one, two = cluster.view("one"), cluster.view("two")
    assert [row.sums.observed_seconds for row in one.rows] == [25.0]
    assert [row.sums.observed_seconds for row in two.rows] == [3.0]
    assert (one.stage, two.stage) == ("gen", "unknown"), "what runs now is another's"
    assert (one.step, two.step) == (8, 1)
    assert (one.seconds_per_step, two.seconds_per_step) == (None, 9.0)
    assert [row.sums.observed_seconds for row in cluster.view().rows] == [49.0], "the cluster itself shows all"


def test_what_a_borrower_did_stays_when_it_has_ended() -> None:
    cluster = Cluster(("g", 1, None))
    cluster.borrow("one", "j1")
    cluster.say(0, None, gpus=[gpu(stages=counts(j1=20.0, j2=4.0))])
    cluster.workloads.job_seen(
        job(JobKind.RAY_JOB, "one", ray_cluster="c", borrows_cluster=True, phase=Phase.SUCCEEDED, ray_job_id="j1"), NOW
    )
    cluster.say(0, None, gpus=[gpu(stages=counts(j1=20.0, j2=40.0))])
    assert [row.sums.observed_seconds for row in cluster.view("one").rows] == [20.0]


def test_what_is_told_after_a_borrowers_end_counts_for_it() -> None:
    """Its last step is one once nothing has followed it for a while, and samples wait for their stage."""
    cluster = Cluster(("g", 1, None))
    cluster.borrow("one", "j1")
    cluster.say(0, None, gpus=[gpu(stages=counts(j1=20.0))])
    cluster.workloads.job_seen(
        job(JobKind.RAY_JOB, "one", ray_cluster="c", borrows_cluster=True, phase=Phase.SUCCEEDED, ray_job_id="j1"), NOW
    )
    steps = [
        StepReport(
            number=1,
            begin=0.0,
            end=9.0,
            job="j1",
            stages=[StepStage(stage="gen", role="rollout", begin=0.0, seconds=4.0)],
        )
    ]
    cluster.say(0, None, gpus=[gpu(stages=counts(j1=24.0, nobody=30.0))], steps=steps)
    view = cluster.view("one")
    assert view.step == 1
    assert [(row.sums.observed_seconds, row.seconds_per_step) for row in view.rows] == [(24.0, 4.0)]
    cluster.of("one").forget_left()
    cluster.say(0, None, gpus=[gpu(stages=counts(j1=99.0))])
    assert [row.sums.observed_seconds for row in cluster.view("one").rows] == [24.0]


def test_the_step_that_a_pod_tells_as_its_last_word_counts() -> None:
    """Sidecars end with their pods, which are gone a moment later."""
    cluster = Cluster(("g", 4, None), ("g", 4, None))
    for number in (0, 1):
        cluster.say(number, None, quality=StageQuality(source=StageSource.RAY_STATE, steps=9))
    assert cluster.view().step == 9
    for number in (0, 1):
        ending = pod(f"w-{number}", owner_of(JobKind.RAY_CLUSTER, "c"), gpus=4, labels={GROUP: "g"}, deleting=True)
        cluster.workloads.pod_seen(ending)
        cluster.say(number, None, quality=StageQuality(source=StageSource.RAY_STATE, steps=10), final=True)
        cluster.workloads.pod_gone(ending)
    assert cluster.view().step == 10


def test_each_of_several_jobs_is_shown_its_own_stage() -> None:
    cluster = Cluster(("g", 4, None))
    cluster.borrow("one", "j1")
    cluster.borrow("two", "j2")
    cluster.say(0, now("update_actor", job="j1"), other_stages=[now("gen", "rollout", job="j2")])
    assert [cluster.view(name).stage for name in ("one", "two", "c")] == ["update_actor", "gen", "update_actor"]


def test_the_step_never_falls_in_one_cluster_and_begins_anew_in_the_next() -> None:
    workloads = Workloads()

    def seen(cluster: str) -> None:
        workloads.job_seen(job(JobKind.RAY_JOB, "grpo", ray_cluster=cluster), NOW)
        workloads.job_seen(job(JobKind.RAY_CLUSTER, cluster, owner=owner_of(JobKind.RAY_JOB, "grpo")), NOW)

    def step() -> int | None:
        workload = workloads.get("uid-grpo")
        assert workload is not None
        return stages.view(workload, list(workload.pods()), {}).step

    seen("c1")
    first = pod("w-0", owner_of(JobKind.RAY_CLUSTER, "c1"))
    workloads.pod_seen(first)
    workloads.accept(identity("w-0"), report("w-0", stage_quality=StageQuality(steps=5)), NOW)
    assert step() == 5
    workloads.pod_gone(first)
    assert step() == 5
    seen("c2")
    assert step() is None
    workloads.pod_seen(pod("w-1", owner_of(JobKind.RAY_CLUSTER, "c2")))
    workloads.accept(identity("w-1"), report("w-1", stage_quality=StageQuality(steps=2)), NOW)
    assert step() == 2


PAIRS = st.dictionaries(
    st.tuples(st.sampled_from([*"abcdefghijklmnopqrst", "other", "unknown"]), st.sampled_from(["actor", "unknown"])),
    st.builds(StageSum, st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.none() | st.floats(0.0, 1e9)),
    max_size=40,
)


@given(pairs=PAIRS)
def test_the_table_is_bounded_and_loses_nothing(pairs: dict[tuple[str, str], StageSum]) -> None:
    found = stages.rows(pairs, Pace())
    assert len(found) <= stages.MAX_ROWS
    whole = sum(value.observed_seconds for value in pairs.values())
    assert sum(row.sums.observed_seconds for row in found) == pytest.approx(whole)
    if found:
        assert sum(row.share for row in found) == pytest.approx(1.0)
    named = [row.sums.observed_seconds for row in found if row.stage not in stages.NAMELESS]
    assert named == sorted(named, reverse=True)


def test_the_table_reads_as_one() -> None:
    pairs = {
        ("gen", "rollout"): StageSum(380.0, 45.6, 380.0 * 312, Peak(72 * GIB, 80 * GIB), 20 * GIB),
        ("update_actor", "actor"): StageSum(600.0, 570.0, 600.0 * 655, Peak(60 * GIB, 80 * GIB)),
        ("testing", "rollout"): StageSum(2.0, 1.0),
        ("other", "unknown"): StageSum(18.0, 0.0, None, Peak(20 * GIB, 80 * GIB)),
    }
    pace = Pace(cycles=4, seconds_per_step=100.0, stages={("gen", "rollout"): 41.23, ("update_actor", "actor"): 120.4})
    table = stages.table([stages.numbers(row) for row in stages.rows(pairs, pace)])
    assert table == [
        "STAGE         ROLE     SHARE  S/STEP  UTIL  MEM-PEAK  POWER",
        "update_actor  actor      60%     120   95%       75%   655W",
        "gen           rollout    38%    41.2   12%       90%   312W",
        "testing       rollout    <1%       -   50%         -      -",
        "other         unknown     2%       -    0%       25%      -",
    ]


def test_a_table_of_nothing_has_no_header() -> None:
    assert stages.table([]) == []


@pytest.mark.parametrize(
    ("sums", "watts"),
    [
        pytest.param(StageSum(10.0, 0.0, 3000.0), 300.0, id="energy over time"),
        pytest.param(StageSum(10.0, 0.0, None), None, id="no energy is offered"),
        pytest.param(StageSum(1e-300, 0.0, 1e15), None, id="hardly any time"),
        pytest.param(StageSum(10.0, 0.0, 1e9), None, id="more than a GPU can take"),
    ],
)
def test_power(sums: StageSum, watts: float | None) -> None:
    assert sums.power_watts == watts


@pytest.mark.parametrize(
    ("kind", "program", "alone"),
    [
        pytest.param(JobKind.PYTORCH_JOB, "verl.trainer.sft_trainer", True, id="SFT by torchrun"),
        pytest.param(JobKind.PYTORCH_JOB, "verl.trainer.fsdp_sft_trainer", True, id="SFT of older releases"),
        pytest.param(JobKind.PYTORCH_JOB, "verl.trainer.main_ppo", False, id="RL inside of a PyTorchJob"),
        pytest.param(JobKind.PYTORCH_JOB, None, False, id="nobody knows what it runs"),
        pytest.param(JobKind.RAY_JOB, "verl.trainer.sft_trainer", False, id="Ray tells it"),
    ],
)
def test_who_only_trains(kind: JobKind, program: str | None, alone: bool) -> None:
    assert stages.trains_alone(job(kind, "a"), program) is alone


def test_what_a_trainer_does_without_a_name_is_training() -> None:
    cluster = Cluster(("g", 8, None))
    sums = {
        StageKey("unknown", "unknown"): StageSum(10.0),
        StageKey("other", "unknown"): StageSum(5.0),
        StageKey("save_checkpoint", "trainer"): StageSum(1.0),
    }
    found = stages.view(cluster.of(), list(cluster.of().pods()), sums, trainer_alone=True)
    assert (found.stage, found.role) == ("other", "trainer")
    assert [(row.stage, row.role, row.sums.observed_seconds) for row in found.rows] == [
        ("save_checkpoint", "trainer", 1.0),
        ("other", "trainer", 15.0),
    ]
