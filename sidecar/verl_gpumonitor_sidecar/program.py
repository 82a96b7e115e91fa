# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Puts the sidecar together and runs it until SIGTERM.

Threads: this one turns the loop and waits for the signal; the sampler's; one each for Ray's agent, for the sources of
stages, for the reports and for /metrics. What blocks is in a thread of its own and may hang: the end of the pod does
not wait for it.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from verl_gpumonitor import __version__
from verl_gpumonitor.model import wiring
from verl_gpumonitor.model.report import PodRef, RayNode, Report, ReportAnswer
from verl_gpumonitor.reading.fetch import fetch
from verl_gpumonitor.reading.ray_agent import MAX_ANSWER_BYTES, AgentParser
from verl_gpumonitor.reading.ray_head import read_nodes
from verl_gpumonitor.reading.ray_tasks import SubmittedTasks
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings
from verl_gpumonitor.stages.skew import Skew
from verl_gpumonitor.stages.sources.ray_agent import AgentStages, RunningNames

from . import endpoint, exposition, settings
from .channel import Channel
from .cluster_report import ClusterDue
from .exporter import Page
from .exports import Exports, Identity, ProcessUse, ReportCounts
from .flight_record import CONTENT_TYPE, FlightRecord, Place
from .join import Terms
from .journal import Journal
from .loop import Loop, MarkReading, ProcessReading
from .ray_watch import AgentPage, RayWatch
from .recorder import Recorder
from .reporter import Reporter, read_token
from .reports import JobsDue, NodesDue, Sender, Turn, build, fit
from .settings import Settings, SettingsError
from .stage_watch import StageWatch
from .staging import Context
from .state import PodState

FLUSH_SECONDS: Final = 0.7
"""Longest wait for the last report after SIGTERM."""
CALL_LIMIT_SECONDS: Final = 1.5
"""A call into NVML that takes longer hangs. With the second since the last sample the
other GPUs are read again before their values are three intervals old."""
BEHIND_SECONDS: Final = 0.02
"""So long after a pass over the GPUs is expected to end, the loop looks at it."""
AGENT_LIMIT_SECONDS: Final = 2.0
PROCESSES_INTERVAL_SECONDS: Final = 5.0


def run(ending: Iterable[signal.Signals]) -> NoReturn:
    """Run until one of the signals, then exit with 0. They are blocked in all threads, and waited for in this one."""
    signals = tuple(ending)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    journal = Journal()
    try:
        _run(signals, journal)
    except Exception as error:  # noqa: BLE001 - an exit would be a restart, seen as trouble of the job
        journal.event("the sidecar cannot work, for a fault of ours; waiting", error=repr(error))
    signal.sigwait(signals)
    os._exit(0)


def _run(signals: tuple[signal.Signals, ...], journal: Journal) -> None:
    try:
        found = settings.load(os.environ)
    except SettingsError as error:
        wait_with_broken_settings(error, journal)
        return
    Sidecar(found, journal).run(signals)


def wait_with_broken_settings(error: SettingsError, journal: Journal) -> None:
    """Say what is wrong with the settings, here and on /metrics; nothing is read, nothing reported."""
    journal.event("settings are broken; waiting", error=str(error))
    shown = Exports(
        identity=Identity(
            namespace=os.environ.get(wiring.ENV_POD_NAMESPACE, ""),
            pod=os.environ.get(wiring.ENV_POD_NAME, ""),
            version=__version__,
        ),
        state=PodState(gpus_requested=0),
        settings_problems=tuple(error.problems),
    )
    page = Page(lambda: shown)
    serve(settings.metrics_port(os.environ), page, healthy=lambda: True, journal=journal)


