# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
import asyncio
import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.unit.ingest.builders import (
    NOW,
    REFUSED_STATUS,
    Clock,
    FakeReviewer,
    Pods,
    accepted_status,
    claims,
    jwt,
    pod_record,
    value_of,
)
from verl_gpumonitor_operator.controller.ports import PodIdentity
from verl_gpumonitor_operator.controller.rates import Rate
from verl_gpumonitor_operator.controller.tokens import (
    Claims,
    IdentityError,
    ReviewFailedError,
    ReviewsThrottledError,
    TokenLimits,
    TokenMetrics,
    TokenRefusedError,
    Tokens,
    claimed_by,
    identity_of,
    read_claims,
)
from verl_gpumonitor_operator.kube.errors import ForbiddenError, TooManyRequestsError, UnreachableError

POD = pod_record()
IDENTITY = PodIdentity(namespace="train", name="job-worker-0", uid="uid-0", node_name="node-1")


def test_claims_of_a_projected_token_are_read() -> None:
    assert read_claims(jwt(claims(POD))) == Claims(
        namespace="train", pod_name="job-worker-0", pod_uid="uid-0", expires_at=NOW + 3600
    )


def test_an_audience_may_be_a_string() -> None:
    assert read_claims(jwt(claims(POD, audience="gpumonitor.dev"))).pod_uid == "uid-0"


@pytest.mark.parametrize(
    "token",
    [
        pytest.param("", id="empty"),
        pytest.param("abc", id="no JWT"),
        pytest.param("a.b", id="two parts"),
        pytest.param("a.b.c.d", id="four parts"),
        pytest.param("a.!!!.c", id="no base64"),
        pytest.param("a.e30.c", id="an empty payload"),
        pytest.param("ä." + "e30" + ".c", id="not ASCII"),
        pytest.param("a." + "A" * 9000 + ".c", id="too long"),
        pytest.param(jwt([1, 2]), id="a payload that is a list"),
        pytest.param(jwt(claims(POD, audience=("other",))), id="another audience"),
        pytest.param(jwt(claims(POD, audience=())), id="no audience"),
        pytest.param(jwt(claims(POD) | {"exp": "soon"}), id="an expiry in words"),
        pytest.param(jwt(claims(POD) | {"exp": -1}), id="an expiry before all time"),
        pytest.param(jwt({k: v for k, v in claims(POD).items() if k != "exp"}), id="no expiry"),
        pytest.param(jwt(claims(POD) | {"kubernetes.io": {"namespace": "train"}}), id="bound to no pod"),
        pytest.param(jwt(claims(POD) | {"kubernetes.io": None}), id="no Kubernetes claims"),
        pytest.param("a." + base64.urlsafe_b64encode(b"[" * 5000).decode() + ".c", id="deep nesting"),
    ],
)
def test_a_token_that_could_never_pass_is_refused_unasked(token: str) -> None:
    with pytest.raises(TokenRefusedError):
        read_claims(token)


@given(st.text(max_size=300))
def test_any_text_is_either_claims_or_refused(token: str) -> None:
    try:
        read_claims(token)
    except TokenRefusedError:
        return


@given(st.binary(max_size=300))
def test_any_payload_is_either_claims_or_refused(payload: bytes) -> None:
    try:
        read_claims(f"a.{base64.urlsafe_b64encode(payload).decode().rstrip('=')}.c")
    except TokenRefusedError:
        return


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "exp": json_values,
            "aud": json_values | st.just(["gpumonitor.dev"]),
            "kubernetes.io": json_values
            | st.fixed_dictionaries({"namespace": json_values, "pod": st.just({"name": "p", "uid": "u"})}),
        },
    )
)
def test_claims_that_are_read_are_whole(payload: dict[str, Any]) -> None:
    try:
        read = read_claims(jwt(payload))
    except TokenRefusedError:
        return
    assert read.namespace and read.pod_name and read.pod_uid and read.expires_at > 0


def test_a_review_names_the_pod_and_its_node() -> None:
    assert identity_of(accepted_status(POD)) == IDENTITY


def test_before_1_32_a_review_names_no_node() -> None:
    status: dict[str, Any] = accepted_status(POD)
    del status["user"]["extra"]["authentication.kubernetes.io/node-name"]
    assert identity_of(status).node_name is None


