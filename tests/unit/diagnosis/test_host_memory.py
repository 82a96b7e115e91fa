# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory: what counts as in use where processes are listed, and where they are not."""

from collections.abc import Callable

import pytest

from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.model.findings import Finding
from verl_gpumonitor.model.trace import TRACE_FORMAT, Header, HostLine, HostProcess, StepLine, TracePod

GIB = 2**30
LIMIT = 64 * GIB


def _found(used: Callable[[float], float], listed: Callable[[float], float] | None, *, gpus: int = 0) -> list[Finding]:
    """Return what is found of a pod in an hour, by what it has in use and by what of it is listed, shares of 64 GiB."""
    diagnosis = Diagnosis(Header(format=TRACE_FORMAT, pods=[TracePod(name="w", gpus_requested=gpus)]))
    for n in range(360):
        t = 10.0 * n
        size = int((0.0 if listed is None else listed(t)) * LIMIT)
        processes = [HostProcess(pid=1, title="ray::TaskRunnerV1.run", rss_bytes=size)] if n % 6 == 0 and size else None
        diagnosis.feed(
            HostLine(
                t=t,
                pod="w",
                memory_used_bytes=int(used(t) * LIMIT),
                memory_limit_bytes=LIMIT,
                shm_used_bytes=GIB // 2,
                processes=processes,
            )
        )
        if n % 20 == 19:
            diagnosis.feed(StepLine(t=t + 1, step=n // 20))
    return [tracked.finding for tracked in diagnosis.findings if tracked.finding.reason == "HostMemoryRisk"]


def _rises(t: float) -> float:
    return 0.1 if t <= 60 else 0.3 + 0.68 * t / 3600


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        pytest.param(None, True, id="no process is listed"),
        pytest.param(lambda t: 0.85 * _rises(t), True, id="the processes that are listed rise with it"),
        pytest.param(lambda t: _rises(t) - 0.26, True, id="much is never listed, and what is rises"),
        pytest.param(lambda _: 0.05, True, id="hardly anything is ever listed"),
        pytest.param(
            lambda t: _rises(t) - (0.3 if t > 60 else 0.0), True, id="at the begin the driver is all there is"
        ),
        pytest.param(lambda _: 0.27, False, id="all was listed once, and what rises is cache"),
    ],
)
def test_cache_is_what_was_all_listed_and_is_not_any_more(listed: Callable[[float], float] | None, found: bool) -> None:
    assert bool(_found(_rises, listed)) is found


def test_it_is_told_whether_the_pod_has_gpus() -> None:
    assert [f.evidence["gpus_requested"] for f in _found(_rises, None, gpus=8)] == [8]


def _steps(rise: float) -> Callable[[float], float]:
    """Return what a pod uses that offloads for a part of each step of 200 s, and more of it from step to step."""

    def used(t: float) -> float:
        return (0.75 if t % 200 < 50 else 0.55) + rise * (t // 200)

    return used


@pytest.mark.parametrize(
    ("rise", "found"),
    [
        pytest.param(0.0115, True, id="the highest values of steps rise to meet the limit"),
        pytest.param(0.0, False, id="it goes up and down"),
        pytest.param(0.004, False, id="they rise and stay far from it"),
    ],
)
def test_what_goes_up_and_down_in_each_step_is_judged_by_whole_steps(rise: float, found: bool) -> None:
    cases = _found(_steps(rise), None)
    assert bool(cases) is found
    assert all("uses up to 6" in case.message for case in cases)


@pytest.mark.parametrize(
    ("later", "until"),
    [
        pytest.param(LIMIT * 97 // 100, 900, id="it comes again, and nothing is better"),
        pytest.param(LIMIT // 2, 560, id="it comes again, and there is room: a minute later it is over"),
        pytest.param(None, 590, id="it does not come: nothing is said after five minutes"),
    ],
)
def test_what_is_not_known_any_more_is_not_over_at_once(later: int | None, until: int) -> None:
    diagnosis = Diagnosis(Header(format=TRACE_FORMAT, pods=[TracePod(name="w")]))
    still_open = []
    for t in range(0, 900, 10):
        used = LIMIT * 97 // 100 if t < 300 else None if t < 500 else later
        diagnosis.feed(
            HostLine(t=float(t), pod="w", memory_used_bytes=used, memory_limit_bytes=LIMIT, shm_used_bytes=0)
        )
        still_open.append(bool(diagnosis.open))
    opened = still_open.index(True)
    assert still_open[opened:] == [t < until for t in range(10 * opened, 900, 10)]
