# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What ends a command that goes on until it is told to end, and what does not."""

import signal
from collections.abc import Iterator

import pytest

from verl_gpumonitor.cli.signals import leaving_on_signals, stopped_by_signals

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the test run, given back after each test."""
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ALL)
def test_each_of_them_stops_it_and_the_handlers_of_before_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in ALL]
    with stopped_by_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
    assert [signal.getsignal(one) for one in ALL] == before


def test_under_nohup_it_goes_on_when_the_terminal_is_closed() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stopped_by_signals() as stop, leaving_on_signals():
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_live_view_is_left_as_by_ctrl_c(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), leaving_on_signals():
        signal.raise_signal(number)


def test_a_live_view_keeps_what_is_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with leaving_on_signals():
        signal.raise_signal(signal.SIGTERM)