def _with_extra(**extra: object) -> dict[str, object]:
    status: dict[str, Any] = accepted_status(POD)
    status["user"]["extra"] |= {f"authentication.kubernetes.io/{key.replace('_', '-')}": v for key, v in extra.items()}
    return status


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(REFUSED_STATUS, id="not authenticated"),
        pytest.param({}, id="an empty status"),
        pytest.param({"authenticated": "yes"}, id="a status of other types"),
        pytest.param(accepted_status(POD, audiences=[]), id="an authenticator that knows no audiences"),
        pytest.param(accepted_status(POD, audiences=["https://kubernetes.default.svc"]), id="another audience"),
        pytest.param(accepted_status(POD, user={"username": "kubernetes-admin"}), id="a user"),
        pytest.param(_with_extra(pod_name=[]), id="no pod name"),
        pytest.param(_with_extra(pod_uid=[""]), id="an empty uid"),
        pytest.param(_with_extra(pod_uid=["uid-0", "uid-1"]), id="two pods"),
    ],
)
def test_a_review_that_names_no_pod_for_our_audience_is_a_refusal(status: dict[str, object]) -> None:
    with pytest.raises(TokenRefusedError):
        identity_of(status)


class Rig:
    """Tokens beside a fake API server, on a virtual clock."""

    def __init__(self, *pods: Any, limits: TokenLimits | None = None) -> None:
        self.clock = Clock()
        self.reviewer = FakeReviewer()
        self.registry = CollectorRegistry()
        self.pods = Pods.of(*pods)
        self.tokens = Tokens(
            self.reviewer,
            known_pod=claimed_by(self.pods),
            metrics=TokenMetrics(self.registry),
            limits=limits,
            clock=self.clock,
        )

    def counted(self, result: str) -> float | None:
        return value_of(self.registry, "gpumonitor_token_lookups_total", result=result)


async def test_a_good_token_is_reviewed_once_until_it_expires() -> None:
    rig = Rig(POD)
    token = rig.reviewer.issue(POD, expires_at=NOW + 600)
    for _ in range(5):
        assert await rig.tokens.identify(token) == IDENTITY
        rig.clock.advance(100)
    assert len(rig.reviewer.asked) == 1
    rig.clock.advance(99)
    assert await rig.tokens.identify(token) == IDENTITY
    rig.clock.advance(1)
    await rig.tokens.identify(token)
    assert len(rig.reviewer.asked) == 2, "at its expiry the API server is asked again"
    assert (rig.counted("accepted"), rig.counted("remembered")) == (2, 5)


async def test_a_long_lived_token_is_reviewed_each_hour() -> None:
    rig = Rig(POD)
    token = rig.reviewer.issue(POD, expires_at=NOW + 365 * 86400)
    await rig.tokens.identify(token)
    rig.clock.advance(3601)
    await rig.tokens.identify(token)
    assert len(rig.reviewer.asked) == 2


async def test_a_token_long_expired_is_refused_unasked() -> None:
    rig = Rig(POD)
    token = rig.reviewer.issue(POD, expires_at=NOW - 61)
    with pytest.raises(TokenRefusedError, match="expired"):
        await rig.tokens.identify(token)
    assert rig.reviewer.asked == []


async def test_a_token_just_expired_is_left_to_the_api_server_and_not_remembered_as_good() -> None:
    rig = Rig(POD)
    token = rig.reviewer.issue(POD, expires_at=NOW - 5)
    await rig.tokens.identify(token)
    await rig.tokens.identify(token)
    assert len(rig.reviewer.asked) == 2
    assert rig.tokens.remembered == 0


async def test_a_refused_token_is_asked_about_again_after_a_while() -> None:
    rig = Rig(POD)
    forged = jwt(claims(POD))
    for _ in range(3):
        with pytest.raises(TokenRefusedError):
            await rig.tokens.identify(forged)
    assert len(rig.reviewer.asked) == 1
    rig.clock.advance(31)
    with pytest.raises(TokenRefusedError):
        await rig.tokens.identify(forged)
    assert len(rig.reviewer.asked) == 2


async def test_questions_about_one_token_share_one_review() -> None:
    rig = Rig(POD)
    rig.reviewer.delay_seconds = 0.01
    token = rig.reviewer.issue(POD)
    assert await asyncio.gather(*(rig.tokens.identify(token) for _ in range(50))) == [IDENTITY] * 50
    assert len(rig.reviewer.asked) == 1


async def test_a_caller_that_goes_away_takes_nobody_along() -> None:
    rig = Rig(POD)
    rig.reviewer.delay_seconds = 0.02
    token = rig.reviewer.issue(POD)
    first = asyncio.create_task(rig.tokens.identify(token))
    await asyncio.sleep(0)
    second = asyncio.create_task(rig.tokens.identify(token))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == IDENTITY
    assert len(rig.reviewer.asked) == 1


