# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whose token is it? Asks the API server by TokenReview, remembers the answer, and is not to be flooded.

A sidecar's token is a projected service-account token with our audience, bound to its pod. Only the API server is
believed; what the token says of itself, unproven, serves two ends alone: to refuse at once what could never pass, and
to choose which budget of reviews pays for it. So forged tokens can use up neither the API server nor the budget of
those whose claimed pod is really there.

Nothing here logs or keeps a token: the key of the memory is its SHA-256.

    IdentityError
    ├── TokenRefusedError      the token is none of ours, or no more: 401
    ├── ReviewsThrottledError  too many unknown tokens: 429
    └── ReviewFailedError      the API server gave no answer: 503, since the token may well be good
"""

import asyncio
import base64
import binascii
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, Counter

from verl_gpumonitor.model.wiring import TOKEN_AUDIENCE
from verl_gpumonitor_operator.kube.errors import KubeError

from .ports import PodDirectory, PodIdentity, TokenReviewer
from .rates import Bucket, KeyedBuckets, Rate

MAX_TOKEN_CHARS: Final = 8192
"""Service-account tokens have about 1,200 characters; long names and group lists do not occur in them."""

USERNAME_PREFIX: Final = "system:serviceaccount:"
EXTRA_POD_NAME: Final = "authentication.kubernetes.io/pod-name"
EXTRA_POD_UID: Final = "authentication.kubernetes.io/pod-uid"
EXTRA_NODE_NAME: Final = "authentication.kubernetes.io/node-name"

_Text = Annotated[str, Meta(min_length=1, max_length=256)]


class IdentityError(Exception):
    """It cannot be said who the sender is. The text may be shown to the sender."""


class TokenRefusedError(IdentityError):
    """No, broken, expired or foreign token, or one that is not bound to a pod."""


class ReviewsThrottledError(IdentityError):
    """More unknown tokens than the API server is to be asked about."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("too many unknown tokens are being reviewed")
        self.retry_after_seconds = retry_after_seconds


