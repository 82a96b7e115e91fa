# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Stages of a whole Ray cluster, as its State API tells them on the head. Begins are exact.

It is the job's own server, whose answers cost it time: 5 ms with few stored tasks, 0.3 s with 60,000. So it is asked
as `Pace` allows, for running tasks alone. What began and ended between two questions is not seen: the lists of ended
tasks are too dear. Where the questions are too far apart for that, the word is empty but for what runs.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from verl_gpumonitor.model.stages import StageInterval, StageSource, StageWord
from verl_gpumonitor.reading.fetch import FetchError, FetchStatusError, fetch
from verl_gpumonitor.stages.book import MAX_PLACES, Book, Manner, Running
from verl_gpumonitor.stages.cluster import ClusterMap, RayActor, RayHost, RayTask, running
from verl_gpumonitor.stages.lora import ReferencePasses
from verl_gpumonitor.stages.names import classify
from verl_gpumonitor.stages.pace import Pace
from verl_gpumonitor.stages.skew import Skew
from verl_gpumonitor.stages.tables import Kind

from .ray_api import Listing, RayApiError, parse_actors, parse_hosts, parse_tasks
from .ray_jobs import RayJobs

TASKS_PATH: Final = "/api/v0/tasks?limit={limit}&detail=1&filter_keys=state&filter_predicates=%3D&filter_values=RUNNING"
ACTORS_PATH: Final = "/api/v0/actors?limit=4000&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
NODES_PATH: Final = "/api/v0/nodes?limit=4000"
EXCEPT: Final = "&filter_keys=name&filter_predicates=%21%3D&filter_values={name}"

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
LIMIT_SECONDS: Final = 5.0
FIRST_LIMIT: Final = 1000
MOST_LIMIT: Final = 4000
"""Tasks of one answer; a record takes about 1.6 KB, and up to 4000 actors some 0.4 KB each."""
MAX_CROWDS: Final = 4
LISTS_SECONDS: Final = 10.0
"""Actors and jobs are asked for when an id is unknown, and no more often than this."""
NODES_SECONDS: Final = 5.0
"""The same for nodes: a task whose node is unknown is nowhere."""
MANNER: Final = Manner(gap_seconds=6.0, lag_seconds=0.3, settle_seconds=1.5)
"""Ray's workers tell of their tasks each second; seen so on Ray 2.60, 0.3 s on average."""
MOST_RETRY_SECONDS: Final = 10.0
"""Pace of the questions to a dashboard that does not answer, in the long run; it starts late with its head."""
REFUSED_SECONDS: Final = 60.0
"""Pace of the questions to one that refuses: it logs each of them."""
REPORTED_WITHIN_SECONDS: Final = 5.0
"""Tasks that began so long before the last question may be new in this one, where a head is slow."""

GUARDED: Final = "DashboardGuarded"
UNREACHABLE: Final = "DashboardUnreachable"
UNUSABLE: Final = "StateApiUnusable"
SLOW: Final = "StateApiSlow"


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why the State API is of no use, or of less than it could be."""

    reason: str
    """One word, for a condition."""
    message: str


class ClusterWord(msgspec.Struct, frozen=True, kw_only=True):
    """What ran on all nodes of a cluster in one span of time: a `StageWord` for many."""

    known_from: float
    known_until: float
    """Both by the head's clock; the intervals' times are by their own nodes' clocks."""
    nodes: dict[str, tuple[StageInterval, ...]]
    """By node IP, each by begin. A node that is not here ran nothing."""
    ahead: dict[str, float] = {}
    """Node IP -> how far its clock is before the head's, where it is."""


