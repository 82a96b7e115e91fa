# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The program `gpumon-controller`: puts the parts together, and ends them.

Order of a start: health port, connection, Lease, pods, rescue, lists of everything, then all else that works for ever.
Lists that fail or hang never keep the rescue from its work while the webhook injects. Whatever task of those ends by
itself ends the process, and so does a lost Lease: the kubelet starts it again, and a fresh start is cheap. The API
server's being away ends nothing.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from verl_gpumonitor_operator import certs, logs
from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import ForbiddenError, KubeError, NotFoundError, ServerFaultError
from verl_gpumonitor_operator.settings import Settings, SettingsError, load

from .assessment import limits_of
from .breaker import BreakerKeeper, BreakerMetrics
from .certificates import CaPublisher, CertificateKeeper
from .clinic import Clinic, thresholds_of
from .documents import ConfigMapDocument, Deployment, SecretDocument
from .events import EventRecorder
from .ingest import IngestMetrics, ReportService
from .jobs import GpuResources, JobKind
from .lease import Lease
from .ledgers import Ledgers
from .metrics import ControllerCollector, Parts
from .namespaces import Namespaces
from .namespaces import reflector as namespace_reflector
from .pod_images import PodImages
from .pods import reflectors
from .podusage import PodUsage
from .reconciler import Reconciler
from .reportserver import LiveCertificate, ReportServer, ServerMetrics
from .rescue import RescueMetrics, Rescuer
from .reviews import Reviews
from .server import HealthServer
from .sweep import Sweeper
from .tokens import TokenMetrics, Tokens, claimed_by
from .watch import RESOURCES, Supervisor, Watched
from .workloads import Workloads
from .writer import StatusWriter

logger = logging.getLogger(__name__)

REPORT_PORT: Final = 8443
END_SECONDS: Final = 4.0
"""All ends within this time of SIGTERM."""
LISTS_SECONDS: Final = 3.0
"""So long a rescue waits for the first lists once pods are known: only with them it is known whose job to tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line and the downward API say."""

    settings: Settings
    kubeconfig: Path | None
    instance: str
    """Name of this pod, for Events."""
    identity: str
    """Holder of the Lease; the same after a restart of the container, so that it need not wait for itself."""
    report_port: int = REPORT_PORT
    health_port: int = 8081
    host: str | None = None
    """Address to listen on; None: all, of both families."""