def serve(
    port: int,
    page: Page,
    *,
    healthy: Callable[[], bool],
    record: FlightRecord | None = None,
    journal: Journal,
) -> int | None:
    """Serve /metrics, /healthz and, with a record, /trace; on a free port when this one is taken.

    Return the port, None when there is none.
    """

    def metrics() -> endpoint.Answer:
        return 200, exposition.CONTENT_TYPE, page.text()

    def health() -> endpoint.Answer:
        return (200, endpoint.PLAIN, b"ok\n") if healthy() else (503, endpoint.PLAIN, b"the main loop is stuck\n")

    try:
        listener = listen(port, journal)
    except OSError as error:
        journal.event("/metrics cannot be served", port=port, error=str(error))
        return None
    taken: int = listener.getsockname()[1]
    streams = {wiring.TRACE_PATH: endpoint.Stream(CONTENT_TYPE, record.pieces)} if record else {}
    endpoint.Endpoint(listener, {"/metrics": metrics, "/healthz": health}, streams).start()
    journal.event("serving /metrics and /healthz", port=taken)
    return taken


def listen(port: int, journal: Journal) -> socket.socket:
    """Listen on the port, or on a free one when it is taken, as by another pod with host network."""
    try:
        return endpoint.listen(port)
    except OSError as error:
        journal.event("the metrics port is taken; a free one is used", port=port, error=str(error))
        return endpoint.listen(0)


def next_turn_in(interval: float, *, newest_at: float | None, now: float) -> float:
    """Return the seconds until the loop's next turn: one interval, or so much that it follows the samples closely.

    What is shown is then new, and not up to a second old. `newest_at`: end of the last pass over the GPUs.

    Example: a pass ended at 5.3, and it is 5.6: the next one ends at 6.3, and the turn is due 0.02 s after it.
    """
    if newest_at is None or now - newest_at > 2 * interval:
        return interval
    return min(1.5 * interval, max(0.5 * interval, newest_at + interval + BEHIND_SECONDS - now))


def chance() -> float:
    """Return a number from 0 up to 1. The module random costs half a MiB."""
    return int.from_bytes(os.urandom(6), "big") / 2**48


