# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What runs in this pod, from the page of Ray's metrics agent, which the sidecar reads for other reasons anyway.

Two parts of the page tell it. Titles of Ray's processes, as components of the memory metrics, are new each 5 s and true
when they are; a title that is over stays with the value 0. The number of running tasks by name, `ray_tasks`, is up to
10 s old, depending on Ray's settings. A rollout server does many things at once, and Linux shows it as idle between the
ends of two: that is in `ray_tasks` alone. Titles have no number: which GPU is in which stage is not told.
"""

import re
from typing import Final

from verl_gpumonitor.model.stages import StageSource, StageWord
from verl_gpumonitor.stages.book import Book, Manner, Running
from verl_gpumonitor.stages.names import classify
from verl_gpumonitor.stages.tables import Kind

MAX_NAMES: Final = 256
"""Names that are kept of one page; a pod has a few dozen."""
MANNER: Final = Manner(gap_seconds=11.0, lag_seconds=2.5)
"""The page is 0 to 5 s old when it is read, and read each 5 s; one reading may fail."""

_MAX_LINE_BYTES: Final = 8192
_TASKS: Final = b"ray_tasks{"
_TITLES: Final = (b"ray_component_rss_bytes{", b"ray_component_rss_mb{")
_NAME: Final = re.compile(rb'[{,]Name="((?:[^"\\]|\\.){1,1024})"')
_COMPONENT: Final = re.compile(rb'[{,]Component="(ray::(?:[^"\\]|\\.){1,1024})"')


class RunningNames:
    """Takes the page in pieces of any size, and keeps the names of what runs."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False
        self._titles: dict[str, None] = {}
        self._tasks: dict[str, None] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next piece. Whatever is no line that is known is passed over; nothing raises."""
        *lines, rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line.startswith(_TITLES):
                _keep(self._titles, line, _COMPONENT)
            elif line.startswith(_TASKS) and b'Source="executor"' in line and b'State="RUNNING' in line:
                _keep(self._tasks, line, _NAME)
        self._skipping = self._skipping or len(rest) > _MAX_LINE_BYTES
        self._rest = b"" if self._skipping else rest

    def names(self) -> tuple[str, ...]:
        """Return titles (`ray::…`) and names of tasks that run, in the page's order. An unfinished line does not count.

        A worker's task is left out where workers' titles are there: those are newer.
        """
        titled = any(_kind(title) is Kind.WORKER or _idle_worker(title) for title in self._titles)
        tasks = [name for name in self._tasks if not (titled and _kind(name) is Kind.WORKER)]
        return (*self._titles, *tasks)


def running_names(text: bytes) -> tuple[str, ...]:
    """Return what runs by a whole page; see `RunningNames.names`."""
    parser = RunningNames()
    parser.feed(text)
    return parser.names()


class AgentStages:
    """Turns pages, one after the other, into the word on this pod."""

    def __init__(self) -> None:
        self._book = Book(MANNER)

    def observe(self, at: float, names: tuple[str, ...]) -> bool:
        """Take the names of a page that was read at `at`, Unix time; says whether anything began or ended.

        To be called after each reading of the page, and not when it could not be read.
        """
        found = {said for name in names[:MAX_NAMES] if (said := classify(name)) is not None and said.tells_pod}
        things = [Running(key=f"{said.stage}/{said.role}", stage=said.stage, role=said.role) for said in found]
        return self._book.look(at, things)

    def word(self, now_unix: float) -> StageWord:
        """Return what ran in the pod; all intervals are of the pod as a whole, and right to some 5 s."""
        return self._book.word(StageSource.RAY_AGENT, now_unix)


def _kind(name: str) -> Kind | None:
    said = classify(name)
    return None if said is None else said.kind


def _idle_worker(title: str) -> bool:
    return classify(title) is None and _kind(f"{title}.generate") is Kind.WORKER


def _keep(names: dict[str, None], line: bytes, label: re.Pattern[bytes]) -> None:
    """Keep the name in a label, if the value at the line's end is above 0."""
    found = label.search(line, 0, _MAX_LINE_BYTES)
    if found is not None and len(names) < MAX_NAMES and _positive(line[line.rfind(b"}") + 1 :]):
        names[_unescaped(found[1]).decode("utf-8", "replace")] = None


def _positive(text: bytes) -> bool:
    parts = text.split(maxsplit=1)
    try:
        return bool(parts) and float(parts[0]) > 0
    except ValueError:
        return False


def _unescaped(raw: bytes) -> bytes:
    if b"\\" not in raw:
        return raw
    return raw.replace(b"\\\\", b"\0").replace(b'\\"', b'"').replace(b"\\n", b"\n").replace(b"\0", b"\\")
