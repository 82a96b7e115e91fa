# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs of a Ray cluster as its head lists them: what each was started with, and by which id its tasks are known.

It holds submitted jobs and drivers that were started by hand, with their whole command lines, also of a bare
RayCluster. Secrets are taken out here, before anything is kept.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from verl_gpumonitor.model.redaction import redact
from verl_gpumonitor.model.report import MAX_ENTRYPOINT, MAX_RAY_NAMES, RayJobInfo
from verl_gpumonitor.reading.fetch import fetch_whole
from verl_gpumonitor.stages.releases import telling

from .ray_api import RayJobEntry, parse_jobs

PATH: Final = "/api/jobs/"
MAX_ANSWER_BYTES: Final = 8 * 1024 * 1024
MAX_JOBS: Final = 16
"""Newest jobs that are told; more than these do not run on one cluster."""
MAX_KNOWN: Final = 512
"""Jobs whose ids are kept."""
MAX_SEEN: Final = 4096
"""Names of tasks that are remembered as looked at; a job has some dozens."""
ALIVE: Final = ("PENDING", "RUNNING")
"""Ray's words for a job that is not over."""

_LORA: Final = re.compile(
    r"\bactor_rollout_ref\.model\.(?:lora_rank=[\"']?0*[1-9]|lora\.rank=[\"']?0*[1-9]|lora_adapter_path=(?!null\b|[\s\"']))"
)


class RayJobs:
    """Keeps the newest jobs list."""

    def __init__(
        self,
        dashboard_url: str,
        *,
        token: str | None = None,
        limit_seconds: float = 5.0,
        read: Callable[[str], bytes] | None = None,
    ) -> None:
        """`dashboard_url`: `http://127.0.0.1:8265`. `read`: takes a URL, returns the body, raises as `fetch` does."""
        self._url = dashboard_url.rstrip("/") + PATH
        self._read = read or (
            lambda url: fetch_whole(url, limit_seconds=limit_seconds, max_bytes=MAX_ANSWER_BYTES, token=token)
        )
        self.infos: tuple[RayJobInfo, ...] = ()
        """The newest first."""
        self.submissions: Mapping[str, str] = {}
        """Ray's job id -> submission id, of jobs that were submitted."""
        self.job_ids: frozenset[str] = frozenset()
        """Ray's ids of all jobs, those that were started by hand too."""
        self.lora_job_ids: frozenset[str] = frozenset()
        """Ray's ids of jobs whose command line turns LoRA on."""
        self._seen: set[tuple[str, str]] = set()
        """Job id and name of the tasks that were looked at."""
        self._names: dict[str, dict[str, None]] = {}
        """Job id -> what its tasks' names tell of it."""

    def saw(self, tasks: Iterable[tuple[str, str]]) -> None:
        """Learn from the tasks that run, (job id, name): what they tell is in the next list."""
        new = {*tasks} - self._seen
        if len(self._seen) > MAX_SEEN:
            self._seen.clear()
        self._seen |= new
        for job_id, name in new:
            for word in telling(name):
                self._names.setdefault(job_id, {})[word] = None
        while len(self._names) > MAX_KNOWN:
            del self._names[next(iter(self._names))]

    def ask(self) -> None:
        """Read the list again. Raises FetchError and RayApiError; what is known stays then."""
        entries = newest(parse_jobs(self._read(self._url)))
        self.job_ids = frozenset(entry.job_id for entry in entries)
        self.lora_job_ids = frozenset(entry.job_id for entry in entries if has_lora(entry.entrypoint))
        self.infos = tuple(info(entry, self._names.get(entry.job_id, ())) for entry in entries[:MAX_JOBS])
        self.submissions = {
            entry.job_id: entry.submission_id for entry in entries if entry.job_id and entry.submission_id
        }


def has_lora(entrypoint: str) -> bool:
    """Say whether a command line of verl turns LoRA on, by the key of any version."""
    return _LORA.search(entrypoint[:MAX_ENTRYPOINT]) is not None


def newest(entries: Sequence[RayJobEntry]) -> list[RayJobEntry]:
    """Return the newest jobs first, bounded. One that has not started comes before all that have."""
    ordered = sorted(entries, key=lambda entry: float("inf") if entry.started_at is None else entry.started_at)
    return ordered[::-1][:MAX_KNOWN]


def only_alive(infos: Sequence[RayJobInfo]) -> RayJobInfo | None:
    """Return the job that is alive; None where there is none, or more than one."""
    alive = [info for info in infos if info.status in ALIVE]
    return alive[0] if len(alive) == 1 else None


def info(entry: RayJobEntry, ray_names: Iterable[str] = ()) -> RayJobInfo:
    """Return what may be told of a job: without secrets, bounded."""
    return RayJobInfo(
        submission_id=entry.submission_id,
        status=entry.status,
        entrypoint=redact(entry.entrypoint)[:MAX_ENTRYPOINT],
        started_at=entry.started_at,
        ray_names=sorted(ray_names)[:MAX_RAY_NAMES],
    )