class Controller:
    """All parts of one process."""

    def __init__(self, options: Options, client: KubeClient) -> None:
        self._options = options
        self._client = client
        self._synced = False
        self.registry = CollectorRegistry()
        self._build()

    def _build(self) -> None:
        settings = self._options.settings
        owner = Deployment(self._client, namespace=settings.namespace, name=settings.controller_name)
        self.lease = Lease(
            self._client,
            owner,
            namespace=settings.namespace,
            name=settings.controller_name,
            identity=self._options.identity,
            duration=settings.controller.lease_seconds,
        )
        # For all parts but the Lease itself: whatever writes is held back while another process may lead.
        self._guarded = self._client.guarded(lambda: self.lease.confirmed)
        self._build_writers(owner)
        self._build_reconciler()
        self._build_watches()
        self._build_certificates(owner)
        self._build_ingest()
        self._build_rescue(owner)
        self._build_metrics()

    def _build_writers(self, owner: Deployment) -> None:
        settings = self._options.settings
        self.writer = StatusWriter(
            self._guarded,
            writes_per_second=settings.controller.status_writes_per_second,
            may_write=lambda: self.lease.confirmed,
            clock=time.monotonic,
        )
        self.recorder = EventRecorder(
            self._guarded,
            instance=self._options.instance,
            rate=settings.controller.events_per_second,
            burst=settings.controller.events_burst,
            may_write=lambda: self.lease.confirmed,
            clock=time.monotonic,
        )
        self.ledgers = Ledgers(
            self._guarded,
            owner,
            namespace=settings.namespace,
            release=settings.release,
            may_write=lambda: self.lease.confirmed,
            clock=time.monotonic,
        )

    def _build_reconciler(self) -> None:
        settings = self._options.settings
        clinic = Clinic(
            interval_seconds=settings.report.interval_seconds,
            thresholds=thresholds_of(settings.diagnosis.thresholds),
        )
        self.workloads = Workloads(clinic)
        self.namespaces = Namespaces()
        self.reconciler = Reconciler(
            workloads=self.workloads,
            namespaces=self.namespaces,
            writer=self.writer,
            recorder=self.recorder,
            settings=settings,
            limits=limits_of(settings.diagnosis),
            clinic=clinic,
            ledgers=self.ledgers,
            clock=time.time,
        )

    def _build_watches(self) -> None:
        # What these create is stored nowhere.
        self.reviews = Reviews(self._client)
        self.sweeper = Sweeper(self._guarded, self.reconciler)
        settings = self._options.settings
        gpus = GpuResources.of(settings.injection.gpu_resources)
        self.pods, self._reflectors = reflectors(self._guarded, gpus)
        self.pods.watch(self.workloads)
        self.usage = PodUsage(
            self._guarded,
            workloads=self.workloads.all,
            fresh_seconds=max(settings.controller.not_reporting_seconds, 2 * settings.report.interval_seconds),
            clock=time.time,
        )
        self.supervisor = Supervisor(
            access=self._guarded.access,
            permitted=self._permitted,
            works=self._works,
            seen=self._seen,
            restarted=self.sweeper.soon,
        )

    def _build_certificates(self, owner: Deployment) -> None:
        settings = self._options.settings
        self.certificate = LiveCertificate()
        self.certificates = CertificateKeeper(
            authority=SecretDocument(
                self._guarded, owner, namespace=settings.namespace, name=settings.authority_secret
            ),
            served=SecretDocument(
                self._guarded, owner, namespace=settings.namespace, name=settings.certificates_secret
            ),
            publisher=CaPublisher(self._guarded, name=settings.webhook_configuration),
            names=certs.server_names(settings.release, settings.namespace),
            load_leaf=self.certificate.load,
            now=lambda: datetime.now(UTC),
        )

    def _build_ingest(self) -> None:
        metrics = IngestMetrics(self.registry)
        tokens = Tokens(self.reviews, known_pod=claimed_by(self.pods), metrics=TokenMetrics(self.registry))
        service = ReportService(
            tokens=tokens,
            pods=self.pods,
            sink=self.workloads,
            readiness=self,
            ca=self.certificates,
            metrics=metrics,
        )
        self.reports = ReportServer(
            service,
            certificate=self.certificate,
            metrics=ServerMetrics(self.registry),
            host=self._options.host,
            port=self._options.report_port,
        )

    def _build_rescue(self, owner: Deployment) -> None:
        settings = self._options.settings
        self.rescuer = Rescuer(
            images=settings.images,
            patcher=PodImages(self._guarded),
            incidents=self.reconciler,
            metrics=RescueMetrics(self.registry),
        )
        self.breaker = BreakerKeeper(
            image=settings.images.sidecar,
            settings=settings.breaker,
            store=ConfigMapDocument(
                self._guarded, owner, namespace=settings.namespace, name=settings.breaker_config_map
            ),
            metrics=BreakerMetrics(self.registry),
            belongs=lambda pod: self.workloads.workload_of_pod(pod) is not None,
        )

    def _build_metrics(self) -> None:
        self.registry.register(
            ControllerCollector(
                Parts(
                    reconciler=self.reconciler,
                    writer=self.writer,
                    recorder=self.recorder,
                    pods=self.pods,
                    lease=self.lease,
                    watch=self.supervisor.state,
                    sweep=self.sweeper.state,
                    certificates=self.certificates.state,
                    pod_failures=lambda: sum(item.state.failures for item in self._reflectors),
                    ready=lambda: self.ready,
                )
            )
        )
        GCCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        ProcessCollector(registry=self.registry)
        self.health = HealthServer(
            self.registry, ready=self._why_not_ready, host=self._options.host, port=self._options.health_port
        )

    @property
    def ready(self) -> bool:
        """Whether reports can be taken. A `Readiness`."""
        return self.lease.leading and self._synced

    def _why_not_ready(self) -> str | None:
        if self.lease.leading and not self._synced:
            return "the first lists of jobs and pods are not complete"
        return None

    async def _permitted(self, watched: Watched) -> bool:
        resource = RESOURCES[watched]
        for verb in ("list", "watch"):
            if not await self.reviews.may(verb, group=resource.group, resource=resource.plural):
                return False
        return True

    async def _works(self, watched: Watched) -> bool:
        """Whether one object of this kind can be listed. Where that of our own cannot, it is the API server."""
        resource = RESOURCES[watched]
        try:
            await self._guarded.get(object_path(f"{resource.group}/{resource.version}", resource.plural), {"limit": 1})
        except (NotFoundError, ForbiddenError):
            return True
        except ServerFaultError:
            if watched is Watched.MONITOR:
                raise
            return False
        return True

    def _seen(self, watched: Watched, deleted: bool, body: Any) -> None:
        """Take what kopf has seen, in this process's own loop."""
        metadata = body.get("metadata") or {}
        namespace, name, uid = (str(metadata.get(key) or "") for key in ("namespace", "name", "uid"))
        if watched is Watched.MONITOR:
            if deleted:
                self.reconciler.monitor_gone(namespace, name, uid)
            else:
                self.reconciler.monitor_seen(body)
        elif deleted:
            self.reconciler.job_gone(JobKind(watched.value), uid)
        else:
            self.reconciler.job_seen(JobKind(watched.value), body)

    async def lead(self) -> None:
        """Do the work of the holder of the Lease. Returns when the Lease is lost, or raises what ended a part."""
        async with asyncio.TaskGroup() as group:
            self._spawn(group, "certificates", self.certificates.run())
            self._spawn(group, "namespaces", namespace_reflector(self._guarded, self.namespaces).run())
            for number, reflector in enumerate(self._reflectors):
                self._spawn(group, f"pods-{number}", reflector.run())
            self._spawn(group, "status", self.writer.run())
            self._spawn(group, "events", self.recorder.run())
            holding = group.create_task(self.lease.hold(), name="lease")
            working = self._spawn(group, "work", self._work(group))
            await holding
            working.cancel()
            raise LeaseLostError

    async def _work(self, group: asyncio.TaskGroup) -> None:
        listing = self._spawn(group, "lists", self.sweeper.complete())
        await self._pods_synced()
        await asyncio.wait({listing}, timeout=LISTS_SECONDS)
        self._free_pods(group)
        await listing
        await self.ledgers.load()
        self.reconciler.restore()
        self.reconciler.listening()
        self._synced = True
        _calm_garbage_collection()
        logger.info("picture is complete", extra={"workloads": len(self.workloads), "pods": len(self.pods)})
        for name, work in (
            ("reconcile", self.reconciler.run()),
            ("ledgers", self.ledgers.run()),
            ("watch", self.supervisor.run()),
            ("usage", self.usage.run()),
            ("sweep", self.sweeper.run()),
        ):
            self._spawn(group, name, work)

    def _free_pods(self, group: asyncio.TaskGroup) -> None:
        """Begin what undoes harm of our own. It needs pods alone, so that no list of jobs holds it up."""
        self.pods.watch(self.rescuer)
        self.pods.watch(self.breaker)
        self._spawn(group, "rescue", self.rescuer.run())
        self._spawn(group, "breaker", self.breaker.run())

    async def _pods_synced(self) -> None:
        while True:
            if self.pods.synced:
                return
            await asyncio.sleep(0.1)

    @staticmethod
    def _spawn(group: asyncio.TaskGroup, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return group.create_task(work, name=name)

    async def serve(self) -> None:
        """Run until the Lease is lost or this task is cancelled."""
        await self.health.start()
        try:
            await self.lease.acquire()
            await self.reports.start()
            await self.lead()
        finally:
            self._synced = False
            await self._end()

    async def _end(self) -> None:
        for last in (self.ledgers.write, self.lease.release):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS / 4):
                    await last()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS / 2):
                await self.reports.close(1.0)
                await self.health.close()


