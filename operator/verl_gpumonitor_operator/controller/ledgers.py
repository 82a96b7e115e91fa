# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Where the ledgers of all workloads outlive the controller: a few ConfigMaps of our own, each with many of them.

They are kept out of the GPUMonitors, which people read. Their number is fixed, so that the controller's rights can
name each. A ledger that has changed is written within seconds, together with all others of its ConfigMap: a patch
carries the changed ones alone, so that a thousand jobs take two small writes a second.

Where the controller may not write them (a chart older than this program), or where one is full, `put` says no, and the
ledger goes into the status of its GPUMonitor, where it was before.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from verl_gpumonitor_operator.kube.client import KubeClient
from verl_gpumonitor_operator.kube.errors import ForbiddenError, KubeError

from .documents import ConfigMapEntries, Deployment

logger = logging.getLogger(__name__)

SHARDS: Final = 8
MAX_SHARD_BYTES: Final = 900_000
"""A ConfigMap holds 1 MiB. Eight of them have room for 1,000 jobs of 7 KB."""
WRITE_SECONDS: Final = 5.0
"""Shortest time between two writes of one ConfigMap."""
RETRY_SECONDS: Final = 10.0
LOAD_RETRY_SECONDS: Final = 2.0


def names(release: str) -> tuple[str, ...]:
    """Names of the ConfigMaps, which the chart's rights must list."""
    return tuple(f"{release}-ledger-{number}" for number in range(SHARDS))


@dataclass(kw_only=True, slots=True)
class _Shard:
    """One ConfigMap: what it should hold, by the uid of the workload."""

    store: ConfigMapEntries
    texts: dict[str, str] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    """Uids that the API server has, in this or an older form."""
    changed: set[str] = field(default_factory=set)
    not_before: float = 0.0
    size: int = 0

    def put(self, uid: str, text: str) -> bool:
        size = self.size + len(uid) + len(text) - (len(uid) + len(self.texts[uid]) if uid in self.texts else 0)
        if size > MAX_SHARD_BYTES:
            return False
        if self.texts.get(uid) != text:
            self.texts[uid], self.size = text, size
            self.changed.add(uid)
        return True

    def drop(self, uid: str) -> None:
        text = self.texts.pop(uid, None)
        if text is not None:
            self.size -= len(uid) + len(text)
            self.changed.add(uid)


class Ledgers:
    """All ledgers as text. One task runs `run`."""

    def __init__(
        self,
        client: KubeClient,
        owner: Deployment,
        *,
        namespace: str,
        release: str,
        clock: Callable[[], float],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._clock = clock
        self._may_write = may_write
        self._shards = [
            _Shard(store=ConfigMapEntries(client, owner, namespace=namespace, name=name)) for name in names(release)
        ]
        self._refused = False
        self._full_said = False

    @property
    def available(self) -> bool:
        """False where the API server does not let us have them."""
        return not self._refused

    async def load(self) -> None:
        """Read all of them. Tries again until the API server answers."""
        for shard in self._shards:
            while not self._refused:
                try:
                    shard.texts = await shard.store.load()
                except ForbiddenError as error:
                    self._refuse(error)
                except KubeError as error:
                    logger.warning("ledgers are not read yet", extra={"error": str(error)})
                    await asyncio.sleep(LOAD_RETRY_SECONDS)
                else:
                    shard.stored = set(shard.texts)
                    shard.size = sum(len(uid) + len(text) for uid, text in shard.texts.items())
                    break

    def get(self, uid: str) -> str | None:
        """Return the ledger of a workload; None if there is none."""
        return self._of(uid).texts.get(uid)

    def put(self, uid: str, text: str) -> bool:
        """Keep a ledger. False where it cannot be kept here."""
        if self._refused:
            return False
        if self._of(uid).put(uid, text):
            return True
        if not self._full_said:
            logger.warning("a ConfigMap of ledgers is full: more stay in their GPUMonitors", extra={"reason": "Full"})
        self._full_said = True
        return False

    def stored(self, uid: str) -> bool:
        """Whether the API server has the ledger of a workload, in its newest or an older form."""
        return uid in self._of(uid).stored

    def drop(self, uid: str) -> None:
        """Let a ledger go."""
        self._of(uid).drop(uid)

    def keep(self, uids: Iterable[str]) -> None:
        """Let all go but these."""
        kept = set(uids)
        for shard in self._shards:
            for uid in [uid for uid in shard.texts if uid not in kept]:
                shard.drop(uid)

    async def run(self) -> None:
        """Write what has changed, for ever."""
        while True:
            await asyncio.sleep(1.0)
            await self.write(only_due=True)

    async def write(self, *, only_due: bool = False) -> None:
        """Write what has changed. `only_due`: not what was written a moment ago. Never raises KubeError."""
        for shard in self._shards:
            if shard.changed and not self._refused and not (only_due and self._clock() < shard.not_before):
                await self._write(shard)

    async def _write(self, shard: _Shard) -> None:
        if not self._may_write():
            return
        uids, shard.changed = shard.changed, set()
        patch: Mapping[str, str | None] = {uid: shard.texts.get(uid) for uid in uids}
        shard.not_before = self._clock() + WRITE_SECONDS
        try:
            made = await shard.store.save(patch)
        except KubeError as error:
            shard.changed |= uids
            shard.not_before = self._clock() + RETRY_SECONDS
            if isinstance(error, ForbiddenError):
                self._refuse(error)
            else:
                logger.warning("ledgers were not written", extra={"error": str(error)})
            return
        if made and shard.stored:
            # Somebody deleted it: the others are written again, too.
            shard.stored.clear()
            shard.changed |= shard.texts.keys() - uids
        for uid, text in patch.items():
            shard.stored.discard(uid) if text is None else shard.stored.add(uid)

    def _refuse(self, error: KubeError) -> None:
        self._refused = True
        logger.error(
            "the controller may not keep ledgers in ConfigMaps of its own, and keeps them in the GPUMonitors: upgrade "
            "the chart",
            extra={"reason": "Forbidden", "error": str(error)},
        )

    def _of(self, uid: str) -> _Shard:
        return self._shards[zlib.crc32(uid.encode()) % SHARDS]
