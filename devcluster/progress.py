# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Says which part is being done, for how long already, and about how long it takes."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

LATE_RATIO, LATE_LEAST_SECONDS = 1.5, 20.0
"""A part is called late when it takes so many times its estimate, or this, if that is more."""
QUIET_SECONDS = 30.0
"""Without a terminal, a running part is mentioned this often."""


def clock(seconds: float) -> str:
    """Return minutes and seconds: 130 gives 2:10."""
    whole = int(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def about(seconds: float) -> str:
    """Return an estimate in words: 360 gives «about 6 min», 8 gives «a few seconds»."""
    if seconds < 15:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds / 10) * 10} s"
    return f"about {round(seconds / 60)} min"


class Part:
    """The part now being done. `note` is what its last line says, instead of «done»."""

    def __init__(self) -> None:
        self.note = ""


class Progress:
    """Numbered parts, one after the other. On a terminal the running part's line is rewritten each second."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._number = 0
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()

    @contextmanager
    def part(self, title: str, estimate_seconds: float | None = None) -> Iterator[Part]:
        """Show one part while the block runs. None: an estimate would say nothing."""
        self._number += 1
        head = f"[{self._number}/{self._total}] {title}"
        estimate = f" … {about(estimate_seconds)}" if estimate_seconds is not None else " …"
        part, begun, stop = Part(), time.monotonic(), threading.Event()
        ticker = threading.Thread(target=self._tick, args=(head + estimate, begun, estimate_seconds, stop), daemon=True)
        if self._terminal or estimate_seconds is not None:  # without a terminal, one line is enough for what is done
            self._show(head + estimate, final=not self._terminal)
        ticker.start()
        ending = "failed"
        try:
            yield part
            ending = part.note or "done"
        finally:
            stop.set()
            ticker.join()
            self._show(f"{head} … {ending} ({clock(time.monotonic() - begun)})", final=True)

    def _tick(self, text: str, begun: float, estimate_seconds: float | None, stop: threading.Event) -> None:
        while not stop.wait(1.0 if self._terminal else QUIET_SECONDS):
            seconds = time.monotonic() - begun
            late = estimate_seconds is not None and seconds > LATE_RATIO * max(estimate_seconds, LATE_LEAST_SECONDS)
            hint = ": longer than usual, as on a busy or slow machine" if late else ""
            self._show(f"{text}, {clock(seconds)} so far{hint}", final=not self._terminal)

    def _show(self, line: str, *, final: bool) -> None:
        start = "\r\x1b[K" if self._terminal else ""
        self._stream.write(f"{start}{line}" + ("\n" if final else ""))
        self._stream.flush()