class Sidecar:
    """One start of the sidecar, with all its parts."""

    def __init__(self, found: Settings, journal: Journal) -> None:
        self._settings = found
        self._journal = journal
        self._interval_seconds = found.sample_interval_seconds
        self._sender = Sender(
            pod=PodRef(namespace=found.namespace, name=found.pod_name, uid=found.pod_uid),
            start_id=os.urandom(16).hex(),
            started_unix=time.time(),
            version=__version__,
        )
        self._sampler = self._make_sampler()
        self._stages = self._make_stage_watch()
        self._ray = self._make_ray_watch()
        self._processes = self._make_process_watch()
        self._loop = Loop(
            Terms(
                gpus_requested=found.gpus_requested,
                sample_interval_seconds=found.sample_interval_seconds,
                gpus_shared=found.gpus_shared,
            ),
            node=self._sampler,
            ray=self._ray,
            stages=self._stages,
            marks=self._make_marks(),
            processes=self._processes,
            context=self._context(),
            shm_path=found.shm_path,
            shared_processes=found.shared_processes,
            journal=journal,
            urgent=self._hurry,
        )
        self._recorder = Recorder(
            gpus_requested=found.gpus_requested, sample_interval_seconds=found.sample_interval_seconds
        )
        self._turns = 0
        self._nodes_due = NodesDue()
        self._jobs_due = JobsDue()
        self._cluster_due = ClusterDue()
        self._controller_clock = Skew()
        """Used by the reporter's thread alone."""
        self._steps_arrived = 0
        self._sent: Report | None = None
        self._reporter = self._make_reporter()
        self._page = Page(self._exports, keep_seconds=min(1.0, self._interval_seconds))

    def run(self, signals: tuple[signal.Signals, ...]) -> NoReturn:
        """Start the parts, turn the loop until a signal comes, then report a last time and exit."""
        self._journal.event("started", pod=self._settings.pod_name, version=__version__, start_id=self._sender.start_id)
        serve(
            self._settings.metrics_port,
            self._page,
            healthy=self._loop.healthy,
            record=self._flight_record(),
            journal=self._journal,
        )
        for part in (self._sampler, self._ray, self._stages, self._processes, self._reporter):
            if part is not None:
                part.start()
        while signal.sigtimedwait(signals, self._wait_seconds()) is None:
            self._loop.turn()
            self._record()
        self._end()

    def _wait_seconds(self) -> float:
        newest_at = self._sampler.latest().health.last_success_at if self._sampler else None
        return next_turn_in(self._interval_seconds, newest_at=newest_at, now=time.monotonic())

    def _record(self) -> None:
        """Keep each other picture, for half of the samples are kept, and all that decide stages."""
        state = self._loop.state
        self._turns += 1
        if self._turns % 2 and not state.stages.decided:
            return
        try:
            self._recorder.look(state, now=time.monotonic(), now_unix=time.time())
        except Exception as error:  # noqa: BLE001 - a fault here costs the record alone, and the loop must turn on
            self._journal.state("record", "nothing is recorded, for a fault of ours", error=repr(error))

    def _flight_record(self) -> FlightRecord:
        place = Place(
            pod=self._settings.pod_name, node=self._settings.node_name, ray_node_type=self._settings.ray_node_type
        )
        return FlightRecord(self._recorder, place, clock=time.monotonic, unix_clock=time.time)

    def _end(self) -> NoReturn:
        self._loop.end()
        delivered = self._reporter.flush(FLUSH_SECONDS) if self._reporter else None
        self._journal.event("ended", final_report_ended=delivered)
        os._exit(0)  # Not sys.exit: that would wait for threads, one of which may hang in the driver.

    def _make_sampler(self) -> Sampler | None:
        """A pod that asks for no GPU owns none, whatever it sees: then NVML is not even loaded."""
        if self._settings.gpus_requested == 0:
            return None
        return Sampler(
            settings=SamplerSettings(
                interval_seconds=self._interval_seconds,
                memory_interval_seconds=self._interval_seconds / 2,
                call_limit_seconds=CALL_LIMIT_SECONDS,
                processes_interval_seconds=PROCESSES_INTERVAL_SECONDS if self._settings.shared_processes else None,
            )
        )

    def _make_ray_watch(self) -> RayWatch | None:
        agent_url, head_url = self._settings.ray_agent_url, self._settings.ray_head_url
        if agent_url is None and head_url is None:
            return None
        return RayWatch(
            read_agent=(lambda: read_page(agent_url)) if agent_url else None,
            read_nodes=(lambda: ray_nodes(head_url)) if head_url else None,
            stages=AgentStages() if self._settings.gpus_requested else None,
            changed=self._stages.hint if self._stages else lambda: None,
            journal=self._journal,
        )

    def _make_stage_watch(self) -> StageWatch | None:
        """What a sidecar does not ask is not loaded either: on a worker that is all of the State API."""
        found = self._settings
        state = jobs = titles = None
        if found.ray_head_url:
            from verl_gpumonitor.stages.sources.ray_jobs import RayJobs
            from verl_gpumonitor.stages.sources.ray_state import RayState

            jobs = RayJobs(found.ray_head_url)
            state = RayState(found.ray_head_url, jobs=jobs)
        if found.shared_processes and found.gpus_requested:
            from verl_gpumonitor.stages.sources.titles import Titles

            titles = Titles()
        if state is None and titles is None:
            return None
        own_ip = found.pod_ip if found.gpus_requested and found.pod_ip else None
        return StageWatch(state=state, jobs=jobs, titles=titles, own_ip=own_ip, journal=self._journal)

    def _make_process_watch(self) -> ProcessReading | None:
        """Only reports tell who holds a GPU: without them nobody asks."""
        if self._sampler is None or not self._settings.shared_processes or self._settings.report is None:
            return None
        from .process_watch import ProcessWatch

        return ProcessWatch(self._sampler.latest, journal=self._journal)

    def _make_marks(self) -> MarkReading | None:
        if self._settings.own_marks_port is None:
            return None
        from verl_gpumonitor.stages.sources.marks import MarkReceiver

        return MarkReceiver(self._settings.own_marks_port)

    def _context(self) -> Context | None:
        """A pod without GPUs has no stages of its own."""
        if self._settings.gpus_requested == 0:
            return None
        return Context(ray_node_type=self._settings.ray_node_type, started_unix=self._sender.started_unix)

    def _make_reporter(self) -> Reporter | None:
        report = self._settings.report
        if report is None:
            return None
        return Reporter(
            Channel(report.address, server_name=report.server_name),
            make=self._report,
            answered=self._answered,
            token=lambda: read_token(report.token_file),
            ca_pem=report.ca_pem,
            interval_seconds=self._settings.report_interval_seconds,
            chance=chance,
            told_time=self._controller_clock.said,
            journal=self._journal,
        )

    def _hurry(self) -> None:
        if self._reporter is not None:
            self._reporter.hurry()

    def _answered(self, answer: ReportAnswer) -> None:
        now, sent = time.monotonic(), self._sent
        self._nodes_due.arrived(now)
        self._jobs_due.arrived(now)
        if sent is not None:
            self._cluster_due.arrived(sent.cluster_stages)
            self._steps_arrived = max([self._steps_arrived, *(step.number for step in sent.steps)])
            self._loop.take_steps(self._steps_arrived)
        self._loop.take_answer(answer, ahead=self._controller_clock.bearable_seconds)

    def _report(self, sequence: int, dropped: int, final: bool) -> Report | None:
        state = self._loop.state
        if not state.started and not final:
            return None
        now, now_unix = time.monotonic(), time.time()
        turn = Turn(
            sequence=sequence,
            now=now,
            now_unix=now_unix,
            final=final,
            dropped_reports=dropped,
            ray_nodes=self._nodes_due.take(state.ray_nodes, now),
            ray_jobs=self._jobs_due.take(state.cluster.jobs, now),
            cluster_stages=self._cluster_due.take(
                state.cluster,
                [n.node_ip for n in state.ray_nodes],
                now_unix,
                ahead=self._controller_clock.bearable_seconds,
            ),
            steps_arrived=self._steps_arrived,
        )
        self._sent = fit(build(self._sender, state, turn))
        return self._sent

    def _exports(self) -> Exports:
        return Exports(
            identity=Identity(
                namespace=self._settings.namespace,
                pod=self._settings.pod_name,
                node=self._settings.node_name,
                version=self._sender.version,
                start_id=self._sender.start_id,
                started_unix=self._sender.started_unix,
            ),
            state=self._loop.state,
            reports=self._reporter.counts() if self._reporter else ReportCounts(),
            use=own_use(),
        )


