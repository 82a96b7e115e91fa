# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A local picture of one list, kept by list and watch for as long as the process lives.

A watch alone is not enough: what is deleted while it is away is never told. So each list is compared with what was
known, and what is missing in it is reported as gone. Bookmarks show that a silent stream is alive.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from .client import KubeClient, Query
from .errors import ExpiredError, KubeError, TooManyRequestsError, classify

CHUNK: Final = 500
WATCH_SECONDS: Final = 300
"""The server ends each watch after this time, so that no stream lives for ever."""
INACTIVITY_SECONDS: Final = 120.0
"""The server sends a bookmark about each minute; a stream that is silent for twice as long is dead."""
MAX_RESUMED: Final = 3
"""A watch that breaks is taken up from where it was, so often in a row; then it is time for a list. A server that asks
for patience is asked for the watch alone, however often: a list would cost it more."""
STEADY_SECONDS: Final = 10.0
"""A watch that lived this long was well, though it was cut, as some proxies do each minute: it is taken up soon."""
MAX_PAUSE_SECONDS: Final = 30.0
SHORTEST_WATCH_SECONDS: Final = 1.0

UNREADABLE: Final = (msgspec.DecodeError, RecursionError)
"""What reading an answer may raise. A custom resource may keep fields that no schema bounds, nested as deep as the API
server takes them, which is deeper than Python reads: that must end one list, never the process."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
logger = logging.getLogger(__name__)


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """`metadata` of a list, or of a bookmark's object."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _RawList(msgspec.Struct, frozen=True):
    metadata: ListMeta = ListMeta()
    items: list[msgspec.Raw] | None = None


class _RawEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: ListMeta = ListMeta()


class _ErrorStatus(msgspec.Struct, frozen=True):
    code: int = 500
    message: str = ""
    reason: str = ""


_list_decoder = msgspec.json.Decoder(_RawList)
_event_decoder = msgspec.json.Decoder(_RawEvent)
_bookmark_decoder = msgspec.json.Decoder(_Bookmark)
_error_decoder = msgspec.json.Decoder(_ErrorStatus)


