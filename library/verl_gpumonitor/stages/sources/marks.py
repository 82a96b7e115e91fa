# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's end of the marks: takes the datagrams of the pod's processes in, and answers from its book.

A driver's mark holds for the whole job, and reaches one sidecar: that of the pod in which the driver runs. This one
passes it on as its `ClusterStages` with source `marks` and the node `*`, by the way on which a head's intervals go; so
the other pods hear of it with their next answer, well within the watermark of the timeline. A rank's mark is its own
pod's, and goes nowhere.
"""

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from verl_gpumonitor.model.marks import EVERY_NODE, MAX_MARK_BYTES, STEP, Mark, MarkScope, decode
from verl_gpumonitor.model.samples import HostSample
from verl_gpumonitor.model.stages import StageSource, StageWord
from verl_gpumonitor.model.wiring import MARKS_PORT

from .mark_book import MarkBook, StepSpan
from .mark_sender import HOST, MarkSender

__all__ = ["EVERY_NODE", "STEP", "MarkReceiver", "MarkScope", "MarkSender", "StepSpan"]

MAX_TAKEN: Final = 512
"""Datagrams taken at one look. More than the kernel keeps for us, and a bound against a flood."""
BIND_AGAIN_SECONDS: Final = 30.0
MAX_HELD: Final = 512
"""Marks that are held of processes whose marks are not wanted: it may be found later that they are."""
HELD_SECONDS: Final = 600.0
"""So long a mark is held: a job may mark for minutes before it is on a GPU."""
HELD_AGAIN_SECONDS: Final = 2.0
"""Pace at which it is asked anew whether held marks are wanted."""
_BUFFER_BYTES: Final = 1 << 18


class MarkReceiver:
    """Takes the marks of the pod's processes in. Used by one thread at a time; nothing raises, nothing waits.

    Not for a pod with host network: localhost is then the node's, and marks of other pods would arrive too.
    """

    def __init__(
        self,
        port: int = MARKS_PORT,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        wanted: Callable[[int], bool] | None = None,
    ) -> None:
        """Bind the port on localhost, if it is free; else try again now and then. 0 takes a free one.

        `wanted`: says whether a process, by its pid as it says it, is one of those whose marks are taken. Marks of
        others count for nothing, and are held for a while, lest what began before this was known be lost. None: all.
        """
        self._port = port
        self._clock = clock
        self._monotonic = monotonic
        self._wanted = wanted
        self._held: deque[tuple[Mark, float]] = deque(maxlen=MAX_HELD)
        """Marks that are not wanted so far, and when they came."""
        self._held_due = float("-inf")
        self._book = MarkBook()
        self._socket: socket.socket | None = None
        self._bind_at = monotonic()
        self.problem: str | None = None
        """Why nothing is received; None while all is well."""
        self.foreign = 0
        """Datagrams that were no marks."""
        self._bind()

    @property
    def port(self) -> int | None:
        """The port that is bound; None while there is none."""
        return None if self._socket is None else int(self._socket.getsockname()[1])

    @property
    def taken(self) -> int:
        """Marks that were taken in."""
        return self._book.taken

    @property
    def dropped(self) -> int:
        """Datagrams that were no marks, or had impossible times."""
        return self.foreign + self._book.dropped

    def poll(self, now_unix: float | None = None) -> int:
        """Take in what has arrived. Return how many datagrams that were."""
        now = self._clock() if now_unix is None else now_unix
        if self._socket is None and self._monotonic() >= self._bind_at:
            self._bind()
        if self._socket is None:
            return 0
        if self._held and self._monotonic() >= self._held_due:
            self._look_at_held(now)
        for count in range(MAX_TAKEN):
            try:
                datagram = self._socket.recv(MAX_MARK_BYTES + 1)
            except OSError:  # nothing more is there
                return count
            mark = decode(datagram)
            if mark is None:
                self.foreign += 1
            elif self._wanted is None or self._wanted(mark.pid):
                self._book.observe(mark, now)
            else:
                self._held.append((mark, now))
        return MAX_TAKEN

    def _look_at_held(self, now: float) -> None:
        """Take in the held marks of processes that are wanted by now; let go of what is held too long."""
        self._held_due = self._monotonic() + HELD_AGAIN_SECONDS
        wanted = {pid for pid in {mark.pid for mark, _ in self._held} if self._wanted is None or self._wanted(pid)}
        held, self._held = self._held, deque(maxlen=MAX_HELD)
        for mark, came in held:
            if mark.pid in wanted:
                self._book.observe(mark, came)
            elif now - came <= HELD_SECONDS:
                self._held.append((mark, came))

    def word(self, now_unix: float) -> StageWord:
        """Return what holds for the own pod; see `MarkBook.word`."""
        self.poll(now_unix)
        return self._book.word(now_unix)

    def words(self, now_unix: float) -> tuple[StageWord, ...]:
        """Return all that is known of the own pod, the best first; see `MarkBook.words`."""
        self.poll(now_unix)
        return self._book.words(now_unix)

    def cluster_word(self, now_unix: float) -> StageWord:
        """Return what the driver says of every node of its Ray cluster; empty when no driver marks here."""
        self.poll(now_unix)
        return self._book.cluster_word(now_unix)

    def steps(self, now_unix: float) -> tuple[StepSpan, ...]:
        """Return the training steps that were marked, by begin; the last may still run."""
        self.poll(now_unix)
        return self._book.steps(now_unix)

    def own_uuids(self, now_unix: float) -> tuple[str, ...]:
        """Return the GPUs that the training processes name as their container's; empty where they do not."""
        return self._book.own_uuids(now_unix)

    def host_sample(self, now_unix: float) -> HostSample | None:
        """Return the host memory that the program measured itself, if it did in the last minute."""
        mark = self._book.host(now_unix)
        if mark is None:
            return None
        return HostSample(
            taken_at=self._monotonic() - max(0.0, now_unix - mark.t),
            memory_used_bytes=mark.memory_used_bytes,
            memory_limit_bytes=mark.memory_limit_bytes,
            source=StageSource.MARKS.value,
        )

    def close(self) -> None:
        """Let the port go, for good."""
        connection, self._socket, self._bind_at = self._socket, None, float("inf")
        if connection is not None:
            connection.close()

    def _bind(self) -> None:
        self._bind_at = self._monotonic() + BIND_AGAIN_SECONDS
        listener = None
        try:
            listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            listener.bind((HOST, self._port))
        except OSError as error:
            self.problem = f"UDP {HOST}:{self._port}: {error.strerror or error}"
            if listener is not None:
                listener.close()
            return
        self._socket, self.problem = listener, None
