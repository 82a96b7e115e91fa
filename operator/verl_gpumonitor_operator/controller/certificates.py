# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the certificates of webhook and report server: applies `certs.plan`, and publishes the CA to the API server.

Only the holder of the Lease runs this. A conflict means that somebody else wrote; the next round reads what is there.
Of the two Secrets the one with the CA's keys is written first and read last (see `certs`): what was read can then be
one write ahead in it, as after a crash, and never behind.
"""

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.kube.client import KubeClient, object_path
from verl_gpumonitor_operator.kube.errors import ForbiddenError, KubeError, NotFoundError

from .documents import SecretData, SecretDocument

logger = logging.getLogger(__name__)

ROUND_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 2.0
MAX_STEPS: Final = 5
"""Steps of the plan in one round; each is one write."""


class _ClientConfig(msgspec.Struct, frozen=True, rename="camel"):
    ca_bundle: str = ""


class _Webhook(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    client_config: _ClientConfig = _ClientConfig()


class _Configuration(msgspec.Struct, frozen=True):
    webhooks: list[_Webhook] = []


class CaPublisher:
    """Reads and patches `caBundle` of our MutatingWebhookConfiguration."""

    def __init__(self, client: KubeClient, *, name: str) -> None:
        self._client = client
        self._path = object_path("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", name=name)

    async def published(self) -> bytes | None:
        """Return the bundle (PEM) that all entries carry; b"" where one has none or another. None: no configuration.

        Raises KubeError.
        """
        bundles = await self._bundles()
        if bundles is None:
            return None
        return bundles[0][1] if bundles and len({bundle for _, bundle in bundles}) == 1 else b""

    async def publish(self, bundle: bytes) -> bool:
        """Give all entries this bundle. False if they have it, or there is no configuration. Raises KubeError."""
        operations: list[Mapping[str, Any]] = []
        for number, (name, known) in enumerate(await self._bundles() or ()):
            if known == bundle:
                continue
            root = f"/webhooks/{number}"
            encoded = base64.b64encode(bundle).decode()
            operations += [
                {"op": "test", "path": f"{root}/name", "value": name},
                {"op": "add", "path": f"{root}/clientConfig/caBundle", "value": encoded},
            ]
        if operations:
            await self._client.json_patch(self._path, operations)
        return bool(operations)

    async def _bundles(self) -> list[tuple[str, bytes]] | None:
        try:
            found = msgspec.json.decode(await self._client.get(self._path), type=_Configuration)
        except NotFoundError:
            return None
        return [(webhook.name, _decoded(webhook.client_config.ca_bundle)) for webhook in found.webhooks]


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


@dataclass(kw_only=True, slots=True)
class CertificateState:
    """For metrics."""

    failures: int = 0
    changes: int = 0
    last_success_at: float | None = None


class CertificateKeeper:
    """Makes, renews and publishes certificates. A `CaBundle`. Run `run` as a task."""

    def __init__(
        self,
        *,
        authority: SecretDocument,
        served: SecretDocument,
        publisher: CaPublisher,
        names: tuple[str, ...],
        load_leaf: Callable[[Mapping[str, bytes]], object],
        now: Callable[[], datetime],
        rotation: certs.Rotation = certs.DEFAULT_ROTATION,
    ) -> None:
        self._authority = authority
        self._served = served
        self._publisher = publisher
        self._names = names
        self._load_leaf = load_leaf
        self._now = now
        self._rotation = rotation
        self._pem: str | None = None
        self._refused = False
        self.state = CertificateState()

    @property
    def pem(self) -> str | None:
        """The bundle that sidecars are to trust; None before certificates were made."""
        return self._pem

    async def run(self) -> None:
        """Keep the certificates for ever."""
        told: str | None = None
        while True:
            try:
                await self.round()
                told = None
                wait = ROUND_SECONDS
            except (KubeError, msgspec.DecodeError, ValueError) as error:
                self.state.failures += 1
                wait = RETRY_SECONDS if self._pem is None else ROUND_SECONDS / 3
                if str(error) != told:
                    logger.warning("certificates could not be kept, trying again", extra={"error": str(error)})
                told = str(error)
            await asyncio.sleep(wait)

    async def round(self) -> None:
        """Do what is due now. Raises KubeError; ValueError for a leaf that cannot be served."""
        for _ in range(MAX_STEPS):
            if not await self._step():
                break
        self.state.last_success_at = self._now().timestamp()

    async def _step(self) -> bool:
        """Do one step of the plan, or what a step before left undone. False if all is as it should be."""
        served = await self._served.load()
        authority = await self._authority.load()
        held = certs.joined(authority=_data(authority), served=_data(served))
        # A next CA that is not served yet has been heard of by nobody, whatever caBundle says.
        is_served = held.get(certs.CA_BUNDLE) == _data(served).get(certs.CA_BUNDLE)
        published = await self._published() if is_served else b""
        planned = certs.plan(held, now=self._now(), names=self._names, published=published, rotation=self._rotation)
        wanted = held if planned is None else planned
        changed = await self._write(self._authority, authority, certs.authority_part(wanted))
        changed = await self._write(self._served, served, certs.served_part(wanted)) or changed
        if changed:
            self.state.changes += 1
            logger.info("certificates were changed")
        await self._use(wanted)
        return changed

    async def _write(self, document: SecretDocument, found: SecretData | None, wanted: Mapping[str, bytes]) -> bool:
        """Let a Secret hold this, under the version that was read. False if it does."""
        if found is not None and certs.known_part(found.data) == wanted:
            return False
        await document.save(wanted, resource_version=found.resource_version if found else None)
        return True

    async def _published(self) -> bytes | None:
        try:
            return await self._publisher.published()
        except ForbiddenError:
            # Without that right nobody waits for us; whoever injects the CA (cert-manager) has to see to it.
            return None

    async def _use(self, data: Mapping[str, bytes]) -> None:
        bundle = certs.bundle(data)
        self._pem = bundle.decode(errors="replace")
        self._load_leaf(data)
        try:
            if await self._publisher.publish(bundle):
                logger.info("caBundle was published")
            self._refused = False
        except ForbiddenError as error:
            if not self._refused:
                logger.warning("caBundle may not be patched", extra={"error": str(error)})
            self._refused = True


def _data(found: SecretData | None) -> Mapping[str, bytes]:
    return found.data if found else {}