class RayState:
    """Asks when due, and keeps what ran. For one thread; nothing that the head answers raises."""

    def __init__(
        self,
        dashboard_url: str,
        *,
        jobs: RayJobs | None = None,
        token: str | None = None,
        read: Callable[[str], bytes | bytearray] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`dashboard_url`: `http://127.0.0.1:8265`. `jobs`: asked for the job that a task is of; None: not told.

        `read`: takes a URL, returns the body, raises as `fetch` does. Asks nothing yet.
        """
        self._url = dashboard_url.rstrip("/")
        self._read = read or (lambda url: _read(url, token))
        self._clock = clock
        self._wall = wall
        self._jobs = jobs
        self._pace = Pace(clock())
        self._book = Book(MANNER)
        self._skews: dict[str, Skew] = {}
        self._references = ReferencePasses()
        self._seen: frozenset[str] = frozenset()
        self._seen_at: float | None = None
        self._hosts: tuple[RayHost, ...] = ()
        self._actors: tuple[RayActor, ...] = ()
        self._map = ClusterMap()
        self._lists_due: dict[str, float] = {}
        self._limit = FIRST_LIMIT
        self._failures = 0
        self._retry_at = clock()
        self._trouble: Trouble | None = None

    def hint(self) -> None:
        """Say that something seems to have changed: the next question then comes as soon as the budget lets it."""
        self._pace.hint()

    def due_at(self) -> float:
        """Return when, by the monotonic clock, `ask` is due."""
        return max(self._pace.due_at(), self._retry_at)

    @property
    def ask_seconds(self) -> float:
        """Present pace of the questions."""
        return self._pace.seconds

    @property
    def hosts(self) -> tuple[RayHost, ...]:
        """Nodes of the cluster as they were listed last."""
        return self._hosts

    @property
    def trouble(self) -> Trouble | None:
        """What keeps this source from being used, or from being better; None while all is well."""
        if self._trouble is None and self._pace.seconds > MANNER.gap_seconds:
            message = (
                f"an answer of Ray's State API takes so long that it is asked every {self._pace.seconds:.0f} s alone, "
                "to cost the head no more than 1% of a core"
            )
            return Trouble(reason=SLOW, message=message)
        return self._trouble

    def ask(self) -> bool:
        """Ask now, due or not; says whether anything began or ended. Takes up to some seconds, and never raises."""
        begin = self._clock()
        try:
            changed = self._ask(begin)
        except (FetchError, RayApiError) as error:
            changed = self._fail(error)
        else:
            self._failures, self._trouble = 0, None
        self._pace.spend(begin, self._clock() - begin)
        return changed

    def cluster(self, now_unix: float) -> ClusterWord:
        """Return the word on all nodes of the last 180 s at most; its span is empty while nothing is vouched for."""
        known = self._book.known or (now_unix, now_unix)
        nodes = {place: self._intervals(now_unix, place) for place in self._book.places()}
        return ClusterWord(
            known_from=known[0],
            known_until=known[1],
            nodes={place: ran for place, ran in nodes.items() if ran},
            ahead={place: ahead for place in nodes if (ahead := self._ahead(place))},
        )

    def word(self, now_unix: float, node_ip: str) -> StageWord:
        """Return the word on one node, such as the head's own."""
        word = self._book.word(StageSource.RAY_STATE, now_unix, node_ip)
        return msgspec.structs.replace(word, intervals=self._intervals(now_unix, node_ip))

    def _ask(self, begin: float) -> bool:
        tasks = self._tasks()
        at = self._wall()
        self._refresh(tasks.items, begin)
        references = self._reference_passes(tasks, at)
        self._learn_skew(tasks, at)  # First: a node's first task tells of the clock by which it is to be taken.
        things = [self._our_clock(thing) for thing in running(tasks.items, self._map, references)]
        if self._jobs is not None:
            self._jobs.saw((task.job_id, task.name) for task in tasks.items)
        return self._book.look(at, things, whole=tasks.whole)

    def _reference_passes(self, tasks: Listing[RayTask], at: float) -> frozenset[str]:
        lora = frozenset() if self._jobs is None else self._jobs.lora_job_ids
        if not tasks.whole or self._seen_at is None or at - self._seen_at > MANNER.gap_seconds:
            self._references.forget()
        return self._references.look(task for task in tasks.items if task.job_id in lora) if lora else frozenset()

    def _tasks(self) -> Listing[RayTask]:
        """Return the running tasks; of the calls of servers and helpers, where they are too many, some.

        A second question then leaves them out, so that no worker's task is lost among them.
        """
        url = self._url + TASKS_PATH.format(limit=self._limit)
        listing = parse_tasks(self._read(url))
        if listing.whole:
            return listing
        rest = parse_tasks(self._read(url + "".join(EXCEPT.format(name=_quoted(name)) for name in _crowds(listing))))
        if not rest.whole:
            self._limit = min(MOST_LIMIT, self._limit * 2)
        tasks = {task.task_id: task for task in listing.items + rest.items}
        return Listing(tuple(tasks.values()), rest.whole)

    def _refresh(self, tasks: tuple[RayTask, ...], now: float) -> None:
        """Ask again for whatever list lacks an id. A list that cannot be read now leaves its ids unknown."""
        ours = [task for task in tasks if (said := classify(task.name)) is not None and said.kind is not Kind.OTHER]
        read = [
            self._list("nodes", now, any(task.node_id not in self._map.ips for task in ours), self._read_hosts),
            self._list("actors", now, any(self._unknown_actor(task) for task in ours), self._read_actors),
        ]
        if self._jobs is not None:
            unknown = any(task.job_id not in self._jobs.job_ids for task in ours)
            read.append(self._list("jobs", now, unknown, self._jobs.ask))
        # The jobs list is read by others, too: a job that they met first is as new here.
        submissions = self._jobs.submissions if self._jobs else {}
        if any(read) or submissions != self._map.submissions:
            self._map = ClusterMap(self._hosts, self._actors, submissions)

    def _list(self, name: str, now: float, lacking: bool, read: Callable[[], None]) -> bool:
        if not lacking or now < self._lists_due.get(name, now):
            return False
        self._lists_due[name] = now + (NODES_SECONDS if name == "nodes" else LISTS_SECONDS)
        try:
            read()
        except (FetchError, RayApiError):
            return False
        return True

    def _unknown_actor(self, task: RayTask) -> bool:
        return bool(task.actor_id) and task.actor_id not in self._map.actors

    def _read_hosts(self) -> None:
        self._hosts = parse_hosts(self._read(self._url + NODES_PATH)).items[:MAX_PLACES]

    def _read_actors(self) -> None:
        self._actors = parse_actors(self._read(self._url + ACTORS_PATH)).items

    def _fail(self, error: FetchError | RayApiError) -> bool:
        self._failures += 1
        self._trouble = _trouble(error, self._url)
        most = MOST_RETRY_SECONDS if self._trouble.reason == UNREACHABLE else REFUSED_SECONDS
        self._retry_at = self._clock() + min(most, 2.0 ** min(self._failures, 8))
        if self._trouble.reason == GUARDED or isinstance(error.__cause__, ConnectionRefusedError):
            # Nobody is there: a head that comes back begins with nothing. A slow answer is no such break.
            self._book.interrupt()
            self._seen_at = None
        return False

    def _learn_skew(self, listing: Listing[RayTask], at: float) -> None:
        """Compare the begins of new workers' tasks, all of which are seen, with the times of the questions."""
        before, self._seen_at = self._seen_at, at if listing.whole else None
        workers = {task.task_id: task for task in listing.items if _is_worker(task)}
        seen, self._seen = self._seen, frozenset(workers)
        if before is None or not listing.whole or at - before > MANNER.gap_seconds:
            return
        for task_id, task in workers.items():
            ip = self._map.ips.get(task.node_id)
            if task_id not in seen and task.begin is not None and ip is not None:
                skew = self._skews.setdefault(ip, Skew())
                skew.began(task.begin, before - REPORTED_WITHIN_SECONDS, at)
        if len(self._skews) > MAX_PLACES:
            self._skews.clear()

    def _our_clock(self, thing: Running) -> Running:
        ahead = self._ahead(thing.place)
        if thing.begin is None or not ahead:
            return thing
        return msgspec.structs.replace(thing, begin=thing.begin - ahead)

    def _intervals(self, now_unix: float, place: str) -> tuple[StageInterval, ...]:
        """Return what ran on a node, by that node's clock."""
        ahead = self._ahead(place)
        intervals = self._book.intervals(now_unix, place)
        if not ahead:
            return intervals
        return tuple(
            msgspec.structs.replace(
                interval, begin=interval.begin + ahead, end=None if interval.end is None else interval.end + ahead
            )
            for interval in intervals
        )

    def _ahead(self, place: str) -> float:
        skew = self._skews.get(place)
        return 0.0 if skew is None else skew.seconds


def _crowds(listing: Listing[RayTask]) -> list[str]:
    """Return the names of servers' and helpers' tasks that take more than a twentieth of the room each."""
    names = Counter(task.name for task in listing.items)
    crowded = [name for name, count in names.most_common() if count * 20 > len(listing.items)]
    kinds = {name: said.kind for name in crowded if (said := classify(name)) is not None}
    return [name for name, kind in kinds.items() if kind is not Kind.WORKER][:MAX_CROWDS]


def _is_worker(task: RayTask) -> bool:
    said = classify(task.name)
    return said is not None and said.kind is Kind.WORKER


def _trouble(error: FetchError | RayApiError, url: str) -> Trouble:
    if isinstance(error, FetchStatusError) and error.status in (401, 403):
        return Trouble(reason=GUARDED, message=f"Ray's dashboard at {url} wants a token: {error}"[:512])
    if isinstance(error, FetchError) and not isinstance(error, FetchStatusError):
        return Trouble(reason=UNREACHABLE, message=f"Ray's dashboard does not answer: {error}"[:512])
    return Trouble(reason=UNUSABLE, message=f"Ray's State API at {url} answers with something else: {error}"[:512])


def _quoted(name: str) -> str:
    """Percent-encode a name for a query; urllib would cost memory that is counted."""
    return "".join(chr(byte) if chr(byte).isalnum() and byte < 128 else f"%{byte:02X}" for byte in name.encode())


def _read(url: str, token: str | None) -> bytearray:
    body = bytearray()
    fetch(url, body.extend, limit_seconds=LIMIT_SECONDS, max_bytes=MAX_ANSWER_BYTES, token=token)
    return body
