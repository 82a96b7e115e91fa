# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One holder at a time, told by our own clock alone."""

import pytest

from verl_gpumonitor_operator.controller.lease import Claim, Observation, decide


@pytest.mark.parametrize(
    ("holder", "age", "claim"),
    [
        pytest.param("me", 0.0, Claim.RENEW, id="it is ours"),
        pytest.param("me", 1000.0, Claim.RENEW, id="it is ours, from before a restart of this container"),
        pytest.param("", 0.0, Claim.TAKE, id="it was given back"),
        pytest.param("other", 0.0, Claim.WAIT, id="somebody holds it"),
        pytest.param("other", 15.0, Claim.WAIT, id="somebody holds it to the last moment"),
        pytest.param("other", 15.1, Claim.TAKE, id="its holder has not renewed it for its duration"),
    ],
)
def test_decide(holder: str, age: float, claim: Claim) -> None:
    seen = Observation(holder=holder, version="1", since=100.0)
    assert decide(seen, identity="me", now=100.0 + age, duration_seconds=15.0) is claim
