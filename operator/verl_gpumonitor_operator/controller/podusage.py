# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory of pods whose reports bring none, from metrics.k8s.io where the cluster serves it.

A sidecar sees the memory of its own container alone. Ray's agent and the library's marks tell the job's; of a program
that has neither, as supervised fine-tuning by torchrun mostly, the kubelet's figures are all there is. Only namespaces
with such pods are asked, one request at a time, so that nothing is asked where all is known. What cannot be read is
not known: no value outlives `OLD_SECONDS`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Final, NamedTuple

import msgspec

from verl_gpumonitor.model.kubernetes import JOB_NAME, RAY_CLUSTER, unix_seconds
from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import ForbiddenError, KubeError, NotFoundError
from verl_gpumonitor_operator.kube.reflector import UNREADABLE, list_all
from verl_gpumonitor_operator.quantities import UNIT, parse

from .podtrack import USAGE_SECONDS, PodTrack
from .ports import HostUsage, PodRecord
from .telemetry import RAY_SECONDS
from .workload import Workload

logger = logging.getLogger(__name__)

GROUP_VERSION: Final = "metrics.k8s.io/v1beta1"
ROUND_SECONDS: Final = 30.0
"""Between two rounds. metrics-server itself asks the kubelets each 15 s, on many clusters each minute."""
MAX_PAUSE_SECONDS: Final = 300.0
"""After failures, and where the group is not served or may not be read: that may change at any time."""
LIST_SECONDS: Final = 20.0
"""For one list with all its pages."""
OLD_SECONDS: Final = USAGE_SECONDS
"""A sample whose own time is so far from ours, either way, says nothing of now."""
MOST_BYTES: Final = 2**60


class Place(NamedTuple):
    """What is listed at once: pods of a namespace that have a label."""

    namespace: str
    label: str


class _Meta(msgspec.Struct, frozen=True):
    name: str


class _Container(msgspec.Struct, frozen=True):
    name: str
    usage: dict[str, str | int | float] = {}


class PodMetrics(msgspec.Struct, frozen=True):
    """The few fields of a `PodMetrics` that are needed."""

    metadata: _Meta
    timestamp: str | None = None
    containers: list[_Container] = []


_decoder = msgspec.json.Decoder(PodMetrics)


def unheard(workloads: Iterable[Workload], *, now: float, fresh_seconds: float) -> dict[Place, dict[str, PodTrack]]:
    """Return the pods to ask for, by name: those that run, have GPUs, and report, and whose host memory nobody tells.

    `fresh_seconds`: age up to which a report is the present. A Ray pod has its agent's first minutes: figures of two
    sources are not to be mixed for nothing.
    """
    found: dict[Place, dict[str, PodTrack]] = {}
    for workload in workloads:
        if workload.job.ended or workload.gone_at is not None:
            continue
        for track in workload.pods():
            if _is_unheard(track, now=now, fresh_seconds=fresh_seconds):
                record = track.record
                place = Place(record.namespace, RAY_CLUSTER if RAY_CLUSTER in record.labels else JOB_NAME)
                found.setdefault(place, {})[record.name] = track
    return found


def _is_unheard(track: PodTrack, *, now: float, fresh_seconds: float) -> bool:
    record, telemetry = track.record, track.telemetry
    if telemetry is None or telemetry.host_memory is not None or now - telemetry.received_at > fresh_seconds:
        return False
    if record.phase != "Running" or record.deleting or not record.gpu_containers:
        return False
    started = record.main.started_at if record.main is not None else None
    return RAY_CLUSTER not in record.labels or (started is not None and now - started > RAY_SECONDS)


def usage_of(metrics: PodMetrics, record: PodRecord, *, now: float) -> HostUsage | None:
    """Return what a pod's GPU containers use; None where that is not said of each of them, or not of now.

    Metrics carry no uid: what was sampled before this pod's main container started may be another one's.
    """
    sampled_at = unix_seconds(metrics.timestamp)
    if sampled_at is None or abs(now - sampled_at) > OLD_SECONDS:
        return None
    if sampled_at < max(record.created_at or 0.0, (record.main.started_at if record.main else None) or 0.0):
        return None
    said = {container.name: _bytes(container.usage.get("memory")) for container in metrics.containers}
    used = [value for name in record.gpu_containers if (value := said.get(name)) is not None]
    if not used or len(used) < len(record.gpu_containers):
        return None
    return HostUsage(memory_used_bytes=sum(used), sampled_at=sampled_at, taken_at=now)


def _bytes(quantity: object) -> int | None:
    amount = parse(quantity)
    return amount // UNIT if amount is not None and 0 < amount // UNIT <= MOST_BYTES else None


class PodUsage:
    """Asks for what reports leave out, for as long as there is such a pod."""

    def __init__(
        self,
        client: KubeClient,
        *,
        workloads: Callable[[], Iterable[Workload]],
        fresh_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: Unix seconds."""
        self._client = client
        self._workloads = workloads
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._pause = ROUND_SECONDS
        self._said = ""

    async def run(self) -> None:
        """Make a round each half minute, and more seldom after failures. Ends by cancellation alone."""
        while True:
            await asyncio.sleep(self._pause)
            try:
                self._pause = await self.look()
            except Exception:
                # A fault of ours in this must not end the process, which does all else.
                logger.exception("host memory cannot be read from metrics.k8s.io")
                self._pause = MAX_PAUSE_SECONDS

    async def look(self) -> float:
        """Ask once for all pods that need it. Returns the seconds until the next time."""
        wanted = unheard(self._workloads(), now=self._clock(), fresh_seconds=self._fresh_seconds)
        failure: Exception | None = None
        for place, tracks in wanted.items():
            try:
                async with asyncio.timeout(LIST_SECONDS):
                    await self._list(place, tracks)
            except (KubeError, TimeoutError) as error:
                # Whatever it is, the next namespace has the same server.
                failure = error
                break
            except UNREADABLE as error:
                failure = error
        return self._next(failure)

    async def _list(self, place: Place, tracks: Mapping[str, PodTrack]) -> None:
        path = object_path(GROUP_VERSION, "pods", namespace=place.namespace)
        async with aclosing(list_all(self._client, path, {"labelSelector": place.label})) as chunks:
            async for items, _ in chunks:
                for number, raw in enumerate(items):
                    self._take(raw, tracks)
                    if number % 100 == 99:
                        await asyncio.sleep(0)

    def _take(self, raw: msgspec.Raw, tracks: Mapping[str, PodTrack]) -> None:
        try:
            metrics = _decoder.decode(raw)
        except UNREADABLE:
            return
        track = tracks.get(metrics.metadata.name)
        usage = usage_of(metrics, track.record, now=self._clock()) if track is not None else None
        if track is not None and usage is not None:
            track.usage = usage

    def _next(self, failure: Exception | None) -> float:
        """Return the pause after a round, and say what is new: that it failed, or how."""
        said = "" if failure is None else f"{type(failure).__name__}: {failure}".strip()
        if said and said != self._said:
            level = logging.INFO if isinstance(failure, NotFoundError) else logging.WARNING
            logger.log(level, "no host memory from metrics.k8s.io", extra={"error": said})
        self._said = said
        if failure is None:
            return ROUND_SECONDS
        if isinstance(failure, NotFoundError | ForbiddenError):
            return MAX_PAUSE_SECONDS
        asked = failure.retry_after_seconds if isinstance(failure, KubeError) else None
        return min(MAX_PAUSE_SECONDS, max(2 * self._pause, asked or 0.0))
