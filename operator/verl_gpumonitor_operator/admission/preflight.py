# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Gathers the facts that a decision needs: what changes with each pod is read live, the rest is kept fresh meanwhile.

The API server waits three seconds for us while a user's pod waits for it. So the live reads of one request have a
second and a half in all; without them nothing is injected, and the pod says so.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from verl_gpumonitor.model.kubernetes import RAY_CLUSTER
from verl_gpumonitor_operator import quantities
from verl_gpumonitor_operator.certificates import CA_BUNDLE
from verl_gpumonitor_operator.quantities import UNIT, Amounts
from verl_gpumonitor_operator.settings import Settings

from . import attendance, facts, mutation, objects, pods, presence
from .attendance import Attendance
from .facts import Cluster, GpuLayout, Namespace, Node, RuntimeClass, Version
from .kubeapi import ApiError, KubeApi
from .pods import Json, QosClass
from .refusals import PodKind, There
from .sharing import SharedReads

log = logging.getLogger(__name__)

LIVE_SECONDS: Final = 1.5
"""Budget of all live reads of one request."""
RAY_SECONDS: Final = 0.3
"""Budget of reading a head's RayCluster; without it the head is taken for one of a GPU cluster."""
RAY_CACHE_SECONDS: Final = 60.0
THERE_SECONDS: Final = 0.4
"""Budget of looking which pods are there that were asked for before; it comes after the other reads."""
NODES_SECONDS: Final = 60.0
SERVICE_SECONDS: Final = 30.0
GUARD_SECONDS: Final = 2.0
"""Between two looks at what holds injection back: the breaker's ConfigMap and the controller's Lease."""
CERTIFICATES_SECONDS: Final = 10.0
WARM_SECONDS: Final = 30.0
"""The API server closes connections that idle for longer; the next pod would wait for several handshakes."""
WARM_CONNECTIONS: Final = 4
"""As many as one pod's reads use side by side."""
UNTIL_THERE_SECONDS: Final = 2.0
"""Pause between two tries of what the process cannot work without."""

FEW_NODES: Final = 4
"""Up to this many nodes, their free room is read live for a pod whose sidecar takes some."""
MEMORY_STEP: Final = 16 * 2**20 * UNIT
"""Nodes that differ by less than this count as one, so that a thousand of them are soon looked through."""
_RAY_CACHE_SIZE: Final = 1024


class PreflightError(Exception):
    """The facts for this pod could not be read in time; the text says which."""


class BreakerPause(msgspec.Struct, frozen=True, kw_only=True):
    """One opening of the circuit breaker of one namespace."""

    reason: str = ""
    until: float | None = None
    """Unix time at which injection is tried again; None: not before the state changes."""

    def rests(self, now: float) -> bool:
        """Whether injection rests at `now`."""
        return self.until is None or now < self.until


class BreakerState(BreakerPause, frozen=True, kw_only=True):
    """State of the circuit breakers, as the controller writes it into its ConfigMap; first the one for all."""

    open: bool = False
    image: str = ""
    """Sidecar image that was failing; another one is not held back by it."""
    namespaces: dict[str, BreakerPause] = {}
    """Those of single namespaces."""

    def pause(self, image: str, now: float, namespace: str | None = None) -> str | None:
        """Return why injection of this image rests at this moment; None if it does not.

        `namespace`: where the pod is to be; None asks for what holds in all of them.
        """
        if self.image and self.image != image:
            return None
        if self.open and self.rests(now):
            return self.reason or "the sidecar's image is failing"
        own = self.namespaces.get(namespace) if namespace is not None else None
        if own is None or not own.rests(now):
            return None
        return f"in this namespace: {own.reason or 'the sidecar is failing here'}"


