# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Asks those who know of stages, in a thread of its own.

They are Ray's State API and jobs list on a head, and titles of processes where the pod shares its process namespace.
What a cluster ran is a large thing, and is put together seldom: when it changed, and not more often than each few
seconds. That of the head's own pod is always the newest.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from verl_gpumonitor.model.report import RayJobInfo
from verl_gpumonitor.model.stages import StageInterval, StageWord
from verl_gpumonitor.stages.choice import choose

from .bell import Bell
from .journal import Journal

TITLES_SECONDS: Final = 1.0
JOBS_SECONDS: Final = 15.0
CLUSTER_SECONDS: Final = 3.0
"""Shortest time between two pictures of the cluster; reports go out each 5 s at most."""
CLUSTER_UNCHANGED_SECONDS: Final = 6.0
IDLE_SECONDS: Final = 60.0

Shown = Mapping[str, tuple[str, str]]
"""Node IP -> stage and role that run there."""


class Trouble(Protocol):
    """What `sources.ray_state.Trouble` says."""

    @property
    def reason(self) -> str:
        """One word."""

    @property
    def message(self) -> str:
        """One sentence."""


class ClusterWord(Protocol):
    """What `sources.ray_state.ClusterWord` says."""

    @property
    def known_from(self) -> float:
        """Begin of the time that is vouched for."""

    @property
    def known_until(self) -> float:
        """Its end."""

    @property
    def nodes(self) -> Mapping[str, tuple[StageInterval, ...]]:
        """By node IP."""

    @property
    def ahead(self) -> Mapping[str, float]:
        """Node IP -> how far its clock is before ours, where it is."""


class AsksCluster(Protocol):
    """What the watch needs of `sources.ray_state.RayState`."""

    def due_at(self) -> float:
        """Return when the next question is due."""

    def hint(self) -> None:
        """Hear that something seems to have changed."""

    def ask(self) -> bool:
        """Ask; say whether anything changed. Never raises."""

    @property
    def ask_seconds(self) -> float:
        """Present pace."""

    @property
    def trouble(self) -> Trouble | None:
        """What keeps the source from being used."""

    def cluster(self, now_unix: float) -> ClusterWord:
        """Return the word on all nodes."""

    def word(self, now_unix: float, node_ip: str) -> StageWord:
        """Return the word on one."""


class AsksJobs(Protocol):
    """What the watch needs of `sources.ray_jobs.RayJobs`."""

    infos: tuple[RayJobInfo, ...]

    def ask(self) -> None:
        """Read the list again. May raise."""


class ReadsTitles(Protocol):
    """What the watch needs of `sources.titles.Titles`."""

    def observe(self, at: float) -> bool:
        """Scan."""

    def word(self, now_unix: float) -> StageWord:
        """Return the word on the pod."""


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """What they said last."""

    titles: StageWord | None = None
    own: StageWord | None = None
    """Ray's State API of the head's own pod."""
    cluster: ClusterWord | None = None
    """The same of all nodes; on a head alone."""
    cluster_changes: int = 0
    """Rises when another stage runs anywhere in the cluster."""
    jobs: tuple[RayJobInfo, ...] = ()
    trouble: Trouble | None = None
    ask_seconds: float | None = None
    """Pace of the questions to the State API; None but on a head."""


