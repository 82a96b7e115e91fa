# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One controller at a time, by a Lease (coordination.k8s.io).

Not the client's own leader election: that one writes local time as UTC and lets a lost connection escape. The rules
are those of client-go: a holder counts as dead when its record has not changed for the lease's duration by *our*
monotonic clock, so that clocks of different machines are never compared. The duration is that of the record, where it
is the longer one: a holder with other settings, as during an upgrade, goes on as long as it has written.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import KubeError, NotFoundError

from .documents import Deployment

logger = logging.getLogger(__name__)

CONFIRMED_SHARE: Final = 2 / 3
"""Part of the duration for which a renewal lets us write. The last third is the margin for what is under way."""
MAX_DURATION_SECONDS: Final = 300.0
"""Longest duration that a record may ask us to wait, as the chart bounds it."""


class _LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _LeaseMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _Lease(msgspec.Struct, frozen=True):
    metadata: _LeaseMeta = _LeaseMeta()
    spec: _LeaseSpec = _LeaseSpec()


_decoder = msgspec.json.Decoder(_Lease)


class Claim(StrEnum):
    """What to do about a Lease."""

    RENEW = "renew"
    TAKE = "take"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A Lease's record, and when (monotonic seconds) it was first seen to be just so."""

    holder: str
    version: str
    since: float
    duration_seconds: float = 0.0
    """For how long its holder takes it to be held; 0: it does not say."""


def decide(seen: Observation, *, identity: str, now: float, duration_seconds: float) -> Claim:
    """Say whether a Lease is ours to renew, free to take, or held by somebody alive. `duration_seconds`: our own."""
    if seen.holder == identity:
        return Claim.RENEW
    held_seconds = max(duration_seconds, min(seen.duration_seconds, MAX_DURATION_SECONDS))
    if not seen.holder or now - seen.since > held_seconds:
        return Claim.TAKE
    return Claim.WAIT


class Lease:
    """Takes, renews and gives back one Lease."""

    def __init__(
        self, client: KubeClient, owner: Deployment, *, namespace: str, name: str, identity: str, duration: float
    ) -> None:
        self._client = client
        self._owner = owner
        self._name = name
        self._list = object_path("coordination.k8s.io/v1", "leases", namespace=namespace)
        self._path = object_path("coordination.k8s.io/v1", "leases", namespace=namespace, name=name)
        self._identity = identity
        self._duration = duration
        self._seen: Observation | None = None
        self._renewed = -math.inf
        """When the newest renewal that worked was sent: from then on at the latest, others count the duration."""
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self.leading = False
        """Whether this process holds the Lease, as far as it knows."""

    @property
    def confirmed(self) -> bool:
        """It was renewed a short time ago, so that nobody else can hold it. Without that, nothing is written.

        Asked of the clock each time, since a renewal that hangs, or a loop that stood still, tells nobody.
        """
        return self.leading and self._now() - self._renewed < self._duration * CONFIRMED_SHARE

    async def acquire(self) -> None:
        """Return when the Lease is ours. Failures are waited out."""
        while True:
            try:
                if await self._claimed(timeout=self._duration, taking=True):
                    self.leading = True
                    logger.info("leading", extra={"lease": self._name, "holder": self._identity})
                    return
            except (KubeError, TimeoutError, msgspec.DecodeError) as error:
                logger.warning("lease cannot be taken, trying again", extra={"error": str(error)})
            await asyncio.sleep(min(2.0, self._duration / 5))

    async def hold(self) -> None:
        """Renew until somebody else held the Lease, then return: the process must end.

        While the API server is away nobody can take the Lease, so that this goes on; but after two thirds of its
        duration without a renewal it is no longer `confirmed`.
        """
        while True:
            await asyncio.sleep(self._duration / 5)
            try:
                if not await self._claimed(timeout=self._duration / 2, taking=False):
                    break
            except (KubeError, TimeoutError, msgspec.DecodeError) as error:
                if self.confirmed:
                    logger.warning("lease was not renewed, trying again", extra={"error": str(error)})
        self.leading = False
        logger.error("lease is lost", extra={"lease": self._name})

    async def _claimed(self, *, timeout: float, taking: bool) -> bool:  # noqa: ASYNC109 - of this one attempt
        sent = self._now()
        claimed = await asyncio.wait_for(self._claim(taking=taking), timeout=timeout)
        if claimed:
            self._renewed = sent
        return claimed

    async def release(self) -> None:
        """Give the Lease back, so that a successor need not wait. Failures do not matter: it expires."""
        if not self.leading:
            return
        self.leading = False
        try:
            found = _decoder.decode(await self._client.get(self._path))
            if found.spec.holder_identity == self._identity:
                await self._put(found, holder="", taken=False)
        except (KubeError, msgspec.DecodeError) as error:
            logger.warning("lease was not given back", extra={"error": str(error)})

    async def _claim(self, *, taking: bool) -> bool:
        """Renew the Lease, or create it; False while somebody else holds it. Raises KubeError.

        Without `taking` it is not taken from a holder that is gone either: whoever that was has written meanwhile, and
        what this process believes to be there is not.
        """
        try:
            found = _decoder.decode(await self._client.get(self._path))
        except NotFoundError:
            metadata = await self._owner.metadata(self._name)
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            await self._client.post(self._list, {**body, "spec": self._spec(_LeaseSpec(), self._identity, taken=True)})
            return True
        seen = self._observe(found)
        claim = decide(seen, identity=self._identity, now=self._now(), duration_seconds=self._duration)
        if claim is Claim.WAIT or (claim is Claim.TAKE and not taking):
            return False
        await self._put(found, holder=self._identity, taken=claim is Claim.TAKE)
        return True

    def _observe(self, found: _Lease) -> Observation:
        holder, version = found.spec.holder_identity or "", found.metadata.resource_version
        if self._seen is None or (self._seen.holder, self._seen.version) != (holder, version):
            duration = float(found.spec.lease_duration_seconds or 0)
            self._seen = Observation(holder=holder, version=version, since=self._now(), duration_seconds=duration)
        return self._seen

    async def _put(self, found: _Lease, *, holder: str, taken: bool) -> None:
        metadata = await self._owner.metadata(self._name)
        metadata["resourceVersion"] = found.metadata.resource_version
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        await self._client.put(self._path, {**body, "spec": self._spec(found.spec, holder, taken=taken)})

    def _spec(self, before: _LeaseSpec, holder: str, *, taken: bool) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(self._duration),
            "acquireTime": now if taken or before.acquire_time is None else before.acquire_time,
            "renewTime": now,
            "leaseTransitions": (before.lease_transitions or 0) + (1 if taken else 0),
        }
