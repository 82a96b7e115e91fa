# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Lists everything that is watched, now and then, and corrects what a watch missed.

A deletion that happens while a watch is away is never told; and a list is also the one moment in which it is known that
what is not there does not exist. A kind that may not be listed is not judged. Nor is one whose list answers 404, at
first: an API server that has just started, or lags behind another one, does so for CRDs that are there. Only where
discovery does not know the kind either, for long and each time it was asked, it has no objects.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import ForbiddenError, KubeError, NotFoundError, UnreachableError
from verl_gpumonitor_operator.kube.reflector import UNREADABLE, hand_over, list_all

from . import monitors
from .jobs import KINDS, JobKind
from .reconciler import Reconciler

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 120.0
RETRY_SECONDS: Final = 5.0
"""After a sweep that failed; doubled with each further one, up to `SWEEP_SECONDS`."""
ABSENT_SECONDS: Final = 300.0
ABSENT_ANSWERS: Final = 3
"""A kind is gone when discovery did not know it at so many sweeps in a row, the first and last so far apart."""
SETTLE_SWEEPS: Final = 6
"""After so many first sweeps, about 30 s, a kind that still cannot be listed is no longer waited for."""

_decoder = msgspec.json.Decoder(dict[str, Any])


class _Served(msgspec.Struct, frozen=True):
    name: str = ""


class _Discovery(msgspec.Struct, frozen=True):
    """APIResourceList: what the API server serves of one group and version."""

    resources: list[_Served] | None = None


_discovery_decoder = msgspec.json.Decoder(_Discovery)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Absence:
    """How long a kind has not been served."""

    since: float
    answers: int = 1

    def again(self) -> "_Absence":
        return _Absence(since=self.since, answers=self.answers + 1)

    def is_lasting(self, now: float) -> bool:
        return self.answers >= ABSENT_ANSWERS and now - self.since >= ABSENT_SECONDS


@dataclass(kw_only=True, slots=True)
class SweepState:
    """For metrics."""

    sweeps: int = 0
    failures: int = 0
    corrected: int = 0
    """Deletions that no watch had told."""
    absent: set[str] = field(default_factory=set)
    """Kinds that the API server does not serve; whether for good is another question."""
    refused: set[str] = field(default_factory=set)
    """Kinds that may not be listed."""
    failing: set[str] = field(default_factory=set)
    """Kinds whose list failed, each until it works again."""


