# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Decisions of the report service, without TLS and HTTP; `tests/contract/ingest` has those."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.unit.ingest.builders import (
    NOW,
    Bundle,
    Clock,
    FakeReviewer,
    Pods,
    Sink,
    Switch,
    pod_record,
    report,
    value_of,
)
from verl_gpumonitor.model.report import (
    MAX_REPORT_BYTES,
    ClusterStages,
    PodRef,
    PodStages,
    RayJobInfo,
    RayNode,
    RayStage,
    decode_answer,
    encode,
)
from verl_gpumonitor.model.stages import StageSource
from verl_gpumonitor_operator.controller.ingest import (
    BodyTooLargeError,
    CertificatesGiven,
    Incoming,
    IngestLimits,
    IngestMetrics,
    Reply,
    ReportService,
    is_ray_head,
)
from verl_gpumonitor_operator.controller.ports import Owner, PodRecord
from verl_gpumonitor_operator.controller.tokens import TokenMetrics, Tokens, claimed_by
from verl_gpumonitor_operator.kube.errors import UnreachableError

POD = pod_record()
HEAD = pod_record(
    name="job-head", uid="uid-head", labels={"ray.io/cluster": "job", "ray.io/node-type": "head"}, gpus_requested=0
)


class Rig:
    """A report service among stand-ins."""

    def __init__(self, *, limits: IngestLimits | None = None) -> None:
        self.clock, self.reviewer, self.registry = Clock(), FakeReviewer(), CollectorRegistry()
        self.pods, self.sink, self.switch, self.bundle = Pods.of(POD, HEAD), Sink(), Switch(), Bundle()
        tokens = Tokens(
            self.reviewer,
            known_pod=claimed_by(self.pods),
            metrics=TokenMetrics(self.registry),
            clock=self.clock,
        )
        self.service = ReportService(
            tokens=tokens,
            pods=self.pods,
            sink=self.sink,
            readiness=self.switch,
            ca=self.bundle,
            metrics=IngestMetrics(self.registry),
            limits=limits,
            clock=self.clock,
        )
        self.token = self.reviewer.issue(POD)
        self.head_token = self.reviewer.issue(HEAD)

    async def send(
        self, body: bytes, *, token: str | None = None, length: int | None = -1, plain: bool = True, delay: float = 0.0
    ) -> Reply:
        async def read(limit: int) -> bytes:
            await asyncio.sleep(delay)
            if len(body) > limit:
                raise BodyTooLargeError
            return body

        return await self.service.answer(
            Incoming(
                authorization=f"Bearer {self.token if token is None else token}",
                length=len(body) if length == -1 else length,
                plain=plain,
                read=read,
            )
        )

    def counted(self, code: int) -> float | None:
        return value_of(self.registry, "gpumonitor_ingest_reports_total", code=str(code))


def error_of(reply: Reply) -> str:
    text = json.loads(reply.body)["error"]
    assert isinstance(text, str)
    return text


async def test_a_good_report_is_handed_on_with_the_tokens_identity() -> None:
    rig = Rig()
    reply = await rig.send(encode(report(POD)))
    assert reply.status == 200
    assert decode_answer(reply.body).accepted == 1
    [(identity, taken)] = rig.sink.taken
    assert (identity.namespace, identity.name, identity.uid, identity.node_name) == (
        "train",
        "job-worker-0",
        "uid-0",
        "node-1",
    )
    assert len(taken.gpus) == 8
    assert rig.counted(200) == 1


async def test_a_replay_is_told_what_was_counted() -> None:
    rig = Rig()
    await rig.send(encode(report(POD, sequence=7)))
    reply = await rig.send(encode(report(POD, sequence=7)))
    assert reply.status == 409
    assert json.loads(reply.body)["accepted"] == 7
    assert (await rig.send(encode(report(POD, sequence=1, start_id="start-0002")))).status == 200, "a new start"
    assert len(rig.sink.taken) == 2


