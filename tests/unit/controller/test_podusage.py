# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory from metrics.k8s.io: who is asked for, what is believed, and that its absence harms nothing."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest

from tests.unit.controller.builders import GIB, gpu, identity, job, owner_of, pod, report
from tests.unit.controller.virtual import VirtualClock
from verl_gpumonitor.diagnosis.coverage import coverage
from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.model.report import HostReport
from verl_gpumonitor_operator.controller.clinic import Clinic, Opinion
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.podtrack import PodTrack
from verl_gpumonitor_operator.controller.podusage import (
    MAX_PAUSE_SECONDS,
    ROUND_SECONDS,
    Place,
    PodMetrics,
    PodUsage,
    unheard,
    usage_of,
)
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState, PodRecord
from verl_gpumonitor_operator.controller.workload import Workload
from verl_gpumonitor_operator.controller.workloads import Workloads
from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import (
    ForbiddenError,
    KubeError,
    NotFoundError,
    ServerFaultError,
    TooManyRequestsError,
    UnreachableError,
)

NOW = 10_000.0
JOB = "training.kubeflow.org/job-name"
TOLD = HostReport(memory_used_bytes=GIB, memory_limit_bytes=2 * GIB, source="marks")


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def metrics(name: str = "sft-0", *, at: float = NOW, **memory: str) -> dict[str, Any]:
    """What metrics-server says of a pod: memory by container."""
    containers = [{"name": one, "usage": {"cpu": "1", "memory": used}} for one, used in memory.items()]
    return {"metadata": {"name": name, "namespace": "train"}, "timestamp": stamp(at), "containers": containers}