class StageWatch:
    """Keeps what the sources said last. `latest` never waits."""

    def __init__(
        self,
        *,
        state: AsksCluster | None,
        jobs: AsksJobs | None,
        titles: ReadsTitles | None,
        own_ip: str | None,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Start nothing yet. `own_ip`: of the head's pod, if it has GPUs; None: its own stages are of no interest."""
        self._state = state
        self._jobs = jobs
        self._titles = titles
        self._own_ip = own_ip
        self._journal = journal
        self._clock = clock
        self._unix_clock = unix_clock
        self._view = StageView()
        self._bell = Bell()
        self._hinted = False
        self._titles_needed = True
        self._titles_due = self._jobs_due = clock()
        self._cluster_due: float | None = None
        self._cluster_at = clock() - CLUSTER_UNCHANGED_SECONDS
        self._shown: Shown = {}

    def start(self) -> None:
        """Ask in a daemon thread until the process ends."""
        threading.Thread(target=self._run, name="stages", daemon=True).start()

    def latest(self) -> StageView:
        """Return what was said last; from any thread."""
        return self._view

    def hint(self) -> None:
        """Say that a stage seems to have changed, so that Ray is asked soon; from any thread."""
        self._hinted = True
        self._bell.ring()

    def set_titles_needed(self, needed: bool) -> None:
        """Say whether titles are wanted: not while the program itself marks its stages; from any thread."""
        if needed and not self._titles_needed:
            self._titles_needed = True
            self._bell.ring()
        self._titles_needed = needed

    def _run(self) -> None:
        while True:
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - what a job's servers say must not end this thread
                self._journal.state("stages", "a source of stages failed for a fault of ours", error=repr(error))
                self._bell.wait(1.0)
            self._bell.wait(self.due_at() - self._clock())

    def due_at(self) -> float:
        """Return when the next question is due."""
        due = [
            *([self._titles_due] if self._titles and self._titles_needed else []),
            *([self._jobs_due] if self._jobs else []),
            *([self._state.due_at()] if self._state else []),
            *([self._cluster_due] if self._state and self._cluster_due is not None else []),
        ]
        return min(due, default=self._clock() + IDLE_SECONDS)

    def turn(self) -> None:
        """Ask whatever is due."""
        now = self._clock()
        if self._titles and self._titles_needed and now >= self._titles_due:
            self._titles.observe(self._unix_clock())
            on_time = now < self._titles_due + TITLES_SECONDS
            self._titles_due = (self._titles_due if on_time else now) + TITLES_SECONDS
            self._show(titles=self._titles.word(self._unix_clock()))
        if self._state:
            self._turn_state(self._state)
        if self._jobs and self._clock() >= self._jobs_due:
            self._ask_jobs(self._jobs)
            self._jobs_due = self._clock() + JOBS_SECONDS

    def _turn_state(self, state: AsksCluster) -> None:
        if self._hinted:
            self._hinted = False
            state.hint()
        if self._clock() >= state.due_at():
            changed = state.ask()
            now = self._unix_clock()
            own = state.word(now, self._own_ip) if self._own_ip else None
            self._show(own=own, trouble=state.trouble, ask_seconds=state.ask_seconds)
            self._say_trouble(state.trouble)
            self._note_cluster(changed=changed)
        if self._cluster_due is not None and self._clock() >= self._cluster_due:
            self._show_cluster(state.cluster(self._unix_clock()))

    def _note_cluster(self, *, changed: bool) -> None:
        """Let a picture of the cluster be made: soon after a change, else only to say up to when it holds."""
        due = self._cluster_at + (CLUSTER_SECONDS if changed else CLUSTER_UNCHANGED_SECONDS)
        self._cluster_due = due if self._cluster_due is None else min(due, self._cluster_due)

    def _show_cluster(self, word: ClusterWord) -> None:
        self._cluster_at = self._clock()
        self._cluster_due = None
        shown = {ip: what for ip, ran in word.nodes.items() if (what := _runs(ran)) is not None}
        changes = self._view.cluster_changes + (shown != self._shown)
        self._shown = shown
        self._show(cluster=word, cluster_changes=changes)

    def _ask_jobs(self, jobs: AsksJobs) -> None:
        try:
            jobs.ask()
        except Exception as error:  # noqa: BLE001 - as above
            self._journal.state(
                "ray jobs", "Ray's jobs list does not answer", kind=type(error).__name__, error=str(error)
            )
            return
        self._journal.state("ray jobs", "Ray's jobs list answers")
        self._show(jobs=jobs.infos)

    def _say_trouble(self, trouble: Trouble | None) -> None:
        if trouble is None:
            self._journal.state("state api", "Ray's State API tells the stages")
        else:
            self._journal.state(
                "state api", "Ray's State API is of less use", reason=trouble.reason, error=trouble.message
            )

    def _show(self, **changes: object) -> None:
        self._view = msgspec.structs.replace(self._view, **changes)


def _runs(intervals: tuple[StageInterval, ...]) -> tuple[str, str] | None:
    """Return the stage and role that run on a node; None when nothing does."""
    chosen = choose(interval for interval in intervals if interval.end is None)
    return None if chosen is None else (chosen.stage, chosen.role)
