# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The mark of the call that a thread is in, so that another can see it hang and take over; and the sign to stop.

A thread that hangs in C cannot be ended. It is abandoned instead: when its call returns at last, `end` raises, so that
it makes no further call and touches nothing that its successor now owns.
"""

import threading
from collections.abc import Callable

import msgspec


class Call(msgspec.Struct, frozen=True, eq=False):
    """A call in progress. Two calls are never the same."""

    part: str
    """What is left out if it hangs: a GPU's UUID, `index 3`, or a part of the library such as `events`."""
    function: str
    since: float
    """Monotonic seconds."""


class Abandoned(BaseException):
    """The call came back too late: the thread was replaced meanwhile. No Exception, so that no handler keeps it."""

    def __init__(self, call: Call | None) -> None:
        """`call`: the one that hung."""
        super().__init__(call)
        self.call = call


class CallWatch:
    """What one thread is doing inside the library. Written by that thread, read by the watchdog.

    Whoever takes a call out of the set first has it: the thread that comes back from it, or the watchdog that gives
    the thread up. That is one step for the interpreter, and cheaper than a lock, some 45 times a second.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Take the clock that `since` is told in."""
        self._clock = clock
        self._call: Call | None = None
        self._inside: set[Call | None] = set()

    @property
    def call(self) -> Call | None:
        """The call in progress, or None."""
        return self._call

    def begin(self, part: str, function: str) -> None:
        """Note that this thread goes into the library now."""
        self._call = call = Call(part, function, self._clock())
        self._inside.add(call)

    def end(self) -> None:
        """Note that it came back. Raises Abandoned if it was replaced."""
        call, self._call = self._call, None
        try:
            self._inside.remove(call)
        except KeyError:
            raise Abandoned(call) from None

    def abandon(self, call: Call) -> bool:
        """Give the thread up if it is still in this very call; False when it came back in the meantime."""
        try:
            self._inside.remove(call)
        except KeyError:
            return False
        return True


class StopSign:
    """Tells threads to end, and lets them sleep until then.

    A lock that is held until the end. threading.Event makes a new one and runs forty lines of Python at each wait,
    which made a wake-up half as dear again.
    """

    def __init__(self) -> None:
        """Nobody is told to end yet."""
        self._held = threading.Lock()
        self._held.acquire()
        self.given = False
        """Whether the sign was given."""

    def give(self) -> None:
        """Tell all to end, once and for all. Called by one thread at a time."""
        if not self.given:
            self.given = True
            self._held.release()

    def wait(self, seconds: float) -> bool:
        """Sleep that long, or until the sign is given. Return whether it is."""
        if self._held.acquire(timeout=seconds):
            self._held.release()
        return self.given