class ReviewFailedError(IdentityError):
    """The API server could not be asked."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("the API server cannot review the token now")
        self.retry_after_seconds = retry_after_seconds


class _PodClaim(msgspec.Struct, frozen=True):
    name: _Text
    uid: _Text


class _KubernetesClaims(msgspec.Struct, frozen=True):
    namespace: _Text
    pod: _PodClaim


class _Payload(msgspec.Struct, frozen=True):
    exp: Annotated[float, Meta(gt=0, lt=1e11)]
    aud: list[str] | str
    claims: _KubernetesClaims = msgspec.field(name="kubernetes.io")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """What a token says of itself. Unproven."""

    namespace: str
    pod_name: str
    pod_uid: str
    expires_at: float
    """Unix seconds."""


_payload_decoder = msgspec.json.Decoder(_Payload)


def read_claims(token: str) -> Claims:
    """Read the payload of a JWT without checking its signature. Raises TokenRefusedError where it could never pass."""
    if len(token) > MAX_TOKEN_CHARS:
        raise TokenRefusedError("the token is too long")
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        raise TokenRefusedError("the token is no JWT")
    try:
        raw = base64.b64decode(parts[1] + "=" * (-len(parts[1]) % 4), altchars=b"-_", validate=True)
        payload = _payload_decoder.decode(raw)
    except (binascii.Error, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise TokenRefusedError("the token is not one of a service account bound to a pod") from error
    if TOKEN_AUDIENCE not in ([payload.aud] if isinstance(payload.aud, str) else payload.aud):
        raise TokenRefusedError(f"the token is not meant for the audience {TOKEN_AUDIENCE}")
    pod = payload.claims.pod
    return Claims(namespace=payload.claims.namespace, pod_name=pod.name, pod_uid=pod.uid, expires_at=float(payload.exp))


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    extra: dict[str, list[str]] = {}


class _ReviewStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    audiences: list[str] = []
    user: _User = _User()


def identity_of(status: Mapping[str, object]) -> PodIdentity:
    """Read `status` of a TokenReview. Raises TokenRefusedError unless it names, for our audience, just one pod."""
    try:
        review = msgspec.convert(status, _ReviewStatus)
    except msgspec.ValidationError as error:
        raise TokenRefusedError("the API server's review cannot be read") from error
    if not review.authenticated:
        raise TokenRefusedError("the API server does not accept the token: expired, revoked or not its own")
    if TOKEN_AUDIENCE not in review.audiences:
        # An authenticator that knows no audiences would say yes to any token of the cluster.
        raise TokenRefusedError(f"the token is not meant for the audience {TOKEN_AUDIENCE}")
    namespace = _namespace(review.user.username)
    name, uid = _only(review.user.extra, EXTRA_POD_NAME), _only(review.user.extra, EXTRA_POD_UID)
    if namespace is None or name is None or uid is None:
        raise TokenRefusedError("the token is not bound to a pod")
    return PodIdentity(namespace=namespace, name=name, uid=uid, node_name=_only(review.user.extra, EXTRA_NODE_NAME))


def _namespace(username: str) -> str | None:
    """`system:serviceaccount:train:default` gives `train`; None for whoever is no service account."""
    namespace, _, account = username.removeprefix(USERNAME_PREFIX).partition(":")
    return namespace if username.startswith(USERNAME_PREFIX) and namespace and account else None


def _only(extra: Mapping[str, list[str]], key: str) -> str | None:
    values = extra.get(key, [])
    return values[0] if len(values) == 1 and values[0] else None


class TokenLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long answers are remembered, and how often the API server is asked."""

    remember_seconds: float = 3600.0
    """Longest memory of a good token; it ends with the token's own life before that."""
    remember_refused_seconds: float = 10.0
    """Short, since an API server may hear of a new pod a moment after its kubelet did."""
    capacity: int = 50_000
    """Good tokens remembered: each pod has one, two around its renewal."""
    refused_capacity: int = 4096
    skew_seconds: float = 60.0
    """A token that says it expired longer ago than this is refused unasked."""
    known: Rate = Rate(burst=500, per_second=250)
    """Reviews of tokens that name a live, injected pod. 10,000 pods after a restart are through in 40 s."""
    unknown: Rate = Rate(burst=20, per_second=5)
    """Reviews of all other tokens together."""
    each_pod: Rate = Rate(burst=5, per_second=0.2)
    """Reviews of tokens that name one and the same pod."""
    concurrent: int = 64
    waiting: int = 1024
    """Reviews asked for and not yet answered, at most."""
    timeout_seconds: float = 5.0
    retry_after_seconds: float = 2.0
    """What a sender is told to wait when the API server gave no answer and named no time."""


