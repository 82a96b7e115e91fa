# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Sends the reports: a thread that waits until one is due, makes it from the newest state, and sends it.

No queue: counters are cumulative, so the newest report says all that an undelivered older one did. What could not be
delivered is counted and let go, and memory stays flat however long the controller is away.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from verl_gpumonitor.model.report import Report, ReportAnswer, ReportError, decode_answer, encode

from . import pace as pacing
from .channel import ChannelError, Response
from .exports import ReportCounts
from .journal import Journal

_SETTLED: Final = frozenset({400, 403, 413})
"""Refused for good: the same report will not be taken at another time."""
_ACCEPTED_BEFORE: Final = 409
_COUNTED_APART: Final = frozenset({200, 400, 401, 403, 404, 408, 409, 413, 429, 500, 502, 503, 504})
_MAX_TOKEN_BYTES: Final = 16 * 1024


class Sending(Protocol):
    """What the reporter needs of `channel.Channel`."""

    def trust(self, ca_pem: str) -> None:
        """Trust these CA certificates from now on. Raises ChannelError."""

    def post(self, body: bytes, *, token: str) -> Response:
        """Send, and return the answer. Raises ChannelError."""


class TokenError(Exception):
    """There is no token to report with; the text says why."""


def read_token(path: str) -> str:
    """Read the projected token. It is read for each report: kubelet renews it, and an old one is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            token = os.read(descriptor, _MAX_TOKEN_BYTES).decode("ascii").strip()
        finally:
            os.close(descriptor)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenError(f"the token cannot be read: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise TokenError("the token file holds no token")
    return token


class Reporter:
    """The reports of one start of the sidecar."""

    def __init__(
        self,
        sending: Sending,
        *,
        make: Callable[[int, int, bool], Report | None],
        answered: Callable[[ReportAnswer], None],
        token: Callable[[], str],
        ca_pem: str,
        interval_seconds: float,
        chance: pacing.Chance,
        told_time: Callable[[float, float, float], None] = lambda _second, _first, _last: None,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Start nothing yet.

        `make(sequence, dropped, final)` returns the report of this moment, None while there is nothing to say.
        `answered` is called with each answer, in the reporter's thread; before it `told_time`, with the second that
        the controller's clock showed, and the two moments of ours between which that was.
        """
        self._sending = sending
        self._make = make
        self._answered = answered
        self._token = token
        self._first_ca_pem = ca_pem
        self._later_ca_pem: str | None = None
        self._chance = chance
        self._told_time = told_time
        self._journal = journal
        self._clock = clock
        self._unix_clock = unix_clock
        self._wake = threading.Condition()
        self._pace = pacing.begin(interval_seconds, now=clock(), chance=chance)
        self._hurried = False
        """Whether something that must not wait came after the report that is under way was made."""
        self._sequence = 0
        self._dropped = 0
        self._by_code: dict[str, int] = {}
        self._last_success_unix: float | None = None
        self._ending = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Report in a daemon thread until `flush`."""
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def counts(self) -> ReportCounts:
        """Return how the reports fared so far; from any thread."""
        return ReportCounts(
            enabled=True,
            by_code=dict(self._by_code),
            dropped=self._dropped,
            last_success_unix=self._last_success_unix,
        )

    @property
    def due_at(self) -> float:
        """When the next attempt is due."""
        return self._pace.due_at

    def hurry(self) -> None:
        """Report soon, because something happened that must not wait; from any thread."""
        with self._wake:
            self._hurried = True
            before = self._pace
            self._pace = pacing.urgent(before, now=self._clock())
            if self._pace is not before:
                self._wake.notify()

    def flush(self, wait_seconds: float) -> bool:
        """Send the final report and end. Return whether that was done within the time; a hung one is left behind."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        return self._ended.wait(wait_seconds)

    def _run(self) -> None:
        self._trust(None)
        final = False
        while not final:
            self._wait()
            final = self._ending
            try:
                self.turn(final=final)
            except Exception as error:  # noqa: BLE001 - this thread is the only one that reports
                self._fail("fault", repr(error))
        self._ended.set()

    def _wait(self) -> None:
        with self._wake:
            while not self._ending and (left := self._pace.due_at - self._clock()) > 0:
                self._wake.wait(left)

    def turn(self, *, final: bool = False) -> None:
        """Make one attempt, and schedule the next."""
        with self._wake:
            self._hurried = False
        report = self._make(self._sequence + 1, self._dropped, final)
        if report is None:
            self._schedule(pacing.nothing_yet(self._pace, now=self._clock()))
            return
        self._sequence = report.sequence
        asked_at = self._unix_clock()
        try:
            response = self._sending.post(encode(report), token=self._token())
        except TokenError as error:
            self._fail("token", str(error))
        except ChannelError as error:
            self._fail(error.code, str(error))
        else:
            if response.date_unix is not None:
                self._told_time(response.date_unix, asked_at, self._unix_clock())
            self._judge(response)

    def _judge(self, response: Response) -> None:
        status = response.status
        if status == 200:
            self._accept(response.body)
        elif status == _ACCEPTED_BEFORE:
            self._count(status)
            self._settle()
        elif status in _SETTLED:
            self._dropped += 1
            self._count(status)
            self._journal.state("reports", "report refused", status=status, error=_sentence(response.body))
            self._settle()
        else:
            self._fail(_code(status), _sentence(response.body), retry_after_seconds=response.retry_after_seconds)

    def _accept(self, body: bytes) -> None:
        try:
            answer = decode_answer(body)
        except ReportError as error:
            self._fail("answer", str(error))
            return
        self._count(200)
        self._last_success_unix = self._unix_clock()
        self._journal.state("reports", "reports are accepted")
        if answer.ca_pem is not None and answer.ca_pem != self._later_ca_pem:
            self._trust(answer.ca_pem)
        self._settle(answer.interval_seconds)
        self._answered(answer)

    def _trust(self, later_ca_pem: str | None) -> None:
        """Trust the certificates of the start, and those that came later beside them."""
        self._later_ca_pem = later_ca_pem
        try:
            self._sending.trust("\n".join(pem for pem in (self._first_ca_pem, later_ca_pem) if pem))
        except ChannelError as error:
            self._journal.state("trust", "CA certificates are not usable", error=str(error))
        else:
            self._journal.state("trust", "CA certificates loaded", renewed=later_ca_pem is not None)

    def _fail(self, code: str, error: str, *, retry_after_seconds: float | None = None) -> None:
        self._dropped += 1
        self._count(code)
        self._journal.state("reports", "reports do not arrive", code=code, error=error)
        with self._wake:
            self._pace = pacing.failed(
                self._pace, now=self._clock(), chance=self._chance, retry_after_seconds=retry_after_seconds
            )

    def _settle(self, interval_seconds: float | None = None) -> None:
        self._schedule(
            pacing.answered(self._pace, now=self._clock(), chance=self._chance, interval_seconds=interval_seconds)
        )

    def _schedule(self, pace: pacing.Pace) -> None:
        with self._wake:
            self._pace = pacing.urgent(pace, now=self._clock()) if self._hurried else pace

    def _count(self, code: int | str) -> None:
        name = _code(code) if isinstance(code, int) else code
        self._by_code = {**self._by_code, name: self._by_code.get(name, 0) + 1}


def _code(status: int) -> str:
    """Name a status for counting: the usual ones each, the others by class, so that their number is bounded."""
    return str(status) if status in _COUNTED_APART else f"{min(status // 100, 9)}xx"


def _sentence(body: bytes) -> str:
    return body[:256].decode("utf-8", "replace").strip()