@pytest.mark.parametrize(
    ("failure", "wait"),
    [
        pytest.param(UnreachableError("no route"), 2.0, id="unreachable"),
        pytest.param(ForbiddenError("no right to review", status=403), 2.0, id="we lack the right"),
        pytest.param(TooManyRequestsError("later", retry_after_seconds=7.0), 7.0, id="the API server names a time"),
    ],
)
async def test_a_failing_api_server_is_never_a_refusal(failure: Any, wait: float) -> None:
    rig = Rig(POD)
    token = rig.reviewer.issue(POD)
    rig.reviewer.failure = failure
    with pytest.raises(ReviewFailedError) as caught:
        await rig.tokens.identify(token)
    assert caught.value.retry_after_seconds == wait
    rig.reviewer.failure = None
    assert await rig.tokens.identify(token) == IDENTITY, "and it is not remembered"
    assert rig.counted("failed") == 1


async def test_a_hanging_api_server_is_given_up() -> None:
    rig = Rig(POD, limits=TokenLimits(timeout_seconds=0.01))
    rig.reviewer.delay_seconds = 5.0
    with pytest.raises(ReviewFailedError):
        await rig.tokens.identify(rig.reviewer.issue(POD))


async def test_forged_tokens_of_unknown_pods_do_not_use_up_the_budget_of_real_ones() -> None:
    rig = Rig(POD)
    outcomes = []
    for number in range(500):
        forged = jwt(claims(pod_record(uid=f"unknown-{number}")))
        with pytest.raises(IdentityError) as caught:
            await rig.tokens.identify(forged)
        outcomes.append(type(caught.value))
    assert len(rig.reviewer.asked) == 20
    assert outcomes.count(ReviewsThrottledError) == 480
    assert await rig.tokens.identify(rig.reviewer.issue(POD)) == IDENTITY
    assert rig.counted("throttled") == 480


async def test_forged_tokens_in_one_pods_name_cost_that_pod_alone() -> None:
    other = pod_record(uid="uid-1", name="job-worker-1")
    rig = Rig(POD, other)
    good = rig.reviewer.issue(POD)
    assert await rig.tokens.identify(good) == IDENTITY
    for number in range(100):
        with pytest.raises(IdentityError):
            await rig.tokens.identify(jwt(claims(POD), signature=f"forged{number}"))
    assert len(rig.reviewer.asked) == 5
    assert await rig.tokens.identify(good) == IDENTITY, "what is remembered costs nothing"
    assert (await rig.tokens.identify(rig.reviewer.issue(other))).uid == "uid-1"


async def test_ten_thousand_pods_are_known_within_a_minute_of_a_restart() -> None:
    # A tenth of it: 1,000 pods on a tenth of the default budget.
    default = TokenLimits().known
    limits = TokenLimits(known=Rate(burst=default.burst / 10, per_second=default.per_second / 10))
    pods = [pod_record(uid=f"uid-{number}") for number in range(1000)]
    rig = Rig(*pods, limits=limits)
    waiting = [rig.reviewer.issue(pod) for pod in pods]
    for _ in range(60):
        left = []
        for token in waiting:
            try:
                await rig.tokens.identify(token)
            except ReviewsThrottledError:
                left.append(token)
        waiting = left
        rig.clock.advance(1.0)
    assert waiting == []


async def test_the_memory_is_bounded_and_forgets() -> None:
    limits = TokenLimits(capacity=10, refused_capacity=5, unknown=Rate(burst=1e9, per_second=1))
    rig = Rig(limits=limits)
    for number in range(100):
        await rig.tokens.identify(rig.reviewer.issue(pod_record(uid=f"u{number}")))
        with pytest.raises(TokenRefusedError):
            await rig.tokens.identify(jwt(claims(POD), signature=f"forged{number}"))
    assert rig.tokens.remembered == 15
    rig.clock.advance(3600)
    await rig.tokens.identify(rig.reviewer.issue(POD, expires_at=rig.clock.now + 600))
    assert rig.tokens.remembered == 6, "what has ended goes when something comes"


async def test_more_reviews_than_may_wait_are_put_off() -> None:
    pods = [pod_record(uid=f"uid-{number}") for number in range(10)]
    rig = Rig(*pods, limits=TokenLimits(waiting=3))
    rig.reviewer.delay_seconds = 0.05
    outcomes = await asyncio.gather(
        *(rig.tokens.identify(rig.reviewer.issue(pod)) for pod in pods), return_exceptions=True
    )
    assert sum(isinstance(outcome, PodIdentity) for outcome in outcomes) == 3
    assert sum(isinstance(outcome, ReviewsThrottledError) for outcome in outcomes) == 7


async def test_closing_ends_what_is_under_way() -> None:
    rig = Rig(POD)
    rig.reviewer.delay_seconds = 60
    task = asyncio.create_task(rig.tokens.identify(rig.reviewer.issue(POD)))
    await asyncio.sleep(0)
    await rig.tokens.close()
    with pytest.raises(asyncio.CancelledError):
        await task
