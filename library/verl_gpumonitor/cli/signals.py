# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How commands that go on until they are told to end hear of it: Ctrl-C, SIGTERM, a terminal that is closed.

Under nohup a closed terminal is nothing to end for: SIGHUP stays ignored where it was.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], None]


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Give an event that is set by Ctrl-C, SIGTERM and the end of the terminal, while the block runs."""
    stop = threading.Event()

    def set_it(_: int, __: FrameType | None) -> None:
        stop.set()

    with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), set_it):
        yield stop


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """End the block as Ctrl-C does when the process is told to end: a terminal must get its own screen and keys back.

    So SIGTERM stays ignored, too, where it was.
    """
    taken = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    with _handled(taken, _interrupt):
        yield


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: _Handler) -> Iterator[None]:
    """Let a handler have these signals while the block runs, but for a SIGHUP that is ignored."""
    wanted = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt
