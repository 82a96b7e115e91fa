# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""kopf, which follows jobs and GPUMonitors, in a thread and event loop of its own.

Only `@kopf.on.event` handlers that return None: every other kind of handler writes annotations or finalizers into the
user's object, or a result into its status, and a finalizer of ours would keep a job from being deleted while we are
away. Left to itself, kopf ends when a single kind is refused or fails for a minute. So its requests never give up, it
is asked first what it may watch and what can be listed, and a supervisor starts it again, without what is refused or
broken, after each end: all other kinds go on.

What kopf sees is handed to the controller's own loop; nothing here decides anything.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import kopf

from verl_gpumonitor_operator.kube.client import Access
from verl_gpumonitor_operator.kube.errors import KubeError

from . import monitors
from .jobs import KINDS, JobKind

logger = logging.getLogger(__name__)

RECHECK_SECONDS: Final = 300.0
"""A kind that was refused or broken is asked for again after this time; the sweeps list it meanwhile."""
STEADY_SECONDS: Final = 60.0
"""kopf that lived this long was well: its next restart is quick again."""
MAX_BACKOFF_SECONDS: Final = 60.0


class Watched(StrEnum):
    """What is watched: the kinds of jobs, and our own."""

    RAY_JOB = JobKind.RAY_JOB.value
    RAY_CLUSTER = JobKind.RAY_CLUSTER.value
    PYTORCH_JOB = JobKind.PYTORCH_JOB.value
    TRAIN_JOB = JobKind.TRAIN_JOB.value
    MONITOR = monitors.KIND


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """Where the API server serves what is watched."""

    group: str
    version: str
    plural: str


RESOURCES: Final[Mapping[Watched, Resource]] = {
    **{
        Watched(kind.value): Resource(group=info.group, version=info.version, plural=info.plural)
        for kind, info in KINDS.items()
    },
    Watched.MONITOR: Resource(group=monitors.GROUP, version=monitors.VERSION, plural=monitors.PLURAL),
}

Seen = Callable[[Watched, bool, Mapping[str, Any]], None]
"""Takes (what, deleted, object) in the controller's loop."""


def register(
    registry: kopf.OperatorRegistry, watched: Watched, seen: Callable[[bool, Mapping[str, Any]], None]
) -> None:
    """Watch one kind. `seen` is called in kopf's thread and must return at once."""
    resource = RESOURCES[watched]

    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry, id=f"{watched.lower()}-seen")
    async def object_seen(event: kopf.RawEvent, **_: Any) -> None:
        # A plain copy: kopf goes on working with its own.
        seen(event["type"] == "DELETED", dict(event["object"]))


class Backoffs:
    """Seconds between the attempts of one of kopf's requests, without end.

    A request that gives up ends kopf, and with it the watches of all kinds: kopf's own nine attempts take 54 s.
    """

    def __iter__(self) -> Iterator[float]:
        """Return the pauses, the first ones as kopf has them."""
        return itertools.chain((1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0), itertools.repeat(30.0))


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: nothing is written anywhere, and no silence is taken for health."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.peering.standalone = True
    chosen.scanning.disabled = False
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 310
    chosen.watching.connect_timeout = 30
    chosen.watching.chunk_size = 500
    chosen.networking.error_backoffs = Backoffs()
    chosen.networking.connect_timeout = 10
    chosen.networking.request_timeout = 30
    chosen.process.ultimate_exiting_timeout = None
    # Never used, since no handler keeps state; named all the same, so that a mistake would be seen as ours.
    chosen.persistence.finalizer = "gpumonitor.dev/never"
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="gpumonitor.dev")
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix="gpumonitor.dev")
    return chosen


def login(registry: kopf.OperatorRegistry, access: Access) -> None:
    """Have kopf use the same server and user as our own client. A registry of one's own has no login at all."""

    @kopf.on.login(registry=registry, id="login", errors=kopf.ErrorsMode.PERMANENT)
    def connection(**kwargs: Any) -> Any:
        if access.in_cluster:
            # Reads the token anew each time it is asked, since it is renewed on disk.
            return kopf.login_with_service_account(**kwargs)
        return kopf.ConnectionInfo(
            server=access.server,
            ca_path=access.ca_file,
            insecure=access.insecure,
            certificate_path=access.certificate_file,
            private_key_path=access.key_file,
            scheme="Bearer" if access.token else None,
            token=access.token,
        )


@dataclass(kw_only=True, slots=True)
class WatchState:
    """For metrics and readiness."""

    restarts: int = 0
    running: bool = False
    refused: frozenset[Watched] = frozenset()
    broken: frozenset[Watched] = frozenset()
    """Kinds that could not be listed when kopf was started, and that it does not watch therefore."""