class Mirror(Protocol[T_contra]):
    """Who wants to know. `uid` of an item tells it from another of the same name."""

    def seen(self, item: T_contra) -> None:
        """Take an item that is new, changed, or listed again."""

    def gone(self, item: T_contra) -> None:
        """Forget an item, in the form in which it was last seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded(Generic[T]):
    """An item with what the reflector itself must know of it."""

    uid: str
    resource_version: str
    item: T


@dataclass(kw_only=True, slots=True)
class ReflectorState:
    """For metrics and readiness."""

    synced: bool = False
    """The first list has come in whole."""
    lists: int = 0
    failures: int = 0
    last_event_at: float | None = None
    """Loop time of the last line or list."""
    last_error: str | None = None


async def list_all(
    client: KubeClient, path: str, query: Query | None = None
) -> AsyncGenerator[tuple[list[msgspec.Raw], str], None]:
    """Yield a list chunk by chunk, each with the list's resource version. Raises KubeError.

    ExpiredError in the middle (the snapshot is older than the server's history) means: begin again.
    """
    continue_token = ""
    while True:
        chunk: dict[str, str | int | bool] = {**(query or {}), "limit": CHUNK}
        if continue_token:
            chunk["continue"] = continue_token
        answer = _list_decoder.decode(await client.get(path, chunk))
        yield answer.items or [], answer.metadata.resource_version
        continue_token = answer.metadata.continue_
        if not continue_token:
            return


def hand_over(take: Callable[[T], None], item: T, **keys: str) -> None:
    """Give an object to whoever takes it. A fault over it is logged, with these keys, and ends nothing."""
    try:
        take(item)
    except Exception:
        # A fault of ours over one object, which anybody may have written, must not end the work for all others.
        logger.exception("object cannot be taken, left out", extra=keys)


@dataclass(kw_only=True)
class Reflector(Generic[T]):
    """Keeps a mirror of one list up to date. `run` never returns and never raises but for cancellation."""

    client: KubeClient
    path: str
    query: Query
    decode: Callable[[msgspec.Raw], Decoded[T] | None]
    """Read one item; None leaves it out. May raise one of `UNREADABLE`: that item is left out."""
    mirror: Mirror[T]
    state: ReflectorState = field(default_factory=ReflectorState)
    _known: dict[str, T] = field(default_factory=dict)
    _version: str | None = None
    """Resource version from which to go on; None: list anew."""

    async def run(self) -> None:
        """List, watch, and begin again after each failure, ever slower up to 30 s."""
        pause, resumed = 0.0, 0
        while True:
            watched_since: float | None = None
            try:
                if self._version is None:
                    self._version, resumed = await self._list(), 0
                watched_since = self._now()
                await self._watch()
                pause, resumed = 0.0, 0
                continue
            except (KubeError, *UNREADABLE) as error:
                # A list that works says nothing of the watch after it: were the pauses short again with each, a server
                # that refuses watches would be asked for the whole list each second.
                if watched_since is not None and self._now() - watched_since >= STEADY_SECONDS:
                    pause = 0.0
                    # One in which nothing was said may be one in which nothing can be said.
                    resumed = 0 if (self.state.last_event_at or 0.0) > watched_since else resumed
                resumed += not isinstance(error, TooManyRequestsError)
                if resumed > MAX_RESUMED or not (isinstance(error, KubeError) and error.transient):
                    self._version = None
                pause = self._failed(error, pause)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, no secret

    def _failed(self, error: Exception, pause: float) -> float:
        """Count and log a failure. Returns the pause after it; `pause`: the one before."""
        text = str(error)
        if isinstance(error, ExpiredError):
            logger.info("list is too old, listing again", extra={"path": self.path})
        else:
            self.state.failures += 1
            if text != self.state.last_error:
                logger.warning("watch failed, trying again", extra={"path": self.path, "error": text})
            self.state.last_error = text
        asked = error.retry_after_seconds if isinstance(error, KubeError) else None
        return min(MAX_PAUSE_SECONDS, max(0.5, pause * 2, asked or 0.0))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _list(self) -> str:
        seen: set[str] = set()
        version = ""
        async with aclosing(list_all(self.client, self.path, self.query)) as chunks:
            async for items, version in chunks:  # noqa: B007 - the last one is returned
                for number, raw in enumerate(items):
                    decoded = self._decode(raw)
                    if decoded is not None:
                        seen.add(decoded.uid)
                        self._upsert(decoded)
                    if number % 100 == 99:
                        await asyncio.sleep(0)
        self._forget(uid for uid in self._known.keys() - seen)
        self.state.synced = True
        self.state.lists += 1
        self.state.last_error = None
        self._touch()
        return version

    async def _watch(self) -> None:
        """Follow one watch to its end, which the server makes after `WATCH_SECONDS`."""
        query: dict[str, str | int | bool] = {
            **self.query,
            "watch": True,
            "allowWatchBookmarks": True,
            "resourceVersion": self._version or "",
            "timeoutSeconds": WATCH_SECONDS,
        }
        began = self._now()
        async with self.client.stream(self.path, query, inactivity_seconds=INACTIVITY_SECONDS) as lines:
            async for line in lines:
                self._touch()
                self.state.last_error = None
                self._version = self._apply(_event_decoder.decode(line)) or self._version
        # A server that is going down may end each stream at once.
        if self._now() - began < SHORTEST_WATCH_SECONDS:
            await asyncio.sleep(SHORTEST_WATCH_SECONDS)

    def _apply(self, event: _RawEvent) -> str | None:
        """Take one event; returns the resource version to go on from."""
        if event.type == "BOOKMARK":
            return _bookmark_decoder.decode(event.object).metadata.resource_version
        if event.type == "ERROR":
            status = _error_decoder.decode(event.object)
            raise classify(max(400, status.code), status.message, reason=status.reason)
        decoded = self._decode(event.object)
        if decoded is None:
            return None
        if event.type == "DELETED":
            self._known.setdefault(decoded.uid, decoded.item)
            self._forget([decoded.uid])
        else:
            self._upsert(decoded)
        return decoded.resource_version

    def _decode(self, raw: msgspec.Raw) -> Decoded[T] | None:
        try:
            return self.decode(raw)
        except UNREADABLE as error:
            logger.warning("object cannot be read, left out", extra={"path": self.path, "error": str(error)})
            return None

    def _upsert(self, decoded: Decoded[T]) -> None:
        self._known[decoded.uid] = decoded.item
        hand_over(self.mirror.seen, decoded.item, path=self.path)

    def _forget(self, uids: Iterable[str]) -> None:
        for uid in list(uids):
            item = self._known.pop(uid, None)
            if item is not None:
                hand_over(self.mirror.gone, item, path=self.path)

    def _touch(self) -> None:
        self.state.last_event_at = self._now()