def _calm_garbage_collection() -> None:
    """Collect seldom: nearly all of the many objects live as long as their pods, and hardly any are in cycles.

    A full collection at 80,000 GPUs stops the loop for a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class LeaseLostError(Exception):
    """Another process may lead now, so this one has to end."""


def parse(arguments: list[str] | None = None) -> Options:
    """Read command line, settings and downward API. Raises SettingsError."""
    parser = argparse.ArgumentParser(prog="gpumon-controller", description="The controller of GPUMonitor.")
    parser.add_argument("--settings", type=Path, required=True, help="settings.json as the chart renders it")
    parser.add_argument("--kubeconfig", type=Path, help="instead of the pod's service account; KUBECONFIG is not read")
    parser.add_argument("--host", help="address to listen on (default: all)")
    parser.add_argument("--report-port", type=int, default=REPORT_PORT, help="port of the report server")
    parser.add_argument("--health-port", type=int, default=8081, help="port of /healthz, /readyz and /metrics")
    given = parser.parse_args(arguments)
    name = os.environ.get("POD_NAME") or socket.gethostname()
    uid = os.environ.get("POD_UID") or str(os.getpid())
    return Options(
        settings=load(given.settings),
        kubeconfig=given.kubeconfig,
        instance=name,
        identity=f"{name}_{uid}",
        report_port=given.report_port,
        health_port=given.health_port,
        host=given.host,
    )


async def run(options: Options) -> int:
    """Run the controller until SIGTERM (returns 0), or until a part ends (returns 1)."""
    loop = asyncio.get_running_loop()
    client = await KubeClient.connect(options.kubeconfig)
    serving = loop.create_task(Controller(options, client).serve(), name="serve")
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(_stop, stopped, number))
    stopping = loop.create_task(stopped.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not serving.cancelled() and serving.exception() is not None:
            _log_end(serving.exception())
            return 1
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        return 0
    finally:
        stopping.cancel()
        await client.close()


def _stop(stopped: asyncio.Event, number: int) -> None:
    logger.info("ending", extra={"reason": signal.Signals(number).name})
    stopped.set()


def _log_end(error: BaseException | None) -> None:
    if isinstance(error, BaseExceptionGroup) and error.subgroup(LeaseLostError) is not None:
        logger.error("ending, since the lease is lost")
        return
    logger.error("a part of the controller ended", exc_info=error)


def main() -> None:
    """Entry point of `gpumon-controller`. Exit codes: 0 after SIGTERM, 1 when a part ended, 2 for wrong settings."""
    logs.configure()
    # A timestamp series beside each counter would double what Prometheus stores, and nobody asks for it.
    disable_created_metrics()  # type: ignore[no-untyped-call] # the package types all but this one
    try:
        code = asyncio.run(run(parse()))
    except (SettingsError, KubeError) as error:
        logger.error("cannot start", extra={"error": str(error)})
        code = 2
    logging.shutdown()
    # kopf's thread may still be in a request; nothing of it needs to be waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
