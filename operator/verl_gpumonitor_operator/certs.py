# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates of the webhook and of the report server: made, renewed and rotated by ourselves.

Pure: no files, no clock, no network; what is not pure is that new keys are random. All of it lives in one Secret, so
that every replica serves the same leaf under the same CA. The Secret's writer (the controller that holds the Lease)
calls `plan` each minute, writes what it returns under the old resourceVersion, and sets `caBundle` of the webhook
configuration to `bundle(data)`. Everybody else only reads.

How a new CA comes without one refused handshake: first it only joins the bundle (`ca.crt`). Once the API server's
`caBundle` carries it, a waiting time begins, so that sidecars hear of it in the answers to their reports. After that
it signs the leaf and moves to the front; the CA before it stays in the bundle until no leaf of its can be alive.
A verifier whose bundle is not older than the waiting time thus always trusts the leaf that is served.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

CA_BUNDLE: Final = "ca.crt"
"""PEM bundle to trust: the CA that signs now first, then those trusted besides."""
CA_KEY: Final = "ca.key"
LEAF: Final = "tls.crt"
LEAF_KEY: Final = "tls.key"
NEXT_CA: Final = "next-ca.crt"
NEXT_CA_KEY: Final = "next-ca.key"
NEXT_CA_SINCE: Final = "next-ca.since"
"""Moment (RFC 3339) since which the API server's caBundle carries the next CA; absent until then."""
PREVIOUS_CA_UNTIL: Final = "previous-ca.until"
"""Moment (RFC 3339) until which the CA before is trusted; absent when there is none."""


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """Lives and waiting times."""

    ca_life: timedelta = timedelta(days=3650)
    leaf_life: timedelta = timedelta(days=30)
    renew_at: float = 2 / 3
    """Share of its life after which a certificate is replaced."""
    bundle_wait: timedelta = timedelta(days=7)
    """How old a bundle a verifier may hold and still trust the leaf that is served."""
    backdate: timedelta = timedelta(hours=1)
    """Certificates begin this much before `now`, for clocks that are behind."""


def server_names(release: str, namespace: str) -> tuple[str, ...]:
    """DNS names that the leaf carries: both Services, in full and short forms. Never empty."""
    return tuple(
        f"{release}-{part}.{namespace}{suffix}"
        for part in ("webhook", "controller")
        for suffix in (".svc", "", ".svc.cluster.local")
    )


def bundle(data: Mapping[str, bytes]) -> bytes:
    """CA certificates (PEM) to trust; what belongs into `caBundle` and into sidecars. Raises KeyError."""
    return data[CA_BUNDLE]


def plan(
    data: Mapping[str, bytes] | None,
    *,
    now: datetime,
    names: Sequence[str],
    published: bytes | None,
    rotation: Rotation = Rotation(),
) -> dict[str, bytes] | None:
    """Say what the Secret is to hold; None when it is right as it is.

    `data`: what it holds now (decoded), None if it does not exist. `now`: timezone-aware. `names`: DNS names of the
    leaf (see `server_names`). `published`: the caBundle (PEM) that the webhook configuration carries now; b"" when it
    carries none, None when there is no such configuration (then nobody waits for it). Damaged data is replaced, never
    an exception. Call it again after each change: one call makes one step.
    """
    raise NotImplementedError
