# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Lines on stderr, one JSON object each, on changes of state alone.

The standard logging module costs 2 MiB of memory, which is a fifteenth of the sidecar's budget.
"""

import os
import time
from collections.abc import Callable

import msgspec

_STDERR = 2
_MAX_TEXT = 1024

Value = str | int | float | bool | None


def write_stderr(line: bytes) -> None:
    """Write one line. A closed or full stderr never harms the sidecar."""
    try:
        os.write(_STDERR, line)
    except OSError:
        return


class Journal:
    """Says what changed, each thing once."""

    def __init__(
        self, write: Callable[[bytes], None] = write_stderr, unix_clock: Callable[[], float] = time.time
    ) -> None:
        self._write = write
        self._unix_clock = unix_clock
        self._said: dict[str, tuple[str, dict[str, Value]]] = {}

    def event(self, message: str, **keys: Value) -> None:
        """Say that something happened. `message` is constant; what varies goes into `keys`, None is left out."""
        known = {
            key: value[:_MAX_TEXT] if isinstance(value, str) else value
            for key, value in keys.items()
            if value is not None
        }
        line = {"time": round(self._unix_clock(), 3), "message": message, **known}
        self._write(msgspec.json.encode(line) + b"\n")

    def state(self, topic: str, message: str, **keys: Value) -> None:
        """Say how things stand with `topic`, unless just that was said last.

        The text of an `error` may vary from one try to the next (a port, a count): alone it is no change.
        """
        stands = (message, {key: value for key, value in keys.items() if key != "error"})
        if self._said.get(topic) == stands:
            return
        self._said[topic] = stands
        self.event(message, **keys)
