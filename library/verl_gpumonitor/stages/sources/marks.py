# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Both ends of the marks: the sender in the training program, the receiver in the sidecar of the same pod.

By UDP over localhost, since a send neither waits nor fails for want of a listener: about 6 us a mark. Where no sidecar
is, the kernel throws it away.

A driver's mark holds for the whole job, and reaches one sidecar: that of the pod in which the driver runs. This one
passes it on as its `ClusterStages` with source `marks` and the node `*`, by the way on which a head's intervals go; so
the other pods hear of it with their next answer, well within the watermark of the timeline. A rank's mark is its own
pod's, and goes nowhere.
"""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from verl_gpumonitor.model.marks import (
    EVERY_NODE,
    MAX_MARK_BYTES,
    MAX_MARK_GPUS,
    MAX_OPEN,
    STEP,
    Mark,
    MarkScope,
    MarkState,
    decode,
    encode,
)
from verl_gpumonitor.model.samples import HostSample
from verl_gpumonitor.model.stages import StageSource, StageWord
from verl_gpumonitor.model.wiring import MARKS_PORT

from .mark_book import MarkBook, StepSpan

__all__ = ["ENV_MARKS_PORT", "EVERY_NODE", "STEP", "MarkReceiver", "MarkScope", "MarkSender", "StepSpan"]

ENV_MARKS_PORT: Final = "GPUMONITOR_MARKS_PORT"
"""Port to which a program sends, for tests; the sidecar listens on its own alone."""
MAX_TAKEN: Final = 512
"""Datagrams taken at one look. More than the kernel keeps for us, and a bound against a flood."""
BIND_AGAIN_SECONDS: Final = 30.0
_BUFFER_BYTES: Final = 1 << 18
_HOST: Final = "127.0.0.1"
_UUID_LENGTH: Final = 40


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of the job a process is, as its environment tells."""

    scope: MarkScope = MarkScope.DRIVER
    rank: int | None = None
    local_rank: int | None = None
    gpus: tuple[str, ...] = ()


