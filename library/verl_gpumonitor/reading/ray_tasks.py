# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which tasks the processes of this pod have given away, from the page of Ray's metrics agent.

On the pod in which a job's driver runs these are the job's stages, wherever they are executed. The page tells no times
and is up to 10 s old; but that something changed is the moment to ask those who know more, where asking is dear.
"""

import re
from typing import Final

MAX_NAMES: Final = 256
_MAX_LINE_BYTES: Final = 8192
_TASKS: Final = b"ray_tasks{"
_NAME: Final = re.compile(rb'[{,]Name="((?:[^"\\]|\\.){1,512})"')


class SubmittedTasks:
    """Takes the page in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False
        self._names: set[bytes] = set()

    def feed(self, piece: bytes) -> None:
        """Take the next piece. Whatever is no line that is known is passed over; nothing raises."""
        *lines, rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line.startswith(_TASKS) and b'Source="owner"' in line and b'State="SUBMITTED_TO_WORKER"' in line:
                self._take(line)
        self._skipping = self._skipping or len(rest) > _MAX_LINE_BYTES
        self._rest = b"" if self._skipping else rest

    def names(self) -> frozenset[bytes]:
        """Return the names, as they stand on the page. An unfinished last line does not count."""
        return frozenset(self._names)

    def _take(self, line: bytes) -> None:
        """Keep the name if any such task is with a worker. Ray counts below zero at times."""
        found = _NAME.search(line, 0, _MAX_LINE_BYTES)
        value = line[line.rfind(b"}") + 1 :].split(maxsplit=1)
        try:
            some = bool(value) and float(value[0]) > 0
        except ValueError:
            return
        if some and found is not None and len(self._names) < MAX_NAMES:
            self._names.add(found[1])
