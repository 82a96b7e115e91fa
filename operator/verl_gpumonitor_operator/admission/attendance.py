# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a controller is there, by its Lease. Pure: what was read and when in, why injection rests out.

Only a running controller frees a pod that its sidecar holds. Without one nothing may be injected, since the job of a
sidecar that cannot start would wait until the controller is back.

The clock is the reader's own and monotonic, and says when the Lease was *seen* to change. What is written in it is
compared with what was written before, never with a clock, so that it does not matter whose clock is wrong.
"""

from typing import Final

import msgspec

from .objects import LeaseObject

GRACE_SECONDS: Final = 60.0
"""Least time without a renewal after which the controller counts as away: a restart with a new image is no absence."""
GRACE_LEASES: Final = 4.0
"""The same in durations of the Lease; the longer of both counts."""


def grace_seconds(lease_seconds: float) -> float:
    """Return how long the last renewal counts. 15 s: 60 s; 30 s: 120 s."""
    return max(GRACE_SECONDS, GRACE_LEASES * lease_seconds)


class Attendance(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the controller's Lease."""

    exists: bool | None = None
    """None: it was never read."""
    renew_time: str | None = None
    """As its holder wrote it last."""
    since: float = 0.0
    """When `renew_time` was first seen to be just so, or when it was read for the first time."""
    is_readable: bool = True
    """Whether the last attempt to read it had an answer."""

    def read(self, lease: LeaseObject | None, now: float) -> "Attendance":
        """Return what is known after an answer; None: there is no such Lease."""
        if lease is None:
            return Attendance(exists=False, since=now)
        renew_time = lease.spec.renew_time
        renewed = not self.exists or renew_time != self.renew_time
        return Attendance(exists=True, renew_time=renew_time, since=now if renewed else self.since)

    def unread(self) -> "Attendance":
        """Return what is known after an attempt without an answer: what was, which ages."""
        return msgspec.structs.replace(self, is_readable=False)

    def pause(self, *, namespace: str, name: str, grace: float, now: float) -> str | None:
        """Return why nothing is to be injected, and what to look at; None where a controller is there.

        `namespace`, `name`: of the Lease, and of the controller's Deployment, which are the same.
        """
        if self.exists is None:
            return f"Lease {namespace}/{name} could not be read yet: look at the webhook's log"
        if not self.exists:
            why = f"there is no Lease {namespace}/{name}"
        elif now - self.since <= grace:
            return None
        elif not self.is_readable:
            return f"Lease {namespace}/{name} could not be read for {grace:g} s: look at the webhook's log"
        else:
            why = f"Lease {namespace}/{name} was not renewed for {grace:g} s"
        return f"{why}, so no controller would free a held pod: look at Deployment {namespace}/{name}"