NOISY: Final = ("kopf.objects", "kopf.activities", "kopf._cogs.clients", "kopf._core.reactor")
"""Loggers of kopf that write for each event, each attempt of a request, or what the sweep says already."""
SAID_ELSEWHERE: Final = ("Request attempt", "Unresolved resources", "OS signals are ignored")


class _Quiet(logging.Filter):
    """Lets kopf's warnings pass, but for those that are said elsewhere, and nothing below them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(NOISY):
            return True
        return record.levelno >= logging.WARNING and not str(record.msg).startswith(SAID_ELSEWHERE)


def quieten_kopf() -> None:
    """Filter kopf's records where they are handled, since a filter of a logger does not see those of its children."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(item, _Quiet) for item in handler.filters):
            handler.addFilter(_Quiet())


Permitted = Callable[[Watched], Awaitable[bool]]


@dataclass(kw_only=True)
class Supervisor:
    """Keeps kopf running for as long as the controller lives."""

    access: Callable[[], Awaitable[Access]]
    permitted: Permitted
    """Asks whether a kind may be listed and watched. May raise KubeError."""
    seen: Seen
    works: Permitted
    """Asks whether a kind can be listed at all (a conversion webhook may be away). May raise KubeError."""
    restarted: Callable[[], None]
    """Told after each start of kopf: what was deleted before it is not told, so a sweep is due."""
    state: WatchState = field(default_factory=WatchState)
    _run: "_Run | None" = None

    async def run(self) -> None:
        """Start kopf, and again after each end, ever slower up to a minute. Ends by cancellation alone."""
        delay = 1.0
        quieten_kopf()
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._once()
                except KubeError as error:
                    logger.warning("watch cannot be started, trying again", extra={"error": str(error)})
                delay = 1.0 if time.monotonic() - began > STEADY_SECONDS else min(MAX_BACKOFF_SECONDS, delay * 2)
                self.state.running = False
                await asyncio.sleep(delay)
                self.state.restarts += 1
        finally:
            if self._run is not None:
                self._run.stop()

    async def _once(self) -> None:
        allowed = [watched for watched in Watched if await self.permitted(watched)]
        refused = frozenset(set(Watched) - set(allowed))
        if refused != self.state.refused:
            logger.warning("kinds that may not be watched", extra={"reason": ", ".join(sorted(refused)) or "none"})
        self.state.refused = refused
        allowed = await self._working(allowed)
        loop = asyncio.get_running_loop()

        def hand_over(watched: Watched, deleted: bool, body: Mapping[str, Any]) -> None:
            # The loop may be closed already while this process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.seen, watched, deleted, body)

        run = _Run(await self.access(), allowed, hand_over)
        self._run = run
        ended = run.start(loop)
        self.state.running = True
        self.restarted()
        recheck = RECHECK_SECONDS if refused or self.state.broken else None
        try:
            await asyncio.wait_for(asyncio.shield(ended), timeout=recheck)
            logger.warning("kopf ended by itself, starting it again")
        except TimeoutError:
            run.stop()
            await ended

    async def _working(self, allowed: Sequence[Watched]) -> list[Watched]:
        """Leave out the kinds that cannot be listed: an error in a watch's stream ends kopf at once."""
        working = [watched for watched in allowed if await self.works(watched)]
        broken = frozenset(set(allowed) - set(working))
        if broken != self.state.broken:
            logger.warning("kinds that cannot be listed", extra={"reason": ", ".join(sorted(broken)) or "none"})
        self.state.broken = broken
        return working


class _Run:
    """One life of kopf."""

    def __init__(self, access: Access, watched: Sequence[Watched], seen: Seen) -> None:
        self._stop = threading.Event()
        self._registry = kopf.OperatorRegistry()
        login(self._registry, access)
        for item in watched:
            register(self._registry, item, _bound(seen, item))
        self._thread = threading.Thread(target=self._main, name="kopf", daemon=True)
        self._ended: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[None]":
        """Start the thread; the future is done when it has ended."""
        self._loop, self._ended = loop, loop.create_future()
        self._thread.start()
        return self._ended

    def stop(self) -> None:
        """Ask kopf to end; does not wait for it."""
        self._stop.set()

    def _main(self) -> None:
        try:
            kopf.run(
                registry=self._registry, settings=settings(), standalone=True, clusterwide=True, stop_flag=self._stop
            )
        except Exception:
            # Whatever ends kopf, the controller lives on and starts it again.
            logger.exception("kopf failed")
        finally:
            self._tell()

    def _tell(self) -> None:
        loop, ended = self._loop, self._ended
        if loop is not None and ended is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))


def _bound(seen: Seen, watched: Watched) -> Callable[[bool, Mapping[str, Any]], None]:
    return lambda deleted, body: seen(watched, deleted, body)