class Sweeper:
    """Compares what is believed with lists."""

    def __init__(
        self, client: KubeClient, reconciler: Reconciler, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._reconciler = reconciler
        self._clock = clock
        self._absences: dict[str, _Absence] = {}
        self._due = asyncio.Event()
        self.state = SweepState()

    def soon(self) -> None:
        """Have a sweep now rather than in two minutes."""
        self._due.set()

    async def run(self) -> None:
        """Sweep for ever; failures are waited out."""
        retry = RETRY_SECONDS
        while True:
            self._due.clear()
            if await self.sweep():
                wait, retry = SWEEP_SECONDS, RETRY_SECONDS
            else:
                # A foreign kind may be broken for days: its retries must not list all the others every few seconds.
                wait, retry = retry, min(2 * retry, SWEEP_SECONDS)
            try:
                await asyncio.wait_for(self._due.wait(), timeout=wait)
                # Whoever asked may ask again at once (kopf that dies each second): not more often than this.
                await asyncio.sleep(RETRY_SECONDS)
            except TimeoutError:
                continue

    async def complete(self) -> None:
        """Sweep until it has worked once, or until only foreign kinds fail and have been waited for long enough.

        A job of a kind that is left out so does not find its counters from before a restart when it is seen later;
        that is less than no work at all for all others.
        """
        sweeps = 0
        while not await self.sweep():
            # Our own kind is served by the API server itself: where its list fails, too, nothing can be listed.
            sweeps = 0 if monitors.KIND in self.state.failing else sweeps + 1
            if sweeps >= SETTLE_SWEEPS:
                logger.warning("going on without lists", extra={"reason": ", ".join(sorted(self.state.failing))})
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def sweep(self) -> bool:
        """Sweep once. False if a list failed, so that the picture may have holes; the other kinds are judged."""
        worked = await self._attempt(monitors.KIND, self._sweep_monitors())
        # Clusters first: a job that is known knows its cluster then.
        for kind in (JobKind.RAY_CLUSTER, JobKind.RAY_JOB, JobKind.PYTORCH_JOB, JobKind.TRAIN_JOB):
            worked &= await self._attempt(kind.value, self._sweep_jobs(kind))
        if worked:
            self.state.sweeps += 1
        else:
            self.state.failures += 1
        return worked

    async def _attempt(self, kind: str, sweeping: Awaitable[None]) -> bool:
        """Sweep one kind. Its failure (a conversion webhook that is away) is not that of the others."""
        try:
            await sweeping
        except (KubeError, *UNREADABLE) as error:
            if kind not in self.state.failing:
                self.state.failing.add(kind)
                logger.warning("list failed, trying again", extra={"reason": kind, "error": str(error)})
            return False
        self.state.failing.discard(kind)
        return True

    async def _sweep_jobs(self, kind: JobKind) -> None:
        before = self._reconciler.known_jobs(kind)
        listed: set[str] = set()

        def take(body: Mapping[str, Any]) -> None:
            uid = (body.get("metadata") or {}).get("uid")
            if uid:
                listed.add(uid)
                self._reconciler.job_seen(kind, body)

        if not await self._each(kind.value, KINDS[kind].path, take):
            return
        for uid in before - listed:
            self.state.corrected += 1
            self._reconciler.job_gone(kind, uid)
        self._reconciler.kind_listed(kind)

    async def _sweep_monitors(self) -> None:
        before = self._reconciler.known_monitors()
        listed: set[tuple[str, str, str]] = set()

        def take(body: Mapping[str, Any]) -> None:
            metadata = body.get("metadata") or {}
            listed.add((metadata.get("namespace", ""), metadata.get("name", ""), metadata.get("uid", "")))
            self._reconciler.monitor_seen(body)

        path = object_path(monitors.API_VERSION, monitors.PLURAL)
        if not await self._each(monitors.KIND, path, take):
            return
        for namespace, name, uid in before - listed:
            self._reconciler.monitor_gone(namespace, name, uid)

    async def _each(self, kind: str, path: str, take: Callable[[Mapping[str, Any]], None]) -> bool:
        """Give each listed object to `take`. False if the kind is not to be judged by it. Raises KubeError."""
        try:
            async with aclosing(list_all(self._client, path)) as chunks:
                async for items, _ in chunks:
                    for number, raw in enumerate(items):
                        hand_over(take, _decoder.decode(raw), reason=kind)
                        if number % 50 == 49:
                            await asyncio.sleep(0)
        except NotFoundError as error:
            if await self._is_served(path):
                # Its own word against its own: the next sweep knows better.
                self._absences.pop(kind, None)
                raise UnreachableError(f"{error}, although it is served", status=error.status) from error
            self._said(self.state.absent, kind, "kind is not served, its CRD may come later")
            return self._is_gone(kind)
        except ForbiddenError as error:
            self._said(self.state.refused, kind, "kind may not be listed", error=str(error))
            return False
        except KubeError:
            self._absences.pop(kind, None)
            raise
        self._absences.pop(kind, None)
        self.state.absent.discard(kind)
        self.state.refused.discard(kind)
        return True

    async def _is_served(self, path: str) -> bool:
        """Ask discovery for the kind of this list. Raises KubeError."""
        group_version, _, plural = path.rpartition("/")
        try:
            found = _discovery_decoder.decode(await self._client.get(group_version))
        except NotFoundError:
            return False
        return any(resource.name == plural for resource in found.resources or ())

    def _is_gone(self, kind: str) -> bool:
        """Count one more answer that there is no such kind; True once that is lasting."""
        before, now = self._absences.get(kind), self._clock()
        absence = self._absences[kind] = before.again() if before is not None else _Absence(since=now)
        return absence.is_lasting(now)

    def _said(self, kinds: set[str], kind: str, message: str, **keys: str) -> None:
        if kind not in kinds:
            kinds.add(kind)
            logger.info(message, extra={"reason": kind, **keys})