@pytest.mark.parametrize(
    ("pod", "code"),
    [
        pytest.param(None, 403, id="gone"),
        pytest.param(replace(POD, uid="uid-9"), 403, id="another of the same name"),
        pytest.param(replace(POD, phase="Succeeded"), 403, id="succeeded"),
        pytest.param(replace(POD, phase="Failed"), 403, id="failed"),
        pytest.param(replace(POD, injected=None), 403, id="not injected"),
        pytest.param(replace(POD, deleting=True), 200, id="being ended: its last report is welcome"),
        pytest.param(replace(POD, phase="Pending"), 200, id="its sidecar starts before its job"),
    ],
)
async def test_only_a_live_injected_pod_may_report(pod: PodRecord | None, code: int) -> None:
    rig = Rig()
    del rig.pods.by_uid[POD.uid]
    if pod is not None:
        rig.pods.put(pod)
    assert (await rig.send(encode(report(POD)))).status == code


async def test_a_pod_that_ends_while_its_body_is_on_its_way() -> None:
    rig = Rig()
    sending = asyncio.create_task(rig.send(encode(report(POD)), delay=0.02))
    await asyncio.sleep(0.005)
    rig.pods.put(replace(POD, phase="Failed"))
    assert (await sending).status == 403


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(PodRef(namespace="train", name="job-worker-0", uid="uid-1"), id="another uid"),
        pytest.param(PodRef(namespace="train", name="job-worker-1", uid="uid-0"), id="another name"),
        pytest.param(PodRef(namespace="other", name="job-worker-0", uid="uid-0"), id="another namespace"),
    ],
)
async def test_a_report_in_another_pods_name_is_refused(pod: PodRef) -> None:
    rig = Rig()
    assert (await rig.send(encode(report(POD, pod=pod)))).status == 403
    assert rig.sink.taken == []


async def test_only_a_ray_head_may_name_the_gpus_of_other_nodes() -> None:
    rig = Rig()
    nodes = [RayNode(node_ip="10.0.0.1", gpu_uuids=["GPU-1"])]
    assert (await rig.send(encode(report(POD, ray_nodes=nodes)))).status == 403
    assert (await rig.send(encode(report(HEAD, gpus=0, ray_nodes=nodes)), token=rig.head_token)).status == 200


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"ray_jobs": [RayJobInfo(submission_id="raysubmit_1")]}, id="the jobs of the cluster"),
    ],
)
async def test_only_a_ray_head_may_tell(more: dict[str, object]) -> None:
    rig = Rig()
    assert (await rig.send(encode(msgspec.structs.replace(report(POD), **more)))).status == 403
    assert (await rig.send(encode(msgspec.structs.replace(report(HEAD), **more)), token=rig.head_token)).status == 200


WORKER = replace(POD, owner=Owner(api_version="ray.io/v1", kind="RayCluster", name="c", uid="uid-c"))


@pytest.mark.parametrize(
    ("pod", "source", "taken"),
    [
        pytest.param(HEAD, StageSource.RAY_STATE, True, id="a head asks Ray"),
        pytest.param(WORKER, StageSource.MARKS, True, id="verl's driver may run on a worker"),
        pytest.param(WORKER, StageSource.RAY_STATE, False, id="which knows nothing of others else"),
        pytest.param(replace(POD, owner=None), StageSource.MARKS, False, id="a pod of no cluster"),
    ],
)
async def test_who_may_tell_the_stages_of_other_nodes(pod: PodRecord, source: StageSource, taken: bool) -> None:
    """What a pod cannot know is passed over, and its own numbers count all the same."""
    rig = Rig()
    rig.pods.put(pod)
    told = ClusterStages(source=source, known_from=1.0, known_until=2.0)
    body = encode(msgspec.structs.replace(report(pod), cluster_stages=told))
    assert (await rig.send(body, token=rig.head_token if pod is HEAD else rig.token)).status == 200
    (item,) = rig.sink.taken
    assert (item[1].cluster_stages == told) is taken