class _Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that are the same for all pods."""

    api_version: Version
    oldest_kubelet: Version | None
    oldest_node: str
    nodes: tuple[Node, ...]
    gpu_layouts: frozenset[GpuLayout]


class Preflight:
    """Facts of one cluster. `run` keeps the standing ones fresh; `gather` adds the live ones of one pod."""

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        *,
        on_certificates: Callable[[Mapping[str, bytes]], bool],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_certificates` is handed the Secret's data and says whether a leaf is served now.

        `clock`: Unix time, for what others wrote. `monotonic`: seconds, for how long ago something was seen here.
        """
        self._api = api
        self._settings = settings
        self._on_certificates = on_certificates
        self._clock = clock
        self._monotonic = monotonic
        self._standing: _Standing | None = None
        self._controller_address: str | None = None
        self._ca_pem: str | None = None
        self._breaker = BreakerState()
        self._attendance = Attendance()
        self._noted_absence: str | None = None
        self._shared = SharedReads(monotonic)
        self._with_gpus: dict[tuple[str, str], float] = {}
        """RayClusters with GPUs by namespace and name, and when that was read."""

    @property
    def is_ready(self) -> bool:
        """Whether the standing facts were read at least once."""
        return self._standing is not None

    @property
    def paused(self) -> str | None:
        """Why injection rests in all namespaces now; None if it does not."""
        return self._paused(None)

    def _paused(self, namespace_name: str | None) -> str | None:
        """Why it rests in this namespace. The breaker's reason first: it names a pod that failed."""
        image = self._settings.images.sidecar
        return self._breaker.pause(image, self._clock(), namespace_name) or self._absence

    async def run(self) -> None:
        """Keep the standing facts fresh until cancelled. A read that fails is tried again; the last value stays."""
        loops: list[tuple[str, Callable[[], Awaitable[bool]], float]] = [
            ("cluster", self._read_standing, NODES_SECONDS),
            ("controller", self._read_controller, SERVICE_SECONDS),
            ("breaker", self._read_breaker, GUARD_SECONDS),
            ("lease", self._read_lease, GUARD_SECONDS),
            ("certificates", self._read_certificates, CERTIFICATES_SECONDS),
            ("connections", self._keep_warm, WARM_SECONDS),
        ]
        async with asyncio.TaskGroup() as group:
            for subject, read, seconds in loops:
                group.create_task(_repeat(subject, read, seconds), name=subject)

    async def look_at_guards(self) -> None:
        """Read now what holds injection back, and not at its next turn. What fails or is slow is left to that turn."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIVE_SECONDS):
                await asyncio.gather(self._read_lease(), self._read_breaker(), return_exceptions=True)

    async def gather(self, pod: Json, namespace_name: str) -> tuple[Namespace, Cluster]:
        """Read what decides on this pod, within the budget. Raises PreflightError."""
        standing = self._standing
        if standing is None:
            raise PreflightError("the cluster's nodes and version are not known yet")
        try:
            async with asyncio.timeout(LIVE_SECONDS):
                namespace, ray, nodes, runtime_class = await asyncio.gather(
                    self._shared.read(("namespace", namespace_name), lambda: self._read_namespace(namespace_name)),
                    self._ray_cluster_has_gpus(pod, namespace_name),
                    self._with_free_room(pod, standing.nodes),
                    self._runtime_class(pod),
                )
        except TimeoutError as error:
            raise PreflightError(f"the API server did not answer within {LIVE_SECONDS:g} s") from error
        except ApiError as error:
            raise PreflightError(f"the facts for this pod could not be read ({error})") from error
        return namespace, Cluster(
            api_version=standing.api_version,
            oldest_kubelet=standing.oldest_kubelet,
            oldest_node=standing.oldest_node,
            nodes=nodes,
            controller_address=self._controller_address,
            ca_pem=self._ca_pem,
            paused=self._paused(namespace_name),
            ray_cluster_has_gpus=ray,
            gpu_layouts=standing.gpu_layouts,
            runtime_class=runtime_class,
        )

    async def which_are_there(self, kind: PodKind) -> There | None:
        """Look which pods of a kind there are. None: nobody could say in time."""
        path = f"/api/v1/namespaces/{quote(kind.namespace, safe='')}/pods"
        pages = self._api.pages(path, objects.PodMetaObject, query={"labelSelector": kind.selector})
        found: list[objects.PodMetaObject] = []
        try:
            async with asyncio.timeout(THERE_SECONDS):
                # One page is enough: of hundreds, one of the first has the sidecar if any was let in with it.
                found = await anext(pages, found)
        except (ApiError, TimeoutError):
            return None
        if any(pod.is_injected for pod in found):
            return There.INJECTED
        return There.BARE if found else There.NONE

    async def _read_namespace(self, name: str) -> Namespace:
        path = f"/api/v1/namespaces/{quote(name, safe='')}"
        namespace, limits, quotas = await asyncio.gather(
            self._api.get(path, objects.NamespaceObject),
            self._api.listed(f"{path}/limitranges", objects.LimitRangeObject),
            self._api.listed(f"{path}/resourcequotas", objects.QuotaObject),
        )
        return objects.namespace_facts(namespace, limits, quotas)

    async def _ray_cluster_has_gpus(self, pod: Json, namespace: str) -> bool | None:
        """Ask for a head's RayCluster. None where that is not needed, or was not answered."""
        name = pods.text(pods.labels(pod).get(RAY_CLUSTER))
        if not name or not mutation.needs_ray_cluster(pod, self._settings):
            return None
        read_at = self._with_gpus.get((namespace, name))
        if read_at is not None and self._monotonic() - read_at < RAY_CACHE_SECONDS:
            return True
        path = f"/apis/ray.io/v1/namespaces/{quote(namespace, safe='')}/rayclusters/{quote(name, safe='')}"
        try:
            async with asyncio.timeout(RAY_SECONDS):
                cluster = await self._api.get(path, objects.RayClusterObject)
        except (ApiError, TimeoutError):
            return None
        if not cluster.has_gpus(self._settings.injection.gpu_resources):
            # Not kept: the next cluster of this name may have some, and its head would have no sidecar for its life.
            return False
        while len(self._with_gpus) >= _RAY_CACHE_SIZE:
            self._with_gpus.pop(next(iter(self._with_gpus)))
        self._with_gpus[namespace, name] = self._monotonic()
        return True

    async def _runtime_class(self, pod: Json) -> RuntimeClass | None:
        """Read the class that this pod is to get, live: one that is gone by now would refuse the pod."""
        if not mutation.takes_runtime_class(pod, self._settings):
            return None
        name = quote(self._settings.injection.runtime_class_name, safe="")
        path = f"/apis/node.k8s.io/v1/runtimeclasses/{name}"
        found = await self._api.get_or_none(path, objects.RuntimeClassObject)
        return found.facts() if found is not None else None

    async def _with_free_room(self, pod: Json, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Add what is free right now, where nodes are few and the pod's class gives the sidecar requests."""
        if len(nodes) > FEW_NODES or pods.qos_class(presence.without(pod)) is not QosClass.GUARANTEED:
            return nodes
        return tuple(await asyncio.gather(*map(self._free_room, nodes)))

    async def _free_room(self, node: Node) -> Node:
        # By the whole node: the standing facts may be others by the time of the next request.
        return await self._shared.read(("room", node.name, id(node)), lambda: self._read_free_room(node))

    async def _read_free_room(self, node: Node) -> Node:
        selector = f"spec.nodeName={node.name},status.phase!=Succeeded,status.phase!=Failed"
        try:
            running = await self._api.listed("/api/v1/pods", objects.PodObject, query={"fieldSelector": selector})
        except ApiError:
            # Without it the capacity decides, which is known.
            return node
        allocatable = node.allocatable or node.capacity
        # Whoever has no GPU is taken to stay; those that have one end some day and leave their room to this pod.
        patterns = self._settings.injection.gpu_resources
        staying = [one for one in running if not one.gpus_requested(patterns)]
        return msgspec.structs.replace(
            node,
            capacity=objects.less(allocatable, objects.taken_on_node(staying)),
            free=objects.less(allocatable, objects.taken_on_node(running)),
        )

    async def _keep_warm(self) -> bool:
        await asyncio.gather(*(self._api.get_bytes("/version") for _ in range(WARM_CONNECTIONS)))
        return True

    async def _read_standing(self) -> bool:
        api_version = facts.version((await self._api.get("/version", objects.VersionObject)).git_version)
        if api_version is None:
            raise ApiError("/version names no version")
        daemons = await self._daemon_sets()
        nodes: dict[tuple[tuple[str, int], ...], Node] = {}
        kubelets: list[tuple[Version | None, str]] = []
        exact: list[Node] = []
        layouts: set[GpuLayout | None] = set()
        async for page in self._api.pages("/api/v1/nodes", objects.NodeObject):
            for node in filter(_holds_our_pods, page):
                layouts.add(objects.gpu_layout(node, self._settings.injection.gpu_resources))
                kubelets.append((facts.version(node.status.node_info.kubelet_version), node.metadata.name))
                if not node.spec.unschedulable:
                    room = _room(node, daemons)
                    shape = _shape(room.capacity)
                    nodes[shape] = _smaller(nodes.get(shape), room)
                    exact = [*exact, room] if len(exact) <= FEW_NODES else exact
        oldest, name = min(kubelets, key=_age, default=(None, ""))
        self._standing = _Standing(
            api_version=api_version,
            oldest_kubelet=oldest,
            oldest_node=name,
            nodes=tuple(exact) if len(exact) <= FEW_NODES else tuple(nodes.values()),
            gpu_layouts=frozenset(layout for layout in layouts if layout is not None),
        )
        return True

    async def _daemon_sets(self) -> list[objects.DaemonSetObject]:
        try:
            return await self._api.listed("/apis/apps/v1/daemonsets", objects.DaemonSetObject)
        except ApiError as error:
            log.warning(
                "DaemonSets cannot be read; what they take of the nodes is not known", extra={"error": str(error)}
            )
            return []

    async def _read_controller(self) -> bool:
        path = f"/api/v1/namespaces/{self._settings.namespace}/services/{self._settings.controller_name}"
        service = await self._api.get_or_none(path, objects.ServiceObject)
        address = service.spec.cluster_ip if service is not None else None
        self._controller_address = None if address in ("", "None") else address
        return self._controller_address is not None

    async def _read_breaker(self) -> bool:
        path = f"/api/v1/namespaces/{self._settings.namespace}/configmaps/{self._settings.breaker_config_map}"
        config_map = await self._api.get_or_none(path, objects.ConfigMapObject)
        text = ((config_map.data if config_map is not None else None) or {}).get("state")
        try:
            state = msgspec.json.decode(text, type=BreakerState) if text else BreakerState()
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(f"{path}: the state cannot be read: {error}") from error
        if state != self._breaker:
            keys = {"open": state.open, "reason": state.reason, "namespaces": len(state.namespaces)}
            log.info("circuit breaker changed", extra=keys)
        self._breaker = state
        return True

    async def _read_lease(self) -> bool:
        """Look whether the controller renews its Lease. A failure keeps what was known, until that is too old."""
        namespace, name = self._settings.namespace, self._settings.controller_name
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        try:
            lease = await self._api.get_or_none(path, objects.LeaseObject)
        except ApiError:
            self._attendance = self._attendance.unread()
            raise
        else:
            self._attendance = self._attendance.read(lease, self._monotonic())
        finally:
            self._note_absence()
        return True

    @property
    def _absence(self) -> str | None:
        """Why nobody is taken to be there who would free a pod that its sidecar holds; None: the controller is."""
        return self._attendance.pause(
            namespace=self._settings.namespace,
            name=self._settings.controller_name,
            grace=attendance.grace_seconds(self._settings.controller.lease_seconds),
            now=self._monotonic(),
        )

    def _note_absence(self) -> None:
        absence = self._absence
        if absence == self._noted_absence:
            return
        self._noted_absence = absence
        if absence is None:
            log.info("the controller is there, pods are injected")
        else:
            log.warning("injection rests", extra={"reason": absence})

    async def _read_certificates(self) -> bool:
        path = f"/api/v1/namespaces/{self._settings.namespace}/secrets/{self._settings.certificates_secret}"
        secret = await self._api.get_or_none(path, objects.SecretObject)
        if secret is None:
            return False
        data = secret.decoded()
        self._ca_pem = data.get(CA_BUNDLE, b"").decode("ascii", "ignore") or None
        return self._on_certificates(data)


async def _repeat(subject: str, read: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Call `read` for ever; again soon while it says that what it looks for is not there. Log changes alone."""
    failing: str | None = None
    while True:
        there, failure = False, None
        try:
            there = await read()
        except ApiError as error:
            failure = str(error)
        except Exception:
            # A fault of ours in one loop must not stop the others, nor the answers to the API server.
            failure = "internal"
            if failing != failure:
                log.exception("reading failed", extra={"subject": subject})
        if failure != failing and failure != "internal":
            message = "reading works again" if failure is None else "reading failed"
            log.log(logging.INFO if failure is None else logging.WARNING, message, extra=_keys(subject, failure))
        failing = failure
        await asyncio.sleep(seconds if there else min(seconds, UNTIL_THERE_SECONDS))


def _keys(subject: str, failure: str | None) -> dict[str, str]:
    return {"subject": subject, **({"error": failure} if failure is not None else {})}


def _holds_our_pods(node: objects.NodeObject) -> bool:
    return node.holds_our_pods


def _room(node: objects.NodeObject, daemons: list[objects.DaemonSetObject]) -> Node:
    allocatable = quantities.parse_all(node.status.allocatable)
    taken = quantities.total(daemon.requests() for daemon in daemons if daemon.runs_on(node))
    return Node(name=node.metadata.name, capacity=objects.less(allocatable, taken), allocatable=allocatable)


def _shape(capacity: Amounts) -> tuple[tuple[str, int], ...]:
    """Return what makes two nodes alike: their capacities, with small differences of memory and disk left out."""
    step = {"memory": MEMORY_STEP, "ephemeral-storage": MEMORY_STEP}
    return tuple(sorted((name, amount // step.get(name, 1)) for name, amount in capacity.items()))


def _smaller(known: Node | None, other: Node) -> Node:
    """Let one node stand for all of its shape: the least of each resource."""
    if known is None:
        return other
    capacity = {name: min(amount, other.capacity.get(name, 0)) for name, amount in known.capacity.items()}
    return msgspec.structs.replace(known, capacity=capacity)


def _age(kubelet: tuple[Version | None, str]) -> tuple[bool, Version]:
    """Order kubelets: those whose version nobody understands first, as if they were the oldest."""
    version, _ = kubelet
    return version is not None, version or Version(0, 0)