class Server:
    """Answers lists of metrics in the order of a script; of it the last one for ever."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.times: list[float] = []

    async def get(self, path: str, query: Mapping[str, Any]) -> bytes:
        self.asked.append((path, query))
        self.times.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else msgspec.json.encode({"metadata": {}, "items": answer})


class Job:
    """A PyTorchJob of one pod, whose program has no library, under diagnosis."""

    def __init__(self, *, name: str = "sft-0", limit: int | None = 64 * GIB, **more: Any) -> None:
        self.clinic = Clinic(interval_seconds=15.0)
        self.workloads = Workloads(self.clinic)
        workload = self.workloads.job_seen(job(JobKind.PYTORCH_JOB, "sft"), NOW)
        assert workload is not None
        self.workload: Workload = workload
        values: dict[str, Any] = {
            "labels": {JOB: "sft"},
            "main": ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW - 600),
            "gpu_containers": ("pytorch",),
            "memory_limit_bytes": limit,
            **more,
        }
        self.record: PodRecord = pod(name, owner_of(JobKind.PYTORCH_JOB, "sft"), **values)
        self.workloads.pod_seen(self.record)
        self.sent = 0

    @property
    def track(self) -> PodTrack:
        return next(self.workload.pods())

    @property
    def history(self) -> History:
        return self.clinic._cases["uid-sft"].patient.history

    def report(self, at: float = NOW, **more: Any) -> None:
        self.sent += 1
        said = report(self.record.name, sequence=self.sent, gpus=[gpu(observed_seconds=at)], **more)
        self.workloads.accept(identity(self.record.name), said, at)

    def wanted(self, now: float = NOW) -> dict[Place, dict[str, PodTrack]]:
        return unheard(self.workloads.all(), now=now, fresh_seconds=60.0)

    def usage(self, server: Server, now: float = NOW) -> PodUsage:
        client = cast(KubeClient, server)
        return PodUsage(client, workloads=self.workloads.all, fresh_seconds=60.0, clock=lambda: now)

    def look(self, now: float) -> Opinion:
        return self.clinic.look(self.workload, command=None, thresholds=None, phase="Running", now=now)


RAY = {"ray.io/cluster": "c"}
JUST = ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW - 60)


@pytest.mark.parametrize(
    ("more", "said", "labels"),
    [
        pytest.param({}, {}, [JOB], id="a program without marks"),
        pytest.param({}, {"host": HostReport(shm_used_bytes=1, shm_size_bytes=2)}, [JOB], id="/dev/shm alone is told"),
        pytest.param({}, {"host": TOLD}, [], id="its report tells it"),
        pytest.param({"labels": RAY}, {}, ["ray.io/cluster"], id="a Ray pod whose agent tells nothing"),
        pytest.param({"labels": RAY, "main": JUST}, {}, [], id="a Ray pod whose agent may yet answer"),
        pytest.param({"main": JUST}, {}, [JOB], id="a pod that has just started"),
        pytest.param({"gpu_containers": ()}, {}, [], id="no GPUs"),
        pytest.param({"phase": "Pending"}, {}, [], id="not running"),
        pytest.param({"deleting": True}, {}, [], id="being deleted"),
    ],
)
def test_only_pods_of_which_nobody_tells_are_asked_for(
    more: dict[str, Any], said: dict[str, Any], labels: list[str]
) -> None:
    one = Job(**more)
    assert one.wanted() == {}, "before its first report"
    one.report(**said)
    assert list(one.wanted()) == [Place("train", label) for label in labels]
    assert one.wanted(NOW + 61) == {}, "after it fell silent"


def test_an_ended_job_is_not_asked_for() -> None:
    one = Job()
    one.report()
    one.workloads.job_gone(JobKind.PYTORCH_JOB, "uid-sft", NOW)
    assert one.wanted() == {}


@pytest.mark.parametrize(
    ("said", "used"),
    [
        pytest.param(metrics(pytorch="1Gi", istio="9Gi", gpumonitor="9Gi"), GIB, id="other containers do not count"),
        pytest.param(metrics(pytorch="1048576Ki"), GIB, id="as metrics-server writes it"),
        pytest.param(metrics(istio="1Gi"), None, id="its container is not told"),
        pytest.param(metrics(pytorch="0"), None, id="nothing at all is no figure"),
        pytest.param(metrics(pytorch="-1Gi"), None, id="below zero"),
        pytest.param(metrics(pytorch="much"), None, id="no quantity"),
        pytest.param(metrics(pytorch="9999999E"), None, id="more than any host has"),
        pytest.param(metrics(pytorch="1Gi", at=NOW - 119), GIB, id="of two minutes ago"),
        pytest.param(metrics(pytorch="1Gi", at=NOW - 121), None, id="too old"),
        pytest.param(metrics(pytorch="1Gi", at=NOW + 121), None, id="of another clock"),
        pytest.param({**metrics(pytorch="1Gi"), "timestamp": "now"}, None, id="no time"),
        pytest.param({**metrics(pytorch="1Gi"), "timestamp": None}, None, id="without a time"),
    ],
)
def test_what_is_believed(said: dict[str, Any], used: int | None) -> None:
    found = usage_of(msgspec.convert(said, PodMetrics), Job().record, now=NOW)
    assert (found.memory_used_bytes if found else None) == used


def test_what_was_sampled_before_the_container_started_is_another_ones() -> None:
    started = ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW - 10)
    record = Job(main=started).record
    said = [msgspec.convert(metrics(pytorch="1Gi", at=NOW - ago), PodMetrics) for ago in (11, 9)]
    assert [usage_of(one, record, now=NOW) is not None for one in said] == [False, True]


def test_two_containers_with_gpus_count_together_and_only_together() -> None:
    record = Job(gpu_containers=("a", "b")).record
    whole = usage_of(msgspec.convert(metrics(a="1Gi", b="2Gi"), PodMetrics), record, now=NOW)
    assert whole is not None
    assert whole.memory_used_bytes == 3 * GIB
    assert usage_of(msgspec.convert(metrics(a="1Gi"), PodMetrics), record, now=NOW) is None


async def test_nothing_is_asked_where_all_is_known() -> None:
    one, server = Job(), Server(NotFoundError("no", status=404))
    one.report(host=TOLD)
    assert await one.usage(server).look() == ROUND_SECONDS
    assert server.asked == []


async def test_a_namespace_is_listed_by_label_and_its_pod_has_host_memory() -> None:
    one, server = Job(), Server([{"metadata": 3}, metrics("other", pytorch="1Gi"), metrics(pytorch="63Gi")])
    one.report()
    assert await one.usage(server).look() == ROUND_SECONDS
    assert server.asked == [
        ("/apis/metrics.k8s.io/v1beta1/namespaces/train/pods", {"labelSelector": JOB, "limit": 500})
    ]
    assert one.track.usage is not None
    assert one.track.usage.memory_used_bytes == 63 * GIB
    assert one.track.host_source(NOW) == "metrics.k8s.io"
    assert one.track.host_source(NOW + 121) is None


@pytest.mark.parametrize(
    ("answer", "pauses"),
    [
        pytest.param(NotFoundError("no", status=404), [300, 300, 300], id="not served"),
        pytest.param(ForbiddenError("no", status=403), [300, 300, 300], id="forbidden"),
        pytest.param(ServerFaultError("no", status=503), [60, 120, 240], id="served by nobody now"),
        pytest.param(UnreachableError("no"), [60, 120, 240], id="no answer"),
        pytest.param(TooManyRequestsError("no", status=429, retry_after_seconds=90.0), [90, 180, 300], id="patience"),
        pytest.param(b"<html>", [60, 120, 240], id="nonsense"),
        pytest.param(b'{"items": 3}', [60, 120, 240], id="no list"),
        pytest.param(b"[" * 100_000, [60, 120, 240], id="too deep"),
    ],
)
async def test_what_cannot_be_read_is_unknown_and_asked_for_more_seldom(
    answer: KubeError | bytes, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    VirtualClock(monkeypatch)
    one, server = Job(), Server(answer)
    one.report()
    task = asyncio.create_task(one.usage(server).run())
    await asyncio.sleep(1500)
    task.cancel()
    assert [later - before for before, later in pairwise(server.times)][:3] == pytest.approx(pauses, abs=1)
    assert one.track.usage is None
    assert max(pauses) <= MAX_PAUSE_SECONDS


async def test_a_server_that_never_ends_its_list_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualClock(monkeypatch)

    class Endless(Server):
        async def get(self, *_: object) -> bytes:
            await asyncio.sleep(1)
            return msgspec.json.encode({"metadata": {"continue": "on"}, "items": []})

    one = Job()
    one.report()
    assert await one.usage(Endless()).look() == 2 * ROUND_SECONDS


async def test_a_fault_of_ours_ends_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    VirtualClock(monkeypatch)
    usage = PodUsage(cast(KubeClient, Server([])), workloads=lambda: [cast(Workload, 3)], fresh_seconds=60.0, clock=int)
    task = asyncio.create_task(usage.run())
    await asyncio.sleep(1000)
    assert not task.done()
    task.cancel()
    assert "host memory cannot be read" in caplog.text


# In the diagnosis


async def run(one: Job, *, used: str, seconds: int, told: Mapping[str, Any] | None = None) -> Opinion:
    """Let time go by with reports each 15 s, and figures each 30 s where there are some."""
    opinion = Opinion()
    for at in range(int(NOW), int(NOW) + seconds, 15):
        if used and at % 30 == 10:
            await one.usage(Server([metrics(at=at, pytorch=used)]), now=at).look()
        one.report(at, **(told or {}))
        opinion = one.look(at)
    return opinion


async def test_a_pod_near_its_limit_is_a_host_memory_risk() -> None:
    one = Job()
    opinion = await run(one, used="63Gi", seconds=300)
    assert [found.reason for found in opinion.open] == ["HostMemoryRisk"]
    finding = opinion.open[0].finding
    assert (finding.scope.pods, finding.evidence["host_limit_bytes"]) == (("sft-0",), 64 * GIB)
    assert "HostMemoryRisk" not in opinion.unknown


@pytest.mark.parametrize("used", ["10Gi", ""])
async def test_a_pod_with_room_is_known_to_be_well_and_one_that_nobody_tells_is_not(used: str) -> None:
    one = Job()
    opinion = await run(one, used=used, seconds=300)
    assert not opinion.open
    lacks = {lack.reason for lack in coverage(one.history).lacks}
    assert ("HostMemoryRisk" in opinion.unknown, "HostMemoryRisk" in lacks) == (not used, not used)


@pytest.mark.parametrize(
    ("limit", "used", "reason"),
    [
        pytest.param(64 * GIB, "", "NoHostMemory", id="nobody tells it"),
        pytest.param(None, "63Gi", "NoMemoryLimit", id="there is no limit"),
    ],
)
async def test_what_cannot_be_judged_is_unknown(limit: int | None, used: str, reason: str) -> None:
    opinion = await run(Job(limit=limit), used=used, seconds=300)
    assert not opinion.open
    assert opinion.unknown["HostMemoryRisk"][0] == reason


async def test_reports_that_tell_it_win() -> None:
    one = Job()
    await run(one, used="63Gi", seconds=45)
    opinion = await run(one, used="", seconds=300, told={"host": TOLD})
    assert not opinion.open
    line = one.history.pods["sft-0"].last_host
    assert line is not None
    assert (line.memory_used_bytes, line.memory_limit_bytes) == (GIB, 2 * GIB)


async def test_what_lies_in_shm_takes_nothing_from_what_is_known() -> None:
    shm = HostReport(shm_used_bytes=5, shm_size_bytes=9)
    one = Job()
    await run(one, used="10Gi", seconds=75, told={"host": shm})
    line = one.history.pods["sft-0"].last_host
    assert line is not None
    assert (line.memory_used_bytes, line.shm_used_bytes) == (10 * GIB, 5)


@pytest.mark.parametrize("first", [{"used": "63Gi"}, {"used": "", "told": {"host": TOLD}}], ids=["metrics", "reports"])
async def test_what_nobody_tells_any_more_is_unknown(first: dict[str, Any]) -> None:
    one = Job()
    known = {0: "HostMemoryRisk" not in (await run(one, seconds=60, **first)).unknown}
    for at in range(60, 630, 15):
        one.report(NOW + at)
        opinion = one.look(NOW + at)
        known[at] = "HostMemoryRisk" not in opinion.unknown
    assert [known[at] for at in (0, 105, 315, 615)] == [True, True, False, False]
    assert opinion.unknown["HostMemoryRisk"][0] == "NoHostMemory"
    assert not opinion.open