def read_page(url: str) -> AgentPage:
    """Read the agent's page once for all that is wanted of it. Raises FetchError."""
    parser, names, submitted = AgentParser(), RunningNames(), SubmittedTasks()

    def take(piece: bytes) -> None:
        parser.feed(piece)
        names.feed(piece)
        submitted.feed(piece)

    fetch(url, take, limit_seconds=AGENT_LIMIT_SECONDS, max_bytes=MAX_ANSWER_BYTES)
    sample = parser.finish(taken_at=time.monotonic())
    return AgentPage(sample=sample, names=names.names(), submitted=submitted.names())


def ray_nodes(dashboard_url: str) -> tuple[RayNode, ...]:
    """Return the GPUs of the cluster's nodes as the dashboard lists them. Raises what `read_nodes` raises."""
    return tuple(
        RayNode(node_ip=node.node_ip[:64], gpu_uuids=list(node.gpu_uuids)) for node in read_nodes(dashboard_url)
    )


def own_use() -> ProcessUse:
    """Return what this process takes."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = int(os.read(descriptor, 256).split()[1])
        finally:
            os.close(descriptor)
    except (OSError, ValueError, IndexError):
        return ProcessUse(cpu_seconds=time.process_time())
    return ProcessUse(cpu_seconds=time.process_time(), resident_bytes=pages * os.sysconf("SC_PAGESIZE"))
