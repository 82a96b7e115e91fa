# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The training program's end of the marks: who this process is, and what it begins and ends.

By UDP over localhost, since a send neither waits nor fails for want of a listener: some microseconds a mark. Where no
sidecar is, the kernel throws it away.
"""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from verl_gpumonitor.model.marks import MAX_COUNT, MAX_MARK_GPUS, MAX_OPEN, STEP, Mark, MarkScope, MarkState, encode
from verl_gpumonitor.model.wiring import MARKS_PORT

ENV_MARKS_PORT: Final = "GPUMONITOR_MARKS_PORT"
"""Port to which a program sends, for tests; the sidecar listens on its own alone."""
HOST: Final = "127.0.0.1"
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


def plain_word(value: object) -> str:
    """Return the name of a stage or role, of whatever type, as text that can be printed, in a line and by the sidecar.

    None is empty. Never raises.
    """
    if isinstance(value, str):
        text = str.__str__(value)  # an enum's word, not the name that Python shows of it
    else:
        try:
            text = "" if value is None else value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        except Exception:  # noqa: BLE001 - a __str__ of the program's own
            text = type(value).__name__
    return text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text.strip())


def plain_step(value: object) -> int | None:
    """Return a step's number, NumPy's or a tensor's too, as an int from 0; None where it is none. Never raises."""
    try:
        number = int(value)  # type: ignore[call-overload]  # whatever converts itself
        return number if 0 <= number <= MAX_COUNT and bool(number == value) else None
    except Exception:  # noqa: BLE001 - None, a word, NaN, a tensor of many
        return None


class _Self:
    """What a sender is in one process: its identity, its open spans, its socket."""

    __slots__ = ("base", "numbers", "open", "socket")

    def __init__(self, base: Mark, port: int) -> None:
        self.base = base
        self.numbers = itertools.count(1)
        self.open: dict[int, tuple[str, str, float, int | None]] = {}
        """Span -> stage, role, begin, step."""
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.socket.connect((HOST, port))

    def __del__(self) -> None:
        # Python would warn of a socket that was not closed, in a program that never heard of it.
        with suppress(Exception):
            self.socket.close()

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
            stage, role, step = plain_word(stage), plain_word(role), plain_step(step)
            this = self._this_process()
            if len(this.open) >= MAX_OPEN:
                return 0
            span, now = next(this.numbers), self._clock()
            this.open[span] = (stage, role, now, step)
            with suppress(OSError):  # the end repeats it; a span that nobody ends would be open for ever
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
            mark = _mark(this, MarkState.POINT, plain_word(label), self._clock(), step=plain_step(step))
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
