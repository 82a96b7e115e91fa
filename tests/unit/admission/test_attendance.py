# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a controller is there: readings of its Lease at virtual times, and what follows from them."""

import json
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor_operator.admission.attendance import Attendance, grace_seconds
from verl_gpumonitor_operator.admission.objects import LeaseObject, LeaseSpec

GRACE = 60.0
THERE, AWAY = None, "Lease ns/c was not renewed for 60 s"
MISSING, UNREADABLE = "there is no Lease ns/c", "Lease ns/c could not be read for 60 s"
NEVER = "Lease ns/c could not be read yet"


class Reading(NamedTuple):
    """What came of one attempt at `t` seconds: a `renewTime`, "absent", or "failed"."""

    t: float
    result: str | None


def after(*readings: Reading) -> Attendance:
    known = Attendance()
    for before, reading in pairwise([Reading(float("-inf"), None), *readings]):
        assert before.t <= reading.t, "time never runs back"
        if reading.result == "failed":
            known = known.unread()
        else:
            lease = None if reading.result == "absent" else LeaseObject(spec=LeaseSpec(renew_time=reading.result))
            known = known.read(lease, reading.t)
    return known


def pause(known: Attendance, now: float) -> str | None:
    return known.pause(namespace="ns", name="c", grace=GRACE, now=now)


@pytest.mark.parametrize(
    ("readings", "now", "expected"),
    [
        pytest.param([], 100, NEVER, id="nothing was read"),
        pytest.param([(0, "failed")], 100, NEVER, id="nothing could be read"),
        pytest.param([(0, "absent")], 0, MISSING, id="never a controller"),
        pytest.param([(0, "absent"), (2, "a")], 2, THERE, id="the first controller takes it"),
        pytest.param([(0, "a")], 60, THERE, id="one that is found counts as fresh for a grace"),
        pytest.param([(0, "a"), (58, "a"), (60, "a")], 60.1, AWAY, id="and no longer"),
        pytest.param([(0, None), (60, None)], 60.1, AWAY, id="nor does one that nobody ever renewed"),
        pytest.param([(0, "a"), (50, "b"), (60, "b")], 110, THERE, id="the grace begins with the last renewal"),
        pytest.param([(0, "a"), (50, "b"), (110, "b")], 110.1, AWAY, id="seen to be the last"),
        pytest.param([(0, "a"), (70, "a"), (72, "b")], 72, THERE, id="the controller is back"),
        pytest.param([(0, "2026-01-02"), (50, "2026-01-01")], 110, THERE, id="a renewal by a clock that is behind"),
        pytest.param([(0, "2999-01-01"), (60, "2999-01-01")], 60.1, AWAY, id="a renewal by a clock that is ahead"),
        pytest.param([(0, "a"), (2, "failed")], 60, THERE, id="unreadable: as it was"),
        pytest.param([(0, "a"), (2, "failed"), (60, "failed")], 60.1, UNREADABLE, id="unreadable: up to the grace"),
        pytest.param([(0, "a"), (2, "failed"), (61, "a")], 61, AWAY, id="readable again, and nobody renewed it"),
        pytest.param([(0, "a"), (2, "failed"), (90, "b")], 90, THERE, id="readable again, and it was renewed"),
        pytest.param([(0, "absent"), (2, "failed")], 2, MISSING, id="unreadable after it was not there"),
        pytest.param([(0, "a"), (2, "absent")], 2, MISSING, id="somebody deleted it"),
        pytest.param([(0, "a"), (2, "absent"), (70, "a")], 70, THERE, id="deleted and made again"),
    ],
)
def test_who_is_there(readings: list[tuple[float, str | None]], now: float, expected: str | None) -> None:
    said = pause(after(*(Reading(*reading) for reading in readings)), now)
    assert said is None if expected is None else (said or "").startswith(expected)


@pytest.mark.parametrize("readings", [[], [(0, "absent")], [(0, "a")], [(0, "a"), (1, "failed")]])
def test_each_sentence_says_what_to_look_at(readings: list[tuple[float, str]]) -> None:
    said = pause(after(*(Reading(*reading) for reading in readings)), 1000)
    assert said is not None
    assert "look at Deployment ns/c" in said or "look at the webhook's log" in said


@given(
    st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["a", "b", "failed", "absent"])), max_size=30),
    st.floats(0, 200),
)
def test_injection_needs_a_change_seen_within_the_grace(steps: list[tuple[float, str]], wait: float) -> None:
    """Whatever came before: where pods are injected, a `renewTime` was new to us at most a grace ago."""
    t, held, changed, readings = 0.0, "", float("-inf"), []
    for seconds, result in steps:
        t += seconds
        readings.append(Reading(t, result))
        if result != "failed":
            changed = t if result not in (held, "absent") else changed
            held = result
    if pause(after(*readings), t + wait) is None:
        assert held in ("a", "b")
        assert t + wait - changed <= GRACE


@pytest.mark.parametrize(("lease_seconds", "grace"), [(5, 60), (15, 60), (16, 64), (30, 120), (300, 1200)])
def test_the_grace_follows_long_leases(lease_seconds: float, grace: float) -> None:
    assert grace_seconds(lease_seconds) == grace


def test_a_lease_as_the_api_server_has_it() -> None:
    document = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "gpumonitor-controller", "resourceVersion": "77"},
        "spec": {
            "holderIdentity": "gpumonitor-controller-5d9c",
            "leaseDurationSeconds": 15,
            "acquireTime": "2026-01-01T00:00:00.000000Z",
            "renewTime": "2026-01-01T00:01:00.000000Z",
            "leaseTransitions": 1,
        },
    }
    lease = msgspec.json.decode(json.dumps(document), type=LeaseObject)
    assert lease.spec.renew_time == "2026-01-01T00:01:00.000000Z"