def whereabouts(environ: Mapping[str, str]) -> Whereabouts:
    """Read the rank and the GPUs of a process from its environment: torchrun's, or that of a verl worker under Ray.

    Without a rank the process is the driver. GPUs are told where the runtime names them by UUID.
    """
    rank = _number(environ, "RANK")
    if environ.get("WG_BACKEND") == "ray":
        # verl sets LOCAL_RANK to 0 wherever Ray shows the process one GPU alone; the bundle is what counts.
        size = _number(environ, "RAY_LOCAL_WORLD_SIZE")
        local_rank = rank % size if rank is not None and size else None
    else:
        local_rank = _number(environ, "LOCAL_RANK")
    return Whereabouts(
        scope=MarkScope.DRIVER if rank is None else MarkScope.RANK,
        rank=rank,
        local_rank=local_rank,
        gpus=_named_gpus(environ),
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    raw = environ.get(name, "")
    return int(raw) if raw.isascii() and raw.isdigit() and len(raw) < 7 else None


def _named_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    uuids = [uuid.strip() for uuid in named if uuid.strip().startswith(("GPU-", "MIG-"))]
    return tuple(uuid for uuid in uuids if len(uuid) == _UUID_LENGTH)[:MAX_MARK_GPUS]


class _Self:
    """What a sender is in one process: its identity, its open spans, its socket."""

    __slots__ = ("base", "numbers", "open", "socket")

    def __init__(self, base: Mark, port: int) -> None:
        self.base = base
        self.numbers = itertools.count(1)
        self.open: dict[int, tuple[str, str, float, int | None]] = {}
        """Span -> stage, role, begin, step."""
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.socket.connect((_HOST, port))

    def send(self, mark: Mark) -> None:
        """Send one mark. Raises OSError."""
        datagram = encode(mark)
        if datagram is None:
            return
        try:
            self.socket.send(datagram)
        except ConnectionRefusedError:
            # That is the answer to the datagram before; this one was not sent. Nobody listened then, maybe now.
            self.socket.send(datagram)


class MarkSender:
    """Marks what a program does. Runs inside the training process: nothing here raises, waits or starts a thread.

    May be used by several threads, without a lock, since a fork may leave one locked; and after a fork, where the
    child is a process of its own.
    """

    def __init__(
        self,
        *,
        scope: MarkScope | None = None,
        job: str = "",
        port: int | None = None,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Touch nothing yet. `scope`: by default what the environment tells, see `whereabouts`."""
        self._scope = scope
        self._job = job
        self._environ = os.environ if environ is None else environ
        self._port = port
        self._clock = clock
        self._selves: dict[int, _Self] = {}
        """By pid: the parent's stays behind in a forked child."""

    def begin(self, stage: str, *, role: str = "", step: int | None = None) -> int:
        """Mark that a stage begins. Return what `end` wants; 0 where nothing was marked."""
        try:
            this = self._this_process()
            if len(this.open) >= MAX_OPEN:
                return 0
            span, now = next(this.numbers), self._clock()
            this.open[span] = (stage, role, now, step)
            this.send(_mark(this, MarkState.BEGIN, stage, now, span=span, role=role, step=step))
        except Exception:  # noqa: BLE001 - whatever is wrong here, the training goes on
            return 0
        return span

    def end(self, span: int) -> None:
        """Mark that the stage ends that `begin` returned this for. Unknown ones are passed over."""
        try:
            this = self._this_process()
            known = this.open.pop(span, None)
            if known is not None:
                stage, role, begin, step = known
                now = max(begin, self._clock())
                this.send(_mark(this, MarkState.END, stage, now, span=span, begin=begin, role=role, step=step))
        except Exception:  # noqa: BLE001, S110 - as above
            pass

    def point(
        self,
        label: str,
        *,
        step: int | None = None,
        memory_used_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """Mark a moment. With the label `step`, and its number: a step ended. Memory: of the process's container."""
        try:
            this = self._this_process()
            mark = _mark(this, MarkState.POINT, label, self._clock(), step=step)
            if memory_used_bytes is not None:
                mark = msgspec.structs.replace(
                    mark, memory_used_bytes=memory_used_bytes, memory_limit_bytes=memory_limit_bytes
                )
            this.send(mark)
        except Exception:  # noqa: BLE001, S110 - as above
            pass

    @contextmanager
    def stage(self, stage: str, *, role: str = "", step: int | None = None) -> Iterator[None]:
        """Mark begin and end of a block."""
        span = self.begin(stage, role=role, step=step)
        try:
            yield
        finally:
            self.end(span)

    def close(self) -> None:
        """Let the socket go. A later mark opens it again."""
        this = self._selves.pop(os.getpid(), None)
        if this is not None:
            this.socket.close()

    def _this_process(self) -> _Self:
        """Return who this process is; found out at its first mark, and after a fork. Raises OSError."""
        pid = os.getpid()
        this = self._selves.get(pid)
        if this is None:
            new = self._new(pid)
            # Of threads that come here at once, one wins: setdefault is one step for the interpreter.
            this = self._selves.setdefault(pid, new)
            if this is not new:
                new.socket.close()
        return this

    def _new(self, pid: int) -> _Self:
        where = whereabouts(self._environ)
        base = Mark(
            state=MarkState.POINT,
            stage=STEP,
            t=0.0,
            process=os.urandom(8).hex(),
            pid=pid,
            seq=0,
            scope=self._scope or where.scope,
            rank=where.rank,
            local_rank=where.local_rank,
            gpus=list(where.gpus),
            job=self._job[:128],
        )
        return _Self(base, self._port or _number(self._environ, ENV_MARKS_PORT) or MARKS_PORT)


def _mark(
    this: _Self,
    state: MarkState,
    stage: str,
    now: float,
    *,
    span: int = 0,
    begin: float | None = None,
    role: str = "",
    step: int | None = None,
) -> Mark:
    base = this.base
    return Mark(
        state=state,
        stage=stage[:64] or "other",
        t=now,
        process=base.process,
        pid=base.pid,
        # Drawn before the open spans are read: who has the higher number then knows all that the other knew.
        seq=next(this.numbers),
        span=span,
        begin=begin,
        open=list(this.open),
        scope=base.scope,
        role=role[:64],
        step=step,
        rank=base.rank,
        local_rank=base.local_rank,
        gpus=base.gpus,
        job=base.job,
    )


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
    ) -> None:
        """Bind the port on localhost, if it is free; else try again now and then. 0 takes a free one."""
        self._port = port
        self._clock = clock
        self._monotonic = monotonic
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
        for count in range(MAX_TAKEN):
            try:
                datagram = self._socket.recv(MAX_MARK_BYTES + 1)
            except OSError:  # nothing more is there
                return count
            mark = decode(datagram)
            if mark is None:
                self.foreign += 1
            else:
                self._book.observe(mark, now)
        return MAX_TAKEN

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
            listener.bind((_HOST, self._port))
        except OSError as error:
            self.problem = f"UDP {_HOST}:{self._port}: {error.strerror or error}"
            if listener is not None:
                listener.close()
            return
        self._socket, self.problem = listener, None