async def test_what_the_head_says_of_a_pods_stages_is_in_the_answer() -> None:
    rig = Rig()
    stages = PodStages(
        source=StageSource.RAY_STATE,
        known_from=1.0,
        known_until=2.0,
        intervals=[RayStage(stage="gen", role="rollout", begin=1.5)],
    )
    rig.sink.stages = stages
    reply = await rig.send(encode(report(POD)))
    assert decode_answer(reply.body).stages == stages


@pytest.mark.parametrize(
    ("pod", "head"),
    [
        pytest.param(HEAD, True, id="a head that a RayCluster owns"),
        pytest.param(POD, False, id="a worker"),
        pytest.param(replace(HEAD, owner=None), False, id="a pod that only carries the label"),
        pytest.param(
            replace(HEAD, owner=Owner(api_version="apps/v1", kind="ReplicaSet", name="x", uid="y")),
            False,
            id="a labelled pod of a Deployment",
        ),
        pytest.param(
            replace(HEAD, owner=Owner(api_version="evil.io/v1", kind="RayCluster", name="x", uid="y")),
            False,
            id="a kind of that name in another group",
        ),
    ],
)
def test_who_is_a_ray_head(pod: PodRecord, head: bool) -> None:
    assert is_ray_head(pod) is head


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="broken JSON"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"\xff\xfe", id="no UTF-8"),
        pytest.param(b"[" * 100_000, id="deep nesting"),
        pytest.param(encode(report(POD)).replace(b"0.625", b"NaN"), id="NaN"),
        pytest.param(encode(report(POD)).replace(b"0.625", b"Infinity"), id="infinity"),
        pytest.param(encode(report(POD)).replace(b"0.625", b"1e999"), id="a number too large"),
        pytest.param(encode(report(POD)).replace(b"0.625", b"1.5"), id="150 % utilisation"),
        pytest.param(encode(report(POD)).replace(b"0.625", b"-0.1"), id="less than nothing"),
        pytest.param(encode(report(POD, format="gpumonitor-report/9")), id="another format"),
        pytest.param(encode(report(POD, gpus=65)), id="more GPUs than a pod can have"),
        pytest.param(encode(report(POD)).replace(b'"sequence":1', b'"sequence":0'), id="a sequence of zero"),
    ],
)
async def test_what_is_no_report_is_refused(body: bytes) -> None:
    rig = Rig()
    reply = await rig.send(body)
    assert reply.status == 400
    assert error_of(reply)
    assert rig.sink.taken == []


async def test_a_body_that_is_too_long_is_refused_unread() -> None:
    rig = Rig()
    assert (await rig.send(b"", length=MAX_REPORT_BYTES + 1)).status == 413
    assert (await rig.send(b"x" * (MAX_REPORT_BYTES + 1), length=None)).status == 413
    assert (await rig.send(b"x" * (MAX_REPORT_BYTES + 1), length=10)).status == 413, "a length that lies"
    assert value_of(rig.registry, "gpumonitor_report_received_bytes_total") == 0


async def test_a_compressed_body_is_refused_unread() -> None:
    assert (await Rig().send(b"x", plain=False)).status == 400


async def test_a_slow_body_is_given_up() -> None:
    rig = Rig(limits=IngestLimits(body_seconds=0.01))
    assert (await rig.send(encode(report(POD)), delay=5.0)).status == 408


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "Bearer nonsense", "nonsense", "Bearer \x00"],
)
async def test_no_token_or_nonsense(authorization: str | None) -> None:
    rig = Rig()

    async def read(limit: int) -> bytes:
        raise AssertionError("the body is not read")

    incoming = Incoming(authorization=authorization, length=10, plain=True, read=read)
    assert (await rig.service.answer(incoming)).status == 401
    assert rig.counted(401) == 1


async def test_while_not_ready_nothing_is_asked_of_anybody() -> None:
    rig = Rig()
    rig.switch.ready = False
    reply = await rig.send(encode(report(POD)))
    assert (reply.status, reply.retry_after_seconds) == (503, 2.0)
    rig.switch.ready, rig.pods.synced = True, False
    assert (await rig.send(encode(report(POD)))).status == 503
    assert rig.reviewer.asked == []


