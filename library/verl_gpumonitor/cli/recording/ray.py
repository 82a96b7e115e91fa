# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What Ray's servers on this host say, asked in a thread of its own: running tasks by name, and the jobs list.

The State API is asked first. It is the job's own server, so no more often than `Pace` allows. Where it does not answer,
the metrics agent may know names, without processes.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from verl_gpumonitor.model.report import RayJobInfo
from verl_gpumonitor.model.stages import StageInterval
from verl_gpumonitor.reading.fetch import FetchError, fetch_whole
from verl_gpumonitor.stages.book import Book, Manner, Running
from verl_gpumonitor.stages.cluster import ClusterMap, RayActor, RayHost, RayTask
from verl_gpumonitor.stages.names import classify
from verl_gpumonitor.stages.pace import Pace
from verl_gpumonitor.stages.sources import ray_agent
from verl_gpumonitor.stages.sources.ray_api import RayApiError, parse_actors, parse_hosts, parse_tasks
from verl_gpumonitor.stages.sources.ray_host import dashboard_url, is_ours, own_nodes
from verl_gpumonitor.stages.sources.ray_jobs import RayJobs
from verl_gpumonitor.stages.sources.ray_state import (
    ACTORS_PATH,
    LIMIT_SECONDS,
    MANNER,
    MAX_ANSWER_BYTES,
    MOST_LIMIT,
    NODES_PATH,
    TASKS_PATH,
)
from verl_gpumonitor.stages.tables import Kind

AGENT_URL: Final = "http://127.0.0.1:8080/metrics"
TARGETS_FILE: Final = Path("/tmp/ray/prom_metrics_service_discovery.json")  # noqa: S108 - Ray's own
"""Where a Ray head writes the addresses of all metrics agents, for Prometheus."""
LISTS_SECONDS: Final = 10.0
AGENT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 10.0
"""Pace of the questions to a State API that does not answer."""
SILENT_SECONDS: Final = 15.0
"""What was said is forgotten after so long without another word."""
NODE: Final = "here"