class TokenMetrics:
    """Counters of the reviews."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lookups = Counter(
            "gpumonitor_token_lookups",
            "Tokens looked at, by how it was known whose they are.",
            ["result"],
            registry=registry,
        )
        results = ("remembered", "refused_unasked", "accepted", "refused", "failed", "throttled")
        self._by_result = {result: self._lookups.labels(result) for result in results}

    def count(self, result: str) -> None:
        """Count one. `result`: remembered, refused_unasked, accepted, refused, failed or throttled."""
        self._by_result[result].inc()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """One answer: an identity, or why there is none.

    It holds texts, not exceptions: an exception that is raised again and again keeps the frames of each time.
    """

    identity: PodIdentity | None = None
    refusal: str = ""
    retry_after_seconds: float | None = None
    """Set when the API server gave no answer."""
    until: float = 0.0
    """Unix seconds until which it is remembered; 0: not at all."""

    def outcome(self) -> PodIdentity:
        """Return the identity. Raises ReviewFailedError or TokenRefusedError."""
        if self.identity is not None:
            return self.identity
        if self.retry_after_seconds is not None:
            raise ReviewFailedError(self.retry_after_seconds)
        raise TokenRefusedError(self.refusal)


class Tokens:
    """Says whose token it is. Concurrent questions about one token share one review.

    `known_pod` is asked with unproven claims, and only to choose the budget; see `claimed_by`.
    """

    def __init__(
        self,
        reviewer: TokenReviewer,
        *,
        known_pod: Callable[[Claims], bool],
        metrics: TokenMetrics,
        limits: TokenLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reviewer = reviewer
        self._known_pod = known_pod
        self._metrics = metrics
        self._limits = limits = limits or TokenLimits()
        self._clock = clock
        self._good: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._refused: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[_Verdict]] = {}
        self._slots = asyncio.Semaphore(limits.concurrent)
        self._known = Bucket(limits.known, clock())
        self._unknown = Bucket(limits.unknown, clock())
        self._each_pod = KeyedBuckets(limits.each_pod, capacity=limits.capacity)

    async def identify(self, token: str) -> PodIdentity:
        """Return the pod whose token it is. Raises IdentityError, one of its three kinds."""
        key = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        verdict = self._remembered(key)
        if verdict is None:
            # The review goes on for the others, and for the memory, when this caller goes away.
            verdict = await asyncio.shield(self._running.get(key) or self._ask(key, token))
        else:
            self._metrics.count("remembered")
        return verdict.outcome()

    def _remembered(self, key: bytes) -> _Verdict | None:
        verdict = self._good.get(key) or self._refused.get(key)
        if verdict is None or self._clock() < verdict.until:
            return verdict
        self._good.pop(key, None)
        self._refused.pop(key, None)
        return None

    def _ask(self, key: bytes, token: str) -> asyncio.Task[_Verdict]:
        now = self._clock()
        claims = self._read(token, now)
        self._pay(claims, now)
        task = asyncio.get_running_loop().create_task(self._review(token, claims), name="token-review")
        self._running[key] = task
        task.add_done_callback(lambda done: self._remember(key, done))
        return task

    def _read(self, token: str, now: float) -> Claims:
        try:
            claims = read_claims(token)
            if claims.expires_at + self._limits.skew_seconds < now:
                raise TokenRefusedError("the token has expired")
        except TokenRefusedError:
            self._metrics.count("refused_unasked")
            raise
        return claims

    def _pay(self, claims: Claims, now: float) -> None:
        """Take one review out of the budgets that pay for it. Raises ReviewsThrottledError."""
        wait = self._limits.retry_after_seconds
        if len(self._running) < self._limits.waiting:
            if self._known_pod(claims):
                # Nothing is taken from one budget where the other is empty: neither do one pod's forgeries eat into
                # that of all, nor does the rush after a restart eat into the pod's own.
                wait = self._known.wait(now) or self._each_pod.take(claims.pod_uid, now)
                if wait == 0.0:
                    self._known.take(now)
            else:
                wait = self._unknown.take(now)
        if wait > 0.0:
            self._metrics.count("throttled")
            raise ReviewsThrottledError(wait)

    async def _review(self, token: str, claims: Claims) -> _Verdict:
        try:
            async with asyncio.timeout(self._limits.timeout_seconds), self._slots:
                status = await self._reviewer.review_token(token, TOKEN_AUDIENCE)
        except (KubeError, TimeoutError) as error:
            self._metrics.count("failed")
            named = error.retry_after_seconds if isinstance(error, KubeError) else None
            return _Verdict(retry_after_seconds=named or self._limits.retry_after_seconds)
        now = self._clock()
        try:
            identity = identity_of(status)
        except TokenRefusedError as error:
            self._metrics.count("refused")
            return _Verdict(refusal=str(error), until=now + self._limits.remember_refused_seconds)
        self._metrics.count("accepted")
        return _Verdict(identity=identity, until=min(claims.expires_at, now + self._limits.remember_seconds))

    def _remember(self, key: bytes, done: asyncio.Task[_Verdict]) -> None:
        self._running.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        verdict = done.result()
        if verdict.until <= self._clock():
            return
        good = verdict.identity is not None
        memory, capacity = (
            (self._good, self._limits.capacity) if good else (self._refused, self._limits.refused_capacity)
        )
        memory[key] = verdict
        now = self._clock()
        # What came first mostly ends first, so the memory stays about as large as the number of pods.
        while len(memory) > capacity or next(iter(memory.values())).until <= now:
            memory.popitem(last=False)

    @property
    def remembered(self) -> int:
        """How many answers are remembered, good and refused."""
        return len(self._good) + len(self._refused)

    async def close(self) -> None:
        """End the reviews that are under way."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def claimed_by(directory: PodDirectory) -> Callable[[Claims], bool]:
    """Return the question whether claims name a pod that may report: there, live, and injected."""

    def known(claims: Claims) -> bool:
        pod = directory.find(claims.namespace, claims.pod_name, claims.pod_uid)
        return pod is not None and pod.live and pod.injected is not None

    return known