async def test_an_api_server_that_is_away_is_no_refusal() -> None:
    rig = Rig()
    rig.reviewer.failure = UnreachableError("no route")
    reply = await rig.send(encode(report(POD)))
    assert reply.status == 503
    assert reply.retry_after_seconds is not None


async def test_a_pod_that_sends_too_often_is_put_off_and_the_others_are_not() -> None:
    rig = Rig()
    replies = [await rig.send(encode(report(POD, sequence=number + 1))) for number in range(12)]
    assert [reply.status for reply in replies] == [200] * 10 + [429] * 2
    assert replies[-1].retry_after_seconds == pytest.approx(1.0)
    assert (await rig.send(encode(report(HEAD, gpus=0)), token=rig.head_token)).status == 200
    rig.clock.advance(1.0)
    assert (await rig.send(encode(report(POD, sequence=13)))).status == 200


async def test_bodies_that_are_on_their_way_are_bounded_together() -> None:
    rig = Rig(limits=IngestLimits(bodies_bytes=MAX_REPORT_BYTES))
    first = asyncio.create_task(rig.send(encode(report(POD)), length=None, delay=0.02))
    await asyncio.sleep(0.005)
    assert (await rig.send(encode(report(HEAD, gpus=0)), token=rig.head_token)).status == 503
    assert (await first).status == 200
    assert (await rig.send(encode(report(HEAD, gpus=0)), token=rig.head_token)).status == 200, "and set free again"


async def test_a_fault_of_ours_is_an_answer_that_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()

    def fail(*_: Any) -> Any:
        raise RuntimeError("a fault")

    vars(rig.sink)["accept"] = fail
    reply = await rig.send(encode(report(POD)))
    assert (reply.status, error_of(reply)) == (500, "internal error")
    assert rig.counted(500) == 1
    assert rig.token not in caplog.text
    assert "GPU-0000" not in caplog.text


async def test_certificates_are_handed_over_at_each_start_and_each_change() -> None:
    rig = Rig()

    async def given_to(**changes: Any) -> str | None:
        rig.clock.advance(10.0)
        rig.token = rig.reviewer.issue(POD, expires_at=rig.clock.now + 600)
        return decode_answer((await rig.send(encode(report(POD, **changes)))).body).ca_pem

    assert await given_to(sequence=1) == "PEM-1"
    assert await given_to(sequence=2) is None
    rig.bundle.pem = "PEM-2"
    assert await given_to(sequence=3) == "PEM-2"
    assert await given_to(sequence=4) is None
    assert await given_to(sequence=1, start_id="start-0002") == "PEM-2"
    rig.clock.advance(3600)
    assert await given_to(sequence=2, start_id="start-0002") == "PEM-2", "an answer may have been lost"
    rig.bundle.pem = None
    assert await given_to(sequence=3, start_id="start-0002") is None


def test_what_was_given_is_remembered_within_bounds() -> None:
    given_to = CertificatesGiven(2)
    for number in range(10):
        assert given_to.due(f"uid-{number}", "start", pem="PEM", now=NOW) == "PEM"
    assert given_to.due("uid-9", "start", pem="PEM", now=NOW) is None
    assert given_to.due("uid-0", "start", pem="PEM", now=NOW) == "PEM"


wire = msgspec.json.decode(encode(report(POD, gpus=1)), type=dict[str, Any])
junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none(), max_size=2)


@given(st.dictionaries(st.sampled_from(sorted(wire)), junk, min_size=1, max_size=3))
async def test_a_report_with_any_field_exchanged_gets_a_proper_answer(changes: dict[str, Any]) -> None:
    rig = Rig()
    body = json.dumps(wire | changes).encode()
    assert (await rig.send(body)).status in (200, 400, 403)
    assert rig.counted(500) == 0