class RayNews(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at a moment."""

    by: str | None = None
    """Who tells what runs: `state`, `agent`; None: nobody."""
    running: tuple[StageInterval, ...] = ()
    """What runs on this host and ran lately; each interval's `stage` is the task's name as Ray has it."""
    jobs: tuple[RayJobInfo, ...] = ()
    """The newest first."""
    ray_version: str | None = None
    trouble: str | None = None
    """Why the dashboard tells nothing; None while it answers, or before it was asked."""


class RayTasks:
    """Asks the State API for running tasks, and keeps when each name began and ended in each process of this host."""

    def __init__(self, url: str, read: Callable[[str], bytes], wall: Callable[[], float] = time.time) -> None:
        """`read`: takes a URL, returns the body, raises as `fetch` does."""
        self._url = url
        self._read = read
        self._wall = wall
        self._book = Book(MANNER)
        self._hosts: tuple[RayHost, ...] = ()
        self._actors: tuple[RayActor, ...] = ()
        self._map = ClusterMap()
        self._lists_due = 0.0

    def ask(self, now: float) -> None:
        """Ask now. Raises FetchError and RayApiError."""
        listing = parse_tasks(self._read(self._url + TASKS_PATH.format(limit=MOST_LIMIT)))
        at = self._wall()
        if now >= self._lists_due and self._lacks(listing.items):
            self._lists_due = now + LISTS_SECONDS
            self._hosts = parse_hosts(self._read(self._url + NODES_PATH)).items
            self._actors = parse_actors(self._read(self._url + ACTORS_PATH)).items
            self._map = ClusterMap(self._hosts, self._actors)
        here = own_nodes(self._hosts)
        self._book.look(
            at, running_names((task for task in listing.items if task.node_id in here), self._map), whole=listing.whole
        )

    def running(self) -> tuple[StageInterval, ...]:
        """Return what runs and ran lately."""
        return self._book.intervals(self._wall(), NODE)

    def _lacks(self, tasks: Iterable[RayTask]) -> bool:
        return any(
            task.node_id not in self._map.ips or (task.actor_id and task.actor_id not in self._map.actors)
            for task in tasks
        )


def running_names(tasks: Iterable[RayTask], cluster: ClusterMap) -> list[Running]:
    """Return one thing for each name that runs in a process, since its first call: a server answers many at once."""
    found: dict[tuple[int | None, str], Running] = {}
    for task in tasks:
        said = classify(task.name)
        if said is None or said.kind is Kind.OTHER:
            continue
        key = (task.pid, task.name)
        other = found.get(key)
        begins = (task.begin, None if other is None else other.begin)
        begin = min((t for t in begins if t is not None), default=None)
        # A worker does one thing at a time, so each task of it is another one.
        worker = said.kind is Kind.WORKER
        found[key] = Running(
            key=task.task_id if worker else f"{task.pid}/{task.name}",
            stage=task.name,
            role=said.role,
            place=NODE,
            begin=begin,
            local_rank=cluster.local_rank(task.actor_id, task.name) if worker else None,
            pid=task.pid,
            lane=task.actor_id if worker else f"{task.pid}/{task.name}",
        )
    return list(found.values())


class AgentNames:
    """Asks Ray's metrics agent for the names of what runs."""

    def __init__(self, urls: Callable[[], Sequence[str]], wall: Callable[[], float] = time.time) -> None:
        """`urls`: where an agent may be."""
        self._urls = urls
        self._wall = wall
        self._book = Book(Manner(gap_seconds=11.0, lag_seconds=2.5))

    def ask(self) -> None:
        """Ask now. Raises FetchError."""
        error: FetchError | None = None
        for url in self._urls():
            try:
                page = fetch_whole(url, limit_seconds=2.0, max_bytes=MAX_ANSWER_BYTES)
            except FetchError as failed:
                error = failed
                continue
            if b"ray_" in page:
                self._take(page)
                return
        raise error or FetchError("no address of Ray's metrics agent is known")

    def running(self) -> tuple[StageInterval, ...]:
        """Return what runs and ran lately."""
        return self._book.intervals(self._wall(), NODE)

    def _take(self, page: bytes) -> None:
        names = dict.fromkeys(name.removeprefix("ray::") for name in ray_agent.running_names(page))
        said = {name: found for name in names if (found := classify(name)) is not None and found.kind is not Kind.OTHER}
        self._book.look(
            self._wall(),
            [Running(key=name, stage=name, role=found.role, place=NODE) for name, found in said.items()],
        )


def agent_urls(targets: Path = TARGETS_FILE) -> list[str]:
    """Return where Ray's metrics agent of this host may be: its usual port, and the addresses that Ray wrote down."""
    try:
        groups = msgspec.json.decode(targets.read_bytes(), type=list[dict[str, list[str] | dict[str, str]]])
    except (OSError, msgspec.DecodeError):
        groups = []
    written = [target for group in groups for target in group.get("targets", ())]
    ours = [target for target in written if is_ours(target.rpartition(":")[0].strip("[]"))]
    return [AGENT_URL, *(f"http://{target}/metrics" for target in ours[:4])]


class RayWatch:
    """Asks whoever answers, in a thread; `latest` never waits."""

    def __init__(self, url: str | None = None, *, agents: Callable[[], Sequence[str]] = agent_urls) -> None:
        """`url`: of the dashboard; None: the usual one."""
        self.url = dashboard_url(url)
        self.named = url is not None
        """Whether the user said whose it is."""
        self._tasks = RayTasks(self.url, _read)
        self._agent = AgentNames(agents)
        self._jobs = RayJobs(self.url)
        self._pace = Pace(time.monotonic())
        self._news = RayNews()
        self._heard = {"state": float("-inf"), "agent": float("-inf")}
        self._jobs_due = self._agent_due = self._state_due = 0.0
        self.agent_wanted = True
        """Whether names of the agent are of use; titles of processes are better, and cost the agent nothing."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumon-ray", daemon=True)

    def start(self) -> None:
        """Ask for the first time, so that the header knows; then go on in the thread."""
        self.turn()
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopping.set()

    def hint(self) -> None:
        """Say that something seems to have changed."""
        self._pace.hint()

    def latest(self) -> RayNews:
        """Return the newest picture, at once."""
        return self._news

    def turn(self) -> None:
        """Ask what is due."""
        trouble = self._ask_state(time.monotonic())
        now = time.monotonic()
        by = next((name for name in ("state", "agent") if now - self._heard[name] < SILENT_SECONDS), None)
        if by != "state" and self.agent_wanted and now >= self._agent_due:
            self._agent_due = now + AGENT_SECONDS
            by = self._ask_agent(now) or by
        if now >= self._jobs_due:
            self._ask_jobs(now)
        running = self._tasks.running() if by == "state" else self._agent.running() if by == "agent" else ()
        self._news = msgspec.structs.replace(self._news, by=by, running=running, jobs=self._jobs.infos, trouble=trouble)

    def _ask_state(self, now: float) -> str | None:
        """Ask if it is due; says what is wrong with it."""
        if now < max(self._state_due, self._pace.due_at()):
            return self._news.trouble
        try:
            self._tasks.ask(now)
        except (FetchError, RayApiError) as error:
            self._state_due = now + RETRY_SECONDS
            return str(error)
        finally:
            self._pace.spend(now, time.monotonic() - now)
        self._heard["state"] = time.monotonic()
        return None

    def _ask_agent(self, now: float) -> str | None:
        try:
            self._agent.ask()
        except FetchError:
            return None
        self._heard["agent"] = now
        return "agent"

    def _ask_jobs(self, now: float) -> None:
        self._jobs_due = now + LISTS_SECONDS
        try:
            self._jobs.ask()
            if self._news.ray_version is None:
                version = _Version.decode(_read(self.url + "/api/version")).ray_version
                self._news = msgspec.structs.replace(self._news, ray_version=version)
        except (FetchError, RayApiError, msgspec.DecodeError):
            return

    def _run(self) -> None:
        while not self._stopping.wait(0.25):
            self.turn()


class _VersionAnswer(msgspec.Struct):
    ray_version: str | None = None


_Version: Final = msgspec.json.Decoder(_VersionAnswer)


def _read(url: str) -> bytes:
    return fetch_whole(url, limit_seconds=LIMIT_SECONDS, max_bytes=MAX_ANSWER_BYTES)
