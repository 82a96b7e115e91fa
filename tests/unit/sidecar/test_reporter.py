# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The reporter with a virtual clock and a controller of a few lines."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from verl_gpumonitor.model.report import REPORT_FORMAT, PodRef, Report, ReportAnswer, decode_report, encode
from verl_gpumonitor_sidecar.channel import ChannelError, ChannelTimeoutError, ChannelTlsError, Response, parse_head
from verl_gpumonitor_sidecar.journal import Journal
from verl_gpumonitor_sidecar.reporter import Reporter, TokenError, read_token


class World:
    """Time, the controller's answers, and what reached it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dropped_said = 0
        self.reports: list[Report] = []
        self.trusted: list[str] = []
        self.answers: list[ReportAnswer] = []
        self.said: list[dict[str, object]] = []
        self.times: list[tuple[float, float, float]] = []
        self.respond: Callable[[Report], Response] = accepted
        self.have_something = True
        self.token: Callable[[], str] = lambda: "token"
        self.reporter = Reporter(
            self,
            make=self.make,
            answered=self.answers.append,
            token=lambda: self.token(),
            ca_pem="first",
            interval_seconds=15.0,
            chance=lambda: 0.5,
            told_time=lambda *times: self.times.append(times),
            journal=Journal(lambda line: self.said.append(json.loads(line))),
            clock=lambda: self.now,
            unix_clock=lambda: 1e9 + self.now,
        )

    def make(self, sequence: int, dropped: int, final: bool) -> Report | None:
        self.dropped_said = dropped
        if not self.have_something:
            return None
        return Report(
            format=REPORT_FORMAT,
            pod=PodRef(namespace="n", name="p", uid="u"),
            start_id="12345678",
            sequence=sequence,
            sent_at=0,
            started_at=0,
            final=final,
        )

    def trust(self, ca_pem: str) -> None:
        if "broken" in ca_pem:
            raise ChannelTlsError("no certificate")
        self.trusted.append(ca_pem)

    def post(self, body: bytes, *, token: str) -> Response:
        assert token == "token"
        report = decode_report(body)
        self.reports.append(report)
        return self.respond(report)

    def wait_seconds(self) -> float:
        """Time until the next report is due."""
        return self.reporter.due_at - self.now

    def codes(self) -> dict[str, int]:
        return dict(self.reporter.counts().by_code)


def accepted(report: Report) -> Response:
    return Response(status=200, body=encode(ReportAnswer(accepted=report.sequence)))


def status(number: int, retry_after_seconds: float | None = None) -> Callable[[Report], Response]:
    return lambda _: Response(status=number, body=b'{"error": "no"}', retry_after_seconds=retry_after_seconds)


def fails(error: ChannelError) -> Callable[[Report], Response]:
    def respond(_: Report) -> Response:
        raise error

    return respond


def test_accepted_reports_come_at_the_interval() -> None:
    world = World()
    for _ in range(3):
        world.reporter.turn()
        assert world.wait_seconds() == 15.0
        world.now += 15.0
    assert [report.sequence for report in world.reports] == [1, 2, 3]
    counts = world.reporter.counts()
    assert (counts.by_code, counts.dropped, counts.last_success_unix) == ({"200": 3}, 0, 1e9 + 130)
    assert len([line for line in world.said if line["message"] == "reports are accepted"]) == 1


@pytest.mark.parametrize(
    ("respond", "code", "wait_seconds", "dropped"),
    [
        pytest.param(status(409), "409", 15.0, 0, id="a replay was delivered before"),
        pytest.param(status(400), "400", 15.0, 1, id="broken: dropped, and on"),
        pytest.param(status(403), "403", 15.0, 1, id="not ours: dropped, and on"),
        pytest.param(status(413), "413", 15.0, 1, id="too large: dropped, and on"),
        pytest.param(status(401), "401", 0.5, 1, id="the token is refused: soon again, with a fresh one"),
        pytest.param(status(429, 30.0), "429", 30.5, 1, id="too many: when it says"),
        pytest.param(status(503, 5.0), "503", 5.5, 1, id="not leading: when it says"),
        pytest.param(status(503), "503", 0.5, 1, id="not leading, without a time"),
        pytest.param(status(599), "5xx", 0.5, 1, id="an odd status counts with its class"),
        pytest.param(status(301), "3xx", 0.5, 1, id="a redirection is not followed"),
        pytest.param(lambda _: Response(status=200, body=b"<html>"), "answer", 0.5, 1, id="somebody else answers"),
        pytest.param(fails(ChannelTimeoutError("late")), "timeout", 0.5, 1, id="no answer in time"),
        pytest.param(fails(ChannelTlsError("name")), "tls", 0.5, 1, id="a foreign certificate"),
        pytest.param(fails(ChannelError("refused")), "error", 0.5, 1, id="nobody there"),
    ],
)
def test_each_outcome(respond: Callable[[Report], Response], code: str, wait_seconds: float, dropped: int) -> None:
    world = World()
    world.respond = respond
    world.reporter.turn()
    assert world.codes() == {code: 1}
    assert world.wait_seconds() == pytest.approx(wait_seconds)
    assert world.reporter.counts().dropped == dropped


def test_a_controller_that_is_away_for_long_costs_no_memory_and_no_counter() -> None:
    world = World()
    world.respond = fails(ChannelError("refused"))
    for _ in range(200):
        world.reporter.turn()
        world.now += world.wait_seconds()
    assert world.now - 100 > 190 * 30 * 0.9, "it backs off to half a minute on average"
    world.respond = accepted
    world.reporter.turn()
    assert world.reports[-1].sequence == 201
    assert world.dropped_said == world.reporter.counts().dropped == 200
    assert world.wait_seconds() == 15.0
    assert len([line for line in world.said if line["message"] == "reports do not arrive"]) == 1


def test_without_a_token_nothing_is_sent() -> None:
    world = World()

    def none() -> str:
        raise TokenError("the token cannot be read")

    world.token = none
    world.reporter.turn()
    assert world.reports == []
    assert world.codes() == {"token": 1}


def test_while_there_is_nothing_to_say_nothing_is_sent() -> None:
    world = World()
    world.have_something = False
    world.reporter.turn()
    assert (world.reports, world.codes(), world.wait_seconds()) == ([], {}, 1.0)


def test_an_answer_may_change_the_interval_and_name_gpus() -> None:
    world = World()
    answer = ReportAnswer(accepted=1, interval_seconds=60.0, gpu_uuids=["GPU-a"])
    world.respond = lambda _: Response(status=200, body=encode(answer))
    world.reporter.turn()
    assert world.wait_seconds() == 60.0
    assert world.answers == [answer]


def test_a_later_ca_is_trusted_beside_the_first() -> None:
    world = World()
    for pem in ("second", "second", "third"):
        world.respond = lambda _, pem=pem: Response(  # type: ignore[misc]
            status=200, body=encode(ReportAnswer(accepted=1, ca_pem=pem))
        )
        world.reporter.turn()
    assert world.trusted == ["first\nsecond", "first\nthird"]


def test_a_broken_later_ca_is_said_and_costs_nothing() -> None:
    world = World()
    world.respond = lambda _: Response(status=200, body=encode(ReportAnswer(accepted=1, ca_pem="broken")))
    world.reporter.turn()
    assert world.codes() == {"200": 1}
    assert any(line["message"] == "CA certificates are not usable" for line in world.said)


def test_hurry_brings_the_next_report_forward_but_ends_no_back_off() -> None:
    world = World()
    world.reporter.turn()
    world.now += 1.0
    world.reporter.hurry()
    assert world.wait_seconds() == 4.0
    world.respond = status(503, 30.0)
    world.reporter.turn()
    world.reporter.hurry()
    assert world.wait_seconds() == 30.5


def test_what_happens_while_a_report_is_under_way_is_reported_soon_after_it() -> None:
    world = World()

    def slowly(report: Report) -> Response:
        world.reporter.hurry()
        return accepted(report)

    world.respond = slowly
    world.reporter.turn()
    assert world.wait_seconds() == 5.0
    world.respond = accepted
    world.reporter.turn()
    assert world.wait_seconds() == 15.0


def test_flush_sends_a_final_report_from_the_reporters_thread() -> None:
    world = World()
    world.reporter.start()
    assert world.reporter.flush(5.0)
    assert world.reports[-1].final


def test_flush_does_not_wait_for_a_fault() -> None:
    world = World()
    world.respond = fails(ChannelError("refused"))
    world.reporter.start()
    assert world.reporter.flush(5.0)


@pytest.mark.parametrize(
    ("content", "token"),
    [
        pytest.param(b"abc.def\n", "abc.def", id="with a line end"),
        pytest.param(b"", None, id="empty"),
        pytest.param(b"a b", None, id="with a space"),
        pytest.param(b"a\r\nX-Header: b", None, id="that would add a header"),
        pytest.param(b"\xff\xfe", None, id="no text"),
    ],
)
def test_tokens(tmp_path: Path, content: bytes, token: str | None) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    if token is None:
        with pytest.raises(TokenError):
            read_token(str(file))
    else:
        assert read_token(str(file)) == token


def test_a_missing_token_file_names_the_reason() -> None:
    with pytest.raises(TokenError, match="No such file"):
        read_token("/nonexistent/token")


def test_heads_of_answers() -> None:
    assert parse_head(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nX: a:b") == (
        503,
        {"retry-after": "7", "x": "a:b"},
    )
    with pytest.raises(ChannelError):
        parse_head(b"SSH-2.0-OpenSSH")


def test_an_answer_tells_the_time_of_the_controllers_clock() -> None:
    world = World()

    def slowly(report: Report) -> Response:
        world.now += 0.25
        return msgspec.structs.replace(accepted(report), date_unix=1e9 + 130)

    world.respond = slowly
    world.reporter.turn()
    assert world.times == [(1e9 + 130, 1e9 + 100, 1e9 + 100.25)]
    world.respond = accepted
    world.reporter.turn()
    assert len(world.times) == 1, "one that does not say tells nothing"
