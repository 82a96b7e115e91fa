# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's parts put together for a whole host: no pod, no controller, and all GPUs are its own.

How many these are is known when the driver first shows them. Until then, and where there is no driver, the loop runs
with one GPU that is looked for and not found, which is what the metrics then say. Stages are those of the job on the
GPUs (`host_job`): a host may run other programs.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec

from verl_gpumonitor import __version__
from verl_gpumonitor.model.samples import HostSample, NodeSample, RayAgentSample
from verl_gpumonitor.model.stages import StageWord
from verl_gpumonitor.reading.machine import MachineReader
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings
from verl_gpumonitor.stages.cluster import RayHost
from verl_gpumonitor.stages.sources.marks import MarkReceiver
from verl_gpumonitor.stages.sources.ray_agent import AgentStages
from verl_gpumonitor.stages.sources.ray_host import DASHBOARD_URL, own_nodes
from verl_gpumonitor.stages.sources.ray_jobs import RayJobs
from verl_gpumonitor.stages.sources.ray_state import RayState
from verl_gpumonitor.stages.sources.titles import Titles

from . import endpoint, exposition
from .exporter import Page
from .exports import Exports, Identity
from .host_job import HostJob, JobStages
from .join import Terms
from .journal import Journal, write_stderr
from .loop import Loop
from .program import CALL_LIMIT_SECONDS, PROCESSES_INTERVAL_SECONDS, own_use, read_page
from .ray_watch import RayView, RayWatch
from .stage_watch import StageWatch
from .staging import Context

RAY_METRICS_URL: Final = "http://127.0.0.1:8080/metrics"
SHM_PATH: Final = "/dev/shm"  # noqa: S108 - it is measured, nothing is written
MACHINE_SECONDS: Final = 5.0
"""Pace at which the host's memory is read."""
_BACKLOG: Final = 128
_NOWHERE: Final = ("192.0.2.1", 9)
"""An address for documentation: the route to it tells which address of this host is used towards others."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a person chooses."""

    namespace: str
    """Value of the label `namespace`."""
    name: str
    """Value of the label `pod`, and of `node`."""
    interval_seconds: float = 1.0
    ask_ray: bool = True
    """Ask Ray's servers on localhost for stages."""
    ray_dashboard_url: str = DASHBOARD_URL
    marks_port: int | None = None
    """UDP port on localhost; None: marks are not received."""


class HostFacts:
    """Stands where the sidecar has Ray: Ray tells stages here, and the host itself its memory.

    Ray's word on GPUs is left out. It may have been given some of the host's GPUs alone, and all are ours.
    """

    def __init__(
        self,
        ray: RayWatch | None,
        *,
        is_the_jobs: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_the_jobs`: whether Ray is. While it is not, what it said before is all that it said."""
        self._ray = ray
        self._is_the_jobs = is_the_jobs
        self._clock = clock
        self._stages: StageWord | None = None
        self._machine = MachineReader()
        self._memory = HostSample()

    def latest(self) -> RayView:
        """Return what is known, at once."""
        now = self._clock()
        if self._memory.taken_at is None or now - self._memory.taken_at >= MACHINE_SECONDS:
            read = self._machine.read()
            self._memory = HostSample(
                taken_at=now, memory_used_bytes=read.memory_used_bytes, memory_limit_bytes=read.memory_total_bytes
            )
        if self._ray is not None and self._is_the_jobs():
            self._stages = self._ray.latest().stages
        return RayView(agent=RayAgentSample(host=self._memory), stages=self._stages)

    def set_needed(self, needed: bool) -> None:
        """Say whether names are wanted of Ray."""
        if self._ray is not None:
            self._ray.set_needed(needed)


class HostState(RayState):
    """Ray's State API, of whose nodes one is this host by whatever address: Ray may have chosen another one than we."""

    _own: tuple[tuple[RayHost, ...], str | None] = ((), None)
    """Nodes of a list, and the address of the one that is this host."""

    def word(self, now_unix: float, node_ip: str) -> StageWord:
        """Return the word on this host; `node_ip` is believed while none is known to be it."""
        if self._own[0] is not self.hosts:
            here = own_nodes(self.hosts)
            self._own = self.hosts, next((host.ip for host in self.hosts if host.node_id in here), None)
        return super().word(now_unix, self._own[1] or node_ip)


class Host:
    """The exporter of one host."""

    def __init__(self, settings: HostSettings, journal: Journal | None = None) -> None:
        self._settings = settings
        self._journal = journal or Journal()
        self._identity = Identity(
            namespace=settings.namespace,
            pod=settings.name,
            node=settings.name,
            version=__version__,
            start_id=os.urandom(16).hex(),
            started_unix=time.time(),
        )
        self._sampler = Sampler(
            settings=SamplerSettings(
                interval_seconds=settings.interval_seconds,
                memory_interval_seconds=settings.interval_seconds / 2,
                call_limit_seconds=CALL_LIMIT_SECONDS,
                processes_interval_seconds=PROCESSES_INTERVAL_SECONDS,
            )
        )
        self._job = HostJob(self._sampler.latest, journal=self._journal)
        self._ray = self._make_ray_watch()
        self._watch = self._make_stage_watch()
        self._stages = JobStages(self._watch, self._job.processes)
        self._facts = HostFacts(self._ray, is_the_jobs=lambda: self._stages.has_ray)
        wanted = self._job.processes.is_the_jobs
        self._marks = MarkReceiver(settings.marks_port, wanted=wanted) if settings.marks_port else None
        self._gpus = 1
        self._loop = self._make_loop()
        self._page = Page(self._exports, keep_seconds=min(1.0, settings.interval_seconds))

    def run(self, listener: socket.socket, ending: Sequence[signal.Signals]) -> NoReturn:
        """Serve until one of the signals, which are blocked in all threads; then exit with 0."""
        endpoint.Endpoint(listener, {"/metrics": self._metrics, "/healthz": self._health}).start()
        for part in (self._sampler, self._job, self._ray, self._watch):
            if part is not None:
                part.start()
        while signal.sigtimedwait(ending, self._settings.interval_seconds) is None:
            self.turn()
        os._exit(0)  # Not sys.exit: that would wait for threads, one of which may hang in the driver.

    def turn(self) -> None:
        """Look at the GPUs once; begin anew when there are more than were known."""
        found = shown(self._sampler.latest())
        if found > self._gpus:
            self._gpus = found
            self._loop = self._make_loop()
        self._loop.turn()

    def _metrics(self) -> endpoint.Answer:
        return 200, exposition.CONTENT_TYPE, self._page.text()

    def _health(self) -> endpoint.Answer:
        if self._loop.healthy():
            return 200, endpoint.PLAIN, b"ok\n"
        return 503, endpoint.PLAIN, b"the main loop is stuck\n"

    def _make_loop(self) -> Loop:
        return Loop(
            Terms(gpus_requested=self._gpus, sample_interval_seconds=self._settings.interval_seconds),
            node=self._sampler,
            ray=self._facts,
            stages=self._stages,
            marks=self._marks,
            context=Context(
                ray_node_type="head" if self._settings.ask_ray else "",
                started_unix=self._identity.started_unix,
                whole_host=True,
            ),
            shm_path=SHM_PATH,
            journal=self._journal,
        )

    def _make_ray_watch(self) -> RayWatch | None:
        if not self._settings.ask_ray:
            return None
        return RayWatch(
            read_agent=lambda: read_page(RAY_METRICS_URL), read_nodes=None, stages=AgentStages(), journal=self._journal
        )

    def _make_stage_watch(self) -> StageWatch:
        """Titles of processes can always be read here; what Ray says, if it may be asked."""
        state = jobs = None
        if self._settings.ask_ray:
            jobs = RayJobs(self._settings.ray_dashboard_url)
            state = HostState(self._settings.ray_dashboard_url, jobs=jobs)
        titles = Titles(wanted=self._job.processes.has)
        return StageWatch(state=state, jobs=jobs, titles=titles, own_ip=own_address(), journal=self._journal)

    def _exports(self) -> Exports:
        return Exports(identity=self._identity, state=self._loop.state, use=own_use())


def say(line: str) -> None:
    """Write a line for a person."""
    write_stderr(line.encode() + b"\n")


def shown(node: NodeSample) -> int:
    """Return how many GPUs the driver shows by name; 0 while it shows none, or has not named all."""
    return len(node.gpus) if node.visible == len(node.gpus) else 0


def own_address() -> str:
    """Return the address by which this host is known to others, as Ray finds its own; 127.0.0.1 without a network.

    Nothing is sent: a datagram socket that is connected only chooses its route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_NOWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def listen(address: str, port: int) -> socket.socket:
    """Listen there; an empty address stands for all of this host's. Raises OSError."""
    if not address:
        return endpoint.listen(port)
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, name = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(name)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
